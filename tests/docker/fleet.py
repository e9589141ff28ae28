"""Two replicas and a balancer, as plain processes on 127.0.0.1.

The balancers run the configuration files that docker/ ships; only addresses are filled in.
containers.py has the same with containers.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from free_port import free_port  # noqa: E402

PROGRAM = ROOT / os.environ.get("PKMSERVE", "build/pkmserve")
DOCKER = ROOT / "docker"
PATIENCE_S = 60


def find_program(name):
    """haproxy or nginx, which Debian keeps in sbin; None if it is not installed."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def status_of(url):
    """The status of a GET; 0 if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as e:
        return e.code
    except OSError:
        return 0


def eventually(check, what):
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end, "never happened: " + what
        time.sleep(0.02)


class Replica:
    """A pkmserve with a port that it keeps over restarts, and one log for all its lives."""

    def __init__(self, folder, number, flags):
        self.port = free_port()
        self.address = "127.0.0.1:%d" % self.port
        self.url = "http://" + self.address
        self.log = Path(folder) / ("replica%d.log" % number)
        self.flags = [str(f) for f in flags]
        self.process = None

    def start(self):
        command = [str(PROGRAM), "serve", "--host", "127.0.0.1", "--port", str(self.port)]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(command + self.flags, stdout=log, stderr=log)

    def wait_ready(self):
        def ready():
            assert self.process.poll() is None, "died:\n" + self.read_log()[-3000:]
            return status_of(self.url + "/health/ready") == 200
        eventually(ready, "ready")

    def stop(self):
        """Ends it as a supervisor does; it must drain and exit 0."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(PATIENCE_S)
        assert status == 0, "expected exit 0 after SIGTERM, got %d" % status

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def read_log(self):
        return self.log.read_text()

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.kill()


def nginx_config(folder, changes):
    """docker/nginx.conf with other addresses: nginx reads no environment."""
    text = (DOCKER / "nginx.conf").read_text()
    for old, new in changes.items():
        assert old in text, "docker/nginx.conf no longer has %r" % old
        text = text.replace(old, new)
    path = Path(folder) / "nginx.conf"
    path.write_text(text)
    return path


class Balancer:
    """haproxy or nginx before the replicas. Its log is for those who search for a lost request."""

    def __init__(self, folder, name, replicas):
        self.folder, self.name, self.replicas = Path(folder), name, replicas
        self.port, self.stats_port = free_port(), free_port()
        self.url = "http://127.0.0.1:%d" % self.port
        self.log = self.folder / (name + ".log")
        self.process = None

    def command(self):
        program = find_program(self.name)
        if self.name == "haproxy":
            return [program, "-db", "-f", str(DOCKER / "haproxy.cfg")]
        path = nginx_config(self.folder, {
            "listen 8080;": "listen 127.0.0.1:%d;" % self.port,
            "pkmserve-1:8000": self.replicas[0].address,
            "pkmserve-2:8000": self.replicas[1].address,
            "/tmp/nginx": str(self.folder / "nginx")})
        return [program, "-c", str(path), "-g", "daemon off;"]

    def start(self):
        environment = {**os.environ, "PKMSERVE_LISTEN": str(self.port),
                       "PKMSERVE_STATS": str(self.stats_port),
                       "PKMSERVE_REPLICA_1": self.replicas[0].address,
                       "PKMSERVE_REPLICA_2": self.replicas[1].address}
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment)

    def wait_ready(self):
        def ready():
            assert self.process.poll() is None, "died:\n" + self.log.read_text()[-3000:]
            return status_of(self.url + "/health/ready") == 200
        eventually(ready, "the balancer answers")

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)


class Fleet:
    """Use it in a with statement: both replicas and the balancer are ready inside."""

    def __init__(self, balancer, flags=(), replica_class=Replica, balancer_class=Balancer):
        self.folder = tempfile.mkdtemp(prefix="pkmserve-fleet-")
        self.replicas = [replica_class(self.folder, number, flags) for number in (1, 2)]
        self.balancer = balancer_class(self.folder, balancer, self.replicas)
        self.url = self.balancer.url

    def __enter__(self):
        try:
            for part in self.replicas:
                part.start()
            for part in self.replicas:
                part.wait_ready()
            self.balancer.start()
            self.balancer.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind, value, trace):
        self.balancer.close()
        for part in self.replicas:
            part.close()
        if kind is None:
            shutil.rmtree(self.folder)
