/* See added_tokens.h. In doubtful cases the rules are those of Hugging Face's package: a token that
 * does not match is passed over, and the search goes on behind it. */
#include "engine/added_tokens.h"
#include "engine/unicode.h"
#include "kernels/utf8.h"

#include <stdlib.h>
#include <string.h>

static int compare(const void *left, const void *right)
{
    const struct added_token *const a = left;
    const struct added_token *const b = right;
    const int order = memcmp(a->text, b->text, a->bytes < b->bytes ? a->bytes : b->bytes);
    return order != 0 ? order : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

const struct added_token *added_tokens_sort(struct added_tokens *tokens)
{
    if (tokens->n > 0) {
        qsort(tokens->token, (size_t)tokens->n, sizeof *tokens->token, compare);
    }
    for (int32_t i = 1; i < tokens->n; i++) {
        if (compare(&tokens->token[i - 1], &tokens->token[i]) == 0) {
            return &tokens->token[i];
        }
    }
    int32_t at = 0;
    for (int byte = 0; byte <= 256; byte++) {
        while (at < tokens->n && (unsigned char)tokens->token[at].text[0] < byte) {
            at++;
        }
        tokens->first[byte] = at;
    }
    return NULL;
}

/* The first token from low on, below high, whose byte number depth is at least byte. */
static int32_t bound(const struct added_tokens *tokens, int32_t low, int32_t high, size_t depth,
                     unsigned byte)
{
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if ((unsigned char)tokens->token[middle].text[depth] < byte) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The longest token that begins at text[at], or NULL: the range of tokens that agree with the text
 * so far is narrowed byte by byte. */
static const struct added_token *longest_at(const struct added_tokens *tokens, const char *text,
                                            size_t bytes, size_t at)
{
    const unsigned char begin = (unsigned char)text[at];
    int32_t low = tokens->first[begin];
    int32_t high = tokens->first[begin + 1];
    const struct added_token *found = NULL;
    for (size_t depth = 1; low < high; depth++) {
        if (tokens->token[low].bytes == depth) { /* the shortest comes first */
            found = &tokens->token[low++];
        }
        if (at + depth == bytes) {
            break;
        }
        const unsigned byte = (unsigned char)text[at + depth];
        low = bound(tokens, low, high, depth, byte);
        high = bound(tokens, low, high, depth, byte + 1);
    }
    return found;
}

/* The first byte of the character that ends before text[at], at > 0. */
static size_t before(const char *text, size_t at)
{
    do {
        at--;
    } while (at > 0 && ((unsigned char)text[at] & 0xc0) == 0x80);
    return at;
}

static bool is_word(const char *text, size_t bytes, size_t at)
{
    return unicode_is_word(utf8_next(text + at, bytes - at).code);
}

static bool is_space(const char *text, size_t bytes, size_t at)
{
    return unicode_class(utf8_next(text + at, bytes - at).code) == UNICODE_SPACE;
}

bool added_search_next(struct added_search *search, struct added_match *match)
{
    const char *const text = search->text;
    const size_t bytes = search->bytes;
    const struct added_tokens *const tokens = search->tokens;
    for (size_t at = search->at; tokens->n > 0 && at < bytes;) {
        const unsigned char begin = (unsigned char)text[at];
        const struct added_token *const token = tokens->first[begin] < tokens->first[begin + 1]
                                                    ? longest_at(tokens, text, bytes, at)
                                                    : NULL;
        if (token == NULL) {
            at++;
            continue;
        }
        size_t first = at;
        size_t end = at + token->bytes;
        at = end;
        if ((token->special && !search->special) ||
            (token->single_word && ((first > 0 && is_word(text, bytes, before(text, first))) ||
                                    (end < bytes && is_word(text, bytes, end))))) {
            continue;
        }
        while (token->lstrip && first > search->plain &&
               is_space(text, bytes, before(text, first))) {
            first = before(text, first);
        }
        while (token->rstrip && end < bytes && is_space(text, bytes, end)) {
            end += (size_t)utf8_next(text + end, bytes - end).bytes;
        }
        if (token->lstrip && end <= search->plain) {
            continue; /* white space that the token before has swallowed already */
        }
        search->at = at;
        search->plain = end;
        *match = (struct added_match){first, end, token->id};
        return true;
    }
    search->at = bytes;
    return false;
}
