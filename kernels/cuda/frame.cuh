/* What the files around the kernels share: ops.cu makes commands, command.cu runs them, step.cu and
 * resource.cu move data to and fro, backend.cu opens and closes. The kernels' files need none of
 * it. */
#ifndef KERNELS_CUDA_FRAME_CUH
#define KERNELS_CUDA_FRAME_CUH

#include "kernels/cuda/cuda.cuh"

/* A view must have this type and shape; without rows it need not have an address. */
static inline bool is_view(struct tensor t, enum dtype dtype, int64_t rows, int64_t cols)
{
    return t.dtype == dtype && t.rows == rows && t.cols == cols && t.stride >= t.cols &&
           (t.data != NULL || t.rows == 0);
}
#define CHECK_VIEW(t, dtype, rows, cols) CHECK(is_view((t), (dtype), (rows), (cols)))

/* ---- commands: command.cu ------------------------------------------------------------------- */

enum command_op {
    COMMAND_EMBED,
    COMMAND_NORM,
    COMMAND_ADD_NORM,
    COMMAND_UNIT_NORM,
    COMMAND_RMS_NORM,
    COMMAND_ROTATE,
    COMMAND_GATE,
    COMMAND_LINEAR,
    COMMAND_KV_STORE,
    COMMAND_ATTENTION,
    COMMAND_SPAN_ATTENTION,
    COMMAND_PKM_SEARCH,
    COMMAND_PKM_RESCORE,
    COMMAND_PKM_EXPERTS,
    COMMAND_PKM_READ,
    COMMAND_GATHER,
    COMMAND_LOG_SOFTMAX,
    COMMAND_SAMPLE,
    COMMAND_LOGPROBS,
    COMMAND_N
};

enum { COMMAND_TENSOR_MAX = 6, COMMAND_WEIGHT_MAX = 3 };

/* One op with its arguments, in the order of the op's parameters; what an op does not have is 0. An
 * attention that also stores has k and v after its own. */
struct command {
    enum command_op op;
    int n;   /* n_head, n_run, first, act or gate */
    float f; /* eps or scale */
    struct pkm_shape shape;
    struct pkm_rescore rescore;
    struct span_shape span;
    const struct cuda_step *step;                    /* Borrowed */
    const struct weight *weight[COMMAND_WEIGHT_MAX]; /* Borrowed */
    struct tensor tensor[COMMAND_TENSOR_MAX];
};

enum err_code command_list_new(struct cuda *cu, struct err *err);
void command_list_free(struct cuda *cu); /* NULL list is fine */

/* Appends to the list; a full list is run first. */
void command_append(struct cuda *cu, const struct command *command);
/* The last of the list, for who may do its work as well and replaces it; NULL if there is none. */
struct command *command_last(struct cuda *cu);
/* A step's commands begin here. Runs what was appended before, and waits if the device still works.
 */
void command_begin(struct cuda *cu, const struct cuda_step *step);
/* Starts the commands of the list, as a graph where the step allows it. */
void command_submit(struct cuda *cu);
/* Whether there is a begun step, or a command, that has not been submitted. */
bool command_is_open(const struct cuda *cu);
/* Starts the commands of the list and waits until the device has nothing left to do. False after a
 * failure, this one's or an earlier one's. */
bool command_wait(struct cuda *cu);
/* Something whose address a graph may hold is about to be freed: waits, and drops all graphs. */
void command_forget(struct cuda *cu);

/* ---- steps: step.cu ------------------------------------------------------------------------- */

enum err_code step_new(struct backend *be, struct step **step, const struct step_limits *limits,
                       struct err *err);
void step_free(struct backend *be, struct step *step);
void step_begin(struct backend *be, const struct step *step);
void step_submit(struct backend *be, struct step *step);
enum err_code step_finish(struct backend *be, struct step *step, struct err *err);

/* Kernels cannot CHECK, so the host does before they run. Largest value + 1 of the step's inputs,
 * taken once at step_begin; negative values are CHECKed there. */
struct step_bounds {
    int32_t token, pos, lang, page;
};
const struct step_bounds *step_bounds(const struct cuda_step *step);
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

/* Device memory that is not zeroed; purpose and what to lower stand in the error. */
enum err_code resource_device_new(struct cuda *cu, void **data, size_t bytes, const char *purpose,
                                  struct err *err);
/* Pinned host memory. */
enum err_code resource_pinned_new(struct cuda *cu, void **data, size_t bytes, const char *purpose,
                                  struct err *err);

/* ---- ops.cu, measure.cu --------------------------------------------------------------------- */

void op_embed(struct backend *be, struct tensor y, const struct step *step,
              const struct weight *tok, const struct weight *pos, const struct weight *lang);
void op_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
             struct tensor beta, float eps);
void op_add_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                 struct tensor gamma, struct tensor beta, float eps);
void op_unit_norm(struct backend *be, struct tensor y, struct tensor x, int n_run);
void op_rms_norm(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                 struct tensor r, struct tensor gamma, float eps);
void op_rotate(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
               int n_head);
void op_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
             enum gate_kind kind);
void op_pkm_experts(struct backend *be, struct tensor y, struct tensor shares, struct tensor slots,
                    struct tensor x, const struct weight *experts);
void op_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *w,
               struct tensor bias, enum act act);
void op_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
            const struct ffn *ffn);
void op_kv_store(struct backend *be, struct tensor k_pages, struct tensor v_pages, struct tensor k,
                 struct tensor v, const struct step *step, int n_head);
void op_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                  struct tensor v_pages, const struct step *step, int n_head, float scale);
void op_span_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                       struct tensor v_pages, const struct step *step,
                       const struct span_shape *shape);
void op_pkm_search(struct backend *be, struct tensor slots, struct tensor shares,
                   struct tensor query, const struct weight *keys, const struct pkm_shape *shape);
void op_pkm_rescore(struct backend *be, struct tensor slots, struct tensor shares,
                    struct tensor slot_map, const struct pkm_rescore *rescore);
void op_pkm_read(struct backend *be, struct tensor y, struct tensor residual, struct tensor slots,
                 struct tensor shares, const struct weight *values);
void op_gather(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
               int first);
void op_log_softmax(struct backend *be, struct tensor y, struct tensor base);
void op_outputs(struct backend *be, struct tensor logits, struct step *step, int first);
void op_linear_outputs(struct backend *be, struct tensor logits, struct tensor x,
                       const struct weight *w, struct tensor bias, struct step *step, int first);

void measure_rates(struct backend *be, struct machine_rate *rate);
/* The compute capability that the kernels in use were compiled for, before any translation: 90 is
 * 9.0. 0 after a failure. */
int measure_code_version(struct cuda *cu);

#endif
