"""huggingface_hub's InferenceClient, unmodified, against the TGI dialect."""

import huggingface_hub
import pytest
from huggingface_hub.errors import ValidationError

PROMPT = "The old man"


@pytest.fixture(scope="module")
def client(server):
    return huggingface_hub.InferenceClient(model=server.url)


def native(server, n):
    return server.ok("/generate", {"prompt": PROMPT, "max_tokens": n,
                                   "temperature": 0})["choices"][0]


def test_text(client, server):
    assert client.text_generation(PROMPT, max_new_tokens=8) == native(server, 8)["text"]
    full = client.text_generation(PROMPT, max_new_tokens=8, return_full_text=True)
    assert full == PROMPT + native(server, 8)["text"]


def test_details(client, server):
    got = client.text_generation(PROMPT, max_new_tokens=8, details=True,
                                 decoder_input_details=True)
    want = native(server, 8)
    assert got.generated_text == want["text"]
    assert [t.id for t in got.details.tokens] == want["token_ids"]
    assert got.details.finish_reason == "length" and got.details.generated_tokens == 8
    ids = server.ok("/tokenize", {"prompt": PROMPT})["tokens"]
    assert [t.id for t in got.details.prefill] == ids
    assert got.details.prefill[0].logprob is None and got.details.prefill[1].logprob < 0


def test_stream(client, server):
    want = native(server, 8)
    assert "".join(client.text_generation(PROMPT, max_new_tokens=8, stream=True)) == want["text"]
    parts = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True))
    assert [p.token.id for p in parts] == want["token_ids"]
    assert parts[-1].generated_text == want["text"]
    assert parts[-1].details.generated_tokens == 8


def test_sampling(client, server):
    """Each option reaches the draw: the text is that of the native route with the same ones."""
    options = dict(temperature=0.7, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=11,
                   stop=["\u2603"])
    due = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 24, **options})["choices"][0]
    assert client.text_generation(PROMPT, max_new_tokens=24, do_sample=True, **options) == due["text"]
    assert due["text"] != native(server, 24)["text"]


def test_errors(client):
    with pytest.raises(ValidationError) as caught:
        client.text_generation(PROMPT, max_new_tokens=100000)
    assert "max_length=512" in str(caught.value)
