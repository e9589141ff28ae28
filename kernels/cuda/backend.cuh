/* What the files around the kernels share: launch.cu launches ops, graph.cu says how, step.cu and
 * resource.cu move data to and fro, backend.cu opens and closes. The kernels' files need none of
 * it.
 */
#ifndef KERNELS_CUDA_BACKEND_CUH
#define KERNELS_CUDA_BACKEND_CUH

#include "kernels/cuda/cuda.cuh"

/* ---- how ops are launched: graph.cu --------------------------------------------------------- */

enum err_code graphs_new(struct cuda *cu, struct err *err);
/* What needs the device; false after a failure. */
bool graphs_open(struct cuda *cu);
void graphs_free(struct cuda *cu); /* NULL is fine */

/* Before graphs_begin: decides how the step's ops run. Whether all will in one go, as they were
 * recorded. */
bool graphs_choose(struct cuda *cu, const struct step *step);
/* The step's inputs are on their way: starts its ops if they have been recorded. */
void graphs_begin(struct cuda *cu, const struct step *step);
/* Whether an op that is called now is to be launched. */
bool graphs_launch(struct cuda *cu, int64_t rows);
/* Whether it is then launched once more, into the recording: cu->stream is that until
 * graphs_recorded. */
bool graphs_record(struct cuda *cu);
void graphs_recorded(struct cuda *cu);
/* The step's ops have been called. */
void graphs_end(struct cuda *cu);

/* Whether a step has begun and its last op has not been called. */
bool graphs_is_open(const struct cuda *cu);
/* Waits until the device has nothing left to do. False after a failure, this one's or an earlier
 * one's. */
bool graphs_wait(struct cuda *cu);
/* Waits for what was launched before event was recorded, in a step that has ended. False as of
 * graphs_wait. */
bool graphs_wait_for(struct cuda *cu, cudaEvent_t event);
/* Something whose address a graph may hold is about to be freed: waits, and drops all graphs. */
void graphs_forget(struct cuda *cu);

/* ---- steps: step.cu ------------------------------------------------------------------------- */

enum err_code cuda_step_new(struct backend *be, struct step **step,
                            const struct step_limits *limits, struct err *err);
enum err_code cuda_step_twin(struct backend *be, struct step **twin, struct step *step,
                             struct err *err);
void cuda_step_free(struct backend *be, struct step *step);
void cuda_step_begin(struct backend *be, struct step *step);
void cuda_step_submit(struct backend *be, struct step *step);
const void *cuda_step_fetch(struct backend *be, struct step *step, struct tensor src);
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

/* ---- what the device works on: trace.cu
 * --------------------------------------------------------- */

/* As the environment asks for, which trace.cu says. close takes what open has left. */
enum err_code trace_open(struct cuda *cu, struct err *err);
void trace_close(struct cuda *cu);
/* Around the launches of an op, which is named by a constant; w may be NULL. */
void trace_begin(struct cuda *cu, const char *op, struct tensor y, const struct weight *w);
void trace_end(struct cuda *cu);
/* Around all ops of a step that are launched in one go. */
void trace_list_begin(struct cuda *cu);
void trace_list_end(struct cuda *cu);
/* The device has nothing left to do: reads the times of what it did. */
void trace_collect(struct cuda *cu);

/* ---- launch.cu, measure.cu ------------------------------------------------------------------ */

/* Launches what has been called and not been launched yet. */
void launch_held(struct cuda *cu);

/* The table's functions: launch_linear and so on. */
#define LAUNCH_OP(op) op_##op##_fn launch_##op;
OP_LIST(LAUNCH_OP)

void measure_rates(struct backend *be, enum dtype dtype, struct machine_rate *rate);
/* The compute capability that the kernels in use were compiled for, before any translation: 90 is
 * 9.0. An error where the library has none for the device. */
cudaError_t measure_code_version(int *version);

#endif
