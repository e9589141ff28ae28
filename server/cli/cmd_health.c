/* `pkmserve health`: asks a running server for its health, as a container's health check that needs
 * no other program. One GET over a plain socket, all of it within --timeout-s. Exit status 0 if the
 * answer is 200, else 1, and one line that says why. */
#include "engine/clock.h"
#include "server/cli/cmd.h"

#include <ctype.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    HEALTH_ANSWER_MAX = 4096, /* the head and a body of one line; more is not read */
    HEALTH_SHOWN_MAX = 200,   /* bytes of the body that the line shows */
};

struct health {
    const struct options *options; /* Borrowed */
    int64_t deadline_us;
    int fd;
    char answer[HEALTH_ANSWER_MAX + 1]; /* [n], then a NUL */
    size_t n;
};

/* Waits until the socket is ready for events. */
static enum err_code health_wait(const struct health *health, short events, const char *what,
                                 struct err *err)
{
    struct pollfd poll_fd = {.fd = health->fd, .events = events};
    for (;;) {
        const int64_t left_us = health->deadline_us - clock_now_us();
        const int n = left_us > 0 ? poll(&poll_fd, 1, (int)(left_us / 1000 + 1)) : 0;
        if (n > 0) {
            return ERR_OK;
        }
        if (n == 0) {
            return err_set(err, ERR_TIMEOUT, "not healthy: %s port %d: %s took longer than %d s",
                           health->options->host, health->options->port, what,
                           health->options->timeout_s);
        }
        CHECK(errno == EINTR);
    }
}

static enum err_code health_failed(const struct health *health, const char *what, int number,
                                   struct err *err)
{
    return err_set(err, ERR_IO, "not healthy: %s port %d: %s: %s", health->options->host,
                   health->options->port, what, strerror(number));
}

/* Connects to one address. */
static enum err_code health_connect_to(struct health *health, const struct addrinfo *address,
                                       struct err *err)
{
    health->fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (health->fd < 0) {
        return health_failed(health, "socket", errno, err);
    }
    if (connect(health->fd, address->ai_addr, address->ai_addrlen) == 0) {
        return ERR_OK;
    }
    if (errno != EINPROGRESS) {
        return health_failed(health, "connecting", errno, err);
    }
    if (health_wait(health, POLLOUT, "connecting", err) != ERR_OK) {
        return err->code;
    }
    int number = 0;
    socklen_t bytes = sizeof number;
    CHECK(getsockopt(health->fd, SOL_SOCKET, SO_ERROR, &number, &bytes) == 0);
    return number == 0 ? ERR_OK : health_failed(health, "connecting", number, err);
}

/* Connects to the first of the host's addresses that answers. */
static enum err_code health_connect(struct health *health, struct err *err)
{
    char service[16];
    (void)snprintf(service, sizeof service, "%d", health->options->port);
    const struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    const int why = getaddrinfo(health->options->host, service, &hints, &list);
    if (why != 0) {
        return err_set(err, ERR_IO, "not healthy: --host %s: %s", health->options->host,
                       gai_strerror(why));
    }
    enum err_code code = ERR_IO;
    for (const struct addrinfo *a = list; a != NULL && code == ERR_IO; a = a->ai_next) {
        if (health->fd >= 0) {
            (void)close(health->fd);
        }
        code = health_connect_to(health, a, err);
    }
    freeaddrinfo(list);
    return code;
}

static enum err_code health_send(struct health *health, struct err *err)
{
    struct text request = {0};
    text_printf(&request, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n",
                health->options->path, health->options->host);
    enum err_code code = request.failed ? err_set(err, ERR_MEMORY, "no memory") : ERR_OK;
    for (size_t sent = 0; code == ERR_OK && sent < request.n;) {
        const ssize_t n =
            send(health->fd, request.data + sent, request.n - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            sent += (size_t)n;
        } else if (errno == EAGAIN) {
            code = health_wait(health, POLLOUT, "sending", err);
        } else if (errno != EINTR) {
            code = health_failed(health, "sending", errno, err);
        }
    }
    text_free(&request);
    return code;
}

static enum err_code health_receive(struct health *health, struct err *err)
{
    while (health->n < HEALTH_ANSWER_MAX) {
        const ssize_t n = recv(health->fd, health->answer + health->n,
                               HEALTH_ANSWER_MAX - health->n, MSG_DONTWAIT);
        if (n == 0) {
            break;
        }
        if (n > 0) {
            health->n += (size_t)n;
        } else if (errno == EAGAIN) {
            if (health_wait(health, POLLIN, "the answer", err) != ERR_OK) {
                return err->code;
            }
        } else if (errno != EINTR) {
            return health_failed(health, "the answer", errno, err);
        }
    }
    health->answer[health->n] = '\0';
    return ERR_OK;
}

/* "HTTP/1.1 200 OK" → 200; 0 = that is not HTTP. */
static int health_status(const char *answer)
{
    static const char version[] = "HTTP/1.";
    if (strncmp(answer, version, sizeof version - 1) != 0) {
        return 0;
    }
    const char *const code = answer + sizeof version; /* behind the minor version's digit */
    if (code[-1] == '\0' || code[0] != ' ' || !isdigit((unsigned char)code[1]) ||
        !isdigit((unsigned char)code[2]) || !isdigit((unsigned char)code[3]) ||
        isdigit((unsigned char)code[4])) {
        return 0;
    }
    return (code[1] - '0') * 100 + (code[2] - '0') * 10 + (code[3] - '0');
}

static enum err_code health_judge(const struct health *health, struct err *err)
{
    const struct options *const options = health->options;
    const int status = health_status(health->answer);
    if (status == 0) {
        return err_set(err, ERR_FORMAT, "not healthy: %s port %d does not answer as HTTP does",
                       options->host, options->port);
    }
    const char *const end = strstr(health->answer, "\r\n\r\n");
    const char *const body = end != NULL ? end + 4 : "";
    if (status != 200) {
        int n_body = (int)strlen(body);
        n_body = n_body < HEALTH_SHOWN_MAX ? n_body : HEALTH_SHOWN_MAX;
        n_body -= n_body > 0 && body[n_body - 1] == '\n';
        return err_set(err, ERR_CLOSED, "not healthy: %s port %d answers %s with %d%s%.*s",
                       options->host, options->port, options->path, status, n_body > 0 ? ": " : "",
                       n_body, body);
    }
    printf("healthy: %s port %d answers %s with 200\n", options->host, options->port,
           options->path);
    return ERR_OK;
}

/* The path becomes part of a request's first line. */
static enum err_code health_check_options(const struct options *options, struct err *err)
{
    if (options->port == 0) {
        return err_set(err, ERR_ARGUMENT, "--port: 0 is no server's port: say which");
    }
    bool plain = options->path[0] == '/';
    for (const char *c = options->path; *c != '\0'; c++) {
        plain = plain && *c > 0x20 && *c < 0x7f;
    }
    if (!plain) {
        return err_set(err, ERR_ARGUMENT,
                       "--path: '%.100s' is not a path: it begins with / and has no blanks",
                       options->path);
    }
    return ERR_OK;
}

/* Reads the operand like a URL: HOST[:PORT][/PATH], with or without http://. */
struct target {
    char host[OPTIONS_NAME_MAX];
    int port;
    const char *path;
};

static enum err_code target_from_url(struct target *target, const char *url, struct err *err)
{
    const bool scheme = strncmp(url, "http://", 7) == 0;
    const char *at = scheme ? url + 7 : url;
    const bool bracket = at[0] == '[';
    const char *const host = at + bracket;
    const size_t n = strcspn(host, bracket ? "]" : ":/");
    at = host + n + (bracket && host[n] == ']');
    char *end = NULL;
    const long port = at[0] == ':' ? strtol(at + 1, &end, 10) : scheme ? 80 : target->port;
    at = end != NULL ? end : at;
    if (strncmp(url, "https:", 6) == 0 || n == 0 || n >= sizeof target->host || port < 1 ||
        port > 65535 || (at[0] != '/' && at[0] != '\0')) {
        return err_set(err, ERR_ARGUMENT,
                       "'%.100s' is no address to ask: give it as http://HOST:PORT/PATH (the "
                       "server itself has no TLS)",
                       url);
    }
    (void)snprintf(target->host, sizeof target->host, "%.*s", (int)n, host);
    target->port = (int)port;
    if (at[0] == '/' && at[1] != '\0') {
        target->path = at;
    }
    return ERR_OK;
}

/* The options, overruled by the operand. If the host is a wildcard that a server listens on, this
 * machine is asked. */
static enum err_code resolve_target(struct target *target, const struct options *options,
                                    struct err *err)
{
    target->port = options->port;
    target->path = options->path;
    (void)snprintf(target->host, sizeof target->host, "%s",
                   strcmp(options->host, "0.0.0.0") == 0 ? "127.0.0.1"
                   : strcmp(options->host, "::") == 0    ? "::1"
                                                         : options->host);
    return options->n_operand > 0 ? target_from_url(target, options->operand[0], err) : ERR_OK;
}

int cmd_health(const struct options *given)
{
    struct err err = {0};
    struct target target;
    if (resolve_target(&target, given, &err) != ERR_OK) {
        return cmd_fail(&err);
    }
    struct options options = *given;
    options.host = target.host;
    options.port = target.port;
    options.path = target.path;
    struct health health = {.options = &options,
                            .deadline_us = clock_now_us() + given->timeout_s * INT64_C(1000000),
                            .fd = -1};
    enum err_code code = health_check_options(&options, &err);
    if (code == ERR_OK) {
        code = health_connect(&health, &err);
    }
    if (code == ERR_OK) {
        code = health_send(&health, &err);
    }
    if (code == ERR_OK) {
        code = health_receive(&health, &err);
    }
    if (code == ERR_OK) {
        code = health_judge(&health, &err);
    }
    if (health.fd >= 0) {
        (void)close(health.fd);
    }
    return code == ERR_OK ? 0 : cmd_fail(&err);
}
