/* SentencePiece behind the C interface of tokenizer_impl.h: the project's one C++ file.
 *
 * The library knows the pieces and finds the segmentation; everything that must be exact is done
 * here: ids to bytes (so that a stream of tokens and a whole list give the same text), byte
 * offsets, and what is lossy inside the library. Where the model puts nothing in front of a text
 * and trims nothing, a text is cut before it is segmented
 *   - at a newline, if the newline is a user-defined piece: no other piece holds one, so the
 *     ids are those of one call in exact arithmetic, without the rounding of a score summed
 *     over a book;
 *   - at U+2581 and NUL, which the library would turn into a space or lose: they become byte
 *     pieces.
 * A user-defined piece that a user types is that piece, as in training; a control piece is not. */
extern "C" {
#include "engine/charsmap.h"
#include "engine/tokenizer_impl.h"
#include "kernels/utf8.h"
#include "models/file.h"
}

#include <sentencepiece_processor.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace
{

const size_t model_bytes_max = size_t{64} << 20;
const size_t piece_bytes_max = 4096;      /* the library recurses once for each byte */
const char space_mark[] = "\xe2\x96\x81"; /* U+2581 stands for a space inside pieces */

struct spelling {
    std::string text;  /* as the vocabulary spells it */
    std::string bytes; /* what it adds to a text */
    bool byte;         /* one raw byte: <0x0A> */
};

struct spm_tokenizer : tokenizer {
    sentencepiece::SentencePieceProcessor spm;
    std::vector<spelling> spellings; /* the pieces point into it */
    int byte_id[256];                /* -1 = the model has no byte pieces */
    int newline_id;                  /* user-defined piece "\n", or -1 */
    bool cut;                        /* texts may be cut as said above */
};

/* ---- the model file's own settings --------------------------------------------------------- */

/* What the library keeps to itself, read from the serialized ModelProto
 * (sentencepiece_model.proto): field 1 pieces {1 piece, 3 type}, 2 trainer_spec {3 model_type}, 3
 * normalizer_spec {2 charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5
 * escape_whitespaces}; 5 is a spec like 3. The library believes the lengths and maps that a file
 * states, so they are read and checked before it sees them.
 */
struct settings {
    uint64_t model_type = 1; /* defaults of the format */
    bool add_dummy_prefix = true;
    bool remove_extra_whitespaces = true;
    bool has_charsmap = false;
    int newline_id = -1;
    bool newline_elsewhere = false;
};

class reader
{
  public:
    explicit reader(const std::string &bytes) : at_(bytes.data()), end_(at_ + bytes.size())
    {
    }
    /* The next field; false at the end or on damage. Numbers land in value, strings in text. */
    bool next(int *field, uint64_t *value, std::string *text)
    {
        if (at_ == end_) {
            return false;
        }
        is_damaged_ = !one(field, value, text);
        return !is_damaged_;
    }
    /* Whether the last next was false because of damage. */
    bool is_damaged() const
    {
        return is_damaged_;
    }

  private:
    bool one(int *field, uint64_t *value, std::string *text)
    {
        uint64_t key = 0;
        if (!varint(&key) || key > UINT32_MAX) {
            return false;
        }
        *field = static_cast<int>(key >> 3);
        *value = 0;
        text->clear();
        switch (key & 7) {
        case 0: return varint(value);
        case 1: return skip(8);
        case 5: return skip(4);
        case 2: {
            uint64_t n = 0;
            if (!varint(&n) || n > static_cast<uint64_t>(end_ - at_)) {
                return false;
            }
            text->assign(at_, static_cast<size_t>(n));
            return skip(static_cast<size_t>(n));
        }
        default: return false;
        }
    }
    bool varint(uint64_t *value)
    {
        *value = 0;
        for (int shift = 0; shift < 64 && at_ < end_; shift += 7) {
            const unsigned char byte = static_cast<unsigned char>(*at_++);
            *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
            if (byte < 0x80) {
                return true;
            }
        }
        return false;
    }
    bool skip(size_t n)
    {
        if (n > static_cast<size_t>(end_ - at_)) {
            return false;
        }
        at_ += n;
        return true;
    }
    const char *at_;
    const char *end_;
    bool is_damaged_ = false;
};

enum err_code damaged(const char *path, int field, struct err *err)
{
    return err_set(err, ERR_FORMAT, "%s: not a SentencePiece model: its field %d is damaged", path,
                   field);
}

enum err_code read_piece(const std::string &bytes, int id, settings *s, const char *path,
                         struct err *err)
{
    const uint64_t user_defined = 4;
    reader in(bytes);
    int field = 0;
    uint64_t value = 0;
    uint64_t type = 1;
    std::string text;
    std::string name;
    while (in.next(&field, &value, &text)) {
        if (field == 1 && text.size() > piece_bytes_max) {
            return err_set(err, ERR_FORMAT, "%s: piece %d has %zu bytes, the limit is %zu", path,
                           id, text.size(), piece_bytes_max);
        }
        if (field == 1) {
            name = text;
        } else if (field == 3) {
            type = value;
        }
    }
    if (name == "\n" && type == user_defined) {
        s->newline_id = id;
    } else if (name.find('\n') != std::string::npos) {
        s->newline_elsewhere = true;
    }
    return in.is_damaged() ? damaged(path, 1, err) : ERR_OK;
}

/* One of the specs: spec is its field. */
enum err_code read_spec(int spec, const std::string &bytes, settings *s, const char *path,
                        struct err *err)
{
    reader in(bytes);
    int field = 0;
    uint64_t value = 0;
    std::string text;
    while (in.next(&field, &value, &text)) {
        if (spec != 2 && field == 2) {
            const enum err_code code = charsmap_check(text.data(), text.size(), path, err);
            if (code != ERR_OK) {
                return code;
            }
        }
        if (spec == 2 && field == 3) {
            s->model_type = value;
        } else if (spec == 3 && field == 2) {
            s->has_charsmap = !text.empty();
        } else if (spec == 3 && field == 3) {
            s->add_dummy_prefix = value != 0;
        } else if (spec == 3 && field == 4) {
            s->remove_extra_whitespaces = value != 0;
        }
    }
    return in.is_damaged() ? damaged(path, spec, err) : ERR_OK;
}

enum err_code read_settings(settings *s, const std::string &model, const char *path,
                            struct err *err)
{
    reader in(model);
    int field = 0;
    uint64_t value = 0;
    std::string text;
    int id = 0;
    enum err_code code = ERR_OK;
    while (code == ERR_OK && in.next(&field, &value, &text)) {
        if (field == 1) {
            code = read_piece(text, id++, s, path, err);
        } else if (field == 2 || field == 3 || field == 5) {
            code = read_spec(field, text, s, path, err);
        }
    }
    return code == ERR_OK && in.is_damaged()
               ? err_set(err, ERR_FORMAT, "%s: not a SentencePiece model: its fields are damaged",
                         path)
               : code;
}

/* ---- opening ------------------------------------------------------------------------------- */

/* A space for each mark: what the piece adds inside a text. */
std::string surface(const std::string &text)
{
    std::string bytes;
    for (size_t at = 0; at < text.size();) {
        if (text.compare(at, 3, space_mark) == 0) {
            bytes += ' ';
            at += 3;
        } else {
            bytes += text[at++];
        }
    }
    return bytes;
}

spelling spelling_of(struct spm_tokenizer *t, int id, bool control)
{
    spelling s = {t->spm.IdToPiece(id), "", t->spm.IsByte(id)};
    unsigned value = 0;
    if (s.byte && std::sscanf(s.text.c_str(), "<0x%2X>", &value) == 1 && value < 256) {
        s.bytes.assign(1, static_cast<char>(value));
        t->byte_id[value] = id;
    } else if (!control) {
        s.bytes = surface(s.text);
    }
    return s;
}

enum err_code fill_pieces(struct spm_tokenizer *t, int n, const char *path, struct err *err)
{
    for (int &id : t->byte_id) {
        id = -1;
    }
    t->spellings.reserve(static_cast<size_t>(n)); /* hence no spelling moves */
    if (tokenizer_reserve(t, n, err) != ERR_OK) {
        return ERR_MEMORY;
    }
    for (int id = 0; id < n; id++) {
        struct piece &piece = t->piece[id];
        /* The unknown piece stands for text that the model cannot spell: it has none of its own. */
        piece.control = t->spm.IsControl(id) || t->spm.IsUnknown(id);
        t->spellings.push_back(spelling_of(t, id, piece.control));
        const spelling &s = t->spellings.back();
        if (utf8_valid_prefix(s.text.data(), s.text.size()) != s.text.size()) {
            return err_set(err, ERR_FORMAT, "%s: piece %d is not valid UTF-8", path, id);
        }
        piece.text = s.text.c_str();
        piece.bytes = s.bytes.data();
        piece.n_byte = static_cast<uint32_t>(s.bytes.size());
    }
    tokenizer_measure(t);
    return ERR_OK;
}

enum err_code read_model(const char *path, bool must_exist, std::string *model, struct err *err)
{
    model->clear();
    std::FILE *file = nullptr;
    const enum err_code code = file_open(&file, path, !must_exist, err);
    if (file == nullptr) {
        return code;
    }
    char buffer[1 << 16];
    size_t n = 0;
    while ((n = std::fread(buffer, 1, sizeof buffer, file)) > 0 &&
           model->size() <= model_bytes_max) {
        model->append(buffer, n);
    }
    const bool failed = std::ferror(file) != 0;
    (void)std::fclose(file);
    if (failed) {
        return err_set(err, ERR_IO, "%s: cannot read", path);
    }
    if (model->empty() || model->size() > model_bytes_max) {
        return err_set(err, ERR_FORMAT, "%s: has %zu bytes or more, accepted are 1 to %zu", path,
                       model->size(), model_bytes_max);
    }
    return ERR_OK;
}

enum err_code open_model(struct spm_tokenizer *t, const char *path, const std::string &model,
                         int n_vocab, struct err *err)
{
    settings s;
    const enum err_code code = read_settings(&s, model, path, err);
    if (code != ERR_OK) {
        return code;
    }
    const auto status = t->spm.LoadFromSerializedProto(model);
    if (!status.ok()) {
        return err_set(err, ERR_FORMAT, "%s: not a SentencePiece model: %s", path,
                       std::string(status.message()).c_str());
    }
    /* A vocabulary without <unk> has the library's behind its last word, as no id of the model. */
    const int n_piece = t->spm.GetPieceSize();
    if (n_piece != n_vocab && !(n_piece == n_vocab + 1 && t->spm.IsUnknown(n_vocab))) {
        return err_set(
            err, ERR_FORMAT,
            "%s: its number of pieces is %d, the model's vocab_size is %d: they do not belong "
            "together",
            path, n_piece, n_vocab);
    }
    t->newline_id = s.newline_elsewhere ? -1 : s.newline_id;
    t->dummy_prefix = s.add_dummy_prefix;
    t->cut = !s.add_dummy_prefix && !s.remove_extra_whitespaces && !s.has_charsmap;
    static const char *const types[] = {"", "unigram", "bpe", "word", "char"};
    (void)std::snprintf(t->kind, sizeof t->kind, "sentencepiece-%s",
                        s.model_type >= 1 && s.model_type <= 4 ? types[s.model_type] : "other");
    return fill_pieces(t, n_vocab, path, err);
}

/* ---- encoding ------------------------------------------------------------------------------ */

void push(struct encoding *out, int32_t id, size_t offset)
{
    if (!encoding_push(out, id, offset)) {
        throw std::bad_alloc();
    }
}

/* Of a character in UTF-8, any byte but its first. */
bool is_continuation(char byte)
{
    return (static_cast<unsigned char>(byte) & 0xc0) == 0x80;
}

/* Segments text[begin .. end) by the library. */
enum err_code encode_span(const struct spm_tokenizer *t, const char *text, size_t begin, size_t end,
                          struct encoding *out, struct err *err)
{
    if (begin == end) {
        return ERR_OK;
    }
    /* Where Encode throws for want of memory, what it leaves cannot be destroyed: it is lost. */
    auto *const made = new sentencepiece::ImmutableSentencePieceText();
    const bool good =
        t->spm.Encode(absl::string_view(text + begin, end - begin), made->mutable_proto()).ok();
    const std::unique_ptr<sentencepiece::ImmutableSentencePieceText> owner(made);
    const sentencepiece::ImmutableSentencePieceText &spt = *made;
    if (!good) {
        return err_set(err, ERR_FORMAT, "the tokenizer cannot encode this text");
    }
    size_t in_char = 0; /* bytes of a character spelled in byte pieces before this one */
    size_t last = begin;
    for (size_t i = 0; i < spt.pieces_size(); i++) {
        const auto p = spt.pieces(static_cast<int>(i));
        const size_t id = p.id();
        if (id >= t->spellings.size()) { /* the unknown piece, if that is no id */
            const size_t at = begin + p.begin();
            const int shown = static_cast<int>(
                utf8_valid_prefix(text + at, p.end() - p.begin() < 64 ? p.end() - p.begin() : 64));
            return err_set(
                err, ERR_ARGUMENT,
                "the tokenizer has no piece for \"%.*s\" at byte %zu of the text, and the "
                "model no <unk>",
                shown, text + at, at);
        }
        /* All byte pieces of a character carry its begin. They may be more than its bytes: a space is
         * spelled as a mark of three bytes, and normalizing makes several characters of one. */
        const size_t at = begin + p.begin();
        const spelling &s = t->spellings[id];
        const bool inside = s.byte && is_continuation(s.bytes[0]);
        const size_t next = at + in_char + 1;
        in_char = !inside ? 0 : in_char + (next < end && is_continuation(text[next]));
        last = std::max(last, at + in_char);
        push(out, static_cast<int32_t>(id), last);
    }
    return ERR_OK;
}

/* Whether the library must not see the character at text[0], and how many bytes it has. */
size_t apart_bytes(const struct spm_tokenizer *t, const char *text, size_t left)
{
    if (text[0] == '\n' && t->newline_id >= 0) {
        return 1;
    }
    if (text[0] == '\0' && t->byte_id[0] >= 0) {
        return 1;
    }
    return left >= 3 && std::memcmp(text, space_mark, 3) == 0 && t->byte_id[0xe2] >= 0 ? 3 : 0;
}

enum err_code encode_text(const struct spm_tokenizer *t, const char *text, size_t bytes,
                          struct encoding *out, struct err *err)
{
    size_t begin = 0;
    for (size_t at = 0; t->cut && at < bytes;) {
        const size_t n = apart_bytes(t, text + at, bytes - at);
        if (n == 0) {
            at++;
            continue;
        }
        const enum err_code code = encode_span(t, text, begin, at, out, err);
        if (code != ERR_OK) {
            return code;
        }
        for (size_t i = 0; i < n; i++) {
            const unsigned char byte = static_cast<unsigned char>(text[at + i]);
            push(out, byte == '\n' ? t->newline_id : t->byte_id[byte], at + i);
        }
        at += n;
        begin = at;
    }
    return encode_span(t, text, begin, bytes, out, err);
}

enum err_code encode_spm(const struct tokenizer *tokenizer, const char *text, size_t bytes,
                         struct encoding *out, struct err *err)
{
    try {
        return encode_text(static_cast<const struct spm_tokenizer *>(tokenizer), text, bytes, out,
                           err);
    } catch (const std::exception &) {
        return err_set(err, ERR_MEMORY, "no memory to tokenise %zu bytes", bytes);
    }
}

void close_spm(struct tokenizer *tokenizer)
{
    delete static_cast<struct spm_tokenizer *>(tokenizer);
}

} // namespace

/* ---- the C interface ----------------------------------------------------------------------- */

extern "C" enum err_code tokenizer_spm_open(struct tokenizer **tokenizer, const char *path,
                                            bool must_exist, int n_vocab, struct err *err)
{
    *tokenizer = nullptr;
    try {
        std::string model;
        enum err_code code = read_model(path, must_exist, &model, err);
        if (code != ERR_OK || model.empty()) {
            return code;
        }
        struct spm_tokenizer *const t = new struct spm_tokenizer();
        t->close = close_spm;
        std::unique_ptr<struct tokenizer, void (*)(struct tokenizer *)> owner(t, tokenizer_close);
        t->encode = encode_spm;
        code = open_model(t, path, model, n_vocab, err);
        *tokenizer = code == ERR_OK ? owner.release() : nullptr;
        return code;
    } catch (const std::bad_alloc &) {
        return err_set(err, ERR_MEMORY, "%s: no memory to read it", path);
    } catch (const std::exception &e) {
        return err_set(err, ERR_FORMAT, "%s: not a SentencePiece model: %s", path, e.what());
    }
}
