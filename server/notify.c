/* A datagram to the service manager: see notify.h. */
#include "server/notify.h"

#include "engine/log.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void notify_manager(const char *state)
{
    const char *const path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (path == NULL || path[0] == '\0') {
        return;
    }
    const size_t bytes = strlen(path);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool sent = false;
    if (fd >= 0 && bytes < sizeof address.sun_path) {
        memcpy(address.sun_path, path, bytes);
        if (path[0] == '@') { /* a name that is no file begins with a zero byte */
            address.sun_path[0] = '\0';
        }
        const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes);
        sent = sendto(fd, state, strlen(state), MSG_NOSIGNAL, (const struct sockaddr *)&address,
                      size) >= 0;
    }
    if (!sent) {
        const bool fits = bytes < sizeof address.sun_path;
        char socket[256];
        char why[128];
        log_event(LEVEL_WARN, "notify_failed", "socket=%s why=%s",
                  log_quote(socket, sizeof socket, path),
                  log_quote(why, sizeof why, fits ? strerror(errno) : "its name is too long"));
    }
    if (fd >= 0) {
        (void)close(fd);
    }
}
