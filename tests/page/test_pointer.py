"""What is done by pointer, and a table larger than the map: its cells are several slots."""

import os
import subprocess
import sys

from selenium.webdriver.common.action_chains import ActionChains

from server_harness import DEMO, ROOT, UNBOUNDED, Server, eventually
from test_troubles import trouble
from test_views import TEXT, opened, score, slots_of, spans, trace, write, written

sys.path.insert(0, os.path.join(ROOT, "tests"))
from broken_model import without_numbers_at  # noqa: E402

MAKE_MODEL = os.path.join(ROOT, os.environ.get("B", "build"), "tests", "bench", "make_model")


def at(browser, css, x, y):
    """The pointer, at a place from 0 to 1 in each direction."""
    box = browser.run("const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.width, b.height]", css)
    element = browser.find(css)
    browser.run("arguments[0].scrollIntoView({block: 'center'})", element)
    return ActionChains(browser.driver).move_to_element_with_offset(element, (x - 0.5) * box[0], (y - 0.5) * box[1])


def test_the_map_follows_the_pointer(browser, server):
    opened(browser, server, "memory")
    trace(browser)
    side = round(server.get("/info").json()["model"]["memories"][0]["slots"] ** 0.5)
    rows, _ = slots_of(server, TEXT)
    reads = [slot for row in rows for head in row for slot, _ in head]
    slot = max(set(reads), key=reads.count)
    place = ((slot % side + 0.5) / side, (slot // side + 0.5) / side)
    at(browser, "#map", *place).perform()
    shown = browser.text("#map-state")
    column, row = (int(shown.split()[1][:-1]) % side - slot % side, int(shown.split()[1][:-1]) // side - slot // side)
    assert abs(column) <= 1 and abs(row) <= 1, shown  # the pointer stands on whole pixels
    at(browser, "#map", *place).click().perform()
    chosen = browser.text("#memory-slot h2").split()[1]
    assert shown.startswith("Slot %s: " % chosen)
    n = reads.count(int(chosen))
    assert shown.endswith("not read." if n == 0 else "read 1 time." if n == 1 else "read %d times." % n)


def test_a_table_larger_than_the_map(browser, tmp_path):
    """512 keys along a side and 256 cells: each is four slots, and stands for the one that was read most."""
    subprocess.run([MAKE_MODEL, tmp_path / "large", "--layers", "2", "--width", "32", "--heads", "2", "--ff", "32", "--vocab",
                    "300", "--positions", "64", "--memory-layer", "1", "--keys", "512", "--key-width", "16", "--memory-heads", "1",
                    "--k", "8"], check=True, stdout=subprocess.DEVNULL)
    ids = list(range(5, 45))
    with Server(model=str(tmp_path / "large")) as s:
        opened(browser, s, "memory")
        trace(browser, " ".join(map(str, ids)))
        block = s.ok("/score", {"tokens": ids, "memory": "tokens"})["results"][0]["memory"]["layers"][0]["tokens"]
        reads = [slot for token in block for head in token for slot in head["slots"]]
        assert browser.text("#map-state") == "%d reads of %d slots among 262,144. Each cell is several slots." % (
            len(reads), len(set(reads)))
        cells = {}
        for slot in reads:
            cells.setdefault((slot % 512 // 2, slot // 512 // 2), []).append(slot)
        (column, row), inside = max(cells.items(), key=lambda item: len(item[1]))
        place = ((column + 0.5) / 256, (row + 0.5) / 256)
        at(browser, "#map", *place).perform()
        shown = browser.text("#map-state")
        at(browser, "#map", *place).click().perform()
        chosen = int(browser.text("#memory-slot h2").split()[1])
        near = (chosen % 512 // 2, chosen // 512 // 2)
        assert near in cells and abs(near[0] - column) <= 1 and abs(near[1] - row) <= 1
        inside = cells[near]
        assert inside.count(chosen) == max(map(inside.count, inside))
        assert shown.startswith("Around slot %d: read %d time" % (chosen, len(inside)))


def test_the_card_of_a_token_is_below_it_or_above_where_there_is_no_room(browser, server):
    opened(browser, server, "score")
    score(browser, TEXT)
    place = """
        const [token, last] = [document.querySelector("#score-text .t"), [...document.querySelectorAll("#score-text .t")].at(-1)];
        const chosen = arguments[0] ? last : token;
        window.scrollBy(0, chosen.getBoundingClientRect()[arguments[1]] - arguments[2]);
        chosen.blur();
        chosen.focus({ preventScroll: true });
        const [card, box] = [document.querySelector("#card").getBoundingClientRect(), chosen.getBoundingClientRect()];
        const inside = card.left >= 0 && card.right <= document.documentElement.clientWidth;
        return [Math.round(card.top - box.bottom), Math.round(box.top - card.bottom), inside];"""
    browser.run("document.body.style.padding = '2000px 0'")  # room to scroll
    height = browser.run("return window.innerHeight")
    for last in (False, True):
        below, _, inside = browser.run(place, last, "top", 20)
        assert below == 8 and inside, "at the window's top"
        below, _, inside = browser.run(place, last, "top", height // 3)
        assert below == 8 and inside, "with room on both sides"
        _, above, inside = browser.run(place, last, "bottom", height - 5)
        assert above == 8 and inside, "at the window's bottom"


def test_the_strip_of_surprise_leads_to_the_text(browser, server):
    opened(browser, server, "score")
    score(browser, TEXT)
    n = len(spans(browser, "score-text"))
    at(browser, "#score-strip svg", 0.999, 0.5).click().perform()
    assert browser.focused().text == spans(browser, "score-text")[n - 1].text
    at(browser, "#score-strip svg", 0.001, 0.5).click().perform()
    assert browser.focused().text == spans(browser, "score-text")[0].text


def test_a_text_that_was_written_is_traced_whole(browser, server):
    opened(browser, server, "write")
    browser.fill("#write-prompt", "Once upon a time")
    write(browser, max=6, seed=3)
    whole = written(browser, "write-text")
    browser.find("#write-to-memory").click()
    assert browser.find("#view-memory").is_displayed()
    assert browser.find("#memory-input").get_attribute("value") == whole


def test_a_button_stops_the_text_and_the_work(browser):
    with Server(model=UNBOUNDED) as s:
        opened(browser, s, "write")
        browser.fill("#write-max", "100000")
        browser.find("#write-go").click()
        eventually(lambda: len(spans(browser, "write-text")) > 3, "some text")
        browser.find("#write-stop").click()
        eventually(lambda: s.metric("num_requests_running") == 0, "the server does not go on")
        assert not browser.find("#trouble").is_displayed() and browser.find("#write-go").is_enabled()


def test_a_text_whose_numbers_end_is_shown_up_to_there(browser, tmp_path):
    model = without_numbers_at(40, DEMO, tmp_path / "model")
    with Server(model=str(model)) as s:
        opened(browser, s, "write")
        browser.fill("#write-prompt", "Once")
        browser.fill("#write-max", "100")
        browser.find("#write-go").click()
        said = trouble(browser)
        assert "The server failed while it was writing." in said and "no number" in said
        assert len(spans(browser, "write-text")) > 20 and browser.find("#write-go").is_enabled()
