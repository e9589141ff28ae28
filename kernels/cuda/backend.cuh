/* What the files around the kernels share: record.cu makes commands, command.cu runs them, step.cu
 * and resource.cu move data to and fro, backend.cu opens and closes. The kernels' files need none
 * of it. */
#ifndef KERNELS_CUDA_BACKEND_CUH
#define KERNELS_CUDA_BACKEND_CUH

#include "kernels/cuda/cuda.cuh"

/* ---- commands: command.cu ------------------------------------------------------------------- */

enum command_op {
    COMMAND_EMBED,
    COMMAND_NORM,
    COMMAND_ADD_NORM,
    COMMAND_L2_NORM,
    COMMAND_HEAD_NORM,
    COMMAND_RMS_NORM,
    COMMAND_ROPE,
    COMMAND_GATE,
    COMMAND_LINEAR,
    COMMAND_KV_STORE,
    COMMAND_ATTENTION,
    COMMAND_SPAN_ATTENTION,
    COMMAND_PKM_SEARCH,
    COMMAND_PKM_RESCORE,
    COMMAND_PKM_EXPERTS,
    COMMAND_PKM_ABLATE,
    COMMAND_PKM_READ,
    COMMAND_GATHER,
    COMMAND_LOG_SOFTMAX,
    COMMAND_SAMPLE,
    COMMAND_LOGPROBS,
    COMMAND_N
};

enum { COMMAND_TENSOR_MAX = 6, COMMAND_WEIGHT_MAX = 3 };

/* One op with its arguments, in the order of the op's parameters; what an op does not have is 0. */
struct command {
    enum command_op op;
    int n;   /* n_head, n_run, first, act, gate or memory */
    float f; /* eps or scale */
    struct pkm_shape shape;
    struct pkm_rescore rescore;
    struct pkm_place place;
    struct span_shape span;
    const struct cuda_step *step;                    /* Borrowed */
    const struct weight *weight[COMMAND_WEIGHT_MAX]; /* Borrowed */
    struct tensor tensor[COMMAND_TENSOR_MAX];
};

enum err_code command_list_new(struct cuda *cu, struct err *err);
void command_list_free(struct cuda *cu); /* NULL list is fine */

/* Appends to the list; a full list is run first. */
void command_append(struct cuda *cu, const struct command *command);
/* A step's commands begin here. Runs what was appended before, and waits if the device still works.
 */
void command_begin(struct cuda *cu, const struct cuda_step *step);
/* Starts the commands of the list, as a graph where the step allows it. */
void command_submit(struct cuda *cu);
/* Whether a step has begun, or a command was appended, that has not been submitted. */
bool command_is_open(const struct cuda *cu);
/* Starts the commands of the list and waits until the device has nothing left to do. False after a
 * failure, this one's or an earlier one's. */
bool command_wait(struct cuda *cu);
/* Something whose address a graph may hold is about to be freed: waits, and drops all graphs. */
void command_forget(struct cuda *cu);

/* ---- steps: step.cu ------------------------------------------------------------------------- */

enum err_code cuda_step_new(struct backend *be, struct step **step,
                            const struct step_limits *limits, struct err *err);
void cuda_step_free(struct backend *be, struct step *step);
void cuda_step_begin(struct backend *be, struct step *step);
void cuda_step_submit(struct backend *be, struct step *step);
enum err_code cuda_step_finish(struct backend *be, struct step *step, struct err *err);

/* Outputs first .. first+n-1 will have been computed when the step ends: finish hands them out. */
void step_will_output(const struct step *step, int64_t first, int64_t n);

/* ---- resources: resource.cu ----------------------------------------------------------------- */

enum err_code resource_buffer_new(struct backend *be, void **data, size_t bytes,
                                  const char *purpose, struct err *err);
void resource_buffer_free(struct backend *be, void *data);
enum err_code resource_weight_new(struct backend *be, struct weight **weight,
                                  const struct tensor *host, const struct weight_desc *desc,
                                  const char *name, struct err *err);
void resource_weight_free(struct backend *be, struct weight *weight);
size_t resource_weight_bytes(const struct weight *weight);
void resource_upload(struct backend *be, struct tensor dst, const void *host);
void resource_download(struct backend *be, void *host, struct tensor src);
int64_t resource_memory_available(struct backend *be);

/* Device memory that is not zeroed; the error names the purpose and what to lower. */
enum err_code resource_device_new(struct cuda *cu, void **data, size_t bytes, const char *purpose,
                                  struct err *err);
/* Pinned host memory. */
enum err_code resource_pinned_new(struct cuda *cu, void **data, size_t bytes, const char *purpose,
                                  struct err *err);

/* ---- record.cu, measure.cu --------------------------------------------------------------------- */

/* The table's functions: record_linear and so on. */
#define RECORD_OP(op) op_##op##_fn record_##op;
OP_LIST(RECORD_OP)

void measure_rates(struct backend *be, struct machine_rate *rate);
/* The compute capability that the kernels in use were compiled for, before any translation: 90 is
 * 9.0. 0 after a failure. */
int measure_code_version(struct cuda *cu);

#endif
