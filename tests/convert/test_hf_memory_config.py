"""What a memory configuration beside a Hugging Face directory means: defaults, options, limits, order.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_hf_memory_config.py -k norms
"""

import json
import re
from types import SimpleNamespace

import hf_memory
import hf_memory_config
import pytest
from fault import Refused

ENTRY = {"layer": 1, "place": "replace", "n_head": 2, "k_top": 3}
PLAIN = {"label": "memory.json: memories[0]", "layer": 1, "place": "in", "prefix": "memories.0.", "n_head": 2,
         "k_top": 3, "n_key": None, "d_key": None, "d_value": None, "has_unit_keys": False, "temperature": None,
         "has_relu": False, "has_experts": False, "has_gate": False, "has_projection": False, "values_of": None,
         "gate": "none", "gate_activation": "relu"}
NO_INPUT = {"kind": "none", "eps": 1e-6, "weight": True, "bias": False}
NO_QUERY = {"kind": "none", "eps": 1e-5, "scope": "head", "weight": False, "bias": False}

WIDEST = {"n_key": 46340, "d_key": 65536, "d_value": 65536, "n_head": 1024, "k_top": 1024, "prefix": "p" * 200,
          "layer": 0}


@pytest.fixture
def read(tmp_path):
    def run(*entries, names="plain", n_layer=3):
        path = tmp_path / "memory.json"
        path.write_text(json.dumps({"memories": [{**ENTRY, **entry} for entry in entries]}))
        return hf_memory_config.read(path, hf_memory.NAMES[names], SimpleNamespace(n_layer=n_layer, norm_eps=1e-6))
    return run


@pytest.fixture
def refuses(read):
    def run(due, *entries, **how):
        with pytest.raises(Refused) as found:
            read(*entries, **how)
        assert re.fullmatch(due, str(found.value)), str(found.value)
    return run


OPTIONS = [
    ({}, {}), ({"place": "beside"}, {"place": "beside"}), ({"prefix": ""}, {"prefix": ""}),
    ({"n_key": 1, "d_key": 1, "d_value": 1, "n_head": 1, "k_top": 1},
     {"n_key": 1, "d_key": 1, "d_value": 1, "n_head": 1, "k_top": 1}),
    (WIDEST, WIDEST),
    ({"keys_norm": "l2"}, {"has_unit_keys": True}), ({"scores": "relu"}, {"has_relu": True}),
    ({"scores": "softmax"}, {}), ({"temperature": 1e-6}, {"temperature": 1e-6}),
    ({"temperature": 1e6}, {"temperature": 1e6}), ({"product_key_topk": 3}, {}), ({"product_key_topk": 1024}, {}),
    ({"value_gate": True}, {"has_gate": True}), ({"value_projection": True}, {"has_projection": True}),
    ({"experts": True}, {"has_experts": True}), ({"gate": "scalar"}, {"gate": "scalar"}),
    ({"gate": "linear"}, {"gate": "linear"}), ({"gate": "mlp"}, {"gate": "mlp"}),
    ({"gate": "mlp", "gate_activation": "relu"}, {"gate": "mlp"}),
    ({"gate": "mlp", "gate_activation": "gelu"}, {"gate": "mlp", "gate_activation": "gelu"}),
]


@pytest.mark.parametrize("entry, changes", OPTIONS, ids=lambda value: str(value)[:60])
def test_options(entry, changes, read):
    m = vars(read(entry)[0])
    assert (vars(m.pop("input_norm")), vars(m.pop("query_norm"))) == (NO_INPUT, NO_QUERY)
    assert m == {**PLAIN, **changes}


@pytest.mark.parametrize("entry, changes", [
    ({"place": "after"}, {"kind": "rms"}), ({"place": "after", "input_norm": "none"}, {}),
    ({"input_norm": "rms"}, {"kind": "rms"}), ({"input_norm": "layer"}, {"kind": "layer", "bias": True}),
    ({"input_norm": "rms", "input_norm_weight": False, "input_norm_eps": 1e-30},
     {"kind": "rms", "weight": False, "eps": 1e-30}),
    ({"input_norm": "layer", "input_norm_bias": False, "input_norm_eps": 1}, {"kind": "layer", "eps": 1})])
def test_norms_of_the_input(entry, changes, read):
    assert vars(read(entry)[0].input_norm) == {**NO_INPUT, **changes}


@pytest.mark.parametrize("names, entry, changes", [
    ("plain", {"query_norm": "batch"}, {"kind": "batch"}), ("peer", {}, {"scope": "half"}),
    ("plain", {"query_norm": "rms"}, {"kind": "rms", "weight": True}),
    ("plain", {"query_norm": "l2"}, {"kind": "l2", "eps": 1e-24}),
    ("plain", {"query_norm": "l2", "query_norm_of": "half"}, {"kind": "l2", "eps": 1e-24, "scope": "half"}),
    ("product-key-memory", {"query_norm": "rms", "query_norm_of": "head"}, {"kind": "rms", "weight": True}),
    ("plain", {"query_norm": "layer"}, {"kind": "layer", "weight": True, "bias": True}),
    ("plain", {"query_norm": "layer", "query_norm_of": "all", "query_norm_bias": False, "query_norm_eps": 1},
     {"kind": "layer", "weight": True, "scope": "all", "eps": 1}),
    ("plain", {"query_norm": "layer", "query_norm_weight": False}, {"kind": "layer", "bias": True}),
    ("plain", {"query_norm": "rms", "query_norm_weight": False, "query_norm_eps": 1e-30},
     {"kind": "rms", "eps": 1e-30}),
    ("plain", {"query_norm": "batch", "query_norm_eps": 1e-3}, {"kind": "batch", "eps": 1e-3})])
def test_norms_of_the_queries(names, entry, changes, read):
    assert vars(read(entry, names=names)[0].query_norm) == {**NO_QUERY, **changes}


@pytest.mark.parametrize("entry, key, due", [
    ({"layer": 3}, "layer", r"an integer 0\.\.2 expected \(num_hidden_layers is 3\), got 3"),
    ({"n_head": 1025}, "n_head", r"an integer 1\.\.1024 .*"), ({"n_head": 0}, "n_head", ".* got 0"),
    ({"k_top": 1025}, "k_top", r"an integer 1\.\.1024 .*"), ({"k_top": 0}, "k_top", ".* got 0"),
    ({"n_key": 46341}, "n_key", r"an integer 1\.\.46340 .*"), ({"n_key": 0}, "n_key", ".* got 0"),
    ({"d_key": 65537}, "d_key", r"an integer 1\.\.65536 .*"), ({"d_key": 0}, "d_key", ".* got 0"),
    ({"d_value": 65537}, "d_value", r"an integer 1\.\.65536 .*"), ({"d_value": 0}, "d_value", ".* got 0"),
    ({"prefix": "p" * 201}, "prefix", "a text of at most 200 characters expected, got 'p.*"),
    ({"temperature": 1.1e6}, "temperature", r"a number 1e-06\.\.1e\+06 expected, got 1100000\.0"),
    ({"temperature": 9e-7}, "temperature", ".* got 9e-07"),
    ({"product_key_topk": 2}, "product_key_topk", r"an integer 3\.\.1024 .*k_top is 3; fewer are not served.*"),
    ({"product_key_topk": 1025}, "product_key_topk", ".* got 1025"),
    ({"input_norm": "l2"}, "input_norm", "none, rms or layer expected, got 'l2'"),
    ({"input_norm_eps": 1e-5}, "input_norm_eps", "1e-05, which goes with input_norm rms or layer"),
    ({"input_norm_weight": False}, "input_norm_weight", "false, which goes with input_norm rms or layer"),
    ({"input_norm": "rms", "input_norm_bias": False}, "input_norm_bias", "false, which goes with input_norm layer"),
    ({"input_norm": "rms", "input_norm_eps": 1.1}, "input_norm_eps", r"a number 1e-30\.\.1 expected, got 1\.1"),
    ({"query_norm": "batch", "query_norm_of": "all"}, "query_norm_of", "'all', which .* query_norm layer, rms or l2"),
    ({"query_norm": "l2", "query_norm_eps": 1e-5}, "query_norm_eps", ".* goes with query_norm batch, layer or rms"),
    ({"query_norm": "l2", "query_norm_weight": False}, "query_norm_weight", ".* goes with query_norm layer or rms"),
    ({"query_norm": "rms", "query_norm_bias": False}, "query_norm_bias", "false, which goes with query_norm layer"),
    ({"query_norm": "rms", "query_norm_of": "heads"}, "query_norm_of", "one of half head all expected, got 'heads'"),
    ({"experts": True, "value_gate": True}, "value_gate", "true, which goes with values, not with experts"),
    ({"gate": "linear", "gate_activation": "relu"}, "gate_activation", "'relu', which goes with gate mlp"),
    ({"values_of": 64}, "values_of", r"an integer 0\.\.63 expected, got 64"),
    ({"values_of": -1}, "values_of", r"an integer 0\.\.63 expected, got -1"),
    ({"values_of": 0}, "values_of", "0, not the index of an earlier memory"),
    ({"valeus_of": 0}, "valeus_of", "not a key of a memory; these are layer place prefix .*")],
    ids=lambda value: str(value)[:60])
def test_what_is_refused_names_its_key(entry, key, due, refuses):
    refuses(r"memory\.json: memories\[0\]: %s: %s" % (key, due), entry)


def test_memories_are_listed_as_they_run(read, refuses):
    places = [{"layer": layer, "place": place} for layer in (0, 1) for place in ("beside", "replace", "after")]
    assert [(m.layer, m.place) for m in read(*places)] == [
        (layer, place) for layer in (0, 1) for place in ("beside", "in", "after")]
    for i in range(len(places)):
        for j in range(i + 1):
            first = [{"layer": 0, "place": "beside"}] if j else []
            refuses(r"memory\.json: memories\[%d\] runs before memories\[%d\], or is another one.*"
                    % (len(first) + 1, len(first)), *first, places[i], places[j])


def test_a_table_is_that_of_the_first_one_that_has_it(read):
    found = read({"layer": 0}, {"layer": 1}, {"layer": 2, "values_of": 1}, {"layer": 3, "values_of": 2},
                 {"layer": 4, "values_of": 0}, n_layer=5)
    assert [m.values_of for m in found] == [None, None, 1, 1, 0]
    assert [m.prefix for m in found] == ["memories.%d." % i for i in range(5)]


def test_sixty_four_memories_and_a_megabyte_are_read_and_nothing_is_guessed(read, tmp_path):
    found = read(*({"layer": i} for i in range(63)), {"layer": 63, "values_of": 62}, n_layer=64)
    assert len(found) == 64 and found[63].values_of == 62
    path, entry = tmp_path / "memory.json", json.dumps({"memories": [ENTRY]}).encode()
    base = SimpleNamespace(n_layer=2, norm_eps=1e-6)
    path.write_bytes(entry.ljust(1 << 20))
    assert len(hf_memory_config.read(path, hf_memory.NAMES["plain"], base)) == 1
    path.write_bytes(entry.ljust((1 << 20) + 1))
    with pytest.raises(Refused, match="memory.json: longer than the limit of 1048576 bytes"):
        hf_memory_config.read(path, hf_memory.NAMES["plain"], base)
    path.write_text(json.dumps({"memories": [ENTRY], "memory": []}))
    with pytest.raises(Refused, match='^memory.json: memory: not a key; "memories" is the only one$'):
        hf_memory_config.read(path, hf_memory.NAMES["plain"], base)
    for key in ENTRY:
        path.write_text(json.dumps({"memories": [{name: value for name, value in ENTRY.items() if name != key}]}))
        with pytest.raises(Refused, match=r"^memory.json: memories\[0\]: %s: .* expected.*, got None$" % key):
            hf_memory_config.read(path, hf_memory.NAMES["plain"], base)
    for listed in (3, "text", {"a": 1}, None, []):
        path.write_text(json.dumps({"memories": listed}))
        with pytest.raises(Refused, match=r"memory.json: memories: a list of 1\.\.64 objects expected, got"):
            hf_memory_config.read(path, hf_memory.NAMES["plain"], base)
