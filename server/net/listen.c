/* The listening socket: see listen.h. */
#include "server/net/listen.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LISTEN_BACKLOG = 1024 };

/* A listening socket of our own: the error names what is wrong, and port 0 can be asked back. */
enum err_code listen_open(int *listen_fd, int *bound_port, const char *host, int port,
                          struct err *err)
{
    *listen_fd = -1;
    char service[16];
    (void)snprintf(service, sizeof service, "%d", port);
    const struct addrinfo hints = {.ai_family = AF_UNSPEC,
                                   .ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    const int why = getaddrinfo(host, service, &hints, &list);
    if (why != 0) {
        return err_set(err, ERR_IO, "host %s: %s", host, gai_strerror(why));
    }
    int error = EADDRNOTAVAIL;
    for (const struct addrinfo *a = list; a != NULL && *listen_fd < 0; a = a->ai_next) {
        const int fd =
            socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
        const int on = 1;
        if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, LISTEN_BACKLOG) == 0) {
            *listen_fd = fd;
        } else {
            error = errno;
            if (fd >= 0) {
                (void)close(fd);
            }
        }
    }
    freeaddrinfo(list);
    if (*listen_fd < 0) {
        return err_set(err, ERR_IO, "cannot listen on %s port %d: %s", host, port, strerror(error));
    }
    struct sockaddr_storage address;
    socklen_t bytes = sizeof address;
    char bound[16] = "";
    CHECK(getsockname(*listen_fd, (struct sockaddr *)&address, &bytes) == 0);
    CHECK(getnameinfo((struct sockaddr *)&address, bytes, NULL, 0, bound, sizeof bound,
                      NI_NUMERICSERV) == 0);
    *bound_port = atoi(bound);
    return ERR_OK;
}

bool listen_has_descriptor(void)
{
    const int probe = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (probe < 0) {
        return errno != EMFILE && errno != ENFILE;
    }
    (void)close(probe);
    return true;
}

/* Each connection is a descriptor; the rest of the process needs a few. */
enum err_code listen_reserve_files(int max_connections, int n_more, struct err *err)
{
    const rlim_t need = (rlim_t)max_connections + (rlim_t)n_more + 128;
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (limit.rlim_cur >= need) {
        return ERR_OK;
    }
    limit.rlim_cur = limit.rlim_max == RLIM_INFINITY || limit.rlim_max >= need ? need : 0;
    if (limit.rlim_cur == 0 || setrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return err_set(
            err, ERR_IO,
            "--max-connections %d needs %llu file descriptors, but the process may open %llu: "
            "lower it or raise ulimit -n",
            max_connections, (unsigned long long)need, (unsigned long long)limit.rlim_max);
    }
    return ERR_OK;
}
