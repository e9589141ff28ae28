"""Renders a Helm chart as far as ours goes, where there is no helm: a part of Go's templates and of Helm's functions.

Known are if, else, with, range, define, include, variables, pipelines, parentheses, and the functions below. Anything
else is an error, so that the chart stays within what is tested. `make check-chart` compares with helm itself if there is one.
"""

import json
import re

import yaml

TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[(),|]|:=|-?\d+(?:\.\d+)?|[$.\w]+)')


class Strict(yaml.SafeLoader):
    """A key that stands twice in a map is an error to Kubernetes' own tools, and not to this library's."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), "a key stands twice: %s\n%s" % (keys, node.start_mark)
        return super().construct_mapping(node, deep)


def split(text):
    """Texts and actions in turn; the trim marks {{- and -}} take white space off the texts."""
    parts = re.split(r"({{-?\s.*?\s-?}}|{{[^-].*?}})", text, flags=re.S)
    for i in range(1, len(parts), 2):
        action = parts[i]
        if action.startswith("{{-"):
            parts[i - 1] = parts[i - 1].rstrip()
        if action.endswith("-}}"):
            parts[i + 1] = parts[i + 1].lstrip()
        parts[i] = re.sub(r"^{{-?\s*|\s*-?}}$", "", action)
    return parts


def parse(parts, at, ends):
    """Nodes up to an action of ends: a text, or (words, body, other body). Returns nodes, that action, its place."""
    nodes = []
    while at < len(parts):
        if at % 2 == 0:
            nodes.append(parts[at])
            at += 1
            continue
        action = parts[at]
        word = action.split()[0]
        if word in ends:
            return nodes, action, at + 1
        at += 1
        if word in ("if", "with", "range", "define"):
            body, end, at = parse(parts, at, ("else", "end"))
            other = []
            if end == "else":
                other, end, at = parse(parts, at, ("end",))
            assert end == "end", action
            nodes.append((action, body, other))
        elif not word.startswith("/*"):
            nodes.append((action, None, None))
    assert not ends, "no end of %s" % (ends,)
    return nodes, None, at


def text_of(value):
    if value is True or value is False:
        return str(value).lower()
    return "" if value is None else str(value)


def to_yaml(value):
    return yaml.safe_dump(value, default_flow_style=False, sort_keys=True).rstrip("\n").removesuffix("\n...")


class Refused(Exception):
    """The chart's own word on values that do not go together."""


def fail(message):
    raise Refused(message)


def merge(base, more):
    if not (isinstance(base, dict) and isinstance(more, dict)):
        return more
    return {**base, **{key: merge(base.get(key), value) for key, value in more.items()}}


FUNCTIONS = {
    "fail": fail,
    "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2])),
    "get": lambda values, key: values.get(key, ""),
    "hasKey": lambda values, key: key in values,
    "omit": lambda values, *keys: {k: v for k, v in values.items() if k not in keys},
    "mergeOverwrite": merge,
    "default": lambda other, value: value or other,
    "ternary": lambda yes, no, which: yes if which else no,
    "eq": lambda a, b: a == b,
    "int": int,
    "toString": text_of,
    "lower": lambda value: value.lower(),
    "quote": lambda value: json.dumps(text_of(value)),
    "upper": lambda value: value.upper(),
    "replace": lambda old, new, value: value.replace(old, new),
    "toYaml": to_yaml,
    "nindent": lambda n, value: "\n" + "\n".join(" " * n + line for line in value.split("\n")),
    "printf": lambda form, *values: form % values,
    "not": lambda value: not value,
    "or": lambda *values: next((v for v in values if v), values[-1]),
    "and": lambda *values: next((v for v in values if not v), values[-1]),
}


class Template:
    def __init__(self, files):
        self.defined = {}
        self.files = {name: parse(split(text), 0, ())[0] for name, text in files.items()}
        for nodes in self.files.values():
            for node in nodes:
                if isinstance(node, tuple) and node[0].startswith("define "):
                    self.defined[json.loads(node[0].split()[1])] = node[1]

    def run(self, nodes, dot, names):
        """names: the variables, $ among them; a block sees those around it."""
        out = []
        for node in nodes:
            if isinstance(node, str):
                out.append(node)
                continue
            action, body, other = node
            word, _, rest = action.partition(" ")
            if word == "define":
                continue
            if word in ("if", "with"):
                value = self.value(rest, dot, names)
                inner = value if word == "with" and value else dot
                out.append(self.run(body if value else other, inner, dict(names)))
            elif word == "range":
                out.append(self.range(rest, body, dot, names))
            elif re.match(r"\$\w+ :=", action):
                name, _, expression = action.partition(" := ")
                names[name] = self.value(expression, dot, names)
            else:
                out.append(text_of(self.value(action, dot, names)))
        return "".join(out)

    def range(self, rest, body, dot, names):
        loop = re.fullmatch(r"(?:(\$\w+), (\$\w+) := )?(.*)", rest)
        values = self.value(loop[3], dot, names)
        pairs = sorted(values.items()) if isinstance(values, dict) else enumerate(values or [])
        return "".join(self.run(body, value, {**names, loop[1]: key, loop[2]: value}) for key, value in pairs)

    def value(self, expression, dot, names):
        tokens = TOKEN.findall(expression)
        assert "".join(tokens) == re.sub(r'\s+(?=(?:[^"]|"(?:[^"\\]|\\.)*")*$)', "", expression), expression
        value = self.pipeline(tokens, dot, names)
        assert not tokens, expression
        return value

    def pipeline(self, tokens, dot, names):
        """Takes tokens from the front, up to the end or the parenthesis that closes this one."""
        values, piped = [], []
        while tokens:
            token = tokens.pop(0)
            if token in ("|", ")"):
                piped = [self.call(values + piped, names)]
                values = []
                if token == ")":
                    return piped[0]
            else:
                values.append(self.pipeline(tokens, dot, names) if token == "(" else self.word(token, dot, names))
        return self.call(values + piped, names)

    def call(self, values, names):
        if values[0] == "include":
            return self.run(self.defined[values[1]], values[2], {"$": names["$"]})
        return values[0](*values[1:]) if callable(values[0]) else values[0]

    def word(self, token, dot, names):
        if token[0] == '"':
            return json.loads(token)
        if token == "include":
            return token
        if token in FUNCTIONS:
            return FUNCTIONS[token]
        if re.fullmatch(r"-?\d+", token):
            return int(token)
        root, *path = token.split(".")
        assert root == "" or root in names, "unknown in the chart: %s" % token
        value = names[root] if root else dot
        for name in path:
            value = value[name] if name else value  # a missing value is an error here, if not in helm
        return value


def without_nulls(values):
    """As helm does it: null takes a value away. The outermost stay, for the chart must not ask for what it has no value of."""
    if not isinstance(values, dict):
        return values
    return {key: without_nulls(value) for key, value in values.items() if value is not None}


def render(folder, values=None, release="pkmserve", namespace="default"):
    """The manifests of a chart, parsed, with values on top of its own."""
    chart = yaml.safe_load((folder / "Chart.yaml").read_text())
    merged = merge(yaml.safe_load((folder / "values.yaml").read_text()), values or {})
    dot = {"Values": {key: without_nulls(value) for key, value in merged.items()},
           "Release": {"Name": release, "Namespace": namespace, "Service": "Helm"},
           "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]}}
    template = Template({p.name: p.read_text() for p in sorted((folder / "templates").iterdir())})
    texts = {name: template.run(nodes, dot, {"$": dot}) for name, nodes in template.files.items()}
    manifests = [m for name, text in texts.items() if name.endswith(".yaml") for m in yaml.load_all(text, Strict) if m]
    return manifests, texts["NOTES.txt"]
