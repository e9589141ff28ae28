"""Every op against ref, and ops and steps under compute-sanitizer. Needs nothing but the programs."""

from run import OVERLAP, OWN
from speed import SMALL

AT_ONCE = 6  # processes that share the GPU while only correctness counts

# The rows of tests/kernels/check_kernels.c, without those for the host alone. The longest first; behind them, those
# that are most often wrong.
OPS = ["linear", "attention", "pkm_search", "sample", "linear_drawn", "norm_linear", "linear_many", "linear_outputs", "sample_large", "logprobs_large",
       "attention_long", "attention_many", "pkm_search_large", "transfer", "attention_bf16", "embed", "norm", "add_norm", "ffn", "span_attention", "pkm_search_many", "pkm_ties",
       "pkm_nan", "l2_norm", "pkm_rescore", "rms_norm", "head_norm", "rope", "gate", "pkm_experts", "pkm_ablate",
       "pkm_read", "gather", "log_softmax", "logprobs"]

# Per cent of the usual cases: in a rehearsal, on a GPU; other cases where kernels overlap.
OPS_WAYS = {"": ("3", "45", {}), ", overlapping": ("1", "15", {**OVERLAP, "CHECK_SEED": "2"})}


def first_lines(text):
    return " / ".join(line.strip() for line in text.strip().splitlines()[:3])[:500]


def check_ops(run):
    def one(op, way):
        small, percent, env = OPS_WAYS[way]
        return run.command([run.program("tests/kernels/run_check")],
                           env={"CHECK_BACKEND": run.device, "CHECK_OP": op,
                                "CHECK_PERCENT": small if run.small else percent, **env})
    jobs = [((op, way), lambda o=op, w=way: one(o, w)) for way in OPS_WAYS for op in OPS]
    for (op, way), done in run.parallel(jobs, AT_ONCE):
        said = done.out.strip().splitlines()
        result = said[-1].split(": ", 1)[-1] if said else "not run" if done.late else "no result"
        run.tables.setdefault("ops", []).append("| %s%s | %s |" % (op, way, result))
        if not done.good:
            run.lose("op %s%s against ref" % (op, way), done, first_lines(done.err))


# ---- under the sanitizers ---------------------------------------------------------------------

N_TELLING = 5  # the steps and the first four of OPS come first, under all tools
SANITIZER_TOOLS = ["memcheck", "racecheck", "synccheck"]
# A small model's steps, captured and not, beside the ops.
STEPS = [*SMALL, "--seconds", "0.001", "--cold-mb", "0", "decode:1,3", "prefill:5,70", "score:5"]


def sanitizer_front(program, tool):
    return [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]


def sanitizer_missing(run, program):
    """None, or why compute-sanitizer cannot run here: some virtual GPUs do not let it, and it may even exit
    with 0 then. One case of an op must get to its end."""
    if not program:
        return "it is not on this machine"
    done = run.command([*sanitizer_front(program, "memcheck"), run.program("tests/kernels/run_check")],
                       env={"CHECK_BACKEND": run.device, "CHECK_OP": "norm", "CHECK_PERCENT": "1"})
    if done.late or "norm: " in done.out:
        return None
    return sanitizer_lines(done) or done.why()


def sanitizer_lines(done):
    return first_lines("\n".join(line for line in (done.out + done.err).splitlines()
                                 if "=====" in line and "COMPUTE-SANITIZER" not in line))


def check_sanitizers(run):
    """compute-sanitizer over a small model's steps, and over every op on a few small shapes. By our own products: before
    the tools have looked at cuBLASLt's kernels the part's time is over."""
    program = run.machine.get("sanitizer")
    missing = sanitizer_missing(run, program)
    if missing:
        run.note("memcheck, racecheck, synccheck not run: compute-sanitizer: " + missing)
        return

    def job(tool, op):
        front = sanitizer_front(program, tool)
        if op == "model":
            return run.command([*front, run.program("tests/bench/bench_device"), "--device", run.device, *STEPS], env=OWN)
        return run.command([*front, run.program("tests/kernels/run_check")],
                           env={**OWN, "CHECK_BACKEND": run.device, "CHECK_OP": op, "CHECK_PERCENT": "3"})
    tools = SANITIZER_TOOLS[:1] if run.small else SANITIZER_TOOLS
    ops = ["model", "pkm_search", "sample"] if run.small else ["model", *OPS]
    jobs = [((tool, op), lambda t=tool, o=op: job(t, o))
            for some in (ops[:N_TELLING], ops[N_TELLING:]) for tool in tools for op in some]
    n_good = dict.fromkeys(tools, 0)
    for (tool, op), done in run.parallel(jobs, 2 * AT_ONCE):
        n_good[tool] += done.good
        if not done.good:
            run.lose("%s of %s" % (tool, op), done, sanitizer_lines(done))
    for tool in tools:
        run.tables.setdefault("sanitizers", []).append("| %s | %d of %d |" % (tool, n_good[tool], len(ops)))
