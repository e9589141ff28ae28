/* The CPU backend: opening, the op table, and the memory that ops work in. */
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum err_code cpu_reserve(struct scratch *scratch, size_t bytes, const char *purpose,
                          struct err *err)
{
    if (bytes <= scratch->bytes) {
        return ERR_OK;
    }
    void *const data = host_alloc(bytes);
    if (data == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no %zu bytes of memory left to work in", purpose,
                       bytes);
    }
    memset(data, 0, bytes); /* taken from the system now, not by the first request */
    host_free(scratch->data);
    *scratch = (struct scratch){data, bytes};
    return ERR_OK;
}

enum err_code cpu_reserve_slices(struct cpu_backend *cpu, size_t bytes, const char *purpose,
                                 struct err *err)
{
    if (bytes <= cpu->slice_bytes) {
        return ERR_OK;
    }
    enum { ALIGN = 128 }; /* two cache lines: neighbours are prefetched in pairs */
    const size_t slice = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    size_t total = 0;
    if (slice < bytes || __builtin_mul_overflow(slice, (size_t)cpu->base.n_thread, &total)) {
        total = SIZE_MAX; /* refused below */
    }
    const enum err_code code = cpu_reserve(&cpu->thread, total, purpose, err);
    if (code == ERR_OK) {
        cpu->slice_bytes = slice;
    }
    return code;
}

void cpu_for_rows(struct cpu_backend *cpu, struct tensor y, pool_fn *fn, void *arg)
{
    /* Up to this many elements, handing work to the threads costs more than it saves, even though
     * rows that were stored past the caches come from memory. */
    enum { ALONE = 1 << 12 };
    const int n_item = (int)((y.rows + CPU_ITEM_ROWS - 1) / CPU_ITEM_ROWS);
    if (y.rows * y.cols <= ALONE) {
        fn(arg, 0, 0, n_item);
    } else {
        pool_for(cpu->pool, n_item, POOL_DYNAMIC, fn, arg);
    }
}

static enum err_code cpu_step_new(struct backend *be, struct step **step,
                                  const struct step_limits *limits, struct err *err)
{
    struct cpu_backend *const cpu = cpu_of(be);
    enum err_code code = host_step_new(be, step, limits, err);
    const size_t n_tok = (size_t)limits->n_tok_max;
    const size_t n_out = (size_t)limits->n_out_max;
    const struct {
        struct scratch *scratch;
        size_t bytes;
    } needs[] = {
        {&cpu->blocks, n_tok * sizeof(struct row_block)},
        {&cpu->row_seq, n_tok * sizeof(int32_t)},
        {&cpu->goals, n_out * sizeof(struct logit_goal)},
        {&cpu->parts, n_out * LOGIT_BLOCKS * sizeof(struct logit_part)},
    };
    for (size_t i = 0; code == ERR_OK && i < sizeof needs / sizeof *needs; i++) {
        code = cpu_reserve(needs[i].scratch, needs[i].bytes, "step", err);
    }
    if (code == ERR_OK) {
        code = cpu_reserve_slices(cpu, cpu_attention_slice_bytes(cpu, limits), "attention", err);
    }
    if (code == ERR_OK) {
        code = cpu_reserve_slices(cpu, cpu_span_slice_bytes(cpu->simd, limits), "attention", err);
    }
    if (code == ERR_OK) {
        code = cpu_reserve_slices(cpu, cpu_vocab_slice_bytes(limits), "vocabulary", err);
    }
    if (code != ERR_OK) {
        host_step_free(be, *step);
        *step = NULL;
    }
    return code;
}

static void cpu_step_begin(struct backend *be, struct step *step)
{
    host_step_begin(be, step);
    cpu_step_rows(cpu_of(be), step);
}

static void cpu_close(struct backend *be)
{
    struct cpu_backend *const cpu = cpu_of(be);
    pool_free(cpu->pool);
    host_free(cpu->words.data);
    host_free(cpu->hidden_words.data);
    host_free(cpu->thread.data);
    host_free(cpu->blocks.data);
    host_free(cpu->row_seq.data);
    host_free(cpu->goals.data);
    host_free(cpu->parts.data);
    free(cpu);
}

#define CPU_SLOT(op) .op = cpu_##op,

static const struct backend_ops cpu_ops = {
    .close = cpu_close,
    .buffer_new = host_buffer_new,
    .buffer_free = host_buffer_free,
    .weight_new = cpu_weight_new,
    .weight_free = cpu_weight_free,
    .weight_bytes = cpu_weight_bytes,
    .step_new = cpu_step_new,
    .step_twin = host_step_twin,
    .step_free = host_step_free,
    .upload = host_upload,
    .download = host_download,
    .memory_available = host_memory_available,
    .step_begin = cpu_step_begin,
    .submit = host_submit,
    .fetch = host_fetch,
    .finish = host_finish,
    .fast_path_use = host_fast_path_use,
    .measure = cpu_measure,
    .compute = {OP_LIST(CPU_SLOT)},
};

enum err_code cpu_open(struct backend **be, const char *isa, int n_thread, struct err *err)
{
    *be = NULL;
    struct cpu_isa found;
    const enum err_code code = machine_kernels(&found, isa, err);
    if (code != ERR_OK) {
        return code;
    }
    const int n_core = machine_n_core();
    const int n = n_thread > 0 ? n_thread : n_core;
    struct cpu_backend *const cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL) {
        return err_set(err, ERR_MEMORY, "no memory left to open the CPU backend");
    }
    cpu->base.op = &cpu_ops;
    cpu->base.n_thread = n;
    cpu->base.is_host = true;
    cpu->base.has_int8 = cpu->base.has_int8_slots = true;
    cpu->base.n_tok_good = HOST_TOK_GOOD;
    cpu->base.memory_bytes = machine_memory_bytes();
    cpu->simd = found.simd;
    cpu->bf16 = found.bf16;
    (void)snprintf(cpu->base.name, sizeof cpu->base.name, "cpu-%s", found.name);
    (void)snprintf(cpu->base.description, sizeof cpu->base.description,
                   "CPU, %s kernels, cores %d of %d, %zu MiB of memory", found.name, n, n_core,
                   cpu->base.memory_bytes >> 20);
    const enum err_code pool_code = pool_new(&cpu->pool, n, err);
    if (pool_code != ERR_OK) {
        cpu_close(&cpu->base);
        return pool_code;
    }
    *be = &cpu->base;
    return ERR_OK;
}
