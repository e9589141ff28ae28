"""The trainer, from text to a model that pkmserve computes alike: all families, resumption, exports."""

import fcntl
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT, TRAIN, help_gaps

torch = pytest.importorskip("torch")
pytest.importorskip("sentencepiece")

import export  # noqa: E402
import prepare  # noqa: E402
import tokenizer_json  # noqa: E402
import windows  # noqa: E402

WORDS = ("the", "lamp", "of", "a", "house", "river", "and", "bell", "is", "kept", "near", "old", "mill")
TINY = {"model_type": "pkm_transformer", "d_model": 32, "n_layer": 2, "n_head": 2, "d_ff": 64,
        "max_position": 64, "activation": "gelu", "norm_eps": 1e-12, "tie_output": True,
        "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2, "unk_token_id": 3, "add_bos": True}
MEMORY = {"layer": 1, "place": "in", "kind": "product", "n_head": 2, "k_top": 4, "n_key": 8,
          "d_key": 16, "n_slot": 64, "query_batch_norm": True, "query_bias": True}
FLAT = MEMORY | {"kind": "flat", "n_slot": 8, "place": "after", "query_batch_norm": False}
PLUS = {"layer": 0, "n_head": 2, "k_top": 4, "n_key": 8, "d_key": 16, "n_slot": 64, "d_value": 24,
        "value_projection": True, "value_gate": True}
LLAMA = {key: value for key, value in TINY.items() if key != "activation"} | {
    "model_type": "memory_llama", "n_layer": 3, "rope_theta": 10000.0, "n_kv_head": 1, "norm_eps": 1e-5}
MODELS = {
    "product": TINY | {"memories": [MEMORY]},
    "flat, untied": TINY | {"memories": [FLAT], "tie_output": False},
    "memory plus": LLAMA | {"memories": [PLUS, PLUS | {"layer": 1, "values_of": 0, "output_gate": True}]},
    "bytes": {"model_type": "all_attention", "vocab_size": 256, "d_model": 32, "n_layer": 2, "n_head": 2,
              "d_ff": 0, "n_persistent": 8, "max_span": 64, "span_ramp": 8, "norm_eps": 1e-5,
              "tie_output": False, "bos_token_id": 10, "tokenizer": "byte"},
}
MODELS["bytes, tied"] = MODELS["bytes"] | {"tie_output": True}
SMALL = ("--n-tok", "16", "--batch", "4", "--warmup", "2", "--decay-start", "4", "--log-every", "2",
         "--valid-every", "3", "--valid-windows", "4", "--threads", "1", "--stream-blocks", "2",
         "--device", "cpu")


def run(script, *args, status=0):
    done = subprocess.run([sys.executable, TRAIN / script, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


def here(monkeypatch, module, *args):
    """Without the seconds that another process takes to begin."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
    module.main()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    text = "".join(" ".join(WORDS[i * j % 13] for j in range(1, 9)) + ".\n" + "\n" * (i % 5 == 0)
                   for i in range(400))
    (folder / "my.txt").write_text(text)
    (folder / "train.txt").write_text(text)
    (folder / "valid.txt").write_text(text)
    run("prepare.py", "--train", folder / "my.txt", "--blank-lines", "--vocab-size", 320, "--out", folder)
    return folder


def config_of(name, folder):
    path = folder / "my.json"
    path.write_text(json.dumps(MODELS[name]))
    return path


def train(data, out, name, *args, status=0):
    return run("train.py", "--data", data, "--out", out, "--config", config_of(name, out.parent), *SMALL, *args,
               status=status)


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_is_computed_alike_by_the_server(data, tmp_path, name):
    train(data, tmp_path / "run", name, "--total-steps", 6)
    assert (tmp_path / "run" / "curves.svg").exists()
    values = () if name.startswith("bytes") else ("--values", "int8")
    run("export.py", "--checkpoint", tmp_path / "run" / "last.pt", "--tokenizer", data / "tokenizer.model",
        "--out", tmp_path / "model", *values)
    found = run("evaluate.py", "--model", tmp_path / "model", "--text", data / "valid.txt", "--threads", 1)
    nll = json.loads(found.stdout)["nll"]
    scored = subprocess.run([os.environ["PKMSERVE"], "score", "--model", tmp_path / "model", "--dtype", "f32",
                             "--json", data / "valid.txt"], capture_output=True, text=True)
    assert scored.returncode == 0, scored.stderr  # the probe of model.sha256 was PyTorch's and has matched
    assert "# probe tolerance bf16" in (tmp_path / "model" / "model.sha256").read_text()
    assert -json.loads(scored.stdout)["results"][0]["sum_logprob"] == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("name", ["product", "bytes"])
def test_a_stopped_run_goes_on_to_the_same_weights(data, tmp_path, name):
    train(data, tmp_path / "whole", name, "--total-steps", 6)
    train(data, tmp_path / "parts", name, "--total-steps", 3)
    resumed = train(data, tmp_path / "parts", name, "--total-steps", 6)
    assert "resuming" in resumed.stderr and "at step 3" in resumed.stderr
    whole, parts = (torch.load(tmp_path / folder / "last.pt")["model"] for folder in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for key in whole:
        assert torch.equal(whole[key], parts[key]), key


def weights(folder):
    return torch.load(folder / "last.pt")["model"]


def test_rates_and_weight_decay_may_be_given_anew(data, tmp_path):
    train(data, tmp_path / "run", "product", "--total-steps", 2)
    before = weights(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "decayed")
    train(data, tmp_path / "run", "product", "--total-steps", 4, "--value-lr", 0)
    after = weights(tmp_path / "run")
    assert torch.equal(before["memories.1_in.values.weight"], after["memories.1_in.values.weight"])
    train(data, tmp_path / "decayed", "product", "--total-steps", 4, "--value-lr", 0, "--weight-decay", 0)
    linear = "attentions.0.q_lin.weight"
    assert not torch.equal(before[linear], after[linear])
    assert not torch.equal(after[linear], weights(tmp_path / "decayed")[linear])


@pytest.mark.parametrize("name", ["product", "bytes"])
def test_a_model_directory_can_be_trained_on(data, tmp_path, name):
    train(data, tmp_path / "first", name, "--total-steps", 6)
    run("export.py", "--checkpoint", tmp_path / "first" / "last.pt", "--tokenizer", data / "tokenizer.model",
        "--out", tmp_path / "model", "--dtype", "f32")
    if name != "bytes":
        run("prepare.py", "--train", data / "my.txt", "--tokenizer", tmp_path / "model" / "tokenizer.model",
            "--out", tmp_path / "data")
    text = data if name == "bytes" else tmp_path / "data"
    begun = run("train.py", "--data", text, "--init", tmp_path / "model", "--out", tmp_path / "second",
                *SMALL, "--total-steps", 0)
    assert "saved" in begun.stderr
    first, second = (torch.load(tmp_path / folder / "last.pt")["model"] for folder in ("first", "second"))
    for key in first:
        assert key.endswith("num_batches_tracked") or torch.equal(first[key], second[key]), key


def test_another_tokenizer_or_configuration_than_the_models_is_refused(data, tmp_path):
    train(data, tmp_path / "first", "product", "--total-steps", 2)
    run("export.py", "--checkpoint", tmp_path / "first" / "last.pt", "--tokenizer", data / "tokenizer.model",
        "--out", tmp_path / "model", "--dtype", "f32")
    refused = train(data, tmp_path / "second", "product", "--init", tmp_path / "model", "--dense", status=1)
    assert "config.json describes another model" in refused.stderr and "Traceback" not in refused.stderr
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"another")
    refused = train(data, tmp_path / "third", "product", "--init", tmp_path / "model", status=1)
    assert "tokenizer.model differ" in refused.stderr and "Traceback" not in refused.stderr


def test_sigterm_saves_and_minutes_end_a_run(data, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, TRAIN / "train.py", "--data", data, "--out", out, "--config",
               config_of("product", tmp_path), *SMALL, "--total-steps", "1000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not process.stderr.readline().startswith("step 3 "):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0 and "the same command resumes" in rest
    step = torch.load(out / "last.pt")["step"]
    assert step >= 3
    train(data, out, "product", "--minutes", "0.02")
    assert torch.load(out / "last.pt")["step"] > step


def test_a_checkpoint_is_not_lost_to_a_run_that_fails(data, tmp_path):
    out = tmp_path / "run"
    train(data, out, "product", "--total-steps", 2)
    before = (out / "last.pt").read_bytes()
    failed = train(data, out, "product", "--total-steps", 20, "--lr", 1e30, "--warmup", 1, status=1)
    assert "no longer numbers" in failed.stderr and "is still what it was" in failed.stderr
    assert (out / "last.pt").read_bytes() == before
    limit = (len(before) // 2, resource.RLIM_INFINITY)
    command = [sys.executable, TRAIN / "train.py", "--data", data, "--out", out, "--config",
               config_of("product", tmp_path), *SMALL, "--total-steps", "4"]
    full = subprocess.run(command, capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert full.returncode == 1 and "step 4 could not be saved" in full.stderr and "Traceback" not in full.stderr
    assert (out / "last.pt").read_bytes() == before and not (out / "last.pt.part").exists()


def test_an_export_takes_the_place_of_a_model_at_once(data, tmp_path, monkeypatch, capsys):
    """Who has mapped the old weights, as a server has, goes on reading them."""
    train(data, tmp_path / "run", "product", "--total-steps", 2)
    out = tmp_path / "model"
    args = ("--checkpoint", tmp_path / "run" / "last.pt", "--out", out, "--program", "none", "--tokenizer")
    run("export.py", *args, data / "tokenizer.model")
    with open(out / "model.safetensors", "rb") as mapped:
        run("export.py", *args, data / "tokenizer.model", "--dtype", "f32")
        assert os.fstat(mapped.fileno()).st_ino != (out / "model.safetensors").stat().st_ino
    run("export.py", *args, data / "tokenizer.model", "--temperature", 0.5, "--top-k", 40)
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.5, "top_k": 40}
    here(monkeypatch, export, *args, data / "tokenizer.model")
    assert "generation_config.json is kept as it was" in capsys.readouterr().err
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert not any(name.endswith(".part") for name in before)
    for more, said in (((ROOT / "models" / "demo" / "tokenizer.model",), "4096 pieces, but the model's vocab_size is"),
                       ((tmp_path / "none",), "none: No such file"),
                       ((data / "tokenizer.model", "--temperature", 3), "--temperature is 3.0, but must be at most 2")):
        refused = run("export.py", *args, *more, status=2 if "--temperature" in more else 1)
        assert said in refused.stderr and "Traceback" not in refused.stderr
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"languages": ["en"]}))
    refused = run("evaluate.py", "--model", out, "--text", data / "my.txt", status=1)
    assert "languages is not computed here" in refused.stderr


def test_another_tokenizer_of_as_many_pieces_is_refused(data, tmp_path, monkeypatch, capsys):
    other, last = tmp_path / "other", tmp_path / "run" / "last.pt"
    shutil.copytree(data, other)
    (other / "tokenizer.model").unlink()
    (other / "my.txt").write_text((data / "my.txt").read_text().translate(str.maketrans("lm", "ml")))
    here(monkeypatch, prepare, "--train", other / "my.txt", "--blank-lines", "--vocab-size", 320, "--out", other)
    metas = [json.loads((folder / "meta.json").read_text()) for folder in (data, other)]
    assert metas[0]["vocab_size"] == metas[1]["vocab_size"]
    train(data, tmp_path / "run", "product", "--total-steps", 2)
    resumed = train(other, tmp_path / "run", "product", "--total-steps", 3, status=1)
    assert f"{other}: its tokenizer.model is another one" in resumed.stderr
    args = ("--out", tmp_path / "model", "--program", "none", "--tokenizer", other / "tokenizer.model", "--checkpoint", last)
    with pytest.raises(SystemExit) as refused:
        here(monkeypatch, export, *args)
    for said in (other / "tokenizer.model", f"{last} was trained with another", f"were in {data}",
                 metas[0]["tokenizer_sha256"]):
        assert str(said) in str(refused.value)
    assert not (tmp_path / "model").exists()
    with pytest.raises(SystemExit, match="was trained with another"):
        export.load_checkpoint(last, other / "tokenizer.model")
    state = torch.load(last)
    assert state["task"].pop("tokenizer") == metas[0]["tokenizer_sha256"]
    torch.save(state, last)  # as of before that was there
    capsys.readouterr()
    here(monkeypatch, export, *args)
    assert f"{last} does not say with which tokenizer it was trained" in capsys.readouterr().err


@pytest.mark.parametrize("meta, said", [("", "a JSON object is expected"), ("[" * 100000, "a JSON object is expected"),
                                        ("[]", "a JSON object is expected"),
                                        ('{"vocab_size": "2048"}', "vocab_size is expected")])
def test_what_is_no_description_of_tokens_is_named(tmp_path, meta, said):
    assert windows.read_meta(tmp_path) == {} and windows.tokenizer_hash(tmp_path) is None
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(SystemExit, match="meta.json: " + said):
        windows.read_meta(tmp_path)


@pytest.mark.parametrize("change, said", [
    (lambda config: None, "config.json: a JSON object is expected"),
    (lambda config: [config], "config.json: a JSON object is expected"),
    (lambda config: config | {"model_type": "other"}, 'config.json: model_type is "other"'),
    (lambda config: {key: config[key] for key in config if key != "d_model"}, "config.json: 'd_model' is missing"),
    (lambda config: config | {"model_type": ["pkm_transformer"]}, 'config.json: model_type is '),
    (lambda config: config | {"n_layer": "12"}, 'config.json: n_layer is "12", but must be a whole number'),
    (lambda config: config | {"memories": 3}, "config.json: memories is 3, but must be a list"),
    (lambda config: config | {"memories": [3]}, r"config.json: memories\[0\] must be an object"),
    (lambda config: config | {"memories": [config["memories"][0] | {"k_top": None}]},
     r"config.json: memories\[0\].k_top is null, but must be a whole number"),
    (lambda config: config | {"d_ff": 2 * config["d_ff"]}, "tensor 'ffns.0.lin1.bias' is .*, but config.json makes it"),
    (lambda config: config | {"n_layer": 11}, "missing .*, unexpected .*ffns.11"),
])
def test_a_model_directory_that_cannot_be_read_is_named(tmp_path, change, said):
    demo = ROOT / "models" / "demo"
    for name in ("model.safetensors", "tokenizer.model"):
        (tmp_path / name).symlink_to(demo / name)
    (tmp_path / "config.json").write_text(json.dumps(change(json.loads((demo / "config.json").read_text()))))
    with pytest.raises(SystemExit, match=said):
        export.load_model(tmp_path)
    if "JSON object" in said:
        with pytest.raises(SystemExit, match=said):
            tokenizer_json.write(tmp_path)


def test_a_folder_has_one_run_at_a_time(data, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / "log.jsonl", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        refused = train(data, tmp_path / "run", "product", status=1)
    assert "another train.py is at work there" in refused.stderr and not (tmp_path / "run" / "last.pt").exists()


class Hostile:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("is_hostile", [False, True])
@pytest.mark.parametrize("script", ["train.py", "export.py"])
def test_what_is_no_checkpoint_is_named(data, tmp_path, script, is_hostile):
    if is_hostile:
        torch.save({"model": {}, "config": {}, "step": Hostile(str(tmp_path / "ran"))}, tmp_path / "last.pt")
    else:
        (tmp_path / "last.pt").write_bytes(b"PK" + bytes(5000))
    args = ("--data", data, "--out", tmp_path) if script == "train.py" else \
        ("--checkpoint", tmp_path / "last.pt", "--out", tmp_path / "model")
    refused = run(script, *args, status=1)
    assert "last.pt: no checkpoint of train.py" in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "ran").exists(), "a checkpoint's code was run"


def test_twins_see_the_same_tokens_and_differ_in_the_memory(data, tmp_path):
    train(data, tmp_path / "dense", "product", "--total-steps", 2, "--dense")
    state = torch.load(tmp_path / "dense" / "last.pt")
    assert state["config"]["memories"] == [] and not any("memories" in key for key in state["model"])
    refused = train(data, tmp_path / "dense", "product", "--total-steps", 4, status=1)
    assert "another configuration" in refused.stderr and "Traceback" not in refused.stderr


def test_what_changed_is_said_when_a_run_resumes(data, tmp_path):
    train(data, tmp_path / "run", "product", "--total-steps", 2)
    resumed = train(data, tmp_path / "run", "product", "--total-steps", 3, "--batch", 2)
    assert "--batch was 4 and is 2 now" in resumed.stderr and "another text" not in resumed.stderr
    other = tmp_path / "other"
    shutil.copytree(data, other)
    (other / "train.bin").write_bytes((data / "train.bin").read_bytes()[:-2])
    resumed = train(other, tmp_path / "run", "product", "--total-steps", 4)
    assert "train.bin is another text than the run was begun with" in resumed.stderr


def test_streams_go_on_in_the_text_and_number_that_they_began_with(data, tmp_path):
    train(data, tmp_path / "run", "bytes", "--total-steps", 2)
    refused = train(data, tmp_path / "run", "bytes", "--total-steps", 4, "--batch", 2, status=1)
    assert "--batch is 2, but the run was begun with 4 streams" in refused.stderr
    assert "Traceback" not in refused.stderr
    other = tmp_path / "other"
    shutil.copytree(data, other)
    text = (data / "train.txt").read_bytes()
    (other / "train.txt").write_bytes(text[:200])
    refused = train(other, tmp_path / "run", "bytes", "--total-steps", 4, status=1)
    assert "train.txt ends before a stream does" in refused.stderr
    (other / "train.txt").write_bytes(text + b"\n")
    resumed = train(other, tmp_path / "run", "bytes", "--total-steps", 4)
    assert "train.txt is another text" in resumed.stderr
    (other / "train.txt").write_bytes(b"")
    refused = train(other, tmp_path / "new", "bytes", status=1)
    assert "train.txt: 0 bytes, but at least" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("args, said", [
    (("--n-tok", "100"), "--n-tok is 100, but the model has 64 positions"),
    (("--data", "/nowhere"), "/nowhere"),
    (("--batch", "0"), "--batch is 0, but must be at least 1"),
    (("--lr", "0"), "--lr is 0.0, but must be above 0"),
    (("--value-lr", "nan"), "--value-lr is nan, but must be at least 0"),
    (("--clip", "0"), "--clip is 0.0, but must be above 0"),
    (("--seed", "-1"), "--seed is -1, but must be at least 0"),
    (("--device", "abacus"), "--device abacus: "),
])
def test_bad_options_are_named_in_one_line(data, tmp_path, args, said):
    done = subprocess.run([sys.executable, TRAIN / "train.py", "--data", data, "--out", tmp_path / "run",
                           "--config", config_of("product", tmp_path), *SMALL, *args],
                          capture_output=True, text=True)
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr


def test_the_rate_falls_in_the_last_fifth_of_all_steps():
    from train import Schedule, parse_args

    rate = Schedule(parse_args(["--data", "d", "--out", "o", "--total-steps", "100", "--warmup", "10"])).rate
    assert [round(rate(step), 6) for step in (0, 9, 79, 80, 90, 99, 100)] == [0.1, 1, 1, 1, 0.5, 0.05, 0]


def test_memories_are_not_made_dense_when_a_run_resumes(data, tmp_path):
    train(data, tmp_path / "run", "product", "--total-steps", 2)
    refused = run("train.py", "--data", data, "--out", tmp_path / "run", *SMALL, "--dense", status=1)
    assert "last.pt has memories, but --dense was given" in refused.stderr


@pytest.mark.parametrize("change, said", [
    (lambda folder: (folder / "valid.bin").unlink(), "there is no valid.bin"),
    (lambda folder: (folder / "train.bin").write_bytes(b"\xff\x7f" * 500), "train has token 32767, but vocab_size is"),
])
def test_data_that_do_not_fit_the_model_are_refused(data, tmp_path, change, said):
    shutil.copytree(data, tmp_path / "data")
    change(tmp_path / "data")
    refused = train(tmp_path / "data", tmp_path / "run", "product", status=1)
    assert said in refused.stderr and "Traceback" not in refused.stderr


def test_a_short_text_is_refused_with_what_to_do(data, tmp_path):
    (tmp_path / "short.txt").write_text("one line\n" * 20)
    run("prepare.py", "--train", tmp_path / "short.txt", "--vocab-size", 320, "--out", tmp_path / "data")
    refused = train(tmp_path / "data", tmp_path / "run", "product", "--n-tok", 64, status=1)
    assert "give a longer text, or lower --n-tok" in refused.stderr


@pytest.mark.parametrize("name", ["train", "prepare", "export", "evaluate", "facts", "world", "demo_data", "report",
                                  "edit", "edit_demo", "tokenizer_json"])
def test_every_option_has_a_help_text(monkeypatch, name):
    assert help_gaps(monkeypatch, importlib.import_module(name).main) == []


@pytest.mark.parametrize("n_seq", [4, 3, 1])
def test_batches_begin_with_bos_in_every_second_window(tmp_path, n_seq):
    """And every eighth has long windows, half as many, also of an odd number."""
    import numpy as np

    from windows import Batches

    ids = np.arange(4, 2004) % 90 + 4
    ids[::37] = 1
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    batches = Batches(tmp_path / "train.bin", 16, n_seq, 1, 7, 32, "cpu")
    stream = torch.from_numpy(ids)
    for step in range(80):
        rows, targets = batches.train(step)
        assert rows.shape == (((n_seq + 1) // 2, 32) if step % 8 == 7 else (n_seq, 16))
        assert torch.equal(rows[:, 1:], targets[:, :-1])
        n_bos = sum(int(row[0]) == 1 for row in rows)
        assert n_bos >= len(rows) // 2
        for row in rows:
            assert any(torch.equal(stream[i + 1:i + len(row)], row[1:]) for i in range(len(ids) - len(row)))


def test_the_memory_is_searched_exactly():
    from memory import Memory

    torch.manual_seed(3)
    memory = Memory(32, MEMORY | {"n_key": 12, "k_top": 6, "n_slot": 144})
    q = torch.randn(50, 2 * 16)
    slot, weight = memory.search(q)
    parts = q.view(50, 2, 2, 8)
    s1, s2 = (torch.einsum("thd,hkd->thk", parts[:, :, i], memory.keys[:, i]) for i in (0, 1))
    best, index = (s1[..., None] + s2[..., None, :]).flatten(2).topk(6)
    assert torch.equal(slot.sort(-1).values, index.sort(-1).values)
    order = slot.argsort(-1)
    assert torch.allclose(weight.gather(2, order), best.softmax(-1).gather(2, index.argsort(-1)), atol=1e-6)


def test_gradients_of_the_memory_are_those_of_plain_sums():
    from blocks import SlotSum

    values = torch.randn(20, 5, dtype=torch.double, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.double, requires_grad=True)
    slot = torch.randint(0, 20, (7, 4))
    plain = (values[slot] * weight[..., None]).sum(1)
    grad = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, (values, weight), grad)
    got = torch.autograd.grad(SlotSum.apply(values, slot, weight), (values, weight), grad)
    for a, b in zip(expected, got):
        assert torch.allclose(a, b)


def test_facts_are_asked_and_counted(data, tmp_path):
    import world

    table = tmp_path / "facts.tsv.xz"
    world.write_facts(table, world.build(1, n_people=40, n_things=20))
    train(data, tmp_path / "run", "product", "--total-steps", 2)
    done = run("facts.py", "--model", tmp_path / "run" / "last.pt", "--tokenizer", data / "tokenizer.model",
               "--facts", table, "--n", 30, "--threads", 1)
    found = json.loads(done.stdout)
    assert found["asked"] == 30 and found["known"] == 0 and found["memory_zero"]["asked"] == 30
    assert sum(x["asked"] for x in found["by_times"].values()) == 30


def test_a_known_fact_is_one_whose_whole_answer_is_the_most_probable():
    from facts import ask, report, wilson

    class Tokens:
        def encode(self, text):
            return [ord(c) for c in text]

    class Writer(torch.nn.Module):
        """Writes "ab." behind a question mark, whatever is asked."""
        config = {"bos_token_id": 1}

        def forward(self, ids):
            after = {ord("?"): ord("a"), ord("a"): ord("b"), ord("b"): ord(".")}
            return torch.nn.functional.one_hot(torch.tensor([[after.get(i, 0) for i in row]
                                                             for row in ids.tolist()]), 128).float()

        def output_layer(self):
            return lambda x: x * 20

    asked = [(None, "x?", "ab."), (None, "longer?", "ab."), (None, "x?", "ac."), (None, "x?", "b.")]
    known, *_ = ask(Writer(), Tokens(), asked, 2, "cpu")
    assert known == [True, True, False, False]
    asked = [(SimpleNamespace(times=times), *pair) for times, (_, *pair) in zip((1, 4, 4, 16), asked)]
    counted = report(Writer(), Tokens(), asked, 2, "cpu")["by_times"]
    assert {times: (found["known"], found["asked"]) for times, found in counted.items()} == {1: (1, 1), 4: (1, 2), 16: (0, 1)}
    # From the formula, for 8 of 10: the table of Wilson's interval gives 49.0 % to 94.3 %.
    assert wilson(8, 10)["interval"] == [0.4902, 0.9433]
    assert wilson(0, 10)["interval"] == [0.0, 0.2775]


def test_shipped_models_load_in_pytorch():
    from export import load_model

    model = load_model(str(ROOT / "models" / "demo"))
    assert model.config["vocab_size"] == model.output_layer().weight.shape[0]
