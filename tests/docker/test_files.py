"""The files of docker/ against the program and against each other: names, ports, probes, metrics, times.

They are read where nobody compiles them, so a renamed flag, route or metric would break them silently.
"""

import ipaddress
import json
import re
import subprocess
import sys

import pytest

from fleet import DOCKER, PROGRAM, ROOT, Replica, find_program, free_port

sys.path.insert(0, str(ROOT / "tests"))
from overlay_files import Base  # noqa: E402

yaml = pytest.importorskip("yaml", reason="python3-yaml is not installed")

KUBERNETES = {p.name: p for p in (DOCKER / "kubernetes").glob("*.yaml")}
MANIFESTS = sorted(KUBERNETES)


def load(name):
    return yaml.safe_load(KUBERNETES[name].read_text())


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlays")
    import numpy
    base = Base(ROOT / "models" / "demo")
    (folder / "own.safetensors").write_bytes(base.overlay({0: ([3], "F32", numpy.ones((1, 256)))}))
    replica = Replica(tmp_path_factory.mktemp("replica"), 1, ["--drain-delay-s", "0", "--overlay-dir", str(folder)])
    replica.start()
    replica.wait_ready()
    yield replica
    replica.stop()


@pytest.fixture(scope="module")
def metrics(replica):
    """/metrics after it has answered something."""
    import requests
    requests.post(replica.url + "/generate", json={"prompt": "It was", "max_tokens": 2})
    requests.post(replica.url + "/score", json={"text": "It was a dark night."})
    return requests.get(replica.url + "/metrics").text


@pytest.fixture(scope="module")
def options():
    """flag → default, from the program's own help."""
    text = subprocess.run([PROGRAM, "help", "serve"], capture_output=True, text=True).stdout
    rows = (re.match(r"  --(\S+) .*?(?:\[([^][]*)\])?$", line) for line in text.splitlines())
    return {row[1]: row[2] for row in rows if row}


def variables_of(text):
    return {v for v in re.findall(r"PKMSERVE_[A-Z_]+[A-Z]", text)}


def environment_of(container):
    return {e["name"]: e["value"] for e in container["env"]}


# ---- what the program must know -------------------------------------------------------------------

@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "kubernetes/deployment.yaml"])
def test_variables_are_options(name, options):
    known = {"PKMSERVE_" + flag.upper().replace("-", "_") for flag in options}
    proxy = {"PKMSERVE_LISTEN", "PKMSERVE_STATS", "PKMSERVE_REPLICA", "PKMSERVE_BIND"}
    unknown = variables_of((DOCKER / name).read_text()) - known - proxy
    assert not unknown, "%s sets what no option reads: %s" % (name, unknown)


def test_the_image_is_checked_by_a_command_that_exists(replica):
    text = (DOCKER / "Dockerfile").read_text()
    command = json.loads(re.search(r"HEALTHCHECK[^[]*(\[.*\])", text)[1])
    assert command[0] == json.loads(re.search(r"ENTRYPOINT (\[.*\])", text)[1])[0]
    asked = subprocess.run([PROGRAM, *command[1:], "--port", str(replica.port)],
                           capture_output=True, text=True)
    assert asked.returncode == 0 and asked.stdout.startswith("healthy: "), asked


def test_the_image_takes_what_the_build_needs():
    """A folder that the Makefile compiles, but the ignore file keeps out, would fail only there."""
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines()
             if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (DOCKER / "Dockerfile").read_text(), re.M)
    for path in " ".join(copied).split():
        assert path in taken, "%s is copied, but .dockerignore keeps it out" % path
        assert list(ROOT.glob(path)), "%s is copied, but is not there" % path


# ---- Prometheus and Grafana -----------------------------------------------------------------------

def dashboard():
    return json.loads((DOCKER / "grafana" / "pkmserve.json").read_text())


def expressions():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def test_every_metric_of_the_dashboard_exists(metrics):
    have = set(re.findall(r"^([a-z0-9_]+)[{ ]", metrics, re.M))
    n = 0
    for title, expression in expressions():
        bare = re.sub(r'"[^"]*"|\[[^]]*\]|\{\{.*?\}\}', "", expression)
        names = set(re.findall(r"\b(?:pkmserve|process)_[a-z0-9_]+", bare))
        assert names, "panel %r asks for no metric: %s" % (title, expression)
        assert names <= have, "panel %r: no such metric: %s" % (title, names - have)
        n += len(names)
    assert n > 20


def test_every_label_of_the_dashboard_exists(metrics):
    """What is summed by or shown in a legend is a label of that metric, or Prometheus' own."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            wanted |= {b for group in re.findall(r"by \(([a-z, ]+)\)", target["expr"])
                       for b in group.split(", ")}
            name = re.search(r"(?:pkmserve|process)_[a-z0-9_]+", target["expr"])[0]
            line = re.search(r"^%s(\{.*\})? " % name, metrics, re.M)
            have = set(re.findall(r'(\w+)="', line[1] or "")) | {"instance", "job"}
            assert wanted <= have, "panel %r: %s has no label %s" % (panel["title"], name,
                                                                    wanted - have)


def data_sources(value):
    """Every data source that some part of the dashboard names."""
    if isinstance(value, dict):
        if "uid" in value and value.get("type") == "prometheus":
            yield value["uid"]
        value = list(value.values())
    for each in value if isinstance(value, list) else []:
        yield from data_sources(each)


def test_the_dashboard_can_be_imported_into_any_grafana():
    """Each panel reads the data source that the viewer chooses, not one of a fixed name."""
    named = set(data_sources(dashboard()))
    assert named == {"${datasource}"}
    first = dashboard()["templating"]["list"][0]
    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource",
                                                               "prometheus")


def promtool(*arguments, stdin=None):
    program = find_program("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    return subprocess.run([program, *map(str, arguments)], input=stdin, capture_output=True,
                          text=True)


def test_promtool_takes_configuration_expressions_and_metrics(tmp_path, metrics):
    done = promtool("check", "config", DOCKER / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("check", "metrics", stdin=metrics)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    rules = [{"record": "panel:expression%d" % i, "expr": e.replace("$__rate_interval", "1m")}
             for i, (_, e) in enumerate(expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- compose, the balancers -----------------------------------------------------------------------

def test_compose_names_what_is_there():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    replicas = {name for name in services if name.startswith("pkmserve-")}
    assert len(replicas) == 2
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DOCKER / source).exists(), volume
        assert set(service.get("depends_on", [])) <= set(services)
    haproxy = services["haproxy"]["environment"]
    assert set(haproxy) | {"PKMSERVE_BIND"} == variables_in_use("haproxy.cfg")
    addresses = {v for k, v in haproxy.items() if "REPLICA" in k}
    assert addresses == {name + ":8000" for name in replicas}
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    targets = {t for job in config["scrape_configs"] for s in job["static_configs"]
               for t in s["targets"]}
    assert targets == addresses | {"haproxy:" + haproxy["PKMSERVE_STATS"]}
    for name in replicas:
        service = services[name]
        times = service["environment"]
        grace = int(service["stop_grace_period"].rstrip("s"))
        assert grace > int(times["PKMSERVE_DRAIN_DELAY_S"]) + int(
            times["PKMSERVE_SHUTDOWN_TIMEOUT_S"]) + 2
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]


def test_compose_trusts_haproxy_and_nobody_else():
    """Not its whole network: whoever asks from this machine has the gateway's address in it, and could claim to be anyone."""
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    address = ipaddress.ip_address(compose["services"]["haproxy"]["networks"]["default"]["ipv4_address"])
    network, = compose["networks"]["default"]["ipam"]["config"]
    assert address in ipaddress.ip_network(network["subnet"])
    assert address not in ipaddress.ip_network(network["ip_range"])  # of the other containers
    for name in ("pkmserve-1", "pkmserve-2"):
        assert compose["services"][name]["environment"]["PKMSERVE_TRUSTED_PROXIES"] == str(address)


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes/deployment.yaml"])
def test_no_client_may_fill_the_queue(name, options):
    limit = int(re.search(r"PKMSERVE_MAX_CLIENT_REQUESTS\W+(?:value: \")?(\d+)", (DOCKER / name).read_text())[1])
    assert int(options["max-seqs"]) <= limit <= int(options["max-queue"]) / 2


def test_compose_publishes_on_this_machine_alone():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    ports = [p for service in services.values() for p in service.get("ports", [])]
    assert len(ports) >= 4
    for port in ports:
        address = port.rsplit(":", 2)[0]
        assert address in ("127.0.0.1", "${PUBLISH:-127.0.0.1}"), "published for everyone: %s" % port


def test_haproxy_can_be_kept_to_one_address():
    binds = re.findall(r"^ *bind (.*)$", (DOCKER / "haproxy.cfg").read_text(), re.M)
    assert len(binds) == 2 and all(b.startswith('"${PKMSERVE_BIND}:') for b in binds), binds


def variables_in_use(name):
    return set(re.findall(r"\$\{([A-Z_0-9]+)", (DOCKER / name).read_text()))


@pytest.mark.parametrize("balancer", ["haproxy", "nginx"])
def test_balancers_are_patient_enough(balancer, options):
    """A whole answer is silent until it is there: the balancer's patience ends after the server's."""
    text = (DOCKER / {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}[balancer]).read_text()
    patience = int(re.search(r"(?:timeout server|proxy_read_timeout) +(\d+)s", text)[1])
    assert patience * 1000 > int(options["timeout-ms"])
    if balancer == "nginx":
        size = int(re.search(r"client_max_body_size (\d+)m", text)[1])
        assert size << 20 == int(options["max-body-bytes"])
        away = int(re.search(r"fail_timeout=(\d+)s", text)[1])
        assert 1 < away < int(options["drain-delay-s"])


def test_haproxy_takes_its_configuration():
    program = find_program("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    environment = {"PKMSERVE_LISTEN": str(free_port()), "PKMSERVE_STATS": str(free_port()),
                   "PKMSERVE_REPLICA_1": "127.0.0.1:1", "PKMSERVE_REPLICA_2": "127.0.0.1:2"}
    done = subprocess.run([program, "-c", "-f", DOCKER / "haproxy.cfg"], env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr


# ---- Kubernetes -----------------------------------------------------------------------------------

def test_the_folder_can_be_applied_whole():
    """`kubectl apply -f docker/kubernetes/` refuses a folder in which any file is no manifest."""
    files = sorted(p.name for p in (DOCKER / "kubernetes").iterdir())
    assert files == MANIFESTS and len(files) >= 4
    for name in files:
        for key in ("apiVersion", "kind", "metadata"):
            assert key in load(name), "%s has no %s" % (name, key)


def check_model(client, kind, value, where):
    """value against a class that the Kubernetes project generates from its API: no field that it does
    not have, none missing that it demands, each of its type."""
    kind = re.sub(r"^Dict\[(.*)\]$", r"dict(\1)", kind).replace("List[", "list[")  # newer clients
    found = re.match(r"(list|dict\(str, )\[?(.*?)[\])]$", kind)
    if kind.startswith("list["):
        assert isinstance(value, list), "%s is not a list" % where
        for i, one in enumerate(value):
            check_model(client, found[2], one, "%s[%d]" % (where, i))
    elif kind.startswith("dict("):
        assert isinstance(value, dict), "%s is not a map" % where
        for key, one in value.items():
            check_model(client, found[2], one, "%s.%s" % (where, key))
    elif hasattr(client, kind):
        model = getattr(client, kind)
        fields = {json_name: name for name, json_name in model.attribute_map.items()}
        assert isinstance(value, dict), "%s is not an object" % where
        assert set(value) <= set(fields), "%s: unknown: %s" % (where, set(value) - set(fields))
        built = {}
        for key, one in value.items():
            check_model(client, model.openapi_types[fields[key]], one, where + "." + key)
            built[fields[key]] = one
        model(**built)  # raises on what is missing
    else:
        types = {"str": str, "int": int, "bool": bool, "object": (str, int, dict)}
        assert type(value) is not bool or kind in ("bool", "object"), where
        assert isinstance(value, types[kind]), "%s is not %s: %r" % (where, kind, value)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_the_schema_of_kubernetes(name):
    client = pytest.importorskip("kubernetes.client", reason="python3-kubernetes is not installed")
    manifest = load(name)
    version, kind = manifest["apiVersion"].split("/")[-1], manifest["kind"]
    model = version.capitalize() + kind
    if not hasattr(client, model) and version == "v2":
        model = "V2beta2" + kind  # of the same fields; Debian's client is older than v2
    check_model(client, model, manifest, name)


def test_manifests_belong_together():
    deployment, service = load("deployment.yaml"), load("service.yaml")
    spec = deployment["spec"]
    pod = spec["template"]["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    assert load("disruption.yaml")["spec"]["selector"]["matchLabels"].items() <= labels
    assert spec["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["selector"].items() <= labels
    ports = {p["name"]: p["containerPort"] for p in pod["containers"][0]["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in ports
    assert str(ports["http"]) == spec["template"]["metadata"]["annotations"]["prometheus.io/port"]
    scaler = load("autoscaling.yaml")["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": deployment["apiVersion"],
                                        "kind": deployment["kind"],
                                        "name": deployment["metadata"]["name"]}
    assert scaler["minReplicas"] <= spec["replicas"] <= scaler["maxReplicas"]


def test_the_scaler_and_its_adapter_use_a_metric_of_ours(metrics):
    wanted = load("autoscaling.yaml")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    values = yaml.safe_load((DOCKER / "prometheus-adapter-values.yaml").read_text())
    rule = values["rules"]["custom"][0]
    assert rule["name"]["as"] == wanted and rule["seriesQuery"].startswith(wanted + "{")
    assert "\n%s " % wanted in metrics


def test_probes_ask_routes_that_answer(replica, options):
    import requests
    pod = load("deployment.yaml")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    ports = {p["name"]: str(p["containerPort"]) for p in container["ports"]}
    wanted = {"startupProbe": "/health/ready", "readinessProbe": "/health/ready",
              "livenessProbe": "/health/live"}
    for probe, path in wanted.items():
        get = container[probe]["httpGet"]
        assert get["path"] == path and ports[get["port"]] == options["port"]
        assert requests.get(replica.url + path).status_code == 200


def test_there_is_time_to_drain():
    pod = load("deployment.yaml")["spec"]["template"]["spec"]
    times = environment_of(pod["containers"][0])
    readiness = pod["containers"][0]["readinessProbe"]
    delay, rest = (int(times["PKMSERVE_" + k]) for k in ("DRAIN_DELAY_S", "SHUTDOWN_TIMEOUT_S"))
    assert pod["terminationGracePeriodSeconds"] > delay + rest + 2
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= delay


@pytest.mark.parametrize("name", ["kubernetes/deployment.yaml", "examples/kserve.yaml"])
def test_no_client_takes_the_pods_memory(name, replica, options):
    """The sum of docker/OPERATING.md, with the shipped model: the kernel ends a process that exceeds the limit."""
    import requests
    spec = yaml.safe_load((DOCKER / name).read_text())["spec"]
    container = (spec["predictor"] if "predictor" in spec else spec["template"]["spec"])["containers"][0]
    variables = environment_of(container)

    def bound(option):
        return int(variables.get("PKMSERVE_" + option.upper().replace("-", "_"), options[option]))

    parts = [115e6, requests.get(replica.url + "/info").json()["memory"]["kv_bytes"],
             bound("memory-trace-bytes"), bound("max-request-bytes"), bound("max-buffered-bytes"),
             231 * (bound("max-body-bytes") + (bound("body-threads") - 2) * min(bound("max-body-bytes"), 1 << 20)),
             231 * 64 * 1024,
             231 * 4 * 4096, bound("max-connections") * 32 * 1024]
    limit, = re.findall(r"^(\d+)Gi$", container["resources"]["limits"]["memory"])
    assert sum(parts) < int(limit) << 30, parts
    text = (DOCKER / "OPERATING.md").read_text()
    for part in [*parts, sum(parts)]:
        assert "| {:,.0f} |\n".format(part / 1e6) in text, part


def test_the_pod_may_do_nothing_but_serve():
    pod = load("deployment.yaml")["spec"]["template"]["spec"]
    user = re.search(r"USER (\d+):(\d+)", (DOCKER / "Dockerfile").read_text())
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == int(user[1])
    assert pod["securityContext"]["runAsGroup"] == int(user[2])
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]}}
