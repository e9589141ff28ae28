"""Knock-out: what a request switches off, whom it concerns, and what is refused."""

import pytest
from concurrent.futures import ThreadPoolExecutor

from server_harness import UNBOUNDED, Server, error_of

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife."
OFF = [{"memory": 0}]


def scored(server, **fields):
    got = server.ok("/score", {"text": TEXT, "logprobs": 0, **fields})["results"][0]
    return [token["logprob"] for token in got["tokens"]]


def test_it_changes_what_it_names_and_nothing_else(server):
    plain = scored(server)
    off = scored(server, ablate=OFF)
    head = scored(server, ablate=[{"memory": 0, "head": 3}])
    more = scored(server, ablate=[{"memory": 0, "scale": 2}])
    assert len({tuple(row) for row in (plain, off, head, more)}) == 4
    heads = [{"memory": 0, "head": h} for h in range(4)]
    assert scored(server, ablate=heads) == off  # all heads are the memory
    for nothing in ([], None, [{"memory": 0, "scale": 1}], [{"memory": 0, "slots": []}],
                    [{"memory": 0, "scale": 0.5}, {"memory": 0, "scale": 2}],
                    [{"memory": 0, "scale": 0.25}] * 100 + [{"memory": 0, "scale": 4}] * 100,
                    [{"memory": 0, "scale": 4}] * 100 + [{"memory": 0, "scale": 0.25}] * 100):
        assert scored(server, ablate=nothing) == plain
    assert scored(server, ablate=[{"memory": 0, "head": None, "scale": 0.0}]) == off
    assert scored(server, ablate=[{"memory": 0, "scale": 4}] * 64 + [{"memory": 0, "scale": 0}]) == off
    assert scored(server, ablate=[{"memory": 0, "scale": s} for s in (0.1, 0.2, 0.9)]) == \
        scored(server, ablate=[{"memory": 0, "scale": s} for s in (0.9, 0.1, 0.2)])
    assert scored(server) == plain


def test_rows_with_and_without_it_share_steps(server):
    bodies = [{"text": TEXT + " %d" % i, "logprobs": 0,
               **({} if i % 2 else {"ablate": [{"memory": 0, "head": i % 4}]})} for i in range(8)]
    alone = [server.ok("/score", body)["results"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: server.ok("/score", body)["results"], bodies)) == alone


def test_the_cache_keeps_lists_apart(server):
    prompt = [7] + [200 + i * 31 % 700 for i in range(50)]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 2, "ignore_eos": True}

    def run(**fields):
        got = server.ok("/generate", {**body, **fields})
        return got["choices"], got["usage"]["prompt_tokens_details"]["cached_tokens"]

    plain, cached = run()
    assert cached == 0
    off, cached = run(ablate=OFF)
    assert cached == 0 and off != plain
    assert run(ablate=[{"memory": 0, "head": h} for h in (3, 1, 2, 0)])[1] == 0
    assert run(ablate=[{"memory": 0, "scale": 0}, {"memory": 0, "scale": 0.3}]) == (off, 48)
    assert run(ablate=[{"memory": 0, "scale": 1}]) == (plain, 48)


def test_generations_and_completions_take_it(server):
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
    for path, text in (("/generate", "text"), ("/v1/completions", "text")):
        plain, off = (server.ok(path, {"model": "demo", **body, **more})["choices"][0][text]
                      for more in ({}, {"ablate": OFF}))
        assert plain != off


def test_usage_counts_slots_as_searched_and_weights_as_used(server):
    plain, off = (server.ok("/score", {"text": TEXT, "memory": "summary", **more})["results"][0]
                  ["memory"]["layers"][0] for more in ({}, {"ablate": [{"memory": 0, "head": 0}]}))
    assert off["lookups"] == plain["lookups"] and off["mem_kl_u"] == plain["mem_kl_u"]
    assert off["mem_used"] < plain["mem_used"]


WRONG = [
    ({}, "a list"),
    ("x", "a list"),
    ([3], "ablate[0]"),
    ([{}], "ablate[0].memory must be an integer 0 ... 0, not nothing"),
    ([{"memory": 1}], "0 ... 0, not 1"),
    ([{"memory": -1}], "ablate[0].memory"),
    ([{"memory": True}], "ablate[0].memory"),
    ([{"memory": 0}, {"memory": 0, "head": 4}], "ablate[1].head must be an integer 0 ... 3, not 4"),
    ([{"memory": 0, "slots": 5}], "ablate[0].slots must be a list"),
    ([{"memory": 0, "slots": [0, 65536]}], "ablate[0].slots[1] must be an integer 0 ... 65535, not 65536"),
    ([{"memory": 0, "slots": [1.5]}], "ablate[0].slots[0] must be an integer 0 ... 65535, not 1.5"),
    ([{"memory": 0, "slots": list(range(4097))}], "4096"),
    ([{"memory": 0, "scale": -0.1}], "scale"),
    ([{"memory": 0, "scale": 4.1}], "0 ... 4, not 4.1"),
    ([{"memory": 0, "scale": "1"}], "scale must be a number 0 ... 4, not a string"),
    ([{"memory": 0, "slot": 5}], "not slot"),
]


@pytest.mark.parametrize("ablate, says", WRONG)
def test_what_is_refused(server, ablate, says):
    for path, body in (("/score", {"text": "a"}), ("/generate", {"prompt": "a"}),
                       ("/v1/completions", {"model": "demo", "prompt": "a"})):
        assert says in error_of(server.post(path, {**body, "ablate": ablate}), 400, "invalid_value",
                                "ablate")


def test_as_many_slots_as_are_allowed(server):
    assert scored(server, ablate=[{"memory": 0, "slots": list(range(4096))}]) != scored(server)


def test_a_model_without_memories_refuses_it():
    with Server(model=UNBOUNDED) as s:
        for path, body in (("/score", {"text": "a"}), ("/generate", {"prompt": "a"})):
            error_of(s.post(path, {**body, "ablate": []}), 400, "unsupported_parameter", "ablate")
