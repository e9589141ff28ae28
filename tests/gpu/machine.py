"""What the machine has: GPU, driver, compiler, sanitizer, PyTorch; in what state the GPU is; and where its CUDA
libraries stand."""

import glob
import os
import platform
import re
import shutil
import sysconfig
import threading
from pathlib import Path


def find_nvcc():
    found = os.environ.get("NVCC") or shutil.which("nvcc")
    usual = "/usr/local/cuda/bin/nvcc"
    return found or (usual if os.access(usual, os.X_OK) else None)


def query(run):
    """Fills run.machine. Returns None, or one line that says what is missing for a check on a GPU."""
    machine = run.machine
    machine["commit"] = commit(run)
    machine["cpu"] = cpu()
    machine["nvcc"] = find_nvcc()
    if machine["nvcc"] is None:
        return "no nvcc here: install the CUDA toolkit, or name NVCC"
    smi = run.command(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total",
                       "--format=csv,noheader"], 30)
    fields = [f.strip() for f in smi.out.splitlines()[0].split(",")] if smi.good and smi.out else []
    if len(fields) != 4:
        return "no GPU here: nvidia-smi: " + smi.why()
    machine.update(zip(("gpu", "capability", "driver", "memory"), fields))
    machine.update(idle_state(query_state(run)))
    version = run.command([machine["nvcc"], "--version"], 30)
    found = re.search(r"release ([\d.]+)", version.out)
    machine["cuda"] = found.group(1) if found else "unknown"
    machine["arch"] = machine["capability"].replace(".", "") or "native"
    machine["sanitizer"] = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=str(Path(machine["nvcc"]).resolve().parent))
    return None


def cpu():
    """Model, processors that this process may use, and how they belong together."""
    name = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    shared = len(re.findall(r"\d+", siblings.read_text())) if siblings.exists() else 0
    nodes = len(glob.glob("/sys/devices/system/node/node[0-9]*"))
    return "%s, %d processors%s%s" % (
        name.group(1) if name else platform.machine(), len(os.sched_getaffinity(0)),
        ", %d to a core" % shared if shared else "", ", %d NUMA node%s" % (nodes, "s"[:nodes > 1]) if nodes else "")


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


# ---- the GPU's state ----------------------------------------------------------------------------

def parse_state(text):
    """nvidia-smi -q as {"Clocks/SM": "1980 MHz"}: names are indented below what they belong to; the GPU's own
    heading, which is not, is left out."""
    found, path = {}, []
    for line in text.splitlines():
        match = re.fullmatch(r"( *)(\S.*?)(?: +: (.*))?", line.rstrip())
        if match is None:
            continue
        indent, name, value = len(match.group(1)), match.group(2), match.group(3)
        path = [p for p in path if p[0] < indent] + [(indent, name)]
        if value is not None:
            found.setdefault("/".join(p[1] for p in path if p[0] > 0), value.strip())
    return found


def query_state(run, *flags):
    """Drivers differ in what they call things; what is not there is not in the result."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return parse_state(run.command(["nvidia-smi", "-q", "-i", device, *flags], 10).out)


def look_up(state, *names):
    """The first value whose name ends so."""
    return next((state[key] for name in names for key in state if ("/" + key).endswith("/" + name)), "unknown")


def idle_state(state):
    """name -> value, for the report's head."""
    bus = look_up(state, "PCI/Bus Id").lower()[-12:]
    node = Path("/sys/bus/pci/devices") / bus / "numa_node"
    return {"compute mode": look_up(state, "Compute Mode"), "persistence": look_up(state, "Persistence Mode"),
            "MIG": look_up(state, "MIG Mode/Current"), "ECC": look_up(state, "ECC Mode/Current"),
            "power limit": look_up(state, "Current Power Limit", "Power Limit"),
            "PCIe generation": "%s of %s" % (look_up(state, "PCIe Generation/Current"),
                                             look_up(state, "PCIe Generation/Max")),
            "PCIe width": "%s of %s" % (look_up(state, "Link Width/Current"), look_up(state, "Link Width/Max")),
            "NUMA node": node.read_text().strip() if node.exists() else "unknown"}


def power(state):
    return look_up(state, "Instantaneous Power Draw", "Average Power Draw", "Power Draw")


def watts(state):
    match = re.match(r"[\d.]+", power(state))
    return float(match.group()) if match else 0.0


def load_line(state):
    """Clocks, and what holds them back."""
    reasons = [key.split("/")[-1] for key, value in state.items()
               if value == "Active" and re.search(r"Clocks (Event|Throttle) Reasons/", key)]
    return "SM %s of %s, memory %s, %s, %s; held back by: %s" % (
        look_up(state, "Clocks/SM"), look_up(state, "Max Clocks/SM"), look_up(state, "Clocks/Memory"), power(state),
        look_up(state, "GPU Current Temp"), ", ".join(reasons) or "nothing")


def watch(run, work):
    """Calls work() and looks at the GPU meanwhile: of what is seen, what draws most power stays."""
    if "compute mode" not in run.machine:
        return
    over, seen = threading.Event(), []

    def look():
        while True:
            seen.append(query_state(run, "-d", "CLOCK,PERFORMANCE,POWER,TEMPERATURE"))
            if over.wait(0.25):
                return
    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    run.machine["load"] = load_line(max(seen, key=watts))


def lines(machine):
    """For the report's head."""
    processor = ["- CPU: " + machine["cpu"]] if "cpu" in machine else []
    names = ("compute mode", "persistence", "MIG", "ECC", "power limit", "PCIe generation", "PCIe width", "NUMA node")
    idle = ", ".join("%s %s" % (name, machine[name]) for name in names if name in machine)
    return processor + (["- device: " + idle] if idle else []) + (        ["- device under load: " + machine["load"]] if "load" in machine else [])
