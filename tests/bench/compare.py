#!/usr/bin/env python3
"""What `make bench` prints: pkmserve beside other programs, and beside itself, on this machine.

    compare.py [--build build] [--rounds 5] ... [torch] [llama] [isa] [start] [host] [http]

    torch   a PyTorch implementation of the same model, the same weights and tokens (models/train/decode.py)
    llama   llama.cpp on the dense twin, the model without its memory
    dense   a dense model of Llama-3.2-1B's shape beside llama.cpp, which computes the same function, and PyTorch
    sparse  the published shape of sparse-memory-lm, its table of 3.2 GB in memory
    isa     pkmserve with each instruction set that it can be forced to
    start   from the start of `pkmserve serve` to ready, the model's file being in the page cache
    host    of 64 streams at once, what all but the model costs: scheduling, drawing, tokens' text, HTTP
    http    a dense model served to several clients, beside llama.cpp's llama-server, which computes the same function

Machines drift, so every round measures each program once, in rotating order; a ratio is taken within a round, and
printed are medians over the rounds with the range in brackets. Shares are of a plain read of the same number of bytes
(decode) or of the peak of the multiply-add that pkmserve uses (other steps), measured in the same round. The load of the
machine is printed with each table: figures from a busy one say little.

A program that is not installed is a line that says how to get it, never a failure; wrong results are one."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import peers
import served
import serving
from load import percentile

ROOT = Path(__file__).resolve().parents[2]
AGREEMENT = 1e-3  # largest difference of a log-probability between two ways of computing it in fp32
# Sets that PKMSERVE_ISA takes, fastest first. BF16 has three ways in AVX-512: the matrix unit, the instruction for pairs,
# and widening to fp32, which is the only one of f32.
ISAS = ("amx", "avx512-pairs", "avx512-wide", "avx2", "plain")
ISAS_F32 = ISAS[2:]

FULL, QUICK = [], ["--layers", "3", "--width", "64", "--heads", "2", "--ff", "128", "--vocab", "300", "--memory-layer",
                   "1", "--keys", "16", "--k", "4", "--key-width", "32"]
TWIN = ["--memory-layer", "-1"]
# Shapes beside model A, by the name of their folder: arguments of make_model, and those of --quick.
SHAPES = {
    "dense": (["--family", "memory_llama", "--layers", "16", "--width", "2048", "--heads", "32", "--kv-heads", "8", "--ff",
               "8192", "--vocab", "128256", "--positions", "2048", "--output", "tied", *TWIN],
              ["--family", "memory_llama", "--layers", "2", "--width", "64", "--heads", "4", "--kv-heads", "2", "--ff", "96",
               "--vocab", "300", "--output", "tied", *TWIN]),
    "served": (["--family", "memory_llama", "--layers", "12", "--width", "1024", "--heads", "16", "--kv-heads", "4", "--ff",
                "4096", "--vocab", "32000", "--positions", str(served.CONTEXT), "--output", "tied", *TWIN],
               ["--family", "memory_llama", "--layers", "2", "--width", "64", "--heads", "4", "--kv-heads", "2", "--ff", "96",
                "--vocab", "400", "--positions", str(served.CONTEXT), "--output", "tied", *TWIN]),
    "sparse": (["--family", "memory_llama", "--layers", "12", "--width", "384", "--heads", "6", "--ff", "1024", "--vocab",
                "50304", "--positions", "1024", "--output", "tied", "--memory-layer", "2,6,10", "--memory-heads", "4",
                "--k", "32", "--keys", "4096", "--key-width", "256", "--values", "q4"],
               ["--family", "memory_llama", "--layers", "3", "--width", "48", "--heads", "3", "--ff", "64", "--vocab", "300",
                "--output", "tied", "--memory-layer", "0,2", "--memory-heads", "2", "--k", "4", "--keys", "16",
                "--key-width", "16", "--values", "q4"])}
MODEL_A = "12 layers of 1024, 60k vocabulary, a memory of 512² slots"
MEANING = "prefill and score: one text of %d tokens, the last row or every row through the vocabulary; decode N: a token " \
          "of each of N texts, behind %d positions"


# ---- figures ------------------------------------------------------------------------------------


def cell(values, digits=None):
    """Median and range; as many digits as a figure of that size needs."""
    if not values:
        return "-"
    middle = median(values)
    if digits is None:
        digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    spread = " (%.*f-%.*f)" % (digits, min(values), digits, max(values)) if len(values) > 1 else ""
    return "%.*f%s" % (digits, middle, spread)


def times(slow, fast, step):
    """How many times as fast, per round."""
    return [a["seconds"][step] / b["seconds"][step] for a, b in zip(slow or [], fast or [])
            if step in a["seconds"] and step in b["seconds"]]


def milliseconds(results, step):
    return [1e3 * result["seconds"][step] for result in results or [] if step in result["seconds"]]


def share(results, own, step):
    """Of results, what part of the machine's rate each was, in percent. own: pkmserve's of the same rounds, which
    measure that rate and know what the step takes."""
    values = []
    for result, rates in zip(results or [], own):
        cost = next(s for s in rates["steps"] if (s["step"], s["rows"]) == step)
        if step in result["seconds"]:
            unit, rate = ("bytes", "read_bytes") if step[0] == "decode" else ("flops", "peak_flops")
            values.append(100 * step[1] * cost[unit + "_per_token"] / result["seconds"][step] / rates[rate + "_per_s"])
    return "%.0f %%" % median(values) if values else "-"


def print_table(head, rows, n_left=2):
    """The first n_left columns are words, the others figures."""
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * n_left + "---:|" * (len(head) - n_left))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def steps_of(args):
    return [("prefill", args.rows), ("score", args.rows)] + [("decode", n) for n in args.batches]


def step_name(step):
    return "%s %d" % step


# ---- running ------------------------------------------------------------------------------------


def say(text):
    if sys.stderr.isatty():
        print("\r%-40s\r" % text, end="", file=sys.stderr, flush=True)


def model(args, dtype, twin=False, shape=None):
    """shape: of SHAPES; None: model A. The directory of a model with random weights, written once. Its files are f32 for f32, bf16 for all else.
    config.json is written last, so it marks a whole model."""
    files = "f32" if dtype == "f32" else "bf16"
    name = (shape + "-" if shape else "twin-" if twin else "") + files + ("-quick" if args.quick else "")
    folder = args.build / "bench-model" / name
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = SHAPES[shape][args.quick] if shape else (QUICK if args.quick else FULL) + (TWIN if twin else [])
        subprocess.run([args.build / "tests/bench/make_model", folder, "--dtype", files, *words], check=True)
    return folder


def start(engines):
    """Those that run. What does not is said."""
    running = []
    try:
        for make in engines:
            try:
                engine = make()
                engine.start()
                running.append(engine)
            except peers.Missing as missing:
                print("not measured: %s" % missing, flush=True)
    except BaseException:
        close(running)
        raise
    return running


def close(engines):
    for engine in engines:
        engine.close()


def measure(args, makers):
    """makers: {key: how to make an engine}. -> {key: its results}, of those that run, and the load."""
    engines = []
    keys = {}
    for key, make in makers.items():
        for engine in start([make]):
            engines.append(engine)
            keys[engine] = key
    try:
        results, load = peers.run_rounds(engines, args.rounds, say)
    finally:
        close(engines)
    return {keys[engine]: rounds for engine, rounds in results.items()}, load


def print_head(args, title, results, load):
    own = [rounds for key, rounds in results.items() if key[0] == "pkmserve"]
    print("\n## %s\n" % title)
    print(MEANING % (args.rows, args.positions))
    print("%d threads, medians of %d rounds (range); %s" % (args.threads, args.rounds, load))
    for rounds in own:
        print("%s: %s; plain read %s GB/s, peak %s GFLOP/s; hash %s" % (
            rounds[0]["dtype"], rounds[0]["description"], cell([r["read_bytes_per_s"] / 1e9 for r in rounds], 1),
            cell([r["peak_flops_per_s"] / 1e9 for r in rounds], 0), rounds[0]["hash"]))


# ---- the tables ---------------------------------------------------------------------------------


def against(args, title, peer, make, twin=False, shape=None, dtypes=None):
    """pkmserve and one other program, in every type or in dtypes; ratios are the peer's time over ours."""
    dtypes = dtypes or peers.pkmserve_dtypes(args)
    makers = {}
    for dtype in dtypes:
        makers["pkmserve", dtype] = lambda d=dtype: peers.pkmserve(args, model(args, d, twin, shape), d)
        makers[peer, dtype] = lambda d=dtype: make(args, model(args, d, twin, shape), d)
    results, load = measure(args, makers)
    print_head(args, title, results, load)
    rows = []
    for step in steps_of(args):
        for dtype in dtypes:
            own, other = results["pkmserve", dtype], results.get((peer, dtype))
            rows.append([step_name(step), dtype, cell(milliseconds(own, step)), share(own, own, step),
                         cell(milliseconds(other, step)), share(other, own, step), cell(times(other, own, step)),
                         cell(times(results.get((peer, "f32")), own, step))])
    print_table(["step", "type", "pkmserve ms", "of read or peak", peer + " ms", "of read or peak",
                 "times as fast", "times its f32"], rows)
    return results


def torch(args):
    try:
        peers.torch_python(args)
    except peers.Missing as missing:
        print("\nnot measured: %s" % missing)
        return
    results = against(args, "Model A (%s) beside PyTorch" % MODEL_A, "PyTorch", peers.torch)
    for dtype in peers.TORCH_DTYPES:
        if ("PyTorch", dtype) in results:
            agree(dtype, results["pkmserve", dtype][-1], results["PyTorch", dtype][-1])


def agree(dtype, own, other):
    """That it is the same model: fails where fp32 differs by more than rounding."""
    differ = [abs(a - b) for a, b in zip(own["logprobs"], other["logprobs"])]
    print("%s: log-probabilities of the scored text differ by %.2g at most, %.2g on average; hashes %s, PyTorch's %s"
          % (dtype, max(differ), sum(differ) / len(differ), own["hash"], other["hash"]))
    if dtype == "f32" and not all(d <= AGREEMENT for d in differ):
        sys.exit("compare.py: that is more than %g: models/train/decode.py and pkmserve compute different models"
                 % AGREEMENT)


def llama(args):
    try:
        peers.llama_program(args)
    except peers.Missing as missing:
        print("\nnot measured: %s" % missing)
        return
    against(args, "The dense twin of model A beside llama.cpp", "llama.cpp", peers.llama, twin=True)
    print("llama.cpp has no architecture that computes this function: it runs gpt2 of the same shape, a stand-in for SPEED "
          "ALONE, with the same matrices but norms in other places. Its cache is f16, its own choice; ours is f32 beside f32, bf16 beside bf16 and int8.")


def dense(args):
    """llama.cpp's own llama architecture computes the same function; so does models/train/decode.py."""
    title = "A dense model of Llama-3.2-1B's shape (16 layers of 2048, 128k vocabulary) beside "
    for name, find, make in (("llama.cpp", peers.llama_program, peers.llama),
                             ("PyTorch", peers.torch_python, peers.torch)):
        try:
            find(args)
        except peers.Missing as missing:
            print("\nnot measured: %s" % missing)
            continue
        for dtype in peers.pkmserve_dtypes(args):  # one at a time: all of them do not fit into 24 GB of memory
            results = against(args, title + name, name, make, shape="dense", dtypes=[dtype])
            if name == "PyTorch" and (name, dtype) in results:
                agree(dtype, results["pkmserve", dtype][-1], results[name, dtype][-1])
        if name == "llama.cpp":
            print("Its cache is f16, its own choice; ours is f32 beside f32, bf16 beside bf16 and int8, which stands beside Q8_0.")


AUTHOR_SPARSE = "The author's own figures, on his machine (RX 9070, Python and Triton, one text, not repeated here): decode 212 " \
                "tokens/s with the table in the GPU's memory, 139 to 154 with it in host memory."


def sparse(args):
    """Matrices in every type, the table of 4 bits read in place from the page cache, or copied."""
    makers = {("pkmserve", dtype, place): lambda d=dtype, p=place: peers.pkmserve(
                  args, model(args, d, shape="sparse"), d, placement=p)
              for dtype in ("f32", "bf16") for place in ("mmap", "device")}
    results, load = measure(args, makers)
    print_head(args, "The published shape of sparse-memory-lm (12 layers of 384, 4096² slots of 4 bits)",
               {key: rounds for key, rounds in results.items() if key[2] == "mmap"}, load)
    rows = []
    for step in steps_of(args):
        for (_, dtype, place), rounds in results.items():
            per_second = [step[1] / r["seconds"][step] for r in rounds]
            rows.append([step_name(step), dtype, {"mmap": "in place", "device": "copied"}[place],
                         cell(milliseconds(rounds, step)), cell(per_second), share(rounds, rounds, step)])
    print_table(["step", "type", "table", "ms", "tokens/s", "of read or peak"], rows, 3)
    print(AUTHOR_SPARSE)


def isa(args):
    """Each instruction set in each type; a ratio is the time of a set over that of the first one there is."""
    dtypes = peers.pkmserve_dtypes(args)
    makers = {("pkmserve", dtype, name): lambda d=dtype, n=name: peers.pkmserve(args, model(args, d), d, n)
              for dtype in dtypes for name in (ISAS_F32 if dtype == "f32" else ISAS)}
    results, load = measure(args, makers)
    first = {dtype: next(key for key in makers if key in results and key[1] == dtype) for dtype in dtypes}
    print_head(args, "Model A with each instruction set (PKMSERVE_ISA)", {key: results[key] for key in first.values()}, load)
    rows = []
    for step in steps_of(args):
        for dtype in dtypes:
            base = results[first[dtype]]
            row = [step_name(step), dtype, "%s: %s" % (first[dtype][2], cell(milliseconds(base, step)))]
            for name in ISAS:
                row.append(cell(times(results.get(("pkmserve", dtype, name)), base, step)))
            rows.append(row + [cell(times(results.get(("pkmserve", dtype, "avx2")), wide(results, dtype, step), step))])
    print_table(["step", "type", "first set, ms", *("%s, times that" % name for name in ISAS), "avx2 over avx512"], rows)


def wide(results, dtype, step):
    """The faster of the two AVX-512 sets."""
    sets = [results[key] for key in (("pkmserve", dtype, name) for name in ISAS[1:3]) if key in results]
    return min(sets, key=lambda rounds: median(milliseconds(rounds, step)), default=None)


# ---- the server ---------------------------------------------------------------------------------


def start_up(args):
    """Of each type. The first start of each reads the file into the page cache and does not count."""
    dtypes = peers.pkmserve_dtypes(args)
    seconds = {dtype: [] for dtype in dtypes}
    last = {}
    load = peers.Load([])
    for i in range(args.rounds + 1):
        for dtype in dtypes:
            flags = peers.pkmserve_flags(args, model(args, dtype), dtype)
            with serving.Server(args.build / "pkmserve", *flags) as server:
                last[dtype] = {**server.metrics(), "resident": server.resident_bytes()}
                if i > 0:
                    seconds[dtype].append(server.start_s)
        say("start %d of %d" % (i, args.rounds))
    print("\n## Model A from start to ready, with a warm page cache\n")
    print("%d threads, medians of %d starts (range), phases of the last one; %s" % (args.threads, args.rounds,
                                                                                  load.text()))
    print_table(["type", "ready, s", "weights packed, s", "self-test, s", "weights, MB", "resident, MB"], [
        [dtype, cell(seconds[dtype], 2)] +
        ["%.2f" % last[dtype]['startup_seconds{phase="%s"}' % phase] for phase in ("upload", "selftest")] +
        ["%.0f" % (last[dtype][name] / 1e6) for name in ('model_bytes{kind="weights",placement="device"}', "resident")]
        for dtype in dtypes], 1)


PROMPT_WORDS = 32
DRAWS = {"greedy": {"temperature": 0},
         "top_p 0.95, peaked (temperature 0.2)": {"temperature": 0.2, "top_p": 0.95, "seed": 1},
         "top_p 0.95, flat": {"temperature": 1, "top_p": 0.95, "seed": 1}}


def worded(folder):
    """The model with a vocabulary, so that its tokens are text: words of eight letters."""
    config = json.loads((folder / "config.json").read_text())
    words = ["<s>", "<eos>", "<pad>", "<unk>"] + [word_of(i) for i in range(4, config["vocab_size"])]
    out = folder.with_name(folder.name + "-words")
    out.mkdir(exist_ok=True)
    if not (out / "model.safetensors").exists():
        (out / "model.safetensors").symlink_to(folder / "model.safetensors")
    (out / "vocab.txt").write_text("\n".join(words) + "\n")
    (out / "config.json").write_text(json.dumps({**config, "tokenizer": "word"}))
    return out


def word_of(i):
    return "".join(chr(ord("a") + i // 26 ** k % 26) for k in range(8))


def bodies(args, config, draw):
    n = config["vocab_size"] - 4
    return [{"prompt": " ".join(word_of(4 + (s * 7919 + i * 104729) % n) for i in range(PROMPT_WORDS)), "stream": True,
             "max_tokens": args.tokens, "ignore_eos": True, **draw} for s in range(args.streams)]


def host(args):
    """The model alone is `pkmserve bench` at the same batch and the middle position; it draws greedily."""
    print("\n## Model A with %d streams at once: what is not the model\n" % args.streams)
    bench_args = argparse.Namespace(**{**vars(args), "rows": 16, "positions": PROMPT_WORDS + args.tokens // 2,
                                       "batches": [args.streams]})
    load = peers.Load([])
    rows = []
    for dtype in peers.pkmserve_dtypes(args):
        folder = worded(model(args, dtype))
        config = json.loads((folder / "config.json").read_text())
        bench = peers.pkmserve(bench_args, folder, dtype)
        bare, got = [], {name: [] for name in DRAWS}
        try:
            bench.start()
            with serving.Server(args.build / "pkmserve", *peers.pkmserve_flags(args, folder, dtype), "--max-seqs",
                                args.streams, "--max-queue", args.streams) as server:
                # Pages of the cache come from the system once; a server that has run for a while has them all.
                serving.serve_streams(server, bodies(args, config, DRAWS["greedy"]))
                for i in range(args.rounds):
                    bare.append(bench.round()["seconds"]["decode", args.streams])
                    for name, draw in DRAWS.items():
                        got[name].append(serving.serve_streams(server, bodies(args, config, draw)))
                    say("%s, round %d of %d" % (dtype, i + 1, args.rounds))
        finally:
            bench.close()
        rows += [host_row(args, dtype, name, got[name], bare) for name in DRAWS]
    print("%d threads, medians of %d rounds (range); %s" % (args.threads, args.rounds, load.text()))
    print("engine: its thread outside of the model. front: processor time of HTTP and text, over all cores. "
          "drawing and what streams cost otherwise: the model's step here less that of pkmserve bench, which is greedy. "
          "client: the load itself, on the same cores")
    print_table(["type", "requests", "step, ms", "engine %", "front %", "drawing and other %", "client %"], rows)


def host_row(args, dtype, name, windows, bare):
    wall = [w["wall"] for w in windows]
    model_ms = [1e3 * w["model"] / w["steps"] for w in windows]
    step_ms = [1e3 * w["wall"] / w["steps"] for w in windows]
    return [dtype, name, cell(step_ms),
            cell([100 * (a - b) / a for a, b in zip(step_ms, model_ms)]),
            cell([100 * w["front"] / args.threads / s for w, s in zip(windows, wall)]),
            cell([100 * (b - 1e3 * alone) / a for a, b, alone in zip(step_ms, model_ms, bare)]),
            cell([100 * w["client"] / args.threads / s for w, s in zip(windows, wall)])]


def http(args):
    """One type at a time. A ratio is pkmserve's tokens per second over those of the same round."""
    print("\n## A dense model (12 layers of 1024, 32k vocabulary) served to clients, beside llama-server\n")
    loads = served.QUICK_LOADS if args.quick else served.LOADS
    rows = []
    for dtype in peers.pkmserve_dtypes(args):
        folder = model(args, dtype, shape="served")
        n_vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        makers = {"pkmserve": lambda d=dtype, f=folder, n=n_vocab: served.Pkmserve(
                      loads, n, args.build / "pkmserve", peers.pkmserve_flags(args, f, d)),
                  "llama": lambda d=dtype, f=folder, n=n_vocab: served.LlamaServer(
                      loads, n, peers.llama_neighbour(args, "llama-server", "its side"), peers.gguf(args, f, d), args.threads)}
        results, load = measure(args, makers)
        print("%s: %d threads, medians of %d rounds (range); %s" % (dtype, args.threads, args.rounds, load))
        rows += [http_row(loads[i].name, dtype, [r[i] for r in results["pkmserve"]], [r[i] for r in results.get("llama", [])])
                 for i in range(len(loads))]
    print("first: ms from the request to the first token, median. gap: ms between tokens of an answer, median and 99th percentile; "
          "each of a round")
    print_table(["load", "type", "pkmserve tokens/s", "llama-server", "times as many", "first", "llama-server", "gap", "99 %",
                 "llama-server", "99 %"], rows)
    print("llama-server has a slot of the same context for each client; its cache is f16, its own choice, ours is f32 beside f32, "
          "bf16 beside bf16 and int8, which stands beside Q8_0. The clients run on the same cores.")


def http_row(name, dtype, own, other):
    def of(results, what, percent):
        return cell([1e3 * percentile(r[what], percent) for r in results if r[what]])

    return [name, dtype, cell([r["rate"] for r in own]), cell([r["rate"] for r in other]),
            cell([a["rate"] / b["rate"] for a, b in zip(own, other)]), of(own, "first", 50), of(other, "first", 50),
            of(own, "gaps", 50), of(own, "gaps", 99), of(other, "gaps", 50), of(other, "gaps", 99)]


TABLES = {"torch": torch, "llama": llama, "dense": dense, "sparse": sparse, "isa": isa, "start": start_up, "host": host,
          "http": http}


# ---- arguments ----------------------------------------------------------------------------------


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES) + "; all of them if none is named")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="the build folder (build)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every program (all cores)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=256, help="of prefill and score (256)")
    parser.add_argument("--positions", type=int, default=256, help="before each decode step (256)")
    parser.add_argument("--max-batch", type=int, default=8, help="most texts decoded at once (8)")
    parser.add_argument("--streams", type=int, default=64, help="at once, of the host's share; a power of two (64)")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream (128, as the server has it)")
    parser.add_argument("--torch", default=os.environ.get("BENCH_TORCH"), help="a Python that has PyTorch (BENCH_TORCH)")
    parser.add_argument("--llama", default=os.environ.get("BENCH_LLAMA"), help="llama-batched-bench (BENCH_LLAMA)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round: does the tool work?")
    args = parser.parse_args(words)
    unknown = set(args.tables) - set(TABLES)
    if unknown:
        parser.error("%s: not a table; there are %s" % (", ".join(sorted(unknown)), ", ".join(TABLES)))
    if args.quick:
        args.rounds, args.rows, args.positions, args.max_batch, args.streams, args.tokens = 1, 16, 16, 2, 4, 400
    args.build = args.build.absolute()
    args.batches = [1 << i for i in range(args.max_batch.bit_length())]
    args.tables = args.tables or list(TABLES)
    return args


def main(words):
    args = arguments(words)
    for name in args.tables:
        TABLES[name](args)


if __name__ == "__main__":
    main(sys.argv[1:])
