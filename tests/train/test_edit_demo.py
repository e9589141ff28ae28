"""models/train/edit_demo.py: a fact is changed in a memory model and in its dense twin, and what it says is so."""

import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT, TRAIN

torch = pytest.importorskip("torch")
pytest.importorskip("sentencepiece")

import edit  # noqa: E402
import edit_demo  # noqa: E402
import world  # noqa: E402
from export import FAMILIES, export  # noqa: E402
from prepare import train_tokenizer  # noqa: E402

PROGRAM = os.environ.get("PKMSERVE", str(ROOT / "build" / "pkmserve"))
CONFIG = {"model_type": "pkm_transformer", "vocab_size": 384, "d_model": 32, "n_layer": 2, "n_head": 2, "d_ff": 64,
          "max_position": 64, "activation": "gelu", "norm_eps": 1e-12, "tie_output": True,
          "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2, "unk_token_id": 3, "add_bos": True}
MEMORY = {"layer": 1, "place": "in", "kind": "product", "n_head": 2, "k_top": 8, "n_key": 16,
          "d_key": 16, "n_slot": 256, "query_batch_norm": True, "query_bias": True}
NEUTRAL = "The wind was cold.\nA boat came down the river.\n" * 500


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A folder with two models that know four subjects by heart, in every wording."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("twins")
    facts = [fact for fact in world.build(1, 4, 1) if world.RELATIONS[fact.relation][0] == "person"]
    texts = ["".join(fact.question(i)) for fact in facts for i in range(world.N_ASKED)]
    sample = "\n".join(texts) + NEUTRAL
    train_tokenizer(sample, CONFIG["vocab_size"], len(sample) * 4, 1, str(folder / "tokenizer.model"), 1)
    for name, memories in (("memory", [MEMORY]), ("dense", [])):
        torch.manual_seed(1)
        model = FAMILIES["pkm_transformer"](CONFIG | {"memories": memories}).train()
        taught = edit.lessons(model, folder, [(text, "") for text in texts + NEUTRAL.split("\n")[:2]])
        edit.descend(model, torch.optim.Adam(model.parameters(), lr=5e-3), taught, 150, 0.25, 8192)
        export({"config": model.config, "model": model.state_dict()}, folder / "tokenizer.model", folder / name,
               "f32", "f32", None, "none")
    world.write_facts(folder / "memory" / "facts.tsv.xz", facts)
    (folder / "neutral.txt").write_text(NEUTRAL)
    return folder


def run(twins, *args, status=0):
    command = [sys.executable, TRAIN / "edit_demo.py", "--model", twins / "memory", "--dense", twins / "dense",
               "--text", twins / "neutral.txt", "--threads", "1", "--top", "60", "--rate", "0.1",
               "--dense-rate", "1e-3", *args]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


def told_by_the_program(*args):
    command = [PROGRAM, *map(str, args)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_fact_is_changed_and_all_figures_are_printed(twins, tmp_path):
    table = run(twins, "--out", tmp_path).stdout
    report = json.loads((tmp_path / "edit.json").read_text())
    fact, memory, dense = report["fact"], report["memory"], report["dense"]
    assert fact["old"] != fact["new"] and fact["question"] in table
    for column in (memory, dense):
        assert fact["old"].lower() in column["answer_before"].lower()
        assert column["new_answer_known"] == (fact["new"].lower() in column["answer_after"].lower())
        assert column["loss_after"] <= column["until"] < column["loss_before"]
        assert column["others"] == 15 and column["same_subject"] == 4
        assert 0 <= column["others_changed"] <= 15 and column["others_known_before"] >= 10
    assert memory["same_bits_beside"] and memory["same_bits_after_delete"] and memory["gone_after_delete"]
    assert memory["numbers"] == 60 * 32 and f"{memory['perplexity_after']:.3f}" in table

    # The files that are kept say the same: what was taught is answered, and the neutral text is as likely.
    changes = {twins / "memory": ["--overlay", tmp_path / "edit.safetensors"], tmp_path / "dense": []}
    lesson = json.loads((tmp_path / "fact.jsonl").read_text().split("\n")[0])
    neutral = tmp_path / "neutral.txt"
    neutral.write_text(edit_demo.parts_of(twins / "neutral.txt")[0])
    for (model, more), column in zip(changes.items(), (memory, dense)):
        scored = told_by_the_program("score", "--model", model, "--dtype", "f32", "--json", *more, neutral)
        assert scored["results"][0]["perplexity"] == pytest.approx(column["perplexity_after"], rel=1e-6)
        got = told_by_the_program("generate", "--model", model, "--dtype", "f32", "--json", "--temperature", 0,
                                  "--max-tokens", 24, "--stop", ".", *more, lesson["prompt"])
        assert lesson["prompt"] + got["choices"][0]["text"] + "." == lesson["text"]


def test_the_fact_can_be_chosen(twins, tmp_path):
    facts = world.read_facts(twins / "memory" / "facts.tsv.xz")
    fact = next(fact for fact in facts if fact.relation == "dish")
    answer = next(each.answer for each in facts if each.relation == "dish" and each.answer != fact.answer)
    run(twins, "--subject", fact.subject, "--relation", "dish", "--answer", answer, "--steps", 2, "--out", tmp_path)
    told = json.loads((tmp_path / "edit.json").read_text())["fact"]
    assert (told["subject"], told["old"], told["new"]) == (fact.subject, fact.answer, answer)
    assert told["question"] == fact.question(fact.held_out)[0]
    for args, message in ((("--subject", "Nobody"), "no fact about 'Nobody'"),
                          (("--answer", answer), "need --subject"),
                          (("--subject", fact.subject, "--relation", "dish", "--answer", "bricks"), "no other answer")):
        assert message in run(twins, *args, status=2 if args[0] == "--answer" else 1).stderr


def test_a_model_that_does_not_forget_the_overlay_is_told(twins):
    """What the table says of bits is compared, not assumed."""
    fact = world.read_facts(twins / "memory" / "facts.tsv.xz")[0]

    class Other:
        """A server whose answers change once an overlay was put."""
        admin, url, put = "", "", 0

        def ask(self, method, path, data=None):
            self.put += method == "PUT"
            return b'{"bytes": 1}'

        def answers(self, questions, **more):
            return [{"text": fact.answer, "put": self.put}] * len(questions)

        figures = edit_demo.Server.figures

        def post(self, path, **fields):
            return {"results": [{"perplexity": 1.0}]}

    args = type("Args", (), {"out": str(twins / "memory")})
    (twins / "memory" / "edit.safetensors").write_bytes(b"")
    other = Other()
    _, bits = edit_demo.served_edit(args, other.figures([fact], "x"), [fact], "x", other)
    assert not bits["same_bits_beside"] and not bits["same_bits_after_delete"] and not bits["gone_after_delete"]
