"""What the tests of the trainer share. Those that need PyTorch, SentencePiece or transformers skip where it is
missing; run them with a Python that has it: PYTHON=.../bin/python tests/run.sh build train."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "models" / "train"
sys.path.insert(0, str(TRAIN))


class Parsed(Exception):
    pass


def help_gaps(monkeypatch, main):
    """The options of a command whose help says nothing, or not what holds where they are not given."""
    def parsed(parser, *_):
        raise Parsed(parser)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parsed)
        try:
            main()
        except Parsed as found:
            parser, = found.args
    gaps = []
    for action in parser._actions:
        told = action.help or ""
        default = action.default if action.default not in (None, False, "", argparse.SUPPRESS) else None
        if not told or default is not None and "(" not in told or \
                isinstance(default, float) and f"({default:g}".replace("e-0", "e-") not in told:
            gaps.append(action.dest)
    return gaps
