/* Redirections for the checks of pkm_read and pkm_experts: lists of a few overlays, drawn, and the
 * steps that bring them to a backend. */
#include "tests/kernels/check.h"

#include <string.h>

enum { N_ENTRY = 4, N_BIT = 6, N_SLOT_MAX = 1 << (N_BIT - 1), MEMORY = 1, N_IN_ROW = 3 };

/* One overlay's rows for one memory, on the host. */
struct stand_in {
    int memory;
    struct redirect_place place[1 << N_BIT];
    enum dtype dtype;
    int n;
    char *rows;   /* [n, cols] of dtype, in whole words */
    float *scale; /* [n], or NULL */
};

struct check_redirect {
    int cols;
    bool experts;
    struct stand_in entry[N_ENTRY]; /* ascending by memory */
    int *list;                      /* [n_row] bit e: the row has entry e */
};

static void put_place(struct stand_in *entry, int32_t slot, int32_t row)
{
    uint32_t at = redirect_place_of(slot, N_BIT);
    while (entry->place[at].slot >= 0) {
        at = (at + 1) % (1 << N_BIT);
    }
    entry->place[at] = (struct redirect_place){slot, row};
}

static void draw_rows(struct check *c, struct stand_in *entry, int cols)
{
    const size_t n = (size_t)entry->n * (size_t)cols;
    const float *const value = check_normal(c, n, 1);
    entry->rows = check_host(c, n + 1, sizeof(float));
    for (size_t i = 0; i < n; i++) {
        if (entry->dtype == DTYPE_F32) {
            memcpy(entry->rows + i * sizeof *value, &value[i], sizeof *value);
        } else if (entry->dtype == DTYPE_I8) {
            entry->rows[i] = (char)check_int(c, -127, 127);
        } else { /* half precision: any bits with a small exponent are a number below 2 */
            const uint16_t bits = entry->dtype == DTYPE_BF16
                                      ? bf16_from_f32(value[i])
                                      : (uint16_t)(check_random(c) & 0xbfffu);
            memcpy(entry->rows + i * sizeof bits, &bits, sizeof bits);
        }
    }
    if (entry->dtype == DTYPE_I8) {
        entry->scale = check_host(c, (size_t)entry->n, sizeof *entry->scale);
        for (int r = 0; r < entry->n; r++) {
            entry->scale[r] = (float)check_int(c, 1, 9) / 300;
        }
    }
}

struct check_redirect *check_redirect_new(struct check *c, int n_row, int n_slot, int cols,
                                          bool experts)
{
    struct check_redirect *const k = check_host(c, 1, sizeof *k);
    const bool is_host = c->side[SIDE_ONE]->is_host;
    *k = (struct check_redirect){.cols = cols, .experts = experts};
    for (int e = 0; e < N_ENTRY; e++) {
        struct stand_in *const entry = &k->entry[e];
        entry->memory = e == 0 ? MEMORY - 1 : e == N_ENTRY - 1 ? MEMORY + 1 : MEMORY;
        entry->dtype = is_host                ? (enum dtype)check_int(c, DTYPE_F32, DTYPE_I8)
                       : check_chance(c, 0.5) ? DTYPE_F32
                                              : DTYPE_BF16;
        memset(entry->place, -1, sizeof entry->place);
        /* Slots near one another never begin at the same place: the hash is Fibonacci's. */
        for (int32_t slot = check_int(c, 0, 2); slot < n_slot && entry->n < N_SLOT_MAX;
             slot += check_int(c, 1, 3 + n_slot / N_SLOT_MAX)) {
            put_place(entry, slot, entry->n++);
        }
        entry->n = entry->n > 0 ? entry->n : 1;
        draw_rows(c, entry, cols);
    }
    k->list = check_host(c, (size_t)n_row, sizeof *k->list);
    for (int r = 0; r < n_row; r++) { /* neighbours may be one sequence */
        const bool same = r % N_IN_ROW > 0 && check_chance(c, 0.5);
        k->list[r] = same ? k->list[r - 1] : check_int(c, 0, (1 << N_ENTRY) - 1);
    }
    return k;
}

/* n bytes, brought to the backend's memory as words. */
static const void *bytes_in(struct check *c, enum side side, const char *name, const void *host,
                            size_t n)
{
    return check_in(c, side, name, host, 1, (int64_t)((n + 3) / 4), DTYPE_I32).data;
}

static struct step_redirect entry_in(struct check *c, enum side side,
                                     const struct check_redirect *k, int e)
{
    const struct stand_in *const entry = &k->entry[e];
    const size_t n = (size_t)entry->n;
    const struct redirect_rows rows = {
        .data = bytes_in(c, side, "stand-ins", entry->rows,
                         n * (size_t)k->cols * dtype_bytes(entry->dtype)),
        .scale = entry->scale == NULL ? NULL : bytes_in(c, side, "scales", entry->scale, 4 * n),
        .dtype = entry->dtype};
    return (struct step_redirect){
        .memory = entry->memory,
        .n_bit = N_BIT,
        .place = bytes_in(c, side, "places", entry->place, sizeof entry->place),
        .values = rows,
        .experts = k->experts ? rows : (struct redirect_rows){0}};
}

struct step *check_redirect_step(struct check *c, enum side side, const struct check_redirect *k,
                                 int first, int n, struct pkm_redirect *redirect)
{
    struct backend *const be = c->side[side];
    const struct step_limits limits = {.n_tok_max = n,
                                       .n_seq_max = n,
                                       .n_page_max = 1,
                                       .n_out_max = 1,
                                       .n_redirect_max = n * N_ENTRY};
    struct step_redirect entry[N_ENTRY];
    struct step *step = NULL;
    CHECK(be->op->step_new(be, &step, &limits, NULL) == ERR_OK);
    for (int e = 0; e < N_ENTRY; e++) {
        entry[e] = entry_in(c, side, k, e);
    }
    for (int r = 0; r < n; r++) {
        const bool same =
            (first + r) % N_IN_ROW > 0 && r > 0 && k->list[first + r] == k->list[first + r - 1];
        step->pos[r] = same ? step->pos[r - 1] + 1 : 0;
        if (!same) {
            step->seq_first[step->n_seq++] = r;
            for (int e = 0; e < N_ENTRY; e++) {
                if ((k->list[first + r] >> e & 1) != 0) {
                    step->redirect[step->n_redirect++] = entry[e];
                }
            }
        }
        step->n_tok = step->seq_first[step->n_seq] = r + 1;
        step->redirect_first[step->n_seq] = step->n_redirect;
    }
    be->op->step_begin(be, step);
    *redirect = (struct pkm_redirect){step, MEMORY};
    return step;
}

static float stand_in_value(const struct stand_in *entry, int32_t row, int cols, int col)
{
    const size_t i = (size_t)row * (size_t)cols + (size_t)col;
    if (entry->dtype == DTYPE_F32) {
        float value;
        memcpy(&value, entry->rows + i * sizeof value, sizeof value);
        return value;
    }
    if (entry->dtype == DTYPE_I8) {
        return (float)(int8_t)entry->rows[i] * entry->scale[row];
    }
    uint16_t bits;
    memcpy(&bits, entry->rows + i * sizeof bits, sizeof bits);
    return entry->dtype == DTYPE_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

float check_redirect_value(const struct check_redirect *k, int row, int32_t slot, int col,
                           float value)
{
    for (int e = 0; k != NULL && e < N_ENTRY; e++) {
        const struct stand_in *const entry = &k->entry[e];
        for (int p = 0; (k->list[row] >> e & 1) != 0 && p < 1 << N_BIT; p++) {
            if (entry->memory == MEMORY && entry->place[p].slot == slot) {
                return stand_in_value(entry, entry->place[p].row, k->cols, col);
            }
        }
    }
    return value;
}
