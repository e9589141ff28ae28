"""Lets the tests of this folder import their fleet, from wherever pytest starts."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
