"""docker/batch/score_ray.py on a local Ray of two workers, beside what `pkmserve score --jsonl` prints."""

import collections
import json
import os
import pathlib
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ["PKMSERVE"]
SCRIPT = ROOT / "docker" / "batch" / "score_ray.py"
MODEL = ROOT / "models" / "demo"
FIGURES = ["n_tokens", "n_scored", "n_unk", "n_bytes", "sum_logprob", "perplexity", "bits_per_byte"]
LIMIT_S = 300
N = 600

# The first start of pkmserve kills its worker in the middle of a batch, the second dies itself.
DYING = """#!/bin/sh
if mkdir "{folder}/killed-worker" 2>/dev/null; then
    head -n 20 | "{program}" "$@"
    kill -KILL $PPID
    exit 0
fi
if mkdir "{folder}/died" 2>/dev/null; then
    head -n 20 | "{program}" "$@"
    exit 3
fi
exec "{program}" "$@"
"""


def environment():
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two cores, whatever the machine has: the script finds it by RAY_ADDRESS."""
    import ray
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    documents = [{"id": "d%d" % i, "source": "web", "text": "The old man %d went to sea. " % i * (1 + i % 7)}
                 for i in range(N)]
    documents[41]["text"] = "x" * (1 << 21)  # beyond --max-line-bytes: a fault
    (folder / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    for part in range(4):
        rows = documents[part::4]
        pq.write_table(pa.Table.from_pylist([{"id": r["id"], "content": r["text"]} for r in rows]),
                       folder / ("part%d.parquet" % part))
    done = subprocess.run([PROGRAM, "score", "--jsonl", "--model", MODEL, "--max-line-bytes", str(1 << 20),
                           folder / "in.jsonl"], capture_output=True, text=True)
    results = map(json.loads, done.stdout.splitlines())
    expected = {r["id"]: {k: r["results"][0][k] for k in FIGURES} for r in results}
    assert len(expected) == N - 1 and ":42: " in done.stderr
    return folder, expected


def score(folder, *inputs, program=PROGRAM, output="out", workers=2, options=()):
    command = [sys.executable, SCRIPT, "--input", *inputs, "--output", folder / output, "--model", MODEL,
               "--program", program, "--workers", workers, *options]
    return subprocess.run([str(c) for c in command], env=environment(), capture_output=True, text=True,
                          timeout=LIMIT_S)


def check(rows, expected):
    counts = collections.Counter(r["id"] for r in rows)
    assert len(counts) == N and set(counts.values()) == {1}
    for row in rows:
        if row["id"] == "d41":
            assert "the line has more than" in row["error"] and row["perplexity"] is None
        else:
            assert row["error"] is None
            assert {k: row[k] for k in FIGURES} == expected[row["id"]], row["id"]


SHORT = ["--", "--max-line-bytes", 1 << 20]


def test_a_worker_and_a_pkmserve_die_and_no_row_is_lost_or_doubled(corpus, tmp_path):
    folder, expected = corpus
    program = tmp_path / "dying"
    program.write_text(DYING.format(folder=tmp_path, program=PROGRAM))
    program.chmod(0o755)
    done = score(tmp_path, folder / "in.jsonl", program=program, options=["--batch", 64, *SHORT])
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "killed-worker").exists() and (tmp_path / "died").exists()
    rows = pq.read_table(tmp_path / "out").to_pylist()
    check(rows, expected)
    assert {r["source"] for r in rows} == {"web"} and "text" not in rows[0]


def test_parquet_by_another_field(corpus, tmp_path):
    folder, expected = corpus
    done = score(tmp_path, *sorted(folder.glob("*.parquet")), options=["--text-field", "content", *SHORT])
    assert done.returncode == 0, done.stderr[-4000:]
    check(pq.read_table(tmp_path / "out").to_pylist(), expected)
    again = score(tmp_path, folder / "in.jsonl")
    assert again.returncode == 1 and "is not empty" in again.stderr


def test_what_ends_pkmserve_is_told(corpus, tmp_path):
    folder, _ = corpus
    done = score(tmp_path, folder / "in.jsonl", options=["--", "--stride", "none"])
    assert done.returncode != 0 and "--stride" in done.stderr, done.stderr[-4000:]


@pytest.mark.skipif("SCALE" not in os.environ, reason="SCALE=1 measures one worker beside two")
def test_two_workers_beside_one(tmp_path, capsys):
    """Prints; the time that pkmserve's workers compute, Ray's start left out by a second, longer corpus."""
    sizes = (1024, 5120)
    for n in sizes:
        lines = (json.dumps({"text": "It was a dark night, and the wind %d blew. " % i * 6}) for i in range(n))
        (tmp_path / ("%d.jsonl" % n)).write_text("\n".join(lines))
    rates = {}
    for workers in (1, 2):
        seconds = []
        for n in sizes:
            begin = time.monotonic()
            done = score(tmp_path, tmp_path / ("%d.jsonl" % n), output="%d-%d" % (workers, n), workers=workers,
                         options=["--batch", 256])
            assert done.returncode == 0, done.stderr[-4000:]
            seconds.append(time.monotonic() - begin)
        rates[workers] = (sizes[1] - sizes[0]) / (seconds[1] - seconds[0])
    with capsys.disabled():
        print("\ndocuments/s: %.0f by one worker, %.0f by two: %.2f times" %
              (rates[1], rates[2], rates[2] / rates[1]))
