/* What all backends share of a weight: see weight.h. */
#include "kernels/weight.h"
#include "kernels/int8.h"

static bool is_float(enum dtype dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16;
}

struct weight weight_head(const struct tensor *host, const struct weight_desc *desc)
{
    CHECK(host->data != NULL && host->rows > 0 && host->cols > 0 && host->stride >= host->cols);
    const bool is_q4 = host->dtype == DTYPE_Q4;
    CHECK(is_float(host->dtype) || (host->dtype == DTYPE_I8 && desc->row_scale != NULL) ||
          (is_q4 && desc->row_scale_f16 != NULL && desc->kind == WEIGHT_TABLE));
    CHECK(is_q4 == (desc->dtype == DTYPE_Q4));
    CHECK(is_q4 || desc->dtype == DTYPE_F32 || desc->dtype == DTYPE_BF16 ||
          desc->dtype == DTYPE_I8 || desc->dtype == DTYPE_F16);
    CHECK(desc->dtype != DTYPE_F16 || desc->kind == WEIGHT_MATRIX ||
          (desc->kind == WEIGHT_TABLE && host->dtype == DTYPE_F16));
    CHECK(desc->kind != WEIGHT_KEYS || (host->dtype != DTYPE_I8 && desc->dtype != DTYPE_I8));
    CHECK(desc->placement != PLACEMENT_MMAP || desc->kind == WEIGHT_TABLE);
    CHECK(desc->n_group >= 1 && host->rows % desc->n_group == 0);
    CHECK(desc->kind == WEIGHT_KEYS || (desc->n_group == 1 && !desc->is_flat));
    CHECK(!desc->is_split || desc->kind == WEIGHT_KEYS ||
          (desc->kind == WEIGHT_MATRIX && desc->dtype == DTYPE_F32));
    return (struct weight){.kind = desc->kind,
                           .dtype = desc->kind == WEIGHT_KEYS ? DTYPE_F32 : desc->dtype,
                           .placement = desc->placement,
                           .n_group = desc->n_group,
                           .rows = host->rows,
                           .cols = is_q4 ? 2 * host->cols : host->cols};
}

enum err_code weight_int8_check(const struct tensor *host, const struct weight_desc *desc,
                                const char *name, struct err *err)
{
    if (desc->dtype == DTYPE_I8 && desc->kind == WEIGHT_MATRIX && host->cols > INT8_IN_MAX) {
        return err_set(err, ERR_UNSUPPORTED,
                       "%s: a matrix of int8 may have %d inputs, this one has %lld: use bf16", name,
                       INT8_IN_MAX, (long long)host->cols);
    }
    return ERR_OK;
}

enum err_code weight_loss_check(double loss, const struct weight_desc *desc, const char *name,
                                struct err *err)
{
    if (desc->loss_max > 0 && !(loss <= desc->loss_max)) {
        return err_set(err, ERR_NUMERICAL,
                       "%s: int8 would change this weight by %.1f %% (root mean square), more than "
                       "the %.1f %% allowed: use bf16, or force int8 and compare",
                       name, 100 * loss, 100 * desc->loss_max);
    }
    return ERR_OK;
}
