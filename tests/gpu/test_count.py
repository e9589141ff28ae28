"""make gpu-count on a small model: what the double was asked for, what ptxas says, and what follows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("B", "build")
sys.path.insert(0, str(Path(__file__).parent))

import count  # noqa: E402

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3a_cu1kIfEvv' for 'sm_90'
ptxas info    : Function properties for _ZN3a_cu1kIfEvv
    16 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 63 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compiling entry function '_ZN3a_cu1lEv' for 'sm_90'
ptxas info    : Function properties for _ZN3a_cu1lEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 0 barriers
"""
PTX = """.entry _ZN3a_cu1kIfEvv(
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}
.entry _ZN3a_cu1lEv(
ret;
"""


def test_words_of_ptxas_are_read():
    found = count.parse_usage(PTXAS, PTX)
    assert found == {"_ZN3a_cu1kIfEvv": count.Usage(63, 2048, 16, True), "_ZN3a_cu1lEv": count.Usage(22, 0, 0, False)}


@pytest.mark.parametrize("registers,static,threads,dynamic,due", [
    (63, 0, 128, 70336, 3),     # shared memory
    (79, 0, 128, 22528, 6),     # registers
    (254, 0, 64, 33792, 4),     # registers, in eights
    (16, 0, 1024, 0, 2),        # threads
    (16, 0, 32, 0, 32),         # blocks
    (16, 2048, 128, 229376 - 4096, 1),
])
def test_blocks_on_a_multiprocessor(registers, static, threads, dynamic, due):
    assert count.blocks_per_sm(count.Usage(registers, static, 0, False), threads, dynamic) == due


@pytest.mark.parametrize("demangled,due", [
    ("(anonymous namespace)::part_kernel<unsigned short, false>((anonymous namespace)::parts)",
     "part_kernel<unsigned short, false>"),
    ("void _GLOBAL__N__f5_12_attention_cu_37::kernel<float, (int)4>(float const*, int)", "kernel<float, (int)4>"),
    ("rope(tensor, int)", "rope"),
])
def test_both_compilers_names_are_one(demangled, due):
    assert count.bare_name(demangled) == due


def test_an_ops_work_is_its_products_and_not_its_preparations():
    rounding, product = ("linear_round", (1, 1024, 1), 128, 0), ("gemm", (8, 24, 1), 256, 65536)
    op = count.Op("linear", 1024, 3072, 1024, "bf16", (rounding, product), 12)
    assert count.main_launch(op, {}) == product
    search = (("scores", (30, 1, 1), 256, 0), ("select", (1, 1, 1), 512, 0))
    op = count.Op("pkm_search", 1, 32, 64, "f32", search, 1)
    assert count.main_launch(op, {}) == search[0]
    usage = {"select": count.Usage(64, 0, 0, True)}
    assert count.main_launch(op, usage) == search[1]


@pytest.mark.parametrize("launch,rows,drawn,turns", [
    # a block draws all keys of a head, and its warps select four halves and two rows' pairs each, or twice as many; of
    # the last kind one half's are selected beside the other's products
    (("tile_kernel<16, 16>", (4, 4, 1), 256, 0), 64, 4 * 128 * (1024 + 16), (4, 2, 0)),
    (("many_kernel<32, 16>", (4, 3, 1), 256, 0), 96, 4 * 128 * (1024 + 32), (8, 4, 0)),
    (("wide_kernel<16, 16>", (4, 1, 1), 512, 0), 8, 4 * 128 * (1024 + 8), (1, 1, 0)),
    # a sixteenth of the keys; the last block selects both halves, or each half's, of more rows than it has warps for
    (("few_kernel<16, 16>", (16, 4, 1), 512, 0), 6, 4 * 128 * (64 + 6), (1, 1, 0)),
    (("few_kernel<16, 16>", (16, 4, 1), 512, 0), 9, 4 * 128 * (64 + 9), (1, 1, 1)),
    (("few_kernel<16, 8>", (16, 4, 16), 256, 0), 256, 4 * 128 * (64 + 16), (2, 2, 1)),
    (("split_kernel<4>", (8, 4, 1), 128, 0), 4, 4 * 128 * (128 + 4), (2, 1, 0)),
    (("any_kernel", (4, 1, 1), 256, 0), 1, 0, (1, 1, 0)),
    # so many that the instructions of all count
    (("many_kernel<32, 16>", (4, 128, 1), 256, 0), 4096, 4 * 128 * (1024 + 32), None),
])
def test_a_search_draws_keys_in_each_block_and_selects_in_turns(launch, rows, drawn, turns):
    op = count.Op("pkm_search", rows, 128, 128, "f32", (launch,), 1)
    n_block, n_sm = count.blocks_of(launch), count.constant("sm")
    drawing, selecting = count.search_us(op, launch, count.MODEL_A, 2 * n_sm)
    assert drawing == pytest.approx(drawn * n_block / min(n_block, n_sm) / count.constant("sm_bandwidth") * 1e6)
    if turns is None:
        assert selecting == pytest.approx(rows * 4 * count.constant("selection") / count.constant("f32") * 1e6)
    else:
        names = ("half_us", "pairs_us", "arrive_us")
        assert selecting == pytest.approx(sum(n * count.constant(name) for n, name in zip(turns, names)))


@pytest.mark.parametrize("rows,distinct", [(1, 1), (1024, 0.787), (4096, 1)])  # all slots would not fit the cache
def test_values_that_come_again_are_read_from_the_cache(rows, distinct):
    op = count.Op("pkm_read", rows, 1024, 0, "bf16", (), 1)
    assert count.read_from_memory(op, 1000, count.MODEL_A) == pytest.approx(1000 * distinct, abs=1)


def test_a_product_that_norms_its_rows_moves_them_too():
    record, shape = {"part": "decode", "dtype": "bf16", "rows": 2}, count.MODEL_A
    weights, results = 3072 * 1024 * 2, 4 * 2 * 3072
    for name, element in (("linear", 4), ("norm_linear", 8), ("add_norm_linear", 12), ("embed_norm_linear", 6)):
        op = count.Op(name, 2, 3072, 1024, "bf16", (), 1)
        assert count.op_cost(op, record, shape) == (weights + results + 2 * 1024 * element, 2 * 2 * 3072 * 1024), name
        assert count.described(op) == name + " 3072×1024 bf16"


def test_blocks_of_a_product_read_their_weights_and_rows():
    def drawn(name, kernel, grid, dtype="bf16"):
        return count.drawn_bytes(count.Op(name, 32, 1024, 512, dtype, (), 1), (kernel, grid, 128, 0))
    weights, rows = 1024 * 512 * 2, 32 * 512
    assert drawn("linear", "gemv_kernel_bf16<gemv_bf16<2, 1, false, false> >", (32, 2, 1)) == 2 * weights + 32 * 4 * rows
    assert drawn("linear", "gemv_kernel_bf16<gemv_bf16<2, 4, false, true> >", (32, 2, 1)) == 2 * weights + 32 * 2 * rows
    assert drawn("linear", "gemm_kernel_bf16<gemm_bf16<2, 4, 2, 2>, true>", (4, 16, 1)) == 4 * weights + 16 * 2 * rows
    assert drawn("add_norm_linear", "gemv_kernel_bf16<>", (64, 1, 1)) == weights + 64 * 8 * rows
    assert drawn("linear", "gemm_kernel_f32<gemm_f32<1, 2> >", (1, 16, 1), "f32") == 2 * weights + 16 * 4 * rows


@pytest.mark.parametrize("rows,positions,due", [(1, 288, 1), (1, 320, 5), (1, 8192, 8), (4, 384, 1), (4, 512, 2),
                                               (8, 8192, 1)])
def test_blocks_that_share_a_row_of_drawn_tokens(rows, positions, due):
    assert count.drawn_units(("drawn_kernel", (16, rows + 8, 1), 384, 0), rows, positions) == due


def test_a_split_product_is_three_on_tensor_cores():
    product, split = ("gemm", (8, 16, 1), 256, 65536), ("linear_split<unsigned short>", (1, 1024, 1), 128, 0)
    one = count.Op("linear", 1024, 1024, 512, "f32", (product,), 1)
    three = count.Op("linear", 1024, 1024, 512, "f32", (split, product), 1)
    record = {"part": "prefill", "rows": 1024, "dtype": "bf16"}
    cost = [count.op_cost(op, record, count.SMALL) for op in (one, three)]
    assert cost[1][1] == 3 * cost[0][1]
    assert cost[1][0] == 1024 * (512 * 6 + 4 * 1024) + 6 * 512 * 1024
    assert count.main_launch(three, {}) == product


def test_a_small_models_steps_are_counted(tmp_path):
    if not (BUILD / "libpkmserve_cudahost.so").exists():
        pytest.skip("no double: make cuda-host")
    path = tmp_path / "count.md"
    done = subprocess.run([sys.executable, "tests/gpu/count.py", "--build", BUILD, "--arch", "", "--small", "--write",
                           path], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert "**Counted, not measured**" in text
    for step, kind in (("decode of 1", "graph"), ("decode of 2", "graph"), ("prefill of 32", "eager"),
                       ("score of 32", "eager")):
        nodes = int(re.search(r"^\| %s \| (\d+) \| %s \|" % (step, kind), text, re.M).group(1))
        rows = text.split("## %s, op by op" % step.capitalize())[1].split("\n## ")[0].splitlines()[4:]
        assert sum(int(row.split("|")[2]) for row in rows if row) == nodes > 0, step
        assert sum(row.startswith("| attention | 3 |") for row in rows) == 1, rows
        assert sum(row.startswith("| pkm_search | 1 |") for row in rows) == 1, rows
        assert sum(row.startswith("| outputs | 1 | `outputs_kernel` |") for row in rows) == 1, rows
    prompt = text.split("## Prefill of 32")[1].split("##")[0]
    assert re.search(r"^\| attention \| 3 \| `mma_kernel<1, false>` \|", prompt, re.M), prompt
    assert len(re.findall(r"^\| (?:1|2|32) \| \d+ \| [\d.]+ \|", text, re.M)) == 3  # the memory layer
    assert re.search(r"^\| 32 \| 4 \|", text, re.M)  # of a prompt, what splits the query's rows too
