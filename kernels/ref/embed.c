/* Embedding of the reference backend. */
#include "kernels/ref/weight.h"

void ref_embed(struct backend *be, struct tensor y, const struct step *step,
               const struct weight *tok, const struct weight *pos, const struct weight *lang)
{
    (void)be;
    for (int r = 0; r < step->n_tok; r++) {
        float *const out = row_f32(y, r);
        for (int64_t c = 0; c < y.cols; c++) {
            float sum = weight_at(tok, step->token[r], c);
            if (pos != NULL) {
                sum += weight_at(pos, step->pos[r], c);
            }
            if (lang != NULL) {
                sum += weight_at(lang, step->lang[r], c);
            }
            out[c] = sum;
        }
    }
}
