"""The two promises under test: a rolling restart loses nothing, a hard kill only what was in flight.

    python3 tests/docker/rolling.py [--balancer haproxy|nginx] [--requests N]

runs both with plain processes and prints their figures. test_rolling.py has a short version of it,
check.py the long one with containers.
"""

import argparse
import itertools
import re
import time

from fleet import Fleet, eventually
from load import Load


def begun(replica, prefix):
    """request id → how often this replica worked on it, over all its lives. A 499 counts: the client left, or
    closed so soon after the whole answer that it looks alike."""
    count = {}
    for found in re.finditer(r"event=request id=\"?(%s-\d+)\"? .* status=(?:200|499) " % prefix,
                             replica.read_log()):
        count[found[1]] = count.get(found[1], 0) + 1
    return count


def check_once(fleet, prefix):
    """No request was begun twice: what the balancer sends again, nobody had begun."""
    total = {}
    for replica in fleet.replicas:
        for request_id, n in begun(replica, prefix).items():
            total[request_id] = total.get(request_id, 0) + n
    twice = [i for i, n in total.items() if n > 1]
    assert not twice, "begun more than once: %s" % twice[:5]
    return total


def unlogged(fleet, load):
    """Answers that no replica says it gave, and what it says instead."""
    logged = check_once(fleet, load.prefix)
    names = ["%s-%d" % (load.prefix, i) for i in range(load.n_done)]
    missing = [name for name in names if name not in logged]
    lines = [line for replica in fleet.replicas for line in replica.read_log().splitlines()
             for name in missing[:5] if re.search(name + r"\b", line)]
    return "answered, but not in a replica's log: %s\n%s" % (missing[:5], "\n".join(lines))


def rolling_restart(fleet, n, n_worker=8):
    """Restarts each replica in turn, under load. Not one request may be lost."""
    load = Load(fleet.url, n, n_worker, "roll")
    load.learn()
    load.start()
    for i, replica in enumerate(fleet.replicas):
        load.wait_done(n * (2 * i + 1) // (2 * len(fleet.replicas) + 1))
        replica.stop()
        replica.start()
        replica.wait_ready()
    load.wait_done(load.n_done + 10 * n_worker)  # with all of them back
    load.finish()
    assert not load.lost, "%s\n%s" % (load.summary(), "\n".join(map(repr, load.lost[:20])))
    try:  # a replica logs a request after its client has the answer
        eventually(lambda: len(check_once(fleet, load.prefix)) == load.n_done, "all logged")
    except AssertionError as e:
        raise AssertionError(unlogged(fleet, load)) from e
    return load


def wait_both(fleet):
    """Until the balancer sends to both replicas: it may still avoid one that was restarted."""
    load = Load(fleet.url, 0, prefix="both")
    numbers = itertools.count()

    def both():
        load.ask("both-%d" % next(numbers))
        return all(begun(replica, "both") for replica in fleet.replicas)
    eventually(both, "both replicas get requests")


def hard_kill(fleet, n, n_worker=8, how="kill"):
    """Kills a replica under load, or lets it vanish. Lost may be what it had in flight: begun before its death, with an
    error that the client can tell, and not on the other replica."""
    wait_both(fleet)
    load = Load(fleet.url, n, n_worker, how)
    load.learn()
    load.start()
    load.wait_done(n // 2)
    victim, survivor = fleet.replicas
    getattr(victim, how)()
    dead = time.monotonic()
    load.wait_done(load.n_done + n // 4)
    if how == "vanish":  # until those that wait for it are told
        load.held.set()
        for thread in load.threads:
            thread.join()
    victim.start()
    victim.wait_ready()
    load.finish()
    for lost in load.lost:
        assert lost.clean, "not a clean error: %r" % lost
        assert lost.begin < dead, "begun %.3f s after the death: %r" % (lost.begin - dead, lost)
    assert len(load.lost) <= n_worker, "more than were in flight: %r" % load.lost
    alive = begun(survivor, load.prefix)
    computed = [lost for lost in load.lost if lost.id in alive]
    assert not computed, "lost, though the other replica computed it: %r" % computed
    check_once(fleet, load.prefix)
    return load


def run_both(fleet, n, what):
    """Both scenarios; prints a line for each, and what the hard kill lost."""
    runs = [("rolling restart", rolling_restart), ("hard kill", hard_kill)]
    if hasattr(fleet.replicas[0], "vanish"):
        runs.append(("machine gone", lambda fleet, n: hard_kill(fleet, min(n, 2000), how="vanish")))
    for name, run in runs:
        begin = time.monotonic()
        load = run(fleet, n)
        print("%s, %s: %s, in %.0f s" % (what, name, load.summary(), time.monotonic() - begin),
              flush=True)
        for lost in load.lost:
            print("   ", lost)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--balancer", choices=["haproxy", "nginx"], default="haproxy")
    parser.add_argument("--requests", type=int, default=10000)
    arguments = parser.parse_args()
    with Fleet(arguments.balancer) as fleet:
        run_both(fleet, arguments.requests, "processes, " + arguments.balancer)


if __name__ == "__main__":
    main()
