/* The engine's options against each other and the model: see bounds.h. */
#include "engine/bounds.h"

#include "engine/loop.h"

#include <limits.h>

static enum err_code check_option(int64_t value, int64_t low, int64_t high, const char *name,
                                  struct err *err)
{
    return value >= low && value <= high
               ? ERR_OK
               : err_set(err, ERR_ARGUMENT, "%s is %lld, accepted are %lld to %lld", name,
                         (long long)value, (long long)low, (long long)high);
}

enum err_code bounds_resolve(struct engine_options *o, const struct model_info *info,
                             int n_tok_good, struct err *err)
{
    const int longest = engine_context(info->context);
    if (check_option(o->max_model_len, 0, longest, "--max-model-len", err) != ERR_OK ||
        check_option(o->max_seqs, 1, 4096, "--max-seqs", err) != ERR_OK ||
        check_option(o->max_batch_tokens, 0, 1 << 20, "--max-batch-tokens", err) != ERR_OK ||
        check_option(o->bulk_step_ms, 0, 1 << 20, "--bulk-step-ms", err) != ERR_OK ||
        check_option(o->max_queue, 1, 1 << 20, "--max-queue", err) != ERR_OK ||
        check_option(o->max_queue_tokens, 1, INT64_MAX / 2, "--max-queue-tokens", err) != ERR_OK ||
        check_option(o->max_logprobs, 0, 1024, "--max-logprobs", err) != ERR_OK ||
        check_option(o->max_request_bytes, 0, INT64_MAX / 2, "--max-request-bytes", err) !=
            ERR_OK ||
        check_option(o->memory_trace_bytes, 0, INT64_C(1) << 40, "--memory-trace-bytes", err) !=
            ERR_OK ||
        check_option(o->overlay_bytes, 0, INT64_C(1) << 40, "--overlay-bytes", err) != ERR_OK ||
        check_option(o->kv_tokens, 0, (int64_t)1 << 32, "--kv-tokens", err) != ERR_OK) {
        return ERR_ARGUMENT;
    }
    if (o->max_batch_tokens == 0) {
        o->max_batch_tokens = o->max_seqs > n_tok_good ? o->max_seqs : n_tok_good;
    }
    if (o->max_seqs > o->max_batch_tokens) {
        return err_set(
            err, ERR_ARGUMENT,
            "--max-seqs %d exceeds --max-batch-tokens %d: each running sequence takes one "
            "token per step; lower the first or raise the second",
            o->max_seqs, o->max_batch_tokens);
    }
    o->max_model_len = o->max_model_len > 0 ? o->max_model_len : info->context;
    /* A ring's pages are overwritten: nobody else can use them. */
    o->prefix_cache = o->prefix_cache && info->window == 0;
    o->max_logprobs = o->max_logprobs < info->n_vocab ? o->max_logprobs : info->n_vocab;
    return ERR_OK;
}

/* Pages that the longest text holds. In a model whose tokens see only a window of earlier
 * positions, that is a ring: the window plus the rows of one step, because all rows of a step are
 * stored before any of them is attended to. */
static int pages_of_text(const struct engine_options *o, const struct model_info *info)
{
    const int64_t context = engine_context(o->max_model_len);
    const int64_t ring = (int64_t)info->window + o->max_batch_tokens;
    return kvpages_for(info->window > 0 && ring < context ? ring : context);
}

struct step_limits bounds_of_step(const struct engine_options *o, const struct model_info *info)
{
    /* A product of int bounds checked above: 4096 sequences of at most 2^24 positions each would
     * not fit into int, and not into memory either. */
    const int64_t n_adjust = (int64_t)o->max_seqs *
                             sampling_entries_max(engine_context(o->max_model_len), info->n_vocab);
    return (struct step_limits){
        .n_tok_max = o->max_batch_tokens,
        .n_seq_max = o->max_seqs,
        .n_page_max = pages_of_text(o, info),
        /* Scoring requests outputs of every row, and of one row several: see sequence_fit. */
        .n_out_max = o->max_batch_tokens + TARGET_MAX,
        .n_top_max = o->max_logprobs,
        .n_adjust_max = n_adjust < INT_MAX ? (int)n_adjust : INT_MAX,
        .n_allow_max = o->max_seqs * ALLOW_MAX,
        .n_ablate_max = info->n_memory > 0 ? o->max_seqs * ABLATE_MAX : 0,
        .n_redirect_max =
            o->overlay_bytes > 0 ? o->max_seqs * OVERLAYS_OF_REQUEST * info->n_memory : 0,
        .n_vocab = info->n_vocab,
        .d_model = info->d_attention,
        .n_head = info->n_head,
        .n_span_max = model_span_max(info),
        .n_fetch_bytes = lookups_fetch_bytes(info, o->max_batch_tokens),
    };
}
