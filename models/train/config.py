"""config.json of a model to be trained: what train.py reads, with errors that name file and field.

The keys are those of a model directory (models/README.md), so a trained model's own file can be given
again. The server serves more than is trained here: what is not in these tables is refused by name.
"""
import json
import os

INT, REAL, BOOL, TEXT = "a whole number", "a number", "true or false", "a text"
MEMORIES_MAX = 64
TYPES = {INT: int, REAL: (int, float), BOOL: bool, TEXT: str}

# key: (type, least, most, needed)
SIZE = {"model_type": (TEXT, None, None, True), "vocab_size": (INT, 2, 1 << 16, False),
        "d_model": (INT, 1, 1 << 16, True), "n_layer": (INT, 1, 1024, True),
        "n_head": (INT, 1, 1024, True), "norm_eps": (REAL, 1e-30, 1, True),
        "tie_output": (BOOL, None, None, True), "add_bos": (BOOL, None, None, False),
        "dtype": (TEXT, None, None, False)}
IDS = {f"{name}_token_id": (INT, -1, 1 << 16, False) for name in ("bos", "eos", "pad", "unk")}
MEMORY = {"layer": (INT, 0, 1023, True), "n_head": (INT, 1, 1024, True), "k_top": (INT, 1, 1024, True),
          "n_key": (INT, 1, 1 << 24, True), "d_key": (INT, 1, 1 << 16, True),
          "n_slot": (INT, 1, (1 << 31) - 1, True), "values_of": (INT, 0, 63, False)}
FAMILIES = {
    "pkm_transformer": (
        SIZE | IDS | {"d_ff": (INT, 1, 1 << 20, True), "max_position": (INT, 1, 1 << 20, True),
                      "activation": (("gelu", "relu"), None, None, True)},
        MEMORY | {"place": (("in", "after"), None, None, True),
                  "kind": (("product", "flat"), None, None, True),
                  "query_batch_norm": (BOOL, None, None, True),
                  "query_bias": (BOOL, None, None, True)}),
    "memory_llama": (
        SIZE | IDS | {"d_ff": (INT, 1, 1 << 20, True), "max_position": (INT, 1, 1 << 20, True),
                      "rope_theta": (REAL, 1, 1e12, True), "n_kv_head": (INT, 1, 1024, False),
                      "d_head": (INT, 2, 1 << 16, False)},
        MEMORY | {"d_value": (INT, 1, 1 << 16, False), "value_projection": (BOOL, None, None, False),
                  "value_gate": (BOOL, None, None, False), "output_gate": (BOOL, None, None, False)}),
    "all_attention": (
        SIZE | IDS | {"d_ff": (INT, 0, 0, True), "n_persistent": (INT, 1, 1 << 20, True),
                      "max_span": (INT, 1, 1 << 20, True), "span_ramp": (INT, 1, 1 << 20, True),
                      "tokenizer": (("byte",), None, None, True)},
        None),
}


class ConfigError(Exception):
    """A sentence for whoever wrote the file."""


def check_type(where, value, kind):
    if isinstance(kind, tuple):
        if value not in kind:
            raise ConfigError(f"{where} is {json.dumps(value)}, but what is trained here is "
                              + " or ".join(json.dumps(k) for k in kind))
    elif not isinstance(value, TYPES[kind]) or (kind != BOOL and isinstance(value, bool)):
        raise ConfigError(f"{where} is {json.dumps(value)}, but must be {kind}")


def check_keys(where, given, table, lack):
    """Keys that are none of the table's, and values of another type than theirs."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where.removesuffix('.')} must be an object")
    for key, value in given.items():
        if key not in table:
            raise ConfigError(f"{where}{key} {lack} here; known keys: " + ", ".join(sorted(table)))
        check_type(where + key, value, table[key][0])


def check_table(where, given, table):
    check_keys(where, given, table, "cannot be trained")
    for key, (_, least, most, needed) in table.items():
        if key not in given:
            if needed:
                raise ConfigError(f"{where}{key} is missing")
        elif least is not None and not least <= given[key] <= most:
            raise ConfigError(f"{where}{key} is {given[key]}, but must be from {least} to {most}")


def check_memory(where, m, memories, config):
    product = m.get("kind", "product") == "product"
    n_slot = m["n_key"] ** 2 if product else m["n_key"]
    if m["n_slot"] != n_slot:
        raise ConfigError(f"{where}n_slot is {m['n_slot']}, but n_key {m['n_key']} makes {n_slot}")
    if product and m["d_key"] % 2:
        raise ConfigError(f"{where}d_key is {m['d_key']}, but product keys need an even one")
    if m["k_top"] > m["n_key"]:
        raise ConfigError(f"{where}k_top is {m['k_top']}, but n_key is only {m['n_key']}")
    if m["layer"] >= config["n_layer"]:
        raise ConfigError(f"{where}layer is {m['layer']}, but n_layer is {config['n_layer']}")
    if m.get("value_gate") and not m.get("value_projection"):
        raise ConfigError(f"{where}value_gate needs value_projection")
    if m.get("d_value", config["d_model"]) != config["d_model"] and not m.get("value_projection"):
        raise ConfigError(f"{where}d_value is {m['d_value']}: without value_projection it must be "
                          f"d_model, {config['d_model']}")
    if "values_of" in m:
        if m["values_of"] >= len(memories):
            raise ConfigError(f"{where}values_of is {m['values_of']}, which is no earlier memory")
        owner = memories[m["values_of"]]
        if owner["n_slot"] != m["n_slot"] or owner.get("d_value") != m.get("d_value"):
            raise ConfigError(f"{where}values_of: memories[{m['values_of']}] has another n_slot or "
                              "d_value")
    if memories and place(memories[-1]) >= place(m):
        raise ConfigError(f"{where}layer and place must come behind those of the memory before")


def family_fields(config):
    """-> (what its keys may say, what those of its memories may)"""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(f"model_type is {json.dumps(family)}, but must be " + ", ".join(FAMILIES))
    return FAMILIES[family]


def place(m):
    return m["layer"], m.get("place", "in") == "after"


def check(config, vocab_size=None):
    """-> the configuration, with the vocabulary of the data if it names none; or ConfigError"""
    if not isinstance(config, dict):
        raise ConfigError("the file must hold one JSON object")
    fields, memory_fields = family_fields(config)
    family, memories = config["model_type"], config.get("memories", [])
    rest = {key: value for key, value in config.items() if key != "memories"}
    check_table("", rest, fields)
    if family == "all_attention":
        vocab_size = 256  # Its tokens are bytes, whatever tokenizer lies beside them.
        if rest.setdefault("vocab_size", vocab_size) != vocab_size:
            raise ConfigError(f"vocab_size is {rest['vocab_size']}, but must be 256, for tokens are bytes")
    if vocab_size is not None and rest.setdefault("vocab_size", vocab_size) != vocab_size:
        raise ConfigError(f"vocab_size is {rest['vocab_size']}, but the data's tokenizer has "
                          f"{vocab_size} pieces: give that number, or leave the key out")
    if "vocab_size" not in rest:
        raise ConfigError("vocab_size is missing, and the data have no meta.json that says it")
    if "d_head" not in rest and rest["d_model"] % rest["n_head"]:
        raise ConfigError(f"d_model is {rest['d_model']}, no multiple of n_head {rest['n_head']}")
    d_head = rest.get("d_head", rest["d_model"] // rest["n_head"])
    if family == "memory_llama" and d_head % 2:
        raise ConfigError(f"a head has {d_head} columns, but rotary positions need an even number")
    if rest["n_head"] % rest.get("n_kv_head", 1):
        raise ConfigError(f"n_head is {rest['n_head']}, no multiple of n_kv_head {rest['n_kv_head']}")
    if family != "all_attention" and rest.get("bos_token_id", -1) < 0:
        raise ConfigError("bos_token_id is missing: documents begin with it")
    for key in IDS:
        if rest.get(key, -1) >= rest["vocab_size"]:
            raise ConfigError(f"{key} is {rest[key]}, but vocab_size is {rest['vocab_size']}")
    if "memories" not in config:
        return rest
    if memory_fields is None or not isinstance(memories, list):
        raise ConfigError("memories must be a list, of a family that has memories")
    if len(memories) > MEMORIES_MAX:
        raise ConfigError(f"memories are {len(memories)}, but at most {MEMORIES_MAX} are served")
    for i, m in enumerate(memories):
        check_table(f"memories[{i}].", m, memory_fields)
        check_memory(f"memories[{i}].", m, memories[:i], rest)
    return rest | {"memories": memories}


def check_known(config):
    """ConfigError for what the models here do not compute: a served model may be larger than one that is trained,
    but what its keys say must not be passed over."""
    fields, memory_fields = family_fields(config)
    memories = config.get("memories", [])
    if not isinstance(memories, list):
        raise ConfigError(f"memories is {json.dumps(memories)}, but must be a list")
    check_keys("", {key: value for key, value in config.items() if key != "memories"}, fields, "is not computed")
    for i, m in enumerate(memories):
        check_keys(f"memories[{i}].", m, memory_fields or {}, "is not computed")


def read(path, vocab_size=None):
    """-> the checked configuration of a file, or ConfigError that names it"""
    try:
        with open(path, encoding="utf-8") as f:
            return check(json.load(f), vocab_size)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ConfigError) as e:
        raise ConfigError(f"{path}: {e}") from None


def without_memories(config):
    """The dense twin: networks in place of the memories."""
    return config | {"memories": []} if "memories" in config else config


def shipped(name):
    """Path of one of our own configurations."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "configs", name + ".json")
