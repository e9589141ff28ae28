"""compare.py and what it is made of, with tiny models and programs that only pretend: files that llama.cpp can read,
figures that come out of the rounds as they should, and programs that are missing as a line. No times are judged."""

import asyncio
import json
import math
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("B", "build")
sys.path.insert(0, str(Path(__file__).parent))

import compare  # noqa: E402
import gguf_file  # noqa: E402
import load  # noqa: E402
import peers  # noqa: E402
import served  # noqa: E402
import serving  # noqa: E402

LIMIT_S = 300  # on a busy machine


def run(*words, env=None):
    command = [sys.executable, "tests/bench/compare.py", "--build", str(BUILD), "--threads", "1", "--quick", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
                          env={**os.environ, "PATH": "", **(env or {})})


def script(folder, name, text):
    path = folder / name
    path.write_text("#!%s\n%s" % (sys.executable, text))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- GGUF ---------------------------------------------------------------------------------------


def twin(folder, dtype, *more):
    subprocess.run([BUILD / "tests/bench/make_model", folder, "--layers", "2", "--width", "32", "--heads", "2", "--ff",
                    "64", "--vocab", "50", "--positions", "8", "--dtype", dtype, *(more or compare.TWIN)], check=True)
    return folder


def read_gguf(path):
    """({key: value}, {name: (shape, type, bytes)}) by the format's description."""
    data = path.read_bytes()
    at = 0

    def take(form):
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def text():
        return take("%ds" % take("Q")).decode()

    def value(kind):
        if kind == 9:
            item, n = take("IQ")
            return [value(item) for _ in range(n)]
        return {4: lambda: take("I"), 5: lambda: take("i"), 6: lambda: take("f"), 8: text}[kind]()

    assert take("4sI") == (b"GGUF", 3)
    n_tensor, n_value = take("QQ")
    values, tensors = {}, []
    for _ in range(n_value):
        key = text()
        values[key] = value(take("I"))
    for _ in range(n_tensor):
        name = text()
        shape = [take("Q") for _ in range(take("I"))]
        tensors.append((name, shape, *take("IQ")))
    begin = at + -at % 32
    bytes_of = {0: 4, 30: 2}
    out = {}
    for name, shape, kind, offset in tensors:
        n = bytes_of[kind]
        for dim in shape:
            n *= dim
        assert offset % 32 == 0 and begin + offset + n <= len(data), name
        out[name] = (shape, kind, data[begin + offset:begin + offset + n])
    return values, out


@pytest.mark.parametrize("dtype,kind", [("f32", 0), ("bf16", 30)])
def test_gguf_holds_the_twin(tmp_path, dtype, kind):
    gguf_file.write_dense(tmp_path / "twin.gguf", twin(tmp_path / "twin", dtype))
    values, tensors = read_gguf(tmp_path / "twin.gguf")
    ours = gguf_file.Safetensors(tmp_path / "twin" / "model.safetensors")
    assert values["general.architecture"] == "gpt2" and values["gpt2.block_count"] == 2
    assert values["gpt2.vocab_size"] == 50 and values["gpt2.context_length"] == 8
    assert values["tokenizer.ggml.tokens"][::49] == ["<unk>", "\u258149"] and values["tokenizer.ggml.token_type"][49] == 1
    assert values["tokenizer.ggml.scores"] == [-i for i in range(50)]
    assert len(tensors) == 4 + 2 * 12
    assert tensors["token_embd.weight"] == ([32, 50], kind, bytes(ours["embeddings.weight"][2]))
    assert tensors["blk.1.ffn_up.weight"] == ([32, 64], kind, bytes(ours["ffns.1.lin1.weight"][2]))
    assert tensors["blk.0.ffn_norm.bias"] == ([32], 0, bytes(ours["layer_norm2.0.bias"][2]))
    qkv = b"".join(bytes(ours["attentions.1.%s_lin.weight" % part][2]) for part in "qkv")
    assert tensors["blk.1.attn_qkv.weight"] == ([32, 96], kind, qkv)


def test_gguf_of_a_model_with_memories_is_refused(tmp_path):
    folder = twin(tmp_path / "memory", "f32", "--memory-layer", "1", "--keys", "8", "--k", "4", "--key-width", "8")
    with pytest.raises(ValueError, match="memory-layer -1"):
        gguf_file.write_dense(tmp_path / "memory.gguf", folder)


@pytest.mark.parametrize("output", ["tied", "own"])
def test_gguf_of_a_llama_is_the_model_itself(tmp_path, output):
    folder = twin(tmp_path / "dense", "bf16", "--family", "memory_llama", "--heads", "4", "--kv-heads", "2", "--output",
                  output, *compare.TWIN)
    gguf_file.write_dense(tmp_path / "dense.gguf", folder)
    values, tensors = read_gguf(tmp_path / "dense.gguf")
    ours = gguf_file.Safetensors(folder / "model.safetensors")
    assert values["general.architecture"] == "llama" and values["llama.attention.head_count_kv"] == 2
    assert values["llama.rope.freq_base"] == 500000 and values["llama.rope.dimension_count"] == 8
    assert abs(values["llama.attention.layer_norm_rms_epsilon"] - 1e-5) < 1e-9
    assert len(tensors) == 2 + (output == "own") + 2 * 9 and ("output.weight" in tensors) == (output == "own")
    assert tensors["blk.1.attn_k.weight"] == ([32, 16], 30, bytes(ours["layers.1.attention.key.weight"][2]))
    assert tensors["blk.0.ffn_down.weight"] == ([64, 32], 30, bytes(ours["layers.0.ffn.down.weight"][2]))
    assert tensors["blk.0.ffn_norm.weight"][:2] == ([32], 0)


def test_the_shapes_of_other_tables_are_made_and_measured(tmp_path):
    done = run("dense", "sparse", "--torch", str(tmp_path / "python"), "--llama", str(tmp_path / "llama"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("not measured") == 2
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| decode", "| prefill", "| score"))]
    assert len(rows) == 4 * 2 * 2 and sum("in place" in row for row in rows) == 8, done.stdout
    assert "decode 212 tokens/s" in done.stdout
    config = json.loads((BUILD / "bench-model" / "sparse-bf16-quick" / "config.json").read_text())
    assert config["tie_output"] and config["memories"][1]["values_of"] == 0


def test_a_model_of_memory_layers_is_made_and_measured(tmp_path):
    folder = twin(tmp_path / "llama", "bf16", "--family", "memory_llama", "--memory-layer", "0,1", "--keys", "8", "--k", "4",
                  "--key-width", "8", "--positions", "128")
    done = subprocess.run([BUILD / "pkmserve", "bench", "--json", "--model", folder, "--rounds", "1", "--rows", "8",
                           "--max-batch", "1"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["model"] == str(folder)


# ---- rounds and figures -------------------------------------------------------------------------


class Pretend:
    def __init__(self, name, order):
        self.name, self.order = name, order

    def round(self):
        self.order.append(self.name)
        return {"seconds": {}}

    def cpu_seconds(self):
        return 0


def test_every_round_has_each_engine_once_in_rotating_order():
    order = []
    engines = [Pretend(name, order) for name in "abc"]
    results, load = peers.run_rounds(engines, 3, lambda text: None)
    assert order == list("abc" "bca" "cab") and all(len(r) == 3 for r in results.values())
    assert "cores" in load


def test_ratios_are_taken_within_a_round():
    step = ("decode", 1)
    slow, fast = ([{"seconds": {step: s}} for s in series] for series in ((4, 9, 16), (2, 3, 4)))
    assert compare.times(slow, fast, step) == [2, 3, 4]
    assert compare.cell(compare.times(slow, fast, step)) == "3.00 (2.00-4.00)"
    assert compare.times(None, fast, step) == [] and compare.cell([]) == "-"


def test_shares_are_of_the_rates_of_the_round():
    step, rates = ("decode", 2), []
    for read in (100, 200):
        rates.append({"read_bytes_per_s": read, "peak_flops_per_s": 1000,
                      "steps": [{"step": "decode", "rows": 2, "bytes_per_token": 10, "flops_per_token": 1}]})
    assert compare.share([{"seconds": {step: 0.4}}, {"seconds": {step: 0.2}}], rates, step) == "50 %"


def test_a_model_that_computes_something_else_fails():
    own = {"logprobs": [-1.0, -2.0], "hash": "0"}
    compare.agree("f32", own, {**own, "logprobs": [-1.0, -2.00001]})
    compare.agree("bf16", own, {**own, "logprobs": [-1.0, -2.1]})
    for wrong in (-2.1, float("nan")):
        with pytest.raises(SystemExit):
            compare.agree("f32", own, {**own, "logprobs": [-1.0, wrong]})


# ---- programs -----------------------------------------------------------------------------------


def test_types_are_those_of_the_program():
    assert peers.pkmserve_dtypes(SimpleNamespace(build=BUILD)) == ["f32", "bf16", "int8"]


def test_every_set_is_measured_or_said_to_be_missing():
    done = run("isa")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| decode", "| prefill", "| score"))]
    n_type = len(peers.pkmserve_dtypes(SimpleNamespace(build=BUILD)))
    assert len(rows) == n_type * 4 and all(line.count("|") == 10 for line in rows)
    assert "hash" in done.stdout and "busy with other work" in done.stdout


def test_what_is_not_installed_is_a_line(tmp_path):
    done = run("torch", "llama", "--torch", str(tmp_path / "python"), "--llama", str(tmp_path / "llama"))
    assert done.returncode == 0, done.stderr
    assert "not measured: PyTorch" in done.stdout and "pip install" in done.stdout
    assert "not measured: llama.cpp" in done.stdout and "cmake" in done.stdout


def test_figures_of_llama_cpp_are_read(tmp_path):
    """Of its first run with one text, which reads the file, nothing counts."""
    program = script(tmp_path, "llama-batched-bench", "import json\nfor pl, t in ((1, 9.0), (1, 1.0), (2, 4.0)):\n"
                     "    print(json.dumps({'pl': pl, 't_pp': t, 'tg': 8, 't_tg': 8 * t}))\n")
    args = SimpleNamespace(threads=1, positions=16, batches=[1, 2])
    engine = peers.Llama("llama.cpp", str(program), "x.gguf", args)
    assert engine.round()["seconds"] == {("prefill", 16): 1.0, ("decode", 1): 1.0, ("decode", 2): 4.0}
    done = run("llama", "--llama", str(program))
    assert done.returncode == 0 and "SPEED ALONE" in done.stdout, done.stdout + done.stderr


def test_a_program_that_fails_is_said_with_its_last_words(tmp_path):
    program = script(tmp_path, "fails", "import sys\nsys.exit('first\\nno such model')\n")
    kept = peers.Kept("PyTorch", [program])
    with pytest.raises(peers.Missing, match="PyTorch: no such model"):
        kept.start()
    kept.close()
    engine = peers.Llama("llama.cpp", str(program), "x", SimpleNamespace(threads=1, positions=1, batches=[1]))
    with pytest.raises(peers.Missing, match="no such model"):
        engine.start()


def test_a_program_stays_loaded_between_rounds(tmp_path):
    program = script(tmp_path, "rounds", "import json, sys\nprint(flush=True)\nfor i, _ in enumerate(sys.stdin):\n"
                     "    print(json.dumps({'n': i, 'steps': [{'step': 'decode', 'rows': 1, 'seconds': i}]}), flush=True)\n")
    kept = peers.Kept("it", [program])
    kept.start()
    assert [kept.round()["seconds"] for _ in range(3)] == [{("decode", 1): i} for i in range(3)]
    kept.close()


# ---- PyTorch ------------------------------------------------------------------------------------


def test_pytorch_computes_the_same_model():
    python = os.environ.get("BENCH_TORCH")
    if python is None:
        pytest.skip("BENCH_TORCH names no Python with PyTorch")
    done = run("torch", "dense", "--torch", python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("f32: log-probabilities of the scored text differ by") == 2


# ---- the server ---------------------------------------------------------------------------------


def test_start_and_host_are_measured_for_every_type():
    done = run("start", "host")
    assert done.returncode == 0, done.stdout + done.stderr
    n_type = len(peers.pkmserve_dtypes(SimpleNamespace(build=BUILD)))
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| f32", "| bf16", "| int8"))]
    assert len(rows) == n_type * (1 + len(compare.DRAWS)), done.stdout
    for row in rows[:n_type]:
        assert 0 < float(row.split("|")[2]) < LIMIT_S
    for row in rows[n_type:]:
        # Differences of two times: on a busy machine they can be of either sign.
        assert all(math.isfinite(float(row.split("|")[k].split()[0])) for k in (4, 5)), row


def test_a_server_that_does_not_start_is_said_with_its_last_words(tmp_path):
    with pytest.raises(RuntimeError, match="config.json"):
        serving.Server(BUILD / "pkmserve", "--model", tmp_path)


def test_streams_that_never_ran_together_have_no_figures():
    window = serving.Window(None, 2)
    for begun, ended in ((1, 0), (1, 1), (2, 1), (2, 2)):
        window.look = lambda: {"steps": 1}
        window.seen(begun, ended)
    assert window.figures() is None


# ---- servers under load -------------------------------------------------------------------------

# A server that answers each stream of n tokens in n pieces, 10 ms apart, whatever the model.
PRETEND_SERVER = """import http.server, json, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and body["stream"] and body["ignore_eos"]
        self.send_response(STATUS)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in [b'data: {"choices": []}'] * body["max_tokens"] + [END]:
            self.wfile.write(b"%x\\r\\n%s\\n\\n\\r\\n" % (len(line) + 2, line))
            self.wfile.flush()
            time.sleep(0.01)
        self.wfile.write(b"0\\r\\n\\r\\n")

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def pretend_server(folder, status=200, end=b"data: [DONE]"):
    script(folder, "llama-server", PRETEND_SERVER.replace("STATUS", str(status)).replace("END", repr(end)))
    return script(folder, "llama-batched-bench", "")


def test_servers_are_measured_under_the_same_load(tmp_path):
    script(tmp_path, "llama-quantize", "import sys\nopen(sys.argv[2], 'w').close()\n")
    done = run("http", "--llama", str(pretend_server(tmp_path)))
    assert done.returncode == 0 and "not measured" not in done.stdout, done.stdout + done.stderr
    rows = [line.split("|")[2:-1] for line in done.stdout.splitlines() if line.startswith("| 2 clients")]
    assert [row[0].strip() for row in rows] == peers.pkmserve_dtypes(SimpleNamespace(build=BUILD))
    for row in rows:
        own, other, ratio, _, _, _, _, gap, late = map(float, (cell if cell.strip() != "-" else "nan" for cell in row[1:]))
        assert abs(ratio - own / other) < 0.02 * ratio and other < 2 / 0.01, row
        assert late >= gap >= 0 and late > 0, row  # on a busy machine pieces may be read together


def test_a_server_that_is_missing_is_a_line(tmp_path):
    done = run("http", "--llama", str(script(tmp_path, "llama-batched-bench", "")))
    assert done.returncode == 0, done.stderr
    assert "llama-server is needed" in done.stdout and "--target llama-server" in done.stdout
    assert all("| - |" in line for line in done.stdout.splitlines() if line.startswith("| 2 clients"))


@pytest.mark.parametrize("status,end,message", [(500, b"data: [DONE]", "status 500"), (200, b"data: {}", "status 200")])
def test_a_stream_that_fails_is_an_error_and_no_figure(tmp_path, status, end, message):
    pretend_server(tmp_path, status, end)
    engine = served.LlamaServer(served.QUICK_LOADS, 400, tmp_path / "llama-server", "x.gguf", 1)
    engine.start()
    try:
        with pytest.raises(RuntimeError, match=message):
            engine.round()
    finally:
        engine.close()


def test_a_comment_of_a_stream_is_no_token():
    async def read(*pieces):
        reader, answer = asyncio.StreamReader(), load.Answer()
        answer.headers["transfer-encoding"] = "chunked"
        reader.feed_data(b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b"")))
        await load.read_body(reader, answer, 0)
        return answer

    answer = asyncio.run(read(b": ping\n\n", b"data: {}\n\n", b": ping\n\n", b"data: [DONE]\n\n"))
    assert len(answer.pieces) == 2 and answer.first == answer.pieces[0]
    assert answer.body.count(b": ping") == 2


def test_a_loads_figures_are_the_times_of_its_tokens(monkeypatch):
    one = served.QUICK_LOADS[0]
    bodies = one.bodies(7, 400)

    async def answers(port, sent, n_client):
        assert (port, sent, n_client) == (1, bodies, one.n_client)
        got = [load.Answer() for _ in sent]
        for answer, body in zip(got, bodies):
            answer.begin, answer.first = 100, 100.25
            answer.pieces = [100.25 + 0.5 * i for i in range(body["max_tokens"])] + [200]  # the last one is [DONE]
        return got

    clock = iter((10, 12))
    monkeypatch.setattr(served, "answers", answers)
    monkeypatch.setattr(served, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    result = served.serve(1, one, 7, 400)
    n = sum(body["max_tokens"] for body in bodies)
    assert result == {"rate": n / 2, "first": [0.25] * one.n_request, "gaps": [0.5] * (n - one.n_request)}
    slower = {"rate": n / 8, "first": [0.125], "gaps": [1.5] * 98 + [2.5] * 2}
    assert compare.http_row("load", "f32", [result], [slower]) == [
        "load", "f32", compare.cell([n / 2]), compare.cell([n / 8]), "4.00", "250", "125", "500", "500", "1500", "2500"]


def test_a_load_is_the_same_for_all_and_another_in_each_round():
    one = served.LOADS[1]
    first = one.bodies(1, 32000)
    assert first == one.bodies(1, 32000) and len(first) == one.n_request
    assert all(100 <= len(body["prompt"]) <= 300 and 32 <= body["max_tokens"] <= 64 for body in first)
    assert not {str(body["prompt"]) for body in first} & {str(body["prompt"]) for body in one.bodies(2, 32000)}
    assert max(one.n_shared + one.prompt[1] + one.n_token for one in served.LOADS) < served.CONTEXT
    assert max(one.n_client for one in served.LOADS) == served.MAX_CLIENTS


def test_prompts_that_share_their_first_tokens_share_no_more():
    one = next(one for one in served.LOADS if one.n_shared)
    prompts = [body["prompt"] for body in one.bodies(1, 32000)]
    assert len({str(prompt[:one.n_shared]) for prompt in prompts}) == 1
    assert len({prompt[one.n_shared] for prompt in prompts}) > one.n_request // 2
    fewest, most = one.prompt
    assert all(fewest <= len(prompt) - one.n_shared <= most for prompt in prompts)
    assert one.bodies(2, 32000)[0]["prompt"][:one.n_shared] != prompts[0][:one.n_shared]
