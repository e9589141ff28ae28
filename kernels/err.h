/* The one error type of pkmserve.
 *
 * A function that can fail because of its surroundings (a file, a request, memory, a device)
 * returns enum err_code and takes a struct err * last. The message is written where the facts are:
 * it names the file, the field, the limit and the value, and is one line that an operator can act
 * on. A condition that only a bug can break is a CHECK: it aborts, in release builds too. */
#ifndef KERNELS_ERR_H
#define KERNELS_ERR_H

enum err_code {
    ERR_OK = 0,
    ERR_ARGUMENT,     /* a value given by the caller is out of its bounds */
    ERR_IO,           /* a file or socket cannot be opened, read or written */
    ERR_FORMAT,       /* a file's content contradicts its format or another file */
    ERR_UNSUPPORTED,  /* valid, but this build does not serve it */
    ERR_MEMORY,       /* host or device memory does not suffice */
    ERR_DEVICE,       /* the device or its driver failed */
    ERR_NUMERICAL,    /* NaN or infinity where a number was due */
    ERR_QUEUE_FULL,   /* too many requests wait: try again later */
    ERR_QUEUE_TOKENS, /* too many tokens wait: try again later */
    ERR_QUEUE_MEMORY, /* requests hold too much memory: try again later */
    ERR_CLOSED,       /* the engine drains or has stopped: nothing new is taken */
    ERR_TIMEOUT,      /* a deadline passed */
};

struct err {
    enum err_code code;
    char message[512]; /* one line, no trailing newline; "" when code is ERR_OK */
};

/* Writes code and the formatted message into err (which may be NULL) and returns code. What came in
 * through the arguments and is more than text to a terminal or a reader of lines becomes '?':
 * control characters, separators of lines and paragraphs, changes of direction, bytes that are not
 * UTF-8. So the message stays a line. */
enum err_code err_set(struct err *err, enum err_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* "argument", "io", ...: the stable lower-case name of a code, for logs. */
const char *err_code_name(enum err_code code);

/* Prints the place and the condition on standard error and aborts. */
void check_failed(const char *file, int line, const char *condition) __attribute__((noreturn));

/* A place that only a bug reaches. */
#define UNREACHABLE() check_failed(__FILE__, __LINE__, "this place is never reached")

#define CHECK(condition) ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, #condition))

#endif
