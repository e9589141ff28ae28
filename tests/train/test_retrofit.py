"""Memories that retrofit.py trains beside a random Hugging Face model: from text to served logits."""

import fcntl
import json
import lzma
import re
import shutil
import signal
import subprocess
import sys

import pytest

from conftest import ROOT, TRAIN, help_gaps

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
np = pytest.importorskip("numpy")
pytest.importorskip("requests")
sys.path.insert(0, str(ROOT / "tests" / "golden"))
import files  # noqa: E402
import golden_harness as gh  # noqa: E402
import retrofit  # noqa: E402

TEXT = "".join("%d Lanterns hang in the old mill of year %d; the river keeps the bell near house %d.\n"
               % (i, 3 * i % 89, 7 * i % 31) for i in range(400))
SMALL = ("--n-key", "8", "--k-top", "4", "--n-head", "2", "--d-key", "16", "--steps", "40", "--length", "32",
         "--batch", "8", "--rate", "1e-2", "--every", "40", "--device", "cpu")
CASES = {"after": ("--layers", "0,1", "--plus", "--d-value", "12", "--shared"),
         "beside": ("--place", "beside", "--gate", "linear"),
         "replace": ("--place", "replace", "--gate", "none", "--layers", "1")}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random Llama with a tokenizer of bytes, and a text."""
    folder = tmp_path_factory.mktemp("base")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2)).save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_what_it_trains_is_served_alike(case, base, tmp_path, capsys):
    args = retrofit.arguments([str(base), "--text", str(base / "text.txt"), "--out", str(tmp_path / "out"),
                               *CASES[case], *SMALL])
    model, memories, entries = retrofit.train(args)
    told = capsys.readouterr().out.splitlines()
    before, after = (float(told[i].split()[-1]) for i in (0, -1))
    assert after < before - 0.3, told
    done = subprocess.run([sys.executable, ROOT / "models/convert/convert.py", base, "--from", "hf", "--output",
                           tmp_path / "model", "--memory", tmp_path / "out" / "memory.safetensors",
                           "--memory-config", tmp_path / "out" / "memory.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server = gh.Server(tmp_path / "model", "--dtype", "f32")
    got = server.post("/score", {"text": TEXT[-90:], "add_bos": False, "logprobs": 0})["results"][0]["tokens"]
    server.stop()
    ids = torch.tensor([[token["id"] for token in got]])
    with torch.no_grad():
        due = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    due = due.gather(1, ids[0, 1:, None])[:, 0].numpy()
    assert len(got) == 90
    np.testing.assert_allclose([token["logprob"] for token in got[1:]], due, atol=2e-3)


def test_the_base_stays_as_it_is(base, tmp_path):
    args = retrofit.arguments([str(base), "--text", str(base / "text.txt"), "--out", str(tmp_path),
                               *SMALL, "--steps", "2"])
    model, memories, entries = retrofit.train(args)
    plain = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    kept = model.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in plain.state_dict().items())
    assert json.loads(json.dumps(entries))[0]["layer"] == 1 and len(memories) == 1


@pytest.mark.parametrize("change, said", [
    (lambda folder: (folder / "tokenizer.json").unlink(), "BASE .*: .*tokenizer"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"xx"), "BASE .*: .*header"),
    (lambda folder: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)).save_pretrained(
            folder), "its tokenizer makes id \\d+ of the text, but its vocab_size is 64"),
])
def test_a_base_that_cannot_be_read_is_named(base, tmp_path, capsys, change, said):
    shutil.copytree(base, tmp_path / "base")
    change(tmp_path / "base")
    assert re.search(said, train(capsys, tmp_path / "base", tmp_path / "out", status=1)[1])


def test_a_text_may_be_packed_and_have_other_line_ends(base, tmp_path):
    with lzma.open(tmp_path / "text.xz", "wb") as file:
        file.write(TEXT.replace("\n", "\r\n").encode())
    assert torch.equal(retrofit.read_ids(base, str(tmp_path / "text.xz")), retrofit.read_ids(base, str(base / "text.txt")))


def test_every_option_has_a_help_text(monkeypatch):
    assert help_gaps(monkeypatch, lambda: retrofit.arguments([])) == []


def command(base, out, *more):
    return [sys.executable, TRAIN / "retrofit.py", base, "--text", base / "text.txt", "--out", out, *SMALL, *more]


def train(capsys, base, out, *more, status=0):
    """-> the tensors that a run leaves, and what it said"""
    args = list(map(str, command(base, out, *more)[2:]))
    if status:
        with pytest.raises(SystemExit) as refused:
            files.run(lambda: retrofit.train(retrofit.arguments(args)))
        return None, str(refused.value) + capsys.readouterr().err
    retrofit.train(retrofit.arguments(args))
    return load_file(out / "memory.safetensors"), "".join(capsys.readouterr())


def test_a_stopped_training_keeps_what_it_has_made(base, tmp_path):
    with subprocess.Popen(command(base, tmp_path / "out", "--steps", "1000000", "--every", "3"), stdout=subprocess.PIPE,
                          text=True) as process:
        while not process.stdout.readline().startswith("step 3:"):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0 and "the same command resumes" in rest
    assert load_file(tmp_path / "out" / "memory.safetensors")["memories.0.gate"] != 0
    assert len(json.loads((tmp_path / "out" / "memory.json").read_text())["memories"]) == 1


@pytest.mark.parametrize("more, said", [
    (("--steps", "0"), "--steps is 0, but must be at least 1"),
    (("--d-key", "5"), "--d-key is 5, but must be even"),
    (("--k-top", "9"), "--k-top is 9, but --n-key is only 8"),
    (("--layers", "x"), "--layers is 'x'"),
    (("--layers", "7"), "--layers 7: ascending numbers 0 .. 1 expected"),
    (("--length", "200"), "--length is 200, but the base has 128 positions"),
    (("--text", "/none"), "/none: No such file"),
    (("--device", "abacus"), "--device abacus: "),
    (("--text", __file__.replace("test_retrofit.py", "../page/pictures/now-dark.png")), "now-dark.png: no text in UTF-8"),
    (("--rate", "1e30", "--place", "replace", "--plus"), "the gradients are no longer numbers"),
])
def test_what_cannot_work_is_named(base, tmp_path, more, said, capsys):
    assert said in train(capsys, base, tmp_path / "out", *more, status=1)[1]
    assert not (tmp_path / "out" / "last.pt").exists() and not (tmp_path / "out" / "memory.safetensors").exists()


def test_tables_learn_and_the_last_tenth_is_not_seen(base, tmp_path, monkeypatch):
    args = retrofit.arguments([str(base), "--text", str(base / "text.txt"), "--out", str(tmp_path),
                               *SMALL, "--steps", "20"])
    read, seen = retrofit.read_ids(args.base, args.text), []
    marked = torch.cat([read[:-len(read) // 10].clamp(max=250), torch.full((len(read) // 10,), 255)])
    monkeypatch.setattr(retrofit, "read_ids", lambda *_: marked)
    loss_of = retrofit.loss_of

    def watched(model, rows):
        if torch.is_grad_enabled():
            seen.append(rows)
        return loss_of(model, rows)

    monkeypatch.setattr(retrofit, "loss_of", watched)
    torch.manual_seed(args.seed)
    _, memories, _ = retrofit.train(args)
    assert len(seen) == 20 and all((rows < 255).all() for rows in seen)
    moved = memories[0].memory.values.weight
    torch.manual_seed(args.seed)
    untrained = retrofit.attach(transformers.LlamaForCausalLM.from_pretrained(base), args)[0][0].memory.values.weight
    assert (moved - untrained).abs().max() > 1e-2


class Killed(Exception):
    pass


@pytest.mark.parametrize("more", [CASES["after"], CASES["replace"]])
def test_a_killed_run_goes_on_to_the_same_memories(base, tmp_path, more, capsys, monkeypatch):
    """The one that is killed has lost the steps behind its last line, and takes them again."""
    whole, _ = train(capsys, base, tmp_path / "whole", *more, "--steps", "12", "--every", "3")
    loss_of, losses = retrofit.loss_of, []

    def killed(model, rows):
        losses.extend([1] if torch.is_grad_enabled() else [])
        if len(losses) == 9:
            raise Killed
        return loss_of(model, rows)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(retrofit, "loss_of", killed)
        train(capsys, base, tmp_path / "parts", *more, "--steps", "12", "--every", "3")
    parts, said = train(capsys, base, tmp_path / "parts", *more, "--steps", "12", "--every", "3")
    assert "last.pt at step 6\n" in said and said.count("\nstep 6:") == said.count("\nstep 9:") == 1
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    logs = [(tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("whole", "parts")]
    assert json.loads(logs[0][-1]).keys() == {"step", "loss", "valid_loss"} and logs[0][-1] == logs[1][-1]


def test_what_changed_is_refused_or_said_when_a_run_resumes(base, tmp_path, capsys):
    out, other = tmp_path / "out", tmp_path / "other"
    first, _ = train(capsys, base, out, "--steps", "2")
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "memory.safetensors").unlink()
    last, said = train(capsys, base, out, "--steps", "2", "--layers", "1")  # the layer that was meant
    assert "nothing left to train" in said and all(torch.equal(first[name], last[name]) for name in first)
    assert kept == {path.name: path.read_bytes() for path in out.iterdir()}
    shutil.copytree(base, other)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(other)
    for of, more, why in ((base, ("--n-key", "16"), "begun with --n-key 8, not 16: give that, or another --out"),
                          (base, ("--layers", "0"), "begun with --layers 1, not 0"),
                          (base, ("--gate", "linear"), "begun with --gate scalar, not linear"),
                          (base, ("--seed", "3"), "begun with --seed 0, not 3"),
                          (other, (), "beside other weights than those of BASE")):
        assert why in train(capsys, of, out, *more, status=1)[1]
        assert kept == {path.name: path.read_bytes() for path in out.iterdir()}
    (tmp_path / "text").write_text(TEXT + "More.\n")
    _, said = train(capsys, base, out, "--steps", "3", "--batch", "4", "--text", tmp_path / "text")
    assert "--batch was 8 and is 4 now" in said and "another text than the training was begun with" in said
    (out / "last.pt").write_bytes(b"PK")
    assert "last.pt: no checkpoint of retrofit.py" in train(capsys, base, out, status=1)[1]


def test_a_rate_may_be_given_anew_and_a_folder_has_one_run(base, tmp_path, capsys):
    first, _ = train(capsys, base, tmp_path, "--steps", "2")
    # Adam's steps are as long as the rate.
    last, _ = train(capsys, base, tmp_path, "--steps", "3", "--rate", "1e-9")
    assert all(torch.allclose(first[name], last[name], atol=1e-7) for name in first if "running" not in name)
    with open(tmp_path / "log.jsonl", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert "another retrofit.py is at work there" in train(capsys, base, tmp_path, status=1)[1]
