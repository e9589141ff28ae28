"""Whether the device computes what it should: the golden cases, CPU against device, the same bits however
the work is cut, captured or placed. Needs NumPy.

Everything comes from two programs: forward, which writes all that a model's steps give (see forward.c),
and pkmserve-engine, the whole engine from token ids to text.
"""

import json
import sys
import threading
from dataclasses import replace

import numpy as np

from ops import AT_ONCE
from run import APART, EAGER, GEMV, MMA, OVERLAP, OWN, ROOT, SPLIT

sys.path.insert(0, str(ROOT / "tests" / "golden"))
import golden_data as gd  # noqa: E402

# Cases whose bits are compared: product and flat keys, memories within and after layers, shared values.
BIT_CASES = ["pkm12", "pkm-added", "flat", "swilu-shared"]
# Of them, those with split keys and queries too, last.
SPLIT_CASES = ["pkm12", "swilu-shared"]
MMA_CASE = "pkm12"  # heads of a multiple of 16 columns


# ---- forward ----------------------------------------------------------------------------------

def read_arrays(path):
    """name -> array, of what forward wrote."""
    found = {}
    with open(path, "rb") as file:
        while header := file.readline():
            name, dtype, rows, cols = header.decode().split()
            shape = int(rows), int(cols)
            data = file.read(4 * shape[0] * shape[1])
            found[name] = np.frombuffer(data, {"f32": "<f4", "i32": "<i4"}[dtype]).reshape(shape)
    return found


def write_sequences(path, items):
    """In one piece: parts that run at the same time have the same file."""
    part = path.with_suffix(".%d" % threading.get_ident())
    part.write_text("".join("%d %s\n" % (item.get("lang") or 0, " ".join(map(str, item["ids"])))
                            for item in items))
    part.replace(path)


def forward(run, model, sequences, *cases):
    """name -> arrays of cases (name, flags, environment), all in one process, as a GPU's context takes seconds. One
    that fails is reported and missing; a new process goes on behind it."""
    lines = [(name, str(run.build / "gpu-out" / name), flags, env) for name, flags, env in cases]
    found = {}
    while lines:
        path = run.build / "gpu-out" / (lines[0][0] + ".cases")
        path.write_text("".join("%s\n" % " ".join(
            [str(model), str(sequences), out, "--device", run.device, *flags,
             *("--set %s=%s" % setting for setting in env.items())]) for _, out, flags, env in lines))
        done = run.command([run.program("tests/gpu/forward"), "--cases", path])
        for said in done.out.splitlines():
            name, out, _, _ = lines.pop(0)
            assert said == out, done.out
            found[name] = read_arrays(out)
        if lines:
            run.lose("forward, " + lines.pop(0)[0], done)
        if done.late:
            for name, _, _, _ in lines:
                run.lose("forward, " + name, replace(done, seconds=0))
            return found
    return found


def model_directory(run, case):
    return run.build / "golden" / case


def case_sequences(run, case, job):
    path = run.build / "gpu-out" / ("%s.%s.sequences" % (case, job))
    items = gd.expected(case)["sequences"]
    if run.small:
        items = items[:2]
    write_sequences(path, items)
    return path, items


def log_softmax(logits):
    z = logits.astype(np.float64)
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


# ---- the golden cases -------------------------------------------------------------------------

def slot_errors(case, due, got, info):
    """Compares the short sequence's lookups; yields what is wrong."""
    for m, (name, memory) in enumerate(due["memory_short"].items()):
        if "indices" not in memory:
            continue  # tied slots: either will do
        n_head, k_top = np.shape(memory["indices"])[1:]
        slots = got["0.slots.%d" % m].reshape(-1, n_head, k_top)
        shares = got["0.shares.%d" % m].reshape(-1, n_head, k_top)
        slots, shares = gd.by_slot(slots, shares)
        want, weights = gd.by_slot(np.array(memory["indices"]), np.array(memory["weights"]))
        if not (slots == want).all():
            yield "%s, memory %s: other slots than the original's" % (case, name)
            continue
        error = np.abs(shares - weights).max()
        info["weight"] = max(info["weight"], float(error))
        if error > gd.WEIGHT:
            yield "%s, memory %s: weights off by %.2g, allowed %.2g" % (case, name, error, gd.WEIGHT)


def sequence_errors(case, items, got, info):
    for s, item in enumerate(items):
        logprob = got["%d.logprob" % s][:-1, 0].astype(np.float64)
        want = np.array(item["logprobs_f64"])
        error = np.abs(logprob - want).max()
        info["logprob"] = max(info["logprob"], float(error))
        if not error <= gd.LOGPROB:  # also NaN
            yield "%s, sequence %d: log-probabilities off by %.2g, allowed %.2g" % (
                case, s, error, gd.LOGPROB)
        nll, ppl = -logprob.sum(), np.exp(-logprob.mean())
        if not (abs(nll - item["nll_f64"]) <= gd.NLL
                and abs(ppl / item["ppl_f64"] - 1) <= gd.PPL_RELATIVE):
            yield "%s, sequence %d: nll %.6f, due %.6f; perplexity %.6f, due %.6f" % (
                case, s, nll, item["nll_f64"], ppl, item["ppl_f64"])
    rows = gd.expected_arrays(case)["logprobs_full_f64"]
    error = np.abs(log_softmax(got["0.logits"]) - rows).max()
    if not error <= gd.LOGPROB_ROW:
        yield "%s: whole distributions off by %.2g, allowed %.2g" % (case, error, gd.LOGPROB_ROW)
    if got["0.drawn"][:, 0].tolist() != items[0]["argmax"]:
        yield "%s: other likeliest tokens than the original's" % case


def kl(p_logits, q_logits):
    """Mean over positions of KL(p || q), in nats."""
    p, q = log_softmax(p_logits), log_softmax(q_logits)
    return float((np.exp(p) * (p - q)).sum(1).mean())


def together(got, field, n):
    return np.concatenate([got["%d.%s" % (s, field)] for s in range(n)])


def perplexity(got, n):
    logprob = np.concatenate([got["%d.logprob" % s][:-1, 0] for s in range(n)])
    return float(np.exp(-logprob.astype(np.float64).mean()))


F32, BF16 = ["--dtype", "f32"], ["--dtype", "bf16"]


def golden_runs(case, cpu_dtype):
    """On the device in both types, and on the CPU."""
    return [(case + ".f32", [*F32, "--logits"], {}), (case + ".bf16", [*BF16, "--logits"], {}),
            (case + ".cpu", ["--dtype", cpu_dtype, "--device", "cpu"], {})]


def check_case(run, case):
    """A row of the report's table."""
    sequences, items = case_sequences(run, case, "golden")
    n, model = len(items), model_directory(run, case)
    info = {"logprob": 0.0, "weight": 0.0}
    got = forward(run, model, sequences, *golden_runs(case, "f32"), (case + ".overlap", [*F32, "--logits"], OVERLAP))
    f32, cpu, bf16, overlapping = (got.get(case + way) for way in (".f32", ".cpu", ".bf16", ".overlap"))
    if f32 is None or cpu is None or bf16 is None:
        return
    wrong = differences(f32, overlapping) if overlapping is not None else []
    if wrong:
        run.fail("%s, overlapping kernels: bits differ: %s" % (case, ", ".join(wrong[:4])))
    due = gd.expected(case)
    for error in [*sequence_errors(case, items, f32, info), *slot_errors(case, due, f32, info)]:
        run.fail(error)
    apart = float(np.abs(together(f32, "logprob", n) - together(cpu, "logprob", n)).max())
    if not apart <= gd.LOGPROB:
        run.fail("%s: device and CPU differ by %.2g, allowed %.2g" % (case, apart, gd.LOGPROB))
    divergence = kl(together(f32, "logits", n), together(bf16, "logits", n))
    if not np.isfinite(divergence):
        run.fail("%s: the bf16 distributions are not finite" % case)
    ppl, ppl_bf16 = perplexity(f32, n), perplexity(bf16, n)
    run.tables.setdefault("golden", []).append(
        "| %s | %.1e | %.1e | %.1e | %.2e | %.3f | %+.3f %% |" % (
            case, info["logprob"], info["weight"], apart, divergence, ppl,
            100 * (ppl_bf16 / ppl - 1)))


def layer_errors(case, due, got, info):
    """Of Memory Layers at Scale: log-probabilities, slots, and shares as the softmax of scores."""
    for s, item in enumerate(due["sequences"][:info["n"]]):
        error = np.abs(got["%d.logprob" % s][:-1, 0].astype(np.float64) - item["logprobs"]).max()
        info["logprob"] = max(info["logprob"], float(error))
        if not error <= gd.LOGPROB:  # also NaN
            yield "%s, sequence %d: log-probabilities off by %.2g, allowed %.2g" % (
                case, s, error, gd.LOGPROB)
        for m, memory in enumerate(item["memory"].values()):
            slots, scores = np.array(memory["indices"]), np.array(memory["scores"])
            rows = slice(-len(slots), None)
            if not (got["%d.slots.%d" % (s, m)][rows] == slots.reshape(len(slots), -1)).all():
                yield "%s, sequence %d, memory %d: other slots than the original's" % (case, s, m)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares = (shares / shares.sum(-1, keepdims=True)).reshape(len(slots), -1)
            error = np.abs(got["%d.shares.%d" % (s, m)][rows] - shares).max()
            info["weight"] = max(info["weight"], float(error))
            if not error <= gd.LOGPROB:
                yield "%s, sequence %d, memory %d: weights off by %.2g" % (case, s, m, error)


def check_layers(run, case):
    """A row of the report's table."""
    sequences, items = case_sequences(run, case, "golden")
    n, model = len(items), model_directory(run, case)
    info = {"logprob": 0.0, "weight": 0.0, "n": n}
    got = forward(run, model, sequences, *golden_runs(case, "f32"))
    f32, cpu, bf16 = (got.get(case + way) for way in (".f32", ".cpu", ".bf16"))
    if f32 is None or cpu is None or bf16 is None:
        return
    for error in layer_errors(case, gd.expected(case), f32, info):
        run.fail(error)
    apart = float(np.abs(together(f32, "logprob", n) - together(cpu, "logprob", n)).max())
    if not apart <= gd.LOGPROB:
        run.fail("%s: device and CPU differ by %.2g, allowed %.2g" % (case, apart, gd.LOGPROB))
    ppl, ppl_bf16 = perplexity(f32, n), perplexity(bf16, n)
    run.tables.setdefault("golden", []).append(
        "| %s | %.1e | %.1e | %.1e | %.2e | %.3f | %+.3f %% |" % (
            case, info["logprob"], info["weight"], apart,
            kl(together(f32, "logits", n), together(bf16, "logits", n)), ppl,
            100 * (ppl_bf16 / ppl - 1)))


def check_engine(run, case):
    """The whole engine: perplexity of the sequences, greedy text of the prompts."""
    due, folder = gd.expected(case), run.build / "gpu-out"
    common = ["--model", model_directory(run, case), "--device", run.device, "--dtype", "f32",
              "--ids", "--json"]
    by_language = {}
    for s, item in enumerate(due["sequences"][:2 if run.small else None]):
        path = folder / ("%s.%d.ids" % (case, s))
        path.write_text(" ".join(map(str, item["ids"])))
        by_language.setdefault(tuple(language(item)), []).append((s, item["nll_f64"], path))
    for chosen, scored in by_language.items():
        done = run.command([run.program("pkmserve-engine"), "score", *common, *chosen, *(path for _, _, path in scored)])
        if not done.good:
            run.lose("%s: score of sequences %s" % (case, ", ".join(str(s) for s, _, _ in scored)), done)
            continue
        for (s, nll, _), result in zip(scored, json.loads(done.out)["results"]):
            if not abs(-result["sum_logprob"] - nll) <= gd.NLL:
                run.fail("%s: score of sequence %d: nll %.6f is due, got %.6f" % (
                    case, s, nll, -result["sum_logprob"]))
    for g, item in enumerate(due["greedy"]):
        done = run.command([run.program("pkmserve-engine"), "generate", *common, *language(item),
                            "--temperature", "0", "--ignore-eos", "--max-tokens",
                            len(item["tokens"]), " ".join(map(str, item["prompt"]))])
        if not done.good:
            run.lose("%s: greedy tokens of prompt %d" % (case, g), done)
            continue
        got = json.loads(done.out)["choices"][0]["token_ids"]
        if got != item["tokens"]:
            run.fail("%s: greedy tokens of prompt %d: %s is due, got %s" % (
                case, g, item["tokens"], got))


def language(item):
    return [] if item.get("lang") is None else ["--language", item["lang"]]


def check_demo(run):
    """The shipped model, which is a trained one: what bf16 does to real text."""
    model = ROOT / "models" / "demo"
    if not (model / "parity.json").exists():
        run.note("models/demo is not here: its case not run")
        return
    items = json.loads((model / "parity.json").read_text())["cases"]
    sequences = run.build / "gpu-out" / "demo.sequences"
    write_sequences(sequences, items)
    got = forward(run, model, sequences, *golden_runs("demo", "bf16"))
    f32, bf16, cpu = (got.get("demo" + way) for way in (".f32", ".bf16", ".cpu"))
    if f32 is None or bf16 is None or cpu is None:
        return
    n = len(items)
    want = np.concatenate([item["logprobs"] for item in items])
    got = np.concatenate([f32["%d.logprob" % s][:-1, 0] for s in range(n)])
    error = float(np.abs(got - want).max())
    if not error <= gd.LOGPROB:
        run.fail("demo: log-probabilities off by %.2g from the trainer's, allowed %.2g"
                 % (error, gd.LOGPROB))
    ppl, ppl_bf16 = perplexity(f32, n), perplexity(bf16, n)
    run.tables.setdefault("golden", []).append(
        "| demo | %.1e |  |  | %.2e | %.3f | %+.3f %% |" % (
            error, kl(together(f32, "logits", n), together(bf16, "logits", n)), ppl,
            100 * (ppl_bf16 / ppl - 1)))
    run.note("demo in bf16: perplexity %.4f on the device, %.4f on the CPU"
             % (ppl_bf16, perplexity(cpu, n)))


def check_golden(run):
    cases = gd.NAMES[:2] if run.small else gd.NAMES
    jobs = [(case, lambda c=case: check_case(run, c)) for case in cases]
    jobs += [(case, lambda c=case: check_engine(run, c)) for case in cases]
    jobs += [(case, lambda c=case: check_layers(run, c)) for case in gd.LAYER_NAMES]
    jobs.append(("demo", lambda: check_demo(run)))
    run.parallel(jobs, AT_ONCE)


# ---- the same bits ----------------------------------------------------------------------------

# name, flags, environment: each must give the bits of whole sequences alone. All rows are a request's, single ones too.
WAYS = [
    ("in chunks of 7", ["--rows", "7"], {}),
    ("token by token", ["--rows", "1"], {}),
    ("together, whole", ["--rows", "0", "--together"], {}),
    ("together, token by token", ["--rows", "1", "--together"], {}),
    ("rows of all numbers mixed", ["--rows", "1,5,64,0", "--together"], {}),
    ("values in host memory", ["--rows", "0", "--placement", "host"], {}),
    ("token by token, overlapping", ["--rows", "1"], OVERLAP),
    ("rows of all numbers mixed, overlapping", ["--rows", "1,5,64,0", "--together"], OVERLAP),
]
# The same of drawn tokens, whose kernels are others: each must give the bits of the first.
DRAWN_WAYS = [
    ("drawn, eager", ["--rows", "1", "--drawn"], EAGER),
    ("drawn", ["--rows", "1", "--drawn"], {}),
    ("drawn together", ["--rows", "1", "--drawn", "--together"], {}),
    ("drawn together, without gemm", ["--rows", "1", "--drawn", "--together"], GEMV),
    ("drawn, norms apart", ["--rows", "1", "--drawn"], APART),
    ("drawn together, norms apart", ["--rows", "1", "--drawn", "--together"], APART),
    ("drawn, values in host memory", ["--rows", "1", "--drawn", "--placement", "host"], {}),
    ("drawn, overlapping", ["--rows", "1", "--drawn"], OVERLAP),
    ("drawn, overlapping, eager", ["--rows", "1", "--drawn"], {**OVERLAP, **EAGER}),
    ("drawn together, overlapping", ["--rows", "1", "--drawn", "--together"], OVERLAP),
]
# What multiplies and searches: how it is called, settings.
OWN_KERNELS, SPLIT_WEIGHTS = (", own kernels", OWN), (", split weights", SPLIT)
MMA_ATTENTION = (", attention on tensor cores", MMA)


def differences(a, b):
    """Names of the arrays whose bits differ, with how many elements do."""
    return ["%s (%d of %d)" % (name, int((a[name].view("u4") != b[name].view("u4")).sum()),
                               a[name].size)
            for name in a if a[name].tobytes() != b[name].tobytes()]


def check_ways(run, case, dtype, called="", settings={}):
    """A row of the report's table: which ways give the same bits."""
    sequences, _ = case_sequences(run, case, dtype)
    kind = dtype + called
    usual, name = ["--dtype", dtype], "%s.%s%s" % (case, dtype, called.replace(", ", ".").replace(" ", "-"))
    wholes = ("whole sequences alone", usual, {}), DRAWN_WAYS[0]
    ways = [(wholes[0][0], *way) for way in WAYS] + [(whole[0], *way) for whole in wholes[1:] for way in DRAWN_WAYS[1:]]
    found = forward(run, model_directory(run, case), sequences,
                    *((name + "." + whole.replace(" ", "-"), usual + flags, {**settings, **env})
                      for whole, flags, env in wholes),
                    *(("%s.%d" % (name, i), usual + flags, {**settings, **env})
                      for i, (_, _, flags, env) in enumerate(ways)),
                    (name + ".fast", [*usual, "--rows", "1,5,64,0", "--together", "--deterministic", "off"],
                     {} if settings == OWN else settings))
    same = n_run = 0
    for i, (whole, way, _, _) in enumerate(ways):
        due, got = found.get(name + "." + whole.replace(" ", "-")), found.get("%s.%d" % (name, i))
        wrong = differences(due, got) if due is not None and got is not None else []
        if wrong:
            run.fail("%s in %s, %s: bits differ from %s: %s" % (case, kind, way, whole, ", ".join(wrong[:4])))
        n_run += due is not None and got is not None
        same += due is not None and got is not None and not wrong
    run.tables.setdefault("bits", []).append("| %s | %s | %d of %d%s |" % (
        case, kind, same, len(ways), "" if n_run == len(ways) else ", %d without a result" % (len(ways) - n_run)))
    whole, fast = found.get(name + ".whole-sequences-alone"), found.get(name + ".fast")
    if whole is not None and fast is not None:
        n = sum(key.endswith(".logprob") for key in whole)
        apart = np.abs(together(whole, "logprob", n) - together(fast, "logprob", n))
        # A rounding to bf16 may pick another slot, which changes single tokens: the mean counts, as in the self-test.
        how, apart, allowed = ("at most", apart.max(), gd.LOGPROB) if dtype == "f32" else ("in the mean", apart.mean(), 0.25)
        if not apart <= allowed:
            run.fail("%s in %s, --deterministic off: log-probabilities off by %.2g %s, allowed %.2g"
                     % (case, dtype, apart, how, allowed))


def check_bits(run):
    cases = BIT_CASES[:1] if run.small else BIT_CASES
    jobs = [(case, *way) for case in cases for way in (("f32",), ("bf16",), ("bf16", *OWN_KERNELS))]
    jobs += [(case, "bf16", *SPLIT_WEIGHTS) for case in SPLIT_CASES if case in cases]
    jobs.append((MMA_CASE, "bf16", *MMA_ATTENTION))
    if run.device == "cuda":  # no other computes in it
        jobs += [(cases[0], "f16"), (cases[0], "f16", *OWN_KERNELS)]
    run.parallel([(job[:3], lambda j=job: check_ways(run, *j)) for job in jobs], AT_ONCE)


def prepare(run):
    """Folders, and the golden checkpoints as model directories."""
    (run.build / "gpu-out").mkdir(parents=True, exist_ok=True)
    done = run.command(["sh", "tests/golden/convert_all.sh", run.build / "golden"],
                       env={"PYTHON": run.python})
    if not done.good:
        run.lose("converting the golden checkpoints", done)
