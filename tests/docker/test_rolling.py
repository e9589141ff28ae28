"""A short rolling restart and a hard kill behind each balancer that is installed, with plain processes.
check.py does it with containers and 10,000 requests (make check-containers)."""

import http.client
import json
import re

import pytest
import requests

from fleet import Fleet, eventually, find_program
from rolling import hard_kill, rolling_restart

# Longer than the 1.2 s in which HAProxy sees that a replica is going; than nginx's fail_timeout of 3 s.
DELAY_S = {"haproxy": 2, "nginx": 4}


@pytest.fixture(scope="module", params=sorted(DELAY_S))
def fleet(request):
    if find_program(request.param) is None:
        pytest.skip("%s is not installed" % request.param)
    with Fleet(request.param, ["--drain-delay-s", DELAY_S[request.param]]) as fleet:
        yield fleet


def test_a_rolling_restart_loses_no_request(fleet):
    load = rolling_restart(fleet, 300)
    assert set(load.kinds) == {"generate", "stream", "score"}


def test_a_hard_kill_loses_only_what_was_in_flight(fleet):
    hard_kill(fleet, 200)


def total(fleet, name):
    """The sum of a metric's samples over the replicas."""
    return sum(float(line.split()[-1]) for replica in fleet.replicas
               for line in requests.get(replica.url + "/metrics").text.splitlines()
               if re.match(r"pkmserve_%s[{ ]" % name, line))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_balancer_leaves_the_replica(fleet, stream):
    body = json.dumps({"prompt": "It was", "max_tokens": 500, "ignore_eos": True, "n": 8,
                       "stream": stream})
    before = total(fleet, "requests_cancelled_total")
    connection = http.client.HTTPConnection("127.0.0.1", fleet.balancer.port)
    connection.request("POST", "/generate", body)
    eventually(lambda: total(fleet, "num_requests_running") == 1, "it runs")
    if stream:
        connection.getresponse().fp.readline()
    connection.close()
    eventually(lambda: total(fleet, "num_requests_running") == 0, "it ends")
    assert total(fleet, "requests_cancelled_total") == before + 1


def get(port, path):
    """As it stands: other clients decode a path first."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_metrics_are_not_for_the_balancers_clients(fleet):
    for path in ("/metrics", "/metrics?a", "/%6detrics", "/metri%63s"):
        status, body = get(fleet.balancer.port, path)
        assert status == 404 and "pkmserve_" not in body, path
    assert get(fleet.balancer.port, "/version")[0] == 200
    assert get(fleet.replicas[0].port, "/metrics")[0] == 200


def begin(port, client, forwarded=None):
    """A long stream for a client with an address of its own: the connection, and the answer's status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, source_address=(client, 0))
    body = json.dumps({"prompt": "It was", "max_tokens": 500, "ignore_eos": True, "n": 8, "stream": True})
    connection.request("POST", "/generate", body, {"X-Forwarded-For": forwarded} if forwarded else {})
    return connection, connection.getresponse().status


@pytest.mark.parametrize("name", sorted(DELAY_S))
def test_a_client_counts_by_the_address_that_the_balancer_saw(name):
    """One request a client at each of two replicas; what the client itself claims to be makes no difference."""
    if find_program(name) is None:
        pytest.skip("%s is not installed" % name)
    flags = ["--drain-delay-s", 0, "--shutdown-timeout-s", 0, "--max-client-requests", 1,
             "--trusted-proxies", "127.0.0.1"]
    with Fleet(name, flags) as fleet:
        opened = [begin(fleet.balancer.port, "127.0.0.2") for _ in range(2)]
        opened += [begin(fleet.balancer.port, "127.0.0.2", claim) for claim in ("192.0.2.1", "192.0.2.1, 127.0.0.1")]
        opened += [begin(fleet.balancer.port, "127.0.0.3", "127.0.0.2")]
        assert [status for _, status in opened] == [200, 200, 429, 429, 200]
        for connection, _ in opened:
            connection.close()
