/* Tells the service manager that started the server how it is, in systemd's protocol: a line in a datagram
 * to the socket that NOTIFY_SOCKET names (sd_notify(3) describes it). */
#ifndef SERVER_NOTIFY_H
#define SERVER_NOTIFY_H

/* state: "READY=1", "STOPPING=1". Does nothing where nobody asked; a failure is a line of the log. */
void notify_manager(const char *state);

#endif
