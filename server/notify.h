/* Reports the state of the server to the service manager that started it, in systemd's protocol: a
 * line in a datagram to the socket that NOTIFY_SOCKET names (sd_notify(3) describes it). */
#ifndef SERVER_NOTIFY_H
#define SERVER_NOTIFY_H

/* state: "READY=1", "STOPPING=1". Does nothing if NOTIFY_SOCKET is not set; a failure is logged. */
void notify_manager(const char *state);

#endif
