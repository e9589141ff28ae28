"""Frameworks, unmodified, by the settings that server/CLIENTS.md gives: the text is that of the native route, and a
refusal reaches the user in the server's words."""

import asyncio
import os
import subprocess
import sys

import litellm
import openai
import pytest
import requests
from huggingface_hub.errors import HfHubHTTPError
from inspect_ai import Task, eval as inspect_eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import perplexity
from inspect_ai.solver import generate
from langchain_huggingface import HuggingFaceEndpoint
from langchain_openai import OpenAI

from server_harness import Server

PROMPT = "Once upon a time"
OTHER = "The old man"
TOO_LONG = "hello " * 900
N = 8


def native(server, prompt=PROMPT, **options):
    body = {"prompt": prompt, "max_tokens": N, "temperature": 0, **options}
    return server.ok("/generate", body)["choices"][0]


# ---- litellm -----------------------------------------------------------------------------------------


def lite(server, provider, **options):
    given = {"model": provider + "/demo", "api_base": server.url + "/v1", "api_key": "none", "max_retries": 0,
             "prompt": PROMPT, "max_tokens": N, "temperature": 0, **options}
    return litellm.text_completion(**given)


@pytest.mark.parametrize("provider", ["text-completion-openai", "hosted_vllm"])
def test_litellm(server, provider):
    got = lite(server, provider)
    assert got.choices[0].text == native(server)["text"] and got.usage.completion_tokens == N
    pieces = [c.choices[0].text or "" for c in lite(server, provider, stream=True) if c.choices]
    assert "".join(pieces) == native(server)["text"] and len(pieces) >= N
    both = lite(server, provider, prompt=[PROMPT, OTHER]).choices
    assert [c.text for c in both] == [native(server, p)["text"] for p in (PROMPT, OTHER)]
    drawn = lite(server, provider, temperature=1, n=2, seed=5).choices
    assert len({c.text for c in drawn}) == 2
    with pytest.raises(litellm.BadRequestError, match="512"):
        lite(server, provider, prompt=TOO_LONG)


# ---- LangChain ---------------------------------------------------------------------------------------


def test_langchain_openai(server):
    llm = OpenAI(base_url=server.url + "/v1", api_key="none", model="demo", temperature=0, max_tokens=N,
                 max_retries=0)
    want = native(server)["text"]
    assert llm.invoke(PROMPT) == want
    pieces = list(llm.stream(PROMPT))
    assert "".join(pieces) == want and len(pieces) >= N
    assert llm.batch([PROMPT, OTHER]) == [want, native(server, OTHER)["text"]]
    assert asyncio.run(llm.ainvoke(PROMPT)) == want
    stop = want[5:9]
    assert llm.invoke(PROMPT, stop=[stop]) == want[:want.index(stop)]
    with pytest.raises(openai.BadRequestError, match="512"):
        llm.invoke(TOO_LONG)


def test_langchain_huggingface(server):
    """It draws unless top_k is 1: it always sends a temperature, 0.8 unless told otherwise."""
    llm = HuggingFaceEndpoint(endpoint_url=server.url, max_new_tokens=N, do_sample=False, top_k=1)
    want = native(server)["text"]
    assert llm.invoke(PROMPT) == want
    assert "".join(llm.stream(PROMPT)) == want


def test_langchain_huggingface_sends_a_key_as_a_header(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-key-of-some-length\n")
    header = {"Authorization": "Bearer secret-key-of-some-length"}
    with Server("--api-key-file", str(keys)) as server:
        with_key = HuggingFaceEndpoint(endpoint_url=server.url, max_new_tokens=N,
                                       server_kwargs={"headers": header})
        assert with_key.invoke(PROMPT)
        wrong = HuggingFaceEndpoint(endpoint_url=server.url, max_new_tokens=N,
                                    server_kwargs={"headers": {"Authorization": "Bearer wrong"}})
        with pytest.raises(HfHubHTTPError) as caught:
            wrong.invoke(PROMPT)
        assert caught.value.response.status_code == 401 and "is not valid" in str(caught.value)


# ---- Inspect -----------------------------------------------------------------------------------------


@pytest.fixture
def inspect_model(server, monkeypatch):
    monkeypatch.setenv("VLLM_BASE_URL", server.url + "/v1")
    monkeypatch.setenv("VLLM_API_KEY", "none")
    return "vllm-completions/demo"


def test_inspect_generates(server, inspect_model):
    async def ask():
        model = get_model(inspect_model, config=GenerateConfig(
            max_tokens=N, temperature=0, logprobs=True, top_logprobs=2))
        return await model.generate(PROMPT)

    choice = asyncio.run(ask()).choices[0]
    want = native(server, logprobs=2)
    assert choice.message.text == want["text"]
    got = [t.logprob for t in choice.logprobs.content]
    assert got == pytest.approx([t["logprob"] for t in want["logprobs"]], abs=1e-6)


def test_inspect_s_perplexity_is_that_of_score(server, inspect_model, tmp_path):
    texts = ["Once upon a time there was a little girl.", "The cat sat on the mat."]
    task = Task(dataset=[Sample(input=t, target="-") for t in texts], solver=[generate()], scorer=perplexity())
    log = inspect_eval(task, model=inspect_model, log_dir=str(tmp_path), display="none", max_tokens=1,
                       prompt_logprobs=1)[0]
    assert log.status == "success", log.error
    metrics = {name: m.value for s in log.results.scores for name, m in s.metrics.items()}
    scored = server.ok("/score", {"text": texts})
    assert metrics["perplexity_per_token"] == pytest.approx(scored["aggregate"]["perplexity"], rel=1e-5)


# ---- llm ---------------------------------------------------------------------------------------------


def test_llm(server, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        "- model_id: pkm\n  model_name: demo\n  api_base: %s/v1\n  completion: true\n" % server.url)

    def llm(prompt, *more):
        return subprocess.run([os.path.join(os.path.dirname(sys.executable), "llm"), "-m", "pkm", prompt,
                               "-o", "temperature", "0", "-o", "max_tokens", str(N), *more],
                              capture_output=True, text=True,
                              env={**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"})

    for more in ((), ("--no-stream",)):
        got = llm(PROMPT, *more)
        assert got.returncode == 0 and got.stdout.rstrip("\n") == native(server)["text"].rstrip("\n"), got
    refused = llm(TOO_LONG)
    assert refused.returncode == 1 and "512" in refused.stderr


# ---- chat --------------------------------------------------------------------------------------------


def test_chat_is_refused_in_words(server):
    with pytest.raises(litellm.BadRequestError, match="/v1/completions"):
        litellm.completion(model="hosted_vllm/demo", api_base=server.url + "/v1", max_retries=0,
                           messages=[{"role": "user", "content": "Hello"}])


def test_the_server_says_it_is_healthy(server):
    """litellm's proxy asks so with `mode: completion`; without it, it asks for a chat."""
    assert requests.get(server.url + "/health", timeout=10).status_code == 200
    health = asyncio.run(litellm.ahealth_check(
        {"model": "hosted_vllm/demo", "api_base": server.url + "/v1", "api_key": "none"}, mode="completion",
        prompt="test"))
    assert "error" not in health, health
