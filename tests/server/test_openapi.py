"""server/api/openapi.json is what the server does: its routes, its fields, their types and bounds, its
answers; and the documents' tables are made from it."""

import json
import os
import re
import subprocess
import sys

import jsonschema
import pytest
import requests

import api_doc
from server_harness import PATIENCE, ROOT, Server

DOCUMENT = api_doc.load()
SCHEMAS = DOCUMENT["components"]["schemas"]
# Other names of a route that the document has once.
ALIASES = {"/ping", "/v1/health", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready"}
# path: the schema of its body
BODIES = {path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
          .rsplit("/", 1)[1]
          for path, operations in DOCUMENT["paths"].items()
          if "requestBody" in operations.get("post", {})}
EXAMPLES = {path: DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            ["example"] for path in BODIES}


@pytest.fixture(scope="module")
def server():
    with Server("--strict") as s:
        yield s


def request(server, method, path, **kw):
    return requests.request(method, server.url + path.replace("{id}", "demo"), timeout=PATIENCE,
                            **kw)


def check_answer(path, method, answer):
    """Status, type and body are documented."""
    responses = DOCUMENT["paths"][path][method]["responses"]
    assert str(answer.status_code) in responses, (path, answer.status_code, answer.text)
    documented = responses[str(answer.status_code)]
    if "$ref" in documented:
        documented = DOCUMENT["components"]["responses"][documented["$ref"].rsplit("/", 1)[1]]
    kind = answer.headers["content-type"].split(";")[0]
    assert kind in documented["content"], (path, kind)
    if kind == "application/json":
        schema = {**documented["content"][kind]["schema"], "components": DOCUMENT["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())


def test_served_as_it_is_written(server):
    answer = server.get("/openapi.json")
    assert answer.status_code == 200 and answer.json() == DOCUMENT
    assert DOCUMENT["info"]["version"] == server.get("/version").json()["version"]


def test_every_route_is_in_it():
    source = open(os.path.join(ROOT, "server", "api", "routes.c")).read()
    rows = re.findall(r'^    \{"(/[^"]*)", ([A-Z_| ]+),', source, re.M)
    routes = {path + ("{id}" if "ROUTE_PREFIX" in flags else "") for path, flags in rows}
    assert len(rows) > 15 and ALIASES <= routes
    assert set(DOCUMENT["paths"]) == routes - ALIASES


@pytest.mark.parametrize("path", sorted(BODIES))
def test_examples_work_and_their_answers_are_documented(server, path):
    answer = request(server, "post", path, json=EXAMPLES[path])
    assert answer.status_code == 200, answer.text
    check_answer(path, "post", answer)
    answer = request(server, "post", path, data=b"{")
    assert answer.status_code != 200
    check_answer(path, "post", answer)


@pytest.mark.parametrize("path", sorted(p for p, o in DOCUMENT["paths"].items() if "get" in o))
def test_answers_of_get_are_documented(server, path):
    check_answer(path, "get", request(server, "get", path))


def fields_of(schema):
    return SCHEMAS[schema]["properties"]


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_field_is_known_to_the_parser(server, path):
    """The server is strict: it refuses fields that it does not read. null means: not given."""
    nulls = {name: None for name in fields_of(BODIES[path]) if name not in EXAMPLES[path]}
    answer = request(server, "post", path, json={**EXAMPLES[path], **nulls})
    assert answer.status_code == 200, answer.text


SOURCES = {"GenerateRequest": "generate/generate_parse generate/generate_read",
           "CompletionRequest": "generate/openai_parse generate/generate_read",
           "TgiRequest": "generate/tgi_parse generate/generate_read",
           "ScoreRequest": "score/score_parse score/score_forms score/score_windows", "LabelRequest": "score/score_labels"}
SHARED = {"input_model": {"model"}, "input_language": {"language", "lang"}, "input_priority": {"priority"},
          "overlay_read": {"overlay"}, "input_memory": {"memory"}, "input_deadline": {"timeout_ms"}, "input_id": {"id", "request_id"}}


@pytest.mark.parametrize("schema", SOURCES)
def test_every_field_of_the_parser_is_in_it(schema):
    """As the sources ask for them: fields_int(fields, "name", "alias", ...), and the shared readers."""
    text = "".join(open(os.path.join(ROOT, "server", name + ".c")).read() for name in SOURCES[schema].split())
    asked = set()
    for name, alias in re.findall(r'fields_(?!has)\w+\(&?\w+,\s+"(\w+)"(?:,\s+"(\w+)")?', text):
        asked |= {name, alias} - {""}
    for reader, names in SHARED.items():
        asked |= names if reader + "(" in text else set()
    asked -= {"n"} if schema == "TgiRequest" else set()  # generate_read has it for the others
    documented = set()
    for fields in (fields_of(schema), fields_of(schema).get("parameters", {}).get("properties", {}),
                   fields_of(schema).get("stream_options", {}).get("properties", {})):
        documented |= set(fields)
    assert len(asked) > 8 and asked <= documented, asked - documented


def wrong_values(field):
    """Values that the field's schema excludes, each by one of its rules."""
    types = field.get("type")
    if types is None:
        return []
    types = types if isinstance(types, list) else [types]
    validator = jsonschema.Draft202012Validator(field)
    values = [True, "text", 1.5, 7, [], {}, ["text"], [1.5], [-1], "no such choice"]
    if "number" in types or "integer" in types:
        for bound, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0),
                            ("exclusiveMaximum", 0)):
            if bound in field and field[bound] < 2 ** 63:
                values.append(field[bound] + step)
    if "array" in types and "maxItems" in field:
        values.append([300] * (field["maxItems"] + 1))
    return [v for v in values if not validator.is_valid(v)]


CASES = [(path, name, value) for path in sorted(BODIES)
         for name, field in fields_of(BODIES[path]).items() for value in wrong_values(field)]


def test_values_outside_of_a_field_are_refused_by_name(server):
    """One test for all: a thousand cases."""
    assert len(CASES) > 300
    session = requests.Session()
    failed = []
    for path, name, value in CASES:
        answer = session.post(server.url + path, json={**EXAMPLES[path], name: value},
                              timeout=PATIENCE)
        named = name in (answer.json().get("error") if "error_type" in answer.json()
                         else answer.json()["error"]["param"] or "") if \
            answer.status_code in (400, 422) else False
        if not named:
            failed.append((path, name, value, answer.status_code, answer.text[:200]))
    assert not failed, "%d of %d: %s" % (len(failed), len(CASES), failed[:5])


def test_values_at_the_bounds_are_taken(server):
    session = requests.Session()
    failed = []
    for path in sorted(BODIES):
        for name, field in fields_of(BODIES[path]).items():
            for bound in ("minimum", "maximum"):
                if bound in field and name not in ("max_tokens", "min_tokens", "n", "best_of",
                                                   "timeout_ms", "max_new_tokens", "n_predict", "bptt", "batch_size",
                                                   "max_completion_tokens"):
                    body = {**EXAMPLES[path], "max_tokens": 1, name: field[bound]} \
                        if path in ("/generate", "/v1/completions") else \
                        {**EXAMPLES[path], name: field[bound]}
                    answer = session.post(server.url + path, json=body, timeout=PATIENCE)
                    if answer.status_code != 200:
                        failed.append((path, name, field[bound], answer.text[:200]))
    assert not failed, failed


def test_tables_of_the_documents_are_up_to_date():
    subprocess.run([sys.executable, os.path.join(ROOT, "tests", "server", "api_doc.py")],
                   check=True)


def test_documents_have_the_tables_of_every_request():
    text = "".join(open(os.path.join(ROOT, name)).read() for name in api_doc.DOCUMENTS)
    for schema in BODIES.values():
        assert "<!-- fields: %s" % schema in text, schema
