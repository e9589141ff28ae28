"""The report: Markdown, from what the parts have found. What was not measured is not in it."""

import time

import machine

COPY, MATRIX = "copy bandwidth", "matrix rate"


class Figures:
    """Looks measurements up in run.records."""

    def __init__(self, records):
        self.records = records
        self.rates = {}
        for r in records:
            if r.get("part") == "rates":
                self.rates[r["backend"]] = r

    def find(self, part, rows, op="step", tag="", backend=None, **shape):
        """The record with these fields; backend None: the engine's. None if it was not measured."""
        wanted = {"layers": 12, "width": 1024, "memory": "product", "keys": 512, "part": part,
                  "rows": rows, "op": op, **shape}
        for r in self.records:
            torch = r.get("backend", "").startswith("torch")
            if (torch == (backend is not None) and (backend is None or r["backend"] == backend)
                    and (torch or r.get("tag") == tag)
                    and all(r.get(k) == v for k, v in wanted.items())):
                return r
        return None

    def base(self):
        """Shape of the main model: what the first measured step has, ours if there is one."""
        for tag in ("", "torch"):
            for r in self.records:
                if r.get("op") == "step" and r.get("tag") == tag:
                    return {k: r[k] for k in ("layers", "width", "memory", "keys")}
        return {}

    def rows(self, part, **shape):
        return sorted({r["rows"] for r in self.records if r.get("part") == part
                       and r.get("op") in ("step", "layer")
                       and all(r.get(k) == v for k, v in shape.items())})

    def bandwidth(self):
        """Bytes per second of a large copy, and who measured it."""
        torch, own = self.rates.get("torch"), self.own_rates()
        if torch:
            return torch["copy_bytes_per_s"], "PyTorch's copy of 1 GiB, bytes read and written"
        if own:
            return own["read_bytes_per_s"], "the backend's own measure"
        return None, "not measured"

    def matrix(self):
        torch, own = self.rates.get("torch"), self.own_rates()
        if torch:
            return torch["flops_bf16_per_s"], "PyTorch's bf16 product of 8192³"
        if own and own["flops_bf16_per_s"]:
            return own["flops_bf16_per_s"], "the backend's own measure"
        return None, "not measured"

    def own_rates(self):
        return next((r for name, r in self.rates.items() if name != "torch"), None)


def us(record, digits=1):
    return "" if record is None else "%.*f" % (digits, record["us"])


def times(slow, fast):
    """How many times as long slow takes."""
    return "" if slow is None or fast is None else "%.2f" % (slow["us"] / fast["us"])


def share(record, what, rate):
    """bytes or flops per second over a rate, in per cent."""
    if record is None or not rate or not record.get(what):
        return None
    return 100 * record[what] / (record["us"] * 1e-6) / rate


def percent(value):
    return "" if value is None else "%.0f %%" % value


def per_second(record):
    return "" if record is None else "%.0f" % (record["rows"] / (record["us"] * 1e-6))


def table(head, rows):
    return ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows] if rows else []


# ---- the aims ---------------------------------------------------------------------------------

def aims(f):
    """(what, aim, reached or None, met)"""
    copy, matrix = f.bandwidth()[0], f.matrix()[0]

    def at_least(what, aim, value, unit="%"):
        return what, "at least %g %s" % (aim, unit), value, value is not None and value >= aim, unit

    def at_most(what, aim, value, unit):
        return what, "at most %g %s" % (aim, unit), value, value is not None and value <= aim, unit

    def ratio(a, b):
        return None if a is None or b is None else a["us"] / b["us"]

    def above(a, b):
        r = ratio(a, b)
        return None if r is None else 100 * (r - 1)
    yield at_least("decode at batch 1, share of the bandwidth floor", 75,
                   share(f.find("decode", 1), "bytes", copy))
    for rows, aim in ((1, 8), (32, 12), (1024, 75)):
        record = f.find("memory", rows, "layer")
        yield at_most("memory layer, %d tokens" % rows, aim, record and record["us"], "µs")
    for rows in (256, 1024):
        yield at_least("gather of %d tokens, share of %s" % (rows, COPY), 90,
                       share(f.find("memory", rows, "read"), "bytes", copy))
    for rows in (4096, 16384):
        yield at_least("prefill of %d tokens, share of %s" % (rows, MATRIX), 60,
                       share(f.find("prefill", rows), "flops", matrix))
    for part, rows in (("decode", 1), ("decode", 32), ("prefill", 4096)):
        yield at_most("%s of %d: 4M slots against 16k" % (part, rows), 1,
                      above(f.find(part, rows, keys=2048), f.find(part, rows, keys=128)), "% more")
    for width in (1024, 1600):
        for part, rows in (("decode", 1), ("decode", 32), ("prefill", 4096)):
            deep = f.find(part, rows, layers=24, width=width, memory="none", keys=0)
            yield at_least("%s of %d, width %d: 24 layers take, of 12 + memory" % (part, rows, width),
                           1.9, ratio(deep, f.find(part, rows, width=width)), "times")
    yield at_most("values in pinned host memory, decode at batch 1", 15,
                  above(f.find("decode", 1, tag="host"), f.find("decode", 1)), "% more")
    for part, rows in (("decode", 1), ("decode", 32), ("prefill", 4096), ("prefill", 16384)):
        yield at_most("--deterministic on against off, %s of %d" % (part, rows), 10,
                      above(f.find(part, rows), f.find(part, rows, tag="fast")), "% more")


def aim_lines(f):
    rows = []
    for what, aim, value, met, unit in aims(f):
        got = "not measured" if value is None else "%.*f %s" % (
            2 if unit == "times" else 1, value, unit)
        rows.append("| %s | %s | %s | %s |" % (
            what, aim, got, "" if value is None else "yes" if met else "**no**"))
    return table(["figure", "aim", "reached", "met"], rows)


# ---- the tables -------------------------------------------------------------------------------

def step_lines(f, part, limit):
    """Steps of the main model beside PyTorch. limit: bytes or flops."""
    base = f.base()
    rate = f.bandwidth()[0] if limit == "bytes" else f.matrix()[0]
    rows = []
    for n in f.rows(part, **base):
        own = f.find(part, n, **base)
        eager = f.find(part, n, backend="torch eager", **base)
        graph = f.find(part, n, backend="torch graph", **base)
        rows.append("| %d | %s | %s | %s | %s | %s | %s | %s | %s |" % (
            n, us(own), own and "%.1f-%.1f" % (own["us_min"], own["us_p90"]) or "", per_second(own),
            percent(share(own, limit, rate)), us(eager), times(eager, own), us(graph),
            times(graph, own)))
    return table(["tokens", "µs", "fastest - 9th of 10", "tokens/s",
                  "of " + (COPY if limit == "bytes" else MATRIX), "PyTorch eager µs", "times",
                  "PyTorch graph µs", "times"], rows)


def variant_lines(f):
    """What placement, graphs, determinism and type cost."""
    base, rows = f.base(), []
    for tag, name in (("host", "values in pinned host memory"), ("eager", "no captured graphs"),
                      ("no overlap", "each kernel waits for the one before"), ("ahead", "the next step begun early"), ("apart", "norms apart"),
                      ("no split", "keys and queries in F32"), ("no mma", "prompts attended in F32"), ("no drawn", "drawn tokens attended in tiles"),
                      ("top_p", "drawn with top_p 0.9"), ("long", "in the middle of a long context"),
                      ("fast", "--deterministic off"), ("f32", "F32 weights"), ("f32 fast", "F32 weights, --deterministic off")):
        for part in ("decode", "prefill", "memory"):
            for op in ("layer", "query", "search") if part == "memory" else ("step",):
                for n in f.rows(part, tag=tag):
                    other, own = f.find(part, n, op, tag, **base), f.find(part, n, op, **base)
                    if other:
                        rows.append("| %s | %s%s | %d | %s | %s | %s |" % (
                            name, part, "" if op in ("layer", "step") else ", " + op, n, us(other), us(own),
                            times(other, own)))
    return table(["variant", "part", "tokens", "µs", "usual µs", "times the usual"], rows)


def memory_lines(f):
    """The layer alone, op by op, for every kind and number of slots."""
    copy, rows = f.bandwidth()[0], []
    shapes = sorted({(r["memory"], r["keys"], r["rows"]) for r in f.records
                     if r.get("part") == "memory" and r.get("tag") in ("", "torch")},
                    key=lambda s: (s[0] == "flat", s[1], s[2]))
    base = f.base()
    for memory, keys, n in shapes:
        shape = {**base, "memory": memory, "keys": keys}
        get = {op: f.find("memory", n, op, **shape)
               for op in ("layer", "query", "search", "read", "feed-forward")}
        slots = keys if memory == "flat" else keys * keys
        rows.append("| %s %d | %d | %s | %s | %s | %s | %s | %s | %s | %s |" % (
            memory, slots, n, us(get["layer"]), percent(share(get["layer"], "bytes", copy)),
            us(get["query"]), us(get["search"]), us(get["read"]),
            percent(share(get["read"], "bytes", copy)), us(get["feed-forward"]),
            us(f.find("memory", n, "layer", backend="torch graph", **shape)
               or f.find("memory", n, "layer", backend="torch eager", **shape))))
    return table(["slots", "tokens", "layer µs", "of " + COPY, "query", "search", "read",
                  "read: of " + COPY, "the FFN it replaces µs", "PyTorch (graph) µs"], rows)


def shape_lines(f):
    """Whole steps for other numbers of slots, layers and widths."""
    rows = []
    shapes = {(r["layers"], r["width"], r["memory"], r["keys"], r["part"], r["rows"])
              for r in f.records if r.get("op") == "step" and r.get("tag") == ""}
    names = ("layers", "width", "memory", "keys")
    seen = {s[:4] for s in shapes}
    common = [p for p in sorted({s[4:] for s in shapes})
              if sum((*s, *p) in shapes for s in seen) > 1]
    for part, n in common:
        for key in sorted(s[:4] for s in shapes if s[4:] == (part, n)):
            shape = dict(zip(names, key))
            own = f.find(part, n, **shape)
            graph = f.find(part, n, backend="torch graph", **shape)
            slots = {"none": "-", "flat": "flat %d" % key[3]}.get(key[2], "%d²" % key[3])
            limit = share(own, "bytes", f.bandwidth()[0]) if part == "decode" else share(
                own, "flops", f.matrix()[0])
            rows.append("| %s of %d | %d x %d | %s | %s | %s | %s | %s | %s |" % (
                part, n, key[0], key[1], slots, us(own), per_second(own), percent(limit), us(graph),
                times(graph, own)))
    return table(["step", "layers x width", "slots", "µs", "tokens/s",
                  "of %s (decode), %s" % (COPY, MATRIX), "PyTorch graph µs", "times"], rows)


def op_lines(f):
    copy, matrix = f.bandwidth()[0], f.matrix()[0]
    rows = ["| %s | %d | %.1f | %s | %s |" % (
        r["op"], r["rows"], r["us"], percent(share(r, "bytes", copy)),
        percent(share(r, "flops", matrix))) for r in f.records if r.get("part") == "op"]
    return table(["op", "rows", "µs", "of " + COPY, "of " + MATRIX], rows)


MEMORY_NOTE = ["", "Weights, keys and rows come from memory: a run sweeps over copies of them. Only the rows of "
               "read alone at 1 token fit into the cache. PyTorch's copies are the same."]


# ---- the whole --------------------------------------------------------------------------------

def head_lines(run, f):
    m = run.machine
    lines = ["# Check on a GPU, %s" % time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), ""]
    if run.small:
        lines += ["**A rehearsal with tiny sizes: no figure below means anything.**", ""]
    lines += ["- machine: %s" % ", ".join(filter(None, [
        m.get("gpu", "no GPU"), m.get("memory"), "driver " + m.get("driver", "-"),
        "CUDA " + m.get("cuda", "-"), "PyTorch " + f.rates.get("torch", {}).get("torch", "-")])),
        "- command: `%s`, commit %s" % (m.get("command", "tests/gpu/check.py"), m.get("commit"))]
    lines += machine.lines(m)
    if run.log is not None:
        lines.append("- log: `%s` beside this report: all that each command said" % run.log.name)
    if is_wanted(run, "speed", "torch"):
        lines += rate_lines(f)
    lines.append("- time: " + ", ".join("%s %.0f s" % (part, s) for part, s in run.seconds.items()
                                        if s >= 0))
    return lines


def rate_lines(f):
    own = f.own_rates()
    lines = ["- backend: %s" % (own["description"] if own else "not measured")]
    for name, (rate, who), unit, scale in ((COPY, f.bandwidth(), "TB/s", 1e12),
                                           (MATRIX, f.matrix(), "TFLOP/s", 1e12)):
        lines.append("- %s: %s (%s)" % (
            name, "not measured" if rate is None else "%.2f %s" % (rate / scale, unit), who))
    if own:
        lines.append("- the backend's own measure: read %.2f TB/s, F32 %.1f, BF16 %.0f TFLOP/s" % (
            own["read_bytes_per_s"] / 1e12, own["flops_f32_per_s"] / 1e12,
            own["flops_bf16_per_s"] / 1e12))
    return lines


def write(run, path):
    """Writes what is known so far; the check calls it after each part."""
    f = Figures(run.records)
    lines = head_lines(run, f)
    lines += ["", "## Failures", ""] + (
        ["- %s: %s" % (part, text) for part, text in run.failures] or ["None of what was run."])
    lines += ["", "## Not run, and notes", ""] + (
        ["- %s: %s" % (part, text) for part, text in run.notes] or ["Nothing."])
    if is_wanted(run, "speed", "torch"):
        lines += aim_section(f)
    sections = [
        ("speed torch", "Decode, one token of each sequence", step_lines(f, "decode", "bytes")),
        ("speed torch", "Prefill", step_lines(f, "prefill", "flops")),
        ("speed torch", "Scoring, every row through the vocabulary", step_lines(f, "score", "flops")),
        ("speed torch", "The memory layer alone", memory_lines(f) + (MEMORY_NOTE if f.rows("memory") else [])),
        ("speed torch", "Slots, depth, width", shape_lines(f)),
        ("speed", "Variants", variant_lines(f)),
        ("speed", "Single ops", op_lines(f)),
        ("optimes", "Times of ops on the device", optimes_section(run)),
        ("golden", "Golden cases", table(
            ["case", "log-probability error, F32", "memory weight error", "device - CPU, F32",
             "KL(F32, BF16), nats", "perplexity F32", "BF16"], sorted(run.tables.get("golden", [])))),
        ("bits", "The same bits however the work is cut", table(
            ["case", "type", "ways that give the same bits"], sorted(run.tables.get("bits", [])))),
        ("ops", "Ops against ref", table(["op", "cases"], run.tables.get("ops", []))),
        ("serve", "Serving over HTTP", serve_section(run)),
        ("cores", "The CPU backend by threads", cores_section(run)),
        ("sanitizers", "compute-sanitizer", table(["tool", "clean"], run.tables.get("sanitizers", []))),
    ]
    for parts, title, body in sections:
        if is_wanted(run, *parts.split()):
            lines += ["", "## " + title, *(body or ["", "Not measured."])]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def optimes_section(run):
    lines = table(["step", "op", "result", "runs in a step", "µs each", "µs in a step", "share"],
                  run.tables.get("optimes", []))
    return lines and lines + ["", "Eager steps, an event before and after each op, less what two events take with nothing "
                              "between them (kernels/cuda/trace.cu). What lies between ops, and what graphs or overlap "
                              "save, is the difference to the steps above."]


def serve_section(run):
    lines = table(["what", "figures"], run.tables.get("serve", []))
    return lines and lines + ["", "pkmserve on model A's shape with random weights and a context of 2048, for as many sequences "
                              "at once as there are streams, else as it starts by default; clients on the same machine. A step runs from one to the next while all streams run."]


def cores_section(run):
    lines = table(["threads", "step", "ms", "", "times 1 thread", "of the plain read (decode), of the peak"],
                  run.tables.get("cores", []))
    return lines and lines + ["", "Decode moves bytes, prefill and scoring multiply: each beside the rate that as many "
                              "threads reached in the same run, with nothing else to do."]


def is_wanted(run, *parts):
    """Whether this check is to run one of them."""
    return any(part in run.wanted for part in parts)


def aim_section(f):
    return ["", "## Aims", *aim_lines(f), "",
            "Bytes and operations are the least a step must move and compute (server/cli/bench_cost.c): "
            "each weight once, each row's values, the cache in the weights' type. Model: 12 layers of 1024, 60k "
            "vocabulary, one memory of 512² slots in layer 6, bf16, unless a row says otherwise; "
            "decode at the middle of a context of 512; prompts of 512 tokens. A step ends when its "
            "results are on the host."]
