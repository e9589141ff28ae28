"""The lines for Spark in docker/batch/README.md: mapInPandas gives a function iterators of pandas frames."""

import json
import os
import pathlib
import re
import sys

import pandas as pd
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "models" / "python"), str(ROOT / "tests" / "server")]
from server_harness import Server  # noqa: E402


class Frames:
    """What the lines use of a Spark session, its reader, a data frame and its writer."""

    def __init__(self, *frames):
        self.frames = frames
        self.read = self.write = self

    def parquet(self, name):
        return self

    def mapInPandas(self, function, schema):  # noqa: N802  Spark's name
        self.rows = pd.concat(function(iter(self.frames)))
        names = [column.split()[0] for column in schema.split(", ")]
        assert list(self.rows.columns) == names
        return self


@pytest.mark.skipif("PKMSERVE" not in os.environ, reason="run by make check-ray")
def test_the_lines_give_a_row_for_each_document():
    text = (ROOT / "docker" / "batch" / "README.md").read_text()
    lines, = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    frames = [pd.DataFrame({"id": [str(n) for n in part], "text": ["Word %d." % n for n in part]})
              for part in (range(40), range(40, 45))]
    spark = Frames(*frames)
    with Server() as server:
        exec(lines.replace("http://pkmserve", server.url), {"spark": spark})
        told = json.loads(server.post("/score", {"text": "Word 44."}).text)["results"][0]
    assert list(spark.rows["id"]) == [str(n) for n in range(45)]
    assert spark.rows["perplexity"].iloc[44] == told["perplexity"]
