"""The openai package, unmodified: completions, streams, errors, retries."""

import threading

import openai
import pytest

from server_harness import Server, eventually

PROMPT = "The old man"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


def test_models(client):
    models = list(client.models.list())
    assert [m.id for m in models] == ["demo"] and client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completion_is_greedy_and_the_same_as_the_native_one(client, server):
    got = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, temperature=0)
    native = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0})
    assert got.choices[0].text == native["choices"][0]["text"]
    assert got.choices[0].finish_reason == "length" and got.object == "text_completion"
    assert got.usage.completion_tokens == 12
    assert got.usage.prompt_tokens == native["usage"]["prompt_tokens"]


def test_every_option_is_taken(client):
    got = client.completions.create(
        model="demo", prompt=[PROMPT, "Once upon"], max_tokens=6, n=2, temperature=0.8, top_p=0.9,
        seed=7, logprobs=3, echo=True, presence_penalty=0.5, frequency_penalty=0.5, user="me",
        logit_bias={"300": 1.0}, stop=["\u2603"], extra_body={"top_k": 40, "min_p": 0.01})
    assert [c.index for c in got.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(got.choices, [PROMPT] * 2 + ["Once upon"] * 2):
        lists = choice.logprobs
        assert choice.text.startswith(prompt)
        assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) \
            == len(lists.text_offset)
        assert all(len(top) in (3, 4) for top in lists.top_logprobs[1:])
        for token, offset in zip(lists.tokens, lists.text_offset):
            assert choice.text[offset:].startswith(token) or "\ufffd" in token


def test_stream_gives_the_same_text(client):
    options = dict(model="demo", prompt=PROMPT, max_tokens=12, temperature=0)
    whole = client.completions.create(**options).choices[0].text
    chunks = list(client.completions.create(**options, stream=True,
                                            stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"


@pytest.mark.parametrize("options, kind, param", [
    ({"max_tokens": 100000}, openai.BadRequestError, "max_tokens"),
    ({"temperature": 5}, openai.BadRequestError, "temperature"),
    ({"suffix": "x"}, openai.BadRequestError, "suffix"),
    ({"model": "other"}, openai.NotFoundError, "model")])
def test_errors_are_the_package_s_own(client, options, kind, param):
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": "demo", "prompt": PROMPT, **options})
    assert caught.value.param == param and caught.value.code and caught.value.type
    assert caught.value.request_id
    assert caught.value.message


def test_chat_is_refused_with_a_reason(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "chat_template_missing"


def test_a_full_server_is_tried_again_until_there_is_room():
    with Server("--max-seqs", "1", "--max-queue", "1") as s:
        with openai.OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=20) as c:
            def ask():
                done.append(c.completions.create(model="demo", prompt=PROMPT, max_tokens=60,
                                                 extra_body={"ignore_eos": True}))

            done = []
            threads = [threading.Thread(target=ask) for _ in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(done) == 5 and all(d.usage.completion_tokens == 60 for d in done)
            eventually(lambda: s.metric('requests_rejected_total{reason="queue_full"}') > 0, "counted")


def test_leaving_a_stream_cancels_it(client, server):
    before = server.metric('requests_cancelled_total{stage="decode"}')
    stream = client.completions.create(model="demo", prompt=PROMPT, max_tokens=400, stream=True,
                                       extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    eventually(lambda: server.metric('requests_cancelled_total{stage="decode"}') == before + 1,
               "the server sees that the client left")
