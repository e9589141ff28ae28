"""generation_config.json: what the model recommends holds where a request of our own dialect says nothing, and
nowhere else."""

import json
import os
import subprocess

import pytest

from server_harness import DEMO, Server

PROMPT = "It was a dark night, and the"
RECOMMENDED = {"temperature": 0.5, "top_p": 0.75, "top_k": 40, "min_p": 0.125, "repetition_penalty": 1.25}
NAMES = sorted(RECOMMENDED)
PLAIN = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


def model_with(folder, content):
    folder.mkdir()
    for name in os.listdir(DEMO):
        if name != "generation_config.json":
            (folder / name).symlink_to(os.path.join(DEMO, name))
    if content is not None:
        (folder / "generation_config.json").write_text(content)
    return str(folder)


@pytest.fixture(scope="module")
def recommending(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "demo"
    with Server(model=model_with(folder, json.dumps(RECOMMENDED | {"max_length": 20}))) as s:
        yield s


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "demo"
    with Server(model=model_with(folder, '{"do_sample": false}')) as s:
        yield s


def params(server, **fields):
    answer = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 2, "details": True} | fields)
    return {name: answer["params"][name] for name in NAMES}


def test_a_request_that_says_nothing_gets_what_is_recommended(recommending):
    assert params(recommending) == RECOMMENDED


def test_what_a_request_says_holds(recommending):
    assert params(recommending, **PLAIN) == PLAIN
    assert params(recommending, temperature=0) == RECOMMENDED | {"temperature": 0}


def test_a_recommended_top_k_beyond_the_vocabulary_leaves_nothing_out(tmp_path):
    with Server(model=model_with(tmp_path / "demo", '{"top_k": 5000}')) as s:
        assert params(s)["top_k"] == 0


def test_info_shows_the_defaults(recommending):
    defaults = recommending.get("/info").json()["defaults"]
    assert {name: defaults[name] for name in NAMES} == RECOMMENDED


def test_without_the_file_tokens_are_drawn_as_they_are_likely(tmp_path):
    with Server(model=model_with(tmp_path / "demo", None)) as s:
        defaults = s.get("/info").json()["defaults"]
        assert {name: defaults[name] for name in NAMES} == PLAIN
        assert params(s) == PLAIN


def test_other_servers_dialects_keep_their_own_defaults(greedy):
    def own(seed):
        return greedy.ok("/generate", {"prompt": PROMPT, "max_tokens": 16, "seed": seed})["choices"][0]["text"]

    def openai(seed):
        return greedy.ok("/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": 16,
                                             "seed": seed})["choices"][0]["text"]

    def tgi(seed, path="/generate"):
        return greedy.ok(path, {"inputs": PROMPT, "parameters": {"do_sample": True, "max_new_tokens": 16,
                                                                 "seed": seed}})["generated_text"]

    assert own(1) == own(2), "the model recommends the likeliest token"
    assert len({openai(seed) for seed in range(1, 5)}) > 1
    assert len({tgi(seed) for seed in range(1, 5)}) > 1


def test_the_command_line_follows_it_unless_told_otherwise(tmp_path):
    model = model_with(tmp_path / "demo", '{"do_sample": false}')

    def run(*args):
        done = subprocess.run([os.environ["PKMSERVE"], "generate", "--model", model, "--max-tokens", "12", *args,
                               PROMPT], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--seed", "1") == run("--seed", "2")
    assert len({run("--temperature", "1", "--seed", str(seed)) for seed in range(1, 4)}) > 1
    assert run("--temperature", "1", "--top-k", "1", "--seed", "5") == run()


def test_a_wrong_file_is_named_when_the_model_is_opened(tmp_path):
    model = model_with(tmp_path / "demo", '{"temperature": 9}')
    done = subprocess.run([os.environ["PKMSERVE"], "generate", "--model", model, PROMPT], capture_output=True,
                          text=True)
    assert done.returncode != 0
    assert "generation_config.json: temperature is 9, but must be in [0, 2]" in done.stderr
