"""The test double of the CUDA runtime: what works on it, and which planted bugs it finds.

`make tests` builds cases.plain, .asan, .tsan (cases.cu and bugs.cu with sanitizers, the double without)
and .ucontext (the portable way of switching) in $B/tests/cuda_host.
Rerun one case: CUDA_HOST_ORDER=random:2 build/tests/cuda_host/cases.tsan missing_syncwarp
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("B", "build")) / "tests" / "cuda_host"
ORDERS = ["forward", "reverse", "random:1", "random:2", "random:3"]
FEW_ORDERS = ["forward", "random:1"]  # where a sanitizer's finding does not depend on it
RACE = r"ThreadSanitizer: data race[\s\S]*bugs\.cu:\d+"

pytestmark = pytest.mark.skipif(not (FOLDER / "cases.plain").exists(),
                                reason="only the plain build has the double's own test")


def run(build, case, **environment):
    """Exit status and output of one case."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_HOST_")}
    env.update(environment, ASAN_OPTIONS="", UBSAN_OPTIONS="", TSAN_OPTIONS="halt_on_error=1")
    if case != "good":
        env["ASAN_OPTIONS"] = "detect_leaks=0"
    done = subprocess.run([FOLDER / f"cases.{build}", case], env=env, timeout=300, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout


def runs(build, case, orders=("forward",)):
    for order in orders:
        yield order, *run(build, case, CUDA_HOST_ORDER=order)


@pytest.mark.parametrize("build", ["plain", "asan", "tsan", "ucontext"])
def test_what_is_right_works_in_every_order(build):
    for order, status, output in runs(build, "good", ORDERS if build == "plain" else ORDERS[1:3]):
        assert status == 0, f"{build}, {order}: {output}"


@pytest.mark.parametrize("case", ["missing_syncthreads", "missing_syncwarp", "missing_copy_wait",
                                  "uninitialised_shared", "uninitialised_device", "missing_sync",
                                  "source_changed_early", "read_before_grid_wait",
                                  "read_of_the_kernel_before_the_last",
                                  "copy_before_grid_wait", "write_before_grid_wait"])
def test_wrong_result_shows_in_every_order(case):
    for order, status, output in runs("plain", case, ORDERS):
        assert status == 1 and f"{case}: wrong" in output, f"{order}: {output}"


@pytest.mark.parametrize("case", ["missing_syncthreads", "missing_syncwarp", "shuffle_for_syncwarp",
                                  "missing_copy_wait", "race_of_blocks", "read_before_grid_wait",
                                  "copy_before_grid_wait", "write_before_grid_wait"])
def test_race_is_found_by_thread_sanitizer_in_any_order(case):
    for order, status, output in runs("tsan", case, FEW_ORDERS):
        assert status == 66 and re.search(RACE, output), f"{order}: {output}"


@pytest.mark.parametrize("case, finding", [
    ("static_overflow", r"bugs\.cu:\d+:\d+: runtime error: index 64 out of bounds for type 'int ?\[64\]'"),
    ("static_overflow_by_address", r"global-buffer-overflow[\s\S]*write_by_address.*bugs\.cu:\d+"),
    ("dynamic_overflow", r"heap-buffer-overflow[\s\S]*write_by_address.*bugs\.cu:\d+"),
    ("device_overflow", r"heap-buffer-overflow[\s\S]*write_dynamic.*bugs\.cu:\d+"),
    ("host_reads_device", r"use-after-poison[\s\S]*host_reads_device.*bugs\.cu:\d+"),
    ("misaligned_vector", r"bugs\.cu:\d+:\d+: runtime error: .* misaligned address"),
])
def test_bad_access_is_found_by_address_sanitizer(case, finding):
    status, output = run("asan", case)
    assert status != 0 and re.search(finding, output), output


@pytest.mark.parametrize("build", ["plain", "asan", "tsan"])
@pytest.mark.parametrize("case, finding", [
    ("divergent_barrier", r"threads 0-95 wait at .*bugs\.cu:\d+, __syncthreads\n"
                          r".*threads 96-127 have left the kernel"),
    ("different_barriers", r"threads 0-31 wait at .*bugs\.cu:\d+, __syncthreads\n"
                           r".*threads 32-127 wait at .*bugs\.cu:\d+, __syncthreads"),
    ("divergent_shuffle", r"threads 0-15 wait at .*bugs\.cu:\d+, __shfl_sync with mask ffffffff\n"
                          r".*threads 16-31 wait at .*bugs\.cu:\d+, __syncwarp with mask ffffffff"),
    ("shuffle_outside", r"bugs\.cu:\d+: __shfl_sync of shuffle_from_outside.* lane 20, which does not"),
    ("missing_grid_wait", r"add_one.*, thread \(5, 0, 0\) left without grid_wait"),
    ("host_pointer_to_kernel", r"bugs\.cu:\d+: argument 1 of add_plainly is an address that the device"),
])
def test_what_hangs_or_faults_on_a_gpu_ends_with_a_report(build, case, finding):
    for order, status, output in runs(build, case, FEW_ORDERS):
        assert status == -6 and re.search(finding, output), f"{order}: {output}"


KERNEL = re.compile(r"\b__global__\b[^{;]*\{(.*?)\n\}", re.S)
WAIT = re.compile(r"\n    grid_wait(?:_alone)?\(\);[^\n]*\n")


def test_every_kernel_waits_before_it_may_leave():
    """The double sees what a test runs; this, every kernel's first and only wait, on the way of all threads."""
    found = 0
    for path in sorted(Path("kernels/cuda").glob("*.cu*")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        text = re.sub(r"^#.*$", "", text, flags=re.M)  # as_body.cuh gives the word another meaning
        bodies = KERNEL.findall(text)
        assert len(bodies) == text.count("__global__"), path
        for body in bodies:
            early, *late = WAIT.split(body)
            assert len(late) == 1, "%s: %s\ngrid_wait once, for all threads" % (path, body)
            assert not re.search(r"\breturn\b", early), "%s: %s\nleaves before grid_wait" % (path, early)
            found += 1
    assert found > 20


def test_overflow_of_dynamic_shared_memory_shows_without_sanitizer():
    for order, status, output in runs("plain", "dynamic_overflow", ORDERS):
        assert status == -6 and "wrote past its 256 bytes" in output, f"{order}: {output}"


def test_launch_that_a_gpu_refuses_is_refused():
    status, output = run("plain", "launch_limits")
    assert status == 0, output


FINE = {"count": "0", "n": "1", "version": "13000", "malloc": "0 0", "host_alloc": "0 0",
        "launch": "0 0 0", "sync": "0 0", "free": "0 0 0 0"}


def refused(error):
    return {"count": error, "malloc": f"{error} {error}", "host_alloc": f"{error} {error}",
            "launch": " ".join([error] * 3), "sync": f"{error} {error}", "free": " ".join([error] * 4)}


@pytest.mark.parametrize("setting, changes", [
    ("", {}),
    ("DRIVER=none", {**refused("35"), "n": "-7", "version": "0"}),
    ("DRIVER=old", {**refused("35"), "n": "-7", "version": "12020"}),
    ("DRIVER=no_device", {**refused("100"), "n": "0"}),
    ("MEMORY=1536K", {"malloc": "0 2"}),
    ("FAIL_MALLOC=2", {"malloc": "0 2"}),
    ("FAIL_MALLOC=2:46", {"malloc": "0 46"}),
    ("FAIL_HOST_ALLOC=1", {"host_alloc": "2 0"}),
    ("FAIL_LAUNCH=2", {"launch": "0 701 0"}),
    ("FAIL_LAUNCH=2:700", {"launch": "0 700 700", "sync": "700 700", "free": "700 700 700 700"}),
    ("FAIL_SYNC=1", {"sync": "719 719", "free": "719 719 719 719"}),
    ("FAIL_SYNC=2:214", {"sync": "0 214", "free": "214 214 214 214"}),
])
def test_environment_asks_for_failures(setting, changes):
    name, _, value = setting.partition("=")
    status, output = run("plain", "environment_calls", **({f"CUDA_HOST_{name}": value} if name else {}))
    expected = " ".join(f"{k} {v}" for k, v in {**FINE, **changes}.items())
    assert status == 0 and output.splitlines()[0] == expected, output


@pytest.mark.parametrize("setting", ["ORDER=sideways", "DRIVER=new", "MEMORY=1T", "FAIL_LAUNCH=two"])
def test_setting_without_meaning_is_refused(setting):
    name, _, value = setting.partition("=")
    status, output = run("plain", "good", **{f"CUDA_HOST_{name}": value})
    assert status == -6 and f"CUDA_HOST_{name}" in output and value in output, output
