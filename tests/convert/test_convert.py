"""convert.py on honest checkpoints: every golden case, both containers, all options.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_convert.py -k 'golden and flat'
"""

import json
import pickle
import zipfile

import numpy as np
import pytest
import torch_writer as tw
from convert_harness import GOLDEN, convert, convert_program
from numpy_model import Model, read_safetensors

CASES = ["dense12", "pkm12", "pkm12-2mem", "pkm-added", "flat", "knn32", "ties", "fp16ckpt",
         "trained", "rescore-b", "samekeys", "identityquery", "asm"]
# Those whose tensors are named or arranged in another way.
OTHER_CASES = ["pkm-mlpquery", "pkm-multiquery", "pkm-groupedquery", "rescore-a", "share-values"]


def made(tmp_path, source, *args):
    got = convert(source, "--output", tmp_path / "model", *args)
    assert got.status == 0, got.err
    assert got.err == ""
    return tmp_path / "model"


def tensors(directory):
    return read_safetensors(directory / "model.safetensors")


@pytest.fixture(scope="module")
def golden_dirs(tmp_path_factory):
    """case -> converted directory, made once."""
    done = {}

    def get(case):
        if case not in done:
            directory = tmp_path_factory.mktemp(case) / "model"
            got = convert_program(GOLDEN / case / "checkpoint.pth", "--output", directory)
            assert (got.status, got.err) == (0, ""), got.err
            done[case] = directory, got.out
        return done[case]

    return get


class Plain:
    """Takes the place of every type while Python's own unpickler reads a trusted golden file."""

    def __init__(self, *args):
        self.args = args

    def __setstate__(self, state):
        pass


class Dict(dict):
    """collections.OrderedDict: unlike dict it takes the attribute that BUILD sets."""


class TrustedReader(pickle.Unpickler):
    def find_class(self, module, name):
        return Dict if name == "OrderedDict" else type(name, (Plain,), {})

    def persistent_load(self, pid):
        return pid


def trusted_read(path):
    """The state dict of a golden checkpoint, read by other means than the converter's."""
    kinds = {"FloatStorage": "<f4", "HalfStorage": "<f2", "LongStorage": "<i8",
             "BFloat16Storage": "<u2"}
    storages = {}
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            stem = archive.namelist()[0].split("/")[0]
            root = TrustedReader(archive.open(stem + "/data.pkl")).load()
            storages = {name.split("/")[-1]: archive.read(name) for name in archive.namelist()
                        if name.startswith(stem + "/data/")}
    else:
        with open(path, "rb") as file:
            for _ in range(3):
                TrustedReader(file).load()
            root = TrustedReader(file).load()
            keys = TrustedReader(file).load()
            for key in keys:
                storages[key] = file.read(4 * int.from_bytes(file.read(8), "little"))
    arrays = {}
    for name, tensor in root["model"].items():
        pid, offset, size, stride = tensor.args[:4]
        flat = np.frombuffer(storages[pid[2]], kinds[pid[1].__name__])
        arrays[name] = np.lib.stride_tricks.as_strided(
            flat[offset:], size, [n * flat.itemsize for n in stride])
    return arrays


@pytest.mark.parametrize("case", CASES)
def test_golden_tensors_are_the_checkpoints_to_the_bit(case, golden_dirs):
    directory, _ = golden_dirs(case)
    source = trusted_read(GOLDEN / case / "checkpoint.pth")
    source = {name[len("module."):] if name.startswith("module.") else name: array
              for name, array in source.items() if "num_batches" not in name}
    if json.loads((directory / "config.json").read_text())["tie_output"]:
        assert (source.pop("pred_layer.proj.weight") == source["embeddings.weight"]).all()
    got = tensors(directory)
    assert sorted(got) == sorted(source)
    for name, array in source.items():
        assert got[name].dtype == np.float32 and got[name].shape == array.shape, name
        np.testing.assert_array_equal(got[name], array.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("case", CASES + OTHER_CASES)
def test_golden_directory_computes_what_the_original_does(case, golden_dirs):
    model = Model(golden_dirs(case)[0])
    expected = json.loads((GOLDEN / case / "expected.json").read_text())
    arrays = read_safetensors(GOLDEN / case / "expected.safetensors")
    short = expected["sequences"][0]
    logprobs, hidden, looked_up = model.forward(short["ids"], short["lang"])
    np.testing.assert_allclose(logprobs, arrays["logprobs_full_f64"], atol=1e-6)
    for i, x in enumerate(hidden):
        np.testing.assert_allclose(x, arrays["hidden.%d" % i], atol=1e-4, err_msg="hidden.%d" % i)
    memories = sorted({name.split(".")[1] for name in arrays if name.startswith("mem.")})
    assert sorted(looked_up) == memories
    for name, (slots, shares) in looked_up.items():
        due = np.sort(arrays["mem.%s.weights" % name])[:, :, ::-1]
        np.testing.assert_allclose(shares, due, atol=5e-5)
        if not expected["ties"]:
            np.testing.assert_array_equal(np.sort(slots), np.sort(arrays["mem.%s.indices" % name]))


@pytest.mark.parametrize("case", CASES)
def test_golden_config_and_words(case, golden_dirs):
    directory, out = golden_dirs(case)
    expected = json.loads((GOLDEN / case / "expected.json").read_text())["config"]
    config = json.loads((directory / "config.json").read_text())
    assert sorted(path.name for path in directory.iterdir()) \
        == ["config.json", "model.safetensors", "model.sha256", "vocab.txt"]
    assert (config["n_layer"], config["d_model"], config["n_head"], config["vocab_size"]) == (
        expected["n_layers"], expected["emb_dim"], expected["n_heads"], expected["n_words"])
    assert config["model_type"] == "pkm_transformer" and config["d_ff"] == 4 * expected["emb_dim"]
    assert config["activation"] == ("gelu" if expected["gelu_activation"] else "relu")
    assert config["tie_output"] == expected["share_inout_emb"]
    assert (config["max_position"], config["norm_eps"], config["add_bos"]) == (512, 1e-12, True)
    assert config["tokenizer"] == "xlm"
    assert [config[k + "_token_id"] for k in ("bos", "eos", "pad", "unk")] == [1, 1, 2, 3]
    assert config.get("languages") == (["en", "fr"] if expected["n_langs"] == 2 else None)
    places = [[m["layer"], m["place"]] for m in config["memories"]]
    order = sorted(expected.get("mem_enc_positions", []), key=lambda p: (p[0], p[1] == "after"))
    assert places == order
    for m in config["memories"]:
        assert (m["n_head"], m["k_top"], m["n_key"], m["d_key"], m["n_slot"]) == tuple(
            expected["mem_" + k] for k in ("heads", "knn", "n_keys", "k_dim", "size"))
        assert m["kind"] == ("flat" if expected["mem_implementation"] == "flat" else "product")
        assert m["query_batch_norm"] == expected["mem_query_batchnorm"]
        has_network = expected["mem_query_layer_sizes"] != ""
        assert m["query_bias"] == (expected["mem_query_bias"] and has_network)
        assert "memory %s layer %d" % (m["place"], m["layer"]) in out
    words = (directory / "vocab.txt").read_bytes().decode().split("\n")
    assert words.pop() == "" and len(words) == expected["n_words"]
    assert words[:5] == ["<s>", "</s>", "<pad>", "<unk>", "<special0>"]


def test_the_safetensors_header_is_well_formed(golden_dirs):
    data = (golden_dirs("pkm12")[0] / "model.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    assert (8 + n) % 64 == 0
    spans = sorted(entry["data_offsets"] for entry in json.loads(data[8:8 + n]).values())
    assert spans[0][0] == 0 and spans[-1][1] == len(data) - 8 - n
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:])), "tensors without gap or overlap"


# ---- containers and their variants --------------------------------------------------------------

@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_both_containers_give_the_same_directory(container, tmp_path):
    source = tw.WRITERS[container](tmp_path / "c.pth", tw.tiny())
    got = tensors(made(tmp_path, source))
    for name, array in tw.tiny_weights().items():
        if "num_batches" not in name:
            np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert "pred_layer.proj.weight" not in got


def test_zip64_and_any_stem(tmp_path):
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny(), stem="best-valid ppl", zip64=True))


def test_members_of_newer_writers_are_ignored(tmp_path):
    extra = [("archive/byteorder", b"little"), ("archive/.data/serialization_id", b"1"),
             ("archive/.format_version", b"1")]
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny(), extra=extra))


def test_module_prefix_is_stripped(tmp_path):
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny(prefix="module.")))


@pytest.mark.parametrize("n_behind", [2, 0])
def test_legacy_view_data(n_behind, tmp_path):
    """Very old files store a view as (key, offset, length) of its root storage."""
    array = tw.tiny_weights()["layer_norm_emb.bias"]
    root = tw.Storage(np.concatenate([np.full(3, 9, np.float32), array, np.zeros(n_behind, np.float32)]),
                      view=("view7", 3, 8))
    value = tw.tiny(layer_norm_emb__bias=tw.Tensor(array, root))
    got = tensors(made(tmp_path, tw.write_legacy(tmp_path / "c.pth", value)))
    np.testing.assert_array_equal(got["layer_norm_emb.bias"], array)


def test_checksums_of_members_longer_than_a_piece(tmp_path, monkeypatch):
    import torch_file
    monkeypatch.setattr(torch_file, "CHECKSUM_CHUNK", 100)
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny()))


def test_an_archive_named_beyond_ascii(tmp_path):
    """PyTorch names the members after the file."""
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny(), stem="mod\u00e8le-\u6a21\u578b"))


def test_a_conversion_that_cannot_be_put_in_place_leaves_the_earlier_one(tmp_path, monkeypatch):
    import os
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny())
    before = {path: path.read_bytes() for path in made(tmp_path, source).iterdir()}
    rename = os.rename

    def fails(old, new):
        if ".convert-" in str(old):
            raise OSError(28, "No space left on device")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fails)
    got = convert(source, "--output", tmp_path / "model")
    assert got.status == 1 and "No space left" in got.err
    assert {path: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.pth", "model"]


def test_settings_may_repeat_what_the_file_says(tmp_path):
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny()), "--set", "n_heads=2")


def test_transposed_tensors_are_written_in_order(tmp_path):
    array = tw.tiny_weights()["ffns.0.lin1.weight"]
    turned = tw.Tensor(array.T, size=(32, 8), stride=(1, 32))
    got = made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny(ffns__0__lin1__weight=turned)))
    np.testing.assert_array_equal(tensors(got)["ffns.0.lin1.weight"], array)


def test_half_and_double_are_widened_or_rounded(tmp_path):
    weights = tw.tiny_weights()
    half = weights["ffns.0.lin1.weight"].astype(np.float16)
    double = weights["ffns.0.lin2.weight"].astype(np.float64) + 1e-12
    value = tw.tiny(ffns__0__lin1__weight=tw.Tensor(half), ffns__0__lin2__weight=tw.Tensor(double))
    got = tensors(made(tmp_path, tw.write_legacy(tmp_path / "c.pth", value)))
    np.testing.assert_array_equal(got["ffns.0.lin1.weight"], half.astype(np.float32))
    np.testing.assert_array_equal(got["ffns.0.lin2.weight"], double.astype(np.float32))


def test_optimizer_state_is_never_read(tmp_path):
    """Its storages may be damaged (a wrong checksum in the zip) and nobody notices."""
    poison = np.full(1000, 1234.5, np.float32)
    value = tw.tiny()
    value["model_optimizer"] = {"state": {0: {"step": 3, "exp_avg": tw.Tensor(poison)}}}
    source = tw.write_zip(tmp_path / "c.pth", value)
    data = source.read_bytes()
    at = data.index(poison.tobytes())
    source.write_bytes(data[:at] + b"\xff" * 16 + data[at + 16:])
    made(tmp_path, source)


def test_numpy_objects_are_parsed_and_dropped(tmp_path):
    scalar = tw.Raw(tw.global_("numpy.core.multiarray", "scalar") + b"("
                    + tw.global_("numpy", "dtype") + b"(X\2\0\0\0f8\x89\x88tR(K\3X\1\0\0\0<NNNJ"
                    + b"\xff" * 4 + b"J" + b"\xff" * 4 + b"K\0tb"
                    + tw.global_("_codecs", "encode") + b"(X\1\0\0\0aX\6\0\0\0latin1tRtR")
    value = tw.tiny()
    value["best_metrics"] = {"valid_en_clm_ppl": scalar}
    value["params"]["mask_scores"] = scalar
    value["params"]["pred_probs"] = tw.Tensor(np.zeros(3, np.float32))
    value["params"]["para_dataset"] = {("en", "fr"): {}}
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", value))


def test_batches_tracked_may_be_missing(tmp_path):
    name = "memories__1_in__query_proj__query_mlps__1__num_batches_tracked"
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny(**{name: None})))


def test_older_files_lack_options_and_get_the_originals_defaults(tmp_path):
    missing = {field: ... for field in (
        "use_lang_emb", "n_langs", "lang2id", "encoder_only", "asm", "mem_shuffle_query",
        "mem_v_dim", "mem_temperature", "mem_score_softmax", "mem_score_subtract",
        "mem_score_normalize", "mem_query_residual", "mem_input2d", "n_indices", "mem_size",
        "mem_modulo_size")}
    made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny(params=tw.tiny_params(**missing))))


# ---- types ------------------------------------------------------------------------------------

def nearest_even_bf16(array):
    """An independent rounding: the mantissa is cut to 8 bits in exact float64 arithmetic."""
    x = array.astype(np.float64)
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_matrices_are_rounded_to_nearest_even_and_vectors_are_not(dtype, tmp_path):
    weights = tw.tiny_weights()
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-8, 0, -0.0,
                     3e-38], np.float32)
    weights["ffns.0.lin1.weight"][0] = ties
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(weights=weights))
    got = made(tmp_path, source, "--dtype", dtype)
    assert json.loads((got / "config.json").read_text())["dtype"] == dtype
    rounded = tensors(got)
    for name, array in weights.items():
        if "num_batches" in name:
            continue
        due = array if array.ndim < 2 else nearest_even_bf16(array) if dtype == "bf16" \
            else array.astype(np.float16)
        np.testing.assert_array_equal(rounded[name], due, err_msg=name)
    header = (got / "model.safetensors").read_bytes()
    header = json.loads(header[8:8 + int.from_bytes(header[:8], "little")])
    assert header["ffns.0.lin1.weight"]["dtype"] == dtype.upper()
    assert header["ffns.0.lin1.bias"]["dtype"] == "F32"
    for entry in header.values():
        assert entry["data_offsets"][0] % (4 if entry["dtype"] == "F32" else 2) == 0


@pytest.mark.parametrize("dtype,value", [("f16", 65520.0), ("bf16", 3.4e38)])
def test_a_weight_too_large_for_the_type_is_refused(dtype, value, tmp_path, refused):
    weights = tw.tiny_weights()
    weights["ffns.0.lin1.weight"][3, 2] = value
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(weights=weights))
    refused(source, "ffns.0.lin1.weight", dtype.upper(), "%g" % value, args=("--dtype", dtype))
    made(tmp_path, source, "--dtype", "f32")


@pytest.mark.parametrize("chunk", [24, 5])
def test_pieces_join_without_a_seam(chunk, tmp_path, monkeypatch):
    import safetensors_file
    monkeypatch.setattr(safetensors_file, "CHUNK", chunk)
    weights = tw.tiny_weights()
    got = tensors(made(tmp_path, tw.write_zip(tmp_path / "c.pth", tw.tiny())))
    for name in ("embeddings.weight", "ffns.0.lin1.bias", "memories.1_in.keys"):
        np.testing.assert_array_equal(got[name], weights[name])


# ---- the command --------------------------------------------------------------------------------

@pytest.fixture
def tiny(tmp_path):
    return tw.write_zip(tmp_path / "c.pth", tw.tiny())


def test_vocab_and_tokenizer_are_copied(tiny, tmp_path):
    (tmp_path / "words").write_bytes(b"w\xc3\xa9\n" * 15 + b"last")
    for n, unknown in ((16, 0), (17, 16)):  # the last one is no word: it stands for what has none
        (tmp_path / "spm").write_bytes(pieces(n, unknown))
        got = made(tmp_path, tiny, "--vocab", tmp_path / "words", "--tokenizer", tmp_path / "spm")
        assert (got / "vocab.txt").read_bytes() == (tmp_path / "words").read_bytes()
        assert (got / "tokenizer.model").read_bytes() == pieces(n, unknown)
        assert "tokenizer" not in json.loads((got / "config.json").read_text())


def pieces(n, unknown):
    """A SentencePiece model of n pieces without any settings: {1: {1: text, 2: score, 3: type}}."""
    out = b""
    for i in range(n):
        piece = b"\x0a\x02%c!" % (65 + i) + b"\x15\0\0\0\0" + b"\x18%c" % (2 if i == unknown else 1)
        out += b"\x0a%c" % len(piece) + piece
    return out


def test_tokenizers_that_the_server_would_refuse(tiny, tmp_path, refused):
    for data, word in ((bytes(range(256)), "not a SentencePiece model"), (b"\x0a\x7f", "not a Sen"),
                       (pieces(16, -1), "got 16 and 0"), (pieces(15, 0), "15 pieces, but"),
                       (pieces(17, 0), "17 pieces, but the vocabulary has 16 words"),
                       (pieces(18, 17), "18 pieces, but")):
        (tmp_path / "spm").write_bytes(data)
        refused(tiny, "--tokenizer", word, args=("--tokenizer", tmp_path / "spm"))


def test_codes_that_the_server_would_refuse(tiny, tmp_path, refused):
    for data, word in ((b"a b\n", "line 1: 'left right count' expected"), (b"a b 3 4\n", "line 1"),
                       (b"a b 3\r\n", "line 1"), (b"a b -3\n", "line 1"), (b"a \xff 3\n", "line 1"),
                       (b"a b 3\n\n", "line 2"), (b" b 3\n", "line 1"), (b"a b 3\nxy z 1", "line 2 joins"),
                       (b"a b 3\nab c</w> 1\na b 1", "line 3 repeats")):
        (tmp_path / "fast").write_bytes(data)
        refused(tiny, "--codes", word, args=("--codes", tmp_path / "fast"))


def test_codes_are_copied(tiny, tmp_path, refused):
    (tmp_path / "fast").write_text("a b 3\n")
    got = made(tmp_path, tiny, "--codes", tmp_path / "fast")
    assert (got / "codes").read_text() == "a b 3\n"
    assert json.loads((got / "config.json").read_text())["tokenizer"] == "xlm"
    made(tmp_path, tiny)  # an earlier conversion is replaced, with what it had more
    assert not (got / "codes").exists()
    (tmp_path / "none").write_text("")
    refused(tiny, "--codes", "empty", args=("--codes", tmp_path / "none"))


def test_a_vocab_of_another_size_is_refused(tiny, tmp_path, refused):
    (tmp_path / "words").write_bytes(b"w\n" * 15)
    refused(tiny, "words", "16", "15", args=("--vocab", tmp_path / "words"))


def test_set_gives_what_the_file_lacks_and_nothing_else(tmp_path, refused):
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(params=tw.tiny_params(n_heads=...)))
    refused(source, "params.n_heads", "--set n_heads=")
    for value in ("[" * 100000, "9" * 5000, "NaN"):
        refused(source, "params.n_heads: an integer 1..1024 expected, got", args=("--set", "n_heads=" + value))
    got = made(tmp_path, source, "--set", "n_heads=4")
    assert json.loads((got / "config.json").read_text())["n_head"] == 4
    whole = tw.write_zip(tmp_path / "d.pth", tw.tiny())
    assert convert(whole, "--output", tmp_path / "x", "--set", "n_heads=4").status == 1


def test_an_earlier_conversion_is_replaced_and_other_files_are_not(tiny, tmp_path):
    got = made(tmp_path, tiny)
    (got / "config.json").write_text('{"model_type": "all_attention"}')
    assert made(tmp_path, tiny) == got and "pkm" in (got / "config.json").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pth", "model"]
    (tmp_path / "link").symlink_to(got)
    assert "link exists and is not a directory" in convert(tiny, "--output", tmp_path / "link").err
    for other in ("[" * 100000, "[]", "{", '{"model_type": "llama"}', '{"model_type": ["memory_llama"]}'):
        (got / "config.json").write_text(other)
        again = convert(tiny, "--output", got)
        assert again.status == 1 and "model holds what is no earlier conversion (config.json)" in again.err, again.err
        assert (got / "config.json").read_text() == other and len(list(got.iterdir())) > 2
    (got / "notes.txt").write_text("mine")
    (got / "extra.txt").write_text("mine")
    again = convert(tiny, "--output", got)
    assert again.status == 1 and "--output %s holds other files (extra.txt); give" % got in again.err
    assert (got / "notes.txt").read_text() == "mine" and (got / "config.json").exists()


def test_parents_are_made_and_the_mode_follows_the_umask(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    assert convert(tiny, "--output", tmp_path / "empty").status == 0
    assert convert(tiny, "--output", tmp_path / "a" / "b").status == 0
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == (tmp_path / "a").stat().st_mode & 0o777


@pytest.mark.parametrize("args", [
    [], ["c.pth"], ["c.pth", "--output"], ["c.pth", "--output", "d", "--dtype", "f8"],
    ["c.pth", "--output", "d", "--from", "gpt"], ["c.pth", "--output", "d", "--set", "n_heads"],
    ["c.pth", "--output", "d", "--set", "nonsense=1"], ["c.pth", "d", "--output", "e"],
    ["c.pth", "--output", "d", "--bogus"]])
def test_wrong_usage_ends_with_2(args):
    got = convert_program(*args)
    assert (got.status, got.out) == (2, "") and got.err.count("\n") == 1


@pytest.mark.parametrize("given", ["n_heads", "vocab_kind", "nonsense=1", "=1", "prefix=n_heads=1"])
def test_what_can_be_set_is_listed_to_the_end(given, tiny):
    got = convert(tiny, "-o", "d", "--set", given)
    assert got.status == 2 and "argument --set: KEY=VALUE expected, got '%s'; KEY is one of xlm: asm " % given in got.err
    assert got.err.endswith(
        " share_inout_emb sinusoidal_embeddings unk_index use_lang_emb use_memory; all-attention: adapt_span_ramp"
        " vocab_kind; memory-layers: bos_token_id eos_token_id; sparse-memory-lm: eos_token_id; hf: bos_token_id"
        " eos_token_id (--help shows the usage)\n")


def test_paths_that_cannot_be_read_or_written(tiny, tmp_path):
    for args, words in (((tmp_path / "none.pth", "--output", tmp_path / "o"), ["none.pth"]),
                        ((tmp_path, "--output", tmp_path / "o"), ["directory"]),
                        ((tiny, "--output", tiny), ["c.pth", "not a directory"]),
                        ((tiny, "--output", "/proc/none/o"), ["/proc/none"]),
                        ((tiny, "--output", tmp_path / "o", "--vocab", tmp_path / "no"), ["/no"])):
        got = convert_program(*args)
        assert got.status == 1 and got.err.count("\n") == 1, got.err
        assert all(word in got.err for word in words), got.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pth"]


def test_nothing_is_written_beside_the_program(tiny, tmp_path):
    from convert_harness import PROGRAM
    before = sorted(PROGRAM.parent.rglob("*"))
    assert convert_program(tiny, "--output", tmp_path / "o").status == 0
    assert sorted(PROGRAM.parent.rglob("*")) == before
