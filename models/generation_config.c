/* generation_config.json: see generation_config.h. */
#include "models/generation_config.h"
#include "models/config.h"
#include "models/file.h"
#include "models/json_file.h"

#include <limits.h>

/* Which end of min .. max is excluded. */
enum open_end { OPEN_NO_END, OPEN_LOW, OPEN_HIGH };

struct number {
    const char *key;
    double min, max;
    enum open_end open;
};

static const struct number TEMPERATURE = {"temperature", 0, 2, OPEN_NO_END};
static const struct number TOP_P = {"top_p", 0, 1, OPEN_LOW};
static const struct number TOP_K = {"top_k", -1, CONFIG_VOCAB_MAX, OPEN_NO_END};
static const struct number MIN_P = {"min_p", 0, 1, OPEN_HIGH};
static const struct number REPETITION = {"repetition_penalty", (double)1e-6F, 10, OPEN_NO_END};

/* The value of a key, or NULL if it is missing or null. */
static const json_t *given(const json_t *root, const char *key)
{
    const json_t *const value = json_object_get(root, key);
    return json_is_null(value) ? NULL : value;
}

static enum err_code read_number(double *number, const json_t *root, const struct number *rule,
                                 const char *path, struct err *err)
{
    const json_t *const value = given(root, rule->key);
    if (value == NULL) {
        return ERR_OK;
    }
    if (!json_is_number(value)) {
        return err_set(err, ERR_FORMAT, "%s: %s must be a number", path, rule->key);
    }
    const double is = (double)(float)json_number_value(value); /* as it will be used */
    const bool low = rule->open == OPEN_LOW ? is > rule->min : is >= rule->min;
    const bool high = rule->open == OPEN_HIGH ? is < rule->max : is <= rule->max;
    if (!low || !high) { /* true for NaN, too, which JSON cannot express */
        return err_set(err, ERR_FORMAT, "%s: %s is %g, but must be in %s%g, %g%s", path, rule->key,
                       is, rule->open == OPEN_LOW ? "(" : "[", rule->min, rule->max,
                       rule->open == OPEN_HIGH ? ")" : "]");
    }
    *number = is;
    return ERR_OK;
}

static enum err_code read_float(float *number, const json_t *root, const struct number *rule,
                                const char *path, struct err *err)
{
    double wide = (double)*number;
    const enum err_code code = read_number(&wide, root, rule, path, err);
    *number = (float)wide;
    return code;
}

static enum err_code read_top_k(int *top_k, const json_t *root, const char *path, struct err *err)
{
    const json_t *const value = given(root, TOP_K.key);
    if (value != NULL && !json_is_integer(value)) {
        return err_set(err, ERR_FORMAT, "%s: top_k must be an integer", path);
    }
    double wide = *top_k;
    const enum err_code code = read_number(&wide, root, &TOP_K, path, err);
    *top_k = wide > 0 ? (int)wide : 0;
    return code;
}

static enum err_code read_do_sample(float *temperature, const json_t *root, const char *path,
                                    struct err *err)
{
    const json_t *const value = given(root, "do_sample");
    if (value != NULL && !json_is_boolean(value)) {
        return err_set(err, ERR_FORMAT, "%s: do_sample must be true or false", path);
    }
    *temperature = json_is_false(value) ? 0 : *temperature;
    return ERR_OK;
}

static enum err_code from_json(struct model_sampling *sampling, const json_t *root,
                               const char *path, struct err *err)
{
    enum err_code code = read_float(&sampling->temperature, root, &TEMPERATURE, path, err);
    if (code == ERR_OK) {
        code = read_float(&sampling->top_p, root, &TOP_P, path, err);
    }
    if (code == ERR_OK) {
        code = read_float(&sampling->min_p, root, &MIN_P, path, err);
    }
    if (code == ERR_OK) {
        code = read_float(&sampling->repetition, root, &REPETITION, path, err);
    }
    if (code == ERR_OK) {
        code = read_top_k(&sampling->top_k, root, path, err);
    }
    return code == ERR_OK ? read_do_sample(&sampling->temperature, root, path, err) : code;
}

enum err_code generation_config_parse(struct model_sampling *sampling, const char *text,
                                      size_t bytes, const char *path, struct err *err)
{
    *sampling = MODEL_SAMPLING_PLAIN;
    json_t *root = NULL;
    enum err_code code = json_file_parse(&root, text, bytes, path, err);
    if (code == ERR_OK) {
        code = from_json(sampling, root, path, err);
    }
    json_decref(root);
    return code;
}

enum err_code generation_config_read(struct model_sampling *sampling, const char *dir,
                                     struct err *err)
{
    *sampling = MODEL_SAMPLING_PLAIN;
    char path[PATH_MAX];
    if (file_path(path, dir, "generation_config.json", err) != ERR_OK) {
        return err->code;
    }
    json_t *root = NULL;
    enum err_code code = json_file_read(&root, path, GENERATION_CONFIG_BYTES_MAX, true, err);
    if (root != NULL) {
        code = from_json(sampling, root, path, err);
    }
    json_decref(root);
    return code;
}
