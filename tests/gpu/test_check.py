"""The check on a GPU, rehearsed without one: every part runs with tiny sizes on whatever backend there is, so
that a script's mistake is found here and not on a borrowed GPU.

The backend is the CPU's, or the CUDA double's where `make cuda-host` has built it. B is the build folder.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("B", "build")
sys.path.insert(0, str(Path(__file__).parent))

import ops  # noqa: E402
import report  # noqa: E402
from run import Run  # noqa: E402

PROGRAMS = ["pkmserve-engine", "tests/gpu/forward", "tests/kernels/run_check",
            "tests/bench/bench_device"]
LIMIT_S = 600  # on a busy machine


# Some of what nvidia-smi -q says of a GPU.
STATE = """
==============NVSMI LOG==============

Driver Version                            : 580.0
Attached GPUs                             : 1
GPU 00000000:19:00.0
    Product Name                          : NVIDIA Fake
    Persistence Mode                      : Disabled
    MIG Mode
        Current                           : Disabled
        Pending                           : Enabled
    PCI
        Bus Id                            : 00000000:19:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 4
                Device Current            : 3
            Link Width
                Max                       : 16x
                Current                   : 8x
    Clocks Event Reasons
        Idle                              : Not Active
        SW Power Cap                      : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Active
    Compute Mode                          : Default
    ECC Mode
        Current                           : Enabled
        Pending                           : Disabled
    Temperature
        GPU Current Temp                  : 61 C
    GPU Power Readings
        Average Power Draw                : N/A
        Instantaneous Power Draw          : 690.12 W
        Current Power Limit               : 700.00 W
        Default Power Limit               : 650.00 W
    Module Power Readings
        Current Power Limit               : 1000.00 W
    Clocks
        Graphics                          : 1400 MHz
        SM                                : 1410 MHz
        Memory                            : 2619 MHz
    Max Clocks
        SM                                : 1980 MHz
        Memory                            : 2620 MHz
"""


def fake(folder, name, script):
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path):
    """A PATH with an nvcc, a GPU and a sanitizer that only say what the real ones would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    fake(folder, "nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.88"\n')
    (folder / "state").write_text(STATE)
    fake(folder, "nvidia-smi", 'case $1 in -q) cat "${0%/*}/state" ;; *) echo "NVIDIA Fake, 9.0, 580.0, 1000 MiB" ;; esac\n')
    fake(folder, "compute-sanitizer", "echo \"$@\" >>%s\nwhile [ \"$1\" != \"${1#--}\" ]; do shift 2; done\n"
         "exec \"$@\"\n" % (tmp_path / "sanitized"))
    return folder


def check(tools, *arguments, path=None, python=sys.executable, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CHECK_", "NVCC"))}
    clean["PATH"] = path if path is not None else "%s:%s" % (tools, clean["PATH"])
    return subprocess.run([python, "tests/gpu/check.py", *map(str, arguments)], cwd=ROOT, text=True,
                          capture_output=True, env={**clean, **env}, timeout=LIMIT_S)


def rehearse(tools, tmp_path, device, *arguments, **env):
    for name in PROGRAMS:
        if not (BUILD / name).exists():
            pytest.fail("%s is missing: make B=%s gpu-programs" % (BUILD / name, BUILD))
    path = tmp_path / "report.md"
    done = check(tools, "--rehearse", device, "--build", BUILD, "--no-build", "--report", path,
                 *arguments, **env)
    assert path.exists(), "no report:\n" + done.stdout + done.stderr
    return done, path.read_text()


def path_of_log(text, folder):
    return folder / re.search(r"^- log: `([^`/]+)` beside this report", text, re.M).group(1)


def section(text, title):
    return text.split("## %s\n" % title)[1].split("\n## ")[0]


def test_every_part_runs_and_reports(tools, tmp_path):
    done, text = rehearse(tools, tmp_path, "cpu", "--only",
                          "prepare,ops,golden,bits,sanitizers,speed")
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert "None of what was run." in section(text, "Failures")
    assert "NVIDIA Fake" in text and "driver 580.0" in text and "CUDA 13.0" in text
    assert ("- device: compute mode Default, persistence Disabled, MIG Disabled, ECC Enabled, power limit 700.00 W, "
            "PCIe generation 4 of 5, PCIe width 8x of 16x, NUMA node ") in text, text
    assert ("- device under load: SM 1410 MHz of 1980 MHz, memory 2619 MHz, 690.12 W, 61 C; held back by: "
            "SW Power Cap, HW Thermal Slowdown\n") in text, text
    assert "Attached GPUs" in path_of_log(text, tmp_path).read_text()
    for title in ("Decode, one token of each sequence", "Prefill",
                  "Scoring, every row through the vocabulary", "The memory layer alone",
                  "Slots, depth, width", "Variants", "Single ops", "Golden cases",
                  "The same bits however the work is cut", "Ops against ref", "compute-sanitizer"):
        assert "Not measured." not in section(text, title), title
    assert re.search(r"\| pkm12 \| \d\.\de-\d\d \|", section(text, "Golden cases"))
    assert re.search(r"\| swilu-shared \| \d\.\de-\d\d \|", section(text, "Golden cases"))
    for way in "bf16, own kernels | 17 of 17", "bf16, split weights | 17 of 17", "bf16, attention on tensor cores | 17 of 17":
        assert way in section(text, "The same bits however the work is cut")
    assert section(text, "Ops against ref").count("0 failed") == 2 * len(ops.OPS)
    assert re.search(r"\| each kernel waits for the one before \| decode \| 2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", section(text, "Variants"))
    assert re.search(r"\| the next step begun early \| decode \| 2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", section(text, "Variants"))
    assert re.search(r"\| norms apart \| decode \| 2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", section(text, "Variants"))
    assert re.search(r"\| prompts attended in F32 \| prefill \| 64 \|", section(text, "Variants"))
    assert re.search(r"\| drawn tokens attended in tiles \| decode \| 2 \|", section(text, "Variants"))
    for part in "memory", "memory, query", "memory, search":
        assert re.search(r"\| keys and queries in F32 \| %s \| 2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|" % part,
                         section(text, "Variants")), part
    assert "--tool memcheck" in (tmp_path / "sanitized").read_text()
    assert "A rehearsal with tiny sizes" in text


def test_every_row_of_the_checker_is_checked_on_a_gpu():
    table = (ROOT / "tests/kernels/check_kernels.c").read_text()
    rows = re.findall(r'^    \{"(\w+)", check_\w+, \d+, (true|false)\}', table, re.M)
    assert sorted(name for name, is_host in rows if is_host == "false") == sorted(ops.OPS)


def test_a_backend_that_runs_lists_is_measured_too(tools, tmp_path):
    """The double, as a GPU, collects ops and replays what repeats; it need not compute what is timed."""
    library = BUILD / "libpkmserve_cudahost.so"
    if not library.exists():
        pytest.skip("no double: make cuda-host")
    done, text = rehearse(tools, tmp_path, "cuda", "--only", "speed", CUDA_HOST_IDLE="1",
                          PKMSERVE_CUDA_LIBRARY=str(library))
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert "None of what was run." in section(text, "Failures")


def test_times_of_ops_are_listed_for_a_step(tools, tmp_path):
    library = BUILD / "libpkmserve_cudahost.so"
    if not library.exists():
        pytest.skip("no double: make cuda-host")
    done, text = rehearse(tools, tmp_path, "cuda", "--only", "optimes", CUDA_HOST_IDLE="1",
                          PKMSERVE_CUDA_LIBRARY=str(library))
    assert done.returncode == 0, done.stdout + done.stderr + text
    ops_of = section(text, "Times of ops on the device")
    for op, n in (("linear \\| 2 x 64 of 64", 3), ("add_norm_linear \\| 2 x 192 of 64", 2),
                  ("embed_norm_linear \\| 2 x 192 of 64", 1)):
        assert re.search(r"\| decode of 2 \| %s bf16 \| %d \| \d+\.\d\d \| \d+\.\d \| (\d+ %%)? \|" % (op, n), ops_of), text
    assert re.search(r"\| prefill of 64 \| linear \| 64 x 192 of 64 bf16 \| 3 \|", ops_of), text
    assert re.search(r"\| decode of 2 \| all \| +\| 1\d \| +\| \d+\.\d \|", ops_of), text


def test_decode_without_graphs_is_a_failure(tools, tmp_path):
    library = BUILD / "libpkmserve_cudahost.so"
    if not library.exists():
        pytest.skip("no double: make cuda-host")
    done, text = rehearse(tools, tmp_path, "cuda", "--only", "speed", CUDA_HOST_FAIL_CAPTURE="1",
                          CUDA_HOST_IDLE="1", PKMSERVE_CUDA_LIBRARY=str(library))
    assert done.returncode == 1, done.stdout + done.stderr + text
    assert re.search(r"no decode step of 1 rows ran as a graph: cuda: a decode step cannot become a "
                     r"graph: operation failed due to a previous error during capture;",
                     section(text, "Failures")), text
    done, text = rehearse(tools, tmp_path, "cuda", "--only", "speed", CUDA_HOST_FAIL_CAPTURE="1",
                          CUDA_HOST_IDLE="1", PKMSERVE_CUDA_GRAPHS="0", PKMSERVE_CUDA_LIBRARY=str(library))
    assert done.returncode == 0, done.stdout + done.stderr + text


def test_torch_baseline_runs_and_is_the_same_model(tools, tmp_path):
    pytest.importorskip("torch", reason="no PyTorch in this Python")
    done, text = rehearse(tools, tmp_path, "cpu", "--only", "prepare,speed,torch")
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert re.search(r"computes golden case pkm12 to \d\.\de-0[5-9] per token: the same", text), text
    decode = section(text, "Decode, one token of each sequence").strip().splitlines()
    assert all(cell.strip() for cell in decode[2].split("|")[2:6]), decode[2]


def test_a_failing_part_costs_the_others_nothing(tools, tmp_path):
    """A backend that cannot be opened: every part that uses it fails by name, and is reported."""
    done, text = rehearse(tools, tmp_path, "nonsense", "--only", "prepare,ops,bits,speed")
    assert done.returncode == 1
    failures = section(text, "Failures")
    assert "ops: op linear against ref" in failures and "nonsense" in failures, failures
    assert "bits: forward" in failures and "speed: bench_device" in failures, failures
    log = path_of_log(text, tmp_path).read_text()
    assert re.search(r"==== ops: env CHECK_BACKEND=nonsense CHECK_OP=linear .*run_check\nexit status [1-9]", log)
    assert re.search(r"---- stderr\n.*nonsense", log), log[:2000]
    assert "not measured" in section(text, "Aims")


def test_what_needs_numpy_is_not_run_without_it(tools, tmp_path):
    """A bare machine's Python often has none: ops, sanitizers and speed do without."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "numpy.py").write_text("raise ModuleNotFoundError('none here', name='numpy')\n")
    done, text = rehearse(tools, tmp_path, "cpu", "--only", "prepare,golden,bits,sanitizers",
                          PYTHONPATH=str(tmp_path / "bare"))
    assert done.returncode == 0, done.stdout + done.stderr + text
    notes = section(text, "Not run, and notes")
    for part in ("prepare", "golden", "bits"):
        assert "- %s: not run: %s has no NumPy" % (part, sys.executable) in notes, notes
    assert section(text, "compute-sanitizer").count("3 of 3") == 1, text


def test_what_no_time_is_left_for_is_not_run_and_no_failure(tools, tmp_path):
    done, text = rehearse(tools, tmp_path, "cpu", "--only", "prepare,ops,golden,bits,speed", "--patience", "0.0001")
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert "None of what was run." in section(text, "Failures")
    notes = section(text, "Not run, and notes")
    for line in ("prepare: not run, the part's time was over: converting the golden checkpoints",
                 "ops: not run, the part's time was over: op linear against ref; op attention against ref;",
                 "golden: not run, the part's time was over: ",
                 "bits: not run, the part's time was over: forward, ",
                 "speed: not run, the part's time was over: bench_device rates decode:1,2 prefill:64 score:64 memory:1,2; "
                 "bench_device decode:1,2; "):
        assert "- " + line in notes, line + "\n" + notes
    assert "| linear | not run |" in section(text, "Ops against ref")


def test_a_case_that_fails_costs_the_others_nothing_and_settings_are_its_own(tmp_path):
    pytest.importorskip("numpy")
    import golden
    run = Run(BUILD, "cpu", True, sys.executable, time.monotonic() + LIMIT_S)
    run.begin("bits", LIMIT_S)
    golden.prepare(run)
    sequences, _ = golden.case_sequences(run, "pkm12", "test")
    found = golden.forward(run, golden.model_directory(run, "pkm12"), sequences, ("test.first", golden.F32, {}),
                           ("test.other", golden.F32, {"PKMSERVE_ISA": "ref"}), ("test.again", golden.F32, {}),
                           ("test.wrong", golden.F32, {"PKMSERVE_ISA": "nonsense"}), ("test.last", golden.F32, {}))
    assert list(found) == ["test.first", "test.other", "test.again", "test.last"]
    assert len(run.failures) == 1 and run.failures[0][1].startswith("forward, test.wrong: exit status 1: "), run.failures
    assert "nonsense" in run.failures[0][1]
    assert golden.differences(found["test.first"], found["test.again"]) == []
    assert golden.differences(found["test.first"], found["test.last"]) == []
    assert golden.differences(found["test.first"], found["test.other"]) != [], "the setting had no effect"


def test_the_device_is_held_until_it_is_released():
    run = Run(BUILD, "cpu", True, sys.executable, time.monotonic() + 60)
    run.machine["compute mode"] = "Exclusive_Process"
    run.hold()
    assert run.holder is None, "it would have the only place"
    run.machine["compute mode"] = "Default"
    run.hold()
    holder = run.holder
    assert Path(os.readlink("/proc/%d/exe" % holder.pid)).name == "forward" and holder.poll() is None
    run.release()
    assert holder.returncode == 0 and run.holder is None


def test_without_cublaslts_header_the_report_says_what_is_built(tmp_path, monkeypatch):
    import machine
    for folder in ("toolkit/bin", "torch"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "toolkit/bin/nvcc").touch()
    run = Run(tmp_path, "cuda", False, sys.executable, time.monotonic() + 60)
    run.machine["nvcc"] = str(tmp_path / "toolkit/bin/nvcc")
    monkeypatch.setattr(machine, "torch_folders", lambda kind: [str(tmp_path / "torch")])
    assert "CPATH" not in machine.library_environment(run)
    assert run.notes.pop()[1].endswith("the library is built without, fast math is left out")
    (tmp_path / "torch/cublasLt.h").touch()
    assert machine.library_environment(run)["CPATH"] == str(tmp_path / "torch")
    assert run.notes.pop()[1].endswith("PyTorch's is taken")
    (tmp_path / "toolkit/cublasLt.h").touch()
    assert "CPATH" not in machine.library_environment(run) and run.notes == []


def test_an_exclusive_device_gets_one_process_at_a_time(tmp_path):
    run = Run(tmp_path, "cuda", False, sys.executable, time.monotonic() + 60)
    for mode, most in (("Default", 2), ("Exclusive_Process", 1)):
        run.machine["compute mode"], now, seen = mode, [], []
        both = threading.Barrier(2)

        def job():
            now.append(1)
            seen.append(len(now))
            if most == 2:
                both.wait(30)  # until the other is there too
            now.pop()
        run.parallel([(i, job) for i in range(2)], 6)
        assert max(seen) == most, mode


def test_sanitizers_run_the_most_telling_first(tmp_path):
    run = Run(tmp_path, "cuda", False, sys.executable, time.monotonic())
    run.machine["sanitizer"] = "compute-sanitizer"
    run.begin("sanitizers", 10)
    ops.check_sanitizers(run)
    run.end()
    telling = [f"{tool} of {op}" for tool in ("memcheck", "racecheck", "synccheck")
               for op in ("model", "linear", "attention", "pkm_search", "sample")]
    assert run.failures == [] and len(run.notes) == 1
    assert run.notes[0][1].startswith("not run, the part's time was over: %s; memcheck of linear_drawn;" % "; ".join(telling))


@pytest.mark.parametrize("status", [0, 1])
def test_a_sanitizer_that_cannot_run_is_a_note(tools, tmp_path, status):
    fake(tools, "compute-sanitizer", "echo '========= COMPUTE-SANITIZER'\n"
         "echo '========= Error: Device not supported.'\nexit %d\n" % status)
    done, text = rehearse(tools, tmp_path, "cpu", "--only", "prepare,sanitizers")
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert ("memcheck, racecheck, synccheck not run: compute-sanitizer: ========= Error: Device not "
            "supported." in section(text, "Not run, and notes")), text
    assert "Not measured." in section(text, "compute-sanitizer")


def test_what_a_sanitizer_finds_is_a_failure(tools, tmp_path):
    fake(tools, "compute-sanitizer", "while [ \"$1\" != \"${1#--}\" ]; do shift 2; done\n"
         "echo '========= Invalid write'\n\"$@\"\nexit 9\n")
    done, text = rehearse(tools, tmp_path, "cpu", "--only", "prepare,sanitizers")
    assert done.returncode == 1
    assert "memcheck of pkm_search: ========= Invalid write" in section(text, "Failures"), text


def test_what_outlasts_its_time_is_cut_and_said(tmp_path):
    for seconds in (1.0, 4.0, 16.0):  # a busy machine may take long to begin
        run = Run(tmp_path, "cpu", True, sys.executable, time.monotonic() + LIMIT_S)
        run.begin("part", seconds)
        begun = time.monotonic()
        done = run.command(["sh", "-c", "echo '{\"part\": \"early\"}'; echo '{\"half'; sleep 600 & sleep 600"])
        assert time.monotonic() - begun < 300
        if done.records():
            break
    assert done.status == 124 and done.records() == [{"part": "early"}]
    assert "its time" in done.why()
    late = run.command(["true"])
    assert late.status == 124 and "no time was left" in late.why()
    run.lose("sleep", done)
    run.lose("true", late)
    run.end()
    assert run.failures == [] and run.late == []
    assert run.notes == [("part", "not run, the part's time was over: sleep (cut after %.0f s); true" % done.seconds)]
    run.begin("next", 30)
    run.lose("false", run.command(["false"]))
    assert run.failures == [("next", "false: exit status 1: it said nothing")] and run.late == []


def test_the_log_keeps_all_that_commands_said(tmp_path):
    run = Run(tmp_path, "cpu", True, sys.executable, time.monotonic() + 60)
    run.begin("early", 30)
    run.command(["sh", "-c", "echo before"])
    run.log_to(tmp_path / "new" / "report.log")
    run.command(["sh", "-c", "echo out; echo err >&2; exit 3"], env={"SETTING": "a b"})
    run.command(["no such program"])
    run.command(["sh", "-c", "echo first; yes | head -c 9999999; echo last"])
    log = (tmp_path / "new" / "report.log").read_text()
    assert "==== early: sh -c 'echo before'\nexit status 0" in log and "---- stdout\nbefore\n" in log
    assert "==== early: env 'SETTING=a b' sh -c 'echo out; echo err >&2; exit 3'\nexit status 3" in log
    assert "---- stdout\nout\n---- stderr\nerr\n" in log
    assert "exit status 127" in log and "No such file" in log
    assert "first\n" in log and "\n[...]\n" in log and "last\n" in log and len(log) < 300000


@pytest.mark.parametrize("part, titles", [
    ("right", ["Ops against ref", "The same bits however the work is cut"]),
    ("fast", ["Aims", "Decode, one token of each sequence", "Variants", "Single ops"]),
    ("rest", ["Golden cases", "compute-sanitizer"])])
def test_a_part_has_a_report_of_its_own_in_the_folder_that_is_fetched_back(tools, tmp_path, part, titles):
    (tmp_path / "out").mkdir()
    done = check(tools, "--rehearse", "cpu", "--build", BUILD, "--no-build", "--part", part, "--patience", "0.0001",
                 OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    report_, log = sorted((tmp_path / "out").iterdir(), reverse=True)
    assert re.fullmatch(r"gpu-\d{4}-\d\d-\d\d-%s\.md" % part, report_.name) and log.name == report_.stem + ".log"
    found = re.findall(r"^## (.*)$", report_.read_text(), re.M)
    assert set(titles) <= set(found), found
    others = {"Ops against ref", "Aims", "compute-sanitizer"} - set(titles)
    assert not others & set(found) or part == "rest", found
    assert re.search(r"^- command: `tests/gpu/check.py .*--part %s" % part, report_.read_text(), re.M)


def test_the_cpu_backend_is_measured_by_threads_where_there_is_no_gpu(tools, tmp_path):
    (tools / "nvidia-smi").unlink()
    (tools / "nvcc").unlink()
    done, text = rehearse(tools, tmp_path, "cpu", "--part", "cores", path="%s:/usr/bin:/bin" % tools)
    assert done.returncode == 0, done.stdout + done.stderr + text
    rows = section(text, "The CPU backend by threads").splitlines()
    for n in (1, 2):
        assert any(re.match(r"\| %d \| plain read \| \| [\d.]+ GB/s \| [\d.]+ \| \|" % n, row) for row in rows), text
        assert any(re.match(r"\| %d \| peak of products \| \| \d+ GFLOP/s \| [\d.]+ \| \|" % n, row) for row in rows), text
        for step in ("decode of 1", "prefill of 32"):
            assert any(re.match(r"\| %d \| %s \| [\d.]+ \| \d+ tokens/s \| [\d.]+ \| \d+ %% \|" % (n, step), row)
                       for row in rows), text
    assert re.search(r"^- CPU: .*, \d+ processors", text, re.M) and "## Aims" not in text, text


def test_cores_are_doubled_and_shares_are_of_the_same_run():
    import cores
    assert [cores.thread_counts(n) for n in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16]]

    def result(read, peak, decode, score):
        return {"rates": {"read_bytes_per_s": read, "flops_bf16_per_s": 0, "flops_f32_per_s": peak},
                ("decode", 1): {"us": decode, "bytes": 1e6, "flops": 1}, ("score", 8): {"us": score, "bytes": 1, "flops": 4e6}}
    # The second round's machine is half as fast: ratios and shares are the same.
    rounds = [{1: result(2e9, 8e9, 1000, 1000), 2: result(3e9, 16e9, 500, 625)},
              {1: result(1e9, 4e9, 2000, 2000), 2: result(1.5e9, 8e9, 1000, 1250)}]
    rows = list(cores.rows_of_table(rounds, [1, 2], [("decode", 1, "bytes"), ("score", 8, "flops")]))
    assert rows[2:4] == ["| 2 | plain read | | 2.2 GB/s | 1.50 | |", "| 2 | peak of products | | 12 GFLOP/s | 2.00 | |"]
    assert rows[4:] == ["| 1 | decode of 1 | 1.50 | 750 tokens/s | 1.00 | 50 % |",
                        "| 2 | decode of 1 | 0.75 | 1500 tokens/s | 2.00 | 67 % |",
                        "| 1 | score of 8 | 1.50 | 6000 tokens/s | 1.00 | 50 % |",
                        "| 2 | score of 8 | 0.94 | 9600 tokens/s | 1.60 | 40 % |"], rows


def test_a_command_for_each_part_covers_all_and_ends_within_nine_minutes():
    import check as script
    assert sum(seconds for part, seconds in script.BUDGETS.items() if part not in script.APART) <= script.BUDGET <= 8 * 60
    assert script.GROUP_BUDGET < 9 * 60
    assert set(script.BUDGETS) == {"machine"}.union(*script.GROUPS.values())
    for group in script.GROUPS.values():
        needed = script.BUDGETS["machine"] + sum(script.BUDGETS[part] for part in group[1:])
        assert script.BUDGETS["build"] + script.GROUP_PATIENCE * needed <= script.GROUP_BUDGET, group


def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(tools, tmp_path):
    path = tmp_path / "report.md"
    (tools / "nvidia-smi").unlink()
    done = check(tools, "--report", path, path=str(tools))
    assert done.returncode == 2 and not list(tmp_path.glob("report*"))
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("check-gpu: no GPU here: nvidia-smi"), done.stderr
    assert done.stdout == ""


RECORD = {"op": "step", "rows": 1, "layers": 12, "width": 1024, "memory": "product", "keys": 512,
          "us_min": 1.0, "us_p90": 1.0, "n": 9, "bytes": 4.3e8, "flops": 1e9, "tag": "",
          "backend": "cuda", "part": "decode"}


def aims_of(*records):
    rates = {"part": "rates", "backend": "torch", "copy_bytes_per_s": 4.3e12,
             "flops_bf16_per_s": 8e14, "tag": "torch"}
    figures = report.Figures([rates, *({**RECORD, **r} for r in records)])
    return {what: (value, met) for what, _, value, met, _ in report.aims(figures)}


def test_aims_are_computed_from_the_figures():
    got = aims_of({"us": 125.0}, {"us": 140.0, "tag": "host"}, {"us": 240.0, "layers": 24,
                                                               "memory": "none", "keys": 0},
                  {"us": 100.0, "keys": 128}, {"us": 102.0, "keys": 2048},
                  {"us": 9.0, "part": "memory", "op": "layer"}, {"us": 120.0, "tag": "fast"})
    assert got["decode at batch 1, share of the bandwidth floor"] == (pytest.approx(80), True)
    assert got["values in pinned host memory, decode at batch 1"] == (pytest.approx(12), True)
    assert got["decode of 1, width 1024: 24 layers take, of 12 + memory"] == (pytest.approx(1.92),
                                                                            True)
    assert got["decode of 1: 4M slots against 16k"] == (pytest.approx(2), False)
    assert got["memory layer, 1 tokens"] == (9.0, False)
    assert got["--deterministic on against off, decode of 1"][0] == pytest.approx(100 / 24)
    assert got["prefill of 4096 tokens, share of matrix rate"] == (None, False)


def test_torch_figures_do_not_pass_for_ours():
    got = aims_of({"us": 1.0, "backend": "torch graph", "tag": "torch"})
    assert all(value is None for value, _ in got.values()), got


def test_records_are_json_lines(tools, tmp_path):
    """bench_device prints one object per line, with the fields that the report reads."""
    done = subprocess.run([str(BUILD / "tests/bench/bench_device"), "--device", "cpu", "--seconds",
                           "0.001", "--layers", "1", "--width", "16", "--heads", "1", "--ff", "16",
                           "--vocab", "16", "--positions", "32", "--memory-layer", "-1", "decode:1"],
                          capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(RECORD) - {"tag"} <= set(last) and last["memory"] == "none", last
