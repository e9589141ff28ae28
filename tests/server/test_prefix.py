"""Equal beginnings are computed once; what that changes is told in usage and metrics, nothing else."""

import re

import pytest

from server_harness import Server, error_of, eventually

CONTEXT = [1] + [100 + i * 37 % 800 for i in range(99)]
ENDINGS = [CONTEXT + [300 + i, 400 + i, 500 + i] for i in range(4)]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def work(s):
    """Answers without what tells one run from another, and the tokens that the cache saved."""
    samples = s.ok("/generate", {"prompt": CONTEXT, "n": 4, "max_tokens": 20, "seed": 3,
                                 "logprobs": 2, "ignore_eos": True})
    endings = s.ok("/generate", {"prompt": ENDINGS, "max_tokens": 2, "temperature": 0,
                                 "logprobs": 0})
    follow = CONTEXT + samples["choices"][0]["token_ids"] + [77]
    follow_up = s.ok("/generate", {"prompt": follow, "max_tokens": 2, "temperature": 0})
    scores = s.ok("/score", {"tokens": ENDINGS, "logprobs": 0})
    ranking = s.ok("/score", {"context": CONTEXT, "continuations": [e[100:] for e in ENDINGS],
                              "logprobs": 0, "target_ids": [5, 6]})
    answers = [samples, endings, follow_up, scores, ranking]
    return ([answer.get("choices") or answer["results"] for answer in answers],
            [cached(answer) for answer in answers])


def test_computed_once_with_the_same_results():
    with Server("--prefix-cache", "off") as s:
        expected, saved = work(s)
        assert saved == [0, 0, 0, 0, 0]
        assert s.metric("prefix_cache_hits_total") == s.metric("prefix_cache_queries_total") == 0
        assert s.get("/info").json()["defaults"]["prefix_cache"] == "off"
        read = s.metric("prompt_tokens_total")
        assert read == s.metric("request_prompt_tokens_sum") == 4 * 100 + 4 * 103 + 121
    with Server() as s:
        got, saved = work(s)
        assert got == expected
        # Full pages of 16; the last token of a prompt, and what is scored, is computed always.
        assert saved == [0, 4 * 96, 112, 0, 4 * 96]
        hits = 3 * 96 + 4 * 96 + 112 + 4 * 96
        s.counted("prefix_cache_hits_total", hits)
        s.counted("prefix_cache_queries_total", 4 * 100 + 4 * 103 + 121 + 4 * 103)
        s.counted("prompt_tokens_total", read)  # computed or not, as vLLM counts them
        s.counted('score_positions_total{form="ranking"}', 4 * (103 - 96))
        again, saved = work(s)
        assert again == expected and saved == [96, 4 * 96, 112, 0, 4 * 96]
        body = {"model": "demo", "prompt": CONTEXT, "max_tokens": 1}
        assert cached(s.ok("/v1/completions", body)) == 96


@pytest.mark.parametrize("path, body", [
    ("/generate", {"prompt": CONTEXT, "max_tokens": 1}),
    ("/v1/completions", {"prompt": CONTEXT, "max_tokens": 1}),
    ("/generate", {"inputs": "The old man and the sea. " * 20, "parameters": {"max_new_tokens": 1}}),
    ("/score", {"context": CONTEXT, "continuations": [[7, 8]]}),
    ("/v1/score", {"query": CONTEXT, "items": [[7]], "label_token_ids": [5, 6]})])
def test_who_does_not_know_the_salt_finds_nothing(path, body):
    with Server() as s:
        def saved(salt):
            before = s.metric("prefix_cache_hits_total")
            s.ok(path, {**body, **({"cache_salt": salt} if salt else {})})
            return s.metric("prefix_cache_hits_total") - before

        first = [saved(salt) for salt in ("our secret", None, "another", "our secre", "o" * 1024)]
        assert first == [0] * 5
        assert [saved(salt) >= 96 for salt in ("our secret", None, "another")] == [True] * 3


@pytest.mark.parametrize("salt", ["", "x" * 1025, "\u20ac" * 342, 7, "a\0b"])
def test_a_salt_has_1_to_1024_bytes(server, salt):
    for path, body in (("/generate", {"prompt": "A"}), ("/score", {"text": "A"})):
        error_of(server.post(path, {**body, "cache_salt": salt}), 400, "invalid_value", "cache_salt")


def test_memory_usage_of_all_traffic():
    with Server() as s:
        assert "memory_used_ratio{" not in s.get("/metrics").text  # nothing to tell yet
        s.ok("/score", {"tokens": ENDINGS})
        eventually(lambda: s.metric("memory_sampled_positions") == 4 * 102 // 64, "statistics")
        text = s.get("/metrics").text
        slots = float(re.search(r"^pkmserve_memory_slots{.*} (\S+)$", text, re.M).group(1))
        layers = re.findall(r"^pkmserve_memory_slots{layer=(\S+)}", text, re.M)
        used = dict(re.findall(r"^pkmserve_memory_used_ratio{layer=(\S+)} (\S+)$", text, re.M))
        assert list(used) == layers and all(0 < float(u) < 1 for u in used.values())
        for name, low, high in (("memory_kl_nats", 0, 20), ("memory_top90_slots", 1, slots)):
            rows = re.findall(r"^pkmserve_%s{layer=(\S+),weighting=\"(\w+)\"} (\S+)$" % name, text,
                              re.M)
            assert [row[:2] for row in rows] == [(layer, by) for layer in layers
                                                 for by in ("weight", "count")]
            by_weight, by_count = float(rows[0][2]), float(rows[1][2])
            assert low <= min(by_weight, by_count) and max(by_weight, by_count) <= high, rows
            # few of the slots that are looked up get much of the weight
            assert by_weight > by_count if name == "memory_kl_nats" else by_weight < by_count, rows
        s.ok("/score", {"tokens": [[9] + each for each in ENDINGS]})  # of more traffic there are new ones
        eventually(lambda: s.metric("memory_sampled_positions") > 4 * 102 // 64, "newer statistics")
