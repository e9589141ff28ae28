"""What the `params` and the dictionary of an XLM checkpoint say, checked field by field.

xlm.py asks for a struct of plain numbers (read) and for the words (read_words). Everything the
model cannot be served with is refused here, by the field's name: combinations the original
rejects, and models of another kind (translation, masked, image memories). Options that only
matter in training are not looked at.
"""

from types import SimpleNamespace

from fault import Refused, show

SPECIAL_WORDS = ["<s>", "</s>", "<pad>", "<unk>"] + ["<special%d>" % i for i in range(10)]
INDICES = {"bos_index": 0, "eos_index": 1, "pad_index": 2, "unk_index": 3}
LANG_MAX, LANG_NAME_MAX = 256, 63
MEMORY_MAX = 64
CUTOFF_MAX = 16
HIDDEN_MAX = 8  # of a query network

# Fields a file may lack, with the value the original gives them; the first group can be missing in
# any file, the second in a file with memories that is older than the option. All others must be
# there, or be given with --set: a wrong number of heads would load and compute nonsense.
DEFAULTS = {
    "encoder_only": True, "use_memory": False, "use_lang_emb": True, "n_langs": 1, "lang2id": None,
    "asm": False, "asm_cutoffs": None, "asm_div_value": 4, "sinusoidal_embeddings": False,
    "bos_index": 0, "eos_index": 1, "pad_index": 2, "unk_index": 3,
    "mem_input2d": False, "mem_query_kernel_sizes": "", "mem_query_residual": False,
    "mem_v_dim": -1, "mem_use_different_keys": True, "mem_keys_type": "uniform",
    "mem_query_layer_sizes": [0, 0], "mem_query_bias": True, "mem_query_batchnorm": False,
    "mem_multi_query_net": False, "mem_grouped_conv": False, "mem_shuffle_query": False,
    "mem_shuffle_indices": False, "mem_modulo_size": -1, "mem_normalize_query": False,
    "mem_temperature": 1, "mem_score_softmax": True, "mem_score_subtract": "",
    "mem_score_normalize": False, "mem_share_values": False, "mem_n_keys": None,
    "n_indices": None, "mem_size": None,
}
REQUIRED = ["n_layers", "emb_dim", "n_heads", "n_words", "gelu_activation", "share_inout_emb",
            "clm_steps"]
REQUIRED_MEMORY = ["mem_enc_positions", "mem_implementation", "mem_heads", "mem_knn", "mem_k_dim"]
SETTABLE = sorted(set(DEFAULTS) | set(REQUIRED) | set(REQUIRED_MEMORY))


def refuse(field, text):
    raise Refused("params.%s: %s" % (field, text))


class Fields:
    """Typed access to params, with --set filling what the file lacks."""

    def __init__(self, params, settings):
        if not isinstance(params, dict):
            raise Refused("params: a dictionary expected, got %s" % show(params))
        self.params = params
        for field, value in settings.items():
            if field in params and params[field] != value:
                refuse(field, "the file says %s; --set gives only what a file lacks"
                       % show(params[field]))
        self.settings = settings

    def get(self, field):
        if field in self.params:
            return self.params[field]
        if field in self.settings:
            return self.settings[field]
        if field in DEFAULTS:
            return DEFAULTS[field]
        return refuse(field, "missing; give it with --set %s=VALUE" % field)

    def flag(self, field):
        value = self.get(field)
        if not isinstance(value, bool):
            refuse(field, "true or false expected, got %s" % show(value))
        return value

    def count(self, field, low, high, more=""):
        value = self.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            refuse(field, "an integer %d..%d%s expected, got %s" % (low, high, more, show(value)))
        return value

    def number(self, field):
        value = self.get(field)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            refuse(field, "a number expected, got %s" % show(value))
        return value


def _check_objective(f):
    if not f.flag("encoder_only"):
        refuse("encoder_only", "false: a translation model, not a language model")
    steps = f.get("clm_steps")
    if not isinstance(steps, (list, tuple)) or not all(
            isinstance(step, (list, tuple)) and len(step) == 2 for step in steps):
        refuse("clm_steps", "a list of (language, language or none) expected, got %s" % show(steps))
    if not steps:
        refuse("clm_steps", "empty: not a causal language model (masked models look the same)")
    if all(step[1] is not None for step in steps):
        refuse("clm_steps", "only pairs, %s: positions restart inside a sequence, not served"
               % show(steps))
    for field, due in INDICES.items():
        if f.get(field) != due:
            refuse(field, "%d expected, got %s" % (due, show(f.get(field))))


def _languages(f):
    """The names of the languages in the order of their ids; empty without a language table."""
    n = f.count("n_langs", 1, LANG_MAX)
    if n == 1 or not f.flag("use_lang_emb"):
        return []
    ids = f.get("lang2id")
    if not isinstance(ids, dict) or len(ids) != n:
        refuse("lang2id", "%d languages expected, got %s" % (n, show(ids)))
    by_id = {index: name for name, index in ids.items()
             if isinstance(index, int) and not isinstance(index, bool)}
    names = [by_id.get(index) for index in range(n)]
    for name in names:
        if not isinstance(name, str) or not name.isprintable() \
                or not 1 <= len(name.encode("utf-8", "replace")) <= LANG_NAME_MAX:
            refuse("lang2id", "ids 0..%d with names of 1..%d bytes expected, got %s"
                   % (n - 1, LANG_NAME_MAX, show(ids)))
    return names


def _adaptive(f, p):
    """Of the adaptive softmax: the first word of each tail, and how wide its projection is."""
    cutoffs = f.get("asm_cutoffs")
    if not isinstance(cutoffs, (list, tuple)) or not 1 <= len(cutoffs) <= CUTOFF_MAX \
            or not all(isinstance(c, int) and not isinstance(c, bool) for c in cutoffs) \
            or any(a >= b for a, b in zip([0, *cutoffs], [*cutoffs, p.n_vocab])):
        refuse("asm_cutoffs", "1 to %d ascending numbers below n_words = %d expected, got %s"
               % (CUTOFF_MAX, p.n_vocab, show(cutoffs)))
    div = f.number("asm_div_value")
    if not 1 <= div <= p.d_model:
        refuse("asm_div_value", "a number 1..%d expected, got %s" % (p.d_model, show(div)))
    widths = [int(p.d_model // div ** (i + 1)) for i in range(len(cutoffs))]
    if widths[-1] < 1:
        refuse("asm_div_value", "%s leaves tail %d without a column" % (show(div), len(widths) - 1))
    return list(cutoffs), widths


def _positions(f, n_layer):
    """[(layer, after)] in order of execution."""
    raw = f.get("mem_enc_positions")
    if not isinstance(raw, (list, tuple)) or len(raw) > MEMORY_MAX:
        refuse("mem_enc_positions", "a list of at most %d places expected, got %s"
               % (MEMORY_MAX, show(raw)))
    places = []
    for item in raw:
        if not isinstance(item, (list, tuple)) or len(item) != 2 or item[1] not in ("in", "after"):
            refuse("mem_enc_positions", "(layer, 'in' or 'after') expected, got %s" % show(item))
        layer = item[0]
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < n_layer:
            refuse("mem_enc_positions", "a layer 0..%d expected, got %s"
                   % (n_layer - 1, show(layer)))
        places.append((layer, item[1] == "after"))
    if len(set(places)) != len(places):
        refuse("mem_enc_positions", "the same place twice in %s" % show(raw))
    return sorted(places)


def _query_sizes(f):
    """[] for the identity query, else the layer sizes, where 0 stands for input and output."""
    sizes = f.get("mem_query_layer_sizes")
    if sizes == "":
        return []
    if not isinstance(sizes, (list, tuple)) or len(sizes) < 2 or not all(
            isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= 65536 for n in sizes) \
            or sizes[0] != 0 or sizes[-1] != 0 or 0 in sizes[1:-1] or len(sizes) > HIDDEN_MAX + 2:
        refuse("mem_query_layer_sizes", "[0, width, .., 0] with at most %d widths, or '' expected,"
               " got %s" % (HIDDEN_MAX, show(sizes)))
    return list(sizes)


def _refuse_impossible(f, m):
    """What no checkpoint of the original can contain, or what belongs to image models."""
    for field in ("mem_input2d", "mem_query_residual"):
        if f.flag(field):
            refuse(field, "true: a memory for images, not served")
    if f.get("mem_query_kernel_sizes") not in ("", None, [], ()):
        refuse("mem_query_kernel_sizes", "%s: a memory for images, not served"
               % show(f.get("mem_query_kernel_sizes")))
    implementation = f.get("mem_implementation")
    if implementation not in ("pq_fast", "pq_default", "flat"):
        refuse("mem_implementation", "pq_fast, pq_default or flat expected, got %s"
               % show(implementation))
    if f.get("mem_score_subtract") not in ("", "min", "mean", "median"):
        refuse("mem_score_subtract", "'', min, mean or median expected, got %s"
               % show(f.get("mem_score_subtract")))
    v_dim = f.get("mem_v_dim")
    if v_dim != -1 and v_dim != m.d_model:
        refuse("mem_v_dim", "-1 or emb_dim = %d expected, got %s" % (m.d_model, show(v_dim)))
    if not m.flat and m.d_key % 2:
        refuse("mem_k_dim", "an even number expected with product keys, got %d" % m.d_key)
    if not m.query_sizes and m.d_key != m.d_model:
        refuse("mem_k_dim", "emb_dim = %d expected with the identity query, got %d"
               % (m.d_model, m.d_key))
    if f.flag("mem_score_softmax") and f.flag("mem_score_normalize") \
            and f.get("mem_score_subtract") == "":
        refuse("mem_score_normalize", "true after a softmax needs mem_score_subtract")
    if m.k_top == 1 and f.flag("mem_score_normalize") and f.get("mem_score_subtract") != "":
        refuse("mem_knn", "1 with mem_score_subtract and mem_score_normalize divides 0 by 0")
    if f.flag("mem_grouped_conv") and not f.flag("mem_multi_query_net"):
        refuse("mem_grouped_conv", "true needs mem_multi_query_net")
    if f.flag("mem_multi_query_net") and m.query_sizes in ([], [0, 0]):
        refuse("mem_multi_query_net", "true needs more than two mem_query_layer_sizes")
    if m.per_half and m.d_key % 2:
        refuse("mem_k_dim", "an even number expected with mem_multi_query_net, got %d" % m.d_key)
    if f.flag("mem_shuffle_query") and m.query_sizes:
        refuse("mem_shuffle_query", "true needs mem_query_layer_sizes = ''")
    if f.flag("mem_shuffle_query") and m.n_head > 1 and m.d_model % 2 ** min(m.n_head, 17):
        refuse("mem_shuffle_query", "emb_dim = %d is not divisible by 2^mem_heads = 2^%d"
               % (m.d_model, m.n_head))
    if m.modulo != -1:
        n_indices = f.get("n_indices")
        most = n_indices - 1 if isinstance(n_indices, int) else 2 ** 31 - 1
        f.count("mem_modulo_size", 1, most, " or -1")
    if not 1e-6 <= m.temperature <= 1e6:
        refuse("mem_temperature", "1e-6 to 1e6 expected, got %s" % show(m.temperature))


def _read_memory(f, p, places):
    m = SimpleNamespace(d_model=p.d_model, places=places)
    m.flat = f.get("mem_implementation") == "flat"
    m.n_head = f.count("mem_heads", 1, 1024)
    m.k_top = f.count("mem_knn", 1, 1024)
    m.d_key = f.count("mem_k_dim", 1, 65536)
    m.query_sizes = _query_sizes(f)
    m.query_bias = f.flag("mem_query_bias")
    m.batch_norm = f.flag("mem_query_batchnorm")
    m.sizes = {field: f.get(field) for field in ("mem_n_keys", "n_indices", "mem_size")}
    m.per_half = f.flag("mem_multi_query_net")
    m.grouped = f.flag("mem_grouped_conv")
    m.query_normalize = f.flag("mem_normalize_query")
    m.shared_keys = not f.flag("mem_use_different_keys")
    m.binary_keys = f.get("mem_keys_type") == "binary"
    m.slot_map = f.flag("mem_shuffle_indices")
    m.modulo = f.get("mem_modulo_size")
    m.temperature = f.number("mem_temperature")
    m.softmax = f.flag("mem_score_softmax")
    m.subtract = f.get("mem_score_subtract") or "none"
    m.normalize = f.flag("mem_score_normalize")
    m.share_values = f.flag("mem_share_values")
    _refuse_impossible(f, m)
    m.hidden = m.query_sizes[1:-1]
    m.has_network = bool(m.query_sizes)
    m.query = "per_half" if m.per_half else "mlp" if m.has_network \
        else "shuffled" if f.flag("mem_shuffle_query") else "identity"
    m.query_bias = m.query_bias and m.has_network
    m.batch_norm = m.batch_norm and m.has_network
    return m


def read(params, settings):
    """The checked sizes and options; .memory is None for a model without one."""
    f = Fields(params, settings)
    _check_objective(f)
    p = SimpleNamespace()
    p.n_layer = f.count("n_layers", 1, 1024)
    p.d_model = f.count("emb_dim", 1, 65536)
    p.n_head = f.count("n_heads", 1, 1024)
    if p.d_model % p.n_head:
        refuse("n_heads", "emb_dim = %d is not divisible by %d" % (p.d_model, p.n_head))
    p.n_vocab = f.count("n_words", len(SPECIAL_WORDS), 1 << 24)
    p.gelu = f.flag("gelu_activation")
    p.tie_output = f.flag("share_inout_emb")
    p.cutoffs = []
    if f.flag("asm"):
        if p.tie_output:
            refuse("asm", "true needs share_inout_emb = false")
        p.cutoffs, p.widths = _adaptive(f, p)
    p.languages = _languages(f)
    bptt = params.get("bptt")  # the evaluation's window: only told to the user
    p.bptt = bptt if type(bptt) is int and 2 <= bptt <= 1 << 20 else None
    p.memory = None
    if f.flag("use_memory"):
        places = _positions(f, p.n_layer)
        p.memory = _read_memory(f, p, places) if places else None
    return p


def read_words(root, n_vocab):
    """The words in the order of their ids, or None where the file has no dictionary."""
    if "dico_id2word" not in root:
        return None
    words = root["dico_id2word"]
    if not isinstance(words, dict) or len(words) != n_vocab:
        raise Refused("dico_id2word: n_words = %d words expected, got %s"
                      % (n_vocab, len(words) if isinstance(words, dict) else show(words)))
    listed = []
    for index in range(n_vocab):
        word = words.get(index)
        if not isinstance(word, str):
            raise Refused("dico_id2word: id %d: a word expected, got %s" % (index, show(word)))
        if index < len(SPECIAL_WORDS) and word != SPECIAL_WORDS[index]:
            raise Refused("dico_id2word: id %d: '%s' expected, got %s"
                          % (index, SPECIAL_WORDS[index], show(word)))
        listed.append(word)
    inverse = root.get("dico_word2id")
    if not isinstance(inverse, dict) or len(inverse) != n_vocab:
        raise Refused("dico_word2id: n_words = %d words expected, got %s"
                      % (n_vocab, len(inverse) if isinstance(inverse, dict) else show(inverse)))
    for index, word in enumerate(listed):
        if inverse.get(word) != index:
            raise Refused("dico_word2id: %s: id %d expected, got %s"
                          % (show(word), index, show(inverse.get(word))))
    return listed
