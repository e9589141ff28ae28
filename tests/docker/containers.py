"""Images and containers for check.py: podman as root, without a registry and without systemd.

What it takes on such machines: runc in place of crun, limits that root without CAP_SYS_RESOURCE may
set, images in docker's format for their health check, and addresses that a restart does not change.
"""

import subprocess
import tempfile
import time
from pathlib import Path

from fleet import DOCKER, ROOT, Balancer, Replica, eventually, nginx_config, status_of

BASE = "docker.io/library/debian:bookworm-slim"
IMAGE = "localhost/pkmserve:cpu"
BALANCERS = "localhost/pkmserve-balancers:check"
NETWORK, SUBNET = "pkmserve-check", "10.89.77"
HARDENED = ["--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
CONF = """[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
"""


def use_configuration(environment):
    """Makes podman and buildah of this process and its children read CONF."""
    file = tempfile.NamedTemporaryFile("w", prefix="containers-", suffix=".conf", delete=False)
    file.write(CONF)
    file.close()
    environment["CONTAINERS_CONF"] = file.name


def run(*command, check=True, **keywords):
    """Runs a command quietly; its output is shown if it fails."""
    done = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keywords)
    if check and done.returncode != 0:
        raise SystemExit("%s: exit %d\n%s" % (" ".join(map(str, command)), done.returncode,
                                              (done.stdout + done.stderr)[-4000:]))
    return done


def podman(*arguments, **keywords):
    return run("podman", *arguments, **keywords)


# ---- images ---------------------------------------------------------------------------------------

def make_base():
    """The base image, made from Debian's packages if it is not there and cannot be pulled."""
    if podman("image", "exists", BASE, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        run("mmdebstrap", "--variant=minbase", "bookworm", folder + "/base.tar")
        podman("import", folder + "/base.tar", BASE)


def build(dockerfile, tag, *arguments):
    run("buildah", "--runtime", "runc", "bud", "--layers", "--format", "docker", "--pull-never",
        "--network", "host", "-f", dockerfile, "-t", tag, *arguments, ROOT)


def build_all():
    build(DOCKER / "Dockerfile", IMAGE, "--target", "cpu")
    build(Path(__file__).parent / "Dockerfile.balancers", BALANCERS)


# ---- a fleet of them ------------------------------------------------------------------------------

def make_network():
    podman("network", "rm", "-f", NETWORK, check=False)
    podman("network", "create", "--subnet", SUBNET + ".0/24", NETWORK)


def address_of(number):
    """A fixed address: a new one at each start would leave the neighbours' tables stale."""
    return ["--network", NETWORK, "--ip", "%s.%d" % (SUBNET, number),
            "--mac-address", "02:00:0a:59:4d:%02x" % number]


def pin_bridge():
    """A bridge has the lowest address of its ports, so a container that ends would change it, and the others
    would go on sending to the old one: the clients of this test, which are on the bridge's side, would miss
    answers. Once set, it stays."""
    bridge = podman("network", "inspect", NETWORK, "--format", "{{.NetworkInterface}}").stdout.strip()
    run("ip", "link", "set", bridge, "address", "02:00:0a:59:4d:01")


def inspect(name, what):
    return podman("inspect", name, "--format", "{{.State.%s}}" % what).stdout.strip()


class ContainerReplica(Replica):
    """One container over all its lives: stopped and started, never made anew."""

    def __init__(self, folder, number, flags):
        super().__init__(folder, number, flags)
        self.name = "pkmserve-check-%d" % number
        self.number, self.made, self.unplugged = number, False, False
        self.address = "%s.%d:8000" % (SUBNET, 10 + number)
        self.url = "http://" + self.address

    def start(self):
        if self.made:
            if self.unplugged:
                podman("network", "connect", *address_of(10 + self.number)[2:], NETWORK, self.name)
                self.unplugged = False
            podman("start", self.name)
            return
        self.close()
        podman("run", "-d", "--name", self.name, *HARDENED, *address_of(10 + self.number), IMAGE,
               "serve", *self.flags)
        self.made = True
        pin_bridge()

    def wait_ready(self):
        def ready():
            assert inspect(self.name, "Running") == "true", "died:\n" + self.read_log()[-3000:]
            return status_of(self.url + "/health/ready") == 200
        eventually(ready, "ready")

    def stop(self):
        podman("stop", "-t", "60", self.name)
        status = inspect(self.name, "ExitCode")
        assert status == "0", "expected exit 0 after SIGTERM, got %s" % status

    def kill(self):
        podman("kill", "-s", "KILL", self.name)
        eventually(lambda: inspect(self.name, "Running") == "false", "dead")

    def vanish(self):
        """Dies as a machine does that loses its power: nobody is told."""
        podman("network", "disconnect", NETWORK, self.name)
        self.unplugged = True
        self.kill()

    def read_log(self):
        return podman("logs", self.name).stderr

    def close(self):
        podman("rm", "-f", self.name, check=False)


class ContainerBalancer(Balancer):
    """haproxy or nginx in a container, with the files of docker/."""

    def __init__(self, folder, name, replicas):
        super().__init__(folder, name, replicas)
        self.container = "pkmserve-check-balancer"
        self.url = "http://%s.10:8080" % SUBNET

    def start(self):
        self.close()
        first, second = (replica.address for replica in self.replicas)
        if self.name == "haproxy":
            config = DOCKER / "haproxy.cfg"
            command = ["haproxy", "-db", "-f", "/config"]
        else:
            config = nginx_config(self.folder, {"pkmserve-1:8000": first,
                                                "pkmserve-2:8000": second})
            command = ["nginx", "-c", "/config", "-g", "daemon off;"]
        # What docker/nginx.conf asks for.
        patience = ("keepalive_time=10", "keepalive_intvl=5", "keepalive_probes=3", "retries2=6")
        sysctls = ["--sysctl=net.ipv4.tcp_" + setting for setting in patience]
        podman("run", "-d", "--name", self.container, *address_of(10), "--tmpfs", "/tmp", *sysctls,
               "-v", "%s:/config:ro" % config, "-e", "PKMSERVE_LISTEN=8080",
               "-e", "PKMSERVE_STATS=8404", "-e", "PKMSERVE_REPLICA_1=" + first,
               "-e", "PKMSERVE_REPLICA_2=" + second, BALANCERS, *command)

    def wait_ready(self):
        def ready():
            assert inspect(self.container, "Running") == "true", (
                podman("logs", self.container).stderr[-3000:])
            return status_of(self.url + "/health/ready") == 200
        eventually(ready, "the balancer answers")

    def close(self):
        podman("rm", "-f", "-t", "1", self.container, check=False)


def seconds_until_ready(replica):
    begin = time.monotonic()
    replica.start()
    replica.wait_ready()
    return time.monotonic() - begin
