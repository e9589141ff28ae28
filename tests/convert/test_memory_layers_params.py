"""What params.json of a memory-layers checkpoint means: defaults, the limits themselves, widths.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_memory_layers_params.py -k limits
"""

import json
from types import SimpleNamespace

import memory_layers
import memory_layers_params
import memory_layers_writer as mw
import numpy as np
import pytest
from fault import Refused
from torch_file import Brain

PK = mw.PK


def test_each_default_is_the_authors(tmp_path):
    """What a configuration of nothing but the number of heads means, and with memories switched on."""
    path = tmp_path / "params.json"
    path.write_text(json.dumps({"model": {"n_heads": 4}}))
    p = memory_layers_params.read(path)
    assert (p.d_model, p.n_layer, p.d_head, p.n_kv_head, p.n_vocab, p.n_position) == (512, 8, 128, 4, None, 1024)
    assert (p.rope_theta, p.norm_eps, p.dtype, p.tokenizer, p.memory) == (10000, 1e-5, "bf16", None, None)
    path.write_text(json.dumps({"model": {"n_heads": 4, "productkey_args": {"layers": "7"}}}))
    assert memory_layers_params.read(path).memory is None
    args = {"is_enabled": True}
    path.write_text(json.dumps({"model": {"n_heads": 4, "productkey_args": args}}))
    assert memory_layers_params.read(path).memory is None
    args["layers"] = "7"
    path.write_text(json.dumps({"model": {"n_heads": 4, "productkey_args": args}}))
    m = memory_layers_params.read(path).memory
    assert (m.layers, m.n_key, m.n_head, m.k_top, m.d_key, m.d_value) == ([7], 1024, 4, 32, 512, 512)
    assert (m.is_shared, m.has_gate, m.has_output_gate, m.has_experts) == (True, True, False, False)
    args.update(mem_v_dim=1, swilu_projection=False)
    path.write_text(json.dumps({"model": {"n_heads": 4, "productkey_args": args}}))
    m = memory_layers_params.read(path).memory
    assert (m.d_value, m.has_gate, m.has_projection) == (1, False, True)


@pytest.mark.parametrize("changes", [
    {"model.dim": 1, "model.n_heads": 1, "model.head_dim": 2, "model.n_kv_heads": 1},
    {"model.dim": 65536, "model.n_heads": 1024, "model.n_kv_heads": 1024},
    {"model.dim": 2048, "model.n_heads": None, "model.head_dim": 2},
    {"model.norm_eps": 1}, {"model.norm_eps": 1e-30}, {"model.rope_theta": 1}, {"model.rope_theta": 1e12},
    {"model.max_seqlen": 1}, {"model.max_seqlen": 1 << 20}, {"model.vocab_size": 1 << 24},
    {"model.n_layers": 1024, PK + "layers": " 000001 ,1023"},
    {"model.n_layers": 64, PK + "layers": ",".join(map(str, range(64)))},
    {PK + "mem_n_keys": 46340, PK + "mem_knn": 1024, PK + "mem_heads": 1024, PK + "mem_k_dim": 65536},
    {PK + "mem_n_keys": 1, PK + "mem_knn": 1, PK + "mem_heads": 2, PK + "mem_k_dim": 2},
    {PK + "mem_v_dim": 65536}, {PK + "mem_v_dim": -65536, PK + "peer_variant": True}], ids=str)
def test_limits_are_served_themselves(changes, tmp_path):
    mw.tiny(tmp_path, changes)
    memory_layers_params.read(tmp_path / "params.json")


@pytest.mark.parametrize("due, dim, changes", [
    (1, 1, {"multiple_of": 1, "ffn_dim_multiplier": 0.5}), (2, 1, {"multiple_of": 1}), (256, 8, {}),
    (1536, 512, {}), (1 << 20, 8, {"multiple_of": 1 << 20}), (32, 8, {"multiple_of": 8, "ffn_dim_multiplier": 1.3})])
def test_the_width_of_networks_by_the_formula(due, dim, changes, tmp_path):
    given = {"model." + name: value for name, value in changes.items()}
    mw.tiny(tmp_path, {"model.multiple_of": ..., "model.ffn_dim_multiplier": ..., **given})
    p = memory_layers_params.read(tmp_path / "params.json")
    assert memory_layers_params.ff_width(p.fields, dim) == due


@pytest.mark.parametrize("name, file, due", [
    ("sp", "ranks", "byte-level BPE, but data.tokenizer.name of params.json is 'sp'"),
    ("tiktoken", "t.model", "a SentencePiece model, but data.tokenizer.name of params.json is 'tiktoken'"),
    ("sp", "t.model", None), ("tiktoken", "ranks", None), (None, "t.model", None), (None, "ranks", None)])
def test_the_tokenizer_is_of_the_kind_that_params_name(name, file, due, tmp_path):
    path = str(tmp_path / file)
    (tmp_path / "t.model").write_bytes(b"\n\0")
    (tmp_path / "ranks").write_bytes(b"YQ== 0\nYg== 1\n")
    p = SimpleNamespace(tokenizer=name, tokenizer_path=None, folder=str(tmp_path))
    if due is None:
        assert memory_layers._tokenizer(p, path) == (path, "--tokenizer")
        return
    with pytest.raises(Refused) as found:
        memory_layers._tokenizer(p, path)
    assert str(found.value) == "--tokenizer %s: %s" % (path, due)


def test_what_a_matrix_tells_is_bounded():
    for rows in (1, 5):
        assert memory_layers._rows({"w": SimpleNamespace(size=(rows, 8))}, "w", 5, 8) == rows
    for size in ((0, 8), (6, 8), (5,), (5, 8, 1), ()):
        with pytest.raises(Refused) as found:
            memory_layers._rows({"w": SimpleNamespace(size=size)}, "w", 5, 8)
        assert str(found.value) == "tensor 'w': shape [1..5, 8] expected, got %s" % list(size)
    with pytest.raises(Refused, match="^tensor 'w' is missing$"):
        memory_layers._rows({}, "w", 5, 8)


def test_tables_have_a_type_of_their_own_where_it_differs():
    tables = {"a": Brain(np.zeros(3, np.uint16)), "b": np.zeros(3, np.float16), "c": np.zeros(3, np.float32)}
    for dtype, due in (("f32", {"a": "bf16", "b": "f16"}), ("bf16", {"b": "f16"}), ("f16", {"a": "bf16"})):
        assert memory_layers._own_types(list(tables), tables, dtype) == due


def test_the_first_and_the_last_id_may_be_given():
    for value in (0, 257):
        config = {"vocab_size": 258}
        memory_layers.name_tokens(config, {}, {"eos_token_id": value}, memory_layers.SETTABLE)
        assert config == {"vocab_size": 258, "eos_token_id": value}
    with pytest.raises(Refused, match=r"--set bos_token_id: an integer 0\.\.257 expected, got 258"):
        memory_layers.name_tokens({"vocab_size": 258}, {}, {"bos_token_id": 258}, memory_layers.SETTABLE)
