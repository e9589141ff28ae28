/* Slot traces in requests and answers: see slots.h.
 *
 * The engine keeps the look-ups of each memory by itself, [position][head][k]; a block joins
 * memories of the same shape, [position][memory][head][k], little-endian, in base64. */
#include "server/io/slots.h"

#include "engine/pkm_stats.h"
#include "engine/scoring.h"
#include "server/json/json.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* ---- requests ------------------------------------------------------------------------------ */

/* name: of the field in memory_slots, with a dot, or "" for itself. */
static bool wrong(struct fields *fields, const char *name, const char *due, const json_t *value)
{
    return api_error_set(fields->error, 400, "invalid_value", "memory_slots",
                         "memory_slots%s must be %s, not %s", name, due, fields_shown(value).text);
}

static bool read_memories(struct fields *fields, const json_t *value, int n_memory,
                          struct slots_wish *wish)
{
    if (!json_is_array(value) || json_array_size(value) == 0) {
        return wrong(fields, ".memories", "a list of one or more memories", value);
    }
    wish->memories = 0;
    for (size_t i = 0; i < json_array_size(value); i++) {
        int64_t m = -1;
        const json_t *const each = json_array_get(value, i);
        if (!fields_is_integer(each, &m) || m < 0 || m >= n_memory) {
            return api_error_set(fields->error, 400, "invalid_value", "memory_slots",
                                 "memory_slots.memories[%zu] must be an integer 0 ... %d, not %s",
                                 i, n_memory - 1, fields_shown(each).text);
        }
        wish->memories |= UINT64_C(1) << m;
    }
    return true;
}

static bool read_one(struct fields *fields, const char *key, const json_t *value, int n_memory,
                     struct slots_wish *wish)
{
    int64_t n = -1;
    if (strcmp(key, "start") == 0) {
        return (fields_is_integer(value, &n) && n >= 0 && (wish->start = n) == n) ||
               wrong(fields, ".start", "an integer from 0", value);
    }
    if (strcmp(key, "memories") == 0) {
        return read_memories(fields, value, n_memory, wish);
    }
    if (strcmp(key, "weights") == 0) {
        wish->weights = json_is_true(value);
        return json_is_boolean(value) || wrong(fields, ".weights", "true or false", value);
    }
    if (strcmp(key, "top") == 0) {
        if (!fields_is_integer(value, &n) || n < 1 || n > SLOTS_TOP_MAX) {
            return api_error_set(fields->error, 400, "invalid_value", "memory_slots",
                                 "memory_slots.top must be an integer 1 ... %d, not %s",
                                 SLOTS_TOP_MAX, fields_shown(value).text);
        }
        wish->top = (int)n;
        return true;
    }
    return api_error_set(fields->error, 400, "invalid_value", "memory_slots",
                         "memory_slots takes start, memories, weights and top, not %.40s", key);
}

void slots_read(struct fields *fields, const struct api_limits *limits, enum input_memory memory,
                struct slots_wish *wish)
{
    const int n_memory = limits->info->n_memory;
    json_t *const value = fields_get(fields, "memory_slots", NULL);
    *wish = (struct slots_wish){
        .weights = true, .memories = n_memory < 64 ? (UINT64_C(1) << n_memory) - 1 : UINT64_MAX};
    if (value == NULL || fields->error->status != 0) {
        return;
    }
    if (memory != MEMORY_SLOTS) {
        (void)api_error_set(fields->error, 400, "invalid_value", "memory_slots",
                            "memory_slots is for \"memory\": \"slots\" only");
        return;
    }
    if (!json_is_object(value)) {
        (void)wrong(fields, "", "an object with start, memories, weights and top, as wanted",
                    value);
        return;
    }
    const char *key = NULL;
    json_t *each = NULL;
    json_object_foreach(value, key, each)
    {
        if (!json_is_null(each) && !read_one(fields, key, each, n_memory, wish)) {
            return;
        }
    }
}

static bool is_wanted(const struct slots_wish *wish, int m)
{
    return (wish->memories >> m & 1) != 0;
}

int64_t slots_bytes(const struct slots_wish *wish, const struct model_info *info, int64_t n)
{
    if (wish->top > 0) {
        return (int64_t)wish->top * SLOTS_TOP_BYTES;
    }
    int64_t n_hit = 0;
    for (int m = 0; m < info->n_memory; m++) {
        const struct pkm_shape *const shape = &info->memory[m].shape;
        n_hit += is_wanted(wish, m) ? (int64_t)shape->n_head * shape->k_top : 0;
    }
    const int64_t each = (int64_t)sizeof(int32_t) + (wish->weights ? (int64_t)sizeof(float) : 0);
    return n > wish->start ? (n - wish->start) * n_hit * each : 0;
}

bool slots_too_large(struct api_error *error, int64_t bytes, const struct api_limits *limits)
{
    return api_error_set(error, 400, "trace_too_large", "memory",
                         "the slots of this request take %lld bytes or more, the limit is %lld "
                         "(%s): ask for less with memory_slots, or send less text at once",
                         (long long)bytes, (long long)limits->max_trace.most,
                         limits->max_trace.flag);
}

/* ---- answers: arrays ----------------------------------------------------------------------- */

enum { BASE64_WORDS = 128 /* at once */ };

static void base64_group(char *group, uint32_t bits)
{
    static const char letters[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < 4; i++) {
        group[i] = letters[bits >> (18 - 6 * i) & 63];
    }
}

/* The words' bytes, the lowest first. */
static void base64_words(struct base64 *b, struct text *out, const uint32_t *words, int n)
{
    char chars[8 * BASE64_WORDS];
    size_t n_char = 0;
    uint64_t bits = b->bits;
    int n_bit = b->n_bit;
    CHECK(n <= BASE64_WORDS);
    for (int i = 0; i < n; i++) {
        bits = bits << 32 | __builtin_bswap32(words[i]);
        for (n_bit += 32; n_bit >= 24; n_char += 4) {
            n_bit -= 24;
            base64_group(chars + n_char, (uint32_t)(bits >> n_bit));
        }
    }
    b->bits = bits;
    b->n_bit = n_bit;
    text_add(out, chars, n_char);
}

static void base64_end(struct base64 *b, struct text *out)
{
    char group[4];
    if (b->n_bit > 0) {
        base64_group(group, (uint32_t)(b->bits << (24 - b->n_bit)));
        memset(group + 1 + b->n_bit / 8, '=', (size_t)(3 - b->n_bit / 8));
        text_add(out, group, sizeof group);
    }
    *b = (struct base64){0};
}

static void put_position(struct slots_writer *w, struct text *out)
{
    uint32_t words[BASE64_WORDS];
    for (int i = 0; i < w->n_memory; i++) {
        const struct pkm_trace *const trace = &w->item->trace[w->memory[i]];
        const bool weights = w->next == SLOTS_WEIGHTS;
        const int64_t first = w->position * w->n_hit;
        for (int64_t at = 0; at < w->n_hit; at += BASE64_WORDS) {
            const int64_t left = w->n_hit - at;
            const int n = left < BASE64_WORDS ? (int)left : BASE64_WORDS;
            memcpy(words,
                   weights ? (const void *)(trace->weights + first + at)
                           : (const void *)(trace->slots + first + at),
                   (size_t)n * sizeof *words);
            base64_words(&w->base64, out, words, n);
        }
    }
    w->position++;
}

static void open_array(struct slots_writer *w, struct text *out)
{
    json_key(out, w->next == SLOTS_WEIGHTS ? "weights" : "indices");
    text_puts(out, "\"");
    w->position = w->first;
}

static void step_array(struct slots_writer *w, struct text *out)
{
    if (w->position < w->end) {
        put_position(w, out);
    }
    if (w->position < w->end) {
        return;
    }
    base64_end(&w->base64, out);
    text_puts(out, "\"");
    out->comma = true;
    if (w->next == SLOTS_INDICES && w->wish->weights) {
        w->next = SLOTS_WEIGHTS;
        open_array(w, out);
    } else {
        json_close(out, '}');
        w->next = SLOTS_BLOCK;
    }
}

/* ---- answers: the slots read most ---------------------------------------------------------- */

struct slot_sum {
    int memory;
    int32_t slot;
    int64_t n; /* reads */
    double weight;
};

/* Which comes first in the answer. */
static int by_weight(const void *a, const void *b)
{
    const struct slot_sum *const x = a;
    const struct slot_sum *const y = b;
    return x->weight < y->weight || x->weight > y->weight ? (x->weight < y->weight ? 1 : -1)
           : x->memory != y->memory                       ? x->memory - y->memory
                                    : (x->slot > y->slot) - (x->slot < y->slot);
}

/* The first of all sums so far: a heap whose root comes last. */
struct slots_top {
    struct slot_sum *sum; /* Owner: [max] */
    int n, max;
    int memory; /* whose slots are added now */
};

static void top_swap(struct slots_top *top, int i, int j)
{
    const struct slot_sum sum = top->sum[i];
    top->sum[i] = top->sum[j];
    top->sum[j] = sum;
}

static void top_add(void *ctx, int32_t slot, int64_t n, double weight)
{
    struct slots_top *const top = ctx;
    const struct slot_sum sum = {top->memory, slot, n, weight};
    struct slot_sum *const heap = top->sum;
    if (top->n < top->max) {
        int i = top->n++;
        heap[i] = sum;
        for (; i > 0 && by_weight(&heap[i], &heap[(i - 1) / 2]) > 0; i = (i - 1) / 2) {
            top_swap(top, i, (i - 1) / 2);
        }
        return;
    }
    if (by_weight(&sum, &heap[0]) > 0) {
        return;
    }
    heap[0] = sum;
    for (int i = 0, last; 2 * i + 1 < top->n; i = last) {
        const int left = 2 * i + 1;
        const int right = left + 1 < top->n ? left + 1 : left;
        last = by_weight(&heap[left], &heap[right]) > 0 ? left : right;
        if (by_weight(&heap[last], &heap[i]) < 0) {
            break;
        }
        top_swap(top, i, last);
    }
}

static bool put_top(const struct slots_writer *w, struct text *out, struct api_error *error)
{
    const struct model_info *const info = w->info;
    const int max = w->wish->top;
    struct slots_top top = {.max = max, .sum = malloc((size_t)max * sizeof *top.sum)};
    bool ok = top.sum != NULL;
    for (int i = 0; ok && i < w->n_memory; i++) {
        const int m = w->memory[i];
        const struct pkm_trace *const trace = &w->item->trace[m];
        const int64_t n_hit = (int64_t)info->memory[m].shape.n_head * info->memory[m].shape.k_top;
        const int64_t first = w->first * n_hit;
        const int64_t n = (w->end - w->first) * n_hit;
        top.memory = m;
        ok = pkm_sums(trace->slots + first, trace->weights + first, n, info->memory[m].n_slot,
                      top_add, &top, NULL) == ERR_OK;
    }
    if (!ok) {
        free(top.sum);
        return api_error_set(error, 500, "out_of_memory", "memory",
                             "no memory for the slots' sums");
    }
    qsort(top.sum, (size_t)top.n, sizeof *top.sum, by_weight);
    json_key(out, "top");
    json_open(out, '[');
    for (int i = 0; i < top.n; i++) {
        const struct slot_sum *const sum = &top.sum[i];
        json_open(out, '[');
        json_put_int(out, sum->memory);
        json_put_int(out, sum->slot);
        json_put_int(out, sum->n);
        json_put_double(out, sum->weight);
        json_close(out, ']');
    }
    json_close(out, ']');
    free(top.sum);
    return true;
}

/* ---- answers: blocks ----------------------------------------------------------------------- */

int64_t slots_first(const struct request *request, const struct item *item)
{
    const bool is_cut = request->kind == REQUEST_SCORE && item->block == 0 &&
                        score_item_window_count(request, item) > 0;
    return is_cut ? score_item_window_at(request, item, 0).first : 0;
}

static bool has_shape(const struct model_info *info, int m, const struct pkm_shape *shape)
{
    return info->memory[m].shape.n_head == shape->n_head &&
           info->memory[m].shape.k_top == shape->k_top;
}

static void put_place(const struct slots_writer *w, struct text *out, const struct pkm_shape *shape)
{
    json_field_int(out, "start", w->first + slots_first(w->request, w->item));
    json_field_int(out, "n_position", w->end - w->first);
    json_key(out, "memories");
    json_open(out, '[');
    for (int i = 0; i < w->n_memory; i++) {
        json_put_int(out, w->memory[i]);
    }
    json_close(out, ']');
    if (shape != NULL) {
        json_field_int(out, "heads", shape->n_head);
        json_field_int(out, "knn", shape->k_top);
    }
}

/* Begins the block of all requested memories that have the shape; NULL = any. */
static void open_block(struct slots_writer *w, struct text *out, const struct pkm_shape *shape)
{
    w->n_memory = 0;
    for (int m = 0; m < w->info->n_memory; m++) {
        if (is_wanted(w->wish, m) && (shape == NULL || has_shape(w->info, m, shape))) {
            w->memory[w->n_memory++] = m;
            w->told |= UINT64_C(1) << m;
        }
    }
    json_open(out, '{');
    put_place(w, out, shape);
}

static void step_block(struct slots_writer *w, struct text *out)
{
    int m = 0;
    while (m < w->info->n_memory && (!is_wanted(w->wish, m) || (w->told >> m & 1) != 0)) {
        m++;
    }
    if (m == w->info->n_memory) {
        json_close(out, ']');
        w->next = SLOTS_OVER;
        return;
    }
    const struct pkm_shape *const shape = &w->info->memory[m].shape;
    open_block(w, out, shape);
    w->n_hit = (int64_t)shape->n_head * shape->k_top;
    w->next = SLOTS_INDICES;
    open_array(w, out);
}

/* In place of arrays. */
static bool write_top(struct slots_writer *w, struct text *out, struct api_error *error)
{
    open_block(w, out, NULL);
    const bool ok = put_top(w, out, error);
    json_close(out, '}');
    json_close(out, ']');
    w->next = SLOTS_OVER;
    return ok;
}

void slots_begin(struct slots_writer *writer, const struct request *request,
                 const struct item *item, const struct model_info *info,
                 const struct slots_wish *wish, int64_t from, int64_t end, bool is_part)
{
    const int64_t base = slots_first(request, item);
    const int64_t start = wish->start > from ? wish->start : from;
    const int64_t first = start > base ? start - base : 0;
    *writer = (struct slots_writer){.request = request,
                                    .item = item,
                                    .info = info,
                                    .wish = wish,
                                    .next = SLOTS_BEGIN,
                                    .first = first,
                                    .end = end - base > first ? end - base : first};
    if (is_part && writer->end == first) {
        writer->next = SLOTS_OVER;
    }
}

bool slots_next(struct slots_writer *w, struct text *out, size_t enough, struct api_error *error)
{
    bool ok = true;
    while (ok && w->next != SLOTS_OVER && out->n < enough) {
        if (w->next == SLOTS_BEGIN) {
            json_key(out, "slots");
            json_open(out, '[');
            w->next = SLOTS_BLOCK;
        } else if (w->next == SLOTS_BLOCK && w->wish->top > 0) {
            ok = write_top(w, out, error);
        } else if (w->next == SLOTS_BLOCK) {
            step_block(w, out);
        } else {
            step_array(w, out);
        }
    }
    return ok;
}
