"""What a screen reader, the keyboard and a narrow window need: names, the order of headings, tables that stay where
they were moved."""

import pytest

from browser import PHONE
from server_harness import eventually
from test_views import opened, score, spans

# What a screen reader calls an element of this role: its label, or else its text.
NAMELESS = """return [...document.querySelectorAll('#score-text [role=option]')]
    .filter((each) => (each.ariaLabel || each.textContent).trim() === '').length"""


def test_tokens_without_ink_have_a_name(browser, server):
    opened(browser, server, "score")
    score(browser, "One  two   three \n\n four é")
    blank = [each for each in spans(browser, "score-text") if each.get_attribute("class").endswith("blank")]
    assert len(blank) >= 2
    assert {each.get_attribute("aria-label") for each in blank} == {"white space", "part of a character"}
    assert browser.run(NAMELESS) == 0


@pytest.mark.parametrize("view", ["write", "score", "memory", "now"])
def test_no_heading_skips_a_level(browser, server, view):
    opened(browser, server, view)
    if view == "now":
        eventually(lambda: browser.find("#now-memory").is_displayed(), "the figures")
    elif view == "memory":
        browser.find("#memory-go").click()
        eventually(lambda: browser.find("#memory-look").is_displayed(), "the text is traced")
        spans(browser, "memory-text")[3].click()
    levels = [int(each.tag_name[1]) for each in browser.all("h1, h2, h3, h4") if each.is_displayed()]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:])), levels


def test_a_wide_table_is_moved_by_keyboard_and_stays_there(browser, server):
    browser.size(*PHONE)
    opened(browser, server, "now")
    eventually(lambda: browser.find("#now-memory .wide").is_displayed(), "the table")
    assert browser.run("""const wide = document.querySelector('#now-memory .wide');
        wide.focus(); wide.scrollLeft = 100;
        return [document.activeElement === wide, wide.scrollLeft, wide.getAttribute('role'), wide.ariaLabel]""") == [
        True, 100, "region", "Memories"]
    begun = browser.run("return document.querySelectorAll('.plot .line')[0].getAttribute('d')")
    eventually(lambda: browser.run("return document.querySelectorAll('.plot .line')[0].getAttribute('d')") != begun,
               "the next figures")
    assert browser.run("""const wide = document.querySelector('#now-memory .wide');
        return [document.activeElement === wide, wide.scrollLeft]""") == [True, 100]


def test_all_that_is_read_is_in_a_landmark(browser, server):
    """Who goes from landmark to landmark misses what stands beside them, such as the card of a token."""
    opened(browser, server, "write")
    assert browser.run("return [...document.body.children].map(e => e.localName).join()") == "header,main"
