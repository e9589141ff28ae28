"""Reads the JSON files that stand beside weights: bounded, strict, with typed access by field.

The modules that check a family's configuration call load, then ask a Fields for each value; whatever is
not as asked is refused by file, field, what was expected and what was found.
"""

import json
import os

from fault import Refused, show

EPSILON_MIN = 1e-30  # not 0 in fp32, in which the server computes
DIGITS_MAX = 32  # of an integer: Python's reading of longer ones takes quadratic time


def load(path, bytes_max):
    """The object of the file at path; messages call it by its name alone."""
    name = os.path.basename(path)

    def integer(digits):
        if len(digits) > DIGITS_MAX:
            raise Refused("%s: a number of %d digits, the limit is %d"
                          % (name, len(digits), DIGITS_MAX))
        return int(digits)

    def no_number(text):
        raise Refused("%s: %s, which is not JSON" % (name, text))

    def no_twins(pairs):
        fields = {}
        for key, value in pairs:
            if key in fields:
                raise Refused("%s: the key %s twice in one object" % (name, show(key)))
            fields[key] = value
        return fields

    with open(path, "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise Refused("%s: longer than the limit of %d bytes" % (name, bytes_max))
    try:
        root = json.loads(data.decode(), parse_int=integer, parse_constant=no_number,
                          object_pairs_hook=no_twins)
    except (ValueError, RecursionError) as fault:
        raise Refused("%s: not JSON: %s" % (name, fault))
    if not isinstance(root, dict):
        raise Refused("%s: an object expected, got %s" % (name, show(root)))
    return root


class Fields:
    """Typed access to a configuration by names with dots; defaults: {name: value where it is absent}."""

    def __init__(self, root, name, defaults):
        self.root, self.name, self.defaults = root, name, defaults

    def refuse(self, field, text):
        raise Refused("%s: %s: %s" % (self.name, field, text))

    def get(self, field):
        section, path = self.root, ""
        *parts, key = field.split(".")
        for part in parts:
            path += part
            section = section.get(part, {})
            if not isinstance(section, dict):
                self.refuse(path, "an object expected, got %s" % show(section))
            path += "."
        return section.get(key, self.defaults[field])

    def flag(self, field):
        value = self.get(field)
        if not isinstance(value, bool):
            self.refuse(field, "true or false expected, got %s" % show(value))
        return value

    def count(self, field, low, high, why=""):
        value = self.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(field, "an integer %d..%d expected%s, got %s" % (low, high, why, show(value)))
        return value

    def even(self, field, high):
        value = self.count(field, 2, high)
        if value % 2:
            self.refuse(field, "an even number expected, got %d" % value)
        return value

    def number(self, field, fits, due):
        value = self.get(field)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not fits(value):
            self.refuse(field, "%s expected, got %s" % (due, show(value)))
        return float(value)

    def epsilon(self, field):
        """What a norm adds to a variance."""
        return self.number(field, lambda x: EPSILON_MIN <= x <= 1, "a number %g..1" % EPSILON_MIN)

    def choice(self, field, choices):
        value = self.get(field)
        if not isinstance(value, str) or value not in choices:
            self.refuse(field, "one of %s expected, got %s" % (" ".join(choices), show(value)))
        return value
