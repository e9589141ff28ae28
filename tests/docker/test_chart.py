"""The Helm chart, the Indexed Job and the examples for KServe and the Gateway: against the program, against the manifests
of docker/kubernetes, and against the schemas that are to be had (make check-chart)."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess

import pytest
import requests

from fleet import DOCKER, PROGRAM, ROOT, Replica, eventually, free_port, status_of
from test_files import check_model, environment_of, promtool, variables_of
from test_files import metrics, options, replica  # noqa: F401  fixtures

yaml = pytest.importorskip("yaml", reason="python3-yaml is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="python3-jsonschema is not installed")
from chart import Refused, render  # noqa: E402

CHART = DOCKER / "helm" / "pkmserve"
FULL = {
    "model": {"volume": {"emptyDir": {}}, "subPath": "a", "servedName": "x",
              "init": [{"name": "fetch", "image": "m:1", "command": ["cp", "-r", "/weights/.", "/model"]}]},
    "options": {"dtype": "int8", "max-seqs": "64"}, "keys": {"secret": "keys"},
    "gpu": {"enabled": True, "runtimeClassName": "nvidia"}, "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "alerts": {"enabled": True},
    "nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "imagePullSecrets": [{"name": "registry"}], "podAnnotations": {"a": "b"},
}

# What somebody else's values may well hold: nulls, and keys that the chart has values of its own for.
OWN = {
    "model": {"volume": {"emptyDir": {}}, "init": [
        {"name": "plain", "image": "m:1"},
        {"name": "beside", "image": "m:1", "volumeMounts": [{"name": "keys", "mountPath": "/keys"}],
         "securityContext": {"readOnlyRootFilesystem": False, "runAsUser": 1000}},
        {"name": "instead", "image": "m:1", "volumeMounts": [{"name": "model", "mountPath": "/model", "subPath": "a"}]}]},
    "podAnnotations": {"prometheus.io/scrape": "false"}, "keys": {"secret": "keys"},
    "gpu": {"enabled": True}, "resources": {"limits": {"nvidia.com/gpu": "2"}},
}
NO_LIMITS = {"gpu": {"enabled": True}, "resources": {"limits": None}}
NO_RESOURCES = {"resources": None, "podAnnotations": None}
ADMIN = {"adminPort": 9000, "serviceMonitor": {"enabled": True}}
SETS = {"own": {}, "full": FULL, "admin port": ADMIN, "others": OWN, "no limits": NO_LIMITS, "no resources": NO_RESOURCES}


def by_kind(values=None, **keywords):
    manifests, _ = render(CHART, values, **keywords)
    kinds = {m["kind"]: m for m in manifests}
    assert len(kinds) == len(manifests)
    return kinds


def pod_of(deployment):
    return deployment["spec"]["template"]["spec"]


def others():
    """Every other manifest: the Job, the examples."""
    for path in [DOCKER / "batch" / "score-job.yaml", *sorted((DOCKER / "examples").glob("*.yaml"))]:
        for manifest in yaml.safe_load_all(path.read_text()):
            yield manifest


def manifests():
    return [manifest for values in SETS.values() for manifest in by_kind(values).values()] + [*others()]


def test_the_chart_with_its_own_values_is_what_the_manifests_are():
    """Two ways to the same pods: who changes one changes the other."""
    kinds = by_kind()
    assert set(kinds) == {"Deployment", "Service", "PodDisruptionBudget"}
    mine = pod_of(kinds["Deployment"])
    theirs = pod_of(yaml.safe_load((DOCKER / "kubernetes" / "deployment.yaml").read_text()))
    assert mine["securityContext"].pop("fsGroup") == 65532  # for volumes that the manifests have none of
    constraint, = mine["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"].pop("app.kubernetes.io/instance") == "pkmserve"
    assert mine["containers"][0].pop("imagePullPolicy") == "IfNotPresent"
    for pod in (mine, theirs):
        pod["containers"][0]["env"].sort(key=lambda variable: variable["name"])
    assert mine == theirs
    scaler = by_kind(FULL)["HorizontalPodAutoscaler"]["spec"]
    assert scaler == yaml.safe_load((DOCKER / "kubernetes" / "autoscaling.yaml").read_text())["spec"]


def test_names_and_labels_belong_together():
    kinds = by_kind(FULL, release="other", namespace="models")
    assert {m["metadata"]["name"] for m in kinds.values()} == {"other"}
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    for selector in (kinds["Deployment"]["spec"]["selector"]["matchLabels"],
                     kinds["Service"]["spec"]["selector"],
                     kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels
    assert kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "other"
    monitor = kinds["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= kinds["Service"]["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == kinds["Service"]["spec"]["ports"][0]["name"]
    for rule in kinds["PrometheusRule"]["spec"]["groups"][0]["rules"]:
        assert 'namespace="models",service="other"' in rule["expr"]
    pool = next(m for m in others() if m["kind"] == "InferencePool")["spec"]
    labels = by_kind()["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert pool["selector"]["matchLabels"].items() <= labels


def test_values_reach_the_pod():
    deployment = by_kind(FULL)["Deployment"]
    pod, container = pod_of(deployment), pod_of(deployment)["containers"][0]
    variables = environment_of(container)
    assert variables["PKMSERVE_DTYPE"] == "int8" and variables["PKMSERVE_MAX_SEQS"] == "64"
    assert variables["PKMSERVE_API_KEY_FILE"] == "/keys/keys" and variables["PKMSERVE_MODEL"] == "/model"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1" and pod["runtimeClassName"] == "nvidia"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert pod["initContainers"][0]["volumeMounts"] == [{"name": "model", "mountPath": "/model"}]
    assert "replicas" not in deployment["spec"]  # the scaler's
    assert by_kind({"replicas": 3})["Deployment"]["spec"]["replicas"] == 3
    assert "No API key" in render(CHART)[1] and "No API key" not in render(CHART, FULL)[1]


def test_resources_may_be_left_to_the_cluster():
    def resources(values):
        return pod_of(by_kind(values)["Deployment"])["containers"][0]["resources"]
    assert resources(NO_LIMITS) == {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "2", "memory": "512Mi"}}
    assert resources(NO_RESOURCES) == {"limits": {}}
    assert resources(OWN)["limits"] == {"memory": "1Gi", "nvidia.com/gpu": "2"}


def test_annotations_of_the_user_win():
    annotations = by_kind(OWN)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "false", "prometheus.io/port": "8000", "prometheus.io/path": "/metrics"}


def test_containers_that_fetch_may_do_no_more_than_the_server():
    """The level "restricted" of Pod Security refuses a pod with any container that leaves these out."""
    pod = pod_of(by_kind(OWN)["Deployment"])
    confined = pod["containers"][0]["securityContext"]
    plain, beside, instead = pod["initContainers"]
    assert plain["securityContext"] == instead["securityContext"] == confined
    assert beside["securityContext"] == {"readOnlyRootFilesystem": False, "runAsUser": 1000}
    assert [m["mountPath"] for m in plain["volumeMounts"]] == ["/model"]
    assert [m["mountPath"] for m in beside["volumeMounts"]] == ["/keys", "/model"]
    assert instead["volumeMounts"] == [{"name": "model", "mountPath": "/model", "subPath": "a"}]
    job = next(m for m in others() if m["kind"] == "Job")["spec"]["template"]["spec"]
    assert all(c["securityContext"] == confined for c in [*job["initContainers"], *job["containers"]])


REFUSED = {
    "admin-host": "adminPort", "admin-port": "adminPort", "api-key-file": "keys.secret", "device": "gpu.enabled",
    "drain-delay-s": "drainDelaySeconds", "host": "leave it out", "log-format": "JSON", "metrics-auth": "adminPort", "model": "model.volume", "port": "service.port",
    "served-model-name": "model.servedName", "shutdown-timeout-s": "shutdownTimeoutSeconds"}


def refusal(values, tmp_path):
    """What the renderer and, where there is one, helm say to values that they must refuse."""
    with pytest.raises(Refused) as refused:
        render(CHART, values)
    helm = shutil.which("helm")
    if helm is not None:
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        done = subprocess.run([helm, "template", "pkmserve", CHART, "--values", tmp_path / "values.yaml"],
                              capture_output=True, text=True)
        assert done.returncode != 0 and str(refused.value) in done.stderr, done.stderr
    return str(refused.value)


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_would_break_the_pods_are_refused(option, options, tmp_path):  # noqa: F811
    """Without a word, a probe would ask a port where nobody is, or a variable would stand twice."""
    assert option in options
    for name in (option, option.replace("-", "_").upper()):
        message = refusal({"options": {name: "1"}}, tmp_path)
        assert message.startswith("options.%s: " % name) and REFUSED[option] in message


def test_no_variable_stands_twice():
    for values in SETS.values():
        names = [v["name"] for v in pod_of(by_kind(values)["Deployment"])["containers"][0]["env"]]
        assert len(names) == len(set(names)), names


def test_values_that_do_not_go_together_are_refused(tmp_path):
    assert "adminPort" in refusal({"adminPort": 8000}, tmp_path)
    assert "model.volume" in refusal({"model": {"init": [{"name": "fetch", "image": "m:1"}]}}, tmp_path)


def test_probes_and_scrapes_go_to_the_admin_port():
    kinds = by_kind(ADMIN)
    template = kinds["Deployment"]["spec"]["template"]
    container, = template["spec"]["containers"]
    assert environment_of(container)["PKMSERVE_ADMIN_PORT"] == "9000"
    assert environment_of(container)["PKMSERVE_ADMIN_HOST"] == "0.0.0.0"  # the kubelet asks from outside of the pod
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {"http": 8000, "admin": 9000}
    assert {container[probe]["httpGet"]["port"] for probe in container if probe.endswith("Probe")} == {"admin"}
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "9000"
    endpoint, = kinds["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["targetPort"] == "admin" and "port" not in endpoint
    assert [p["name"] for p in kinds["Service"]["spec"]["ports"]] == ["http"]  # it may be open to the world


def test_the_admin_port_answers_when_the_others_connections_are_used_up(tmp_path):
    """What the chart's pod is told, at ports that are free: probes there fail for what ails the server, not for its clients."""
    variables = environment_of(pod_of(by_kind({"adminPort": free_port()})["Deployment"])["containers"][0])
    admin = "http://127.0.0.1:%s" % variables["PKMSERVE_ADMIN_PORT"]
    flags = {**variables, "PKMSERVE_DRAIN_DELAY_S": "1", "PKMSERVE_MAX_CONNECTIONS": "4"}
    replica = Replica(tmp_path, 1, [word for name, value in flags.items()
                                    for word in ("--" + name[9:].lower().replace("_", "-"), value)])
    replica.start()
    try:
        replica.wait_ready()
        assert status_of(admin + "/metrics") == 200 and status_of(replica.url + "/metrics") == 404
        eventually(lambda: "\npkmserve_http_connections 0\n" in requests.get(admin + "/metrics", timeout=30).text,
                   "the connections of the requests so far closed")
        taken = []
        for _ in range(4):
            taken.append(socket.create_connection(("127.0.0.1", replica.port)))
            taken[-1].sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n")
            assert taken[-1].recv(100).startswith(b"HTTP/1.1 100 ")  # the head has been read
        assert status_of(replica.url + "/version") == 503
        assert status_of(admin + "/health/live") == status_of(admin + "/health/ready") == 200
        replica.process.send_signal(signal.SIGTERM)
        eventually(lambda: status_of(admin + "/health/ready") == 503, "not ready while it drains")
        assert status_of(admin + "/health/live") == 200
        for connection in taken:
            connection.close()
        assert replica.process.wait(30) == 0
    finally:
        replica.close()


def test_variables_are_options_and_there_is_time_to_drain(options):  # noqa: F811
    known = {"PKMSERVE_" + flag.upper().replace("-", "_") for flag in options}
    for manifest in manifests():
        assert variables_of(json.dumps(manifest)) <= known, manifest["metadata"]["name"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["terminationGracePeriodSeconds"] > (values["drainDelaySeconds"]
                                                      + values["shutdownTimeoutSeconds"] + 2)
    assert str(values["alerts"]["stallSeconds"]) == options["stall-ready-s"]
    assert values["alerts"]["waiting"] == int(values["autoscaling"]["waiting"]) == int(options["max-seqs"]) // 4


def test_alerts_ask_for_metrics_and_labels_that_exist(metrics, tmp_path):  # noqa: F811
    groups = by_kind(FULL)["PrometheusRule"]["spec"]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(groups))
    for rule in groups["groups"][0]["rules"]:
        for name, labels in re.findall(r"(pkmserve_[a-z_]+)\{([^}]*)\}", rule["expr"]):
            lines = re.findall(r"^%s(?:\{(.*)\})? " % name, metrics, re.M)
            assert lines, "%s: there is no metric %s" % (rule["alert"], name)
            have = set(re.findall(r'(\w+)="', " ".join(lines))) | {"namespace", "service"}
            assert set(re.findall(r'(\w+)[=!]~?"', labels)) <= have, rule["alert"]
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def series(name, labels, rate, own='namespace="default",service="pkmserve"'):
    """One that grows by so much each 15 s."""
    return {"series": "pkmserve_%s{%s,%s}" % (name, own, labels), "values": "0+%gx120" % rate}


def requests_of(route, code, rate):
    return series("requests_total", 'route="%s",code="%s"' % (route, code), rate)


def rejected_for(reason, rate):
    return series("requests_rejected_total", 'reason="%s"' % reason, rate)


WORK = requests_of("/generate", "200", 100)
PROBES = [requests_of("/health/ready", "200", 7.5), requests_of("/health/live", "200", 1.5),
          requests_of("/metrics", "200", 1)]
# What happens in half an hour, and the alerts among those of shares that it fires.
STORIES = {
    "nothing": ([WORK, *PROBES], set()),
    "a few fail": ([WORK, *PROBES, requests_of("/score", "500", 0.2)], {"PkmserveErrors"}),
    "hardly any fail": ([WORK, *PROBES, requests_of("/score", "500", 0.05)], set()),
    "a client has no patience": ([WORK, *PROBES, requests_of("/score", "504", 0.5)], set()),
    "many are late": ([WORK, *PROBES, requests_of("/score", "504", 2)], {"PkmserveLate"}),
    "quiet, and all fail": ([requests_of("/generate", "500", 0.005), *PROBES], {"PkmserveErrors"}),
    "quiet, and all are refused": ([requests_of("/generate", "429", 0.1), *PROBES, rejected_for("queue_full", 0.1)],
                                   {"PkmserveRefusing"}),
    "full, and says 503": ([WORK, *PROBES, requests_of("/generate", "503", 5), rejected_for("queue_tokens_full", 5)],
                           {"PkmserveRefusing"}),
    "one sends too much": ([WORK, *PROBES, requests_of("/generate", "429", 5), rejected_for("client_limit", 5)],
                           {"PkmserveClientLimit"}),
    "wrong requests": ([WORK, *PROBES, requests_of("/generate", "400", 50), rejected_for("invalid", 50)], set()),
}


@pytest.mark.parametrize("story", STORIES)
def test_alerts_of_shares_fire_for_what_clients_have_met(story, tmp_path):
    rules = by_kind(FULL)["PrometheusRule"]["spec"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    given, wanted = STORIES[story]
    expected = []
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] in ("PkmserveRefusing", "PkmserveClientLimit", "PkmserveErrors", "PkmserveLate"):
            fires = [{"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}]
            expected.append({"eval_time": "25m", "alertname": rule["alert"],
                             "exp_alerts": fires if rule["alert"] in wanted else []})
    assert len(expected) == 4
    test = {"interval": "15s", "input_series": given, "alert_rule_test": expected}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shares_are_of_no_probes(replica):  # noqa: F811
    """Every route that answers for health, by the name that the metrics give it."""
    import requests
    rules = by_kind(FULL)["PrometheusRule"]["spec"]["groups"][0]["rules"]
    left_out, = {route for rule in rules for route in re.findall(r'route!~"([^"]*)"', rule["expr"])}
    tables = "".join(path.read_text() for path in (ROOT / "server").rglob("routes*.c"))
    health = re.findall(r'\{"(/[^"]*)", [A-Z_ |]*ROUTE_QUIET', tables)  # those whose requests are not logged
    assert {"/health", "/livez", "/metrics"} < set(health)
    for path in health:
        requests.get(replica.url + path)
    named = set(re.findall(r'requests_total\{route="([^"]*)"', requests.get(replica.url + "/metrics").text))
    assert {route for route in named if re.fullmatch(left_out, route)} >= set(health)
    for path in ("/generate", "/score", "/v1/completions", "/v1/models", "/version", "/", "other"):
        assert not re.fullmatch(left_out, path)


def test_reasons_of_alerts_are_the_servers(metrics):  # noqa: F811
    have = set(re.findall(r'rejected_total\{reason="([^"]*)"', metrics))
    for rule in by_kind(FULL)["PrometheusRule"]["spec"]["groups"][0]["rules"]:
        for reasons in re.findall(r'reason=~?"([^"]*)"', rule["expr"]):
            assert set(reasons.split("|")) <= have, rule["alert"]


def test_the_job_scores_every_nth_line_and_goes_on(tmp_path):
    """The arguments of pod 3, as Kubernetes would expand them, on a corpus of two files."""
    job = next(m for m in others() if m["kind"] == "Job")["spec"]
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] == "OnFailure"
    arguments = job["template"]["spec"]["containers"][0]["args"]
    assert "--shard=$(JOB_COMPLETION_INDEX)/%d" % job["completions"] in arguments
    for part in range(2):
        lines = "".join(json.dumps({"id": i, "text": "Line %d." % i}) + "\n" for i in range(part * 8, part * 8 + 8))
        (tmp_path / ("part-%d.jsonl.zst" % part)).write_text(lines)  # what a file holds is seen by its bytes
    arguments = [a.replace("$(JOB_COMPLETION_INDEX)", "3").replace("/corpus/", "%s/" % tmp_path)
                 .replace("/scores/", "%s/" % tmp_path) for a in arguments]
    for _ in range(2):  # the second finds all done
        done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    shown = subprocess.run(["zstd", "-dcq", tmp_path / "3.jsonl.zst"], capture_output=True, text=True, check=True)
    assert [json.loads(line)["id"] for line in shown.stdout.splitlines()] == [3, 11]


# ---- schemas --------------------------------------------------------------------------------------

def test_what_is_kubernetes_own_fits_its_schema():
    client = pytest.importorskip("kubernetes.client", reason="the package kubernetes is not installed: make check-chart")
    n = 0
    for manifest in manifests():
        version, kind = manifest["apiVersion"].split("/")[-1], manifest["kind"]
        if "." in manifest["apiVersion"].replace(".k8s.io", "."):
            continue  # of the projects below
        model = version.capitalize() + kind
        if not hasattr(client, model) and version == "v2":
            model = "V2beta2" + kind
        check_model(client, model, manifest, kind)
        n += 1
    assert n == 3 * len(SETS) + 2  # FULL's scaler, the Job


def known_fields(schema, value, where):
    """A server drops fields that a schema does not have; here they are errors."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, list):
        for i, one in enumerate(value):
            known_fields(schema.get("items", {}), one, "%s[%d]" % (where, i))
    elif isinstance(value, dict) and "properties" in schema:
        unknown = set(value) - set(schema["properties"])
        assert not unknown, "%s: unknown: %s" % (where, unknown)
        for key, one in value.items():
            known_fields(schema["properties"][key], one, where + "." + key)


def test_the_others_fit_the_definitions_of_their_projects():
    """CRDS is a folder with these projects' CustomResourceDefinitions."""
    if "CRDS" not in os.environ:
        pytest.skip("make check-chart CRDS=FOLDER")
    schemas = {}
    for path in pathlib.Path(os.environ["CRDS"]).glob("*.yaml"):
        for definition in yaml.load_all(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            for version in definition["spec"]["versions"]:
                name = "%s/%s" % (definition["spec"]["group"], version["name"])
                schemas[name, definition["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    checked = set()
    for manifest in manifests():
        key = manifest["apiVersion"], manifest["kind"]
        if key in schemas:
            jsonschema.Draft7Validator(schemas[key]).validate(manifest)
            schema = {**schemas[key]["properties"], "metadata": {}}
            known_fields({"properties": schema}, manifest, key[1])
            checked.add(key[1])
    assert checked == {"ServiceMonitor", "PrometheusRule", "InferenceService", "InferencePool", "HTTPRoute"}


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_helm_renders_the_same(values, tmp_path):
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    given = ["--values", tmp_path / "values.yaml"]
    linted = subprocess.run([helm, "lint", "--strict", CHART, *given], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    done = subprocess.run([helm, "template", "pkmserve", CHART, *given], capture_output=True, text=True, check=True)
    theirs = [m for m in yaml.safe_load_all(done.stdout) if m]
    mine, _ = render(CHART, values)
    order = str
    assert sorted(theirs, key=order) == sorted(mine, key=order)


def test_the_chart_has_the_programs_version():
    version = re.search(r'PKMSERVE_VERSION "(.*)"', (ROOT / "server" / "version.h").read_text())[1]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
