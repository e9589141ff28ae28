"""The option table: what is taken, from where, and what wrong usage gets (exit 2, one line)."""

import os
import re
import shutil
import subprocess

import pytest

from cli_harness import fails, ok, run

COMMANDS = ["serve", "score", "compare", "generate", "inspect", "bench", "health"]
MEMORY = ["memory count", "memory add", "memory rank", "memory hot", "memory inspect",
          "memory diff", "memory apply", "memory examples"]


def test_version():
    assert re.fullmatch(r"pkmserve \d+\.\d+\.\d+\n", ok("--version"))


def test_help_lists_the_commands_and_each_command_its_options():
    listing = ok("help")
    assert all(re.search(r"^  %s " % c, listing, re.M) for c in COMMANDS), listing
    for command in COMMANDS:
        text = ok("help", command)
        assert text.startswith("pkmserve %s" % command)
        assert ("--model TEXT" in text) == (command != "health")
        assert ok(command, "--help") == text
    group = ok("help", "memory")
    for command in MEMORY:
        words = command.split()
        text = ok("help", *words)
        assert text.startswith("pkmserve " + command) and ok(*words, "--help") == text
        assert re.search(r"^  %s " % command, listing, re.M) and re.search(r"^  %s " % command, group, re.M)
    assert ok("memory", "--help") == group
    for words in (["--help"], ["help", "help"], ["help", "version"]):
        assert ok(*words) == listing


def test_documents_of_the_table_know_every_option(tmp_path):
    flags = set(re.findall(r"^  --([a-z0-9-]+)", "".join(
        ok("help", *c.split()) for c in COMMANDS + MEMORY), re.M))
    man, bash, zsh, fish = (ok("help", kind) for kind in ("man", "bash", "zsh", "fish"))
    assert man.startswith(".TH PKMSERVE 1 ")
    assert [name for name in re.findall("^.SH (.*)$", man, re.M) if not name.startswith("OPTIONS OF ")] == \
        ["NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS"]
    for flag in flags:
        assert r".B \-\-%s" % flag.replace("-", r"\-") in man and "--%s " % flag in bash
        assert "'--%s[" % flag in zsh and "' -l %s " % flag in fish
    (tmp_path / "bash").write_text(bash + "\n".join([
        "COMP_WORDS=(pkmserve score --te); COMP_CWORD=2; _pkmserve; echo ${COMPREPLY[@]}",
        "COMP_WORDS=(pkmserve score --device c); COMP_CWORD=3; _pkmserve; echo ${COMPREPLY[@]}",
        "COMP_WORDS=(pkmserve mem); COMP_CWORD=1; _pkmserve; echo ${COMPREPLY[@]}",
        "COMP_WORDS=(pkmserve memory ra); COMP_CWORD=2; _pkmserve; echo ${COMPREPLY[@]}",
        "COMP_WORDS=(pkmserve memory rank --t); COMP_CWORD=3; _pkmserve; echo ${COMPREPLY[@]}"]))
    done = subprocess.run(["bash", "-eu", str(tmp_path / "bash")], stdout=subprocess.PIPE, check=True, text=True)
    assert done.stdout == "--text-field\ncpu cuda\nmemory\nrank\n--top\n"


def test_fish_offers_each_command_its_own_options():
    """`memory inspect` is another command than `inspect`."""
    offered = [(re.findall('"([^"]*)"', commands), flag) for commands, flag in re.findall(
        r"^complete -c pkmserve -n '__pkmserve_on ([^']*)' -l (\S+)", ok("help", "fish"), re.M)]
    for command in COMMANDS + MEMORY:
        flags = re.findall(r"^  --([a-z0-9-]+)", ok("help", *command.split()), re.M)
        assert sorted(flags) == sorted(flag for commands, flag in offered if command in commands), command


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize("line, offered, others", [
    ("", {"score", "memory", "help", "version"}, {"count"}),
    ("help ", {"score", "memory", "version"}, {"count"}),
    ("memory ", {"count", "inspect"}, {"score"}),
    ("help memory ", {"count", "inspect"}, {"score"}),
    ("memory count ", {"here"}, {"count", "score"}),  # a file
    ("inspect --", {"--hash", "--dtype"}, {"--counts"}),
    ("memory inspect --", {"--counts", "--json"}, {"--hash", "--dtype"}),
    ("score --device c", {"cpu", "cuda"}, {"here"})])
def test_fish_offers_what_can_follow(line, offered, others, tmp_path):
    (tmp_path / "here").write_text("")
    script = ok("help", "fish") + "complete -C 'pkmserve %s'\n" % line
    done = subprocess.run(["fish", "--no-config", "-c", script], stdout=subprocess.PIPE, check=True, text=True,
                          cwd=tmp_path, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    got = {each.split("\t")[0] for each in done.stdout.splitlines()}
    assert offered <= got and not others & got


def test_help_of_serve_names_the_flags_of_the_contract():
    text = ok("help", "serve")
    for flag in """model tokenizer served-model-name host port device dtype threads max-model-len
            max-seqs max-batch-tokens max-queue max-queue-tokens max-items max-logprobs
            max-body-bytes default-max-tokens timeout-ms stall-ready-s stall-live-s drain-delay-s
            shutdown-timeout-s keepalive-s memory-placement deterministic memory-trace strict log-format
            prefix-cache check api-key-file admin-port metrics-auth metrics-compat""".split():
        assert re.search(r"^  --%s\b" % flag, text, re.M), flag
    for flag, default in [("port", 8000), ("max-queue", 128), ("max-body-bytes", 8388608),
                          ("keepalive-s", 120), ("max-logprobs", 20), ("drain-delay-s", 5)]:
        assert re.search(r"^  --%s N .*\[%d\]$" % (flag, default), text, re.M), flag


@pytest.mark.parametrize("arguments, wanted", [
    ([], "no command"),
    (["sevre"], "no command 'sevre'"),
    (["help", "nope"], "no command 'nope'"),
    (["help", "score", "memory"], "unexpected argument 'memory'"),
    (["help", "memory", "count", "add"], "unexpected argument 'add'"),
    (["--version", "score"], "unexpected argument 'score'"),
    (["serve", "--prot", "1"], "unknown option --prot; did you mean --port"),
    (["generate", "--temp", "1"], "unknown option --temp; did you mean --temperature;"),
    (["score", "--out", "x"], "unknown option --out; did you mean --output;"),
    (["serve", "--key", "x"], "unknown option --key; see"),
    (["serve", "--stride", "3"], "--stride is not an option of serve"),
    (["serve", "-p", "80"], "unknown option -p"),
    (["serve", "--port"], "--port needs a value"),
    (["serve", "--port", ""], "--port: '' is not a whole number in [0, 65535]"),
    (["serve", "--port", "65536"], "--port: '65536' is not a whole number in [0, 65535]"),
    (["serve", "--port", "80x"], "--port: '80x'"),
    (["serve", "--port", "0x50"], "--port: '0x50'"),
    (["serve", "--port", " 80"], "--port: ' 80'"),
    (["serve", "--port=-1"], "--port: '-1'"),
    (["serve", "--max-queue-tokens", "99999999999999999999"], "--max-queue-tokens"),
    (["serve", "--dtype", "f64"], "--dtype: 'f64' is not one of auto|f32|bf16|int8|f16"),
    (["serve", "--kv-cache-dtype", "f16"], "--kv-cache-dtype: 'f16' is not one of auto|f32|bf16"),
    (["serve", "--dtype", "f"], "--dtype: 'f' is not one of"),
    (["serve", "--memory-trace", "maybe"], "--memory-trace: 'maybe' is not one of off|summary|on"),
    (["serve", "--strict=yes"], "--strict takes no value"),
    (["serve", "--timeout-ms", "9", "--max-timeout-ms", "8"], "larger than --max-timeout-ms 8"),
    (["serve", "--metrics-auth"], "give --api-key-file too"),
    (["serve", "--metrics-auth", "--api-key-file", "keys", "--admin-port", "9"], "give one of the two"),
    (["serve", "--served-model-name", "x" * 97], "--served-model-name has 97 bytes, but 96 are the limit"),
    (["serve", "--served-model-name", "ab\udcff"], "--served-model-name is not valid UTF-8 at byte 2"),
    (["serve", "--memory-counts", "on"], "--memory-counts on needs --admin-port"),
    (["serve", "--port", "9", "--admin-port", "9"], "--port and --admin-port are both 9"),
    (["serve", "one", "stray"], "unexpected argument 'stray'"),
    (["generate", "one", "two"], "unexpected argument 'two'"),
    (["memory"], "memory needs a second word; see 'pkmserve help memory'"),
    (["memory", "cuont"], "no command 'memory cuont'; did you mean memory count"),
    (["memory", "count", "x"], "--output is missing"),
    (["memory", "diff", "x", "-o", "y"], "two paths are needed; see 'pkmserve help memory diff'"),
    (["memory", "examples", "x"], "--slots is missing: name the slots, as 17,99"),
    (["memory", "apply", "x", "y"], "--output is missing"),
    (["memory", "add", "-o", "x"], "no file is given; see 'pkmserve help memory add'"),
    (["memory", "rank", "x", "-o", "y"], "--background is missing"),
    (["memory", "rank", "x", "-o"], "--output needs a value"),
    (["memory", "hot", "x", "--share", "0"], "--share: '0' is not a number in (0, 1]"),
    (["memory", "hot", "x", "--stride", "1"], "--stride is not an option of memory hot"),
    (["generate", "--temperature", "nan"], "--temperature: 'nan' is not a number in [0, 2]"),
    (["generate", "--temperature", "0x1"], "--temperature: '0x1'"),
    (["generate", "--top-p", "0"], "--top-p: '0' is not a number in (0, 1]"),
    (["generate", "--min-p", "1"], "--min-p: '1' is not a number in [0, 1)"),
    (["generate", "--stop", "", "x"], "--stop has 0 bytes, but must have 1 ... 256"),
    (["generate", "--stop=", "x"], "--stop has 0 bytes, but must have 1 ... 256"),
    (["generate", "--seed", "-1"], "--seed: '-1'"),
    (["generate", "--seed", "18446744073709551616"], "--seed"),
    (["serve", "--model=x\ny", "--port", "z"], "--port: 'z'"),
])
def test_wrong_usage_is_named(arguments, wanted):
    line = fails(2, *arguments)
    assert wanted in line, "expected %r in %r" % (wanted, line)


@pytest.mark.parametrize("arguments, wanted", [
    (["generate", "--min-tokens", 6, "--max-tokens", 5, "x"], "--min-tokens 6 is larger than --max-tokens 5"),
    (["generate", "--top-k", 4097, "x"], "--top-k is 4097, but must be -1 ... 4096"),
    (["generate", "--stop", "x" * 257, "x"], "--stop[0] has 257 bytes, but must have 1 ... 256"),
    (["generate", "--language", "en", "x"], "the model has no language embeddings"),
    (["generate", "--max-seqs", 9, "--max-batch-tokens", 8, "x"], "--max-seqs 9 exceeds --max-batch-tokens 8"),
    (["score", "--stride", 600], "--stride is 600, but must be 1 ... 512"),
    (["score", "--max-context", 513], "--max-context is 513"),
    (["serve", "--port", 0, "--max-model-len", 513], "--max-model-len is 513, accepted are 0 to 512"),
    (["serve", "--threads", 257], "--threads: '257' is not a whole number in [0, 256]"),
])
def test_a_value_that_does_not_go_with_another_or_the_model_is_wrong_usage(arguments, wanted):
    done = run(*arguments, stdin="some text")
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert wanted in done.stderr.splitlines()[-1], done.stderr


def test_an_unknown_instruction_set_is_wrong_usage():
    assert "PKMSERVE_ISA: foo is unknown" in fails(2, "generate", "x", env={"PKMSERVE_ISA": "foo"})


def test_environment_is_read_and_named_in_errors():
    assert "PKMSERVE_STRICT: 'maybe' is not on or off" in fails(2, "serve", env={"PKMSERVE_STRICT": "maybe"})
    line = fails(2, "serve", env={"PKMSERVE_MAX_QUEUE": "0"})
    assert "PKMSERVE_MAX_QUEUE: '0' is not a whole number in [1, 65536]" in line


def test_a_flag_beats_the_environment():
    env = {"PKMSERVE_MODEL": "/nowhere/environment"}
    assert "/nowhere/environment" in fails(1, "inspect", env=env)
    assert "/nowhere/flag" in fails(1, "inspect", "--model", "/nowhere/flag", env=env)


def test_the_environment_of_another_command_is_no_concern():
    ok("help", "inspect", env={"PKMSERVE_PORT": "x"})
    assert "/nowhere" in fails(1, "inspect", "--model", "/nowhere", env={"PKMSERVE_PORT": "x"})


@pytest.mark.parametrize("name", ["PKMSERVE_PORT", "PKMSERVE_ADMIN_PORT"])
def test_where_kubernetes_says_a_service_is_is_no_port_of_ours(name):
    # Of a service called pkmserve, or pkmserve-admin, in each pod of its namespace.
    line = fails(1, "serve", "--host", "nowhere.invalid", env={name: "tcp://10.0.0.7:80"})
    assert "nowhere.invalid" in line


def test_a_variable_that_no_option_reads_is_reported():
    done = run("inspect", "--model", "/nowhere", env={"PKMSERVE_PROT": "1"})
    assert "no option reads the variable PKMSERVE_PROT" in done.stderr


@pytest.mark.parametrize("name", ["PKMSERVE_ISA", "PKMSERVE_CUDA_LIBRARY"])
def test_a_variable_of_the_backends_is_not(name):
    done = run("inspect", "--model", "/nowhere", env={name: ""})
    assert "no option reads" not in done.stderr


def test_help_says_what_deterministic_off_costs():
    text = ok("help", "serve")
    assert re.search(r"--deterministic on\|off .*depend on the requests.*\[on\]$", text, re.M), text
    assert re.search(r"--memory-placement auto\|device\|host\|mmap .*\[auto\]$", text, re.M), text


def test_two_dashes_end_the_options():
    # Were --no-such-flag an option, the exit status would be 2.
    assert "/nowhere" in fails(1, "score", "--model", "/nowhere", "--", "--no-such-flag")
