"""What the tests of the trainer share. Those that need PyTorch, SentencePiece or transformers skip where it is
missing; run them with a Python that has it: PYTHON=.../bin/python tests/run.sh build train."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "models" / "train"
sys.path.insert(0, str(TRAIN))
