"""What config.json and generation_config.json of a Hugging Face directory say, checked field by field.

hf.py asks for a struct of plain numbers (read). The kinds of models are those of KINDS, by model_type;
of the file only what their code in the transformers package reads is looked at, and what is absent has
that package's default. Whatever the model cannot be served with is refused by the field's name: other
models, windows of attention, rotary positions of other kinds, quantised weights.
"""

import os
from ctypes import c_float
from types import SimpleNamespace

from fault import Refused, show
from json_file import Fields, load

NAME, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
ADDED = "added_tokens.json"
BYTES_MAX, TOKENIZER_MAX = 1 << 20, 16 << 20  # the latter may list all added tokens
WIDTH_MAX, COUNT_MAX, FF_MAX, POSITION_MAX, VOCAB_MAX = 1 << 16, 1024, 1 << 20, 1 << 20, 1 << 24
THETA_MAX, FACTOR_MAX = 1e12, 1e6
END_MAX = 16  # ids that end a text

ORIGINAL = "original_max_position_embeddings"

COMMON = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": None, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": None,
    ORIGINAL: None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28,
    "layer_types": None, "attention_bias": False, "mlp_bias": False, "quantization_config": None,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}
QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
        "max_position_embeddings": 32768, "sliding_window": 4096}
# By model_type: defaults that differ, and .qkv_bias, .out_bias, .ffn_bias: always (True), never (False),
# or as the field says that is named; .norms: whether queries and keys are normed; .window: whether
# attention may have one: never, by sliding_window, or as Qwen's.
KINDS = {
    "llama": SimpleNamespace(
        architecture="LlamaForCausalLM", defaults={"bos_token_id": 1, "eos_token_id": 2},
        qkv_bias="attention_bias", out_bias="attention_bias", ffn_bias="mlp_bias", norms=False,
        window=None),
    "mistral": SimpleNamespace(
        architecture="MistralForCausalLM", qkv_bias=False, out_bias=False, ffn_bias=False, norms=False,
        defaults={"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096,
                  "max_position_embeddings": 4096 * 32, "bos_token_id": 1, "eos_token_id": 2},
        window="sliding_window"),
    "qwen2": SimpleNamespace(
        architecture="Qwen2ForCausalLM", defaults=QWEN, qkv_bias=True, out_bias=False, ffn_bias=False,
        norms=False, window="layers"),
    "qwen3": SimpleNamespace(
        architecture="Qwen3ForCausalLM", defaults={**QWEN, "head_dim": 128}, qkv_bias="attention_bias",
        out_bias="attention_bias", ffn_bias=False, norms=True, window="layers"),
}
TOKENIZER_OF = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
# Of generation_config.json: name, whether a number is in the server's bounds, and these. It computes in fp32.
SAMPLING = (("temperature", lambda x: 0 <= x <= 2, "0 <= number <= 2"),
            ("top_p", lambda x: 0 < c_float(x).value <= 1, "0 < number <= 1 in fp32"),
            ("min_p", lambda x: 0 <= c_float(x).value < 1, "0 <= number < 1 in fp32"),
            ("repetition_penalty", lambda x: 1e-6 <= x <= 10, "1e-06 <= number <= 10"))
# What would change the text that a plain request gets, and is not served; the value that changes nothing.
NOT_SERVED = {"num_beams": 1, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None,
              "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "bad_words_ids": None,
              "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None,
              "forced_bos_token_id": None, "forced_eos_token_id": None, "penalty_alpha": None,
              "diversity_penalty": 0, "exponential_decay_length_penalty": None, "guidance_scale": None}


# ---- attention ----------------------------------------------------------------------------------


def _read_heads(f, p):
    p.n_head = f.count("num_attention_heads", 1, COUNT_MAX)
    p.n_kv_head = p.n_head
    if f.get("num_key_value_heads") is not None:
        p.n_kv_head = f.count("num_key_value_heads", 1, p.n_head)
        if p.n_head % p.n_kv_head:
            f.refuse("num_key_value_heads", "%d does not divide the %d heads" % (p.n_kv_head, p.n_head))
    if f.get("head_dim") is not None:
        p.d_head = f.even("head_dim", WIDTH_MAX)
    else:
        p.d_head = p.d_model // p.n_head
        if p.d_model % p.n_head or p.d_head % 2:
            f.refuse("num_attention_heads", "hidden_size %d is not %d heads of an even width, and no"
                     " head_dim says otherwise" % (p.d_model, p.n_head))
    if p.n_head * p.d_head > WIDTH_MAX:
        f.refuse("head_dim", "%d heads of %d are wider than the limit of %d"
                 % (p.n_head, p.d_head, WIDTH_MAX))


def _layer_types(f, p):
    """The kind of attention of each layer that Qwen's fields say."""
    types = f.get("layer_types")
    if types is None:
        first = f.count("max_window_layers", 0, 1 << 31)
        return ["full_attention" if i < first else "sliding_attention" for i in range(p.n_layer)]
    if not isinstance(types, list) or len(types) != p.n_layer:
        f.refuse("layer_types", "%d names expected, one for each layer, got %s"
                 % (p.n_layer, show(types)))
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            f.refuse("layer_types", "full_attention expected, got %s" % show(name))
    return types


def _check_window(f, p, kind):
    """Refuses layers in which a token sees only some positions before it. A window as long as the context
    is none."""
    if kind.window is None:
        return
    if kind.window == "layers":
        is_used = f.flag("use_sliding_window")
        has_some = "sliding_attention" in (_layer_types(f, p) if is_used or f.get("layer_types") else ())
        if has_some and not is_used:
            f.refuse("layer_types", "sliding_attention, but use_sliding_window is false")
        if not has_some:
            return
    if f.get("sliding_window") is not None \
            and f.count("sliding_window", 1, 1 << 31) < p.n_position:
        f.refuse("sliding_window", "%d, below max_position_embeddings %d: attention in a window is not"
                 " served; null expected" % (f.get("sliding_window"), p.n_position))


# ---- rotary positions ---------------------------------------------------------------------------

ROPE = ("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "rope_theta",
        "partial_rotary_factor", ORIGINAL)


def _rope_object(f):
    """(fields, name of the object that tells of rotary positions): older files have rope_scaling."""
    old, new = f.get("rope_scaling"), f.get("rope_parameters")
    if old is not None and new is not None and old != new:
        f.refuse("rope_scaling", "%s, but rope_parameters is %s: one of them expected"
                 % (show(old), show(new)))
    field = "rope_parameters" if old is None else "rope_scaling"
    rope = {} if f.get(field) is None else f.get(field)
    if not isinstance(rope, dict):
        f.refuse(field, "an object expected, got %s" % show(rope))
    return Fields({**f.root, field: rope}, f.name,
                  {**f.defaults, **{"%s.%s" % (field, name): None for name in ROPE}}), field


def _either(f, field, name):
    """The place of what may stand in the object or, in older files, beside it."""
    inner, outer = f.get("%s.%s" % (field, name)), f.get(name)
    if inner is not None and outer is not None and inner != outer:
        f.refuse(name, "%s, but %s.%s is %s" % (show(outer), field, name, show(inner)))
    return name if inner is None else "%s.%s" % (field, name)


def _read_rope(f, p):
    """p.rope_theta, and p.rope_scaling: as our config.json has it, or None."""
    f, field = _rope_object(f)
    theta = _either(f, field, "rope_theta")
    p.rope_theta = 10000.0 if f.get(theta) is None else f.number(
        theta, lambda x: 1 <= x <= THETA_MAX, "a number 1..%g" % THETA_MAX)
    part = _either(f, field, "partial_rotary_factor")
    if f.get(part) is not None and f.get(part) != 1:
        f.refuse(part, "%s: heads of which a part is turned are not served; 1 expected"
                 % show(f.get(part)))
    kind = field + (".rope_type" if f.get(field + ".type") is None else ".type")
    name = "default" if f.get(kind) is None else f.get(kind)
    p.rope_scaling = None
    if name not in ("default", "linear", "llama3"):
        f.refuse(kind, "%s: rotary positions of this kind are not served; default, linear or llama3"
                 " expected" % show(name))
    if name != "default":
        p.rope_scaling = _scaling(f, p, field, name)


def _scaling(f, p, field, name):
    def factor(key, least):
        return f.number("%s.%s" % (field, key), lambda x: least <= x <= FACTOR_MAX,
                        "a number %g..%g" % (least, FACTOR_MAX))

    scaling = {"rope_type": name, "factor": factor("factor", 1)}
    if name == "llama3":
        low, high = factor("low_freq_factor", 1e-6), factor("high_freq_factor", 1e-6)
        if high <= low:
            f.refuse(field + ".high_freq_factor", "%g, not above low_freq_factor %g" % (high, low))
        original = _either(f, field, ORIGINAL)
        scaling.update({"low_freq_factor": low, "high_freq_factor": high,
                        ORIGINAL: p.n_position if f.get(original) is None
                        else f.count(original, 1, POSITION_MAX)})
    return scaling


# ---- the model ----------------------------------------------------------------------------------


def _kind(root):
    name = root.get("model_type")
    if not isinstance(name, str) or name not in KINDS:
        raise Refused("%s: model_type: one of %s expected, got %s" % (NAME, " ".join(KINDS), show(name)))
    kind = KINDS[name]
    given = root.get("architectures")
    if given is not None and given != [kind.architecture]:
        raise Refused("%s: architectures: [%s] expected of model_type %s, got %s"
                      % (NAME, show(kind.architecture), name, show(given)))
    return name, kind


def _option(f, option):
    return f.flag(option) if isinstance(option, str) else option


def _read_model(root):
    name, kind = _kind(root)
    f = Fields(root, NAME, {**COMMON, **kind.defaults})
    quantised = f.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        f.refuse("quantization_config", "%s: weights quantised elsewhere are not served; convert the"
                 " ones they were made from, with --dtype int8 if wanted" % show(method))
    p = SimpleNamespace(kind=name, norms=kind.norms)
    p.d_model = f.count("hidden_size", 1, WIDTH_MAX)
    p.n_layer = f.count("num_hidden_layers", 1, COUNT_MAX)
    p.d_ff = f.count("intermediate_size", 1, FF_MAX)
    p.n_vocab = f.count("vocab_size", 1, VOCAB_MAX)
    p.n_position = f.count("max_position_embeddings", 1, POSITION_MAX)
    p.norm_eps = f.epsilon("rms_norm_eps")
    p.tie_output = f.flag("tie_word_embeddings")
    f.choice("hidden_act", ("silu", "swish"))
    _read_heads(f, p)
    _check_window(f, p, kind)
    _read_rope(f, p)
    p.qkv_bias, p.out_bias = _option(f, kind.qkv_bias), _option(f, kind.out_bias)
    p.ffn_bias = _option(f, kind.ffn_bias)
    return f, p


# ---- ids and sampling ---------------------------------------------------------------------------


def _ids(f, field, p):
    """The ids of a field, a number or a list of them, that the vocabulary has; others are never
    generated, and noted."""
    value = f.get(field)
    several = field == "eos_token_id" and isinstance(value, list)
    ids = []
    for one in value if several else [] if value is None else [value]:
        if not isinstance(one, int) or isinstance(one, bool) or not -1 <= one <= 1 << 31:
            f.refuse(field, "an id%s expected, got %s" % (
                " or a list of ids" if field == "eos_token_id" else "", show(value)))
        if one >= p.n_vocab:
            p.notes.append("%s %d of %s is beyond the vocabulary and left out" % (field, one, f.name))
        elif one >= 0 and one not in ids:
            ids.append(one)
    if len(ids) > END_MAX:
        f.refuse(field, "%d ids, the limit is %d" % (len(ids), END_MAX))
    return ids


def _read_ids(f, g, p):
    """Those that generation_config.json gives are those that end a text there."""
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = _ids(g, field, p) if g is not None and g.get(field) is not None else _ids(f, field, p)
        setattr(p, field, ids if field == "eos_token_id" else ids[0] if ids else None)


def _read_sampling(g, p):
    """p.sampling: {name: value}, the generation_config.json of ours: how to draw where a request says
    nothing."""
    p.sampling = {}
    if g is None:
        return
    draws = None if g.get("do_sample") is None else g.flag("do_sample")
    for name, fits, due in SAMPLING:
        if g.get(name) is not None:
            p.sampling[name] = g.number(name, fits, due)
    if g.get("top_k") is not None:
        p.sampling["top_k"] = g.count("top_k", -1, VOCAB_MAX)
        if not 0 < p.sampling["top_k"] < p.n_vocab:
            del p.sampling["top_k"]  # all words
    if draws is False:  # transformers then takes the likeliest word, whatever else is said
        p.sampling = {name: value for name, value in p.sampling.items()
                      if name == "repetition_penalty"}
        p.sampling["temperature"] = 0.0
    for name, plain in NOT_SERVED.items():
        if g.get(name) not in (None, plain, []):
            p.notes.append("%s: %s is not served and left out" % (GENERATION, name))


def read(folder):
    """The checked sizes and options of the directory. .notes: what the summary adds."""
    f, p = _read_model(load(os.path.join(folder, NAME), BYTES_MAX))
    p.notes, path, g = [], os.path.join(folder, GENERATION), None
    if os.path.isfile(path):
        fields = ("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "top_k",
                  *(name for name, *_ in SAMPLING), *NOT_SERVED)
        g = Fields(load(path, BYTES_MAX), GENERATION, dict.fromkeys(fields))
    _read_ids(f, g, p)
    _read_sampling(g, p)
    return p


def _tokenizer_fields(folder):
    """Of tokenizer_config.json, or None without one."""
    path = os.path.join(folder, TOKENIZER)
    known = {"add_bos_token": None, "add_prefix_space": False, "tokenizer_class": None}
    return Fields(load(path, TOKENIZER_MAX), TOKENIZER, known) if os.path.isfile(path) else None


def begins_texts(folder):
    """Whether tokenizer_config.json says that the tokenizer puts the id that begins a text before each;
    None where it does not say."""
    f = _tokenizer_fields(folder)
    return None if f is None or f.get("add_bos_token") is None else f.flag("add_bos_token")


def check_pair(folder, kind):
    """vocab.json and merges.txt do not say how a text is cut and which tokens were added, and are read as
    GPT-2's: refused where what stands beside them, or the kind of model, says that they are another's."""
    f, due = _tokenizer_fields(folder), "GPT2Tokenizer"
    name = None if f is None else f.get("tokenizer_class")
    if name is None and kind in TOKENIZER_OF:
        raise Refused("vocab.json with merges.txt is read as GPT-2's, but a %s model has a %s: its tokenizer.json"
                      " is needed" % (kind, TOKENIZER_OF[kind]))
    if name is not None and str(name).removesuffix("Fast") != due:
        f.refuse("tokenizer_class", "%s expected beside vocab.json with merges.txt, got %s: the tokenizer.json of"
                 " that one is needed" % (due, show(name)))
    if f is not None and f.get("add_prefix_space") not in (None, False):
        f.refuse("add_prefix_space", "%s: a space before each text is not served" % show(f.get("add_prefix_space")))
    path = os.path.join(folder, ADDED)
    others = sorted(set(load(path, TOKENIZER_MAX)) - {"<|endoftext|>"}) if os.path.isfile(path) else []
    if others:
        raise Refused("%s: %s and %d others: tokens that were added to vocab.json are served from a tokenizer.json,"
                      " which is needed" % (ADDED, show(others[0]), len(others) - 1))
