/* The files of byte-level BPE, each read into a struct bpe_tokenizer:
 *
 *   tokenizer.json           of Hugging Face's package `tokenizers`: everything in one object
 *   vocab.json, merges.txt   of GPT-2 (encoder.json, vocab.bpe): tokens and their ids; merges in
 *                            order of rank, a line each, behind a line "#version"
 *   a rank file              of tiktoken: tokenizer_bpe_ranks.c
 *
 * A file may ask for many things that other tokenizers do. Whatever would change a token and is not
 * implemented here is refused by its name: ids that differ silently are the worst that can
 * happen. */
#include "engine/tokenizer_bpe.h"
#include "kernels/utf8.h"
#include "models/json_file.h"

#include <stdlib.h>
#include <string.h>

/* ---- what a file asks for ------------------------------------------------------------------ */

/* The beginning of a value as the file has it, for messages. */
struct shown {
    char text[320];
};

static struct shown show(const json_t *value)
{
    struct shown shown = {"nothing"};
    char *const text = value != NULL ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    if (text != NULL) {
        const size_t n =
            strlen(text) < sizeof shown.text - 1 ? strlen(text) : sizeof shown.text - 1;
        const size_t whole = utf8_valid_prefix(text, n);
        memcpy(shown.text, text, whole);
        shown.text[whole] = '\0';
        free(text);
    }
    return shown;
}

static enum err_code refuse(const char *path, const char *key, const json_t *found,
                            const char *needed, struct err *err)
{
    return err_set(err, ERR_UNSUPPORTED, "%s: %s is %s; served is %s", path, key, show(found).text,
                   needed);
}

static bool is_type(const json_t *object, const char *type)
{
    const char *const found = json_string_value(json_object_get(object, "type"));
    return found != NULL && strcmp(found, type) == 0;
}

/* null, or absent, or a value that asks for nothing. */
static bool is_off(const json_t *value)
{
    return value == NULL || json_is_null(value) || json_is_false(value) ||
           (json_is_string(value) && json_string_length(value) == 0);
}

/* Each key of object is one of keys, which end with NULL. */
static enum err_code check_keys(const json_t *object, const char *const *keys, const char *place,
                                const char *path, struct err *err)
{
    const char *key = NULL;
    json_t *value = NULL;
    json_object_foreach((json_t *)object, key, value)
    {
        int i = 0;
        while (keys[i] != NULL && strcmp(key, keys[i]) != 0) {
            i++;
        }
        if (keys[i] == NULL) {
            return err_set(err, ERR_UNSUPPORTED, "%s: %s has the key \"%.64s\", which is not known",
                           path, place, key);
        }
    }
    return ERR_OK;
}

static bool is_sequence(const json_t *step, const char *list)
{
    return is_type(step, "Sequence") && json_is_array(json_object_get(step, list));
}

/* The list of a Sequence under the given key, or the one step itself. */
static size_t n_step(const json_t *step, const char *list)
{
    return is_sequence(step, list) ? json_array_size(json_object_get(step, list)) : 1;
}

static const json_t *step_at(const json_t *step, const char *list, size_t i)
{
    return is_sequence(step, list) ? json_array_get(json_object_get(step, list), i) : step;
}

static enum err_code read_normalizer(struct bpe_tokenizer *t, const json_t *value, const char *path,
                                     struct err *err)
{
    const size_t n = value == NULL || json_is_null(value) ? 0 : n_step(value, "normalizers");
    for (size_t i = 0; i < n; i++) {
        if (!is_type(step_at(value, "normalizers", i), "NFC")) {
            return refuse(path, "normalizer", step_at(value, "normalizers", i), "null or NFC", err);
        }
        t->nfc = true;
    }
    return ERR_OK;
}

/* The pattern of a Split whose pieces all stay, or N_PRETOKENIZER. */
static enum pretokenizer split_pattern(const json_t *split)
{
    const char *const pattern =
        json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
    const char *const behavior = json_string_value(json_object_get(split, "behavior"));
    if (!is_type(split, "Split") || pattern == NULL || behavior == NULL ||
        strcmp(behavior, "Isolated") != 0 || !is_off(json_object_get(split, "invert"))) {
        return N_PRETOKENIZER;
    }
    for (int kind = 0; kind < N_PRETOKENIZER; kind++) {
        const char *const known = pretokenizer_pattern((enum pretokenizer)kind);
        if (known != NULL && strcmp(pattern, known) == 0) {
            return (enum pretokenizer)kind;
        }
    }
    return N_PRETOKENIZER;
}

/* ByteLevel alone is GPT-2's pattern; before it a Split may bring another, or Digits cut numbers.
 */
static enum err_code read_pretokenizer(struct bpe_tokenizer *t, const json_t *value,
                                       const char *path, struct err *err)
{
    static const char key[] = "pre_tokenizer";
    static const char list[] = "pretokenizers";
    const size_t n = n_step(value, list);
    const json_t *const first = step_at(value, list, 0);
    const json_t *const last = n > 0 ? step_at(value, list, n - 1) : NULL;
    if (n < 1 || n > 2 || !is_type(last, "ByteLevel")) {
        return refuse(path, key, value, "ByteLevel, or Split or Digits and then ByteLevel", err);
    }
    if (!json_is_false(json_object_get(last, "add_prefix_space"))) {
        return refuse(path, "pre_tokenizer.add_prefix_space",
                      json_object_get(last, "add_prefix_space"), "false", err);
    }
    const json_t *const use_regex = json_object_get(last, "use_regex");
    const bool cuts = use_regex == NULL || json_is_true(use_regex);
    if (n == 1) {
        t->pretokenizer = PRETOKENIZER_GPT2;
        return cuts ? ERR_OK : refuse(path, "pre_tokenizer.use_regex", use_regex, "true", err);
    }
    if (is_type(first, "Digits") && json_is_true(json_object_get(first, "individual_digits"))) {
        t->pretokenizer = PRETOKENIZER_DIGITS;
        return cuts ? ERR_OK : refuse(path, "pre_tokenizer.use_regex", use_regex, "true", err);
    }
    t->pretokenizer = split_pattern(first);
    if (t->pretokenizer == N_PRETOKENIZER) {
        return refuse(path, key, first,
                      "a Split, Isolated, by the expression of GPT-2, Llama 3, Qwen2 or Qwen3.5",
                      err);
    }
    return cuts ? refuse(path, "pre_tokenizer.use_regex behind a Split", use_regex, "false", err)
                : ERR_OK;
}

/* A template may put special tokens before a text. Whether the server does is config.json's
 * add_bos, so here it is enough that nothing else is asked for. */
static bool is_template(const json_t *step)
{
    const json_t *const single = json_object_get(step, "single");
    const size_t n = json_array_size(single);
    for (size_t i = 0; i < n; i++) {
        const bool is_text = json_object_get(json_array_get(single, i), "Sequence") != NULL;
        if (is_text != (i + 1 == n)) {
            return false;
        }
    }
    return is_type(step, "TemplateProcessing") && n >= 1 && n <= 2;
}

static enum err_code check_processor(const json_t *value, const char *path, struct err *err)
{
    const size_t n = value == NULL || json_is_null(value) ? 0 : n_step(value, "processors");
    for (size_t i = 0; i < n; i++) {
        const json_t *const step = step_at(value, "processors", i);
        if (!is_type(step, "ByteLevel") && !is_template(step)) {
            return refuse(path, "post_processor", step,
                          "ByteLevel, or a TemplateProcessing that puts at most one token before a "
                          "text",
                          err);
        }
    }
    return ERR_OK;
}

static enum err_code check_decoder(const json_t *value, const char *path, struct err *err)
{
    return n_step(value, "decoders") == 1 && is_type(step_at(value, "decoders", 0), "ByteLevel")
               ? ERR_OK
               : refuse(path, "decoder", value, "ByteLevel", err);
}

/* ---- tokens and merges --------------------------------------------------------------------- */

static enum err_code read_vocab(struct bpe_tokenizer *t, const json_t *vocab, const char *path,
                                struct err *err)
{
    const char *spelling = NULL;
    json_t *id = NULL;
    enum err_code code = ERR_OK;
    json_object_foreach((json_t *)vocab, spelling, id)
    {
        code = json_is_integer(id)
                   ? bpe_add_token(t, spelling, json_integer_value(id), path, err)
                   : err_set(err, ERR_FORMAT, "%s: the id of token \"%.64s\" is %s, not an integer",
                             path, spelling, show(id).text);
        if (code != ERR_OK) {
            return code;
        }
    }
    return ERR_OK;
}

/* Bytes of strings that the tokens of the vocabulary will take. */
static size_t vocab_strings(const json_t *vocab)
{
    size_t n = 0;
    const char *spelling = NULL;
    json_t *id = NULL;
    json_object_foreach((json_t *)vocab, spelling, id)
    {
        n += 2 * (strlen(spelling) + 1);
    }
    return n;
}

/* Merge number n, counted from 0, of two spellings. */
static enum err_code add_merge(struct bpe_tokenizer *t, const char *left, size_t n_left,
                               const char *right, size_t n_right, const char *path, size_t n,
                               struct err *err)
{
    char bytes[2 * BYTE_BPE_WORD_MAX];
    if (n_left > BYTE_BPE_WORD_MAX || n_right > BYTE_BPE_WORD_MAX) {
        return err_set(err, ERR_FORMAT, "%s: a part of merge %zu is longer than %d bytes", path,
                       n + 1, (int)BYTE_BPE_WORD_MAX);
    }
    const size_t n_first = bpe_bytes(bytes, left, n_left);
    const size_t n_second = bpe_bytes(bytes + n_first, right, n_right);
    const struct merge rule = {byte_bpe_find(&t->bpe, bytes, n_first),
                               byte_bpe_find(&t->bpe, bytes + n_first, n_second),
                               byte_bpe_find(&t->bpe, bytes, n_first + n_second)};
    if (n_first == 0 || n_second == 0 || rule.left < 0 || rule.right < 0 || rule.joined < 0) {
        return err_set(
            err, ERR_FORMAT,
            "%s: merge %zu, \"%.*s %.*s\", joins what the vocabulary does not have: both "
            "parts and the whole must be tokens",
            path, n + 1, (int)utf8_valid_prefix(left, n_left < 64 ? n_left : 64), left,
            (int)utf8_valid_prefix(right, n_right < 64 ? n_right : 64), right);
    }
    const int32_t same = merges_add(&t->bpe.merges, rule);
    return same < 0
               ? ERR_OK
               : err_set(err, ERR_FORMAT, "%s: merge %zu repeats merge %d", path, n + 1, same + 1);
}

/* "left right": one space, which no spelling holds. */
static enum err_code add_merge_line(struct bpe_tokenizer *t, const char *line, size_t bytes,
                                    const char *path, size_t n, struct err *err)
{
    const char *const space = memchr(line, ' ', bytes);
    const size_t n_left = space != NULL ? (size_t)(space - line) : 0;
    const size_t n_right = space != NULL ? bytes - n_left - 1 : 0;
    if (n_left == 0 || n_right == 0 || memchr(space + 1, ' ', n_right) != NULL ||
        utf8_valid_prefix(line, bytes) != bytes) {
        return err_set(err, ERR_FORMAT, "%s: merge %zu is not two tokens with one space between",
                       path, n + 1);
    }
    return add_merge(t, line, n_left, space + 1, n_right, path, n, err);
}

static enum err_code read_merges(struct bpe_tokenizer *t, const json_t *merges, const char *path,
                                 struct err *err)
{
    enum err_code code = ERR_OK;
    for (size_t i = 0; code == ERR_OK && i < json_array_size(merges); i++) {
        const json_t *const merge = json_array_get(merges, i);
        const json_t *const left = json_array_get(merge, 0);
        const json_t *const right = json_array_get(merge, 1);
        if (json_is_string(merge)) {
            code = add_merge_line(t, json_string_value(merge), json_string_length(merge), path, i,
                                  err);
        } else if (json_array_size(merge) == 2 && json_is_string(left) && json_is_string(right)) {
            code = add_merge(t, json_string_value(left), json_string_length(left),
                             json_string_value(right), json_string_length(right), path, i, err);
        } else {
            code = err_set(err, ERR_FORMAT,
                           "%s: model.merges[%zu] is %s, neither \"a b\" nor [\"a\", "
                           "\"b\"]",
                           path, i, show(merge).text);
        }
    }
    return code;
}

static enum err_code read_flag(bool *flag, const json_t *object, const char *key, const char *path,
                               struct err *err)
{
    const json_t *const value = json_object_get(object, key);
    *flag = json_is_true(value);
    return value == NULL || json_is_boolean(value)
               ? ERR_OK
               : err_set(err, ERR_FORMAT, "%s: %s of an added token is %s, not true or false", path,
                         key, show(value).text);
}

static enum err_code read_added(struct bpe_tokenizer *t, const json_t *list, const json_t *vocab,
                                const char *path, struct err *err)
{
    static const char *const keys[] = {"id",     "content",    "single_word", "lstrip",
                                       "rstrip", "normalized", "special",     NULL};
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *const entry = json_array_get(list, i);
        const json_t *const id = json_object_get(entry, "id");
        const json_t *const content = json_object_get(entry, "content");
        struct added_token token = {.text = json_string_value(content)};
        bool normalized = false;
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > INT32_MAX || token.text == NULL) {
            return err_set(err, ERR_FORMAT,
                           "%s: added_tokens[%zu] is %s: an object with id and "
                           "content is expected",
                           path, i, show(entry).text);
        }
        token.bytes = (uint32_t)json_string_length(content);
        token.id = (int32_t)json_integer_value(id);
        const json_t *const other = json_object_get(vocab, token.text);
        if (other != NULL && json_integer_value(other) != token.id) {
            return err_set(
                err, ERR_FORMAT,
                "%s: added_tokens[%zu], \"%.64s\", has the id %d, but %lld in model.vocab", path, i,
                token.text, token.id, (long long)json_integer_value(other));
        }
        if (check_keys(entry, keys, "an added token", path, err) != ERR_OK ||
            read_flag(&token.special, entry, "special", path, err) != ERR_OK ||
            read_flag(&token.single_word, entry, "single_word", path, err) != ERR_OK ||
            read_flag(&token.lstrip, entry, "lstrip", path, err) != ERR_OK ||
            read_flag(&token.rstrip, entry, "rstrip", path, err) != ERR_OK ||
            read_flag(&normalized, entry, "normalized", path, err) != ERR_OK ||
            bpe_add_added(t, token, normalized, path, err) != ERR_OK) {
            return err->code;
        }
    }
    return ERR_OK;
}

/* Bytes of strings of the added tokens; normalizing may make a text three times as long. */
static size_t added_strings(const json_t *list)
{
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        n += 5 * (json_string_length(json_object_get(json_array_get(list, i), "content")) + 1);
    }
    return n;
}

/* ---- tokenizer.json ------------------------------------------------------------------------ */

static enum err_code check_model(const json_t *model, const char *path, struct err *err)
{
    static const char *const keys[] = {"type",
                                       "dropout",
                                       "unk_token",
                                       "continuing_subword_prefix",
                                       "end_of_word_suffix",
                                       "fuse_unk",
                                       "byte_fallback",
                                       "ignore_merges",
                                       "vocab",
                                       "merges",
                                       NULL};
    static const char *const off[] = {
        "dropout",  "unk_token",    "continuing_subword_prefix", "end_of_word_suffix",
        "fuse_unk", "byte_fallback"};
    if (!is_type(model, "BPE")) {
        return refuse(path, "model.type", json_object_get(model, "type"), "\"BPE\"", err);
    }
    for (size_t i = 0; i < sizeof off / sizeof off[0]; i++) {
        const json_t *const value = json_object_get(model, off[i]);
        if (!is_off(value)) {
            char key[64];
            (void)snprintf(key, sizeof key, "model.%s", off[i]);
            return refuse(path, key, value, "null, false or \"\"", err);
        }
    }
    if (!json_is_object(json_object_get(model, "vocab")) ||
        !json_is_array(json_object_get(model, "merges"))) {
        return err_set(err, ERR_FORMAT, "%s: model.vocab must be an object and model.merges a list",
                       path);
    }
    return check_keys(model, keys, "model", path, err);
}

static bool has_metaspace(const json_t *value)
{
    static const char list[] = "pretokenizers";
    for (size_t i = 0; i < n_step(value, list); i++) {
        if (is_type(step_at(value, list, i), "Metaspace")) {
            return true;
        }
    }
    return false;
}

/* SentencePiece tokenizers come in this form, too, and their users have a file that is served. */
static enum err_code check_sentencepiece(const json_t *root, const char *path, struct err *err)
{
    const json_t *const model = json_object_get(root, "model");
    const char *const found =
        is_type(model, "Unigram")                               ? "model.type is Unigram"
        : json_is_true(json_object_get(model, "byte_fallback")) ? "model.byte_fallback is true"
        : has_metaspace(json_object_get(root, "pre_tokenizer")) ? "pre_tokenizer is Metaspace"
                                                                : NULL;
    return found == NULL
               ? ERR_OK
               : err_set(err, ERR_UNSUPPORTED,
                         "%s: %s: a SentencePiece tokenizer in Hugging Face's form, which "
                         "is not served; put its tokenizer.model in this file's place, or "
                         "take the file away to serve token ids",
                         path, found);
}

static enum err_code read_object(struct bpe_tokenizer **t, const json_t *root, const char *path,
                                 int n_vocab, struct err *err)
{
    static const char *const keys[] = {
        "version",       "truncation",     "padding", "added_tokens", "normalizer",
        "pre_tokenizer", "post_processor", "decoder", "model",        NULL};
    const json_t *const model = json_object_get(root, "model");
    const json_t *const vocab = json_object_get(model, "vocab");
    const json_t *const merges = json_object_get(model, "merges");
    const json_t *const added = json_object_get(root, "added_tokens");
    if (added != NULL && !json_is_null(added) && !json_is_array(added)) {
        return refuse(path, "added_tokens", added, "a list", err);
    }
    if (check_keys(root, keys, "the file", path, err) != ERR_OK ||
        check_sentencepiece(root, path, err) != ERR_OK || check_model(model, path, err) != ERR_OK ||
        check_processor(json_object_get(root, "post_processor"), path, err) != ERR_OK ||
        check_decoder(json_object_get(root, "decoder"), path, err) != ERR_OK ||
        bpe_tokenizer_new(t, n_vocab, json_object_size(vocab), json_array_size(merges),
                          json_array_size(added), vocab_strings(vocab) + added_strings(added), path,
                          err) != ERR_OK ||
        read_flag(&(*t)->bpe.ignore_merges, model, "ignore_merges", path, err) != ERR_OK ||
        read_normalizer(*t, json_object_get(root, "normalizer"), path, err) != ERR_OK ||
        read_pretokenizer(*t, json_object_get(root, "pre_tokenizer"), path, err) != ERR_OK ||
        read_vocab(*t, vocab, path, err) != ERR_OK ||
        read_merges(*t, merges, path, err) != ERR_OK ||
        read_added(*t, added, vocab, path, err) != ERR_OK) {
        return err->code;
    }
    return bpe_finish(*t, path, err);
}

/* ---- vocab.json and merges.txt ------------------------------------------------------------- */

static enum err_code read_merge_lines(struct bpe_tokenizer *t, const char *text, size_t bytes,
                                      const char *path, struct err *err)
{
    enum err_code code = ERR_OK;
    size_t n = 0;
    for (size_t at = 0; code == ERR_OK && at < bytes;) {
        const char *const newline = memchr(text + at, '\n', bytes - at);
        const size_t end = newline != NULL ? (size_t)(newline - text) : bytes;
        /* Only the first line is a comment: "# #" may be a merge. */
        const bool comment = at == 0 && end >= 8 && memcmp(text, "#version", 8) == 0;
        if (!comment) {
            code = add_merge_line(t, text + at, end - at, path, n++, err);
        }
        at = end + 1;
    }
    return code;
}

static enum err_code read_pair(struct bpe_tokenizer **t, const json_t *vocab,
                               const struct bpe_source *source, int n_vocab, struct err *err)
{
    if (source->merges == NULL) {
        return err_set(err, ERR_FORMAT,
                       "%s: a vocabulary without merges: merges.txt must stand beside it",
                       source->path);
    }
    if (bpe_tokenizer_new(t, n_vocab, json_object_size(vocab),
                          bpe_count_lines(source->merges, source->merges_bytes), 1,
                          vocab_strings(vocab), source->path, err) != ERR_OK ||
        read_vocab(*t, vocab, source->path, err) != ERR_OK ||
        read_merge_lines(*t, source->merges, source->merges_bytes, source->merges_path, err) !=
            ERR_OK) {
        return err->code;
    }
    (*t)->pretokenizer = PRETOKENIZER_GPT2;
    /* These files have no list of added tokens; this one is GPT-2's by convention. */
    static const char end_of_text[] = "<|endoftext|>";
    const int32_t id = byte_bpe_find(&(*t)->bpe, end_of_text, sizeof end_of_text - 1);
    const struct added_token token = {
        .text = end_of_text, .bytes = sizeof end_of_text - 1, .id = id, .special = true};
    return id >= 0 && bpe_add_added(*t, token, true, source->path, err) != ERR_OK
               ? err->code
               : bpe_finish(*t, source->path, err);
}

/* ---- any of them --------------------------------------------------------------------------- */

enum bpe_file_kind bpe_file_kind(const char *text, size_t bytes)
{
    return bytes > 0 && text[0] == '{'    ? BPE_FILE_JSON
           : bpe_ranks_begin(text, bytes) ? BPE_FILE_RANKS
                                          : BPE_FILE_OTHER;
}

enum err_code bpe_file_read(struct bpe_tokenizer **tokenizer, const struct bpe_source *source,
                            int n_vocab, struct err *err)
{
    struct err own = {0};
    struct err *const e = err != NULL ? err : &own;
    *tokenizer = NULL;
    enum err_code code = ERR_OK;
    if (bpe_file_kind(source->text, source->bytes) == BPE_FILE_RANKS) {
        code = bpe_ranks_read(tokenizer, source, n_vocab, e);
    } else {
        json_t *root = NULL;
        code = json_file_parse(&root, source->text, source->bytes, source->path, e);
        const json_t *const model = json_object_get(root, "model");
        if (code == ERR_OK && model != NULL && !json_is_object(model) && !json_is_integer(model)) {
            code = refuse(source->path, "model", model, "an object, or in a vocab.json an id", e);
        } else if (code == ERR_OK) {
            code = json_is_object(model) ? read_object(tokenizer, root, source->path, n_vocab, e)
                                         : read_pair(tokenizer, root, source, n_vocab, e);
        }
        json_decref(root);
    }
    if (code != ERR_OK && *tokenizer != NULL) {
        tokenizer_close(&(*tokenizer)->base);
        *tokenizer = NULL;
    }
    return code;
}
