"""The web page as the server gives it: where, with which headers, and that it asks nobody else. What a
person sees of it is tested in a browser, by tests/page (make check-page)."""

import glob
import os
import re

import pytest
import requests

from server_harness import PATIENCE, ROOT, Server, error_of, free_port
from test_keys import bearer

FILES = {"/ui": "text/html; charset=utf-8", "/ui/page.css": "text/css; charset=utf-8",
         "/ui/page.js": "text/javascript; charset=utf-8", "/ui/icon.svg": "image/svg+xml"}
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SOURCES = sorted(glob.glob(os.path.join(ROOT, "server", "page", "*")))


def get(url, **headers):
    return requests.get(url, headers=headers, timeout=PATIENCE)


def source(name):
    return open(os.path.join(ROOT, "server", "page", name)).read()


def test_browsers_get_the_page_at_the_root_and_others_text(server):
    page = server.get("/ui")
    at_root = get(server.url + "/", **BROWSER)
    assert at_root.content == page.content and at_root.headers["Content-Type"] == FILES["/ui"]
    for accept in ("*/*", "application/json", "text/plain"):
        text = get(server.url + "/", Accept=accept)
        assert text.headers["Content-Type"] == "text/plain; charset=utf-8" and "POST /score" in text.text
        assert "/openapi.json" in text.text  # where every field is
        assert text.headers["Vary"] == at_root.headers["Vary"] == "Accept"
    generated = requests.post(server.url + "/", json={"inputs": "a", "parameters": {"max_new_tokens": 1}},
                              headers=BROWSER, timeout=PATIENCE)
    assert generated.status_code == 200 and "generated_text" in generated.json()[0]


@pytest.mark.parametrize("path", FILES)
def test_files_types_and_headers(server, path):
    answer = server.get(path)
    head = server.session.head(server.url + path)
    assert answer.status_code == head.status_code == 200 and head.content == b""
    assert int(head.headers["Content-Length"]) == len(answer.content) > 100
    assert answer.headers["Content-Type"] == FILES[path]
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert all(policy[name] == "'self'" for name in ("script-src", "style-src", "img-src", "connect-src"))
    assert all(policy[name] == "'none'" for name in ("base-uri", "form-action", "trusted-types"))
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert server.post(path, "{}").status_code == 405


@pytest.mark.parametrize("path", ["/ui/", "/ui/page.html", "/ui/../page.js", "/ui/page.js/", "/uix"])
def test_nothing_else_is_there(server, path):
    session = requests.Session()
    request = requests.Request("GET", server.url).prepare()
    request.url = server.url + path  # as it is, with its dots
    error_of(session.send(request, timeout=PATIENCE), 404, "route_not_found")


def test_the_script_is_all_parts_in_their_order(server):
    order = re.findall(r'EMBED_FILE\("server/page/(\w+\.js)"\)',
                       open(os.path.join(ROOT, "server", "api", "page.c")).read())
    assert sorted(order) == sorted(os.path.basename(p) for p in SOURCES if p.endswith(".js"))
    assert server.get("/ui/page.js").text == "".join(source(name) for name in order)


def test_it_names_no_other_host_and_brings_no_inline_code():
    for path in SOURCES:
        text = open(path).read().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(r"\b(https?|wss?):|[\"'(]//|@import|url\(", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage",
                             text), path
    html = source("page.html")
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! src=)", html)


def test_the_elements_that_the_script_names_are_there():
    ids = re.findall(r'\bid="([\w-]+)"', source("page.html"))
    assert len(ids) == len(set(ids))
    named = set()
    for path in SOURCES:
        if path.endswith(".js"):
            named |= set(re.findall(r'\$\("([\w-]+)"\)', open(path).read()))
    assert len(named) > 40 and named <= set(ids), named - set(ids)
    assert set(re.findall(r'(?:for|aria-controls|aria-labelledby|aria-describedby)="([\w-]+)"',
                          source("page.html"))) <= set(ids)


def test_no_key_is_needed_for_it_at_either_port(tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    admin = free_port()
    with Server("--api-key-file", str(tmp_path / "keys"), "--admin-port", str(admin)) as s:
        main = "http://127.0.0.1:%d" % s.find_port(other_than=admin)
        for url, port in ((main, "main"), ("http://127.0.0.1:%d" % admin, "admin")):
            assert get(url + "/", **BROWSER).status_code == 200
            assert get(url + "/version").headers["X-Port"] == port
            for path, kind in FILES.items():
                assert get(url + path).headers["Content-Type"] == kind
        assert get(main + "/info", **BROWSER).status_code == 401  # what it asks for needs the key
        assert get(main + "/info", **bearer("secret")).status_code == 200


def test_ui_off_removes_it():
    with Server("--ui", "off") as s:
        assert s.get("/version").headers["X-Port"] == "all"
        for path in FILES:
            assert "--ui off" in error_of(s.get(path), 404, "route_not_found")
        at_root = get(s.url + "/", **BROWSER)
        assert at_root.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert "/ui" not in at_root.text and "Vary" not in at_root.headers
