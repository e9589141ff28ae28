/* Bounded reading of JSON files: see json_file.h. */
#include "models/json_file.h"
#include "models/file.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory -------------------------------------------------------------------------------- */

/* A list of numbers takes up to 30 times its text, and no file that is meant takes so much. */
static const size_t reading_bytes_max = (size_t)512 << 20;

/* The text that the thread is reading. jansson does not look at every result of malloc, so the
 * first NULL ends the reading by a jump out of it. */
static _Thread_local struct {
    bool is_on;
    jmp_buf end;
    void **taken; /* Owner: the pieces of memory that jansson took, [n_taken] of room */
    size_t n_taken, room;
    size_t bytes; /* of all that it took */
    /* Those of them that it has freed, each with the address of the next: free when all is read. */
    void *returned;
} reading;

static void *reading_malloc(size_t bytes)
{
    void *const memory = malloc(bytes < sizeof(void *) ? sizeof(void *) : bytes);
    if (!reading.is_on) {
        return memory;
    }
    reading.bytes += bytes;
    if (reading.bytes > reading_bytes_max) {
        free(memory);
        longjmp(reading.end, 1);
    }
    if (memory != NULL && reading.n_taken == reading.room) {
        const size_t room = reading.room == 0 ? 64 : 2 * reading.room;
        void **const more = realloc(reading.taken, room * sizeof *more);
        if (more == NULL) {
            free(memory);
            longjmp(reading.end, 1);
        }
        reading.taken = more;
        reading.room = room;
    }
    if (memory == NULL) {
        longjmp(reading.end, 1);
    }
    reading.taken[reading.n_taken++] = memory;
    return memory;
}

static void reading_free(void *memory)
{
    if (!reading.is_on || memory == NULL) {
        free(memory);
        return;
    }
    memcpy(memory, &reading.returned, sizeof reading.returned);
    reading.returned = memory;
}

static void reading_set_up(void)
{
    json_set_alloc_funcs(reading_malloc, reading_free);
}

/* ---- reading ------------------------------------------------------------------------------- */

json_t *json_read(const char *text, size_t bytes, size_t flags, json_error_t *fault,
                  bool *no_memory)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    CHECK(pthread_once(&once, reading_set_up) == 0);
    json_t *volatile root = NULL;
    memset(fault, 0, sizeof *fault); /* jansson may leave it alone */
    reading.is_on = true;
    *no_memory = setjmp(reading.end) != 0;
    if (!*no_memory) {
        root = json_loadb(text, bytes, flags, fault);
        for (void *memory = reading.returned, *next; memory != NULL; memory = next) {
            memcpy(&next, memory, sizeof next);
            free(memory);
        }
    } else {
        if (reading.bytes > reading_bytes_max) {
            (void)snprintf(fault->text, sizeof fault->text, "its values take more than %zu MiB",
                           reading_bytes_max >> 20);
        }
        for (size_t i = 0; i < reading.n_taken; i++) {
            free(reading.taken[i]);
        }
    }
    free(reading.taken);
    memset(&reading, 0, sizeof reading);
    return root;
}

enum err_code json_file_parse(json_t **root, const char *text, size_t bytes, const char *path,
                              struct err *err)
{
    json_error_t fault;
    bool no_memory = false;
    *root = json_read(text, bytes, JSON_REJECT_DUPLICATES, &fault, &no_memory);
    if (no_memory) {
        return err_set(err, ERR_MEMORY, "%s: no memory to read it", path);
    }
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

enum err_code json_file_read(json_t **root, const char *path, size_t bytes_max, bool optional,
                             struct err *err)
{
    *root = NULL;
    char *text = NULL;
    size_t bytes = 0;
    enum err_code code = file_read(&text, &bytes, path, bytes_max, optional, err);
    if (text != NULL) {
        code = json_file_parse(root, text, bytes, path, err);
    }
    free(text);
    return code;
}
