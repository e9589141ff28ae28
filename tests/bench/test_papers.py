"""papers.py with tiny shapes: every table has all its rows, the counts of section 3.2 are what a search that
counts its own multiply-adds counts, and the chart is drawn. Nothing here depends on how fast anything is."""

import itertools
import json
import os
import random
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("B", "build")
sys.path.insert(0, str(Path(__file__).parent))

import papers  # noqa: E402

LIMIT_S = 300  # on a busy machine


def run(folder, *words):
    return subprocess.run([sys.executable, "tests/bench/papers.py", "--build", str(BUILD), "--device", "cpu",
                           "--threads", "1", "--quick", "--out", str(folder), *words],
                          cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(folder, what was printed): all figures, once."""
    if not (BUILD / "tests/bench/bench_device").exists():
        pytest.fail("%s is missing: make B=%s tests" % (BUILD / "tests/bench/bench_device", BUILD))
    folder = tmp_path_factory.mktemp("papers")
    done = run(folder, *papers.FIGURES, "chart")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.parametrize("figure", papers.FIGURES)
def test_every_row_is_measured_and_printed(measured, figure):
    folder, printed = measured
    result = json.loads((folder / ("papers-%s.json" % figure)).read_text())
    cases, pairs = papers.FIGURES[figure][0](papers.QUICK)
    assert [case["name"] for case in result["cases"]] == [case.name for case in cases]
    assert len(result["pairs"]) == len(pairs)
    for case in result["cases"]:
        assert case["name"] in printed
        for values in (case["speed"], case["ratio"]):
            assert set(values) == set(result["metrics"]) and all(v > 0 for v in values.values()), case
    for field in ("date", "command", "dtype", "rounds", "machine"):
        assert result[field], field


def test_the_paper_is_quoted_where_it_has_words_or_formulas_only(measured):
    folder, _ = measured
    read = {figure: json.loads((folder / ("papers-%s.json" % figure)).read_text()) for figure in papers.FIGURES}
    assert [pair["paper"] for pair in read["table4"]["pairs"]] == [1.0, None, None]
    assert {case["name"]: case["paper"] for case in read["figure4"]["cases"] if case["paper"]} == {
        "width 32, 3 layers, 1 memory": 2.0}
    assert all(case["paper"] is None for case in read["table4"]["cases"] + read["figure6"]["cases"])


def test_chart_is_a_picture_of_all_figures(measured):
    folder, _ = measured
    root = xml.etree.ElementTree.parse(folder / "papers.svg").getroot()
    text = " ".join(element.text or "" for element in root.iter())
    for title in ("Table 4", "Figure 4", "Figure 6", "Section 3.2"):
        assert title in text


def test_what_does_not_fit_is_said_and_the_rest_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(papers, "bytes_available", lambda: 0)
    papers.main(["--build", str(BUILD), "--device", "cpu", "--quick", "--out", str(tmp_path), "counts", "chart"])
    assert "does not fit: needs 0." in capsys.readouterr().out


def test_chart_without_results_says_what_to_do(tmp_path):
    done = run(tmp_path, "chart")
    assert done.returncode != 0 and "measure first" in done.stderr, done.stderr


def test_processor_time_of_threads_that_wait_is_refused(tmp_path):
    done = run(tmp_path, "--threads", "2", "--clock", "cpu", "counts")
    assert done.returncode == 2 and "needs --threads 1" in done.stderr, done.stderr


# ---- section 3.2 --------------------------------------------------------------------------------


class Counter:
    """A dot product that counts its multiply-adds."""

    def __init__(self):
        self.n = 0

    def dot(self, a, b):
        self.n += len(a)
        return sum(x * y for x, y in zip(a, b))


def best(scores, k):
    return sorted(scores, key=scores.get, reverse=True)[:k]


def search_flat(counter, halves, query, k):
    keys = {(i, j): a + b for (i, a), (j, b) in itertools.product(*map(enumerate, halves))}
    return best({slot: counter.dot(query, key) for slot, key in keys.items()}, k)


def search_product(counter, halves, query, k):
    """As section 3.2 counts it: the k best of each half, then the k² candidates scored as whole keys."""
    half = len(query) // 2
    short = [best({i: counter.dot(part, key) for i, key in enumerate(keys)}, k)
             for part, keys in zip((query[:half], query[half:]), halves)]
    return best({(i, j): counter.dot(query, halves[0][i] + halves[1][j]) for i, j in itertools.product(*short)}, k)


@pytest.mark.parametrize("keys,width,k", [(8, 4, 2), (16, 6, 3), (24, 8, 4)])
def test_formulas_are_what_a_counting_search_counts(keys, width, k):
    draw = random.Random(keys)
    halves = [[[draw.gauss(0, 1) for _ in range(width // 2)] for _ in range(keys)] for _ in range(2)]
    query = [draw.gauss(0, 1) for _ in range(width)]
    flat, product = Counter(), Counter()
    assert search_flat(flat, halves, query, k) == search_product(product, halves, query, k)
    assert flat.n == papers.flat_count(keys, width)
    assert product.n == papers.product_count(keys, width, k)


def test_our_searches_are_counted_as_they_are(measured):
    """Ours does not score candidates anew: their sums are additions of scores that are there."""
    folder, _ = measured
    width = papers.QUICK["common"]["key_width"]
    for case in json.loads((folder / "papers-counts.json").read_text())["cases"]:
        keys = int(case["slots"] ** 0.5)
        assert case["counted"] == (keys if case["kind"] == "product" else keys * keys) * width, case


def test_full_size_counts():
    """512² slots, keys of 256, k 32: 67.1 million multiply-adds against 393 thousand."""
    assert papers.flat_count(512, 256) == 67108864
    assert papers.product_count(512, 256, 32) == 393216
