"""What a screen reader, the keyboard and a narrow window need."""

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
