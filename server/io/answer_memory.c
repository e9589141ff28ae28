/* Memory traces in answers: see answer_memory.h. */
#include "server/io/answer_memory.h"

#include "engine/pkm_stats.h"
#include "server/json/json.h"

/* A position's heads, and for each the slots and weights, best first. */
static void put_position(struct text *out, const struct pkm_trace *trace,
                         const struct pkm_shape *shape, int64_t p)
{
    const int64_t k = shape->k_top;
    json_open(out, '[');
    for (int64_t h = 0; h < shape->n_head; h++) {
        const int64_t first = (p * shape->n_head + h) * k;
        json_open(out, '{');
        json_key(out, "slots");
        json_open(out, '[');
        for (int64_t j = 0; j < k; j++) {
            json_put_int(out, trace->slots[first + j]);
        }
        json_close(out, ']');
        json_key(out, "weights");
        json_open(out, '[');
        for (int64_t j = 0; j < k; j++) {
            json_put_float(out, trace->weights[first + j]);
        }
        json_close(out, ']');
        json_close(out, '}');
    }
    json_close(out, ']');
}

static void json_top(struct text *out, const char *key, int64_t n_slot)
{
    if (n_slot >= 0) {
        json_field_int(out, key, n_slot);
    } else {
        json_field_null(out, key);
    }
}

static void answer_pkm_stats(struct text *out, const struct pkm_stats *stats)
{
    json_field_int(out, "lookups", stats->lookups);
    json_field_double(out, "mem_used", stats->used);
    json_field_double(out, "mem_kl_w", stats->kl_w);
    json_field_double(out, "mem_kl_u", stats->kl_u);
    json_field_double(out, "mem_gini_w", stats->gini_w);
    json_field_double(out, "mem_gini_u", stats->gini_u);
    json_top(out, "mem_top50_w", stats->top50_w);
    json_top(out, "mem_top90_w", stats->top90_w);
    json_top(out, "mem_top99_w", stats->top99_w);
    json_field_int(out, "mem_top50_u", stats->top50_u);
    json_field_int(out, "mem_top90_u", stats->top90_u);
    json_field_int(out, "mem_top99_u", stats->top99_u);
}

int64_t answer_lookups(const struct item *item, const struct model_info *info)
{
    int64_t n = 0;
    for (int m = 0; item->trace != NULL && m < info->n_memory; m++) {
        n += item->trace[m].lookups;
    }
    return n;
}

void answer_memory_begin(struct answer_memory *writer, const struct request *request,
                         const struct item *item, const struct model_info *info,
                         enum input_memory memory, const struct slots_wish *slots, int64_t from)
{
    *writer = (struct answer_memory){.item = item,
                                     .info = info,
                                     .next = ANSWER_MEMORY_BEGIN,
                                     .layers = true,
                                     .tokens = memory == MEMORY_TOKENS};
    if (memory == MEMORY_SLOTS && info->n_memory > 0) {
        const int64_t end = slots_first(request, item) + item->trace[0].n_position;
        slots_begin(&writer->slots, request, item, info, slots, from, end, false);
    }
}

void answer_memory_begin_part(struct answer_memory *writer, const struct request *request,
                              const struct item *item, const struct model_info *info,
                              const struct slots_wish *slots, int64_t from, int64_t end)
{
    *writer = (struct answer_memory){.item = item, .info = info, .next = ANSWER_MEMORY_BEGIN};
    slots_begin(&writer->slots, request, item, info, slots, from, end, true);
}

/* Opens the next layer: its figures. */
static bool open_layer(struct answer_memory *w, struct text *out, struct api_error *error)
{
    const struct pkm_info *const layer = &w->info->memory[w->layer];
    struct pkm_stats stats;
    struct err err = {0};
    if (pkm_stats_of(&w->item->trace[w->layer], layer->n_slot, &stats, &err) != ERR_OK) {
        return api_error_set(error, 500, "out_of_memory", "memory", "%s", err.message);
    }
    json_open(out, '{');
    json_field_int(out, "layer", layer->layer);
    json_field_string(out, "place", memory_place_name(layer->place));
    json_field_int(out, "slots", layer->n_slot);
    json_field_int(out, "heads", layer->shape.n_head);
    json_field_int(out, "knn", layer->shape.k_top);
    answer_pkm_stats(out, &stats);
    return true;
}

static void close_layer(struct answer_memory *w, struct text *out)
{
    json_close(out, '}');
    w->layer++;
    w->next = ANSWER_MEMORY_LAYER;
}

static bool step_layer(struct answer_memory *w, struct text *out, struct api_error *error)
{
    if (w->layer == w->info->n_memory) {
        json_close(out, ']');
        w->next = ANSWER_MEMORY_SLOTS;
        return true;
    }
    if (!open_layer(w, out, error)) {
        return false;
    }
    if (w->tokens) {
        json_key(out, "tokens");
        json_open(out, '[');
        w->position = 0;
        w->next = ANSWER_MEMORY_POSITION;
    } else {
        close_layer(w, out);
    }
    return true;
}

static void step_position(struct answer_memory *w, struct text *out)
{
    const struct pkm_trace *const trace = &w->item->trace[w->layer];
    if (w->position < trace->n_position) {
        put_position(out, trace, &w->info->memory[w->layer].shape, w->position++);
    } else {
        json_close(out, ']');
        close_layer(w, out);
    }
}

bool answer_memory_next(struct answer_memory *w, struct text *out, size_t enough,
                        struct api_error *error)
{
    bool ok = true;
    while (ok && w->next != ANSWER_MEMORY_OVER && out->n < enough) {
        switch (w->next) {
        case ANSWER_MEMORY_OVER: break;
        case ANSWER_MEMORY_BEGIN:
            json_key(out, "memory");
            json_open(out, '{');
            w->next = ANSWER_MEMORY_SLOTS;
            if (w->layers) {
                json_key(out, "layers");
                json_open(out, '[');
                w->next = ANSWER_MEMORY_LAYER;
            }
            break;
        case ANSWER_MEMORY_LAYER: ok = step_layer(w, out, error); break;
        case ANSWER_MEMORY_POSITION: step_position(w, out); break;
        case ANSWER_MEMORY_SLOTS:
            ok = slots_next(&w->slots, out, enough, error);
            if (ok && w->slots.next == SLOTS_OVER) {
                json_close(out, '}');
                w->next = ANSWER_MEMORY_OVER;
            }
            break;
        }
    }
    return ok;
}
