/* `pkmserve memory diff` and `apply`: from two models to an overlay, and from an overlay to a
 * model. */
#include "models/overlay_apply.h"
#include "models/overlay_diff.h"
#include "server/cli/cmd.h"

static void print_rows(const int64_t *n_row, const char *what, const char *path)
{
    for (int m = 0; m < MODEL_PKM_MAX; m++) {
        if (n_row[m] > 0) {
            printf("memory %d: rows%s: %lld; written to %s\n", m, what, (long long)n_row[m], path);
        }
    }
}

int cmd_memory_diff(const struct options *options)
{
    struct err err;
    struct overlay_diff diff;
    if (overlay_diff_write(&diff, options->operand[0], options->operand[1], options->output,
                           &err) != ERR_OK) {
        return cmd_fail(&err);
    }
    print_rows(diff.n_row, " that differ", options->output);
    return 0;
}

int cmd_memory_apply(const struct options *options)
{
    struct err err;
    struct overlay_applied applied;
    if (overlay_apply(&applied, options->operand[0], options->operand[1], options->output, &err) !=
        ERR_OK) {
        return cmd_fail(&err);
    }
    print_rows(applied.n_row, applied.rounded ? ", rounded to the table's type" : "",
               options->output);
    return 0;
}
