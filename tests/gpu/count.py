"""make gpu-count: what a GPU would be asked to do, counted where there is none.

    count.py [--build build] [--arch "90 100"] [--write FILE] [--small]

Two sources. The test double of CUDA (tests/cuda_host) says what a step of model A launches, node by node, without
running it: bench_device asks for the steps, CUDA_HOST_TRACE has the launches. ptxas says what each kernel takes of a
multiprocessor: `make gpu-count` has left its words, where there is nvcc, in BUILD/gpu-count. From both follows an
estimate of the time, by MODEL below. It is no measurement: make check-gpu measures.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]

# All constants of the estimate: what it says it needs, no more. A measurement corrects them here: those that say so are
# of the report in tests/bench/results.
MODEL = {
    "sm": (132, "multiprocessors of an H200"),
    "bandwidth": (4.1e12, "bytes/s, copy within an H200's memory, measured"),
    "sm_bandwidth": (40e9, "bytes/s that one multiprocessor draws"),
    "cache": (50e6, "bytes of its second-level cache"),
    "matrix": (643e12, "BF16 operations/s, cuBLASLt's best as the backend measures it: the floor of a product"),
    "mma": (110e12, "BF16 operations/s of our mma.sync kernels, all multiprocessors full; measured 77 to 140"),
    "cublaslt": (420e12, "the same of cuBLASLt by one algorithm, of 1024 rows; measured 380 to 640"),
    "f32": (33e12, "F32 operations/s of our multiply-adds, the same"),
    "logit": (44, "instructions of outputs for a logit: 355 for a warp's 256, of its code for sm_90"),
    "selection": (61440, "instructions of a memory's selections for a row and head: 1920 of a warp, of its code for sm_90"),
    "half_us": (0.9, "of a warp's selection among one half's keys: 1600 clocks of dependent instructions"),
    "pairs_us": (0.8, "likewise among the pairs of both, and the weights"),
    "arrive_us": (0.8, "until a block knows that all others of a tile are done: a fence and an atomic"),
    "node_us": (1.2, "from the end of a kernel to the start of the next, in a graph"),
    "latency_us": (1.6, "of a kernel: first bytes from memory, last sums; from measured steps"),
}
# µs of dependent reads and barriers of an op that its bytes do not explain.
# Of drawn tokens attention's is that of attention_drawn.cuh's head comment, less a latency, and longer where blocks
# share a row: the last one merges what the others have left.
CHAIN_US = {"attention": 1.75, "drawn attention": 0.15, "shared drawn attention": 1.65, "span_attention": 2.5, "pkm_search": 1.5, "pkm_read": 0.8, "add_norm": 0.3, "norm": 0.3,
            "outputs": 2.0,
            "embed_norm": 0.9, "norm_linear": 0.9, "add_norm_linear": 0.9, "embed_norm_linear": 1.5}
DRAWN_SPLIT, DRAWN_SPARED = 32, 8  # attention.cuh, attention_unit.cu

# What a multiprocessor of compute capability 9.0 and 10.0 has.
REGISTERS, THREADS, BLOCKS, SHARED = 65536, 2048, 32, 228 << 10
SHARED_RESERVED = 1024  # per block

MODEL_A = {"heads": 4, "keys": 512, "k": 32, "positions": 512}
SMALL = {"heads": 4, "keys": 32, "k": 8, "positions": 64}
SMALL_FLAGS = ["--layers", "3", "--width", "64", "--heads", "4", "--ff", "256", "--vocab", "500", "--positions", "64",
               "--memory-layer", "1", "--k", "8", "--key-width", "32", "--keys", "32"]
PARTS = ["prefill:1024", "score:1024", "decode:1,8,32,256"]
SMALL_PARTS = ["prefill:32", "score:32", "decode:1,2"]
LIBRARY = "cuBLASLt"  # kernels of its own, of which the double has but the call
ELEMENT = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1, "q4": 0.5}


def constant(name):
    return MODEL[name][0]


# ---- what ptxas says ----------------------------------------------------------------------------

@dataclass
class Usage:
    """What a kernel takes."""
    registers: int
    shared: int   # static bytes
    spills: int   # bytes stored and loaded
    mma: bool     # has instructions for the tensor cores


def bare_name(demangled):
    """A kernel's name with its template's arguments, as both compilers know it."""
    text = re.sub(r"^void ", "", demangled.replace("(anonymous namespace)::", ""))
    text = re.sub(r"_GLOBAL__N_\w*::", "", text)
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return text[:i]
    return text


def demangle(names):
    names = list(names)
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, map(bare_name, done.stdout.splitlines())))


def parse_usage(ptxas, ptx):
    """mangled name -> Usage, of one file."""
    found = {}
    mma = {}
    for part in re.split(r"(?=\.entry )", ptx)[1:]:
        mma[re.match(r"\.entry (\w+)", part).group(1)] = re.search(r"\b(wgmma|mma\.sync|tcgen05)", part) is not None
    for part in re.split(r"(?=Compiling entry function ')", ptxas)[1:]:
        name = re.match(r"Compiling entry function '(\w+)'", part).group(1)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found[name] = Usage(int(registers.group(1)), int(shared.group(1)) if shared else 0,
                            sum(map(int, spills.groups())) if spills else 0, mma.get(name, False))
    return found


def read_usage(folder):
    """bare name -> Usage, of all kernels; empty where nothing was compiled."""
    found = {}
    for path in sorted(folder.rglob("*.usage")):
        found.update(parse_usage(path.read_text(), path.with_suffix(".ptx").read_text()))
    names = demangle(found) if found else {}
    return {names[mangled]: usage for mangled, usage in found.items()}


def blocks_per_sm(usage, threads, dynamic):
    warps = -(-threads // 32)
    by_registers = REGISTERS // (-(-usage.registers * 32 // 256) * 256 * warps)
    shared = -(-(usage.shared + dynamic) // 128) * 128 + SHARED_RESERVED
    return min(by_registers, THREADS // (warps * 32), BLOCKS, SHARED // shared)


# ---- what the double is asked for ---------------------------------------------------------------

@dataclass
class Op:
    """The launches of one op, and how often a step has them."""
    op: str
    rows: int
    cols: int
    inner: int
    dtype: str
    launches: tuple  # of (kernel, grid, threads, dynamic bytes)
    n: int = 0


@dataclass
class Step:
    rows: int
    nodes: int = 0
    is_graph: bool = False
    up: int = 0       # bytes
    ops: list = field(default_factory=list)


def symbols(library):
    """offset -> bare name, of the functions of a library."""
    done = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True)
    found = {}
    for address, name in re.findall(r"^([0-9a-f]+) [tTwW] (.*)$", done.stdout, re.M):
        found[int(address, 16)] = bare_name(name)
    return found


RANGE = re.compile(r"(\w+) rows=(\d+) cols=(\d+)(?: of (\d+) (\w+))?$")


def parse_trace(lines, name_of):
    """The steps that the lines tell of, in their order: what lies between two waits and has an embedding."""
    steps, step, launches = [], Step(0), []

    def close():
        ops = Counter()
        group, last = [], None
        for text, launch in [*launches, (None, None)]:
            # An op that comes twice in a row begins anew with the kernel that it began with.
            if group and (text != last or launch[0] == group[0][0]):
                ops[(last, tuple(group))] += 1
                group = []
            group.append(launch)
            last = text
        for (text, kernels), n in ops.items():
            found = RANGE.match(text)
            if found:
                op, rows, cols, inner, dtype = found.groups()
                step.ops.append(Op(op, int(rows), int(cols), int(inner or 0), dtype or "f32", kernels, n))
        step.nodes = len(launches)
        step.rows = next((op.rows for op in step.ops if op.op.startswith("embed")), 0)
        if step.rows:
            steps.append(step)
    for line in lines:
        kind, *words = line.rstrip("\n").split("\t")
        if kind == "launch":
            library, offset, name, text, grid, block, shared, _ = words
            threads = 1
            for n in block.split(","):
                threads *= int(n)
            if name_of(library, int(offset, 16), name) == "upload_kernel":
                step.up += 16 * threads * int(grid.split(",")[0])
                continue
            launches.append((text, (name_of(library, int(offset, 16), name),
                                    tuple(map(int, grid.split(","))), threads, int(shared))))
        elif kind == "graph":
            step.is_graph = True
        elif kind == "copy" and words[0] == "1":
            step.up += int(words[1])
        elif kind == "wait":
            close()
            step, launches = Step(0), []
    close()
    return steps


def count_steps(build, flags, parts, path):
    """[(record of bench_device, step)]"""
    library = build / "libpkmserve_cudahost.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PKMSERVE_", "CUDA_HOST_"))}
    env = {**clean, "PKMSERVE_CUDA_LIBRARY": str(library.absolute()), "NVTX_INJECTION64_PATH": "the double",
           "CUDA_HOST_TRACE": str(path), "CUDA_HOST_IDLE": "1", "CUDA_HOST_MEMORY": "64G",
           "CUDA_HOST_SMS": str(constant("sm"))}
    done = subprocess.run([build / "tests/bench/bench_device", "--device", "cuda", "--seconds", "0.001", "--cold-mb",
                           "0", *flags, *parts], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit("gpu-count: bench_device: " + done.stderr.strip())
    known = {}

    def name_of(name, offset, text):
        if "libcublasLt" in name:
            return LIBRARY
        if name not in known:
            known[name] = symbols(build / name)
        return known[name].get(offset, text)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    with path.open() as lines:
        steps = parse_trace(lines, name_of)
    counted = [(record, find_step(steps, record)) for record in records if record.get("op") == "step"]
    return sorted(counted, key=lambda each: (each[0]["part"], each[0]["rows"]))


def find_step(steps, record):
    """The last step of a record's kind."""
    scored = record["part"] == "score"
    for step in reversed(steps):
        outputs = sum(op.rows * op.n for op in step.ops if op.op == "outputs")
        # A prompt's step wants outputs of one row of each sequence, a scored one's of all.
        is_kind = (outputs >= step.rows) == (scored or record["part"] == "decode")
        if step.rows == record["rows"] and is_kind:
            return step
    sys.exit("gpu-count: no step of %d rows (%s) among what was launched" % (record["rows"], record["part"]))


# ---- bytes, operations, time --------------------------------------------------------------------

SPLIT_KERNELS = ("linear_split<", "many_kernel<", "wide_kernel<", "few_kernel")


def is_split(op):
    """Whether it is three BF16 products in place of one of F32."""
    return any(each[0].startswith(SPLIT_KERNELS) for each in op.launches)


def op_cost(op, record, shape):
    """Bytes that it must move, operations."""
    rows, cols, inner = op.rows, op.cols, op.inner
    context = shape["positions"]
    # Of a prompt's rows the mean sees half of it; a generated one stands behind the middle.
    seen = context * 9 / 16 if record["part"] == "decode" else min(context, record["rows"]) / 2
    cache = ELEMENT[record["dtype"]]
    if op.op.endswith("_linear"):  # x, or what x is made of, and the normed rows
        normed = {"norm": 8, "add_norm": 12, "embed_norm": 4 + ELEMENT[op.dtype]}[op.op[:-len("_linear")]]
        return inner * cols * ELEMENT[op.dtype] + rows * (normed * inner + 4 * cols), 2 * rows * inner * cols
    if op.op == "linear" and is_split(op):  # rows and weights are three times as long
        return 6 * inner * cols + rows * (6 * inner + 4 * cols), 6 * rows * inner * cols
    if op.op == "linear":
        return inner * cols * ELEMENT[op.dtype] + 4 * rows * (inner + cols), 2 * rows * inner * cols
    if op.op == "attention":
        reads = rows if record["part"] == "decode" else rows / 64  # a tile of rows shares what it reads
        return 2 * cache * cols * seen * reads + 8 * rows * cols, 4 * rows * cols * seen
    if op.op == "pkm_search":
        n_score = shape["heads"] * 2 * shape["keys"]
        return n_score * inner * 4, (6 if is_split(op) else 2) * rows * n_score * inner
    if op.op == "pkm_read":
        return rows * shape["heads"] * shape["k"] * cols * ELEMENT[op.dtype], 0
    if op.op == "outputs":
        return 4 * rows * cols, constant("logit") * rows * cols
    per_element = {"embed": 4 + ELEMENT[op.dtype], "embed_norm": 4 + ELEMENT[op.dtype], "norm": 8, "add_norm": 16,
                   "gather": 8, "kv_store": 2 * (4 + cache)}
    return rows * cols * per_element.get(op.op, 8), 0


def blocks_of(launch):
    return launch[1][0] * launch[1][1] * launch[1][2]


def drawn_bytes(op, launch):
    """What the blocks of a product of ours read: each its weights and its rows, in F32 unless they came rounded."""
    kernel, grid = launch[0], launch[1]
    out_blocks, row_blocks = (grid[1], grid[0]) if kernel.startswith("gemm") else (grid[0], grid[1])
    element = 2 if re.match(r"gemm_kernel_bf16|gemv_kernel_bf16<gemv_bf16<\d+, \d+, false, true>", kernel) else 4
    if op.op == "add_norm_linear":
        element = 8
    return op.cols * op.inner * ELEMENT[op.dtype] * row_blocks + op.rows * op.inner * element * out_blocks


def main_launch(op, usage):
    """The one that does the work: on tensor cores, or with dynamic shared memory, or else with most threads."""
    def weight(launch):
        kernel, _, threads, dynamic = launch
        on_tensor_cores = kernel == LIBRARY or (kernel in usage and usage[kernel].mma)
        return on_tensor_cores, dynamic > 0, blocks_of(launch) * threads
    return max(op.launches, key=weight)


def search_us(op, launch, shape, slots):
    """Of a memory's search: what its blocks draw, most of it keys that others draw too, and the selections, several
    of a warp one after the other."""
    kernel, grid, threads, _ = launch
    n_block, n_warp, n_sm = blocks_of(launch), threads // 32, constant("sm")
    found = re.match(r"(many|wide|tile|few|split)_kernel(?:<(\d+))?", kernel)
    if not found:
        return 0, constant("half_us") + constant("pairs_us")
    all_keys = found.group(1) in ("many", "wide", "tile")  # of a head, or a part of them
    n_row = min(16 if found.group(1) == "few" else int(found.group(2)), op.rows)
    drawn = n_block * 4 * op.inner * (2 * shape["keys"] / (1 if all_keys else grid[0]) + n_row)
    is_apart = found.group(1) == "few" and 2 * n_row > n_warp  # a block selects one half, or both
    n_selecting = n_block if all_keys else n_block / grid[0] * (2 if is_apart else 1)
    is_hidden = found.group(1) == "wide"  # one half's selection, by the products of the other
    n_half = -(-(n_row if is_apart or is_hidden else 2 * n_row) // n_warp)
    in_a_row = n_half * constant("half_us") + -(-n_row // n_warp) * constant("pairs_us")
    in_a_row += constant("arrive_us") if is_apart else 0
    issued = op.rows * shape["heads"] * constant("selection") / constant("f32") / min(1, n_selecting / n_sm) * 1e6
    issued *= 2 / 3 if is_hidden else 1
    return drawn / (min(n_block, n_sm) * constant("sm_bandwidth")) * 1e6, max(in_a_row * -(-n_selecting // slots), issued)


def drawn_units(launch, rows, positions):
    """Blocks of a row and head, as attention_unit.cu has them: of rows of one length a grid of heads × units."""
    splits = -(-positions // DRAWN_SPLIT)
    share = -(-rows * splits // max(1, launch[1][1] - rows))
    while True:
        units = 1 if splits - share < DRAWN_SPARED else -(-splits // share)
        if rows * units <= launch[1][1]:
            return units
        share += -(-share // 8)


def read_from_memory(op, bytes_, shape):
    """Of the bytes that a memory's read draws: rows are taken for 128 columns at a time, so of slots that come again,
    drawn evenly, the cache has what it can hold of all that are distinct."""
    n_slot = shape["keys"] ** 2
    n_hit = op.rows * shape["heads"] * shape["k"]
    distinct = n_slot * (1 - (1 - 1 / n_slot) ** n_hit)
    return bytes_ * distinct / n_hit if distinct * 128 * ELEMENT[op.dtype] <= constant("cache") else bytes_


def op_us(op, record, shape, usage):
    n_sm = constant("sm")
    launch = main_launch(op, usage)
    by_library = launch[0] == LIBRARY
    n_block = n_sm if by_library else blocks_of(launch)
    chain = CHAIN_US.get(op.op, 0)
    if launch[0].startswith("drawn_kernel"):  # some blocks of the grid have nothing to do
        units = drawn_units(launch, op.rows, shape["positions"] * 9 // 16)
        n_block = launch[1][0] * op.rows * units
        chain = CHAIN_US["drawn attention" if units == 1 else "shared drawn attention"]
    taken = usage.get(launch[0])
    slots = n_sm * (max(1, blocks_per_sm(taken, launch[2], launch[3])) if taken else 1)
    bytes_, flops = op_cost(op, record, shape)
    prepared = 0 if op.op != "linear" else 10 if is_split(op) else 6
    bytes_ += (len(op.launches) - 1) * op.rows * max(op.cols, op.inner) * prepared
    blocks_draw = min(n_block, n_sm) * constant("sm_bandwidth")
    drawn = drawn_bytes(op, launch) if op.op.endswith("linear") and not by_library else 0
    rate = constant("cublaslt" if by_library else "mma" if taken and taken.mma else "f32")
    draw = min(constant("bandwidth"), blocks_draw)
    fill = min(1, n_block / n_sm) if n_block <= slots else n_block / (slots * -(-n_block // slots))
    work = max(bytes_ / draw, drawn / blocks_draw, flops / (rate * fill)) * 1e6
    if op.op == "pkm_read":
        work = max(bytes_ / blocks_draw, read_from_memory(op, bytes_, shape) / constant("bandwidth")) * 1e6
    if op.op == "pkm_search":
        drawing, selecting = search_us(op, launch, shape, slots)
        work = max(work, drawing) + selecting
    fixed = constant("node_us") + constant("latency_us")
    return len(op.launches) * fixed + chain + work, bytes_


def step_us(step, record, shape, usage):
    return sum(op.n * op_us(op, record, shape, usage)[0] for op in step.ops)


def floor_us(record):
    return max(record["bytes"] / constant("bandwidth"), record["flops"] / constant("matrix")) * 1e6


# ---- the report ---------------------------------------------------------------------------------

def table(head, rows):
    return ["", "| %s |" % " | ".join(head), "|" + "---|" * len(head), *("| %s |" % " | ".join(row) for row in rows)]


def described(op):
    return "%s %d×%d %s" % (op.op, op.cols, op.inner, op.dtype) if op.op.endswith("linear") else op.op


def measured():
    """(part, rows) -> µs of the steps in the newest report of a GPU; {} without one."""
    found = {}
    titles = {"Decode, one token of each sequence": "decode", "Prefill": "prefill",
              "Scoring, every row through the vocabulary": "score", "The memory layer alone": "memory"}
    for path in sorted((ROOT / "tests/bench/results").glob("gpu-*.md"))[-1:]:
        for section in path.read_text().split("\n## ")[1:]:
            part = titles.get(section.splitlines()[0])
            pattern = r"^\| product 262144 \| (\d+) \| ([\d.]+) \|" if part == "memory" else r"^\| (\d+) \| ([\d.]+) \|"
            if part:
                found.update({(part, int(n)): float(us) for n, us in re.findall(pattern, section, re.M)})
    return found


def measured_us(found, part, rows):
    return "%.0f" % found[part, rows] if (part, rows) in found else "-"


def summary_rows(counted, shape, usage):
    found = measured()
    for record, step in counted:
        us, floor = step_us(step, record, shape, usage), floor_us(record)
        few = sum(op.n * sum(each[0] != LIBRARY and blocks_of(each) < constant("sm") / 2 for each in op.launches)
                  for op in step.ops)
        yield ("%s of %d" % (record["part"], record["rows"]), "%d" % step.nodes, "graph" if step.is_graph else "eager",
               "%d" % few, "%.0f" % (record["bytes"] / 1e6), "%.1f" % (step.up / 1e3),
               "%.0f" % floor, "%.0f" % us, "%.0f %%" % (100 * floor / us),
               measured_us(found, record["part"], record["rows"]))


def layer_rows(counted, shape, usage):
    """The memory layer: query (the product of an F32 weight, split or not), search, read."""
    found = measured()
    for record, step in counted:
        if record["part"] == "score":
            continue
        parts = {}
        for op in step.ops:
            name = "query" if op.op.endswith("linear") and op.dtype == "f32" else op.op
            if name in ("query", "pkm_search", "pkm_read"):
                parts[name] = (len(op.launches), op_us(op, record, shape, usage)[0])
        if len(parts) == 3:
            yield ("%d" % record["rows"], "%d" % sum(n for n, _ in parts.values()),
                   *("%.1f" % parts[name][1] for name in ("query", "pkm_search", "pkm_read")),
                   "%.0f" % sum(us for _, us in parts.values()), measured_us(found, "memory", record["rows"]))


def op_rows(step, record, shape, usages):
    first = usages[0][1] if usages else {}
    for op in step.ops:
        us, bytes_ = op_us(op, record, shape, first)
        for i, launch in enumerate(op.launches):
            kernel, grid, threads, dynamic = launch
            taken = [usage.get(kernel) for _, usage in usages]
            is_main = launch is main_launch(op, first)
            yield (described(op) if i == 0 else "", "%d" % op.n, "`%s`" % kernel,
                "-" if kernel == LIBRARY else "%s × %d" % ("×".join(str(n) for n in grid if n > 1) or "1", threads),
                " / ".join("%d" % u.registers if u else "-" for u in taken) or "-",
                "%.1f" % (((taken[0].shared if taken and taken[0] else 0) + dynamic) / 1024),
                " / ".join("%d" % u.spills if u else "-" for u in taken) or "-",
                "%d" % blocks_per_sm(taken[0], threads, dynamic) if taken and taken[0] else "-",
                "%.2f" % (bytes_ / 1e6) if is_main else "", "%.1f" % us if is_main else "",
                "%.0f" % (op.n * us) if is_main else "")


INTRODUCTION = """# What a step launches, counted

**Counted, not measured**: written by `make gpu-count GPU_COUNT="--write kernels/cuda/COUNT.md"`, on a machine without a
GPU; what was measured stands beside it, from the newest report in `tests/bench/results`, on an H200. Model A: 12 layers of 1024, 16 heads, 60k vocabulary, one memory of 512² slots with 4 heads of 32, BF16;
generated tokens in the middle of a context of 512, prompts of 512. Nodes, grids and bytes are what the test double was
asked for; registers, shared memory and spills are ptxas's, blocks per multiprocessor follow from them. The times follow
from the constants below and from nothing else: each launch costs a node and a latency, an op the largest of its bytes
at what its blocks draw, of a product what all its blocks read, and its operations at what its units reach, and for some
a chain of dependent steps, in µs:
{chains}.
A memory's search draws keys in each block, and its warps select one after the other;
of the values that are read again, the cache keeps what it can hold of all, slots drawn evenly.
`tests/gpu/count.py` has the formulas. A measurement (`make check-gpu`) corrects the constants."""


OP_HEAD = ["op", "n", "kernel", "grid × threads", "registers (%s)", "shared KB", "spilled bytes", "blocks per SM", "MB each",
           "µs each", "µs all"]


def write_report(counted, shape, usages):
    usage = usages[0][1] if usages else {}
    named = " / ".join("sm_" + arch for arch, _ in usages) or "not compiled"
    lines = INTRODUCTION.format(chains=", ".join("`%s` %g" % item for item in CHAIN_US.items())).splitlines()
    lines += table(["constant", "value", "what"], [("`%s`" % k, "%g" % v, text) for k, (v, text) in MODEL.items()])
    lines += ["", "## Steps"] + table(
        ["step", "nodes", "as", "nodes on less than half of the multiprocessors", "MB at least", "KB up",
         "floor µs", "estimate µs", "share", "measured µs"], summary_rows(counted, shape, usage))
    lines += ["", "## The memory layer"] + table(
        ["rows", "nodes", "query µs", "search µs", "read µs", "all µs", "measured µs"], layer_rows(counted, shape, usage))
    head = [name.replace("%s", named) for name in OP_HEAD]
    for record, step in counted:
        lines += ["", "## %s of %d, op by op" % (record["part"].capitalize(), record["rows"])] + table(
            head, op_rows(step, record, shape, usages))
    return "\n".join(lines) + "\n"


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--arch", default="90 100")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--small", action="store_true", help="a small model, for the test")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    shape = SMALL if options.small else MODEL_A
    counted = count_steps(options.build, SMALL_FLAGS if options.small else [], SMALL_PARTS if options.small else PARTS,
                          options.build / "gpu-count" / "trace.txt")
    usages = [(arch, read_usage(options.build / "gpu-count" / ("sm_" + arch))) for arch in options.arch.split()]
    text = write_report(counted, shape, [(arch, usage) for arch, usage in usages if usage])
    if options.write:
        options.write.write_text(text)
    else:
        print(text, end="")
    unknown = {launch[0] for _, step in counted for op in step.ops for launch in op.launches
               if any(usage and launch[0] not in usage for _, usage in usages) and launch[0] != LIBRARY}
    if unknown:
        sys.exit("gpu-count: ptxas says nothing of %s: make gpu-count compiles them" % ", ".join(sorted(unknown)))


if __name__ == "__main__":
    main(sys.argv[1:])
