/* Bounded reading of JSON files: see json_file.h. */
#include "models/json_file.h"
#include "models/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum err_code json_file_parse(json_t **root, const char *text, size_t bytes, const char *path,
                              struct err *err)
{
    json_error_t fault;
    *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &fault);
    if (*root == NULL) {
        return err_set(err, ERR_FORMAT, "%s: not valid JSON at line %d, column %d: %s", path,
                       fault.line, fault.column, fault.text);
    }
    if (!json_is_object(*root)) {
        json_decref(*root);
        *root = NULL;
        return err_set(err, ERR_FORMAT, "%s: a JSON object is expected, not an array", path);
    }
    return ERR_OK;
}

enum err_code json_file_read(json_t **root, const char *path, size_t bytes_max, struct err *err)
{
    *root = NULL;
    char *text = NULL;
    FILE *file = NULL;
    enum err_code code = file_open(&file, path, false, err);
    if (code != ERR_OK) {
        return code;
    }
    /* A read of one byte more than allowed detects a file that is too long, whatever its size
     * claims. */
    text = malloc(bytes_max + 1);
    if (text == NULL) {
        code = err_set(err, ERR_MEMORY, "%s: no memory for %zu bytes", path, bytes_max + 1);
        goto done;
    }
    const size_t bytes = fread(text, 1, bytes_max + 1, file);
    if (ferror(file)) {
        code = err_set(err, ERR_IO, "%s: cannot read: %s", path, strerror(errno));
        goto done;
    }
    if (bytes > bytes_max) {
        code = err_set(err, ERR_FORMAT, "%s: longer than the limit of %zu bytes", path, bytes_max);
        goto done;
    }
    code = json_file_parse(root, text, bytes, path, err);
done:
    free(text);
    (void)fclose(file);
    return code;
}
