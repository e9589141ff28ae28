"""A GPU serves: the CUDA backend through the whole program, on its test double (make cuda-host), which
computes the same kernels on the CPU and fails when it is told to (tests/cuda_host).

The model is a converted golden case of four layers, small enough for the double; the tests are skipped where the
double is not built.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests

from server_harness import PATIENCE, PROGRAM, ROOT, Server, error_of, eventually
from test_overlays import Admin
from test_slots import arrays

sys.path.insert(0, ROOT + "/tests")
from overlay_files import Base, pack  # noqa: E402

BUILD = os.path.join(ROOT, os.environ.get("B", "build"))
LIBRARY = os.path.join(BUILD, "libpkmserve_cudahost.so")
MODEL = os.path.join(BUILD, "golden", "knn32")
SMALL = ["--max-seqs", "3", "--max-batch-tokens", "24", "--max-model-len", "64"]
F32 = ["--dtype", "f32"]
CUDA = ["--device", "cuda"] + F32 + SMALL
PROMPT = [5, 17, 33, 99, 150, 7]
GREEDY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}
SCORE = {"tokens": [[(7 * i + s) % 199 + 1 for i in range(40)] for s in range(2)], "logprobs": 1,
         "entropy": True, "target_ids": [9, 150, 9], "memory": "summary"}

pytestmark = pytest.mark.skipif(not (os.path.exists(LIBRARY) and os.path.isdir(MODEL)),
                                reason="no double or no golden model: make cuda-host, "
                                       "tests/golden/convert_all.sh build/golden")


def environment(**more):
    return {"PKMSERVE_CUDA_LIBRARY": LIBRARY, **more}


def of_this_dtype(flags):
    """In F32, which is exact, where the flags do not say otherwise."""
    return ["--device", "cuda", *SMALL, *([] if "--dtype" in flags else F32), *flags]


def gpu(*flags, **env):
    return Server(*of_this_dtype(flags), model=MODEL, env=environment(**env))


# Fast paths that what ends by itself does without, so that the double need not try them.
WITHOUT = dict.fromkeys(["PKMSERVE_CUDA_OVERLAP", "PKMSERVE_CUDA_FUSE", "PKMSERVE_CUDA_SPLIT", "PKMSERVE_CUDA_ATTENTION",
                         "PKMSERVE_CUDA_AHEAD", "PKMSERVE_CUDA_GEMM", "PKMSERVE_CUDA_DRAWN", "PKMSERVE_CUDA_FLAT"], "0")


def run(command, *flags, **env):
    """A command that ends by itself."""
    return subprocess.run([PROGRAM, command, "--model", MODEL, *flags], timeout=PATIENCE, text=True,
                          capture_output=True, env={**os.environ, **WITHOUT, **environment(**env)})


def refused(*flags, **env):
    """The error line of a server that must not start, and what it logged before."""
    done = run("serve", "--check", *of_this_dtype(flags), **env)
    assert done.returncode == 1, (done.returncode, done.stderr)
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("pkmserve: ")]
    assert errors == lines[-1:], "expected one error line, the last, got:\n" + done.stderr
    return errors[0], lines[:-1]


# ---- at the start -------------------------------------------------------------------------------


@pytest.mark.parametrize("env, wanted", [
    ({"CUDA_HOST_DRIVER": "none"}, "no NVIDIA driver"),
    ({"CUDA_HOST_DRIVER": "old"}, "driver is too old"),
    ({"CUDA_HOST_DRIVER": "no_device"}, "sees no GPU"),
    ({"CUDA_HOST_SM": "75"}, "compute capability 7.5"),
    ({"PKMSERVE_CUDA_LIBRARY": "/nowhere/lib.so"}, "/nowhere/lib.so"),
])
def test_no_gpu_is_a_clear_error_or_the_cpu(env, wanted):
    line, _ = refused(**env)
    assert wanted in line and "device cpu" in line, line
    done = run("serve", "--check", "--device", "auto", *SMALL, **env)
    assert done.returncode == 0, done.stderr
    backend = json.loads(done.stdout)["backend"]
    assert backend["name"].startswith("cpu") and wanted in backend["why"], backend
    said = [line for line in done.stderr.splitlines() if "event=backend" in line]
    assert len(said) == 1 and "name=cpu" in said[0] and wanted in said[0], done.stderr


def test_auto_takes_the_gpu_and_says_so():
    done = run("serve", "--check", "--device", "auto", "--deterministic", "off", *SMALL)
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["backend"]["name"] == "cuda" and info["backend"]["why"] == "a GPU was found"
    assert info["backend"]["deterministic"] is False
    assert info["memory"]["value_placement"] == "device"
    assert "level=warn event=not_deterministic" in done.stderr


def test_fast_math_without_cublaslt_serves_and_says_what_is_missing(tmp_path):
    """A link alone in a folder: cuBLASLt is looked for beside it, and is not there."""
    alone = tmp_path / "libpkmserve_cudahost.so"
    alone.symlink_to(os.path.abspath(LIBRARY))
    for device, why in (("cuda", "fast math is left out"), ("auto", "a GPU was found; fast math is")):
        done = run("serve", "--check", "--device", device, "--deterministic", "off", *SMALL,
                   PKMSERVE_CUDA_LIBRARY=str(alone))
        assert done.returncode == 0, done.stderr
        backend = json.loads(done.stdout)["backend"]
        assert backend["name"] == "cuda" and backend["why"].startswith(why), backend
        said = [line for line in done.stderr.splitlines() if "event=backend" in line]
        assert len(said) == 1 and "install libcublasLt.so." in said[0], done.stderr
    done = run("serve", "--check", *CUDA, PKMSERVE_CUDA_LIBRARY=str(alone))
    assert done.returncode == 0 and "cublasLt" not in done.stderr, "F32 weights: not asked for, not missed"


def products(done):
    """What /info and the log say of a server that has been checked."""
    assert done.returncode == 0 and "no option reads" not in done.stderr, done.stderr
    what = json.loads(done.stdout)["backend"]["products"]
    said = [line for line in done.stderr.splitlines() if "event=products" in line]
    assert [line.partition("what=")[2].strip('"') for line in said] == ([what] if what else [])
    return what


def test_who_multiplies_prompts_is_said(tmp_path):
    check = ["serve", "--check", "--device", "cuda", "--max-seqs", "1", "--max-batch-tokens", "2", "--max-model-len", "48"]
    assert products(run(*check, *F32)) is None, "F32 weights"
    check += ["--dtype", "bf16"]
    library, *shapes = products(run(*check)).split("; ")
    assert library == "cuBLASLt 1234" and len(shapes) > 3
    assert all(re.fullmatch(r"\d+x\d+ (103/20/8|own kernels)", shape) for shape in shapes), shapes
    assert sum("103/20/8" in shape for shape in shapes) > 2
    _, *shapes = products(run(*check, CUDA_HOST_LT="vlpa")).split("; ")
    assert len(shapes) > 3 and all(shape.endswith(" own kernels") for shape in shapes), shapes
    assert products(run(*check, PKMSERVE_CUDA_LT="0")) == "own kernels: PKMSERVE_CUDA_LT=0"
    alone = tmp_path / "libpkmserve_cudahost.so"
    alone.symlink_to(os.path.abspath(LIBRARY))
    why = products(run(*check, PKMSERVE_CUDA_LIBRARY=str(alone)))
    assert why.startswith("own kernels: cuBLASLt does not load") and "install libcublasLt.so." in why


def test_built_without_cublaslts_headers_it_serves_and_says_so():
    """A toolkit may come without them: the library builds, and works as without fast math."""
    done = run("serve", "--check", "--device", "cuda", "--deterministic", "off", *SMALL,
               PKMSERVE_CUDA_LIBRARY=os.path.join(BUILD, "tests/cuda_host/no_lt/libpkmserve_cudahost.so"))
    assert done.returncode == 0, done.stderr
    why = json.loads(done.stdout)["backend"]["why"]
    assert why.startswith("fast math is left out, own kernels multiply: this library was built without "
                          "cuBLASLt's headers (cublasLt.h); install them"), why


@pytest.mark.parametrize("letter, n_row, why", [
    ("x", "8", "event=fast_path_off name=library"),
    ("y", "40", "event=fast_paths_off"),
])
def test_a_library_that_fails_the_self_test_is_not_used(letter, n_row, why):
    """Neither errs on the numbers that algorithms are tried with: on those of a model they do."""
    done = run("serve", "--check", "--device", "cuda", "--dtype", "bf16", "--max-seqs", "1", "--max-batch-tokens", n_row,
               "--max-model-len", "48", CUDA_HOST_LT=letter)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if why in line]
    assert len(said) == 1 and "level=warn" in said[0], done.stderr
    backend = json.loads(done.stdout)["backend"]
    assert backend["products"] == "own kernels: cuBLASLt 1234 does not pass the self-test"
    assert "library" not in backend["fast_paths"]


@pytest.mark.parametrize("kernel, model, paths", [
    ("drawn_kernel", "knn32", {"drawn"}), ("flat_kernel", "flat", {"flat"}), ("mma_kernel", "knn32", {"attention"})])
def test_a_kernel_that_errs_is_left_out(kernel, model, paths):
    check = ["--device", "cuda", "--dtype", "bf16", *SMALL, "--model", os.path.join(BUILD, "golden", model)]
    done = run("serve", "--check", *check, **dict.fromkeys(WITHOUT, "1"), CUDA_HOST_SKIP=kernel)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"level=warn event=fast_path_off name=(\w+)", done.stderr)) == paths
    used = set(json.loads(done.stdout)["backend"]["fast_paths"])
    assert not used & paths and {"overlap", "fusion", "gemm", "ahead", "library"} <= used


def test_fast_paths_are_tried_and_said():
    """Against a text without them; a setting leaves one out."""
    check = ["serve", "--check", "--device", "cuda", "--dtype", "bf16", "--max-seqs", "2", "--max-batch-tokens", "12",
             "--max-model-len", "48"]
    exact, others = ["overlap", "fusion", "ahead", "gemm"], ["library", "attention", "split", "drawn"]
    for setting, paths in ({}, [*exact, *others]), (
            {"PKMSERVE_CUDA_LT": "0", "PKMSERVE_CUDA_ATTENTION": "0", "PKMSERVE_CUDA_SPLIT": "0", "CUDA_HOST_SM": "80"},
            ["fusion", "ahead", "gemm", "drawn"]), ({"PKMSERVE_CUDA_LT": "0", "PKMSERVE_CUDA_DRAWN": "0"},
                                                    [*exact, "attention", "split"]):
        done = run(*check, **{**dict.fromkeys(WITHOUT, "1"), **setting})
        assert done.returncode == 0, done.stderr
        assert sorted(json.loads(done.stdout)["backend"]["fast_paths"]) == sorted(paths)
        tried = re.findall(r"event=fast_path name=(\w+) prompts=(\S+) drawn=(\S+) allowed=(\S+)", done.stderr)
        assert sorted(name for name, *_ in tried) == sorted(paths)
        for name, *differences, allowed in tried:
            assert (name in exact) == (allowed == "0") and max(map(float, differences)) <= float(allowed)


def test_values_are_not_read_in_place_from_the_file():
    line, _ = refused("--memory-placement", "mmap")
    assert "use device, or host" in line, line


@pytest.mark.parametrize("flags, env, wanted", [
    ([], {"CUDA_HOST_MEMORY": "500K"}, ["device memory", "bf16 weights", "host"]),
    (["--memory-placement", "host", "--kv-tokens", "2000000"], {},
     ["not enough device memory", "the cache needs 2048000000 bytes", "lower --kv-tokens",
      "dtype bf16"]),
    (["--kv-tokens", "4000000", "--dtype", "bf16"], {},
     ["not enough device memory", "lower --kv-tokens", "memory placement host"]),
    ([], {"CUDA_HOST_FAIL_MALLOC": "5"}, ["memory"]),
    (["--memory-placement", "host"], {"CUDA_HOST_FAIL_HOST_ALLOC": "1"}, ["memory"]),
])
def test_memory_that_runs_out_is_planned_and_named(flags, env, wanted):
    line, log = refused(*flags, **env)
    assert all(part in line for part in wanted), line
    if "--kv-tokens" in flags:
        plan = [entry for entry in log if "event=memory_plan" in entry]
        assert len(plan) == 1 and "available_bytes=" in plan[0], log


def test_the_cache_shrinks_to_what_the_device_has():
    flags = ["serve", "--check", "--device", "cuda", *F32, "--max-seqs", "8", "--max-batch-tokens", "8"]
    roomy, tight = (json.loads(run(*flags, CUDA_HOST_MEMORY=m).stdout) for m in ("1G", "6M"))
    assert roomy["limits"]["kv_tokens"] == 8 * 512
    assert 512 <= tight["limits"]["kv_tokens"] < 8 * 512
    assert tight["memory"]["available_bytes"] > 0


# ---- results ------------------------------------------------------------------------------------


def answers(server):
    """What the requests alone give, without what differs from answer to answer."""
    return server.ok("/generate", GREEDY)["choices"], server.ok("/score", SCORE)["results"]


@pytest.fixture(scope="module")
def alone():
    """Of the GPU, and of the CPU."""
    with gpu() as s, Server("--device", "cpu", "--dtype", "f32", *SMALL, model=MODEL) as cpu:
        text = s.get("/metrics").text
        assert 'backend="cuda"' in text and 'memory_placement="device"' in text
        assert s.metric('startup_seconds{phase="warmup"}') > 0
        yield answers(s), answers(cpu)


def test_the_gpu_computes_what_the_cpu_does(alone):
    (generated, scored), (cpu_generated, cpu_scored) = alone
    assert generated[0]["token_ids"] == cpu_generated[0]["token_ids"]
    for one, other in zip(scored, cpu_scored):
        assert one["sum_logprob"] == pytest.approx(other["sum_logprob"], abs=1e-3)
        for a, b in zip(one["target_logprobs"], other["target_logprobs"]):
            assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-3)
        slots, cpu_slots = (r["memory"]["layers"][0]["mem_used"] for r in (one, other))
        assert slots == pytest.approx(cpu_slots, abs=2 / 1024)


def answers_in_a_crowd(server):
    crowd = [threading.Thread(target=server.ok, args=("/generate", {
        "prompt": PROMPT[i:] + [i], "max_tokens": 5 + 4 * i, "seed": i, "ignore_eos": True}))
        for i in range(3)]
    for thread in crowd:
        thread.start()
    got = answers(server)
    for thread in crowd:
        thread.join()
    return got


def test_drawn_tokens_attend_without_a_kernel_of_their_own(alone):
    with gpu(PKMSERVE_CUDA_DRAWN="0") as s:
        assert "drawn" not in s.get("/info").json()["backend"]["fast_paths"]
        got = answers(s)
        assert answers_in_a_crowd(s) == got
    (generated, scored), (was_generated, was_scored) = got, alone[0]
    assert generated[0]["token_ids"] == was_generated[0]["token_ids"] and scored == was_scored


def test_flat_keys_are_searched_without_a_kernel_of_their_own():
    """The same slots, and weights that differ in the last bits at most."""
    said = []
    for usual in "1", "0":
        with Server("--device", "cuda", *F32, *SMALL, model=os.path.join(BUILD, "golden/flat"),
                    env=environment(PKMSERVE_CUDA_FLAT=usual)) as s:
            assert ("flat" in s.get("/info").json()["backend"]["fast_paths"]) == (usual == "1")
            said.append([arrays(block) for block in s.ok("/score", {
                "tokens": [list(range(5, 25))], "memory": "slots"})["results"][0]["memory"]["slots"]])
    assert len(said[0]) == 1
    for (slots, weights), (any_slots, any_weights) in zip(*said):
        assert slots == any_slots and len(slots) == 20
        for row, any_row in zip(weights, any_weights):
            assert row == pytest.approx(any_row, rel=1e-4)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_same_bits_in_a_crowd_and_in_every_placement(alone, placement):
    with gpu("--memory-placement", placement) as s:
        assert s.get("/info").json()["memory"]["value_placement"] == placement
        assert answers_in_a_crowd(s) == alone[0]


def test_echo_says_what_score_does_however_a_prompt_is_cut():
    """In bf16, where cuBLASLt multiplies rows of requests and tensor cores attend to them."""
    text = SCORE["tokens"][0]
    said = []
    for rows in "64", "5":
        with Server("--device", "cuda", "--dtype", "bf16", "--max-seqs", "3", "--max-batch-tokens", rows,
                    "--max-model-len", "64", model=MODEL, env=environment()) as s:
            assert {"library", "attention"} <= set(s.get("/info").json()["backend"]["fast_paths"])
            scored = s.ok("/score", {"tokens": [text], "logprobs": 0})["results"][0]["tokens"]
            echoed = s.ok("/generate", {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0})
            said += [[token["logprob"] for token in tokens] for tokens in (scored, echoed["choices"][0]["logprobs"])]
    assert len(said[0]) == len(text) and said == [said[0]] * 4


@pytest.mark.parametrize("flags", [["--kv-cache-dtype", "bf16"], ["--dtype", "bf16"]])
def test_a_cache_in_bf16(alone, flags):
    with gpu(*flags) as s:
        info = s.get("/info").json()
        assert info["model"]["kv_cache_dtype"] == "bf16"
        per_token = 4 * 2 * 32 * 2  # layers, keys and values, columns, bytes
        assert info["memory"]["kv_bytes"] == info["limits"]["kv_tokens"] * per_token
        got = answers(s)
        assert answers_in_a_crowd(s) == got
    for one, f32 in zip(got[1], alone[0][1]):  # of 39 tokens; rounding also picks other slots
        assert one["sum_logprob"] != f32["sum_logprob"]
        assert one["sum_logprob"] == pytest.approx(f32["sum_logprob"], abs=0.5)


def test_files_in_f32_are_computed_in_bf16_by_default():
    done = run("serve", "--check", "--device", "cuda", *SMALL)
    model = json.loads(done.stdout)["model"]
    assert (model["file_dtype"], model["dtype"], model["kv_cache_dtype"]) == ("f32", "bf16", "bf16")
    lines = [line for line in done.stderr.splitlines() if "event=dtype" in line]
    assert len(lines) == 1 and "files=f32 weights=bf16" in lines[0] and "--dtype f32 loses no bits" in lines[0]
    assert "event=dtype" not in run("serve", "--check", *CUDA).stderr
    said = json.loads(run("serve", "--check", "--device", "cpu").stdout)["model"]
    assert (said["file_dtype"], said["dtype"]) == ("f32", "f32")


def test_files_in_f16_are_computed_in_f16_by_default(tmp_path):
    subprocess.run([sys.executable, ROOT + "/models/convert/convert.py", ROOT + "/tests/golden/xlm/knn32/checkpoint.pth",
                    "--output", tmp_path / "f16", "--dtype", "f16"], check=True, capture_output=True)

    def said(device, *flags):
        done = subprocess.run([PROGRAM, "serve", "--check", "--model", tmp_path / "f16", *SMALL, "--device", device, *flags],
                              env={**os.environ, **environment(**WITHOUT)}, timeout=PATIENCE, text=True, capture_output=True, check=True)
        info = json.loads(done.stdout)
        return info["model"], info["backend"].get("products", ""), [line for line in done.stderr.splitlines() if "event=dtype" in line]

    model, products, lines = said("cuda")
    assert (model["file_dtype"], model["dtype"], model["kv_cache_dtype"]) == ("f16", "f16", "bf16")
    assert re.search(r"cuBLASLt 1234; \d+x\d+ f16 103/20/8", products), products
    assert lines == []
    model, _, lines = said("cpu", "--dtype", "bf16")
    assert model["dtype"] == "bf16" and "files=f16 weights=bf16 why=\"it was asked for\"" in lines[0]
    assert said("cpu")[0]["dtype"] == "f32"


def test_steps_hold_more_rows_on_a_larger_device():
    """512 on the CPU and on a small GPU; more if so many sequences may run."""
    for flags, rows in ((["--device", "cpu"], 512), (["--device", "cuda"], 512),
                        (["--device", "cuda", "--max-seqs", "600"], 600), (["--device", "cuda"], 4096)):
        done = run("serve", "--check", "--max-model-len", "64", *flags, CUDA_HOST_IDLE="1",
                   CUDA_HOST_SMS="132" if rows == 4096 else "8")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["limits"]["max_batch_tokens"] == rows


def test_what_the_driver_has_taken_is_logged():
    log = run("serve", "--check", *CUDA).stderr
    warm = [line for line in log.splitlines() if "event=warm" in line]
    assert len(warm) == 1 and 0 < int(warm[0].split("available_bytes=")[1]) < 1 << 30


def test_the_tools_take_the_gpu():
    ids = [run("generate", "--device", device, "--dtype", "f32", "--ids", "--temperature", "0",
               "--max-tokens", "6", *SMALL, "5 17 33").stdout for device in ("cuda", "cpu")]
    assert ids[0] == ids[1] and len(ids[0].split()) == 6
    done = run("bench", "--device", "cuda", "--json", "--rounds", "1", "--rows", "4",
               "--max-batch", "2", "--positions", "1", CUDA_HOST_MEMORY="64M")
    assert done.returncode == 0, done.stderr
    bench = json.loads(done.stdout)
    assert bench["backend"] == "cuda" and bench["read_is"] == "copy"
    assert [step["rows"] for step in bench["steps"]] == [4, 4, 1, 2]
    assert all(step["tokens_per_s"] > 0 for step in bench["steps"])


# ---- a failure while it serves ------------------------------------------------------------------

LONG = {"prompt": PROMPT, "max_tokens": 500, "temperature": 0, "ignore_eos": True}
ROOM = ["--max-model-len", "512"]


def fail_while_streaming(server, trigger):
    """Two requests run, one of them streams; the device fails. Returns stream's end and answer."""
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(server.post("/generate", LONG)))
    with requests.post(server.url + "/generate", json={**LONG, "stream": True}, stream=True,
                       timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        assert json.loads(next(lines)[len("data: "):])["token"], "the stream has begun"
        thread.start()
        eventually(lambda: server.metric("num_requests_running") == 2, "two requests run")
        trigger.touch()
        rest = [line.decode() for line in lines if line.startswith(b"data: ")]
    thread.join()
    return rest, waiting[0]


def test_a_failure_ends_requests_readiness_and_process(tmp_path):
    trigger = tmp_path / "fail"
    with gpu(*ROOM, "--drain-delay-s", "600", CUDA_HOST_FAIL_SYNC="@%s" % trigger) as s:
        rest, waiting = fail_while_streaming(s, trigger)
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2][len("data: "):])
        assert last["error"]["code"] == "internal_error", last
        assert "the device failed" in last["error"]["message"]
        assert "the device failed" in error_of(waiting, 500, "internal_error")
        for path in ("/health", "/health/ready", "/health/live"):
            health = s.get(path)
            assert health.status_code == 503 and health.json()["status"] == "failed", health.text
        late = s.post("/generate", LONG)
        error_of(late, 503, "engine_failed")
        assert "Retry-After" in late.headers
        assert s.metric('engine_state{state="failed"}') == 1
        assert s.metric('request_success_total{finished_reason="error"}') == 2
        s.logged("reason=engine_failed")
        assert s.read_log().count("event=engine_failed") == 1
        assert s.stop(signal.SIGTERM) == 1  # a signal while it drains ends it at once


def test_a_failed_server_ends_by_itself(tmp_path):
    trigger = tmp_path / "fail"
    with gpu(*ROOM, CUDA_HOST_FAIL_SYNC="@%s" % trigger) as s:
        _, waiting = fail_while_streaming(s, trigger)
        assert waiting.status_code == 500
        assert s.process.wait(PATIENCE) == 1
        assert "event=stopped" in s.read_log()


def test_a_stalled_engine_is_not_ready_and_takes_no_work_until_it_moves_again(tmp_path):
    hang = tmp_path / "hang"
    with gpu(*ROOM, "--stall-ready-s", "1", CUDA_HOST_HANG=str(hang)) as s:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(
            s.post("/generate", {**LONG, "max_tokens": 20})))
        hang.touch()
        thread.start()
        eventually(lambda: s.get("/health/ready").status_code == 503, "not ready")
        health = s.get("/health")
        assert health.json()["status"] == "stalled" and health.json()["last_step_age_ms"] >= 1000
        assert s.get("/health/live").status_code == 200  # --stall-live-s is 120
        refused = s.post("/generate", LONG)
        assert "--stall-ready-s" in error_of(refused, 503, "engine_stalled")
        assert "Retry-After" in refused.headers
        hang.unlink()
        thread.join()
        assert answers[0].status_code == 200
        assert s.get("/health/ready").status_code == 200


# ---- overlays ------------------------------------------------------------------------------------


def with_keys(model, n_key, folder):
    """A copy with so many keys in each half, and their slots."""
    base, tensors, rng = Base(model), {}, np.random.default_rng(1)
    for name, entry in base.header.items():
        begin, end = base.place(name)
        array = np.frombuffer(base.data[begin:end], "<f4").reshape(entry["shape"])
        if name.endswith(".keys"):
            array = rng.normal(0, array.std(), (*array.shape[:2], n_key, array.shape[3]))
        elif name.endswith(".values.weight"):
            array = rng.normal(0, array.std(), (n_key ** 2, array.shape[1]))
        tensors[name] = ("F32", array)
    with open(os.path.join(model, "config.json")) as file:
        config = json.load(file)
    config["memories"][0].update(n_key=n_key, n_slot=n_key ** 2)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").symlink_to(os.path.join(model, "vocab.txt"))
    (folder / "model.safetensors").write_bytes(pack(tensors, {}))
    return str(folder)


def test_overlays_are_uploaded_beside_running_work(tmp_path):
    """A device's memory is written by the engine's thread alone, idle or between steps; a MiB each time."""
    model = with_keys(MODEL, 128, tmp_path / "large")
    base = Base(model)
    slots = list(range(0, 16384, 2))
    rows = base.table(0)[slots][::-1] * 2
    directory = base.with_rows(tmp_path / "model", {(0, "values"): (slots, rows)})
    tokens = [SCORE["tokens"][0][:12]]
    done = subprocess.run([PROGRAM, "score", "--model", directory, *CUDA, "--ids", "--add-bos", "off", "--json"],
                          input=" ".join(map(str, tokens[0])), timeout=PATIENCE, text=True, capture_output=True,
                          env={**os.environ, **environment()})
    assert done.returncode == 0, done.stderr
    due = json.loads(done.stdout)["results"][0]["sum_logprob"]
    with Admin(*CUDA, model=model, env=environment()) as s:
        file = base.overlay({0: (slots, "F32", rows)})
        plain = s.ok("/score", {"tokens": tokens})["results"][0]["sum_logprob"]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(s.ok, "/generate", GREEDY)
            acme = s.put("acme", file)
            assert acme["version"] == 1 and acme["bytes"] > 1 << 20
            got = s.ok("/score", {"tokens": tokens, "overlay": "acme"})["results"][0]["sum_logprob"]
            running.result()
        assert got == due != plain
        assert s.put("other", base.overlay({0: (slots[:3], "F16", rows[:3])}))["version"] == 1
        assert s.ask("DELETE", "/memory/overlays/acme").status_code == 200
        assert s.ok("/score", {"tokens": tokens})["results"][0]["sum_logprob"] == plain


def test_an_upload_ends_with_the_engine(tmp_path):
    """One that waits for a step, and one that comes later. Neither keeps room."""
    hang, trigger = tmp_path / "hang", tmp_path / "fail"
    file = Base(MODEL).overlay({0: ([3], "F32", np.ones((1, 32)))})
    with Admin(*CUDA, "--drain-delay-s", "600", model=MODEL,
               env=environment(CUDA_HOST_HANG=str(hang), CUDA_HOST_FAIL_SYNC="@%s" % trigger)) as s:
        hang.touch()
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(s.post, "/generate", {**GREEDY, "prompt": PROMPT * 4})
            eventually(lambda: s.metric_of("prefix_cache_queries_total") > 0, "a step begins")
            waiting = pool.submit(s.ask, "PUT", "/memory/overlays/acme", data=file)
            eventually(lambda: s.metric_of("overlay_bytes") > 0, "it has room")
            trigger.touch()
            hang.unlink()
            assert running.result().status_code == 500
            for answer in (waiting.result(), s.ask("PUT", "/memory/overlays/acme", data=file)):
                assert "nothing was put" in error_of(answer, 503, "shutting_down")
        listed = s.ask("GET", "/memory/overlays").json()
        assert listed["data"] == [] and listed["bytes"] == 0
