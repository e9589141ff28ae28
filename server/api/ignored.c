/* Ignored fields in the log: see ignored.h. */
#include "server/api/ignored.h"

#include "engine/log.h"
#include "server/net/exchange.h"

#include <stdio.h>
#include <string.h>

void ignored_begin(struct ignored *ignored)
{
    CHECK(pthread_mutex_init(&ignored->lock, NULL) == 0);
    ignored->n = 0;
}

/* Remembers a name; the number of names before it, or -1 if it is known already. */
static int remember(struct ignored *ignored, const char *name)
{
    int at = -1;
    CHECK(pthread_mutex_lock(&ignored->lock) == 0);
    int i = 0;
    while (i < ignored->n && strcmp(ignored->name[i], name) != 0) {
        i++;
    }
    if (i == ignored->n && i < IGNORED_N_MAX) {
        at = ignored->n++;
        (void)snprintf(ignored->name[at], IGNORED_NAME_MAX, "%s", name);
    }
    CHECK(pthread_mutex_unlock(&ignored->lock) == 0);
    return at;
}

void ignored_note(struct ignored *ignored, const char *path, const char *list)
{
    char shown_path[2 * EXCHANGE_PATH_MAX];
    while (*list != '\0') {
        char name[IGNORED_NAME_MAX];
        char shown[2 * IGNORED_NAME_MAX];
        const size_t bytes = strcspn(list, ",");
        const size_t kept = bytes < sizeof name ? bytes : sizeof name - 1;
        memcpy(name, list, kept);
        name[kept] = '\0';
        const int at = remember(ignored, name);
        if (at >= 0) {
            log_event(LEVEL_WARN, "field_ignored",
                      "field=%s path=%s advice=\"a client sends a field that this route does not "
                      "read; --strict refuses such requests\"",
                      log_quote(shown, sizeof shown, name),
                      log_quote(shown_path, sizeof shown_path, path));
        }
        if (at == IGNORED_N_MAX - 1) {
            log_event(LEVEL_WARN, "field_ignored",
                      "names=%d advice=\"no more names are logged: X-Ignored-Fields has them\"",
                      IGNORED_N_MAX);
        }
        list += bytes;
        list += strspn(list, ", ");
    }
}
