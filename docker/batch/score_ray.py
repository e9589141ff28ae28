#!/usr/bin/env python3
"""Scores a corpus on a Ray cluster: JSONL or Parquet in, Parquet out, one pkmserve for each worker.

    python3 score_ray.py --input corpus/ --output scores/ --model mymodel --workers 8 --cpus 16
    python3 score_ray.py --input corpus/*.parquet --text-field content --output scores/ \\
        --model mymodel --workers 4 --gpus 1 -- --dtype int8 --stride 256

What stands behind -- are further options of `pkmserve score`. A worker is a Ray actor that keeps one
`pkmserve score --jsonl` running, which loads the model once and packs documents into its steps. Every node
needs the program, the model at the same path, and ray[data] and aiohttp by pip. With --cpus as many as a node has
there is one worker on each; Ray is asked for one core less, which is left to reading and writing.

Each document becomes a row: its columns but the text, the figures, and `error`, which is null or says why
there are none. A worker that dies, alone or with its node, is started again by Ray, and what it had under
way is scored again; a document has one row all the same. Rows come in no particular order, so documents
should have ids.
"""

import argparse
import json
import pathlib
import queue
import re
import subprocess
import threading

import fsspec.implementations.http  # noqa: F401  Ray imports it in several threads at once, which may fail
import pyarrow as pa
import ray
import ray.data

FIGURES = "n_tokens,n_scored,n_unk,n_bytes,sum_logprob,perplexity,bits_per_byte"
FAULT = re.compile(r"pkmserve: standard input:(\d+): (.*)")
BATCHES_PER_FILE = 64  # of the output, at least
ATTEMPTS = 3  # that a batch gets when pkmserve itself dies over it


class Died(Exception):
    """pkmserve has ended; the message is what it said last."""


class Pkmserve:
    """One `pkmserve score --jsonl`: a line in by standard input, a result out, or a fault by standard error.
    It ends by itself when its standard input is closed, so also when whoever started it is killed."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE)
        self.n_line = 0  # that were sent
        self.said = queue.SimpleQueue()  # (place in the batch or line number, result or fault); None: ended
        self.last_words = []
        self.threads = [threading.Thread(target=self.read_faults, daemon=True),
                        threading.Thread(target=self.read_results, daemon=True)]
        for thread in self.threads:
            thread.start()

    def read_faults(self):
        for line in self.process.stderr:
            text = line.decode("utf-8", "replace").rstrip("\n")
            fault = FAULT.fullmatch(text)
            if fault:
                self.said.put((int(fault[1]), fault[2]))
            else:
                self.last_words = self.last_words[-20:] + [text]

    def read_results(self):
        for line in self.process.stdout:
            answer = json.loads(line)
            self.said.put((int(answer["id"]), answer["results"][0]))
        self.said.put(None)

    def feed(self, texts):
        try:
            for number, text in enumerate(texts, self.n_line + 1):
                line = json.dumps({"id": number, "text": text})
                self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has died, which read_results tells

    def score(self, texts):
        """What became of each text: figures, a dict, or a fault, a str."""
        feeder = threading.Thread(target=self.feed, args=(texts,), daemon=True)
        feeder.start()
        found = {}
        while len(found) < len(texts):
            said = self.said.get()
            if said is None:
                self.close()
                raise Died("pkmserve ended with status %s:\n%s"
                           % (self.process.returncode, "\n".join(self.last_words)))
            number, result = said
            found[number - self.n_line - 1] = result
        feeder.join()
        self.n_line += len(texts)
        return [found[i] for i in range(len(texts))]

    def close(self):
        self.process.kill()
        self.process.wait()
        self.threads[0].join(10)


class Scorer:
    """The actor: a batch of documents in, a batch of rows out."""

    def __init__(self, command, text_field, figures):
        self.command = command
        self.text_field = text_field
        self.figures = figures
        self.pkmserve = None

    def results(self, texts):
        for attempt in range(ATTEMPTS):
            try:
                if self.pkmserve is None:
                    self.pkmserve = Pkmserve(self.command)
                return self.pkmserve.score(texts)
            except Died as death:
                self.pkmserve = None
                cause = death
        raise cause

    def __call__(self, batch):
        if self.text_field not in batch.column_names:
            raise ValueError("the input has no column %s, but %s: name one with --text-field"
                             % (self.text_field, ", ".join(batch.column_names)))
        texts = batch.column(self.text_field).to_pylist()
        results = self.results(texts)
        rows = batch.drop_columns([self.text_field])
        for name in self.figures + ["error"]:
            if name in rows.column_names:
                rows = rows.drop_columns([name])  # of an earlier run
        for name in self.figures:
            kind = pa.int64() if name.startswith("n_") else pa.float64()
            values = [None if isinstance(r, str) else r.get(name) for r in results]
            rows = rows.append_column(name, pa.array(values, kind))
        faults = [r if isinstance(r, str) else None for r in results]
        return rows.append_column("error", pa.array(faults, pa.string()))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help="files or folders that all nodes can read")
    parser.add_argument("--output", required=True, help="folder for Parquet files, new or empty")
    parser.add_argument("--model", required=True, help="model directory, on every node")
    parser.add_argument("--program", default="pkmserve", help="on every node (%(default)s)")
    parser.add_argument("--text-field", default="text", help="column of the text (%(default)s)")
    parser.add_argument("--figures", default=FIGURES, help="columns to add (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="how many pkmserve (%(default)s)")
    parser.add_argument("--cpus", type=int, default=1, help="cores of each (%(default)s)")
    parser.add_argument("--gpus", type=int, choices=[0, 1], default=0, help="GPUs of each (%(default)s)")
    parser.add_argument("--batch", type=int, default=1024, help="documents handed over at once (%(default)s)")
    parser.add_argument("options", nargs="*", help="of pkmserve score, behind --")
    return parser.parse_args()


def is_parquet(paths):
    """By the files' names; JSONL and Parquet are not mixed."""
    names = [str(p) for path in paths
             for p in ([path] if not pathlib.Path(path).is_dir() else pathlib.Path(path).rglob("*"))]
    parquet = [name.endswith(".parquet") for name in names if not pathlib.Path(name).is_dir()]
    if any(parquet) and not all(parquet):
        raise SystemExit("score_ray: --input has Parquet and other files: score them in two runs")
    return any(parquet)


def main():
    args = parse_arguments()
    if "://" not in args.output and pathlib.Path(args.output).is_dir() and any(
            pathlib.Path(args.output).iterdir()):
        raise SystemExit("score_ray: --output %s is not empty: rows would be added to it" % args.output)
    figures = args.figures.split(",")
    command = [args.program, "score", "--jsonl", "--model", args.model, "--fields", args.figures,
               "--threads", str(args.cpus), *args.options, "-"]
    read = ray.data.read_parquet if is_parquet(args.input) else ray.data.read_json
    documents = read(args.input)
    # One core less than it computes with: reading and writing would wait for ever if workers had them all.
    # Ray cuts files by bytes. Workers should get equal work: a batch each, also of one small file.
    rows = documents.repartition(target_num_rows_per_block=args.batch).map_batches(
        Scorer, fn_constructor_args=(command, args.text_field, figures), batch_format="pyarrow",
        batch_size=args.batch, compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_cpus=args.cpus - 1, num_gpus=args.gpus)
    rows.write_parquet(args.output, min_rows_per_file=BATCHES_PER_FILE * args.batch)


if __name__ == "__main__":
    main()
