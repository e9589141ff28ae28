"""models/train/config.py: which configurations are trained, and what is said of others."""

import json

import pytest

import config as configuration
from conftest import ROOT


def demo(**changes):
    with open(configuration.shipped("demo"), encoding="utf-8") as f:
        return json.load(f) | changes


def memory(**changes):
    made = demo()["memories"][0] | changes
    return demo(memories=[{key: value for key, value in made.items() if value is not None}])


def llama(**changes):
    with open(configuration.shipped("memory-plus"), encoding="utf-8") as f:
        made = json.load(f) | {"vocab_size": 2048}
    made["memories"][1] |= changes
    return made


def in_bytes(**changes):
    with open(configuration.shipped("bytes"), encoding="utf-8") as f:
        return json.load(f) | changes


@pytest.mark.parametrize("name, vocab_size", [("demo", 4096), ("small", 500), ("memory-plus", 500), ("bytes", 500)])
def test_shipped_configurations_are_accepted(name, vocab_size):
    config = configuration.read(configuration.shipped(name), vocab_size)
    assert config["model_type"] in configuration.FAMILIES
    assert config["vocab_size"] == (256 if name == "bytes" else vocab_size)


@pytest.mark.parametrize("name", ["demo", "demo-bytes"])
def test_configurations_of_shipped_models_are_accepted(name):
    configuration.read(str(ROOT / "models" / name / "config.json"))


def test_flat_keys_and_memories_behind_a_layer_are_accepted():
    configuration.check(memory(kind="flat", n_slot=256, place="after"))


def test_the_vocabulary_of_the_data_fills_in_and_must_agree():
    without = {key: value for key, value in demo().items() if key != "vocab_size"}
    assert configuration.check(without, 500)["vocab_size"] == 500
    with pytest.raises(configuration.ConfigError, match="vocab_size is 4096.*500 pieces"):
        configuration.check(demo(), 500)


@pytest.mark.parametrize("given, said", [
    ([], "one JSON object"),
    (demo(model_type="gpt2"), 'model_type is "gpt2"'),
    (demo(n_heads=4), "n_heads cannot be trained here; known keys: .*n_head"),
    (demo(d_model="256"), 'd_model is "256", but must be a whole number'),
    (demo(d_model=True), "d_model is true, but must be a whole number"),
    (demo(d_model=0), "d_model is 0, but must be from 1 to 65536"),
    (demo(d_model=254), "d_model is 254, no multiple of n_head 4"),
    (demo(norm_eps=0), "norm_eps is 0, but must be from 1e-30 to 1"),
    (demo(activation="swish"), 'activation is "swish".*"gelu" or "relu"'),
    (demo(bos_token_id=-1), "bos_token_id is missing"),
    (demo(eos_token_id=4096), "eos_token_id is 4096, but vocab_size is 4096"),
    (demo(memories=3), "memories must be a list"),
    (demo(memories=[3]), r"memories\[0\] must be an object"),
    ({key: value for key, value in demo().items() if key != "vocab_size"}, "vocab_size is missing"),
    (memory(n_slot=100), r"memories\[0\].n_slot is 100, but n_key 256 makes 65536"),
    (memory(d_key=33), r"memories\[0\].d_key is 33"),
    (memory(k_top=500), r"memories\[0\].k_top is 500, but n_key is only 256"),
    (memory(layer=12), r"memories\[0\].layer is 12, but n_layer is 12"),
    (memory(n_key=None), r"memories\[0\].n_key is missing"),
    (memory(values_of=0), r"memories\[0\].values_of is 0, which is no earlier memory"),
    (memory(subtract="mean"), r"memories\[0\].subtract cannot be trained here"),
    (demo(memories=demo()["memories"] * 2), r"memories\[1\].layer and place must come behind"),
    (demo(memories=demo()["memories"] * 65), "memories are 65, but at most 64"),
    (in_bytes(vocab_size=100), "vocab_size is 100, but must be 256"),
    (llama(value_projection=False), r"memories\[1\].value_gate needs value_projection"),
    (llama(d_value=64), r"memories\[1\].values_of: memories\[0\] has another n_slot or d_value"),
    (llama(kind="product"), r"memories\[1\].kind cannot be trained here"),
])
def test_what_is_wrong_is_named(given, said):
    with pytest.raises(configuration.ConfigError, match=said):
        configuration.check(given)


@pytest.mark.parametrize("config", [demo(), llama(), in_bytes()], ids=["demo", "memory-plus", "bytes"])
def test_each_key_that_a_model_needs_is_asked_for(config):
    optional = {"memories", "vocab_size", "dtype", "add_bos", "n_kv_head", "d_head", "bos_token_id", "eos_token_id",
                "pad_token_id", "unk_token_id", "d_value", "value_projection", "value_gate", "output_gate", "values_of"}
    for key in config.keys() - optional:
        with pytest.raises(configuration.ConfigError, match=key + (" is missing" if key != "model_type" else " is null")):
            configuration.check({name: value for name, value in config.items() if name != key})
    for key in (config.get("memories") or [{}])[0].keys() - optional:
        first = {name: value for name, value in config["memories"][0].items() if name != key}
        with pytest.raises(configuration.ConfigError, match=rf"memories\[0\].{key} is missing"):
            configuration.check(config | {"memories": [first]})


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "my.json"
    for text in ("{", '{"model_type": 3}', "\udcff"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(configuration.ConfigError, match="my.json: "):
            configuration.read(str(path))
    with pytest.raises(configuration.ConfigError, match="none.json"):
        configuration.read(str(tmp_path / "none.json"))


def test_the_dense_twin_has_no_memories():
    assert configuration.without_memories(demo())["memories"] == []
    assert "memories" not in configuration.without_memories({"model_type": "all_attention"})
