/* The CPU backend: opening, the op table, and the memory that ops work in. */
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    SMALL_ALIGN = 128, /* two cache lines: neighbours are prefetched in pairs */
    HUGE_PAGE = 2 << 20,
    HUGE_MIN = HUGE_PAGE / 2, /* bytes that are worth one: a matrix of 1024 x 1024 in int8 */
};

static size_t align_of(size_t bytes)
{
    return bytes >= HUGE_MIN ? HUGE_PAGE : SMALL_ALIGN;
}

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

/* What stands in front of the memory. */
struct owner {
    void *base;
    size_t bytes; /* from base on */
    bool is_mapped;
};

void *cpu_alloc(size_t bytes)
{
    const size_t align = align_of(bytes);
    if (bytes > SIZE_MAX - 3 * align) {
        return NULL;
    }
    const size_t padded = round_up(bytes, align);
    struct owner owner = {.bytes = sizeof owner + padded + align, .is_mapped = align == HUGE_PAGE};
    if (owner.is_mapped) {
        owner.base =
            mmap(NULL, owner.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        owner.base = owner.base == MAP_FAILED ? NULL : owner.base;
    } else {
        owner.base = calloc(1, owner.bytes);
    }
    if (owner.base == NULL) {
        return NULL;
    }
    const size_t base = (size_t)(uintptr_t)owner.base;
    struct owner *const data =
        (void *)((char *)owner.base + (round_up(base + sizeof owner, align) - base));
    data[-1] = owner;
    if (owner.is_mapped) {
        (void)madvise(data, padded, MADV_HUGEPAGE);
    }
    return data;
}

void cpu_free(void *data)
{
    if (data == NULL) {
        return;
    }
    const struct owner owner = ((struct owner *)data)[-1];
    if (owner.is_mapped) {
        (void)munmap(owner.base, owner.bytes);
    } else {
        free(owner.base);
    }
}

enum err_code cpu_reserve(struct scratch *scratch, size_t bytes, const char *purpose,
                          struct err *err)
{
    if (bytes <= scratch->bytes) {
        return ERR_OK;
    }
    void *const data = cpu_alloc(bytes);
    if (data == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no %zu bytes of memory left to work in", purpose,
                       bytes);
    }
    memset(data, 0, bytes); /* taken from the system now, not by the first request */
    cpu_free(scratch->data);
    *scratch = (struct scratch){data, bytes};
    return ERR_OK;
}

enum err_code cpu_reserve_slices(struct cpu_backend *cpu, size_t bytes, const char *purpose,
                                 struct err *err)
{
    if (bytes <= cpu->slice_bytes) {
        return ERR_OK;
    }
    const size_t slice = round_up(bytes, SMALL_ALIGN);
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

static enum err_code cpu_buffer_new(struct backend *be, void **data, size_t bytes,
                                    const char *purpose, struct err *err)
{
    *data = cpu_alloc(bytes);
    if (*data == NULL) {
        return err_set(err, ERR_MEMORY, "%s: %s has no %zu bytes left; lower the limits", purpose,
                       be->name, bytes);
    }
    return ERR_OK;
}

static void cpu_buffer_free(struct backend *be, void *data)
{
    (void)be;
    cpu_free(data);
}

static enum err_code cpu_step_new(struct backend *be, struct step **step,
                                  const struct step_limits *limits, struct err *err)
{
    struct cpu_backend *const cpu = cpu_of(be);
    enum err_code code = ref_step_new(be, step, limits, err);
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
        ref_step_free(be, *step);
        *step = NULL;
    }
    return code;
}

static void cpu_step_begin(struct backend *be, struct step *step)
{
    ref_step_begin(be, step);
    cpu_step_rows(cpu_of(be), step);
}

static void cpu_close(struct backend *be)
{
    struct cpu_backend *const cpu = cpu_of(be);
    pool_free(cpu->pool);
    cpu_free(cpu->words.data);
    cpu_free(cpu->hidden_words.data);
    cpu_free(cpu->thread.data);
    cpu_free(cpu->blocks.data);
    cpu_free(cpu->row_seq.data);
    cpu_free(cpu->goals.data);
    cpu_free(cpu->parts.data);
    free(cpu);
}

#define CPU_SLOT(op) .op = cpu_##op,

static const struct backend_ops cpu_ops = {.close = cpu_close,
                                           .buffer_new = cpu_buffer_new,
                                           .buffer_free = cpu_buffer_free,
                                           .weight_new = cpu_weight_new,
                                           .weight_free = cpu_weight_free,
                                           .weight_bytes = cpu_weight_bytes,
                                           .step_new = cpu_step_new,
                                           .step_free = ref_step_free,
                                           .upload = ref_upload,
                                           .download = ref_download,
                                           .memory_available = ref_memory_available,
                                           .step_begin = cpu_step_begin,
                                           .submit = ref_submit,
                                           .finish = ref_finish,
                                           .measure = cpu_measure,
                                           OP_LIST(CPU_SLOT)};

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
    cpu->base.has_int8 = true;
    cpu->base.memory_bytes = machine_memory_bytes();
    cpu->simd = found.simd;
    cpu->bf16 = found.bf16;
    (void)snprintf(cpu->base.name, sizeof cpu->base.name, "cpu-%s", found.name);
    (void)snprintf(cpu->base.description, sizeof cpu->base.description,
                   "CPU, %s kernels, %d of %d cores, %zu MiB of memory", found.name, n, n_core,
                   cpu->base.memory_bytes >> 20);
    const enum err_code pool_code = pool_new(&cpu->pool, n, err);
    if (pool_code != ERR_OK) {
        cpu_close(&cpu->base);
        return pool_code;
    }
    *be = &cpu->base;
    return ERR_OK;
}
