"""Standard error that takes no lines, or is closed, costs lines of the log and nothing else."""

import contextlib
import os
import re
import subprocess

from server_harness import DEMO, PATIENCE, PROGRAM, Server, eventually

WORD = {"prompt": "x"}


def test_standard_error_that_blocks_holds_up_nothing():
    reader, writer = os.pipe()  # nobody reads: 64 KiB fit into it
    try:
        with Server("--log-buffer-bytes", "8192", stderr=writer) as s:
            os.close(writer)
            for i in range(400):
                answer = s.session.post(s.url + "/tokenize", json=WORD, timeout=PATIENCE,
                                        headers={"x-request-id": "i%0120d" % i})
                assert answer.status_code == 200
            assert s.get("/health/live").status_code == 200
            assert s.metric("log_lines_dropped_total") > 50
            assert s.stop() == 0  # SIGTERM, too, is obeyed
    finally:
        os.close(reader)


def test_lines_that_are_missing_are_told_once_there_is_room():
    reader, writer = os.pipe()
    with Server("--log-buffer-bytes", "8192", stderr=writer) as s:
        os.close(writer)
        while s.metric("log_lines_dropped_total") < 10:
            s.ok("/tokenize", WORD)
        text = b""

        def dropped():
            return sum(map(int, re.findall(rb"event=log_lines_dropped lines=(\d+)\n", text)))

        def told():
            nonlocal text
            text += os.read(reader, 65536)
            return dropped() >= 10

        eventually(told, "the number of missing lines")
        assert dropped() <= s.metric("log_lines_dropped_total")
        assert all(re.match(rb"\d{4}-.*Z level=", line) for line in text.splitlines())
        s.stop()
    os.close(reader)


def test_closed_standard_files_are_not_given_to_clients():
    """The descriptors 0 to 2 are open in any case, so that no socket gets one of their numbers."""
    command = '"$0" serve --model "$1" --port 0 --host 127.0.0.1 --drain-delay-s 0 <&- >&- 2>&- & echo $!'
    shell = subprocess.run(["sh", "-c", command, PROGRAM, DEMO], stdout=subprocess.PIPE, text=True,
                           timeout=PATIENCE, check=True)
    pid = int(shell.stdout)
    try:
        def files():
            folder, found = "/proc/%d/fd" % pid, {}
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                    found[int(name)] = os.readlink(os.path.join(folder, name))
            return found if any("signalfd" in path for path in found.values()) else None

        found = eventually(files, "the server waits for signals")
        assert [found[fd] for fd in range(3)] == ["/dev/null"] * 3
    finally:
        os.kill(pid, 15)


def test_a_service_manager_that_cannot_be_told_is_logged(tmp_path):
    for name, why in ((str(tmp_path / "nobody"), "No such file or directory"), ("@" + "x" * 200, "its name is too long")):
        with Server(env={"NOTIFY_SOCKET": name}) as server:
            eventually(lambda: any("event=notify_failed" in line and why in line for line in server.read_log().splitlines()),
                       "the warning")
