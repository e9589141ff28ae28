"""What a tokenizer.json asks to be done with a text, asked as the server asks (engine/tokenizer_bpe_file.c).

bpe_files.py calls check for each. Whatever would change an id and is not served is refused by the name of its
place in the file: a model that was converted must not fail when it is served.
"""

from fault import Refused, show

KEYS = {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
        "decoder", "model"}
OFF = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
MODEL_KEYS = {"type", "ignore_merges", "vocab", "merges", *OFF}
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors",
         "decoder": "decoders"}

# As engine/pretokenizer.c has them: GPT-2, Llama 3, Qwen2 (Qwen3), Qwen3.5.
_ENDS = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"+[\r\n]*|\s*[\r\n]+|" + _SPACES
_LETTERS = "(?i:" + _ENDS + r")|[^\r\n\p{L}\p{N}]?"
EXPRESSIONS = {
    _ENDS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES,
    _LETTERS + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]" + _LINES,
    _LETTERS + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]" + _LINES,
    _LETTERS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]" + _LINES,
}


def _type(step):
    return step.get("type") if isinstance(step, dict) else None


def _is_off(value):
    """Absent, or a value that asks for nothing."""
    return value is None or value is False or value == ""


class _File:
    def __init__(self, root, source):
        self.root, self.source = root, source

    def refuse(self, key, found, served):
        shown = show([_type(step) for step in self.steps(key)]) if _type(found) == "Sequence" and key in LISTS \
            else show(found)
        raise Refused("%s: %s is %s; served is %s" % (self.source, key, shown, served))

    def keys(self, found, known, place):
        for key in found:
            if key not in known:
                raise Refused("%s: %s has the key %s, which is not known" % (self.source, place, show(key)))

    def steps(self, key):
        """What is done one after the other: the list of a Sequence, or the one step itself."""
        value = self.root.get(key)
        if _type(value) != "Sequence":
            return [value]
        steps = value.get(LISTS[key])
        return steps if isinstance(steps, list) else []

    def optional_steps(self, key):
        return [] if self.root.get(key) is None else self.steps(key)


def _check_sentencepiece(file, model):
    """SentencePiece's tokenizers come in this form, too, and their users have what is served: its own file."""
    found = "model.type is Unigram" if model.get("type") == "Unigram" \
        else "model.byte_fallback is true" if model.get("byte_fallback") \
        else "pre_tokenizer is Metaspace" if any(_type(step) == "Metaspace" for step in file.steps("pre_tokenizer")) else None
    if found is not None:
        raise Refused("%s: %s: a SentencePiece tokenizer in Hugging Face's form, which is not served; give its"
                      " tokenizer.model with --tokenizer, or take the file away to serve token ids"
                      % (file.source, found))


def _check_model(file, model):
    if model.get("type") != "BPE":
        file.refuse("model.type", model.get("type"), "BPE")
    for key in OFF:
        if not _is_off(model.get(key)):
            file.refuse("model." + key, model[key], 'null, false or ""')
    for key, kind, due in (("vocab", dict, "an object"), ("merges", list, "a list")):
        if not isinstance(model.get(key), kind):
            file.refuse("model." + key, model.get(key), due)
    if not isinstance(model.get("ignore_merges", False), bool):
        file.refuse("model.ignore_merges", model["ignore_merges"], "true or false")
    file.keys(model, MODEL_KEYS, "model")


def _check_normalizer(file):
    for step in file.optional_steps("normalizer"):
        if _type(step) != "NFC":
            file.refuse("normalizer", step, "null or NFC")


def _is_known_split(step):
    pattern = step.get("pattern") if _type(step) == "Split" else None
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    return isinstance(expression, str) and expression in EXPRESSIONS and step.get("behavior") == "Isolated" \
        and _is_off(step.get("invert"))


def _check_pretokenizer(file):
    steps = file.steps("pre_tokenizer")
    if len(steps) not in (1, 2) or _type(steps[-1]) != "ByteLevel":
        file.refuse("pre_tokenizer", file.root.get("pre_tokenizer"),
                    "ByteLevel, or Split or Digits and then ByteLevel")
    last, first = steps[-1], steps[0]
    if last.get("add_prefix_space") is not False:
        file.refuse("pre_tokenizer.add_prefix_space", last.get("add_prefix_space"), "false")
    cuts = last.get("use_regex", True)
    digits = len(steps) == 2 and _type(first) == "Digits" and first.get("individual_digits") is True
    if len(steps) == 1 or digits:
        if cuts is not True:
            file.refuse("pre_tokenizer.use_regex", cuts, "true")
        return
    if not _is_known_split(first):
        file.refuse("pre_tokenizer", first,
                    "a Split, Isolated, by the expression of GPT-2, Llama 3, Qwen2 or Qwen3.5")
    if cuts is True:
        file.refuse("pre_tokenizer.use_regex behind a Split", cuts, "false")


def _is_template(step):
    single = step.get("single") if _type(step) == "TemplateProcessing" else None
    if not isinstance(single, list) or len(single) not in (1, 2):
        return False
    return [isinstance(one, dict) and one.get("Sequence") is not None for one in single] \
        == [False] * (len(single) - 1) + [True]


def _check_added(file, vocab):
    for i, token in enumerate(file.root.get("added_tokens", [])):
        file.keys(token, {"id", "content", *TOKEN_FLAGS}, "an added token")
        for flag in TOKEN_FLAGS:
            if not isinstance(token.get(flag, False), bool):
                file.refuse("%s of an added token" % flag, token[flag], "true or false")
        content, number = token.get("content"), token.get("id")
        if isinstance(content, str) and vocab.get(content, number) != number:
            raise Refused("%s: added_tokens[%d], %s, has the id %s, but %s in model.vocab"
                          % (file.source, i, show(content), show(number), show(vocab[content])))


def check(root, source):
    """root: the object of a tokenizer.json whose model and added_tokens are objects; source: how messages call
    it."""
    file = _File(root, source)
    model = root["model"]
    file.keys(root, KEYS, "the file")
    _check_sentencepiece(file, model)
    _check_model(file, model)
    for step in file.optional_steps("post_processor"):
        if _type(step) != "ByteLevel" and not _is_template(step):
            file.refuse("post_processor", step,
                        "ByteLevel, or a TemplateProcessing that puts at most one token before a text")
    decoder = file.steps("decoder")
    if len(decoder) != 1 or _type(decoder[0]) != "ByteLevel":
        file.refuse("decoder", root.get("decoder"), "ByteLevel")
    _check_normalizer(file)
    _check_pretokenizer(file)
    _check_added(file, model["vocab"])


def _inside(value, key):
    return value.get(key) if isinstance(value, dict) and isinstance(key, str) else None


def template_first(root, n_vocab, source):
    """The id of the token that a template puts before a text, or None. root: what check let pass."""
    for step in _File(root, source).optional_steps("post_processor"):
        if not _is_template(step) or len(step["single"]) != 2:
            continue
        token = _inside(_inside(step["single"][0], "SpecialToken"), "id")
        ids = _inside(_inside(step.get("special_tokens"), token), "ids")
        if not isinstance(ids, list) or len(ids) != 1 or not isinstance(ids[0], int) \
                or isinstance(ids[0], bool) or not 0 <= ids[0] < n_vocab:
            raise Refused("%s: post_processor puts %s before a text, whose ids in special_tokens are %s; one whole"
                          " number 0..%d is expected" % (source, show(step["single"][0]), show(ids), n_vocab - 1))
        return ids[0]
    return None
