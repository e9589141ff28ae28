/* What the machine offers this process: cores, memory, instruction sets, and measured rates. */
#include "kernels/cpu/cpu.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

/* ---- limits -----------------------------------------------------------------------------------*/

/* The first one or two numbers of a control group's file; "max" or no file reads none. */
static int cgroup_read(const char *file, unsigned long long *a, unsigned long long *b)
{
    FILE *const f = fopen(file, "re");
    if (f == NULL) {
        return 0;
    }
    const int n = fscanf(f, "%llu %llu", a, b);
    (void)fclose(f);
    return n < 0 ? 0 : n;
}

int machine_n_core(void)
{
    cpu_set_t set;
    int n = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        n = CPU_COUNT(&set);
    } else {
        const long online = sysconf(_SC_NPROCESSORS_ONLN);
        n = online > 0 && online < POOL_THREADS_MAX ? (int)online : 1;
    }
    /* A container's quota: microseconds of CPU time per period. Threads beyond it would only make
     * the kernel stop all of them for the rest of each period. */
    unsigned long long quota = 0;
    unsigned long long period = 0;
    if (cgroup_read("/sys/fs/cgroup/cpu.max", &quota, &period) == 2 && period > 0) {
        const unsigned long long cores = quota / period;
        n = cores < (unsigned long long)n ? (cores > 0 ? (int)cores : 1) : n;
    }
    return n < 1 ? 1 : n > POOL_THREADS_MAX ? POOL_THREADS_MAX : n;
}

size_t machine_memory_bytes(void)
{
    const long n_page = sysconf(_SC_PHYS_PAGES);
    const long page = sysconf(_SC_PAGESIZE);
    size_t bytes = n_page > 0 && page > 0 ? (size_t)n_page * (size_t)page : 0;
    unsigned long long limit = 0;
    unsigned long long unused = 0;
    if (cgroup_read("/sys/fs/cgroup/memory.max", &limit, &unused) >= 1 && limit < bytes) {
        bytes = (size_t)limit;
    }
    return bytes;
}

/* ---- instruction sets -------------------------------------------------------------------------*/

static bool is_anywhere(void)
{
    return true;
}

/* Whether the machine has the set. The compiler may use any instruction of the -march of a set's
 * files; machines that have the ones asked for here have the rest of that level too. */
#if defined(__x86_64__)
static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bf16");
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

/* The matrix unit. A process must ask for its registers, and then all of its threads have them. */
static bool has_amx(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    /* AMX-BF16, AMX-TILE, AMX-INT8; not every compiler knows them */
    const unsigned amx = 1u << 22 | 1u << 24 | 1u << 25;
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & amx) == amx &&
           syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

/* The instruction for BF16 pairs does twice the work of an fma. AMD issues it as often, so it is
 * twice as fast; Intel's cores issue it a quarter as often (118 against 230 GFLOP/s measured), so
 * there pairs are widened to floats, which is also one rounding less. The vendor decides, not a
 * measurement: the same machine must give the same bits every day. */
static bool has_fast_pairs(void)
{
    return has_avx512() && __builtin_cpu_is("amd");
}
#elif defined(__aarch64__)
static bool has_neon_dot(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
}

static bool has_neon_bf16(void)
{
    return has_neon_dot() && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
}
#endif

struct isa {
    const char *name;
    const struct simd_kernels *simd;
    bool (*is_there)(void);
    enum gemm_bf16 bf16;
    bool is_named_only; /* for tests: a variant that this machine might not choose */
    const char *needs;
};

/* Best first; among rows with the same name, the first that the machine has. */
#if defined(__x86_64__)
#define ISA_NAMES "amx, avx512, avx2, plain or ref"
static const char needs_avx512[] = "AVX-512 with BF16 and VNNI";
static const struct isa isas[] = {
    {"amx", &simd_kernels_avx512, has_amx, GEMM_AMX, false, "AVX-512 and AMX with BF16 and INT8"},
    {"avx512", &simd_kernels_avx512, has_fast_pairs, GEMM_PAIRS, false, needs_avx512},
    {"avx512", &simd_kernels_avx512, has_avx512, GEMM_WIDE, false, needs_avx512},
    {"avx2", &simd_kernels_avx2, has_avx2, GEMM_WIDE, false, "AVX2 with FMA"},
    {"plain", &simd_kernels_plain, is_anywhere, GEMM_WIDE, false, "nothing"},
    {"avx512-pairs", &simd_kernels_avx512, has_avx512, GEMM_PAIRS, true, needs_avx512},
    {"avx512-wide", &simd_kernels_avx512, has_avx512, GEMM_WIDE, true, needs_avx512},
};
#elif defined(__aarch64__)
/* BFDOT is issued as often as an fma, so pairs are never widened where it is. */
#define ISA_NAMES "neon-bf16, neon-dot, neon, plain or ref"
static const struct isa isas[] = {
    {"neon-bf16", &simd_kernels_neon_bf16, has_neon_bf16, GEMM_PAIRS, false,
     "NEON with dot products of bytes and of BF16"},
    {"neon-dot", &simd_kernels_neon_dot, has_neon_dot, GEMM_WIDE, false,
     "NEON with dot products of bytes"},
    {"neon", &simd_kernels_neon, is_anywhere, GEMM_WIDE, false, "nothing"},
    {"plain", &simd_kernels_plain, is_anywhere, GEMM_WIDE, false, "nothing"},
};
#else
#define ISA_NAMES "plain or ref"
static const struct isa isas[] = {
    {"plain", &simd_kernels_plain, is_anywhere, GEMM_WIDE, false, "nothing"},
};
#endif

enum err_code machine_kernels(struct cpu_isa *found, const char *isa, struct err *err)
{
    const char *needs = NULL;
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        if (isa == NULL ? isas[i].is_named_only : strcmp(isa, isas[i].name) != 0) {
            continue;
        }
        if (isas[i].is_there()) {
            *found = (struct cpu_isa){isas[i].name, isas[i].simd, isas[i].bf16};
            return ERR_OK;
        }
        needs = isas[i].needs;
    }
    if (needs != NULL) {
        return err_set(err, ERR_UNSUPPORTED,
                       "PKMSERVE_ISA: %s needs %s, which this machine lacks; leave it unset "
                       "for the best set there is",
                       isa, needs);
    }
    return err_set(err, ERR_ARGUMENT, "PKMSERVE_ISA: %.40s is unknown; use " ISA_NAMES, isa);
}

/* ---- rates ------------------------------------------------------------------------------------*/

enum {
    READ_BYTES = 256 << 20, /* larger than a core's share of any cache */
    READ_PIECE = 1 << 20,
    MEASURE_MS = 150, /* for each rate */
};

struct measure {
    const struct simd_kernels *simd;
    const char *data;
    void (*peak)(int64_t n, double *flops);
    int64_t n_round;
};

static double now_s(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void read_pieces(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct measure *const m = arg;
    volatile double sink =
        m->simd->sum_bytes(m->data + (size_t)first * READ_PIECE, (size_t)n * READ_PIECE);
    (void)sink;
}

static void run_peak(void *arg, int thread, int first, int n)
{
    (void)thread;
    (void)first;
    const struct measure *const m = arg;
    double flops;
    for (int i = 0; i < n; i++) {
        m->peak(m->n_round, &flops);
    }
}

/* The mean over the time, not the best moment: a clock that falls under load, or a neighbour on the
 * memory bus, is what limits the ops too. */
static double mean_rate(struct cpu_backend *cpu, int n_item, double work, pool_fn *fn,
                        struct measure *m)
{
    pool_for(cpu->pool, n_item, POOL_STREAM, fn, m); /* wakes the threads, warms the clock */
    const double start = now_s();
    double seconds = 0;
    double done = 0;
    while (seconds < 1e-3 * (double)MEASURE_MS) {
        pool_for(cpu->pool, n_item, POOL_STREAM, fn, m);
        done += work;
        seconds = now_s() - start;
    }
    return done / seconds;
}

static double measure_read(struct cpu_backend *cpu)
{
    void *const data =
        mmap(NULL, READ_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        return 0;
    }
    (void)madvise(data, READ_BYTES, MADV_HUGEPAGE);
    memset(data, 1, READ_BYTES); /* pages that were never written would all be the same page of
                                  * zeros */
    struct measure m = {.simd = cpu->simd, .data = data};
    const double rate = mean_rate(cpu, READ_BYTES / READ_PIECE, READ_BYTES, read_pieces, &m);
    (void)munmap(data, READ_BYTES);
    return rate;
}

static double measure_peak(struct cpu_backend *cpu, void (*peak)(int64_t n, double *flops))
{
    enum { ROUNDS = 1 << 18, ITEMS_PER_THREAD = 8 };
    double flops = 0;
    peak(1, &flops);
    struct measure m = {.peak = peak, .n_round = ROUNDS};
    const int n_item = cpu->base.n_thread * ITEMS_PER_THREAD;
    return mean_rate(cpu, n_item, flops * (double)ROUNDS * n_item, run_peak, &m);
}

void cpu_measure(struct backend *be, enum dtype dtype, struct machine_rate *rate)
{
    struct cpu_backend *const cpu = cpu_of(be);
    const struct simd_kernels *const simd = cpu->simd;
    const bool is_amx = cpu->bf16 == GEMM_AMX;
    /* The instruction for pairs is measured even where it is not used: there pairs are widened, and
     * products exceed its rate. */
    void (*const peak)(int64_t n, double *flops) =
        dtype == DTYPE_BF16 || dtype == DTYPE_F16 ? (is_amx ? simd->peak_amx : simd->peak_bf16)
        : dtype == DTYPE_I8                       ? (is_amx ? simd->peak_amx_int8 : simd->peak_int8)
                                                  : NULL;
    rate->read_bytes_per_s = measure_read(cpu);
    rate->peak_per_s = measure_peak(cpu, peak != NULL ? peak : simd->peak_f32);
}
