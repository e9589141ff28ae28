/* `pkmserve memory examples`: for each of some slots the places of texts where it has the largest
 * weight, with the words around them. A place is a position of a text in one memory; its weight is
 * the sum over the heads that read the slot there, which is what its value row is multiplied by. */
#include "server/cli/texts.h"

#include "server/json/json.h"

#include <stdlib.h>
#include <string.h>

enum {
    GROUP_BYTES = 1 << 16, /* texts at once: all of their look-ups are kept, about a kilobyte a
                            * token */
    SLOT_MAX = 4096,       /* slots that can be asked for at once */
    BEFORE = 24,           /* tokens of context */
    AFTER = 12,
};

struct place {
    double weight;
    char *file; /* Owner: this, as of the JSON */
    int64_t line, position;
    int32_t token;
    int n_head;
    char *words; /* "before", "token" and "after" as JSON; "" without a tokenizer. [words_bytes] */
    size_t words_bytes;
};

struct target {
    int memory;
    int32_t slot;
    int64_t reads;
    double weight;
    /* Owner: this. [n_place] the best so far, in order; there is room for one more than --most */
    struct place *place;
    int n_place;
};

struct examples {
    const struct options *options;
    struct target *target; /* Owner: this. [n] */
    int n;
    int32_t *index
        [MODEL_PKM_MAX]; /* Owner: this. [n_slot] the number + 1 of the slot's target; NULL: none of
                          * its slots was asked for */
    struct model_info info;
    const struct tokenizer *tokenizer; /* Borrowed, while the engine is open */
};

static void place_free(struct place *place)
{
    free(place->file);
    free(place->words);
}

static void examples_free(struct examples *it)
{
    for (int t = 0; t < it->n; t++) {
        for (int p = 0; p < it->target[t].n_place; p++) {
            place_free(&it->target[t].place[p]);
        }
        free(it->target[t].place);
    }
    for (int m = 0; m < MODEL_PKM_MAX; m++) {
        free(it->index[m]);
    }
    free(it->target);
}

/* ---- --slots -------------------------------------------------------------------------------- */

static enum err_code add_target(struct examples *it, int m, int64_t slot, struct err *err)
{
    const size_t n_slot = (size_t)it->info.memory[m].n_slot;
    if (it->index[m] == NULL) {
        it->index[m] = calloc(n_slot, sizeof *it->index[m]);
    }
    if (it->index[m] == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for a list of %zu slots", n_slot);
    }
    if (it->index[m][slot] != 0) {
        return ERR_OK; /* named twice */
    }
    if (it->n == SLOT_MAX) {
        return err_set(err, ERR_ARGUMENT, "--slots: more than %d slots", SLOT_MAX);
    }
    struct target *const target = &it->target[it->n++];
    *target = (struct target){.memory = m, .slot = (int32_t)slot};
    it->index[m][slot] = it->n;
    target->place = calloc((size_t)it->options->most + 1, sizeof *target->place);
    return target->place != NULL
               ? ERR_OK
               : err_set(err, ERR_MEMORY, "--most %d: no memory", it->options->most);
}

/* The number at text, 0 or more; *end is behind it. -1: there is none. */
static int64_t number_at(const char *text, const char **end)
{
    int64_t n = 0;
    *end = text;
    while (**end >= '0' && **end <= '9' && n <= INT32_MAX) {
        n = n * 10 + (*(*end)++ - '0');
    }
    return *end == text ? -1 : n;
}

/* "17,99" or "2:17". */
static enum err_code read_slots(struct examples *it, struct err *err)
{
    const char *const given = it->options->slots;
    const char *at = given;
    enum err_code code = ERR_OK;
    it->target = calloc(SLOT_MAX, sizeof *it->target);
    if (it->target == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for a list of slots");
    }
    for (bool more = true; more && code == ERR_OK;) {
        const char *end = at;
        int64_t slot = number_at(at, &end);
        const int64_t memory = slot >= 0 && *end == ':' ? slot : -1;
        if (memory >= 0) {
            slot = number_at(end + 1, &end);
        }
        if (slot < 0 || (*end != ',' && *end != '\0') || memory >= it->info.n_memory) {
            return err_set(err, ERR_ARGUMENT,
                           "--slots: '%.60s' is no list of slots as 17,99, or 2:17 for slot 17 of "
                           "memory 2; n_memory is %d",
                           given, it->info.n_memory);
        }
        bool exists = false;
        for (int m = 0; m < it->info.n_memory && code == ERR_OK; m++) {
            if ((memory < 0 || memory == m) && slot < it->info.memory[m].n_slot) {
                exists = true;
                code = add_target(it, m, slot, err);
            }
        }
        if (!exists) {
            return err_set(err, ERR_ARGUMENT, "--slots: slot %lld does not exist", (long long)slot);
        }
        more = *end == ',';
        at = end + 1;
    }
    return code;
}

/* ---- places --------------------------------------------------------------------------------- */

/* The text of tokens from .. to-1 as a JSON string. */
static void put_words(struct text *out, const struct examples *it, const struct item *item,
                      int64_t from, int64_t to)
{
    struct detok detok;
    struct text words = {0};
    char *const buffer = malloc(tokenizer_bytes_max(it->tokenizer) + 16);
    out->failed = out->failed || buffer == NULL;
    detok_begin(&detok, it->tokenizer, from == 0);
    if (from > 0) {
        detok_follow(&detok, item->ids[from - 1]);
    }
    for (int64_t i = from; i < to && buffer != NULL; i++) {
        const size_t n =
            detok_push(&detok, item->ids[i], buffer, tokenizer_bytes_max(it->tokenizer) + 16);
        text_add(&words, buffer, n);
    }
    if (buffer != NULL) {
        text_add(&words, buffer,
                 detok_end(&detok, buffer, tokenizer_bytes_max(it->tokenizer) + 16));
    }
    json_string_n(out, words.data != NULL ? words.data : "", words.n);
    out->failed = out->failed || words.failed;
    text_free(&words);
    free(buffer);
}

static enum err_code fill_place(struct place *place, const struct examples *it,
                                const struct texts_item *text, struct err *err)
{
    const struct item *const item = text->item;
    const int64_t p = place->position;
    struct text words = {0};
    place->token = item->ids[p];
    place->line = text->line;
    place->file = strdup(cmd_shown_path(text->path));
    if (it->tokenizer != NULL) {
        json_key(&words, "before");
        put_words(&words, it, item, p > BEFORE ? p - BEFORE : 0, p);
        json_key(&words, "token");
        answer_put_spelling(&words, it->tokenizer, item->ids[p], p > 0 ? item->ids[p - 1] : -1);
        json_key(&words, "after");
        put_words(&words, it, item, p + 1,
                  p + 1 + AFTER < item->n_ids ? p + 1 + AFTER : item->n_ids);
    }
    place->words = words.data;
    place->words_bytes = words.n;
    return !words.failed && place->file != NULL ? ERR_OK
                                                : err_set(err, ERR_MEMORY, "no memory for a place");
}

/* Adds the place to the target's best ones if it is one of them: larger weights first, among equals
 * the earlier place. */
static enum err_code add_place(struct target *target, const struct examples *it,
                               const struct texts_item *text, struct place place, struct err *err)
{
    const int most = it->options->most;
    int at = target->n_place;
    target->reads += place.n_head;
    target->weight += place.weight;
    while (at > 0 && target->place[at - 1].weight < place.weight) {
        at--;
    }
    if (at == most) {
        return ERR_OK;
    }
    const enum err_code code = fill_place(&place, it, text, err);
    if (code != ERR_OK) {
        place_free(&place);
        return code;
    }
    memmove(target->place + at + 1, target->place + at,
            (size_t)(target->n_place - at) * sizeof place);
    target->place[at] = place;
    if (target->n_place == most) {
        place_free(&target->place[most]);
    } else {
        target->n_place++;
    }
    return ERR_OK;
}

/* Looks for the slots that were asked for among the look-ups of one position in memory m. */
static enum err_code look_at(struct examples *it, const struct texts_item *text, int m, int64_t p,
                             int64_t position, struct err *err)
{
    const struct pkm_shape *const shape = &it->info.memory[m].shape;
    const struct pkm_trace *const trace = &text->item->trace[m];
    const int64_t n_hit = (int64_t)shape->n_head * shape->k_top;
    const int32_t *const slot = trace->slots + p * n_hit;
    const float *const share = trace->weights + p * n_hit;
    enum err_code code = ERR_OK;
    for (int64_t j = 0; j < n_hit && code == ERR_OK; j++) {
        const int target = it->index[m][slot[j]] - 1;
        struct place place = {.position = position};
        bool told = target < 0;
        for (int64_t i = 0; i < n_hit && !told; i++) { /* the slot counts once, at its first
                                                        * look-up */
            told = slot[i] == slot[j] && i < j;
            if (slot[i] == slot[j]) {
                place.weight += (double)share[i];
                place.n_head++;
            }
        }
        if (!told) {
            code = add_place(&it->target[target], it, text, place, err);
        }
    }
    return code;
}

static enum err_code look_text(void *ctx, const struct texts_item *text, struct err *err)
{
    struct examples *const it = ctx;
    const int64_t first = slots_first(text->request, text->item);
    enum err_code code = ERR_OK;
    for (int m = 0; m < it->info.n_memory && code == ERR_OK; m++) {
        const int64_t n = it->index[m] != NULL ? text->item->trace[m].n_position : 0;
        for (int64_t p = 0; p < n && code == ERR_OK; p++) {
            code = look_at(it, text, m, p, first + p, err);
        }
    }
    return code;
}

static enum err_code begin(void *ctx, const struct cmd_engine *ce, struct err *err)
{
    struct examples *const it = ctx;
    (void)err;
    it->tokenizer = ce->limits.tokenizer;
    return ERR_OK;
}

/* ---- results -------------------------------------------------------------------------------- */

static void put_place(struct text *out, const struct place *place)
{
    json_open(out, '{');
    json_field_string(out, "file", place->file);
    if (place->line > 0) {
        json_field_int(out, "line", place->line);
    }
    json_field_int(out, "position", place->position);
    json_field_double(out, "weight", place->weight);
    json_field_int(out, "heads", place->n_head);
    json_field_int(out, "token_id", place->token);
    if (place->words_bytes > 0) {
        text_puts(out, ",");
        text_add(out, place->words, place->words_bytes);
    }
    json_close(out, '}');
}

static enum err_code print(const struct examples *it, struct err *err)
{
    struct text out = {0};
    json_open(&out, '{');
    json_key(&out, "slots");
    json_open(&out, '[');
    for (int t = 0; t < it->n; t++) {
        const struct target *const target = &it->target[t];
        json_open(&out, '{');
        json_field_int(&out, "memory", target->memory);
        json_field_int(&out, "slot", target->slot);
        json_field_int(&out, "reads", target->reads);
        json_field_double(&out, "weight", target->weight);
        json_key(&out, "places");
        json_open(&out, '[');
        for (int p = 0; p < target->n_place; p++) {
            put_place(&out, &target->place[p]);
        }
        json_close(&out, ']');
        json_close(&out, '}');
    }
    json_close(&out, ']');
    json_close(&out, '}');
    const enum err_code code = cmd_print(&out, err);
    text_free(&out);
    return code;
}

int cmd_memory_examples(const struct options *options)
{
    struct err err;
    struct examples *const it = calloc(1, sizeof *it);
    if (it == NULL) {
        (void)err_set(&err, ERR_MEMORY, "no memory");
        return cmd_fail(&err);
    }
    int status = -1;
    const struct texts texts = {.doing = "looking",
                                .group_bytes = GROUP_BYTES,
                                .begin = begin,
                                .take = look_text,
                                .ctx = it};
    it->options = options;
    enum err_code code = model_info_read(&it->info, options->model, &err);
    if (code == ERR_OK && it->info.n_memory == 0) {
        code = err_set(&err, ERR_UNSUPPORTED, "%s: the model has no memories", options->model);
    }
    if (code == ERR_OK) {
        code = read_slots(it, &err);
    }
    if (code == ERR_OK) {
        code = texts_run(&texts, options, &status, &err);
    }
    if (code == ERR_OK && status < 0) {
        status = 0;
        code = print(it, &err);
    }
    examples_free(it);
    free(it);
    return code == ERR_OK ? status : cmd_fail(&err);
}
