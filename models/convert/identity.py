#!/usr/bin/env python3
"""Writes model.sha256 into a model directory: what its files are, and what the model computes.

    python3 models/convert/identity.py DIR [--program PROGRAM]

The file has the SHA-256 of every file that the server reads, in the form of sha256sum, which can check it;
and on lines with a #, which sha256sum passes over, a probe: token ids, the log-probability of each next
one in fp32, and how far a server may be from those when it computes in f32, bf16 or int8. The
server compares the probe whenever it starts, and the files with --check full.

The probe is computed by PROGRAM, pkmserve itself, as soon as a model is made: later it tells whether
weights, kernels or a device have changed. The tolerances are what bf16 and int8 change now, times 4.
Without --program it is $PKMSERVE, build/pkmserve beside these sources, or pkmserve of the PATH; with
`--program none`, or where there is none, the file has no probe.
The trainer's export.py computes the log-probabilities by PyTorch instead.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys

import json_file
from fault import Refused

NAME = "model.sha256"
READ = {"config.json", "generation_config.json", "model.safetensors.index.json", "vocab.txt", "codes",
        "tokenizer.model", "tokenizer.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe"}
CONFIG_BYTES_MAX = 1 << 20
TOKENS = 40
MARGIN = 4  # between what is measured here and what another device may round otherwise
LEAST = {"f32": 1e-3, "bf16": 0.02, "int8": 0.05}
UNMEASURED = {"f32": 0.01, "bf16": 0.5, "int8": 1.0}
WRONG = 0.05  # two programs that compute the same in fp32 are nearer


def file_names(directory):
    """Those that the server reads."""
    return sorted(name for name in os.listdir(directory)
                  if name in READ or name.endswith(".safetensors"))


def file_sum(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def probe_tokens(directory):
    """Any fixed spread over the vocabulary serves. [] where a text of two tokens does not fit."""
    config = json_file.Fields(json_file.load(os.path.join(directory, "config.json"), CONFIG_BYTES_MAX), "config.json",
                              {"max_position": TOKENS, "vocab_size": None})
    n = min(TOKENS, config.count("max_position", 1, 2**31 - 1))
    n_vocab = config.count("vocab_size", 1, 2**31 - 1)
    return [(i * i + 1) * 2654435761 % 2**32 % n_vocab for i in range(n)] if n > 1 else []


def find_program(program=None):
    """The program that computes probes, or None."""
    if program is not None:
        return None if program == "none" else program
    here = os.path.dirname(os.path.realpath(__file__))
    beside = [os.path.join(here, *up, "pkmserve") for up in (["..", "..", "build"], ["..", "..", "..", "..", "bin"])]
    found = [path for path in beside if os.access(path, os.X_OK)]  # in the repository, or as installed
    return os.environ.get("PKMSERVE") or (found[0] if found else shutil.which("pkmserve"))


def computed(program, directory, tokens, dtype):
    """-> log-probabilities of all tokens but the first, or None; and what the program said."""
    command = [program, "score", "--model", directory, "--device", "cpu", "--dtype", dtype,
               "--memory-placement", "device", "--max-seqs", "1", "--jsonl", "-"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PKMSERVE_")}
    request = json.dumps({"tokens": tokens, "add_bos": False, "logprobs": 0})
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            return None, (done.stderr.strip().splitlines() or ["%s: status %d" % (program, done.returncode)])[-1]
        told = json.loads(done.stdout)["results"][0]["tokens"][1:]
        impossible = [token["id"] for token in told if token.get("impossible")]
        if impossible:
            return None, "the model holds token %d, which the probe has, for impossible" % impossible[0]
        found = [float(token["logprob"]) for token in told]
    except OSError as fault:
        return None, "%s: %s" % (program, fault.strerror)
    except (ValueError, LookupError, TypeError, AttributeError):  # another program, or another version's answer
        found = []
    if len(found) != len(tokens) - 1:
        return None, "%s: %d log-probabilities expected in what it writes, got %d" % (
            program, len(tokens) - 1, len(found))
    return found, None


def farthest(some, others):
    return max(abs(a - b) for a, b in zip(some, others))


def round_up(value):
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float("%.2g" % (math.ceil(value / unit - 1e-9) * unit))


def tolerances(program, directory, tokens, logprobs):
    """{dtype: tolerance}, of those that the program computes the model in."""
    if program is None:
        return UNMEASURED
    found = {}
    for dtype in LEAST:
        got, _ = computed(program, directory, tokens, dtype)
        if got is not None:
            found[dtype] = round_up(max(LEAST[dtype], MARGIN * farthest(got, logprobs)))
    return found


def probe_lines(program, directory, tokens, logprobs):
    """-> lines, and why there are none. logprobs: of another program, or None."""
    if not tokens:
        return [], "a text of two tokens does not fit"
    if logprobs is None and program is None:
        return [], "pkmserve was not found"
    if program is not None:
        own, why = computed(program, directory, tokens, "f32")
        if own is None:
            return [], why
        if logprobs is not None and farthest(own, logprobs) > WRONG:
            return [], "pkmserve computes log-probabilities that are off by up to %.3g" % farthest(own, logprobs)
        logprobs = own if logprobs is None else logprobs
    lines = ["# probe tokens " + " ".join(map(str, tokens)),
             "# probe logprobs " + " ".join("%.7g" % min(value, 0) for value in logprobs)]
    found = tolerances(program, directory, tokens, logprobs)
    return lines + ["# probe tolerance %s %g" % (dtype, found[dtype]) for dtype in found], None


def content(directory, program, logprobs=None):
    """-> the file's bytes, and why it has no probe or None. logprobs(tokens): of PyTorch."""
    tokens = probe_tokens(directory)
    lines = ["# SHA-256 of this model's files, and what it computes: written by models/convert/identity.py"]
    lines += ["%s  %s" % (file_sum(os.path.join(directory, name)), name) for name in file_names(directory)]
    more, why = probe_lines(program, directory, tokens,
                            logprobs(tokens) if logprobs is not None and tokens else None)
    return "".join(line + "\n" for line in lines + more).encode(), why


def write(directory, program, logprobs=None):
    """Writes the file anew. -> why it has no probe, or None"""
    path = os.path.join(directory, NAME)
    probe_tokens(directory)  # a config.json that is refused takes no file with it
    if os.path.lexists(path):
        os.remove(path)  # the program would hold the model against it
    text, why = content(directory, program, logprobs)
    part = path + ".part"  # half of the file would be a refusal at the program's next start
    with open(part, "wb") as file:
        file.write(text)
    os.replace(part, path)
    return why


def main(argv):
    parser = argparse.ArgumentParser(prog="identity.py", description="Writes model.sha256 into a model directory.")
    parser.add_argument("directory", metavar="DIR", help="a model directory")
    parser.add_argument("--program", help="pkmserve, which computes the probe; none: without a probe")
    args = parser.parse_args(argv)
    try:
        why = write(args.directory, find_program(args.program))
    except (OSError, Refused) as fault:
        print("identity: %s: %s" % (args.directory, fault), file=sys.stderr)
        return 1
    if why is not None:
        print("identity: %s: no probe: %s" % (args.directory, why), file=sys.stderr)
    return 0 if why is None or args.program == "none" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
