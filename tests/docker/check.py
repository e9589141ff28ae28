"""make check-containers: builds the image and holds it, and two of it behind each balancer, to what
docker/OPERATING.md promises. Prints its figures; exit status 0 if all holds.

    python3 tests/docker/check.py [--requests 10000] [--balancers haproxy,nginx] [--processes]

Needs root, podman, buildah, runc, netavark, aardvark-dns, iptables, iproute2 and, where no registry can be reached,
mmdebstrap.
Without them, or with --processes, the same is done with plain processes, and says so.
"""

import argparse
import gzip
import http.client
import io
import json
import os
import subprocess
import sys
import tarfile
import time

import containers
from containers import ContainerBalancer, ContainerReplica, inspect, podman
from fleet import PROGRAM, Fleet, eventually, find_program
from rolling import run_both

SIZE_MAX = 50_000_000


def missing():
    names = ["podman", "buildah", "runc", "iptables", "ip", "mmdebstrap"]
    lacking = [name for name in names if find_program(name) is None]
    if os.geteuid() != 0:
        lacking.append("root")
    return lacking


class Counter(io.RawIOBase):
    """A file that only knows how much was written."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def writable(self):
        return True

    def write(self, data):
        self.n += len(data)
        return len(data)


def check_image():
    """Its size, and that nothing in it could be a shell."""
    saving = subprocess.Popen(["podman", "save", containers.IMAGE], stdout=subprocess.PIPE)
    archive = saving.stdout.read()
    assert saving.wait() == 0
    packed = Counter()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as out:
        out.write(archive)
    print("image: %.1f MB compressed (podman save | gzip -9), limit %.0f" % (packed.n / 1e6,
                                                                            SIZE_MAX / 1e6))
    assert packed.n <= SIZE_MAX
    programs = set()
    with tarfile.open(fileobj=io.BytesIO(archive)) as outer:
        for member in outer.getmembers():
            if not member.name.endswith(".tar") or not member.isfile():
                continue
            with tarfile.open(fileobj=outer.extractfile(member)) as layer:
                programs |= {m.name for m in layer.getmembers()
                             if m.isfile() and m.mode & 0o111 and ".so" not in m.name}
                assert not [m for m in layer.getmembers() if m.mode & 0o6000], "a setuid file"
    assert programs == {"usr/local/bin/pkmserve"}, programs
    print("image: the only program is /usr/local/bin/pkmserve")


def post(replica, path, body):
    host, port = replica.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", path, json.dumps(body))
    return connection.getresponse()


def status_line(pid, name):
    for line in open("/proc/%s/status" % pid):
        if line.startswith(name + ":"):
            return line.split()[1:]
    raise KeyError(name)


def check_container():
    """One container, without arguments: no rights, healthy, serves, drains."""
    replica = ContainerReplica("/tmp", 1, [])
    replica.flags = []
    try:
        seconds = containers.seconds_until_ready(replica)
        print("container: ready %.2f s after podman run" % seconds)
        pid = inspect(replica.name, "Pid")
        assert set(status_line(pid, "Uid")) == {"65532"}, status_line(pid, "Uid")
        for kind in ("CapEff", "CapPrm", "CapBnd", "CapAmb"):
            assert int(status_line(pid, kind)[0], 16) == 0, kind
        assert status_line(pid, "NoNewPrivs") == ["1"]
        writable = [line.split()[1] for line in open("/proc/%s/mounts" % pid)
                    if line.split()[1] == "/" and "rw" in line.split()[3].split(",")]
        assert not writable, "the root is writable"
        asked = podman("healthcheck", "run", replica.name, check=False)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        answer = post(replica, "/generate", {"prompt": "It was", "max_tokens": 4})
        assert answer.status == 200 and json.loads(answer.read())["model"] == "demo"
        print("container: uid 65532, no capabilities, read-only root, healthy, generates")
        check_drain(replica)
    finally:
        replica.close()


def check_drain(replica):
    """SIGTERM: not healthy at once, what runs is finished, exit 0."""
    # Long enough to outlast the delay in which new work is still taken.
    answer = post(replica, "/generate", {"prompt": "It was", "max_tokens": 500, "n": 8,
                                         "ignore_eos": True, "stream": True})
    begin = time.monotonic()
    podman("kill", "-s", "TERM", replica.name)  # `stop` would keep the health check from running
    eventually(lambda: podman("healthcheck", "run", replica.name, check=False).returncode == 1,
               "not healthy while it drains")
    assert answer.status == 200 and answer.read().endswith(b"data: [DONE]\n\n")
    eventually(lambda: inspect(replica.name, "Running") == "false", "it ends")
    assert inspect(replica.name, "ExitCode") == "0"
    print("container: SIGTERM drains and exits 0, %.1f s" % (time.monotonic() - begin))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--balancers", default="haproxy,nginx")
    parser.add_argument("--processes", action="store_true")
    arguments = parser.parse_args()
    lacking = missing()
    in_containers = not arguments.processes and not lacking
    if in_containers:
        containers.use_configuration(os.environ)
        containers.make_base()
        begin = time.monotonic()
        containers.build_all()
        print("image: built in %.0f s" % (time.monotonic() - begin), flush=True)
        containers.make_network()
        check_image()
        check_container()
        classes = {"replica_class": ContainerReplica, "balancer_class": ContainerBalancer}
    else:
        print("no containers%s: the same with plain processes of %s" % (
            " (missing: %s)" % ", ".join(lacking) if lacking else "", PROGRAM))
        classes = {}
    for balancer in arguments.balancers.split(","):
        if not in_containers and find_program(balancer) is None:
            sys.exit("check: %s is not installed" % balancer)
        with Fleet(balancer, **classes) as fleet:
            run_both(fleet, arguments.requests,
                     "%s, %s" % ("containers" if in_containers else "processes", balancer))


if __name__ == "__main__":
    main()
