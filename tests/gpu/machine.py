"""What the machine has: GPU, driver, compiler, sanitizer, PyTorch; and where its CUDA libraries stand."""

import glob
import os
import re
import shutil
import sysconfig
from pathlib import Path


def find_nvcc():
    found = os.environ.get("NVCC") or shutil.which("nvcc")
    usual = "/usr/local/cuda/bin/nvcc"
    return found or (usual if os.access(usual, os.X_OK) else None)


def query(run):
    """Fills run.machine. Returns None, or one line that says what is missing for a check on a GPU."""
    machine = run.machine
    machine["commit"] = commit(run)
    machine["nvcc"] = find_nvcc()
    if machine["nvcc"] is None:
        return "no nvcc here: install the CUDA toolkit, or name NVCC"
    smi = run.command(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total",
                       "--format=csv,noheader"], 30)
    fields = [f.strip() for f in smi.out.splitlines()[0].split(",")] if smi.good and smi.out else []
    if len(fields) != 4:
        return "no GPU here: nvidia-smi: " + smi.why()
    machine.update(zip(("gpu", "capability", "driver", "memory"), fields))
    version = run.command([machine["nvcc"], "--version"], 30)
    found = re.search(r"release ([\d.]+)", version.out)
    machine["cuda"] = found.group(1) if found else "unknown"
    machine["arch"] = machine["capability"].replace(".", "") or "native"
    machine["sanitizer"] = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=str(Path(machine["nvcc"]).resolve().parent))
    return None


def commit(run):
    git = run.command(["git", "describe", "--always", "--dirty"], 10)
    kit = Path("build/gpu-kit/commit")
    if git.good:
        return git.out.strip()
    return kit.read_text().strip() if kit.exists() else "unknown (no git, no build/gpu-kit)"


def torch_folders(kind):
    """include or lib folders of the CUDA packages that PyTorch brings along."""
    site = sysconfig.get_paths()["purelib"]
    return sorted(glob.glob(os.path.join(site, "nvidia", "*", kind)))


def library_environment(run):
    """The environment in which the CUDA library builds and opens.

    cuBLASLt's header and library belong to the toolkit; where only PyTorch has them, they are taken
    from there, and where nobody has, the library builds without. The library is opened when fast math is measured, from where LD_LIBRARY_PATH says.
    """
    toolkit = Path(run.machine["nvcc"]).resolve().parents[1]
    folders = [str(p) for p in (toolkit / "lib64", toolkit / "lib") if p.exists()]
    env = {"NVCC": str(Path(run.machine["nvcc"]).resolve())}  # the Makefile looks beside it
    if not list(toolkit.glob("**/cublasLt.h")):
        torch = [p for p in torch_folders("include") if os.path.exists(os.path.join(p, "cublasLt.h"))]
        run.note("cublasLt.h is not in the toolkit: " + (
            "PyTorch's is taken" if torch else "the library is built without, fast math is left out"))
        if torch:
            env["CPATH"] = ":".join(torch_folders("include"))
    folders += torch_folders("lib")
    env["LD_LIBRARY_PATH"] = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), *folders]))
    return env
