/* Opening a model directory: what a model says about itself, what it refuses and how, and that the
 * way a model is stored, placed or cut into chunks does not change its results. Small models are
 * written on the spot; the ref backend computes. */
#include "models/arena.h"
#include "tests/models/runner.h"
#include "tests/models/writer.h"

enum { V = 40, D = 8, F = 12, P = 64, N_LAYER = 2, K = 4, N_KEY = 5 };

/* ---- a small model -------------------------------------------------------------------------- */

struct folder {
    char dir[WRITER_PATH_MAX];
    struct writer w;
};

static void write_config_heads(const char *dir, int n_vocab, int n_head, const char *batch_norm)
{
    char text[1024];
    (void)snprintf(
        text, sizeof text,
        "{\"model_type\":\"pkm_transformer\",\"vocab_size\":%d,\"d_model\":8,\"n_layer\":2,"
        "\"n_head\":%d,\"d_ff\":12,\"max_position\":64,\"activation\":\"gelu\",\"norm_eps\":1e-12,"
        "\"tie_output\":true,\"memories\":[{\"layer\":1,\"place\":\"in\",\"kind\":\"product\","
        "\"n_head\":2,\"k_top\":3,\"n_key\":5,\"d_key\":4,\"n_slot\":25,\"query_batch_norm\":%s,"
        "\"query_bias\":true}]}",
        n_vocab, n_head, batch_norm);
    writer_text(dir, "config.json", text);
}

static void write_config(const char *dir, int n_vocab, const char *batch_norm)
{
    write_config_heads(dir, n_vocab, 2, batch_norm);
}

static void add_pair(struct writer *w, const char *name, int64_t n_out, int64_t n_in)
{
    char text[96];
    const int64_t dim[2] = {n_out, n_in};
    (void)snprintf(text, sizeof text, "%s.weight", name);
    (void)writer_add(w, text, n_in > 0 ? 2 : 1, dim);
    (void)snprintf(text, sizeof text, "%s.bias", name);
    (void)writer_add(w, text, 1, dim);
}

static void add_layer(struct writer *w, int i)
{
    static const char *const parts[] = {"q_lin", "k_lin", "v_lin", "out_lin"};
    char name[64];
    for (int p = 0; p < 4; p++) {
        (void)snprintf(name, sizeof name, "attentions.%d.%s", i, parts[p]);
        add_pair(w, name, D, D);
    }
    (void)snprintf(name, sizeof name, "layer_norm1.%d", i);
    add_pair(w, name, D, 0);
    (void)snprintf(name, sizeof name, "layer_norm2.%d", i);
    add_pair(w, name, D, 0);
}

static void folder_new(struct folder *f, int n_vocab)
{
    const int64_t tok[2] = {n_vocab, D}, pos[2] = {P, D}, keys[4] = {2, 2, N_KEY, K / 2};
    const int64_t values[2] = {N_KEY * N_KEY, D}, query = 2 * K, bias = n_vocab;
    writer_folder(f->dir);
    f->w = (struct writer){.n = 0};
    write_config(f->dir, n_vocab, "true");
    (void)writer_add(&f->w, "embeddings.weight", 2, tok);
    (void)writer_add(&f->w, "position_embeddings.weight", 2, pos);
    add_pair(&f->w, "layer_norm_emb", D, 0);
    add_layer(&f->w, 0);
    add_layer(&f->w, 1);
    add_pair(&f->w, "ffns.0.lin1", F, D);
    add_pair(&f->w, "ffns.0.lin2", D, F);
    (void)writer_add(&f->w, "memories.1_in.keys", 4, keys);
    (void)writer_add(&f->w, "memories.1_in.values.weight", 2, values);
    add_pair(&f->w, "memories.1_in.query_proj.query_mlps.0", query, D);
    add_pair(&f->w, "memories.1_in.query_proj.query_mlps.1", query, 0);
    (void)writer_add(&f->w, "memories.1_in.query_proj.query_mlps.1.running_mean", 1, &query);
    struct writer_tensor *const var =
        writer_add(&f->w, "memories.1_in.query_proj.query_mlps.1.running_var", 1, &query);
    for (int i = 0; i < query; i++) {
        var->value[i] = var->value[i] * var->value[i] + 0.25f;
    }
    (void)writer_add(&f->w, "pred_layer.proj.bias", 1, &bias);
}

static void folder_save(const struct folder *f)
{
    writer_save(&f->w, 0, f->w.n, f->dir, "model.safetensors");
}

static void folder_free(struct folder *f)
{
    writer_free(&f->w);
    writer_remove(f->dir);
}

static const struct model_options F32 = {.dtype = "f32"};

/* The log-probabilities of a fixed sequence of n tokens, chunk tokens a step. False if this machine
 * has no such backend. */
static bool score_on(const char *backend, const struct folder *f,
                     const struct model_options *options, int chunk, float *logprob, int n)
{
    struct runner run;
    int32_t ids[RUNNER_TOK_MAX];
    if (!runner_open(&run, backend, f->dir, options)) {
        return false;
    }
    for (int t = 0; t < n; t++) {
        ids[t] = (t * 7 + 3) % run.info->n_vocab;
    }
    runner_chunks(&run, (struct piece){.ids = ids, .n_ids = n, .n = n, .logprob = logprob}, chunk);
    runner_close(&run);
    return true;
}

static void score(const struct folder *f, const struct model_options *options, int chunk,
                  float *logprob, int n)
{
    assert_true(score_on("ref", f, options, chunk, logprob, n));
}

static void assert_same_score(const float *got, const float *wanted, int n, const char *way)
{
    for (int t = 0; t + 1 < n; t++) {
        assert_true(isfinite(wanted[t]));
        if (memcmp(&got[t], &wanted[t], sizeof(float)) != 0) {
            fail_msg("%s: log-probability %d: expected %.9g, got %.9g", way, t, (double)wanted[t],
                     (double)got[t]);
        }
    }
}

/* ---- what it says --------------------------------------------------------------------------- */

static void test_info(void **state)
{
    struct folder f;
    struct runner run;
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    assert_true(runner_open(&run, "ref", f.dir, &F32));
    const struct model_info *const info = run.info;
    const int linear = D * D + D;
    const int memory_rest = 2 * 2 * N_KEY * K / 2 + (2 * K * D + 2 * K) + 2 * 2 * K;
    assert_string_equal(info->family, "pkm_transformer");
    assert_true(info->n_vocab == V && info->context == P && info->tie_output && !info->add_bos);
    assert_true(info->bos_id == -1 && info->n_lang == 0 && info->n_memory == 1);
    assert_int_equal(info->memory[0].n_slot, N_KEY * N_KEY);
    assert_int_equal(info->n_param_values, N_KEY * N_KEY * D);
    /* running statistics are no parameters, and a tied matrix counts once */
    assert_int_equal(info->n_param, V * D + P * D + 2 * D + N_LAYER * (4 * linear + 4 * D) +
                                        (2 * F * D + F + D) + N_KEY * N_KEY * D + memory_rest + V);
    assert_true(info->file_dtype == DTYPE_F32 && info->dtype == DTYPE_F32);
    assert_int_equal(info->value_bytes, N_KEY * N_KEY * D * 4);
    assert_true(info->weight_bytes > (size_t)info->n_param * 3);
    assert_int_equal(model_page_bytes(run.model), N_LAYER * 2 * KV_PAGE * D * 4);
    struct step_limits limits = run.step->limits;
    const size_t bytes = model_workspace_bytes(run.model, &limits);
    assert_true(bytes >= (size_t)RUNNER_TOK_MAX * (3 * D + 2 * 6) * 4);
    limits.n_tok_max *= 2;
    assert_true(model_workspace_bytes(run.model, &limits) > bytes);
    runner_close(&run);
    folder_free(&f);
}

static void test_dtype(void **state)
{
    struct folder f;
    struct runner run;
    float score_f32[32], score_f16[32], score_bf16[32];
    (void)state;
    folder_new(&f, V);
    writer_find(&f.w, "memories.1_in.query_proj.query_mlps.1.running_var")->value[0] = 1;
    folder_save(&f);
    score(&f, &F32, 32, score_f32, 32);
    const struct {
        enum dtype file;
        const char *wanted;
        enum dtype computed;
    } rows[] = {{DTYPE_F32, "auto", DTYPE_F32}, {DTYPE_F32, "bf16", DTYPE_BF16},
                {DTYPE_F16, "auto", DTYPE_F32}, {DTYPE_F16, "f16", DTYPE_F16},
                {DTYPE_F32, "f16", DTYPE_F16},  {DTYPE_BF16, "auto", DTYPE_BF16},
                {DTYPE_BF16, "f32", DTYPE_F32}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct model_options options = {.dtype = rows[i].wanted};
        for (int t = 0; t < f.w.n; t++) { /* vectors stay F32, as converters leave them */
            f.w.tensor[t].dtype = f.w.tensor[t].n_dim > 1 ? rows[i].file : DTYPE_F32;
        }
        folder_save(&f);
        assert_true(runner_open(&run, "ref", f.dir, &options));
        assert_int_equal(run.info->file_dtype, rows[i].file);
        assert_int_equal(run.info->dtype, rows[i].computed);
        runner_close(&run);
        /* writer_add's numbers are exact in each type: a wider file gives the same bits */
        score(&f, &options, 32, rows[i].computed == DTYPE_F32 ? score_f16 : score_bf16, 32);
        if (rows[i].computed == DTYPE_F32) {
            assert_same_score(score_f16, score_f32, 32, dtype_name(rows[i].file));
        } else {
            assert_true(memcmp(score_bf16, score_f32, sizeof(float) * 31) != 0);
        }
    }
    folder_free(&f);
}

/* Numbers that F16 holds and BF16 does not, in its matrices. */
static void folder_f16(struct folder *f)
{
    for (int t = 0; t < f->w.n; t++) {
        struct writer_tensor *const tensor = &f->w.tensor[t];
        tensor->dtype = tensor->n_dim > 1 ? DTYPE_F16 : DTYPE_F32;
        for (int64_t i = 0; tensor->n_dim > 1 && i < tensor->n_elem; i++) {
            tensor->value[i] += (float)(i % 7 - 3) * 0x1p-9f * tensor->value[i];
            tensor->value[i] = f16_to_f32(f16_from_f32(tensor->value[i]));
        }
    }
}

static double farthest(const float *a, const float *b, int n)
{
    double difference = 0;
    for (int t = 0; t + 1 < n; t++) {
        assert_true(isfinite(a[t]) && isfinite(b[t]));
        difference = fmax(difference, fabs((double)a[t] - (double)b[t]));
    }
    return difference;
}

/* On a GPU F16 files are computed in F16 unless something else is asked for; other backends have no
 * such products. Few rows and many have the same bits, which are ref's but for rounding, and nearer
 * to F32's than BF16's are. The cache is BF16 unless it is named. */
static void test_f16_files_are_computed_in_f16_on_a_gpu(void **state)
{
    enum { N = 32 };
    struct folder f;
    struct runner run;
    float exact[N], specified[N], f16[N], bf16[N], cut[N];
    const struct model_options automatic = {.dtype = "auto", .cache_dtype = "f32", .check = true};
    const struct model_options named = {.dtype = "f16", .cache_dtype = "f32"};
    const struct model_options rough = {.dtype = "bf16", .cache_dtype = "f32"};
    (void)state;
    folder_new(&f, V);
    writer_find(&f.w, "memories.1_in.query_proj.query_mlps.1.running_var")->value[0] = 1;
    folder_f16(&f);
    folder_save(&f);
    for (int i = 1; i < RUNNER_N_CPU; i++) {
        struct backend *be = NULL;
        struct model *model = NULL;
        struct err err = {0};
        if (cpu_open(&be, runner_backends[i], 1, NULL) == ERR_OK) {
            assert_int_equal(model_open(&model, be, f.dir, &automatic, &err), ERR_OK);
            assert_int_equal(model_info(model)->dtype, DTYPE_F32);
            model_close(model);
            assert_int_equal(model_open(&model, be, f.dir, &named, &err), ERR_UNSUPPORTED);
            assert_non_null(strstr(err.message, "does not compute in f16, only a GPU does"));
            backend_close(be);
        }
    }
    if (!runner_open(&run, "cuda", f.dir, &(struct model_options){.dtype = "auto"})) {
        folder_free(&f);
        skip();
    }
    assert_int_equal(run.info->file_dtype, DTYPE_F16);
    assert_int_equal(run.info->dtype, DTYPE_F16);
    assert_int_equal(run.info->cache_dtype, DTYPE_BF16);
    assert_int_equal(run.info->value_dtype, DTYPE_F16); /* as in the file */
    assert_int_equal(run.info->value_bytes, N_KEY * N_KEY * D * sizeof(uint16_t));
    const size_t bytes = run.info->weight_bytes;
    runner_close(&run);
    assert_true(runner_open(&run, "cuda", f.dir, &rough));
    assert_int_equal(run.info->weight_bytes, bytes);
    runner_close(&run);
    score(&f, &(struct model_options){.dtype = "f32"}, N, exact, N);
    score(&f, &named, N, specified, N);
    assert_true(score_on("cuda", &f, &automatic, N, f16, N));
    assert_true(score_on("cuda", &f, &automatic, 5, cut, N));
    assert_true(score_on("cuda", &f, &rough, N, bf16, N));
    assert_same_score(cut, f16, N, "F16 in chunks of 5");
    if (!(farthest(f16, specified, N) < 2e-5 && farthest(f16, exact, N) < 5e-3 &&
          farthest(f16, exact, N) < 0.2 * farthest(bf16, exact, N))) {
        fail_msg(
            "log-probabilities in F16 are off by %g from ref's and by %g from F32's, in BF16 by %g",
            farthest(f16, specified, N), farthest(f16, exact, N), farthest(bf16, exact, N));
    }
    folder_free(&f);
}

/* Stores in I8 what a converter would: all matrices but those that decide which slots are read. */
static void folder_int8(struct folder *f)
{
    for (int t = f->w.n - 1; t >= 0; t--) {
        const struct writer_tensor *const tensor = &f->w.tensor[t];
        if (tensor->n_dim == 2 && strstr(tensor->name, "query_proj") == NULL) {
            writer_int8(&f->w, t);
        }
    }
}

static void test_int8(void **state)
{
    struct folder f;
    struct runner run;
    float f32[32], widened[32], stored[32], other[32];
    const struct model_options automatic = {.dtype = "auto", .check = true};
    const struct model_options int8 = {.dtype = "int8", .int8_max_loss = MODEL_INT8_LOSS};
    (void)state;
    folder_new(&f, V);
    writer_find(&f.w, "memories.1_in.query_proj.query_mlps.1.running_var")->value[0] = 1;
    folder_save(&f);
    score(&f, &F32, 32, f32, 32);
    score(&f, &int8, 32, other, 32); /* made at load */
    double difference = 0;
    for (int t = 0; t < 31; t++) {
        difference = fmax(difference, fabs((double)other[t] - (double)f32[t]));
    }
    if (!(difference > 0 && difference < 0.2)) {
        fail_msg("int8 made at load: log-probabilities differ by %g", difference);
    }
    folder_int8(&f);
    folder_save(&f);
    score(&f, &F32, 32, widened, 32);
    assert_same_score(widened, f32, 32, "stored in int8, which holds these numbers, as f32");
    assert_true(runner_open(&run, "ref", f.dir, &automatic));
    assert_true(run.info->file_dtype == DTYPE_I8 && run.info->dtype == DTYPE_I8);
    const int64_t n_param = run.info->n_param;
    runner_close(&run);
    score(&f, &automatic, 32, stored, 32);
    assert_true(memcmp(stored, f32, sizeof(float) * 31) != 0);
    for (int i = 0; i < RUNNER_N_BACKEND; i++) {
        struct model_options options = automatic;
        if (strcmp(runner_backends[i], "cuda") == 0 ||
            !score_on(runner_backends[i], &f, &options, 32, stored, 32)) {
            continue;
        }
        options.value_placement = PLACEMENT_MMAP;
        (void)score_on(runner_backends[i], &f, &options, 5, other, 32);
        assert_same_score(other, stored, 32, "int8 rows in place, in chunks of 5");
    }
    assert_true(runner_open(&run, "ref", f.dir, &F32));
    assert_int_equal(run.info->n_param, n_param); /* scales are none */
    runner_close(&run);
    folder_free(&f);
}

/* The cache's dtype follows the weights' unless it is named; its pages are half as large in BF16,
 * and what it loses is seen, but little. */
static void test_cache_dtypes(void **state)
{
    static const struct {
        struct model_options options;
        enum dtype dtype;
    } rows[] = {
        {{.dtype = "f32"}, DTYPE_F32},
        {{.dtype = "f32", .cache_dtype = "auto"}, DTYPE_F32},
        {{.dtype = "f32", .cache_dtype = "bf16"}, DTYPE_BF16},
        {{.dtype = "bf16"}, DTYPE_BF16},
        {{.dtype = "int8", .int8_max_loss = MODEL_INT8_LOSS}, DTYPE_BF16},
        {{.dtype = "bf16", .cache_dtype = "f32"}, DTYPE_F32},
    };
    struct folder f;
    float exact[32], whole[32], cut[32];
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct runner run;
        assert_true(runner_open(&run, "ref", f.dir, &rows[i].options));
        assert_int_equal(run.info->cache_dtype, rows[i].dtype);
        assert_int_equal(model_page_bytes(run.model),
                         N_LAYER * 2 * KV_PAGE * D * dtype_bytes(rows[i].dtype));
        runner_close(&run);
    }
    score(&f, &F32, 32, exact, 32);
    for (int i = 0; i < RUNNER_N_BACKEND; i++) {
        if (!score_on(runner_backends[i], &f, &rows[2].options, 32, whole, 32)) {
            continue;
        }
        double difference = 0;
        for (int t = 0; t < 31; t++) {
            difference = fmax(difference, fabs((double)whole[t] - (double)exact[t]));
        }
        if (!(difference > 1e-6 && difference < 0.05)) {
            fail_msg("%s, cache in BF16: log-probabilities differ by %g", runner_backends[i],
                     difference);
        }
        (void)score_on(runner_backends[i], &f, &rows[2].options, 5, cut, 32);
        assert_same_score(cut, whole, 32, "cache in BF16, in chunks of 5");
    }
    folder_free(&f);
}

/* ---- the same bits, however stored, placed or cut -------------------------------------------- */

static void test_placement_keeps_bits(void **state)
{
    struct folder f;
    float wanted[48], got[48];
    static const char *const dtypes[] = {"f32", "bf16"};
    static const enum dtype files[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    (void)state;
    folder_new(&f, V);
    writer_find(&f.w, "memories.1_in.query_proj.query_mlps.1.running_var")->value[0] = 1;
    for (int i = 0; i < RUNNER_N_BACKEND * 3 * 2; i++) {
        const char *const backend = runner_backends[i / 6];
        struct model_options options = {.dtype = dtypes[i % 2], .check = true};
        for (int t = 0; t < f.w.n; t++) {
            f.w.tensor[t].dtype = f.w.tensor[t].n_dim > 1 ? files[i / 2 % 3] : DTYPE_F32;
        }
        folder_save(&f);
        if (!score_on(backend, &f, &options, 48, wanted, 48)) {
            continue;
        }
        if (strcmp(backend, "cuda") != 0) { /* a device does not read files */
            options.value_placement = PLACEMENT_MMAP;
            (void)score_on(backend, &f, &options, 48, got, 48);
            assert_same_score(got, wanted, 48, "memory-mapped tables");
        }
        options.value_placement = PLACEMENT_HOST;
        (void)score_on(backend, &f, &options, 5, got, 48);
        assert_same_score(got, wanted, 48, "tables in host memory, in chunks of 5");
    }
    folder_free(&f);
}

static void test_shards_keep_bits(void **state)
{
    struct folder f;
    float wanted[48], got[48];
    char path[2 * WRITER_PATH_MAX];
    char index[8192];
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    score(&f, &F32, 48, wanted, 48);
    size_t used = (size_t)snprintf(index, sizeof index, "{\"weight_map\":{");
    for (int i = 0; i < f.w.n; i++) {
        used +=
            (size_t)snprintf(index + used, sizeof index - used, "%s\"%s\":\"%s\"", i > 0 ? "," : "",
                             f.w.tensor[i].name, i < 9 ? "one.safetensors" : "two.safetensors");
    }
    (void)snprintf(index + used, sizeof index - used, "}}");
    (void)snprintf(path, sizeof path, "%s/model.safetensors", f.dir);
    assert_int_equal(remove(path), 0);
    writer_text(f.dir, "model.safetensors.index.json", index);
    writer_save(&f.w, 0, 9, f.dir, "one.safetensors");
    writer_save(&f.w, 9, f.w.n, f.dir, "two.safetensors");
    score(&f, &F32, 48, got, 48);
    assert_same_score(got, wanted, 48, "shards");
    folder_free(&f);
}

/* More output rows than fit the logits' workspace at once (64 MiB: 63 rows of this vocabulary). */
static void test_vocabulary_chunks_keep_bits(void **state)
{
    struct folder f;
    float wanted[64], got[64];
    (void)state;
    folder_new(&f, 262153);
    folder_save(&f);
    for (int i = 0; i < RUNNER_N_CPU; i++) {
        if (score_on(runner_backends[i], &f, &F32, 64, got, 64)) {
            (void)score_on(runner_backends[i], &f, &F32, 1, wanted, 64);
            assert_same_score(got, wanted, 64, "64 rows in two chunks");
        }
    }
    folder_free(&f);
}

static const struct backend_ops *honest; /* ops of the backend that is watched */
static int n_gather;

static void counted_gather(struct backend *be, struct tensor y, struct tensor x,
                           const struct step *step, int first)
{
    n_gather++;
    honest->compute.gather(be, y, x, step, first);
}

/* A step of one text, with these rows as outputs: its log-probabilities, and how often rows were
 * gathered. */
static int outputs_of(struct runner *run, const struct piece *piece, const int32_t *row, int n,
                      float *logprob)
{
    struct err err = {0};
    struct step *const s = run->step;
    s->n_tok = s->n_seq = s->n_out = s->n_top = s->n_adjust = s->n_allow = s->seq_first[0] = 0;
    runner_add(run, piece);
    for (int i = 0; i < n; i++) { /* ascending, so what is read has not been written */
        s->target[i] = piece->ids[row[i] + 1];
        s->out_row[i] = row[i];
    }
    s->n_out = n;
    n_gather = 0;
    run->be->op->step_begin(run->be, s);
    model_forward(run->model, s, NULL);
    assert_int_equal(run->be->op->finish(run->be, s, &err), ERR_OK);
    memcpy(logprob, s->out_logprob, (size_t)n * sizeof *logprob);
    return n_gather;
}

/* Outputs whose rows follow one another are computed in place, others from copies of the rows: with
 * the same bits. As many outputs as rows need not be all rows. */
static void test_rows_in_a_run_are_not_gathered(void **state)
{
    enum { N = 6 };
    static const int32_t ids[N + 1] = {3, 10, 17, 24, 31, 38, 5};
    static const struct {
        int32_t row[N];
        int n, n_gather;
    } cases[] = {{{0, 1, 2, 3, 4, 5}, 6, 0}, {{2, 3, 4}, 3, 0},          {{5}, 1, 0},
                 {{0, 2, 3}, 3, 1},          {{0, 0, 2, 3, 4, 5}, 6, 1}, {{4, 4}, 2, 1}};
    struct folder f;
    struct runner run;
    float all[N];
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    assert_true(runner_open(&run, "ref", f.dir, &F32));
    honest = run.be->op;
    struct backend_ops watched = *honest;
    watched.compute.gather = counted_gather;
    run.be->op = &watched;
    const struct piece piece = {.ids = ids, .n_ids = N + 1, .n = N};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float logprob[N];
        const int n = outputs_of(&run, &piece, cases[i].row, cases[i].n, i == 0 ? all : logprob);
        assert_int_equal(n, cases[i].n_gather);
        for (int j = 0; i > 0 && j < cases[i].n; j++) {
            assert_memory_equal(&logprob[j], &all[cases[i].row[j]], sizeof *all);
        }
    }
    run.be->op = honest;
    runner_close(&run);
    folder_free(&f);
}

/* The batch norm after the query is what its formula says. */
static void test_batch_norm_is_folded(void **state)
{
    struct folder f;
    float normed[16], folded[16];
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    score(&f, &F32, 16, normed, 16);
    const char *const linear = "memories.1_in.query_proj.query_mlps.0";
    const char *const norm = "memories.1_in.query_proj.query_mlps.1";
    char name[96];
    const float *part[4];
    static const char *const suffix[4] = {"weight", "bias", "running_mean", "running_var"};
    for (int p = 0; p < 4; p++) {
        (void)snprintf(name, sizeof name, "%s.%s", norm, suffix[p]);
        part[p] = writer_find(&f.w, name)->value;
    }
    (void)snprintf(name, sizeof name, "%s.weight", linear);
    float *const weight = writer_find(&f.w, name)->value;
    (void)snprintf(name, sizeof name, "%s.bias", linear);
    float *const bias = writer_find(&f.w, name)->value;
    for (int r = 0; r < 2 * K; r++) {
        const double s = (double)part[0][r] / sqrt((double)part[3][r] + 1e-5);
        bias[r] = (float)(s * ((double)bias[r] - (double)part[2][r]) + (double)part[1][r]);
        for (int c = 0; c < D; c++) {
            weight[r * D + c] = (float)(s * (double)weight[r * D + c]);
        }
    }
    for (int p = 0; p < 4; p++) {
        (void)snprintf(name, sizeof name, "%s.%s", norm, suffix[p]);
        writer_drop(&f.w, name);
    }
    folder_save(&f);
    write_config(f.dir, V, "false");
    score(&f, &F32, 16, folded, 16);
    assert_same_score(folded, normed, 16, "batch norm folded by hand");
    folder_free(&f);
}

/* ---- what it refuses ------------------------------------------------------------------------ */

static void refuse(const struct folder *f, const struct model_options *options, size_t memory_bytes,
                   enum err_code wanted, const char *message)
{
    struct err err = {0};
    struct backend *be = NULL;
    struct model *model = NULL;
    assert_int_equal(ref_open(&be, &err), ERR_OK);
    if (memory_bytes > 0) {
        be->memory_bytes = memory_bytes;
    }
    const enum err_code code = model_open(&model, be, f->dir, options, &err);
    assert_null(model);
    if (code != wanted || strstr(err.message, message) == NULL) {
        fail_msg("expected %s and \"%s\", got %s and \"%s\"", err_code_name(wanted), message,
                 err_code_name(code), err.message);
    }
    backend_close(be);
}

static void test_refuses_tensors(void **state)
{
    struct folder f;
    const int64_t dim[2] = {D, D};
    (void)state;
    folder_new(&f, V);
    (void)writer_add(&f.w, "pred_layer.proj.weight", 2, dim);
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_FORMAT, "tensor pred_layer.proj.weight is not part of the model");
    writer_drop(&f.w, "pred_layer.proj.weight");
    struct writer_tensor *const keys = writer_find(&f.w, "memories.1_in.keys");
    keys->dim[1] = 4;
    keys->dim[3] = 1;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_FORMAT,
           "tensor memories.1_in.keys has shape [2, 4, 5, 1]; config.json makes it [2, 2, 5, 2]");
    keys->dim[1] = keys->dim[3] = 2;
    writer_find(&f.w, "ffns.0.lin1.bias")->n_dim = 2;
    writer_find(&f.w, "ffns.0.lin1.bias")->dim[1] = 1;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_FORMAT,
           "ffns.0.lin1.bias has shape [12, 1]; config.json makes it [12]");
    writer_find(&f.w, "ffns.0.lin1.bias")->n_dim = 1;
    const int n = f.w.n;
    for (int i = 0; i < n; i++) { /* each one is missed by its name */
        char message[160];
        const struct writer_tensor first = f.w.tensor[0];
        memmove(f.w.tensor, f.w.tensor + 1, (size_t)(n - 1) * sizeof first);
        f.w.tensor[n - 1] = first;
        f.w.n = n - 1;
        folder_save(&f);
        (void)snprintf(message, sizeof message, "tensor %s is missing", first.name);
        refuse(&f, &F32, 0, ERR_FORMAT, message);
        f.w.n = n;
    }
    folder_free(&f);
}

/* Slots of the keys → slots of the table, for each head: turned by 7 for head 0, by 3 for head 1.
 */
static struct writer_tensor *add_slot_map(struct folder *f)
{
    const int64_t n_slot = N_KEY * N_KEY;
    const int64_t dim[2] = {2, n_slot};
    struct writer_tensor *const map = writer_add(&f->w, "memories.1_in.slot_map", 2, dim);
    map->dtype = DTYPE_I32;
    for (int64_t i = 0; i < 2 * n_slot; i++) {
        map->value[i] = (float)((i % n_slot + (i < n_slot ? 7 : 3)) % n_slot);
    }
    return map;
}

static void test_refuses_int8(void **state)
{
    struct folder f;
    const struct model_options int8 = {.dtype = "int8", .int8_max_loss = 0.005};
    const struct model_options forced = {.dtype = "int8"};
    float logprob[8];
    (void)state;
    folder_new(&f, V);
    struct writer_tensor *const up = writer_find(&f.w, "ffns.0.lin1.weight");
    for (int64_t i = 0; i < up->n_elem; i++) { /* most of each row is rounded away */
        up->value[i] = i % up->dim[1] == 0 ? 20 : i % 2 == 0 ? 0.07f : -0.07f;
    }
    folder_save(&f);
    refuse(&f, &int8, 0, ERR_NUMERICAL, "ffns.0.lin1.weight: int8 would change this weight by ");
    score(&f, &forced, 8, logprob, 8);
    folder_int8(&f);
    writer_find(&f.w, "attentions.0.k_lin.weight")->dtype = DTYPE_F32;
    writer_drop(&f.w, "attentions.0.k_lin.weight.scale");
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_UNSUPPORTED,
           "they are one matrix here, so all of its parts must be I8");
    writer_int8(&f.w, (int)(writer_find(&f.w, "attentions.0.k_lin.weight") - f.w.tensor));
    writer_find(&f.w, "embeddings.weight.scale")->dtype = DTYPE_BF16;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_UNSUPPORTED,
           "embeddings.weight.scale has dtype BF16; scales must be F32");
    writer_drop(&f.w, "embeddings.weight.scale");
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_FORMAT, "tensor embeddings.weight.scale is missing");
    folder_free(&f);
}

static void test_refuses_slot_maps(void **state)
{
    struct folder f;
    (void)state;
    folder_new(&f, V);
    write_config(f.dir, V, "true,\"slot_map\":true");
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_FORMAT, "tensor memories.1_in.slot_map is missing");
    struct writer_tensor *const map = add_slot_map(&f);
    map->value[30] = 25;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_FORMAT, "memories.1_in.slot_map: element 30 is 25, not a slot 0 .. 24");
    map->value[30] = -1;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_FORMAT, "memories.1_in.slot_map: element 30 is -1, not a slot");
    map->value[30] = 0;
    map->dtype = DTYPE_F32;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_UNSUPPORTED, "slot_map has dtype F32; it holds slots and must be I32");
    map->dtype = DTYPE_I32;
    writer_find(&f.w, "layer_norm1.0.bias")->dtype = DTYPE_I32;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_UNSUPPORTED,
           "layer_norm1.0.bias has dtype I32; it must be F32, F16 or BF16");
    folder_free(&f);
}

/* Moving the table's rows and the slots alike changes nothing but where the rows stand. */
static void test_slot_map_moves_rows(void **state)
{
    struct folder f;
    float wanted[48], got[48];
    const struct model_options check = {.dtype = "f32", .check = true};
    (void)state;
    folder_new(&f, V);
    write_config(f.dir, V, "true,\"slot_map\":true");
    struct writer_tensor *const map = add_slot_map(&f);
    const int n_slot = N_KEY * N_KEY;
    for (int i = 0; i < 2 * n_slot; i++) {
        map->value[i] = (float)(i % n_slot);
    }
    folder_save(&f);
    score(&f, &check, 48, wanted, 48);
    struct writer_tensor *const values = writer_find(&f.w, "memories.1_in.values.weight");
    float moved[N_KEY * N_KEY * D];
    for (int i = 0; i < 2 * n_slot; i++) {
        map->value[i] = (float)((i % n_slot + 7) % n_slot);
    }
    for (int i = 0; i < n_slot * D; i++) {
        moved[(i + 7 * D) % (n_slot * D)] = values->value[i];
    }
    memcpy(values->value, moved, sizeof moved);
    folder_save(&f);
    score(&f, &check, 48, got, 48);
    assert_same_score(got, wanted, 48, "slots and rows moved alike");
    folder_free(&f);
}

/* Two memories with one table, which stands in the file once and is counted once. */
static void test_values_are_shared(void **state)
{
    struct folder f;
    struct runner run;
    (void)state;
    folder_new(&f, V);
    for (int i = f.w.n - 1; i >= 0;
         i--) { /* the second memory is like the first, without a table */
        const struct writer_tensor first = f.w.tensor[i];
        char name[96];
        if (strncmp(first.name, "memories.1_in.", 14) == 0 &&
            strstr(first.name, "values") == NULL) {
            (void)snprintf(name, sizeof name, "memories.1_after.%.70s", first.name + 14);
            struct writer_tensor *const copy = writer_add(&f.w, name, first.n_dim, first.dim);
            memcpy(copy->value, first.value, (size_t)first.n_elem * sizeof(float));
        }
    }
    write_config(f.dir, V,
                 "true,\"query_bias\":true},{\"layer\":1,\"place\":\"after\",\"kind\":\"product\","
                 "\"n_head\":2,\"k_top\":3,\"n_key\":5,\"d_key\":4,\"n_slot\":25,"
                 "\"values_of\":0,\"query_batch_norm\":true");
    folder_save(&f);
    assert_true(runner_open(&run, "ref", f.dir, &F32));
    assert_int_equal(run.info->n_memory, 2);
    assert_int_equal(run.info->n_param_values, N_KEY * N_KEY * D);
    assert_int_equal(run.info->value_bytes, N_KEY * N_KEY * D * sizeof(float));
    runner_close(&run);
    folder_free(&f);
}

static void test_refuses_numbers(void **state)
{
    struct folder f;
    const struct model_options check = {.dtype = "f32", .check = true};
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16};
    (void)state;
    folder_new(&f, V);
    struct writer_tensor *const values = writer_find(&f.w, "memories.1_in.values.weight");
    for (size_t i = 0; i < 6; i++) {
        values->value[77] = bad[i % 3];
        values->dtype = dtypes[i / 3];
        folder_save(&f);
        refuse(&f, &check, 0, ERR_NUMERICAL,
               "tensor memories.1_in.values.weight: element 77 is NaN or infinite");
    }
    values->value[77] = 0;
    writer_find(&f.w, "memories.1_in.query_proj.query_mlps.1.running_var")->value[2] = -1;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_NUMERICAL, "running_var: element 2 is -1, but a variance is never");
    folder_free(&f);
}

static void test_refuses_options_and_memory(void **state)
{
    struct folder f;
    const struct model_options int4 = {.dtype = "int4"};
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    refuse(&f, &int4, 0, ERR_ARGUMENT, "dtype: int4 is unknown; use auto, f32, bf16, int8 or f16");
    refuse(&f, &(struct model_options){.dtype = "f32", .cache_dtype = "f8"}, 0, ERR_ARGUMENT,
           "kv_cache_dtype: f8 is unknown; use auto, f32 or bf16");
    refuse(&f, &F32, 4096, ERR_MEMORY, "do not fit");
    write_config_heads(f.dir, V, 8, "true");
    refuse(&f, &(struct model_options){.dtype = "bf16", .cache_dtype = "bf16"}, 0, ERR_UNSUPPORTED,
           "kv_cache_dtype: bf16 holds columns in pairs, and a head of this model has 1 (8 in 8 "
           "heads)");
    writer_text(f.dir, "config.json", "{\"model_type\":\"gpt\"}");
    refuse(&f, &F32, 0, ERR_FORMAT, "config.json: model_type is \"gpt\"; served are");
    folder_free(&f);
}

/* Masks are no tensors: what is to fit is layers times heads times distances. */
static void test_refuses_span_masks_without_memory(void **state)
{
    enum { SPAN = 4096, POSITION_BYTES = SPAN * 4, MASK_BYTES = 2 * SPAN * 4 };
    static const char *const square[] = {"query", "key", "value", "out"};
    const int64_t two = 2, matrix[2] = {2, 2}, positions[2] = {1, SPAN};
    struct folder f = {.w = {.n = 0}};
    char name[64];
    (void)state;
    writer_folder(f.dir);
    writer_text(f.dir, "config.json",
                "{\"model_type\":\"all_attention\",\"vocab_size\":2,\"d_model\":2,\"n_layer\":2,"
                "\"n_head\":2,\"d_ff\":1,\"n_persistent\":0,\"max_span\":4096,\"span_ramp\":1,"
                "\"norm_eps\":1e-5,\"tie_output\":true}");
    (void)writer_add(&f.w, "embeddings.weight", 2, matrix);
    (void)writer_add(&f.w, "positions", 2, positions);
    (void)writer_add(&f.w, "output.bias", 1, &two);
    for (int i = 0; i < 2; i++) {
        for (int p = 0; p < 4; p++) {
            (void)snprintf(name, sizeof name, "layers.%d.%s.weight", i, square[p]);
            (void)writer_add(&f.w, name, 2, matrix);
        }
        (void)snprintf(name, sizeof name, "layers.%d.norm1", i);
        add_pair(&f.w, name, 2, 0);
        (void)snprintf(name, sizeof name, "layers.%d.norm2", i);
        add_pair(&f.w, name, 2, 0);
        (void)snprintf(name, sizeof name, "layers.%d.ffn.lin1", i);
        add_pair(&f.w, name, 1, 2);
        (void)snprintf(name, sizeof name, "layers.%d.ffn.lin2", i);
        add_pair(&f.w, name, 2, 1);
        (void)snprintf(name, sizeof name, "layers.%d.spans", i);
        float *const span = writer_add(&f.w, name, 1, &two)->value;
        span[0] = span[1] = 1;
    }
    folder_save(&f);
    refuse(&f, &F32, POSITION_BYTES - 1, ERR_MEMORY, "positions: its 16384 bytes do not fit");
    refuse(&f, &F32, POSITION_BYTES + 2 * MASK_BYTES - 1, ERR_MEMORY,
           "layers.1.spans: masks of 2 heads for 4096 distances: its 32768 bytes do not fit");
    writer_find(&f.w, "layers.1.spans")->value[1] = 1.0000001f;
    folder_save(&f);
    refuse(&f, &F32, 0, ERR_NUMERICAL, "layers.1.spans: head 1 has 1.00000012, but");
    folder_free(&f);
}

/* A network that no layer has takes no room, whatever its width is said to be. */
static void test_no_room_for_a_network_that_is_not_there(void **state)
{
    struct folder f;
    struct err err = {0};
    const struct step_limits limits = {.n_tok_max = 64, .n_out_max = 1};
    size_t bytes[2] = {0};
    char config[1024], name[64];
    (void)state;
    folder_new(&f, V);
    for (int p = 0; p < 4; p++) {
        static const char *const parts[] = {"lin1.weight", "lin1.bias", "lin2.weight", "lin2.bias"};
        (void)snprintf(name, sizeof name, "ffns.0.%s", parts[p]);
        writer_drop(&f.w, name);
    }
    for (int i = 0, n = f.w.n; i < n; i++) { /* layer 0 gets a memory like that of layer 1 */
        struct writer_tensor *const from = &f.w.tensor[i];
        if (strncmp(from->name, "memories.1", 10) == 0) {
            (void)snprintf(name, sizeof name, "memories.0%s", from->name + 10);
            struct writer_tensor *const to = writer_add(&f.w, name, from->n_dim, from->dim);
            memcpy(to->value, from->value, (size_t)to->n_elem * sizeof *to->value);
        }
    }
    folder_save(&f);
    for (int i = 0; i < 2; i++) {
        static const char memory[] = "{\"layer\":%d,\"place\":\"in\",\"kind\":\"product\","
                                     "\"n_head\":2,\"k_top\":3,\"n_key\":5,\"d_key\":4,"
                                     "\"n_slot\":25,\"query_batch_norm\":true,\"query_bias\":true}";
        int n = snprintf(config, sizeof config,
                         "{\"model_type\":\"pkm_transformer\",\"vocab_size\":%d,\"d_model\":8,"
                         "\"n_layer\":2,\"n_head\":2,\"d_ff\":%d,\"max_position\":64,"
                         "\"activation\":\"gelu\",\"norm_eps\":1e-12,\"tie_output\":true,"
                         "\"memories\":[",
                         V, i == 0 ? 1 : 1 << 20);
        n += snprintf(config + n, sizeof config - (size_t)n, memory, 0);
        n += snprintf(config + n, sizeof config - (size_t)n, ",");
        n += snprintf(config + n, sizeof config - (size_t)n, memory, 1);
        (void)snprintf(config + n, sizeof config - (size_t)n, "]}");
        writer_text(f.dir, "config.json", config);
        struct backend *be = NULL;
        struct model *model = NULL;
        assert_int_equal(ref_open(&be, &err), ERR_OK);
        if (model_open(&model, be, f.dir, &F32, &err) != ERR_OK) {
            fail_msg("d_ff without a network: %s", err.message);
        }
        bytes[i] = model_workspace_bytes(model, &limits);
        model_close(model);
        backend_close(be);
    }
    assert_int_equal(bytes[0], bytes[1]);
    folder_free(&f);
}

/* ---- a device with memory of its own --------------------------------------------------------- */

/* The reference as if it were a GPU: remembers where each weight was placed, and how much fits. */
static struct {
    struct backend_ops op;
    const struct backend_ops *ref;
    int64_t available;
    enum placement values, tokens, matrix;
} device;

static int64_t device_available(struct backend *be)
{
    (void)be;
    return device.available;
}

static enum err_code device_weight_new(struct backend *be, struct weight **weight,
                                       const struct tensor *host, const struct weight_desc *desc,
                                       const char *name, struct err *err)
{
    enum placement *const seen = strstr(name, ".values.") != NULL ? &device.values
                                 : desc->kind == WEIGHT_TABLE     ? &device.tokens
                                                                  : &device.matrix;
    *seen = desc->placement;
    return device.ref->weight_new(be, weight, host, desc, name, err);
}

/* Opens f on it. On success *placement is what the model says of its values. */
static enum err_code open_on_device(const struct folder *f, const struct model_options *options,
                                    enum placement *placement, struct err *err)
{
    struct backend *be = NULL;
    struct model *model = NULL;
    assert_int_equal(ref_open(&be, err), ERR_OK);
    device.ref = be->op;
    device.op = *be->op;
    device.op.memory_available = device_available;
    device.op.weight_new = device_weight_new;
    be->op = &device.op;
    be->is_host = false;
    const enum err_code code = model_open(&model, be, f->dir, options, err);
    if (code == ERR_OK) {
        *placement = model_info(model)->value_placement;
    }
    model_close(model);
    backend_close(be);
    return code;
}

static void test_device_holds_all_but_the_values(void **state)
{
    struct folder f;
    struct err err = {0};
    struct model_options options = {.dtype = "f32", .value_auto = true};
    enum placement placement = PLACEMENT_MMAP;
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    device.available = 1 << 30;
    assert_int_equal(open_on_device(&f, &options, &placement, &err), ERR_OK);
    assert_int_equal(placement, PLACEMENT_DEVICE);
    assert_int_equal(device.values, PLACEMENT_DEVICE);
    assert_int_equal(device.tokens, PLACEMENT_DEVICE);

    options = (struct model_options){.dtype = "f32", .value_placement = PLACEMENT_HOST};
    assert_int_equal(open_on_device(&f, &options, &placement, &err), ERR_OK);
    assert_int_equal(placement, PLACEMENT_HOST);
    assert_int_equal(device.values, PLACEMENT_HOST);
    assert_int_equal(device.tokens, PLACEMENT_DEVICE);
    assert_int_equal(device.matrix, PLACEMENT_DEVICE);

    options.value_placement = PLACEMENT_MMAP;
    assert_int_equal(open_on_device(&f, &options, &placement, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "(mmap); use device, or host"));
    folder_free(&f);
}

static void test_device_memory_is_named_when_it_runs_out(void **state)
{
    struct folder f;
    struct err err = {0};
    struct model_options options = {.dtype = "f32"};
    enum placement placement = PLACEMENT_MMAP;
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    device.available = 64;
    assert_int_equal(open_on_device(&f, &options, &placement, &err), ERR_MEMORY);
    assert_non_null(strstr(err.message, "do not fit into device memory: 64 are left after"));
    assert_non_null(strstr(err.message, "memory placement host"));
    options.value_placement = PLACEMENT_HOST;
    assert_int_equal(open_on_device(&f, &options, &placement, &err), ERR_MEMORY);
    assert_null(strstr(err.message, "placement")); /* no advice that was followed already */
    folder_free(&f);
}

/* On the host the choice is the file, for every table. */
static void test_host_reads_tables_in_place_unasked(void **state)
{
    struct folder f;
    struct runner run;
    const struct model_options options = {.dtype = "f32", .value_auto = true};
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    assert_true(runner_open(&run, "ref", f.dir, &options));
    assert_int_equal(run.info->value_placement, PLACEMENT_MMAP);
    assert_int_equal(run.info->value_bytes, 0);
    runner_close(&run);
    folder_free(&f);
}

/* Progress grows within a phase, and the last phase is done in the end. */
struct progress {
    char phase[16];
    double done;
    int n_phase;
};

static void see_progress(void *ctx, const char *phase, double done)
{
    struct progress *const p = ctx;
    const bool same = strcmp(p->phase, phase) == 0;
    assert_true(done >= (same ? p->done : 0.0) && done <= 1);
    p->n_phase += same ? 0 : 1;
    p->done = done;
    (void)snprintf(p->phase, sizeof p->phase, "%s", phase);
}

static void test_progress(void **state)
{
    struct folder f;
    struct runner run;
    struct progress progress = {.phase = ""};
    const struct model_options options = {
        .dtype = "f32", .check = true, .progress = see_progress, .progress_ctx = &progress};
    (void)state;
    folder_new(&f, V);
    folder_save(&f);
    assert_true(runner_open(&run, "ref", f.dir, &options));
    assert_int_equal(progress.n_phase, 3);
    assert_string_equal(progress.phase, "pack");
    assert_true(progress.done == 1);
    runner_close(&run);
    folder_free(&f);
}

/* Each tensor of a buffer begins at a multiple of 64 bytes, and none takes more than it needs. */
static void test_arena_rounds_up(void **state)
{
    static const struct {
        int64_t cols;
        enum dtype dtype;
        size_t used;
    } rows[] = {{0, DTYPE_F32, 0},   {1, DTYPE_I8, 64},     {64, DTYPE_I8, 128},
                {65, DTYPE_I8, 256}, {31, DTYPE_BF16, 320}, {17, DTYPE_F32, 448}};
    (void)state;
    static char buffer[448];
    struct arena arena = {.base = buffer};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const size_t begin = arena.used;
        const struct tensor tensor = arena_take(&arena, 1, rows[i].cols, rows[i].dtype);
        assert_ptr_equal(tensor.data, buffer + begin);
        assert_int_equal(arena.used, rows[i].used);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arena_rounds_up),
        cmocka_unit_test(test_info),
        cmocka_unit_test(test_dtype),
        cmocka_unit_test(test_f16_files_are_computed_in_f16_on_a_gpu),
        cmocka_unit_test(test_int8),
        cmocka_unit_test(test_refuses_int8),
        cmocka_unit_test(test_placement_keeps_bits),
        cmocka_unit_test(test_shards_keep_bits),
        cmocka_unit_test(test_vocabulary_chunks_keep_bits),
        cmocka_unit_test(test_rows_in_a_run_are_not_gathered),
        cmocka_unit_test(test_batch_norm_is_folded),
        cmocka_unit_test(test_refuses_tensors),
        cmocka_unit_test(test_refuses_slot_maps),
        cmocka_unit_test(test_slot_map_moves_rows),
        cmocka_unit_test(test_values_are_shared),
        cmocka_unit_test(test_refuses_numbers),
        cmocka_unit_test(test_cache_dtypes),
        cmocka_unit_test(test_refuses_options_and_memory),
        cmocka_unit_test(test_refuses_span_masks_without_memory),
        cmocka_unit_test(test_no_room_for_a_network_that_is_not_there),
        cmocka_unit_test(test_device_holds_all_but_the_values),
        cmocka_unit_test(test_device_memory_is_named_when_it_runs_out),
        cmocka_unit_test(test_host_reads_tables_in_place_unasked),
        cmocka_unit_test(test_progress),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
