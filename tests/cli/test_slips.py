"""What is typed by mistake, or because another program takes it: taken where it is clear, else told.

Rerun one: PKMSERVE=build/pkmserve /usr/bin/python3 -m pytest tests/cli/test_slips.py -k json
"""

import json
import os
import pty
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cli_harness import LIMIT_S, PROGRAM, ROOT, fails, ok, run

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                                "server"))
from server_harness import Server, free_port  # noqa: E402

DEMO = os.path.join(ROOT, "models", "demo")
SERVE = os.path.join(ROOT, ".ci", "serve")


# ---- commands, models, types --------------------------------------------------------------------

@pytest.mark.parametrize("typed, meant", [("serv", "serve"), ("socre", "score"),
                                          ("inspct", "inspect"), ("generat", "generate")])
def test_a_misspelt_command_gets_a_suggestion(typed, meant):
    assert "did you mean %s;" % meant in fails(2, typed)
    assert "did you mean %s;" % meant in fails(2, "help", typed)
    assert "did you mean" not in fails(2, "frobnicate")


@pytest.mark.parametrize("flag", ["-V", "-v", "--version", "version"])
def test_every_way_to_ask_for_the_version(flag):
    assert ok(flag).startswith("pkmserve ")


def test_the_model_s_directory_may_stand_without_its_flag():
    assert ok("inspect", DEMO) == ok("inspect", "--model", DEMO)
    assert ok("inspect", DEMO, env={"PKMSERVE_MODEL": "/nowhere"}) == ok("inspect", DEMO)
    assert "two models" in fails(2, "inspect", DEMO, "--model", DEMO)
    assert "unexpected argument 'b'" in fails(2, "serve", DEMO, "b")
    assert "/nowhere" in fails(1, "serve", "/nowhere")


def test_a_file_or_nothing_in_the_place_of_a_model_is_told_so():
    weights = os.path.join(DEMO, "model.safetensors")
    assert "give %s" % DEMO in fails(1, "inspect", "--model", weights)
    assert "no such directory" in fails(1, "score", "--model", "nosuch", "LICENSE")


def test_types_have_the_names_that_vllm_gives_them(tmp_path):
    (tmp_path / "text").write_text("It was a dark night.")
    for theirs, ours in (("float32", "f32"), ("bfloat16", "bf16")):
        assert ok("score", "--dtype", theirs, tmp_path / "text") == \
            ok("score", "--dtype", ours, tmp_path / "text")
    refusal = fails(1, "score", "--device", "cpu", "--dtype", "float16")
    assert "does not compute in f16, only a GPU does" in refusal and refusal == fails(1, "score", "--device", "cpu", "--dtype", "f16")
    assert "not one of auto|f32|bf16|int8" in fails(2, "score", "--dtype", "float64")
    assert "not one of auto|f32|bf16" in fails(2, "score", "--kv-cache-dtype", "float16")
    assert "not one of" in fails(2, "score", "--device", "float32")


def test_help_shows_a_command_s_own_options_first():
    text = ok("help", "score")
    assert text.index("--stride") < text.index("Model and engine:") < text.index("--device")
    text = ok("help", "serve")
    assert text.index("--port") < text.index("Model and engine:") < text.index("--model TEXT")


# ---- texts ---------------------------------------------------------------------------------------

JSON_LINES = '{"text": "Hello there."}\n\n  {"text": "And here."}\n'


@pytest.mark.parametrize("name, text", [
    ("x.jsonl", JSON_LINES), ("x.ndjson", "not JSON"), ("x.json", '{\n"text": 1\n}'),
    ("x.txt", JSON_LINES), ("-", JSON_LINES)])
@pytest.mark.parametrize("command", ["score", "compare"])
def test_json_is_not_scored_as_prose(tmp_path, command, name, text):
    path = "-" if name == "-" else tmp_path / name
    if name != "-":
        path.write_text(text)
    done = run(command, path, stdin=text)
    assert done.returncode == 1 and done.stdout == ""
    assert "would be scored as prose" in done.stderr, done.stderr
    assert "--as-text" in done.stderr and "--jsonl" in done.stderr, done.stderr
    assert run(command, "--as-text", path, stdin=text).returncode == 0


def test_json_is_no_prose_where_slots_are_counted_and_jsonl_takes_it(tmp_path):
    """The refusal leads to this command's own --jsonl, not to score."""
    (tmp_path / "x.jsonl").write_text(JSON_LINES)
    message = fails(1, "memory", "count", tmp_path / "x.jsonl", "-o", tmp_path / "counts")
    assert "or give --jsonl (not to compare)" in message
    ok("memory", "count", "--jsonl", tmp_path / "x.jsonl", "-o", tmp_path / "counts")


@pytest.mark.parametrize("text", ["{ a brace\n", "int main(void)\n{\n    return 0;\n}\n", "{}\nprose\n"])
def test_prose_and_programs_with_braces_are_text(tmp_path, text):
    (tmp_path / "t").write_text(text)
    ok("score", tmp_path / "t")


def test_an_empty_text_is_an_error_and_no_row_of_dashes(tmp_path):
    (tmp_path / "empty").write_text("")
    assert "empty: is empty" in fails(1, "score", tmp_path / "empty")
    done = run("score", stdin="")
    assert done.returncode == 1 and "standard input: is empty" in done.stderr


@pytest.mark.parametrize("arguments, typed, due", [
    (["score"], "It was a dark night.", "21"),
    (["score", "--jsonl"], '{"text": "It was a dark night."}', '"n_bytes":20'),
    (["generate", "--jsonl"], '{"prompt": "It was", "max_tokens": 1}', '"finish_reason"')])
def test_at_a_terminal_it_says_that_it_reads_from_there(arguments, typed, due):
    controller, terminal = pty.openpty()
    process = subprocess.Popen([PROGRAM, *arguments], stdin=terminal, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    os.close(terminal)
    os.write(controller, typed.encode() + b"\n\x04")
    out, err = process.communicate(timeout=LIMIT_S)
    os.close(controller)
    assert err.startswith("pkmserve: reading the terminal; end the text with control-D\n"), err
    assert process.returncode == 0 and "standard input" not in err and due in out, out + err


def test_add_bos_is_score_s_field(tmp_path):
    text = "It was a dark night, and nobody came."
    (tmp_path / "t").write_text(text)
    with Server() as s:
        for flag, value in (("on", True), ("off", False), ("auto", None)):
            got = json.loads(ok("score", "--json", "--add-bos", flag, tmp_path / "t"))
            due = s.ok("/score", {"text": text, "add_bos": value})
            assert got["results"][0]["sum_logprob"] == due["results"][0]["sum_logprob"]
            assert got["results"][0]["n_scored"] == due["results"][0]["n_scored"]


# ---- servers -------------------------------------------------------------------------------------

@pytest.mark.parametrize("typed", ["nonsense", '[{"memory": 0}', "[]]", '[], "stride": 1'])
def test_what_is_no_list_to_ablate_is_shown(typed):
    for command in (["score"], ["compare"], ["generate"], ["score", "--jsonl"]):
        message = fails(2, *command, "--ablate", typed, stdin="x")
        assert message == "pkmserve: --ablate must be a JSON list such as '[{\"memory\": 0}]', not %s" % typed


def test_health_takes_a_url():
    with Server() as s:
        assert ok("health", s.url) == "healthy: 127.0.0.1 port %d answers /health/ready with 200\n" % s.port
        assert "/health/live with 200" in ok("health", s.url + "/health/live")
        assert "127.0.0.1 port %d" % s.port in ok("health", "127.0.0.1:%d/" % s.port)
        assert "127.0.0.1 port %d" % s.port in ok("health", "--port", s.port)  # not 0.0.0.0
    for wrong in ("https://127.0.0.1", "http://", "http://a:0", "http://a:70000", "http://a:x"):
        assert "is no address to ask" in fails(2, "health", wrong), wrong


def test_the_ready_line_has_an_address_to_paste():
    with Server() as s:
        s.logged('url="%s"' % s.url)
    with Server("--host", "0.0.0.0") as s:
        s.logged('url="http://127.0.0.1:%d"' % s.port)


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def serve_script(port):
    return subprocess.Popen([SERVE, PROGRAM, DEMO, str(port)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "PKMSERVE_HOST": "127.0.0.1"})


def test_make_serve_offers_a_command_once_its_own_server_is_ready():
    port = free_port()
    process = serve_script(port)
    line = ""
    while "curl" not in line:
        line = process.stdout.readline()
        assert line != "" or process.poll() is None
    assert "http://127.0.0.1:%d/generate" % port in line
    process.terminate()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "event=draining" in err, err
    assert "a second signal ends the process at once" in err, err


def test_make_serve_on_a_busy_port_offers_nothing():
    """Somebody healthy is there already: the command would talk to a stranger's model."""
    stranger = HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=stranger.serve_forever, daemon=True).start()
    process = serve_script(stranger.server_port)
    out, err = process.communicate(timeout=LIMIT_S)
    stranger.shutdown()
    stranger.server_close()
    assert process.returncode == 1 and "Address already in use" in err, err
    assert "Try it" not in out + err
