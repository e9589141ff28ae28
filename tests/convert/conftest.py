"""What the tests of the converter share."""

import pytest

from convert_harness import convert


@pytest.fixture
def refused(tmp_path):
    """refused(source, 'word', ...): converting fails with one line naming the words, no output."""

    def check(source, *words, args=()):
        before = sorted(tmp_path.rglob("*"))
        got = convert(source, "--output", tmp_path / "out" / "model", *args)
        assert got.status == 1, "exit 1 expected, got %r, stderr %r" % (got.status, got.err)
        assert got.out == ""
        assert got.err.count("\n") == 1 and got.err.endswith("\n"), "one line: %r" % got.err
        assert "Traceback" not in got.err and len(got.err) < 700
        for word in words:
            assert word in got.err, "%r expected in %r" % (word, got.err)
        assert "cannot be converted" not in got.err, "not foreseen: %r" % got.err
        assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
        return got.err

    return check
