"""lm-evaluation-harness, unmodified, with local-completions and the remote tokenizer: nothing is
given but base_url, model and max_length. Its figures are ours."""

import glob
import json
import math
import os
import subprocess
import sys

import pytest

from server_harness import ROOT

CONTEXT = 512
TASKS = {
    "pkm_choice": """
task: pkm_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %(data)s/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "pkm_rolling": """
task: pkm_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: %(data)s/page.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "pkm_until": """
task: pkm_until
dataset_path: json
dataset_kwargs: {data_files: {test: %(data)s/until.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}
CHOICES = [("The old man went down to the", ["sea in his boat", "sea  and", "of of of"]),
           ("She was very happy and began to", ["laugh", "umbrella", "sing a song."]),
           ("It was a dark night,", ["and the rain fell", "xylophone", "\u00e9t\u00e9 \u2603"])]
PROMPTS = ["It was", "He looked at", "There is no"]


def pages():
    """Some pages of text that is in the repository, longer and shorter than a window."""
    text = open(os.path.join(ROOT, "models", "demo", "README.md")).read()
    return [text[:6000], text[1000:1300], "One short page."]


def evaluate(server, folder, tasks, **more):
    """Its figures and its samples, in the order of the documents."""
    rows = {
        "choice": [{"context": c, "choices": e, "label": 0} for c, e in CHOICES],
        "page": [{"page": p} for p in pages()],
        "until": [{"context": p, "answer": "?"} for p in PROMPTS],
    }
    for name, each in rows.items():
        (folder / (name + ".jsonl")).write_text("".join(json.dumps(r) + "\n" for r in each))
    for name in tasks:
        (folder / (name + ".yaml")).write_text(TASKS[name] % {"data": folder})
    arguments = "model=demo,base_url=%s/v1/completions,max_length=%d" % (server.url, CONTEXT)
    arguments += "".join(",%s=%s" % each for each in more.items())
    env = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1",
           "HF_DATASETS_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args",
         arguments, "--include_path", str(folder), "--tasks", ",".join(tasks), "--output_path",
         str(folder / "out"), "--log_samples"], capture_output=True, text=True, env=env,
        timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    found = json.load(open(glob.glob(str(folder / "out/**/results_*.json"), recursive=True)[0]))
    samples = {}
    for name in tasks:
        path = glob.glob(str(folder / ("out/**/samples_%s_*.jsonl" % name)), recursive=True)[0]
        samples[name] = sorted(map(json.loads, open(path)), key=lambda s: s["doc_id"])
    return found["results"], samples


@pytest.fixture(scope="module")
def results(server, tmp_path_factory):
    return evaluate(server, tmp_path_factory.mktemp("lm_eval"), list(TASKS))


def test_rolling_perplexity_equals_score_under_the_same_windows(server, results):
    found, samples = results
    window = CONTEXT - 2  # what lm-eval leaves of max_length
    got = server.ok("/score", {"text": pages(), "max_context": window})
    for sample, result in zip(samples["pkm_rolling"], got["results"]):
        theirs = sample["resps"][0][0]
        theirs = float(theirs[0] if isinstance(theirs, list) else theirs)
        assert math.isclose(theirs, result["sum_logprob"], rel_tol=1e-6), (theirs, result)
    assert any(r["windows"]["count"] > 1 for r in got["results"])
    same = server.ok("/score", {"text": pages(), "windows": "lm-eval"})
    assert [r["sum_logprob"] for r in same["results"]] == [r["sum_logprob"] for r in got["results"]]
    figures = found["pkm_rolling"]
    assert math.isclose(figures["word_perplexity,none"], got["aggregate"]["word_perplexity"],
                        rel_tol=1e-6)
    assert math.isclose(figures["bits_per_byte,none"], got["aggregate"]["bits_per_byte"],
                        rel_tol=1e-6)


def test_loglikelihoods_equal_pairs_of_score(server, results):
    _, samples = results
    for (context, endings), sample in zip(CHOICES, samples["pkm_choice"]):
        pairs = [{"context": context, "continuation": " " + e} for e in endings]
        got = server.ok("/score", {"pairs": pairs, "add_bos": False})["results"]
        for response, result in zip(sample["resps"], got):
            logprob, greedy = response[0]
            assert math.isclose(float(logprob), result["sum_logprob"], rel_tol=1e-6)
            assert str(greedy) == str(result["is_greedy"])
        same = server.ok("/score", {"pairs": pairs, "windows": "lm-eval"})["results"]
        assert [r["sum_logprob"] for r in same] == [r["sum_logprob"] for r in got]


def test_generation_until_equals_generate(server, results):
    _, samples = results
    for prompt, sample in zip(PROMPTS, samples["pkm_until"]):
        ids = server.ok("/tokenize", {"prompt": prompt, "add_special_tokens": False})["tokens"]
        got = server.ok("/generate", {"prompt": ids, "max_tokens": 24, "temperature": 0,
                                      "stop": ["."]})
        assert sample["resps"][0][0] == got["choices"][0]["text"]


@pytest.mark.parametrize("concurrent", [1, 4])
def test_as_text_endings_are_scored_behind_the_bos(server, tmp_path, concurrent):
    """tokenized_requests=False: the prompt is text, in front of which the server puts BOS. lm-eval
    counts the context's tokens without it, and so does the list of echoed tokens."""
    found, samples = evaluate(server, tmp_path, ["pkm_choice"], tokenizer_backend="remote",
                              tokenized_requests="False", num_concurrent=concurrent)
    for (context, endings), sample in zip(CHOICES, samples["pkm_choice"]):
        pairs = [{"context": context, "continuation": " " + e} for e in endings]
        got = server.ok("/score", {"pairs": pairs})["results"]
        for response, result in zip(sample["resps"], got):
            logprob, greedy = response[0]
            assert math.isclose(float(logprob), result["sum_logprob"], rel_tol=1e-6)
            assert str(greedy) == str(result["is_greedy"])
    ranked = [server.ok("/score", {"context": c, "continuations": [" " + e for e in endings]})
              for c, endings in CHOICES]
    right = sum(r["ranking"]["sum"] == 0 for r in ranked) / len(ranked)
    assert math.isclose(found["pkm_choice"]["acc,none"], right, rel_tol=1e-6)
