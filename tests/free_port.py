"""A port for a server that a test starts and must name first."""

import random
import socket

FIRST, LAST = 10000, 32767  # below those that Linux gives to connections and to whoever binds port 0


def free_port():
    """One that nobody holds, and that nobody else gets by chance before the server has bound it."""
    while True:
        port = random.SystemRandom().randint(FIRST, LAST)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
