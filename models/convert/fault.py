"""What a conversion says when it refuses: one line that names the file, the field, and both values.

Used by every module of the converter; convert.py prints the message and ends with status 1.
"""

import reprlib


class Refused(Exception):
    """The source cannot be converted. The message is for the operator and names the culprit."""


_short = reprlib.Repr()
_short.maxlevel = 2  # a hostile object may hold itself, or double with every level
_short.maxlist = _short.maxtuple = _short.maxdict = 6
_short.maxstring = _short.maxother = 80


def show(value):
    """A value from a file as it may appear in a message: short, whatever the value is."""
    if isinstance(value, bool):
        return str(value).lower()
    return _short.repr(value)


def one_line(text, limit=600):
    """text without line breaks or control characters (names in a file may hold anything)."""
    clean = "".join(c if c.isprintable() else "?" for c in str(text))
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."
