"""Conversion of the memory-layers family: golden cases, kinds of memories, shared tables, types, text.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_memory_layers.py -k golden
"""

import base64
import json

import hf_writer as hw
import memory_layers_writer as mw
import numpy as np
import pytest
import torch_writer as tw
from convert_harness import ROOT, convert
from numpy_memory_layers import MemoryLlama
from test_convert import trusted_read

GOLDEN = ROOT / "tests" / "golden" / "memory-layers"
CASES = ["plain-pk", "swilu-shared"]
KINDS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1"}
PK = mw.PK


def made(tmp_path, source, *args):
    """config, {name: (dtype, array as it is stored)}, summary"""
    got = convert(source, "--output", tmp_path / "model", *args)
    assert (got.status, got.err) == (0, ""), got.err
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    stored = {name: (e["dtype"], np.frombuffer(data[base:][slice(*e["data_offsets"])],
                                               KINDS[e["dtype"]]).reshape(e["shape"]))
              for name, e in json.loads(data[8:base]).items()}
    return json.loads((tmp_path / "model" / "config.json").read_text()), stored, got.out


def our_name(name):
    """The name in model.safetensors of a tensor of the checkpoint."""
    for theirs, ours in (("tok_embeddings", "embeddings"), ("attention.wq", "attention.query"),
                         ("attention.wk", "attention.key"), ("attention.wv", "attention.value"),
                         ("attention.wo", "attention.out"), ("feed_forward.w1", "ffn.gate"),
                         ("feed_forward.w2", "ffn.down"), ("feed_forward.w3", "ffn.up")):
        name = name.replace(theirs + ".weight", ours + ".weight")
    if ".feed_forward." in name:
        _, layer, _, rest = name.split(".", 3)
        for theirs, ours in (("swilu_projection", "value_gate"), ("gating", "output_gate"),
                             ("values_v", "values"), ("values_u", "experts")):
            rest = rest.replace(theirs + ".", ours + ".")
        name = "memories.%s_in.%s" % (layer, rest)
    return name


def compare(stored, arrays, left_out=()):
    """Every tensor is there once, to the bit."""
    names = {our_name(name): name for name in arrays
             if not any(part in name for part in left_out)}
    assert sorted(stored) == sorted(names)
    for ours, theirs in names.items():
        array = arrays[theirs]
        assert stored[ours][0] == ("BF16" if array.dtype == np.uint16 else "F32"), ours
        due = array.reshape(-1, 2, *stored[ours][1].shape[2:]) if ours.endswith("keys") else array
        np.testing.assert_array_equal(stored[ours][1], due, err_msg=ours)


# ---- golden cases -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    done = {}

    def get(case):
        if case not in done:
            directory = tmp_path_factory.mktemp(case)
            done[case] = directory / "model", *made(directory, GOLDEN / case)
        return done[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_golden_tensors_are_the_checkpoints_to_the_bit(case, golden):
    arrays = trusted_read(GOLDEN / case / "consolidated.pth")
    copies = ["layers.%d.feed_forward.values." % i for i in (3, 4)]
    compare(golden(case)[2], arrays, copies)


@pytest.mark.parametrize("case", CASES)
def test_golden_directory_computes_what_the_original_does(case, golden):
    model = MemoryLlama(golden(case)[0])
    for due in json.loads((GOLDEN / case / "expected.json").read_text())["sequences"]:
        logprobs, looked_up = model.forward(due["ids"])
        got = logprobs[np.arange(len(due["ids"]) - 1), due["ids"][1:]]
        np.testing.assert_allclose(got, due["logprobs"], atol=1e-6)
        for layer, memory in due["memory"].items():
            slots, scores = (part[-len(memory["indices"]):] for part in looked_up[int(layer)])
            np.testing.assert_array_equal(slots, memory["indices"])
            np.testing.assert_allclose(scores, memory["scores"], atol=1e-6)


def test_golden_configs_and_words(golden):
    directory, config, _, out = golden("swilu-shared")
    memory = {"n_head": 4, "k_top": 8, "n_key": 32, "d_key": 32, "n_slot": 1024, "d_value": 64,
              "value_gate": True, "value_projection": True}
    assert config == {
        "model_type": "memory_llama", "vocab_size": 258, "d_model": 64, "n_layer": 6, "n_head": 4,
        "n_kv_head": 4, "d_head": 16, "d_ff": 176, "max_position": 256, "rope_theta": 500000.0,
        "norm_eps": 1e-5, "tie_output": False, "bos_token_id": 256, "eos_token_id": 257,
        "add_bos": True, "dtype": "f32", "tokenizer": "byte",
        "memories": [{"layer": 1, **memory}, {"layer": 3, **memory, "values_of": 0},
                     {"layer": 4, **memory, "values_of": 0}]}
    assert "memory layer 3" in out and "table of layer 1" in out and "text by bytes" in out
    assert "f32, tables in bf16" in out
    assert sorted(path.name for path in directory.iterdir()) \
        == ["config.json", "model.safetensors", "model.sha256", "vocab.txt"]
    words = (directory / "vocab.txt").read_text().split("\n")
    assert words == ["%d" % i for i in range(256)] + ["<s>", "</s>", ""]
    config = golden("plain-pk")[1]
    assert (config["n_head"], config["d_head"], config["d_ff"]) == (3, 16, 128)
    assert config["memories"] == [{"layer": 2, "n_head": 2, "k_top": 6, "n_key": 16, "d_key": 24,
                                   "n_slot": 256, "d_value": 48}]


# ---- kinds of memories --------------------------------------------------------------------------

KIND = {  # changes of params.json, options of the writer, what an entry of config.json then has
    "gated": ({"mem_gated": True}, {"gated": True},
              {"value_gate": True, "value_projection": True, "output_gate": True}),
    "plain": ({"swilu_projection": False}, {"swilu": False, "projection": False}, {}),
    "no width": ({"swilu_projection": False, "mem_v_dim": 0},
                 {"swilu": False, "projection": False}, {}),
    "wide": ({"swilu_projection": False, "mem_v_dim": 12}, {"swilu": False, "v": 12},
             {"d_value": 12, "value_projection": True}),
    "wide-swilu": ({"mem_v_dim": 6}, {"v": 6},
                   {"d_value": 6, "value_gate": True, "value_projection": True}),
    "experts": ({"swilu_projection": False, "peer_variant": True},
                {"swilu": False, "projection": False, "peer": True}, {"experts": True}),
    "experts-gated": ({"peer_variant": True, "mem_gated": True}, {"peer": True, "gated": True},
                      {"experts": True, "output_gate": True}),
}


@pytest.mark.parametrize("copies", ["copies", "first", "own"])
@pytest.mark.parametrize("kind", KIND)
def test_kinds_of_memories(kind, copies, tmp_path):
    changes, options, entry = KIND[kind]
    changes = {PK + key: value for key, value in changes.items()}
    changes[PK + "mem_share_values"] = copies != "own"
    arrays = mw.weights(own=copies == "own", copies=copies == "copies", **options)
    config, stored, _ = made(tmp_path, mw.tiny(tmp_path, changes, arrays))
    entry = {"n_head": 3, "k_top": 2, "n_key": 5, "d_key": 4, "n_slot": 25, "d_value": 8, **entry}
    later = {} if copies == "own" else {"values_of": 0}
    assert config["memories"] == [{"layer": 1, **entry}, {"layer": 3, **entry, **later}]
    assert (config["n_kv_head"], config["d_ff"], config["norm_eps"]) == (1, 24, 1e-6)
    left_out = [] if copies == "own" else ["layers.3.feed_forward.values"]
    if "experts" in entry:
        left_out += ["swilu_projection", "value_proj"]  # stored, but of no use
    compare(stored, arrays, left_out)
    assert stored["memories.1_in.keys"][1].shape == (3, 2, 5, 2)


def test_without_memories(tmp_path):
    arrays = mw.weights(layers=())
    for changes in ({PK + "is_enabled": False, PK + "layers": "9", PK + "mem_knn": "x"},
                    {PK + "layers": ""}):
        config, stored, _ = made(tmp_path, mw.tiny(tmp_path, changes, arrays))
        assert config["memories"] == []
        compare(stored, arrays)


def test_layers_in_any_order_and_all_of_them(tmp_path):
    """The table is that of the first; without any network its width is that of the formula."""
    changes = {PK + "layers": " 3, 0,2,1", "model.ffn_dim_multiplier": 1.3}
    config, _, _ = made(tmp_path, mw.tiny(tmp_path, changes, mw.weights((0, 1, 2, 3))))
    assert [m["layer"] for m in config["memories"]] == [0, 1, 2, 3]
    assert [m.get("values_of") for m in config["memories"]] == [None, 0, 0, 0]
    assert config["d_ff"] == 32  # 1.3 times 21 is 27, in steps of 8


def test_what_params_lack_has_the_authors_default(tmp_path):
    gone = ["model.rope_theta", "model.norm_eps", "model.max_seqlen", "model.weight_tying",
            "model.head_dim", "model.multiple_of", PK + "mem_v_dim", PK + "mem_share_values",
            PK + "swilu_projection", PK + "mem_gated", PK + "peer_variant", "data.tokenizer.name",
            "data.tokenizer.path", "distributed.model_dtype", "name"]
    source = mw.tiny(tmp_path, {**{name: ... for name in gone}, "model.newer": {"a": [1.5]}})
    config, stored, _ = made(tmp_path, source)
    assert (config["rope_theta"], config["norm_eps"], config["max_position"], config["tokenizer"],
            config["dtype"]) == (10000.0, 1e-5, 1024, "byte", "bf16")
    assert config["memories"][1]["value_gate"] and config["memories"][1]["values_of"] == 0
    assert stored["output.weight"][0] == "BF16" and stored["norm.weight"][0] == "F32"


@pytest.mark.parametrize("changes, heads", [
    ({"model.n_heads": None, "model.head_dim": 4, "model.n_kv_heads": None}, (2, 2, 4)),
    ({"model.n_heads": 2, "model.head_dim": 6}, (2, 1, 6))])
def test_widths_of_heads(changes, heads, tmp_path):
    arrays, (n_head, n_kv, d_head) = mw.weights(), heads
    for i in range(4):
        for part, n in (("wq", n_head), ("wk", n_kv), ("wv", n_kv), ("wo", n_head)):
            shape = (n * d_head, 8)
            arrays["layers.%d.attention.%s.weight" % (i, part)] = np.ones(
                shape[::-1] if part == "wo" else shape, np.float32)
    config = made(tmp_path, mw.tiny(tmp_path, changes, arrays))[0]
    assert (config["n_head"], config["n_kv_head"], config["d_head"]) == heads


# ---- shared tables ------------------------------------------------------------------------------

TABLE = "layers.%d.feed_forward.values.weight"


def test_one_storage_for_all_copies(tmp_path):
    arrays = mw.weights()
    arrays[TABLE % 1] = arrays[TABLE % 3] = tw.Tensor(arrays[TABLE % 1])
    stored = made(tmp_path, mw.tiny(tmp_path, (), arrays))[1]
    assert [name for name in stored if "values" in name] == ["memories.1_in.values.weight"]


def test_copies_that_differ(tmp_path, refused, monkeypatch):
    import memory_layers
    monkeypatch.setattr(memory_layers, "CHUNK", 24)  # three rows at a time
    for row in (0, 24, 19):
        arrays = mw.weights()
        arrays[TABLE % 3] = arrays[TABLE % 3].copy()
        arrays[TABLE % 3][row, 7] ^= 1
        refused(mw.tiny(tmp_path, (), arrays), TABLE % 3, TABLE % 1, "row %d" % row, "mem_share_values")
    storage = tw.Storage(np.concatenate([arrays[TABLE % 1], arrays[TABLE % 3]]))  # both in one storage
    arrays[TABLE % 1], arrays[TABLE % 3] = (tw.Tensor(arrays[TABLE % 1], storage, at) for at in (0, 200))
    refused(mw.tiny(tmp_path, (), arrays), TABLE % 3, TABLE % 1, "row 19")
    arrays = mw.weights()
    arrays[TABLE % 3] = mw.widened(arrays[TABLE % 1])
    refused(mw.tiny(tmp_path, (), arrays),
            "tensor '%s' is of float32, but '%s' of bfloat16, and with" % (TABLE % 3, TABLE % 1))


def test_copies_under_some_memories(tmp_path, refused):
    arrays = mw.weights((0, 1, 3))
    del arrays[TABLE % 1]
    refused(mw.tiny(tmp_path, {PK + "layers": "0,1,3"}, arrays),
            "tensor '%s' is missing, though '%s' is there" % (TABLE % 1, TABLE % 3))
    arrays = mw.weights()
    del arrays[TABLE % 1]
    refused(mw.tiny(tmp_path, (), arrays), TABLE % 1, "missing", "[25, 8]")
    refused(mw.tiny(tmp_path, {PK + "mem_share_values": False}, mw.weights(copies=False)),
            TABLE % 3, "missing")


# ---- types --------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved, args, due, table", [
    ("fp32", (), "f32", "BF16"), ("bf16", (), "bf16", "BF16"), ("fp16", (), "f16", "BF16"),
    ("fp32", ("--dtype", "f32"), "f32", "F32"), ("bf16", ("--dtype", "f16"), "f16", "F16"),
    ("fp32", ("--dtype", "int8"), "int8", "I8")])
def test_types(saved, args, due, table, tmp_path):
    source = mw.tiny(tmp_path, {"distributed.model_dtype": saved})
    config, stored, _ = made(tmp_path, source, *args)
    matrix = {"f32": "F32", "bf16": "BF16", "f16": "F16", "int8": "I8"}[due]
    searched = "F32" if due == "int8" else matrix  # what decides which slots are read
    assert config["dtype"] == due
    for name, dtype in (("memories.1_in.values.weight", table), ("embeddings.weight", matrix),
                        ("layers.0.ffn.up.weight", matrix), ("norm.weight", "F32"),
                        ("memories.3_in.value_gate.weight", matrix),
                        ("memories.3_in.value_gate.bias", "F32"), ("memories.1_in.keys", searched),
                        ("memories.1_in.query_proj.query_mlps.0.weight", searched)):
        assert stored[name][0] == dtype, name


@pytest.mark.parametrize("saved, args, rounded", [
    ("bf16", (), lambda a: mw.widened((a.view(np.uint32) + 0x7FFF + (a.view(np.uint32) >> 16 & 1) >> 16)
                                      .astype(np.uint16))),
    ("fp16", (), lambda a: a.astype(np.float16).astype(np.float32)),
    ("fp32", (), lambda a: a), ("bf16", ("--dtype", "bf16"), lambda a: a)])
def test_vectors_have_the_values_that_the_authors_loader_makes(saved, args, rounded, tmp_path):
    stored = made(tmp_path, mw.tiny(tmp_path, {"distributed.model_dtype": saved}), *args)[1]
    for ours, theirs in (("norm.weight",) * 2, ("memories.3_in.value_proj.bias",
                                                "layers.3.feed_forward.value_proj.bias")):
        np.testing.assert_array_equal(stored[ours][1], rounded(mw.weights()[theirs]))


def test_a_vector_beyond_its_type_is_refused(tmp_path, refused):
    arrays = {**mw.weights(), "norm.weight": np.full(8, 1e5, np.float32)}
    refused(mw.tiny(tmp_path, {"distributed.model_dtype": "fp16"}, arrays), "norm.weight", "inf")


@pytest.mark.parametrize("saved, table, due", [
    ("fp32", lambda a: a, "F32"), ("fp32", lambda a: a.astype(np.float16), "F16"),
    ("bf16", lambda a: a.astype(np.float16), "F16"), ("fp32", lambda a: a.astype(np.float64), "F32")])
def test_tables_of_16_bits_keep_their_type(saved, table, due, tmp_path):
    changes = {"distributed.model_dtype": saved}
    stored = made(tmp_path, mw.tiny(tmp_path, changes, mw.weights(table=table)))[1]
    dtype, array = stored["memories.1_in.values.weight"]
    assert dtype == due
    np.testing.assert_array_equal(array, mw.weights(table=table)[TABLE % 1])


@pytest.mark.parametrize("save", [mw.bf16, lambda a: a.astype(np.float16)])
def test_weights_of_16_bits_are_widened(save, tmp_path):
    arrays = {name: save(a) if a.dtype == np.float32 else a for name, a in mw.weights().items()}
    stored = made(tmp_path, mw.tiny(tmp_path, (), arrays))[1]
    for name in ("layers.2.attention.key.weight", "norm.weight"):
        array = arrays[name.replace("key", "wk")]
        due = mw.widened(array) if save is mw.bf16 else array.astype(np.float32)
        np.testing.assert_array_equal(stored[name][1], due)
        assert stored[name][0] == "F32"
    keys = arrays["layers.1.feed_forward.keys"]
    np.testing.assert_array_equal(
        stored["memories.1_in.keys"][1].reshape(30, 2),
        mw.widened(keys) if save is mw.bf16 else keys)


def test_the_optimizer_is_not_read(tmp_path):
    poison = np.full(1000, 1234.5, np.float32)
    source = mw.tiny(tmp_path, optim={"state": {"norm.weight": {"exp_avg": tw.Tensor(poison)}},
                                      "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]})
    data = source.read_bytes()
    at = data.index(poison.tobytes())
    source.write_bytes(data[:at] + b"\xff" * 16 + data[at + 16:])
    made(tmp_path, source)


# ---- sources ------------------------------------------------------------------------------------


def test_folder_and_file_give_the_same(tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    source = mw.tiny(tmp_path / "source")
    outputs = [tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "d"]
    other = source.parent / "other.pth"
    other.write_bytes(source.read_bytes())
    monkeypatch.chdir(source.parent)
    hw.tiny(source.parent)  # a model in Hugging Face form in the same folder changes nothing
    for output, path in zip(outputs, (source.parent, source, "consolidated.pth", other)):
        got = convert(path, "--output", output)
        assert got.status == 0, got.err
        for name in ("config.json", "model.safetensors", "vocab.txt"):
            assert (output / name).read_bytes() == (outputs[0] / name).read_bytes()
    assert convert(source, "--output", tmp_path / "e", "--from", "memory-layers").status == 0


def test_sources_that_are_none(tmp_path, refused):
    refused(tmp_path, "consolidated.pth and params.json are missing")
    source = mw.tiny(tmp_path)
    refused(tmp_path, "a directory", "xlm", args=("--from", "xlm"))
    source.rename(tmp_path / "other.pth")
    refused(tmp_path, "consolidated.pth is missing")
    (tmp_path / "params.json").rename(tmp_path / "else.json")
    refused(tmp_path / "other.pth", "params.json", "not beside")
    tw.write_zip(source, tw.tiny())
    refused(source, "tok_embeddings.weight", "not a checkpoint of memory",
            args=("--from", "memory-layers"))
    refused(tmp_path, "params.json is missing")
    tw.write_zip(source, {"model": {"x": 1}})
    refused(source, "not an XLM checkpoint", "memory layers")
    mw.tiny(tmp_path)
    tw.write_zip(source, {"model": {"x": 1}})
    for path in (source, tmp_path):
        refused(path, "tok_embeddings.weight")


# ---- text ---------------------------------------------------------------------------------------


def varint(n):
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def field(number, value):
    key = varint(number << 3 | (0 if isinstance(value, int) else 2))
    return key + (varint(value) if isinstance(value, int) else varint(len(value)) + value)


def spm(texts=(b"<unk>", b"<s>", b"</s>"), n=12, settings=b""):
    """A SentencePiece model: the first piece is the unknown, what looks like <a tag> is control."""
    texts = [*texts, *(b"w%d" % i for i in range(n))][:n]
    kinds = [2, *(3 if text.startswith(b"<") else 1 for text in texts[1:])]
    return b"".join(field(1, field(1, text) + b"\x15\0\0\0\0" + field(3, kind))
                    for text, kind in zip(texts, kinds)) + field(2, settings)


SP = {"data.tokenizer.name": "sp", "model.vocab_size": 12}


def ids(config):
    return [config.get(key + "_token_id") for key in ("bos", "eos", "unk", "pad")] \
        + [config.get("add_bos")]


def test_sentencepiece_from_either_place(tmp_path):
    source = mw.tiny(tmp_path, {**SP, "data.tokenizer.path": "/far/away/t.model"},
                     mw.weights(n_vocab=12))
    (tmp_path / "t.model").write_bytes(spm())
    other = spm([b"<unk>", b"<s>", b"<end>", b"<begin>"],
                settings=field(3, 5) + field(46, b"<begin>") + field(47, b"<end>"))
    (tmp_path / "other").write_bytes(other)
    for args, data, due in (((), spm(), [1, 2, 0, None, True]),
                            (("--tokenizer", tmp_path / "other"), other, [3, 2, 0, None, True])):
        config, _, out = made(tmp_path, source, *args)
        assert (tmp_path / "model" / "tokenizer.model").read_bytes() == data
        assert not (tmp_path / "model" / "vocab.txt").exists()
        assert "tokenizer" not in config and "text by SentencePiece" in out
        assert ids(config) == due


def test_sentencepiece_without_pieces_for_begin_and_end(tmp_path):
    """As SentencePiece sees it, only a piece of control is one; --set may name another id."""
    source = mw.tiny(tmp_path, SP, mw.weights(n_vocab=12))
    (tmp_path / "t").write_bytes(spm([b"<unk>"]))
    given = ("--tokenizer", tmp_path / "t")
    assert ids(made(tmp_path, source, *given)[0]) == [None, None, 0, None, None]
    got = made(tmp_path, source, *given, "--set", "bos_token_id=3", "--set", "eos_token_id=4")[0]
    assert ids(got) == [3, 4, 0, None, True]


@pytest.mark.parametrize("unsaid", [..., -1])
@pytest.mark.parametrize("n_vocab", [12, 258])
def test_the_weights_tell_a_vocabulary_that_the_file_leaves_to_the_tokenizer(unsaid, n_vocab,
                                                                              tmp_path):
    source = mw.tiny(tmp_path, {"model.vocab_size": unsaid}, mw.weights(n_vocab=n_vocab))
    config = made(tmp_path, source)[0]
    assert config["vocab_size"] == n_vocab
    assert config.get("tokenizer") == ("byte" if n_vocab == 258 else None)


@pytest.mark.parametrize("changes, n_vocab, due, word", [
    ({**SP, "data.tokenizer.path": "gone.model"}, 12, [None] * 5, "--tokenizer gives"),
    ({**SP, "data.tokenizer.path": ".."}, 12, [None] * 5, "--tokenizer gives"),
    ({**SP, "data.tokenizer.path": "a\0\ud800b"}, 12, [None] * 5, "--tokenizer gives"),
    ({"model.vocab_size": 12}, 12, [None] * 5, "258"),
    ({"data.tokenizer.name": "tiktoken"}, 258, [None] * 5, "--tokenizer gives its rank file"),
    ({"data.tokenizer.name": "tiktoken", "model.vocab_size": 128256}, 128256,
     [128000, 128001, None, None, True], "--tokenizer gives its rank file")])
def test_token_ids_alone(changes, n_vocab, due, word, tmp_path):
    source = mw.tiny(tmp_path, changes, mw.weights(n_vocab=n_vocab))
    config, _, out = made(tmp_path, source)
    assert ids(config) == due and "tokenizer" not in config
    assert "token ids in and out" in out and word in out
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) \
        == ["config.json", "model.safetensors", "model.sha256"]
    if due[0] is None:
        config = made(tmp_path, source, "--set", "bos_token_id=5")[0]
        assert ids(config) == [5, None, None, None, True]


def test_a_rank_file_is_taken(tmp_path):
    """tiktoken's, from beside params.json under the name that its path ends in, or given."""
    tokens = [bytes([i]) for i in range(256)] + [bytes([97, i]) for i in range(44)]
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens))
    source = mw.tiny(tmp_path, {"data.tokenizer.name": "tiktoken", "data.tokenizer.path": "x/t",
                                "model.vocab_size": 300},
                     mw.weights(n_vocab=300))
    (tmp_path / "ranks").write_bytes(ranks)
    for args in (("--tokenizer", tmp_path / "ranks"), ()):
        _, _, out = made(tmp_path, source, *args)
        assert "text by byte-level BPE" in out
        assert (tmp_path / "model" / "tokenizer.model").read_bytes() == ranks
        (tmp_path / "t").write_bytes(ranks)
    (tmp_path / "t").write_bytes(ranks * 3)
    got = convert(source, "--output", tmp_path / "o")
    assert got.status == 1 and "900 tokens, but the vocabulary has 300 words" in got.err


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_how_many_ids_may_be_without_a_token(end, tmp_path):
    """At most 256, or an eighth; 256 more than a rank file has are those of Llama 3's special tokens."""
    import bpe_files
    from fault import Refused
    llama3 = {"bos_token_id": 300, "eos_token_id": 301}
    for n_rank, n_vocab, due in ((300, 300, {}), (300, 555, {}), (300, 556, llama3), (300, 557, None), (300, 299, None),
                                 (3000, 3428, {}), (3000, 3429, None)):
        (tmp_path / "t").write_bytes(b"\n".join(b"%s %d" % (base64.b64encode(b"%d" % i), i) for i in range(n_rank)) + end)
        try:
            assert bpe_files.read(str(tmp_path / "t"), n_vocab, "t").ids == due, (n_rank, n_vocab)
        except Refused as fault:
            assert due is None and "%d tokens, but the vocabulary has %d words" % (n_rank, n_vocab) in str(fault)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 20}))
    with pytest.raises(Refused, match="21 tokens, but the vocabulary has 20 words"):
        bpe_files.read(str(tmp_path / "vocab.json"), 20, "vocab.json")


def test_options_that_do_not_fit(tmp_path, refused):
    source = mw.tiny(tmp_path, {"data.tokenizer.path": "t"})  # that of bytes has no file
    for name in ("words", "t"):
        (tmp_path / name).write_bytes(spm())
    refused(source, "--vocab", "not words", args=("--vocab", tmp_path / "words"))
    refused(source, "--codes", "XLM models alone", args=("--codes", tmp_path / "words"))
    refused(source, "--tokenizer %s: a SentencePiece model, but data.tokenizer.name of params.json is"
            " 'bytes'" % (tmp_path / "t"), args=("--tokenizer", tmp_path / "t"))
    refused(source, "--set n_heads", "memory-layers", args=("--set", "n_heads=2"))
    refused(source, "bos_token_id=3", "256", args=("--set", "bos_token_id=3"))
    assert made(tmp_path, source, "--set", "bos_token_id=256")[0]["tokenizer"] == "byte"
    for value in ("258", "-1", "true", "1.0", "x"):
        source = mw.tiny(tmp_path, {"data.tokenizer.name": "tiktoken"})
        got = convert(source, "--output", tmp_path / "o", "--set", "eos_token_id=" + value)
        assert got.status == 1 and "0..257" in got.err, got.err
    source = mw.tiny(tmp_path, {**SP, "data.tokenizer.path": "t"}, mw.weights(n_vocab=12))
    (tmp_path / "t").write_bytes(spm(n=11))
    got = convert(source, "--output", tmp_path / "o")
    assert got.status == 1 and "data.tokenizer.path" in got.err and "11 pieces" in got.err
