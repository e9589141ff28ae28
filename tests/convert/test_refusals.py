"""What convert.py refuses, each by the name of the field or tensor: options that are not served,
combinations the original rejects, weights and dictionaries that contradict params.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_refusals.py -k 'asm'
"""

import json

import numpy as np
import pytest
import torch_writer as tw
import xlm_memory
import xlm_params
from convert_harness import convert
from fault import Refused

BN = "memories.1_in.query_proj.query_mlps.1."


def checkpoint(tmp_path, value=None, **params):
    if value is None:
        value = tw.tiny(params=tw.tiny_params(**params))
    return tw.write_zip(tmp_path / "c.pth", value)


ASM = {"asm": True, "share_inout_emb": False, "asm_cutoffs": [4, 8], "asm_div_value": 2}

# What the original rejects, or what is another kind of model: changes of params, the field named,
# and a word of the reason.
IMPOSSIBLE = [
    ({"encoder_only": False}, "encoder_only", "translation"),
    ({"clm_steps": []}, "clm_steps", "empty"),
    ({"clm_steps": [("en", "fr")]}, "clm_steps", "pairs"),
    ({"clm_steps": ...}, "clm_steps", "missing"),
    ({"clm_steps": 3}, "clm_steps", "3"),
    ({"mem_input2d": True}, "mem_input2d", "images"),
    ({"mem_query_kernel_sizes": [3, 3]}, "mem_query_kernel_sizes", "images"),
    ({"mem_query_residual": True}, "mem_query_residual", "images"),
    ({"mem_v_dim": 4}, "mem_v_dim", "emb_dim = 8"),
    ({"mem_v_dim": 0}, "mem_v_dim", "got 0"),
    ({"mem_implementation": "pq_turbo"}, "mem_implementation", "pq_turbo"),
    ({"mem_implementation": ["flat"]}, "mem_implementation", "flat"),
    ({"mem_score_subtract": "max"}, "mem_score_subtract", "max"),
    ({"mem_enc_positions": [(1, "before")]}, "mem_enc_positions", "before"),
    ({"mem_enc_positions": [(2, "in")]}, "mem_enc_positions", "0..1"),
    ({"mem_enc_positions": [(-1, "in")]}, "mem_enc_positions", "-1"),
    ({"mem_enc_positions": [(1, "in"), (1, "in")]}, "mem_enc_positions", "twice"),
    ({"mem_enc_positions": "1,3+"}, "mem_enc_positions", "list"),
    ({"mem_enc_positions": None}, "mem_enc_positions", "list"),
    ({"mem_enc_positions": 0}, "mem_enc_positions", "list"),
    ({"mem_enc_positions": {}}, "mem_enc_positions", "list"),
    ({"mem_enc_positions": ...}, "mem_enc_positions", "missing"),
    ({"mem_knn": 1, "mem_score_subtract": "mean", "mem_score_normalize": True}, "mem_knn",
     "mem_score_subtract and mem_score_normalize"),
    ({"mem_k_dim": 5}, "mem_k_dim", "even"),
    ({"mem_query_layer_sizes": ""}, "mem_k_dim", "emb_dim = 8"),
    ({"mem_query_layer_sizes": [0, "x"]}, "mem_query_layer_sizes", "[0, width, .., 0]"),
    ({"mem_query_layer_sizes": [8, 0]}, "mem_query_layer_sizes", "[8, 0]"),
    ({"mem_query_layer_sizes": [0, 0, 0]}, "mem_query_layer_sizes", "[0, 0, 0]"),
    ({"mem_query_layer_sizes": [0, 10**6, 0]}, "mem_query_layer_sizes", "1000000"),
    ({"mem_query_layer_sizes": [0] + [4] * 9 + [0]}, "mem_query_layer_sizes", "8 widths"),
    ({"mem_query_layer_sizes": [0, 4, 0], "mem_multi_query_net": True, "mem_k_dim": 3,
      "mem_implementation": "flat"}, "mem_k_dim", "mem_multi_query_net"),
    ({"mem_shuffle_query": True}, "mem_shuffle_query", "mem_query_layer_sizes"),
    ({"mem_query_layer_sizes": "", "mem_k_dim": 8, "mem_shuffle_query": True, "mem_heads": 4},
     "mem_shuffle_query", "2^mem_heads"),
    ({"mem_temperature": 0}, "mem_temperature", "1e-6"),
    ({"mem_temperature": -1.0}, "mem_temperature", "-1"),
    ({"mem_keys_type": "binary", "n_indices": 15}, "n_indices", "binary"),
    ({"mem_keys_type": "binary", "n_indices": 20, "mem_size": 20, "mem_shuffle_indices": True},
     "n_indices", "binary"),
    ({"mem_knn": 5}, "mem_knn", "4 keys"),
    ({"mem_knn": 0}, "mem_knn", "got 0"),
    ({"mem_heads": True}, "mem_heads", "true"),
    ({"mem_heads": 10**12}, "mem_heads", "1..1024"),
    ({"mem_heads": ...}, "mem_heads", "missing"),
    ({"n_layers": 65, "mem_enc_positions": [(i, "in") for i in range(65)]}, "mem_enc_positions", "at most 64"),
    ({"mem_score_normalize": True}, "mem_score_normalize", "mem_score_subtract"),
    ({"mem_grouped_conv": True}, "mem_grouped_conv", "mem_multi_query_net"),
    ({"mem_multi_query_net": True}, "mem_multi_query_net", "mem_query_layer_sizes"),
    ({"mem_modulo_size": 16}, "mem_modulo_size", "1..15 or -1"),
    ({"mem_modulo_size": 0}, "mem_modulo_size", "got 0"),
    ({"mem_n_keys": 5}, "mem_n_keys", "4 keys"),
    ({"mem_size": 17}, "mem_size", "16 expected"),
    ({"mem_temperature": "hot"}, "mem_temperature", "number"),
    ({"asm": True}, "asm", "share_inout_emb"),
    ({**ASM, "asm_cutoffs": None}, "asm_cutoffs", "ascending"),
    ({**ASM, "asm_cutoffs": []}, "asm_cutoffs", "1 to 16"),
    ({**ASM, "asm_cutoffs": [4, 4]}, "asm_cutoffs", "ascending"),
    ({**ASM, "asm_cutoffs": [4, 16]}, "asm_cutoffs", "16"),
    ({**ASM, "asm_cutoffs": [4.5]}, "asm_cutoffs", "4.5"),
    ({**ASM, "asm_div_value": 0.5}, "asm_div_value", "1..8"),
    ({**ASM, "asm_div_value": 4}, "asm_div_value", "tail 1"),
    ({"n_heads": 3}, "n_heads", "divisible"),
    ({"n_heads": 0}, "n_heads", "got 0"),
    ({"emb_dim": 2**40}, "emb_dim", "65536"),
    ({"n_layers": 1.0}, "n_layers", "integer"),
    ({"n_words": 13}, "n_words", "got 13"),
    ({"gelu_activation": 1}, "gelu_activation", "true or false"),
    ({"eos_index": 2}, "eos_index", "1 expected"),
    ({"n_langs": 2}, "lang2id", "2 languages"),
    ({"n_langs": 2, "lang2id": {"en": 0, "fr": 2}}, "lang2id", "0..1"),
    ({"n_langs": 2, "lang2id": {"en": 0, "f\nr": 1}}, "lang2id", "names"),
]


@pytest.mark.parametrize("params,field,word", IMPOSSIBLE)
def test_fields_that_cannot_be(params, field, word, tmp_path, refused):
    refused(checkpoint(tmp_path, **params), "c.pth: params.%s: " % field, word)


LANGS, NO_TAIL = {"n_langs": 2, "use_lang_emb": True}, {**ASM, "asm_cutoffs": [4]}


@pytest.mark.parametrize("params", [
    {**LANGS, "lang2id": {"a": 1, "b" * 63: 0}}, {**LANGS, "lang2id": {"\u00e9" * 31: 0, "b": 1}},
    {"n_langs": 256, "lang2id": {"l%d" % i: i for i in range(256)}},
    {**ASM, "n_words": 18, "asm_cutoffs": list(range(1, 17)), "asm_div_value": 1},
    {**NO_TAIL, "asm_cutoffs": [15], "asm_div_value": 8}, {**NO_TAIL, "asm_div_value": 2.5},
    {"n_indices": ..., "mem_modulo_size": 2**31 - 1}, {"n_indices": 16, "mem_modulo_size": 15},
    {"n_layers": 64, "mem_enc_positions": [(i, "after") for i in range(64)]},
    {"mem_query_layer_sizes": [0] + [1, 65536] * 4 + [0]}, {"mem_temperature": 1e6}, {"mem_temperature": 1e-6},
    {"mem_query_layer_sizes": "", "mem_k_dim": 8, "mem_shuffle_query": True, "mem_heads": 3},
    {"mem_query_layer_sizes": "", "mem_k_dim": 8, "mem_shuffle_query": True, "mem_heads": 1},
    {"emb_dim": 65536, "n_heads": 1024, "n_layers": 1024, "n_words": 1 << 24, "mem_heads": 1024,
     "mem_knn": 1024, "mem_k_dim": 65536}, {"emb_dim": 1, "n_heads": 1, "n_layers": 2, "n_words": 14}], ids=str)
def test_limits_are_served_themselves(params):
    xlm_params.read(tw.tiny_params(**params), {})


@pytest.mark.parametrize("params, field, due", [
    ({**LANGS, "lang2id": {"en": 0, "b" * 64: 1}}, "lang2id", "ids 0..1 with names of 1..63 bytes"),
    ({**LANGS, "lang2id": {"en": 0, "\u00e9" * 32: 1}}, "lang2id", "names of 1..63 bytes"),
    ({**LANGS, "lang2id": {"en": 0, "": 1}}, "lang2id", "names of 1..63 bytes"),
    ({**LANGS, "lang2id": {"en": 0, "\ud800": 1}}, "lang2id", "names of 1..63 bytes"),
    ({**LANGS, "lang2id": {"en": 0, "fr": True}}, "lang2id", "ids 0..1"),
    ({**LANGS, "lang2id": {"en": 0, "fr": 1.0}}, "lang2id", "ids 0..1"),
    ({**LANGS, "lang2id": {"en": 0, "fr": [1]}}, "lang2id", "ids 0..1"),
    ({**LANGS, "lang2id": ["en", "fr"]}, "lang2id", "2 languages"), ({"n_langs": 257}, "n_langs", "1..256"),
    ({**ASM, "asm_cutoffs": list(range(1, 18)), "n_words": 20}, "asm_cutoffs",
     "1 to 16 ascending numbers below n_words = 20"),
    ({**ASM, "asm_cutoffs": [0, 4]}, "asm_cutoffs", "ascending"), ({**ASM, "asm_cutoffs": [-1]}, "asm_cutoffs", "asc"),
    ({**ASM, "asm_cutoffs": [4, 8.5]}, "asm_cutoffs", "ascending"),
    ({**ASM, "asm_cutoffs": [True, 4]}, "asm_cutoffs", "ascending"),
    ({**ASM, "asm_cutoffs": "48"}, "asm_cutoffs", "ascending"),
    ({**NO_TAIL, "asm_div_value": 8.5}, "asm_div_value", "a number 1..8 expected, got 8.5"),
    ({**NO_TAIL, "asm_div_value": True}, "asm_div_value", "a number expected, got true"),
    ({"n_indices": ..., "mem_modulo_size": 2**31}, "mem_modulo_size", "1..2147483647 or -1"),
    ({"mem_temperature": 1.1e6}, "mem_temperature", "1e-6 to 1e6"),
    ({"mem_temperature": float("nan")}, "mem_temperature", "1e-6 to 1e6"),
    ({"mem_temperature": 9e-7}, "mem_temperature", "1e-6 to 1e6")], ids=str)
def test_one_beyond_the_limits(params, field, due):
    with pytest.raises(Refused, match="params.%s: .*%s" % (field, due)):
        xlm_params.read(tw.tiny_params(**params), {})


def test_other_kinds_of_checkpoints(tmp_path, refused):
    translation = tw.tiny()
    translation["encoder"] = translation["decoder"] = translation.pop("model")
    refused(checkpoint(tmp_path, translation), "'encoder'", "translation")
    for key in ("model", "params"):
        value = tw.tiny()
        del value[key]
        refused(checkpoint(tmp_path, value), "'%s'" % key)
    refused(checkpoint(tmp_path, {"model": tw.OrderedDict(), "iter_no": 3}), "'model'")
    for value in ([1, 2], {"model": tw.OrderedDict()}, None, "text"):
        refused(checkpoint(tmp_path, value) if value is not None
                else tw.write_zip(tmp_path / "c.pth", None), "not an XLM checkpoint")
    value = tw.tiny()
    value["model"]["epoch"] = 3
    refused(checkpoint(tmp_path, value), "model", "epoch")


# ---- tensors ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [name for name in tw.tiny_weights() if "num_batches" not in name]
                         + ["pred_layer.proj.weight"])
def test_each_tensor_is_needed_with_its_shape(name, tmp_path, refused):
    """Missing, one row too many, one dimension too many: all by the tensor's name."""
    field = name.replace(".", "__")
    refused(checkpoint(tmp_path, tw.tiny(**{field: None})), "'%s'" % name, "missing")
    array = tw.tiny_weights().get(name, tw.tiny_weights()["embeddings.weight"])
    wider = np.concatenate([array, array[..., :1]], axis=-1)
    refused(checkpoint(tmp_path, tw.tiny(**{field: tw.Tensor(wider)})),
            "'%s'" % name, "expected", *map(str, (wider.shape[-1],)))
    deeper = tw.Tensor(array[None])
    refused(checkpoint(tmp_path, tw.tiny(**{field: deeper})), "'%s'" % name, "expected")


@pytest.mark.parametrize("name", ["extra.weight", "memories.0_in.keys", "ffns.1.lin1.weight",
                                  "lang_embeddings.weight", "memories.1_in.head_permutations",
                                  "layer_norm_emb.num_batches_tracked", "module.embeddings.weight"])
def test_a_left_over_tensor(name, tmp_path, refused):
    refused(checkpoint(tmp_path, tw.tiny(**{name: tw.Tensor(np.zeros((2, 2), np.float32))})),
            "'%s'" % name, "params")


def test_memories_without_use_memory_are_left_over(tmp_path, refused):
    for how in ({"use_memory": False}, {"mem_enc_positions": []}):
        refused(checkpoint(tmp_path, **how), "'memories.1_in.", "use_memory", "mem_enc_positions")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["embeddings.weight", "layer_norm_emb.bias",
                                  "memories.1_in.values.weight"])
def test_weights_that_are_not_finite(name, bad, tmp_path, refused):
    weights = tw.tiny_weights()
    weights[name].flat[-1] = bad
    refused(checkpoint(tmp_path, tw.tiny(weights=weights)), "'%s' holds %s" % (name, bad))


def test_a_double_that_fp32_cannot_hold(tmp_path, refused):
    array = tw.tiny_weights()["layer_norm_emb.bias"].astype(np.float64)
    array[2] = 1e300
    value = tw.tiny(layer_norm_emb__bias=tw.Tensor(array))
    refused(checkpoint(tmp_path, value), "'layer_norm_emb.bias'", "inf")


def test_a_negative_variance(tmp_path, refused):
    weights = tw.tiny_weights()
    weights[BN + "running_var"][3] = -1e-3
    source = checkpoint(tmp_path, tw.tiny(weights=weights))
    refused(source, BN + "running_var", "-0.001", "negative")


def test_integers_where_weights_are_due(tmp_path, refused):
    refused(checkpoint(tmp_path, tw.tiny(layer_norm_emb__bias=tw.Tensor(np.arange(8)))),
            "'layer_norm_emb.bias'", "floating point", "int64")


@pytest.mark.parametrize("row", [0, 5, 15])
def test_a_tied_output_that_differs(row, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(xlm_memory, "CHUNK_ROWS", 3)
    other = tw.tiny_weights()["embeddings.weight"].copy()
    other[row, 3] += 1
    refused(checkpoint(tmp_path, tw.tiny(pred_layer__proj__weight=tw.Tensor(other))),
            "'pred_layer.proj.weight'", "row %d," % row, "share_inout_emb")


def test_an_untied_output_is_written(tmp_path):
    other = tw.tiny_weights()["embeddings.weight"] * 2
    source = checkpoint(tmp_path, tw.tiny(params=tw.tiny_params(share_inout_emb=False),
                                          pred_layer__proj__weight=tw.Tensor(other)))
    assert convert(source, "--output", tmp_path / "m").status == 0
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_output"] is False


def test_two_tensors_in_one_storage(tmp_path, refused):
    """A small file must not become a large directory by naming one storage many times."""
    shared = tw.Storage(tw.tiny_weights()["layer_norm_emb.weight"])
    tensors = {name: tw.Tensor(shared.data, shared)
               for name in ("layer_norm_emb__weight", "layer_norm_emb__bias")}
    refused(checkpoint(tmp_path, tw.tiny(**tensors)), "layer_norm_emb.bias", "shares its storage")
    value = tw.tiny()
    words = value["model"]["embeddings.weight"].storage
    value["model"]["attentions.1.k_lin.weight"] = tw.Tensor(words.data[:64].reshape(8, 8), words)
    refused(checkpoint(tmp_path, value), "'attentions.1.k_lin.weight' shares its storage")


def test_languages_without_a_table(tmp_path):
    source = checkpoint(tmp_path, n_langs=2, lang2id={"en": 0, "fr": 1}, use_lang_emb=False)
    assert convert(source, "--output", tmp_path / "m").status == 0
    assert "languages" not in json.loads((tmp_path / "m" / "config.json").read_text())


# ---- dictionary ---------------------------------------------------------------------------------

def with_dictionary(**changes):
    value = tw.tiny()
    for name, edit in changes.items():
        edit(value[name])
    return value


DICTIONARIES = [
    (lambda d: d.pop(15), "dico_id2word", "15"),
    (lambda d: d.update({16: "more"}), "dico_id2word", "17"),
    (lambda d: (d.pop(15), d.update({99: "le@@"})), "dico_id2word", "id 15"),
    (lambda d: d.update({1: "<eos>"}), "dico_id2word", "id 1: '</s>' expected, got '<eos>'"),
    (lambda d: d.update({13: "la"}), "dico_id2word", "<special9>"),
    (lambda d: d.update({14: 7}), "dico_id2word", "id 14"),
    (lambda d: d.update({14: "lo"}), "dico_word2id", "lo"),
]


@pytest.mark.parametrize("edit,field,word", DICTIONARIES)
def test_dictionaries_that_contradict(edit, field, word, tmp_path, refused):
    refused(checkpoint(tmp_path, with_dictionary(dico_id2word=edit)), field, word)


def test_the_inverse_dictionary_must_agree(tmp_path, refused):
    refused(checkpoint(tmp_path, with_dictionary(dico_word2id=lambda d: d.update({"la": 3}))),
            "dico_word2id", "'la'", "14 expected")
    value = with_dictionary(dico_word2id=lambda d: d.pop("la"))
    refused(checkpoint(tmp_path, value), "dico_word2id", "15")


@pytest.mark.parametrize("word", ["two\nlines", "a\rb", "nul\0", "", "\ud800", "\u00e9" * 2049])
def test_words_that_cannot_be_lines(word, tmp_path, refused):
    words = tw.tiny_words()
    words[14] = word
    refused(checkpoint(tmp_path, tw.tiny(words=words)), "dico_id2word")


def test_without_a_dictionary_the_words_must_be_given(tmp_path, refused):
    value = tw.tiny()
    del value["dico_id2word"], value["dico_word2id"]
    source = checkpoint(tmp_path, value)
    refused(source, "dico_id2word", "--vocab")
    words = tmp_path / "words"
    for text, n in (("", 0), ("w", 1), ("w\n" * 15, 15), ("w\n" * 16 + "w", 17)):
        words.write_text(text)
        refused(source, "--vocab %s: 16 lines expected, one for each id, got %d" % (words, n),
                args=("--vocab", words))
    words.write_bytes(b"w\n" * 15 + b"w\xff\n")
    for more in ((), ("--tokenizer", words)):
        refused(source, "--vocab %s: not UTF-8 at byte 31" % words, args=("--vocab", words, *more))
    words.write_text("w\n" * 16)
    refused(source, "line 1: '<s>' expected", args=("--vocab", words))
    words.write_text("".join("%s\n" % w for w in tw.tiny_words()[:15]) + "<unk>\n")
    refused(source, "line 16", "<unk>", args=("--vocab", words))
    words.write_text("".join("%s\n" % w for w in tw.tiny_words()))
    assert convert(source, "--output", tmp_path / "m", "--vocab", words).status == 0
