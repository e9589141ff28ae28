/* What tensors a model of a given shape has, and how random ones are drawn: shared by make_model.c,
 * which writes them to a file, and random_model.c, which makes them in memory. */
#ifndef TESTS_BENCH_MODEL_PLAN_H
#define TESTS_BENCH_MODEL_PLAN_H

#include "kernels/err.h"
#include "kernels/tensor.h"

#include <stdbool.h>

enum { PLAN_TENSOR_MAX = 8192, PLAN_NAME_MAX = 80, PLAN_MEMORY_MAX = 8 };

struct plan_shape {
    int layers, width, heads, ff, vocab, positions;
    int n_memory;                      /* alike, each in a layer of its own */
    int memory_layer[PLAN_MEMORY_MAX]; /* ascending */
    int memory_heads, k, keys, key_width;
    bool flat; /* keys are whole: as many slots as keys, instead of keys² */
    enum dtype dtype;
    /* These are for make_model alone. */
    bool is_llama;  /* of Memory Layers at Scale, gated memories that share values */
    int kv_heads;   /* of those, heads of keys and values; 0 = heads */
    bool tied;      /* of those, the output matrix is the embeddings */
    bool has_codes; /* of those, the values have 4 bits (models/FORMAT.md's Q4) */
};

/* Model A of the performance notes: 12 layers of 1024, one memory of 512² slots in layer 6. */
#define PLAN_MODEL_A                                                                               \
    {                                                                                              \
        12, 1024, 16, 4096, 60000, 512, 1, {6}, 4, 32, 512, 256, false, DTYPE_F32, false, 0,       \
            false, false                                                                           \
    }

struct plan_entry {
    char name[PLAN_NAME_MAX];
    int64_t dim[4];
    int n_dim;
    enum dtype dtype; /* Q4: codes, two in a byte */
    double spread;    /* uniform in ±spread: the variance that a trained initialiser would give */
    double offset;    /* added: 1 for norm gains and variances */
};

struct plan {
    struct plan_entry *entry; /* Owner: this. [n] */
    int n;
};

/* False without memory. */
bool plan_new(struct plan *plan, const struct plan_shape *shape);
void plan_free(struct plan *plan);
int64_t plan_elems(const struct plan_entry *entry);
int64_t plan_slots(const struct plan_shape *shape);
/* What keys and values are held in unless an option says otherwise (models/model.h). */
enum dtype plan_cache(const struct plan_shape *shape);

/* Sets what a flag names (--layers, --width, --heads, --ff, --vocab, --positions, --memory-layer -1
 * (none) or 3,7,11, --memory-heads, --k, --keys, --key-width, --kind product|flat, --dtype
 * f32|bf16). False if there is no such flag or the value is out of bounds. */
bool plan_argument(struct plan_shape *shape, const char *flag, const char *value);

#endif
