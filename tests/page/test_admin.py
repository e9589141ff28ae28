"""What the admin port has: overlays, which the page at the main port then offers, and counts of all traffic."""

import json
import os
import struct
import sys

import numpy
import pytest

from server_harness import DEMO, ROOT, eventually
from test_overlays import Admin
from test_views import TEXT, near, opened, trace, written

sys.path.insert(0, os.path.join(ROOT, "tests"))
from browser import Keys  # noqa: E402
from overlay_files import Base  # noqa: E402

ROWS = 4096  # of the overlay


@pytest.fixture(scope="module")
def admin():
    with Admin("--memory-counts", "on") as s:
        memory = s.get("/info").json()["model"]["memories"][0]
        slots = numpy.arange(ROWS) * (memory["slots"] // ROWS)
        rows = numpy.full((ROWS, memory["d_value"]), 0.25, "<f4")
        s.put("other-rows", Base(DEMO).overlay({0: (slots, "F32", rows)}))
        s.ok("/score", {"text": TEXT})
        yield s


def test_a_text_with_an_overlay_beside_the_text_without(browser, admin):
    opened(browser, admin, "memory")
    browser.run("document.querySelector('#memory-input').value = arguments[0]", TEXT)
    assert [each.text for each in browser.all("#compare-overlay option")] == ["none", "other-rows"]
    browser.run("document.querySelector('#compare-overlay').value = 'other-rows'")
    browser.fill("#compare-max", "12")
    browser.find("#compare-go").click()
    eventually(lambda: browser.text("#compare-right-state"), "both texts")
    body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0.8, "seed": 1}
    for side, fields in (("left", {}), ("right", {"overlay": "other-rows"})):
        assert written(browser, "compare-" + side) == admin.ok("/generate", {**body, **fields})["choices"][0]["text"]
    perplexity = admin.ok("/score", {"text": TEXT, "overlay": "other-rows"})["results"][0]["perplexity"]
    state = browser.text("#compare-right-state")
    assert state.startswith("Overlay other-rows, version 1. ") and near(state.split(": ")[1], perplexity)


def test_the_main_port_says_where_the_counts_are(browser, admin):
    opened(browser, admin, "memory")
    trace(browser)
    browser.run("""const select = document.querySelector('#map-of'); select.value = 'all';
        select.dispatchEvent(new Event('change'))""")
    eventually(lambda: "open this page there" in browser.text("#map-state"), "a line says so")


def test_the_main_port_says_where_the_figures_are_without_asking_for_them(browser, admin):
    opened(browser, admin, "now")
    eventually(lambda: "open this page there" in browser.text("#now-state"), "a line says so")
    browser.find("#tab-write").click()
    browser.find("#tab-now").click()
    assert "open this page there" in browser.text("#now-state")
    assert not any(url.endswith("/metrics") for url in browser.requests())


def test_the_admin_port_shows_the_figures(browser, admin):
    browser.open(admin.admin + "/#now")
    eventually(lambda: browser.find("#now-memory").is_displayed() and browser.all(".plot"), "the figures")
    assert browser.text("#served") == "admin port"


def test_the_admin_port_has_the_overlays_and_a_map_of_all_traffic(browser, admin):
    browser.open(admin.admin + "/#memory")
    eventually(lambda: browser.find("#memory-look").is_displayed(), "the map")
    row = browser.text("#memory-overlays tbody tr")
    assert row.startswith("other-rows 1 replace %s rows of memory 0 " % format(ROWS, ","))
    data = admin.ask("GET", "/memory/counts").content
    n, = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8:8 + n])["memories.0.reads"]["data_offsets"]
    reads = struct.unpack("<%dq" % ((end - begin) // 8), data[8 + n + begin:8 + n + end])
    used = [slot for slot, times in enumerate(reads) if times > 0]
    assert browser.text("#map-state").startswith("%s reads of %s slots among %s, in " % tuple(
        format(each, ",") for each in (sum(reads), len(used), len(reads))))
    assert not browser.find("#memory-form").is_displayed() and not browser.find("#memory-token").is_displayed()
    side = round(len(reads) ** 0.5)
    browser.run("document.querySelector('#map').focus()")
    browser.press(*[Keys.ARROW_RIGHT] * (1 + used[0] % side), *[Keys.ARROW_DOWN] * (used[0] // side), Keys.ENTER)
    assert browser.text("#memory-slot h2") == "Slot %d of memory 0" % used[0]
    times = "%d time%s" % (reads[used[0]], "" if reads[used[0]] == 1 else "s")
    assert "All traffic: %s." % times in browser.text("#memory-slot")
