/* Names of request fields that the server does not read. Each is logged the first time that it
 * occurs: X-Ignored-Fields tells the client's program, but its user rarely sees headers. */
#ifndef SERVER_IGNORED_H
#define SERVER_IGNORED_H

#include <pthread.h>

enum { IGNORED_NAME_MAX = 64, IGNORED_N_MAX = 128 };

struct ignored {
    pthread_mutex_t lock; /* guards all below */
    int n;
    char name[IGNORED_N_MAX][IGNORED_NAME_MAX]; /* longer names are cut */
};

void ignored_begin(struct ignored *ignored);
/* Logs the new names of a list as fields_finish makes it, "a, b.d" (fields.h). After IGNORED_N_MAX
 * names one last line says that no more are logged. Any thread. */
void ignored_note(struct ignored *ignored, const char *path, const char *list);

#endif
