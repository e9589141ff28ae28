"""The golden cases through the server: scores, memory slots, usage, perplexity, greedy text.

Rerun one: B=build PKMSERVE=build/pkmserve /usr/bin/python3 -m pytest \
           tests/golden/test_golden_http.py -k 'pkm12-2mem and slots'
"""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import golden_harness as gh
import numpy as np
import pytest


@pytest.fixture(scope="module", params=gh.NAMES)
def case(request):
    """A server on the case, what the original computed, and the case's name."""
    gh.convert_all()
    server = gh.Server(request.param)
    yield SimpleNamespace(name=request.param, server=server, due=gh.expected(request.param))
    server.stop()


def with_language(body, lang):
    return body if lang is None else {**body, "language": lang}


def score(case, item, **fields):
    """The result of one sequence, scored as it stands."""
    body = with_language({"tokens": item["ids"], "logprobs": 0, **fields}, item["lang"])
    return case.server.post("/score", body)["results"][0]


def logprobs(result):
    """Those of the scored tokens; the first token of ids has none."""
    first, *rest = result["tokens"]
    assert first["logprob"] is None
    return [token["logprob"] for token in rest]


def place_name(layer):
    return "%d_%s" % (layer["layer"], layer["place"])


def hits(result):
    """memory name -> (slots, weights), each [position, head, k]."""
    got = {}
    for layer in result["memory"]["layers"]:
        slots = [[head["slots"] for head in token] for token in layer["tokens"]]
        weights = [[head["weights"] for head in token] for token in layer["tokens"]]
        got[place_name(layer)] = np.array(slots), np.array(weights)
    return got


def close(got, due, tolerance, what):
    if got is None or due is None:  # an undefined metric is null in both
        assert got is due, "%s: %s expected, got %s" % (what, due, got)
        return
    error = abs(got - due)
    assert error <= tolerance, "%s: %.10g expected, got %.10g (off by %.3g, allowed %.3g)" % (
        what, due, got, error, tolerance)


# ---- scoring ------------------------------------------------------------------------------------

def test_logprobs_nll_and_perplexity(case):
    for n, item in enumerate(case.due["sequences"]):
        got = score(case, item)
        assert [token["id"] for token in got["tokens"]] == item["ids"]
        assert (got["n_tokens"], got["n_scored"]) == (len(item["ids"]), len(item["ids"]) - 1)
        for t, (mine, due) in enumerate(zip(logprobs(got), item["logprobs_f64"])):
            close(mine, due, gh.LOGPROB, "sequence %d, token %d" % (n, t + 1))
        close(-got["sum_logprob"], item["nll_f64"], gh.NLL, "nll of sequence %d" % n)
        close(got["perplexity"], item["ppl_f64"], gh.PPL_RELATIVE * item["ppl_f64"], "ppl %d" % n)
        close(got["mean_nll"], item["nll_f64"] / got["n_scored"], gh.LOGPROB, "mean nll %d" % n)


def test_arg_max_and_the_likeliest_tokens(case):
    """The 20 best of every position have the original's log-probabilities."""
    item = case.due["sequences"][0]
    rows = gh.expected_arrays(case.name)["logprobs_full_f64"]
    got = score(case, item, logprobs=20, ranks=True)
    for t, token in enumerate(got["tokens"][1:]):
        assert token["top"][0]["id"] == item["argmax"][t], "arg-max after token %d" % t
        order = np.sort(rows[t])[::-1]
        for entry, due in zip(token["top"], order):
            close(entry["logprob"], due, gh.LOGPROB_ROW, "top after token %d" % t)
            close(entry["logprob"], rows[t][entry["id"]], gh.LOGPROB_ROW, "id %d" % entry["id"])
        due = int((rows[t] > rows[t][token["id"]]).sum()) + 1
        assert abs(token["rank"] - due) <= (rows[t] == rows[t][token["id"]]).sum()


def test_all_in_one_request_is_one_by_one_to_the_bit(case):
    for lang in sorted({item["lang"] for item in case.due["sequences"]}, key=str):
        items = [item for item in case.due["sequences"] if item["lang"] == lang]
        fields = {"logprobs": 3, "ranks": True, "memory": "summary"}
        body = with_language({"tokens": [item["ids"] for item in items], **fields}, lang)
        together = case.server.post("/score", body)["results"]
        for n, item in enumerate(items):
            alone = score(case, item, **fields)
            assert {**together[n], "index": 0} == alone, "sequence %d of language %s" % (n, lang)


def test_crowded_is_alone_to_the_bit(case):
    """Every sequence and both prompts at once, several times, against quiet answers."""
    jobs = [("/score", with_language({"tokens": item["ids"], "logprobs": 0, "memory": "summary"},
                                     item["lang"]), "results") for item in case.due["sequences"]]
    jobs += [("/generate", greedy_body(item), "choices") for item in case.due["greedy"]]
    quiet = [case.server.post(route, body)[part] for route, body, part in jobs]

    def ask(n):
        route, body, part = jobs[n % len(jobs)]
        got = gh.requests.post(case.server.url + route, json=body, timeout=gh.START_S)
        assert got.status_code == 200, got.text
        return n, got.json()[part]

    with ThreadPoolExecutor(8) as pool:
        for n, got in pool.map(ask, range(3 * len(jobs))):
            assert got == quiet[n % len(jobs)], "job %d differs in a crowd" % (n % len(jobs))


# ---- the evaluation loop of the original --------------------------------------------------------

def test_stream_perplexity_and_accuracy(case):
    for stream in case.due["stream"]:
        body = {"tokens": stream["windows"], "logprobs": 0, "ranks": True}
        got = case.server.post("/score", with_language(body, stream["lang"]))
        total = got["aggregate"]
        assert total["n_scored"] == stream["predicted"]
        close(total["perplexity"], stream["ppl_f64"], gh.PPL_RELATIVE * stream["ppl_f64"],
              "perplexity of %s" % stream["lang_name"])
        close(-total["sum_logprob"], stream["nll_f64"], gh.NLL, "nll of %s" % stream["lang_name"])
        right = sum(token["rank"] == 1
                    for result in got["results"] for token in result["tokens"][1:])
        close(100 * right / stream["predicted"], stream["acc"], 1e-6, "accuracy")


# ---- memory -------------------------------------------------------------------------------------

def test_memory_slots_and_weights(case):
    got = hits(score(case, case.due["sequences"][0], memory="tokens"))
    due = case.due["memory_short"]
    assert sorted(got) == sorted(due)
    for name, arrays in due.items():
        slots, weights = got[name]
        due_weights = np.array(arrays["weights"])
        assert weights.shape == due_weights.shape
        if case.due["ties"]:  # which of the tied slots is taken is open; their weights are not
            np.testing.assert_allclose(np.sort(weights), np.sort(due_weights), 0, gh.WEIGHT)
            continue
        mine, mine_weights = gh.by_slot(slots, weights)
        theirs, their_weights = gh.by_slot(np.array(arrays["indices"]), due_weights)
        np.testing.assert_array_equal(mine, theirs, name)
        np.testing.assert_allclose(mine_weights, their_weights, 0, gh.WEIGHT,
                                   err_msg="weights of " + name)
        assert (np.diff(weights) <= 0).all(), "best first in " + name


def pooled(case, items):
    """memory name -> usage over all positions of items."""
    parts = [hits(score(case, item, memory="tokens")) for item in items]
    sizes = {place_name(layer): layer["slots"]
             for layer in score(case, items[0], memory="summary")["memory"]["layers"]}
    return {name: gh.usage(n_slot, np.concatenate([part[name][0].reshape(-1) for part in parts]),
                           np.concatenate([part[name][1].reshape(-1) for part in parts]))
            for name, n_slot in sizes.items()}


def check_usage(got, due, n_slot, what):
    close(100 * got["used"] / n_slot, due["used"], 1e-6, "%s: used" % what)
    for kind in "wu":
        close(got[kind]["kl"], due["kl_" + kind], gh.KL, "%s: kl_%s" % (what, kind))
        close(got[kind]["gini"], due["gini_" + kind], gh.GINI, "%s: gini_%s" % (what, kind))
        for p in (50, 90, 99):
            key = "top%d_%s" % (p, kind)
            close(got[kind]["top%d" % p], due[key], gh.TOP, "%s: %s" % (what, key))


def test_memory_usage_of_evaluator_and_paper(case):
    if case.due["ties"] or not case.due["memory_short"]:
        pytest.skip("no memory, or which slots are used is open")
    got = pooled(case, case.due["sequences"])
    assert sorted(got) == sorted(case.due["memory_metrics"])
    for name, due in case.due["memory_metrics"].items():
        check_usage(got[name], due["evaluator"], due["paper"]["slots"], name)
        assert got[name]["used"] == due["paper"]["used"]
        close(got[name]["used"] / due["paper"]["slots"], due["paper"]["usage"], 1e-6, name)
        close(got[name]["w"]["kl"], due["paper"]["kl"], gh.KL, name + ": kl of the paper")


def test_memory_usage_over_the_stream(case):
    if case.due["ties"] or not case.due["memory_short"]:
        pytest.skip("no memory, or which slots are used is open")
    for stream in case.due["stream"]:
        items = [{"ids": ids, "lang": stream["lang"]} for ids in stream["windows"]]
        for name, got in pooled(case, items).items():
            n_slot = case.due["memory_metrics"][name]["paper"]["slots"]
            check_usage(got, stream["memory"][name], n_slot, "%s, %s" % (name, stream["lang_name"]))


def test_memory_summary_follows_from_the_hits(case):
    for item in case.due["sequences"]:
        got = score(case, item, memory="tokens")
        brief = score(case, item, memory="summary")
        for layer, short in zip(got["memory"]["layers"], brief["memory"]["layers"]):
            slots, weights = hits(got)[place_name(layer)]
            assert slots.shape == (len(item["ids"]), layer["heads"], layer["knn"])
            assert layer["lookups"] == slots.size
            if case.due["config"]["mem_score_softmax"] \
                    and case.due["config"]["mem_score_subtract"] == "":
                close(weights.sum(), slots.size / layer["knn"], 1e-4 * slots.size,
                      "shares add to one")
            due = gh.usage(layer["slots"], slots, weights)
            close(layer["mem_used"], due["used"] / layer["slots"], 1e-12, "mem_used")
            for kind in "wu":
                close(layer["mem_kl_" + kind], due[kind]["kl"], 1e-6, "mem_kl_" + kind)
                close(layer["mem_gini_" + kind], due[kind]["gini"], 1e-6, "mem_gini_" + kind)
                for p in (50, 90, 99):
                    close(layer["mem_top%d_%s" % (p, kind)], due[kind]["top%d" % p], gh.TOP, "top")
            assert {key: value for key, value in layer.items() if key != "tokens"} == short


# ---- generation ---------------------------------------------------------------------------------

def greedy_body(item, **fields):
    return with_language({"prompt": item["prompt"], "max_tokens": len(item["tokens"]),
                          "temperature": 0, "ignore_eos": True, "logprobs": 0, **fields},
                         item["lang"])


def test_greedy_continuations(case):
    for item in case.due["greedy"]:
        choice = case.server.post("/generate", greedy_body(item))["choices"][0]
        assert choice["token_ids"] == item["tokens"]
        assert choice["finish_reason"] == "length"
        assert [token["id"] for token in choice["logprobs"]] == item["tokens"]
        for t, (token, due) in enumerate(zip(choice["logprobs"], item["logprobs"])):
            close(token["logprob"], due, gh.LOGPROB, "generated token %d" % t)


def test_greedy_ends_where_the_original_would(case):
    """At </s>; where none comes up, at the length."""
    for item in case.due["greedy"]:
        choice = case.server.post("/generate", greedy_body(item, ignore_eos=False))["choices"][0]
        if item["eos_at"] is None:
            assert (choice["token_ids"], choice["finish_reason"]) == (item["tokens"], "length")
        else:
            assert choice["finish_reason"] == "stop"
            assert choice["token_ids"] in (item["tokens"][:item["eos_at"]],
                                           item["tokens"][:item["eos_at"] + 1])


def test_echo_gives_the_scores_bits(case):
    """Prompt log-probabilities of /generate and /score are the same numbers."""
    for item in case.due["greedy"]:
        body = greedy_body(item, echo=True)
        got = case.server.post("/generate", body)["choices"][0]["logprobs"]
        whole = {"ids": item["prompt"] + item["tokens"], "lang": item["lang"]}
        scored = score(case, whole)["tokens"]
        assert [token["logprob"] for token in got] == [token["logprob"] for token in scored]


# ---- languages ----------------------------------------------------------------------------------

def test_languages_by_id_and_by_name(case):
    item = case.due["sequences"][0]
    body = {"tokens": item["ids"], "logprobs": 0}
    if case.due["config"]["n_langs"] == 1:
        error = case.server.post("/score", {**body, "language": 0}, status=400)["error"]
        assert error["param"] == "language"
        return
    by_id = {case.due["config"]["lang2id"][name]: name for name in case.due["config"]["lang2id"]}
    answers = []
    for number, name in sorted(by_id.items()):
        by_number = case.server.post("/score", {**body, "language": number})["results"]
        assert by_number == case.server.post("/score", {**body, "language": name})["results"]
        answers.append(by_number)
    assert answers[0] != answers[1], "the language has no effect"
    assert answers[0] == case.server.post("/score", body)["results"], "default: the first language"
    for wrong in (2, -1, "xx", True, 1.5):
        error = case.server.post("/score", {**body, "language": wrong}, status=400)["error"]
        assert error["param"] == "language"


# ---- without a server ---------------------------------------------------------------------------

def test_the_command_line_scores_the_same(case, tmp_path):
    item = case.due["sequences"][2]
    (tmp_path / "ids").write_text(" ".join(map(str, item["ids"])))
    language = [] if item["lang"] is None else ["--language", str(item["lang"])]
    status, out, err = gh.run_program("score", "--model", gh.model_directory(case.name), "--ids",
                                      "--json", *language, tmp_path / "ids")
    assert status == 0, err
    got, due = json.loads(out)["results"][0], score(case, item)
    for field in ("n_tokens", "n_scored", "sum_logprob", "mean_nll", "perplexity"):
        assert got[field] == due[field], field


def test_the_command_line_continues_the_same(case, tmp_path):
    item = case.due["greedy"][0]
    language = [] if item["lang"] is None else ["--language", str(item["lang"])]
    status, out, err = gh.run_program(
        "generate", "--model", gh.model_directory(case.name), "--ids", "--json",
        "--temperature", "0", "--max-tokens", len(item["tokens"]), "--ignore-eos", *language,
        " ".join(map(str, item["prompt"])))
    assert status == 0, err
    assert json.loads(out)["choices"][0]["token_ids"] == item["tokens"]
