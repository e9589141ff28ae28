"""Conversion of the all-attention family: sizes from shapes, both containers, refusals by name."""

import json
import os
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch_writer as tw
from convert_harness import ROOT, convert

GOLDEN = ROOT / "tests" / "golden" / "allattention"
D, HEADS, SPAN, N, V = 8, 2, 10, 3, 4


def weights(adaptive=True, persistent=True):
    rng = np.random.default_rng(1)

    def new(*shape):
        return tw.Tensor(rng.standard_normal(shape).astype(np.float32))

    w = {"key_pe": new(1, D // HEADS, SPAN), "in_emb.weight": new(V, D),
         "out_emb.weight": new(V, D), "out_emb.bias": new(V)}
    inside = "layers.0.attn.attn."
    for name in ("query", "key", "val", "out"):
        w["layers.0.attn.proj_%s.weight" % name] = new(D, D)
    for name in ("norm1",) if persistent else ("norm1", "norm2"):
        w["layers.0.%s.weight" % name], w["layers.0.%s.bias" % name] = new(D), new(D)
    if persistent:
        w[inside + "persistent_memory.key"] = new(HEADS, D // HEADS, N)
        w[inside + "persistent_memory.val"] = new(HEADS, N, D // HEADS)
    else:
        w["layers.0.ff.fc1.weight"], w["layers.0.ff.fc1.bias"] = new(5, D), new(5)
        w["layers.0.ff.fc2.weight"], w["layers.0.ff.fc2.bias"] = new(D, 5), new(D)
    if adaptive:
        span = tw.Tensor(np.full((HEADS, 1, 1), 0.25, np.float32))
        for place in ("", "persistent_memory.")[:1 + persistent]:
            mask = inside + place + "adaptive_span._mask."
            w[mask + "current_val"], w[mask + "mask_template"] = span, new(SPAN)
    return w


def checkpoint(tmp_path, w, prefix="module.", **more):
    (tmp_path / "vocab.txt").write_text("".join("%s\n" % t for t in ("a", "<eos>", "b", "c")))
    model = tw.OrderedDict({prefix + name: tensor for name, tensor in w.items()})
    tw.write_zip(tmp_path / "c.pt", {"iter_no": 2, "model": model, **more})
    return tmp_path / "c.pt"


def made(tmp_path, source, *args):
    got = convert(source, "--output", tmp_path / "model", "--vocab", tmp_path / "vocab.txt", *args)
    assert got.status == 0, got.err
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    base = 8 + int.from_bytes(data[:8], "little")
    arrays = {name: np.frombuffer(data[base:][slice(*e["data_offsets"])], "<f4")
              .reshape(e["shape"]) for name, e in header.items()}
    return json.loads((tmp_path / "model" / "config.json").read_text()), arrays


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_sizes_follow_from_the_shapes(prefix, tmp_path):
    w = weights()
    config, arrays = made(tmp_path, checkpoint(tmp_path, w, prefix))
    assert config == {"model_type": "all_attention", "vocab_size": V, "d_model": D, "n_layer": 1,
                      "n_head": HEADS, "d_ff": 0, "n_persistent": N, "max_span": SPAN,
                      "span_ramp": 32, "norm_eps": 1e-5, "tie_output": False, "dtype": "f32",
                      "bos_token_id": 1}
    keys = w["layers.0.attn.attn.persistent_memory.key"].storage.data.reshape(HEADS, D // HEADS, N)
    values = w["layers.0.attn.attn.persistent_memory.val"].storage.data
    np.testing.assert_allclose(arrays["layers.0.persistent.keys"],
                               keys.transpose(0, 2, 1) * (D // HEADS) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(arrays["layers.0.persistent.values"].reshape(-1),
                               values * N ** 0.5, rtol=1e-6)
    assert arrays["layers.0.spans"].tolist() == [0.25, 0.25]


def test_networks_and_fixed_spans(tmp_path):
    config, arrays = made(tmp_path, checkpoint(tmp_path, weights(False, False)))
    assert (config["d_ff"], config["n_persistent"]) == (5, 0) and "span_ramp" not in config
    assert arrays["layers.0.ffn.lin1.weight"].shape == (5, D)


def test_the_ramp_is_set(tmp_path):
    source = checkpoint(tmp_path, weights())
    for ramp in (16, 1):
        assert made(tmp_path, source, "--set", "adapt_span_ramp=%d" % ramp)[0]["span_ramp"] == ramp


def test_both_containers_give_the_same(tmp_path):
    case = GOLDEN / "c-allattn-fixed"
    for name in ("checkpoint", "checkpoint_legacy"):
        got = convert(case / (name + ".pt"), "--vocab", case / "vocab.txt",
                      "--output", tmp_path / name)
        assert got.status == 0, got.err
    assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() \
        == (tmp_path / "checkpoint_legacy" / "model.safetensors").read_bytes()


def test_the_stride_of_one_element_is_never_taken(tmp_path):
    w = weights()
    plain = made(tmp_path, checkpoint(tmp_path, w))
    for tensor in (w["key_pe"], w["layers.0.attn.attn.adaptive_span._mask.current_val"]):
        tensor.stride = tuple(2**63 - 1 if n == 1 else step for n, step in zip(tensor.size, tensor.stride))
    got = made(tmp_path, checkpoint(tmp_path, w))
    assert got[0] == plain[0]
    for name, array in got[1].items():
        np.testing.assert_array_equal(array, plain[1][name])


@pytest.mark.parametrize("name, size, word", [
    ("in_emb.weight", (2**24 + 1, D), "the vocabulary is 16777217"), ("in_emb.weight", (V, 65540), "the width is 65540"),
    ("in_emb.weight", (V, 4100), "the number of heads is 1025"),
    ("key_pe", (1, D // HEADS, 2**20 + 1), "attn_span is 1048577"),
    ("layers.0.attn.attn.persistent_memory.key", (HEADS, D // HEADS, 2**20 + 1), "pers_mem_size is 1048577"),
    ("layers.0.ff.fc1.weight", (2**20 + 1, D), "inner_hid_sz is 1048577"),
    ("out_emb.out_layers.%d.weight", (V, D), "the number of clusters is 17")])
def test_sizes_beyond_the_limits(name, size, word, tmp_path, refused):
    w = weights(persistent=".ff." not in name)
    w.update((name % i if "%" in name else name, tw.Tensor(np.zeros(1, np.float32), size=size, stride=(0,) * len(size)))
             for i in range(17))
    refused(checkpoint(tmp_path, w), word + ", at most", args=("--vocab", tmp_path / "vocab.txt"))


def test_refusals(tmp_path, refused):
    source = checkpoint(tmp_path, weights())
    vocab = ("--vocab", tmp_path / "vocab.txt")
    refused(source, "--vocab")
    refused(source, "adapt_span_ramp", "1..", args=(*vocab, "--set", "adapt_span_ramp=0"))
    refused(source, "n_heads", "not for the all-attention", args=(*vocab, "--set", "n_heads=2"))
    refused(source, "not an XLM checkpoint", args=(*vocab, "--from", "xlm"))
    checkpoint(tmp_path, weights(adaptive=False))
    refused(source, "spans are fixed", args=(*vocab, "--set", "adapt_span_ramp=16"))


@pytest.mark.parametrize("name, size, words", [
    ("key_pe", None, ["key_pe", "missing"]),
    ("layers.0.attn.proj_val.weight", None, ["proj_val", "missing", "[8, 8]"]),
    ("layers.0.norm1.bias", (7,), ["norm1.bias", "[8]", "[7]"]),
    ("key_pe", (1, 3, SPAN), ["key_pe", "heads"]),
    ("in_emb.weight", (0, D), ["in_emb.weight", "1 or more", "[0, 8]"]),
    ("layers.0.extra", (2,), ["layers.0.extra"]),
    ("out_emb.cluster_proj.weight", (2, D), ["out_emb.cluster_proj.weight"])])
def test_tensors_that_do_not_fit(name, size, words, tmp_path, refused):
    w = weights()
    if size is None:
        del w[name]
    else:
        w[name] = tw.Tensor(np.zeros(size, np.float32))
    source = checkpoint(tmp_path, w)
    refused(source, *words, args=("--vocab", tmp_path / "vocab.txt"))


def adaptive_weights(tied, tail=2):
    """Clusters of 3 and tail words, 8 and 2 columns wide."""
    rng = np.random.default_rng(2)
    w = weights()
    for name in ("in_emb.weight", "out_emb.weight", "out_emb.bias"):
        del w[name]

    def new(*shape):
        return tw.Tensor(rng.standard_normal(shape).astype(np.float32))

    for i, (rows, width) in enumerate(((3, D), (tail, 2))):
        w["out_emb.out_layers.%d.weight" % i] = new(rows, width)
        w["out_emb.out_layers.%d.bias" % i] = new(rows)
        w["out_emb.out_projs.%d" % i] = new(D, width)
        w["in_emb.emb_layers.%d.weight" % i] = \
            w["out_emb.out_layers.%d.weight" % i] if tied else new(rows, width)
        w["in_emb.emb_projs.%d" % i] = w["out_emb.out_projs.%d" % i] if tied else new(D, width)
    w["out_emb.cluster_proj.weight"], w["out_emb.cluster_proj.bias"] = new(1, D), new(1)
    return w


def array(tensor):
    return tensor.storage.data.reshape(tensor.size).astype(np.float64)


@pytest.mark.parametrize("tied", [True, False])
def test_adaptive_input_and_softmax(tied, tmp_path):
    w = adaptive_weights(tied)
    source = checkpoint(tmp_path, w)
    (tmp_path / "vocab.txt").write_text("a\nb\nc\nd\n<eos>\n")
    config, arrays = made(tmp_path, source, "--set", "vocab_kind=word")
    assert (config["vocab_size"], config["adaptive_cutoffs"], config["adaptive_widths"],
            config["tokenizer"]) == (5, [3], [2], "word")
    rows = [D ** 0.5 * array(w["in_emb.emb_layers.%d.weight" % i])
            @ array(w["in_emb.emb_projs.%d" % i]).T for i in range(2)]
    np.testing.assert_allclose(arrays["embeddings.weight"], np.concatenate(rows), rtol=1e-6)
    head = np.concatenate([array(w["out_emb.out_layers.0.weight"]),
                           array(w["out_emb.cluster_proj.weight"])])
    np.testing.assert_allclose(arrays["output.head.weight"],
                               head @ array(w["out_emb.out_projs.0"]).T, rtol=1e-5, atol=1e-6)
    assert (arrays["output.tail.0.0.weight"] == array(w["out_emb.out_projs.1"]).T).all()
    assert (arrays["output.tail.0.1.weight"] == array(w["out_emb.out_layers.1.weight"])).all()
    assert (arrays["output.tail.0.1.bias"] == array(w["out_emb.out_layers.1.bias"])).all()


def test_rows_of_adaptive_input_are_made_as_they_are_written(tmp_path, monkeypatch):
    """The table is four times as wide as what the file has of it: it is never whole in memory."""
    import safetensors_file
    source, n_tail, held = checkpoint(tmp_path, adaptive_weights(True, 1 << 14)), 1 << 14, []
    (tmp_path / "vocab.txt").write_text("".join("%d\n" % i for i in range(3 + n_tail)))
    real = safetensors_file.encode

    def encode(values, dtype):
        arrays = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
        held.append(sum(trace.size for trace in arrays.traces))
        return real(values, dtype)

    monkeypatch.setattr(safetensors_file, "CHUNK", 1 << 14)
    monkeypatch.setattr(safetensors_file, "encode", encode)
    tracemalloc.start()
    made(tmp_path, source)
    tracemalloc.stop()
    assert max(held) < (3 + n_tail) * D * 4, "%d bytes at once" % max(held)


def test_a_disk_that_is_too_small(tmp_path, refused, monkeypatch):
    import safetensors_file
    real = os.fstatvfs
    monkeypatch.setattr(safetensors_file.os, "fstatvfs", lambda handle: SimpleNamespace(
        f_bavail=1, f_frsize=1000, f_blocks=real(handle).f_blocks))
    refused(checkpoint(tmp_path, weights()), "--output", "takes 1720 bytes", "1000 are left",
            args=("--vocab", tmp_path / "vocab.txt"))


def test_kinds_of_words(tmp_path):
    source = checkpoint(tmp_path, weights())
    vocab = ("--vocab", tmp_path / "vocab.txt")
    assert "tokenizer" not in made(tmp_path, source)[0]
    assert made(tmp_path, source, "--set", "vocab_kind=char")[0]["tokenizer"] == "char"
    got = convert(source, "--output", tmp_path / "other", *vocab, "--set", "vocab_kind=bpe")
    assert got.status == 1 and "vocab_kind" in got.err and "byte char word" in got.err


def test_the_word_that_stands_for_unknown_ones(tmp_path):
    """Without its id in config.json, n_unk of a score is 0 whatever the text."""
    source = checkpoint(tmp_path, weights())
    assert "unk_token_id" not in made(tmp_path, source)[0]
    (tmp_path / "vocab.txt").write_text("a\n<eos>\nb\n<unk>\n")
    config = made(tmp_path, source, "--set", "vocab_kind=word")[0]
    assert (config["bos_token_id"], config["unk_token_id"]) == (1, 3)


@pytest.mark.parametrize("kind, text, words", [
    ("word", "a\r\n<eos>\r\nb\r\nc\r\n", ["line 1", "a word of its own"]),
    ("word", "a\n<eos>\na\nc\n", ["line 3"]), ("word", "a\n\nb\nc\n", ["line 2"]),
    ("word", "a\n%s\nb\nc\n" % ("b" * 4097), ["line 2", "4097 bytes, the limit is 4096"]),
    ("char", "a\n<eos>\nbc\nd\n", ["line 3", "one character", "vocab_kind=char"]),
    ("byte", "1\n<eos>\n256\n2\n", ["line 3", "a byte's number"]),
    ("byte", "1\n<eos>\n02\n2\n", ["line 3"]), ("byte", "1\n<eos>\n10\n2\n", ["line 3"])])
def test_words_that_the_server_would_refuse(kind, text, words, tmp_path, refused):
    source = checkpoint(tmp_path, weights())
    (tmp_path / "vocab.txt").write_bytes(text.encode())
    vocab = ("--vocab", tmp_path / "vocab.txt")
    refused(source, "--vocab", *words, args=(*vocab, "--set", "vocab_kind=" + kind))


def test_one_way_to_read_text(tmp_path, refused):
    source = checkpoint(tmp_path, weights())
    vocab = ("--vocab", tmp_path / "vocab.txt", "--set", "vocab_kind=word")
    refused(source, "--codes", "XLM", args=(*vocab, "--codes", tmp_path / "vocab.txt"))
    refused(source, "--tokenizer", "vocab_kind=word",
            args=(*vocab, "--tokenizer", tmp_path / "vocab.txt"))


@pytest.mark.parametrize("value", [1.0000001, -0.25])
def test_spans_are_shares(value, tmp_path, refused):
    w, name = weights(), "layers.0.attn.attn.adaptive_span._mask.current_val"
    w[name] = tw.Tensor(np.array([0.5, value], np.float32).reshape(HEADS, 1, 1))
    refused(checkpoint(tmp_path, w), name, "head 1 has %.9g" % np.float32(value),
            args=("--vocab", tmp_path / "vocab.txt"))


def test_shared_storages_are_refused(tmp_path, refused):
    w = weights()
    w["out_emb.weight"] = w["in_emb.weight"]
    refused(checkpoint(tmp_path, w), "shares its storage",
            args=("--vocab", tmp_path / "vocab.txt"))
