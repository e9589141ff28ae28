/* The CUDA backend: opening a device and saying clearly why not, the op table, failures, closing.
 *
 * Called through the one exported symbol, pkmserve_cuda_entry, by kernels/backend.c, which has
 * checked that both sides mean the same structs (entry.h). Everything runs on one stream of one
 * device; every call comes from the engine's thread. */
#include "kernels/cuda/backend.cuh"

extern "C" {
#include "kernels/cuda/entry.h"
}

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SM_MIN = 80,              /* BF16 matrix instructions and cp.async */
    SM_OVERLAP_MIN = 90,      /* programmatic dependent launch */
    CAPTURE_MAX = 256,        /* sequences of a decode step that becomes a graph */
    STAGING_BYTES = 16 << 20, /* two halves, each long enough for the bus's full rate */
    TOK_PER_SM = 32,          /* rows with which products fill the device: n_tok_good, */
    TOK_MIN = 512,            /* a power of two from this */
    TOK_MAX = 8192,           /* to this */
};

/* ---- failures ------------------------------------------------------------------------------- */

void cuda_fail(struct cuda *cu, enum err_code code, const char *op, const char *what)
{
    if (cu->failure.code == ERR_OK) {
        (void)err_set(&cu->failure, code,
                      "cuda: %s failed: %s; the device gives no more answers to this process: "
                      "restart it",
                      op, what);
    }
}

/* Whether the status is of a kernel that failed while it ran: reported by whatever call comes next.
 * In CUDA's numbering these are neighbours (700 an illegal address .. 721 leaked tensor memory),
 * but for 701, which a launch itself returns; and there are broken hardware's: 214 memory, 220
 * NVLink, 226 a fault that the device has contained. */
static bool is_late(cudaError_t status)
{
    const int number = static_cast<int>(status);
    return number == 214 || number == 220 || number == 226 ||
           (number >= 700 && number <= 721 && number != 701);
}

bool cuda_ok(struct cuda *cu, cudaError_t status, const char *op)
{
    if (status == cudaSuccess) {
        return true;
    }
    char what[160];
    (void)snprintf(what, sizeof what, "%s (%s)", cudaGetErrorString(status),
                   cudaGetErrorName(status));
    if (is_late(status) && cu->failure.code == ERR_OK) {
        (void)err_set(&cu->failure, ERR_DEVICE,
                      "cuda: a kernel failed, noticed in %s: %s; the device gives no more answers "
                      "to this process: restart it (with PKMSERVE_CUDA_GRAPHS=0 and "
                      "CUDA_LAUNCH_BLOCKING=1, what is named is the op itself)",
                      op, what);
    }
    cuda_fail(cu, status == cudaErrorMemoryAllocation ? ERR_MEMORY : ERR_DEVICE, op, what);
    return false;
}

void cuda_check(struct cuda *cu, const char *op)
{
    (void)cuda_ok(cu, cudaGetLastError(), op);
}

bool cuda_shared_at_least(struct cuda *cu, const void *kernel, size_t bytes, const char *op)
{
    int i = 0;
    while (i < cu->n_shared && cu->shared[i].kernel != kernel) {
        i++;
    }
    if (i < cu->n_shared && cu->shared[i].bytes >= bytes) {
        return true;
    }
    CHECK(i < CUDA_KERNEL_MAX);
    cudaFuncAttributes now = {}; /* the process's: another backend may have asked for more */
    if (!cuda_ok(cu, cudaFuncGetAttributes(&now, kernel), op) ||
        (now.maxDynamicSharedSizeBytes < static_cast<int>(bytes) &&
         !cuda_ok(cu,
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(bytes)),
                  op))) {
        return false;
    }
    cu->shared[i] = {kernel, bytes};
    cu->n_shared = i < cu->n_shared ? cu->n_shared : i + 1;
    return true;
}

/* ---- opening -------------------------------------------------------------------------------- */

/* The number of a CUDA version as people write it: 13000 is 13.0. */
struct version_text {
    char text[16];
};

static struct version_text version_text(int version)
{
    struct version_text v;
    (void)snprintf(v.text, sizeof v.text, "%d.%d", version / 1000, version % 1000 / 10);
    return v;
}

/* Whether there is a device to open; says what is missing. */
static enum err_code find_device(struct err *err)
{
    int n = 0;
    const cudaError_t status = cudaGetDeviceCount(&n);
    int driver = 0;
    int runtime = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    (void)cudaGetLastError();
    if (status == cudaErrorInsufficientDriver && driver == 0) {
        return err_set(err, ERR_UNSUPPORTED,
                       "cuda: this machine has no NVIDIA driver (libcuda.so.1): install one for "
                       "CUDA %s or newer, or use the CPU (device cpu)",
                       version_text(runtime).text);
    }
    if (status == cudaErrorInsufficientDriver) {
        return err_set(err, ERR_UNSUPPORTED,
                       "cuda: the NVIDIA driver is too old: it serves CUDA %s, this program needs "
                       "%s; update the driver, or use the CPU (device cpu)",
                       version_text(driver).text, version_text(runtime).text);
    }
    if (status == cudaErrorNoDevice || (status == cudaSuccess && n == 0)) {
        const char *const visible = getenv("CUDA_VISIBLE_DEVICES");
        return err_set(
            err, ERR_UNSUPPORTED,
            "cuda: the driver sees no GPU%s%.60s; make one visible to this process, or "
            "use the CPU (device cpu)",
            visible == NULL ? "" : " with CUDA_VISIBLE_DEVICES=", visible == NULL ? "" : visible);
    }
    if (status != cudaSuccess) {
        return err_set(err, ERR_DEVICE, "cuda: the driver does not start: %s (%s); see nvidia-smi",
                       cudaGetErrorString(status), cudaGetErrorName(status));
    }
    return ERR_OK;
}

/* The device that is asked for: a number, or the address of its bus. */
static enum err_code choose_device(struct cuda *cu, const char *gpu, struct err *err)
{
    int n = 0;
    (void)cudaGetDeviceCount(&n);
    if (gpu == NULL || gpu[0] == '\0') {
        cu->device = 0;
        return ERR_OK;
    }
    char *end = NULL;
    const long number = strtol(gpu, &end, 10);
    if (*end == '\0' && number >= 0 && number < n) {
        cu->device = static_cast<int>(number);
        return ERR_OK;
    }
    if (*end != '\0' && cudaDeviceGetByPCIBusId(&cu->device, gpu) == cudaSuccess) {
        return ERR_OK;
    }
    (void)cudaGetLastError();
    return err_set(err, ERR_ARGUMENT,
                   "gpu: there is no %.40s; give a number from 0 to %d, or a bus id as nvidia-smi "
                   "shows it",
                   gpu, n - 1);
}

/* Rows of a step that keep n_sm multiprocessors busy. */
static int n_tok_good(int n_sm)
{
    int n = TOK_MIN;
    while (n < TOK_MAX && 2 * n <= TOK_PER_SM * n_sm) {
        n *= 2;
    }
    return n;
}

/* Reads what kernels need to know of the device, and describes it. */
static enum err_code read_device(struct cuda *cu, struct err *err)
{
    cudaDeviceProp prop;
    memset(&prop, 0, sizeof prop);
    cudaError_t status = cudaGetDeviceProperties(&prop, cu->device);
    if (status != cudaSuccess) {
        return err_set(err, ERR_DEVICE, "cuda: device %d does not answer: %s", cu->device,
                       cudaGetErrorString(status));
    }
    cu->n_sm = prop.multiProcessorCount;
    cu->sm_version = prop.major * 10 + prop.minor;
    cu->shared_max = prop.sharedMemPerBlockOptin;
    if (cu->sm_version < SM_MIN) {
        return err_set(err, ERR_UNSUPPORTED,
                       "cuda: %.60s has compute capability %d.%d, at least 8.0 is needed (Ampere "
                       "or newer); use another GPU or the CPU (device cpu)",
                       prop.name, prop.major, prop.minor);
    }
    size_t free_bytes = 0;
    size_t total = 0;
    status = cudaSetDevice(cu->device);
    status = status == cudaSuccess ? cudaMemGetInfo(&free_bytes, &total) : status;
    if (status != cudaSuccess) {
        (void)cudaGetLastError();
        return err_set(err, status == cudaErrorMemoryAllocation ? ERR_MEMORY : ERR_DEVICE,
                       "cuda: %.60s cannot be used: %s (%s); see nvidia-smi for who holds it",
                       prop.name, cudaGetErrorString(status), cudaGetErrorName(status));
    }
    status = measure_code_version(&cu->code_version);
    if (status != cudaSuccess) { /* else the first op would fail, and say less */
        (void)cudaGetLastError();
        return err_set(err, ERR_UNSUPPORTED,
                       "cuda: this library has no code for %.60s, of compute capability %d.%d: %s; "
                       "build it for this device (make cuda CUDA_ARCH=%d), or use another GPU or "
                       "the CPU (device cpu)",
                       prop.name, prop.major, prop.minor, cudaGetErrorString(status),
                       cu->sm_version);
    }
    int driver = 0;
    (void)cudaDriverGetVersion(&driver);
    cu->be.memory_bytes = static_cast<size_t>(resource_memory_available(&cu->be));
    cu->be.n_tok_good = n_tok_good(cu->n_sm);
    (void)snprintf(cu->be.description, sizeof cu->be.description,
                   "%.50s at %04x:%02x:%02x.0, sm_%d, %d SMs, %zu of %zu MiB free, driver for CUDA "
                   "%.8s",
                   prop.name, static_cast<unsigned>(prop.pciDomainID) & 0xffff,
                   static_cast<unsigned>(prop.pciBusID) & 0xff,
                   static_cast<unsigned>(prop.pciDeviceID) & 0xff, cu->sm_version, cu->n_sm,
                   free_bytes >> 20, total >> 20, version_text(driver).text);
    return ERR_OK;
}

/* ---- fast paths ------------------------------------------------------------------------------ */

void cuda_fast_path(struct cuda *cu, const char *name, bool is_exact, bool *field)
{
    struct backend *const be = &cu->be;
    for (int i = 0; i < be->n_fast_path; i++) {
        if (cu->fast_path[i] == field) {
            return;
        }
    }
    CHECK(be->n_fast_path < FAST_PATH_MAX);
    cu->fast_path[be->n_fast_path] = field;
    be->fast_path[be->n_fast_path++] = {name, is_exact, *field};
}

void cuda_fast_path_end(struct cuda *cu, bool *field)
{
    *field = false;
    for (int i = 0; i < cu->be.n_fast_path; i++) {
        cu->be.fast_path[i].is_used = *cu->fast_path[i];
    }
}

static void fast_path_use(struct backend *be, int i, bool is_used)
{
    struct cuda *const cu = cuda_of(be);
    if (be->fast_path[i].is_used == is_used) {
        return;
    }
    graphs_forget(cu); /* they were recorded with it, or without */
    *cu->fast_path[i] = be->fast_path[i].is_used = is_used;
    if (cu->fast_path[i] == &cu->uses_lt) {
        linear_lt_say(cu);
    }
}

static enum err_code failed(const struct cuda *cu, struct err *err)
{
    if (err != NULL) {
        *err = cu->failure;
    }
    return cu->failure.code;
}

/* cuBLASLt, for matrix products whose sums may depend on the number of rows. Without the library
 * there is no reason not to serve: the sums then do not depend on it, and the note says so. */
static enum err_code open_fast_math(struct cuda *cu, struct err *err)
{
    struct err reason = {ERR_OK, ""};
    const enum err_code code =
        cu->uses_lt ? linear_lt_open(cu, &reason)
                    : err_set(&reason, ERR_UNSUPPORTED, "PKMSERVE_CUDA_LT=0 asks for own kernels");
    if (code == ERR_UNSUPPORTED) {
        cu->is_fast = false;
        cu->uses_lt = false;
        (void)snprintf(cu->be.note, sizeof cu->be.note,
                       "fast math is left out, own kernels multiply: %.330s", reason.message);
        (void)snprintf(cu->be.products, sizeof cu->be.products, "own kernels: %.330s",
                       reason.message);
        return ERR_OK;
    }
    if (code == ERR_OK) {
        (void)snprintf(cu->be.products, sizeof cu->be.products,
                       "cuBLASLt, an algorithm for each number of rows");
    } else if (err != NULL) {
        *err = reason;
    }
    return code;
}

/* Whether a variable of the environment, 0 or 1, says so. */
static bool wants(const char *name, bool usual)
{
    const char *const setting = getenv(name);
    return setting == NULL ? usual : strcmp(setting, usual ? "0" : "1") != 0 ? usual : !usual;
}

/* Kernels that begin while the one before them ends: graph.cu. A library built for older devices
 * alone is translated for a newer one without its grid_wait: it must not overlap there. A kernel
 * that wants another share of a multiprocessor's memory as shared memory than the one before would
 * have to wait for that to end, so all want most of it. */
static enum err_code open_overlap(struct cuda *cu, struct err *err)
{
    const bool is_possible = cu->sm_version >= SM_OVERLAP_MIN && cu->code_version >= SM_OVERLAP_MIN;
    cu->overlaps = is_possible && wants("PKMSERVE_CUDA_OVERLAP", true);
    if (!is_possible && wants("PKMSERVE_CUDA_OVERLAP", false)) {
        const size_t used = strlen(cu->be.note);
        (void)snprintf(cu->be.note + used, sizeof cu->be.note - used,
                       "%skernels do not overlap: that needs a device of compute capability %d.%d "
                       "or newer, and a library built for such (CUDA_ARCH)",
                       used > 0 ? "; " : "", SM_OVERLAP_MIN / 10, SM_OVERLAP_MIN % 10);
    }
    if (cu->overlaps) {
        if (!cuda_ok(cu, cudaDeviceSetCacheConfig(cudaFuncCachePreferShared), "overlap")) {
            return failed(cu, err);
        }
        cuda_fast_path(cu, "overlap", true, &cu->overlaps);
    }
    return ERR_OK;
}

static enum err_code open_parts(struct cuda *cu, const struct backend_options *options,
                                struct err *err)
{
    enum err_code code = find_device(err);
    code = code == ERR_OK ? choose_device(cu, options->gpu, err) : code;
    code = code == ERR_OK ? read_device(cu, err) : code;
    code = code == ERR_OK ? graphs_new(cu, err) : code;
    if (code != ERR_OK) {
        return code;
    }
    if (!cuda_ok(cu, cudaStreamCreateWithFlags(&cu->stream, cudaStreamNonBlocking), "stream") ||
        !graphs_open(cu) ||
        !cuda_ok(cu, cudaEventCreateWithFlags(&cu->staging_read[0], cudaEventDisableTiming),
                 "event") ||
        !cuda_ok(cu, cudaEventCreateWithFlags(&cu->staging_read[1], cudaEventDisableTiming),
                 "event")) {
        return failed(cu, err);
    }
    cu->staging_bytes = STAGING_BYTES;
    code = resource_pinned_new(cu, &cu->staging, cu->staging_bytes, "upload of weights", err);
    code = code == ERR_OK ? trace_open(cu, err) : code;
    code = code == ERR_OK ? open_overlap(cu, err) : code;
    return code == ERR_OK && cu->is_fast ? open_fast_math(cu, err) : code;
}

static void cuda_close(struct backend *be)
{
    struct cuda *const cu = cuda_of(be);
    if (cu->stream != NULL) {
        (void)cudaStreamSynchronize(cu->stream);
    }
    graphs_free(cu);
    trace_close(cu);
    linear_release(cu);
    linear_lt_close(cu);
    if (cu->staging != NULL) {
        (void)cudaFreeHost(cu->staging);
    }
    for (cudaEvent_t const event : cu->staging_read) {
        if (event != NULL) {
            (void)cudaEventDestroy(event);
        }
    }
    if (cu->stream != NULL) {
        (void)cudaStreamDestroy(cu->stream);
    }
    free(cu);
}

#define LAUNCH_SLOT(op) .op = launch_##op,

static const struct backend_ops cuda_ops = {
    .close = cuda_close,
    .buffer_new = resource_buffer_new,
    .buffer_free = resource_buffer_free,
    .weight_new = resource_weight_new,
    .weight_free = resource_weight_free,
    .weight_bytes = resource_weight_bytes,
    .step_new = cuda_step_new,
    .step_twin = cuda_step_twin,
    .step_free = cuda_step_free,
    .upload = resource_upload,
    .download = resource_download,
    .memory_available = resource_memory_available,
    .step_begin = cuda_step_begin,
    .submit = cuda_step_submit,
    .fetch = cuda_step_fetch,
    .finish = cuda_step_finish,
    .fast_path_use = fast_path_use,
    .measure = measure_rates,
    .compute = {OP_LIST(LAUNCH_SLOT)},
};

static enum err_code cuda_open(struct backend **be, const struct backend_options *options,
                               struct err *err)
{
    *be = NULL;
    struct cuda *const cu = static_cast<struct cuda *>(calloc(1, sizeof *cu));
    if (cu == NULL) {
        return err_set(err, ERR_MEMORY, "cuda: no host memory left to open the backend");
    }
    cu->be.op = &cuda_ops;
    cu->be.n_thread = 1; /* of the host */
    cu->be.is_async = true;
    cu->be.phases_apart = true;
    cu->be.prefers_bf16 = true;
    cu->be.has_f16 = true;
    cu->be.has_int8_slots = true;
    cu->is_fast = options->fast_math;
    cu->uses_lt = wants("PKMSERVE_CUDA_LT", true);
    cu->be.capture_max = CAPTURE_MAX;
    (void)snprintf(cu->be.name, sizeof cu->be.name, "cuda");
    const enum err_code code = open_parts(cu, options, err);
    if (code != ERR_OK) {
        cuda_close(&cu->be);
        return code;
    }
    if (cu->trace != NULL || (getenv("PKMSERVE_CUDA_GRAPHS") != NULL &&
                              strcmp(getenv("PKMSERVE_CUDA_GRAPHS"), "0") == 0)) {
        cu->be.capture_max = 0;
    }
    cu->splits = wants("PKMSERVE_CUDA_SPLIT", true);
    cu->fuses = wants("PKMSERVE_CUDA_FUSE", true);
    if (cu->fuses) {
        cuda_fast_path(cu, "fusion", true, &cu->fuses);
    }
    cu->attends_mma = wants("PKMSERVE_CUDA_ATTENTION", true);
    cu->attends_drawn = wants("PKMSERVE_CUDA_DRAWN", true);
    if (cu->attends_drawn) {
        cuda_fast_path(cu, "drawn", false, &cu->attends_drawn);
    }
    cu->searches_flat = wants("PKMSERVE_CUDA_FLAT", true);
    cu->uses_gemm = wants("PKMSERVE_CUDA_GEMM", true);
    if (cu->uses_gemm) {
        cuda_fast_path(cu, "gemm", true, &cu->uses_gemm);
    }
    cu->be.runs_ahead = cu->trace == NULL && wants("PKMSERVE_CUDA_AHEAD", true);
    if (cu->be.runs_ahead) {
        cuda_fast_path(cu, "ahead", true, &cu->be.runs_ahead);
    }
    *be = &cu->be;
    return ERR_OK;
}

extern "C" __attribute__((visibility("default"))) const struct cuda_entry *
pkmserve_cuda_entry(void);

const struct cuda_entry *pkmserve_cuda_entry(void)
{
    static const struct cuda_entry entry = {
        .abi = CUDA_ENTRY_ABI,
        .table_size = sizeof(struct backend_ops),
        .step_size = sizeof(struct step),
        .backend_size = sizeof(struct backend),
        .open = cuda_open,
    };
    return &entry;
}
