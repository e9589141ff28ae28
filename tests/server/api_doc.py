"""The field tables of the documents, made from server/api/openapi.json.

    python3 tests/server/api_doc.py --write     writes them anew

In a Markdown file a table stands between <!-- fields: Schema --> and <!-- end -->. A schema's name
may go on with .property, for an object inside it, and with a list of fields in brackets, for some of
them: <!-- fields: ScoreRequest [text, tokens] -->."""

import json
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DOCUMENTS = ["README.md", "server/API.md"]
MARK = re.compile(r"(<!-- fields: ([\w.]+)(?: \[([\w, ]+)\])? -->\n).*?(<!-- end -->)", re.S)


def load():
    return json.load(open(os.path.join(ROOT, "server", "api", "openapi.json")))


def schema_of(document, path):
    name, *inside = path.split(".")
    schema = document["components"]["schemas"][name]
    for each in inside:
        schema = schema["properties"][each]
    return schema


def type_of(schema):
    """A short word for a schema's type; null, which every field may be, is left out."""
    if "enum" in schema:
        return " \\| ".join(json.dumps(v) for v in schema["enum"] if v is not None)
    if "anyOf" in schema:
        words = [type_of(s) for s in schema["anyOf"] if s.get("type") != "null"]
        return " \\| ".join(dict.fromkeys(words))
    types = schema.get("type", "object")
    types = [t for t in (types if isinstance(types, list) else [types]) if t != "null"]
    if types == ["array"]:
        return "[%s]" % type_of(schema["items"])
    return " \\| ".join({"string": "str", "integer": "int", "number": "num", "boolean": "bool"}
                        .get(t, t) for t in types)


def number(value):
    return "{:,}".format(value) if isinstance(value, int) else "%g" % value


def range_of(schema):
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if high is not None and high >= 2 ** 63:
        return "64 bits"
    if high is None:
        return "" if low is None else "from " + number(low)
    ends = ("(" if "exclusiveMinimum" in schema else "[",
            ")" if "exclusiveMaximum" in schema else "]")
    return "%s%s, %s%s" % (ends[0], number(low), number(high), ends[1])


def table(document, path, only=None):
    schema = schema_of(document, path)
    lines = ["| field | type | default | range | |", "|---|---|---|---|---|"]
    for name, field in schema["properties"].items():
        if only is not None and name not in only:
            continue
        required = name in schema.get("required", [])
        default = "required" if required else (
            json.dumps(field["default"]) if "default" in field else "")
        lines.append("| `%s` | %s | %s | %s | %s |" % (
            name, type_of(field), default, range_of(field), field["description"]))
    return "\n".join(lines) + "\n"


def render(document, text):
    def make(match):
        only = [name.strip() for name in match[3].split(",")] if match[3] else None
        return match[1] + table(document, match[2], only) + match[4]

    return MARK.sub(make, text)


def main():
    document = load()
    for name in DOCUMENTS:
        path = os.path.join(ROOT, name)
        text = open(path).read()
        fresh = render(document, text)
        if fresh != text and "--write" in sys.argv[1:]:
            open(path, "w").write(fresh)
        elif fresh != text:
            sys.exit("%s: its field tables are not those of server/api/openapi.json; run "
                     "python3 tests/server/api_doc.py --write" % name)


if __name__ == "__main__":
    main()
