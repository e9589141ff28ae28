"""The four views as a person uses them, by pointer and by keyboard alone. What is shown is compared with what
the server says, so that it holds for any model."""

import base64
import json
import re
import shutil
import struct

import pytest

from browser import PHONE, Keys
from server_harness import Server, eventually

TEXT = "The old cat sat by the door. He wanted to play in the garden, but the rain did not stop."


def opened(browser, server, view):
    browser.open(server.url + "/#" + view)
    eventually(lambda: browser.text("#served") != "", "the page knows what is served")


def number(text):
    return float(text.replace(",", "").split()[0])


def near(shown, value):
    """Equal in the digits that are shown."""
    return abs(number(shown) - value) <= 0.006 * abs(value) + 1e-9


def spans(browser, where):
    return browser.all("#%s .t" % where)


def written(browser, where):
    """The text that is shown, without the signs for line ends and for tokens without characters."""
    shown = browser.run("return document.querySelector(arguments[0]).textContent", "#" + where)
    return shown.replace("⏎", "").replace("·", "")


def write(browser, **fields):
    for name, value in fields.items():
        browser.fill("#write-" + name.replace("_", "-"), str(value))
    browser.find("#write-go").click()
    eventually(lambda: "tokens/s" in browser.text("#write-state"), "the text is written")


def score(browser, text):
    browser.run("document.querySelector('#score-input').value = arguments[0]", text)
    browser.find("#score-go").click()
    eventually(lambda: browser.find("#score-go").is_enabled() and spans(browser, "score-text"), "the text is scored")


def trace(browser, text=TEXT):
    browser.run("document.querySelector('#memory-input').value = arguments[0]", text)
    browser.find("#memory-go").click()
    eventually(lambda: browser.find("#memory-look").is_displayed(), "the text is traced")


def slots_of(server, text):
    """[position][head] of memory 0: [(slot, weight)], the largest weight first; and what comes before the text."""
    result = server.ok("/score", {"text": text, "memory": "slots", "logprobs": 0})["results"][0]
    block = result["memory"]["slots"][0]
    n = len(block["memories"]) * block["heads"] * block["knn"]
    lists = [struct.unpack("<%d%s" % (block["n_position"] * n, kind), base64.b64decode(block[name]))
             for name, kind in (("indices", "i"), ("weights", "f"))]
    rows = []
    for p in range(block["n_position"]):
        heads = []
        for h in range(block["heads"]):
            at = p * n + h * block["knn"]
            pairs = zip(lists[0][at:at + block["knn"]], lists[1][at:at + block["knn"]])
            heads.append(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
        rows.append(heads)
    return rows, block["n_position"] - len(result["tokens"])


# ---- the page as a whole ---------------------------------------------------------------------


def test_it_says_what_is_served(browser, server):
    opened(browser, server, "write")
    info = server.get("/info").json()
    assert browser.text("#served").startswith(info["model_id"])
    assert "%s slots" % format(info["model"]["memories"][0]["slots"], ",") in browser.text("#served")
    assert browser.text("#state") == "pkmserve " + info["version"]
    browser.open(server.url + "/ui#score")
    assert browser.find("#view-score").is_displayed() and not browser.find("#view-write").is_displayed()


@pytest.mark.parametrize("scheme, is_dark", [("light", False), ("dark", True)])
def test_light_and_dark(browser, server, scheme, is_dark):
    browser.scheme(scheme)
    opened(browser, server, "write")
    for css, what in (("html", "backgroundColor"), ("textarea", "backgroundColor")):
        colour = browser.run("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", css, what)
        assert (int(colour[4:].split(",")[0]) < 128) == is_dark, (css, colour)


@pytest.mark.parametrize("view", ["write", "score", "memory", "now"])
def test_a_phone_shows_all_without_moving_sideways(browser, server, view):
    browser.size(*PHONE)
    opened(browser, server, view)
    if view != "now":
        browser.find("#%s-go" % view).click()
        eventually(lambda: len(spans(browser, view + "-text")) > 5, "the text")
    else:
        eventually(lambda: browser.all(".plot"), "the plots")
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
    # A box that is a pixel too low shows a scrollbar, where the system draws them.
    assert browser.run("""return [...document.querySelectorAll("*")].filter(
        (e) => /auto|scroll/.test(getComputedStyle(e).overflowY) && e.scrollHeight > e.clientHeight &&
               e.scrollHeight < e.clientHeight + 8).map((e) => e.tagName + "." + e.className)""") == []
    if view == "memory":
        spans(browser, "memory-text")[3].click()
        assert browser.find("#memory-token .slot").is_displayed()


def test_tabs_by_keyboard_and_by_address(browser, server):
    opened(browser, server, "write")
    browser.find("#tab-write").send_keys(Keys.ARROW_RIGHT)
    assert browser.find("#view-score").is_displayed() and browser.focused().get_attribute("id") == "tab-score"
    browser.press(Keys.END)
    assert browser.find("#view-now").is_displayed()
    browser.press(Keys.ARROW_RIGHT)
    assert browser.find("#view-write").is_displayed()
    assert browser.find("#tab-write").get_attribute("aria-selected") == "true"
    browser.driver.back()
    assert browser.find("#view-now").is_displayed()


# ---- Write -----------------------------------------------------------------------------------


def test_write_streams_a_text_coloured_by_surprise(browser, server):
    opened(browser, server, "write")
    write(browser, prompt="The old man", max=24, seed=5, temperature=0.9)
    body = {"prompt": "The old man", "max_tokens": 24, "seed": 5, "temperature": 0.9, "logprobs": 5}
    choice = server.ok("/generate", body)["choices"][0]
    assert written(browser, "write-text") == "The old man" + choice["text"]
    made = spans(browser, "write-text")[1:]
    assert len(made) == len(choice["logprobs"])
    for span, token in zip(made, choice["logprobs"]):
        bits = -token["logprob"] / 0.6931471805599453
        assert "h%d" % min(8, int(bits / 1.5)) in span.get_attribute("class").split()
    assert browser.find("#write-state .legend").is_displayed() and "seed 5" in browser.text("#write-state")


def test_write_tells_about_the_token_under_the_pointer(browser, server):
    opened(browser, server, "write")
    write(browser, prompt="The old man", max=8, seed=5)
    body = {"prompt": "The old man", "max_tokens": 8, "seed": 5, "logprobs": 5}
    token = server.ok("/generate", body)["choices"][0]["logprobs"][3]
    browser.run("""document.querySelectorAll('#write-text .t')[4].dispatchEvent(
        new PointerEvent('pointerover', {bubbles: true}))""")
    card = browser.text("#card")
    assert "id %d" % token["id"] in card and "Probability" in card
    assert "%s of %s" % (format(token["rank"], ","), format(server.get("/info").json()["model"]["n_vocab"], ",")) in card
    assert len(browser.all("#card li")) == 5
    browser.run("document.querySelector('#write-text').dispatchEvent(new PointerEvent('pointerleave'))")
    assert not browser.find("#card").is_displayed()


def test_write_by_keyboard_alone(browser, server):
    opened(browser, server, "write")
    browser.find("#tab-write").send_keys(Keys.TAB)
    assert browser.focused().get_attribute("id") == "write-prompt"
    browser.press(Keys.CONTROL + "a")
    browser.press("Once")
    browser.press(Keys.CONTROL, Keys.ENTER)
    eventually(lambda: "tokens/s" in browser.text("#write-state"), "the text is written")
    browser.press(Keys.TAB)  # to Write
    browser.press(Keys.TAB)  # to the first token, since Stop has nothing to stop
    assert browser.focused().text == "Once"
    browser.press(Keys.ARROW_RIGHT)
    assert browser.find("#card").is_displayed() and "Probability" in browser.text("#card")
    assert browser.focused().get_attribute("aria-describedby") == "card"
    top = browser.focused().location["y"]
    browser.press(Keys.ARROW_DOWN)
    assert browser.focused().location["y"] > top
    browser.press(Keys.END)
    assert browser.focused() == spans(browser, "write-text")[-1]
    browser.press(Keys.ESCAPE)
    assert not browser.find("#card").is_displayed()


def test_write_takes_its_fields_and_goes_on(browser, server):
    opened(browser, server, "write")
    seed = 2 ** 64 - 59  # more than a number of JavaScript holds
    write(browser, prompt="The old man", max=6, seed=seed, top_k=1)
    first = written(browser, "write-text")
    greedy = server.ok("/generate", {"prompt": "The old man", "max_tokens": 6, "temperature": 0})
    assert first == "The old man" + greedy["choices"][0]["text"]
    assert "seed %d" % seed in browser.text("#write-state")
    browser.find("#write-on").click()
    eventually(lambda: written(browser, "write-text").startswith(first) and "tokens/s" in browser.text("#write-state")
               and len(written(browser, "write-text")) > len(first), "it goes on")
    browser.fill("#write-seed", "seven")
    browser.find("#write-go").click()
    assert "The seed is not a number" in browser.text("#trouble")


def test_what_is_typed_and_written_is_text_and_never_html(browser, server):
    opened(browser, server, "write")
    evil = '<img src=x onerror="document.title=1"><b>bold</b> & \u2603 \U00010348'
    browser.run("document.querySelector('#write-prompt').value = arguments[0]", evil)
    write(browser, max=4)
    assert written(browser, "write-text").startswith(evil)
    assert browser.all("#write-text img, #write-text b") == []
    browser.find("#write-to-score").click()
    eventually(lambda: spans(browser, "score-text"), "it is scored")
    assert written(browser, "score-text").replace("·", "").startswith(evil)
    assert browser.all("#score-text img, #score-text b") == [] and browser.driver.title == "pkmserve"


# ---- Score -----------------------------------------------------------------------------------


def test_score_shows_the_figures_and_a_map_of_surprise(browser, server):
    opened(browser, server, "score")
    score(browser, TEXT)
    result = server.ok("/score", {"text": TEXT, "logprobs": 0})["results"][0]
    shown = {each.find_element("css selector", "dt").text: each.find_element("css selector", "dd").text
             for each in browser.all("#score-figures > div")}
    assert near(shown["Perplexity"], result["perplexity"]) and near(shown["Bits per byte"], result["bits_per_byte"])
    assert near(shown["Bits per token"], result["bits_per_token"])
    assert shown["Tokens"] == str(result["n_tokens"]) and shown["Unknown"] == "0"
    assert written(browser, "score-text") == TEXT
    heat = [[c for c in span.get_attribute("class").split() if c[0] == "h"] for span in spans(browser, "score-text")]
    assert heat == [["h%d" % min(8, int(-t["logprob"] / 0.6931471805599453 / 1.5))] for t in result["tokens"]]
    assert browser.find("#score-strip svg").is_displayed()


def test_score_by_keyboard_alone(browser, server):
    opened(browser, server, "score")
    browser.find("#tab-score").send_keys(Keys.TAB)
    browser.press(Keys.CONTROL + "a")
    browser.press("A small text.")
    browser.press(Keys.CONTROL, Keys.ENTER)
    eventually(lambda: spans(browser, "score-text"), "it is scored")
    for _ in range(3):  # Score, the window's field, the first token
        browser.press(Keys.TAB)
    browser.press(Keys.ARROW_RIGHT)
    assert "Entropy here" in browser.text("#card")


def test_score_of_many_windows_says_so(browser, server):
    opened(browser, server, "score")
    browser.fill("#score-stride", "64")
    text = TEXT * 30
    score(browser, text)
    windows = server.ok("/score", {"text": text, "stride": 64})["results"][0]["windows"]
    assert "%d windows of %d positions" % (windows["count"], windows["max_context"]) in browser.text("#score-state")
    assert written(browser, "score-text") == text


def test_unknown_tokens_are_marked(browser, golden):
    with Server(model=golden("xlm/pkm12-2mem")) as s:
        opened(browser, s, "score")
        score(browser, "ka zebra fe")
        result = s.ok("/score", {"text": "ka zebra fe", "logprobs": 0})["results"][0]
        unknown = [t["id"] == s.get("/info").json()["model"]["unk_token_id"] for t in result["tokens"]]
        assert result["n_unk"] == sum(unknown) > 0
        assert ["unknown" in span.get_attribute("class").split() for span in spans(browser, "score-text")] == unknown
        assert "wavy" in browser.text("#score-state")


def test_two_thousand_tokens_can_be_walked(browser, server):
    opened(browser, server, "score")
    score(browser, (TEXT + " ") * 90)
    assert len(spans(browser, "score-text")) > 1800
    spans(browser, "score-text")[0].click()
    for _ in range(5):
        browser.press(Keys.ARROW_DOWN)
    assert browser.find("#card").is_displayed()
    browser.press(Keys.END)
    assert browser.run("const box = document.activeElement.getBoundingClientRect();"
                       "return box.top >= 0 && box.bottom <= innerHeight")


# ---- Memory ----------------------------------------------------------------------------------


def test_a_token_shows_the_slots_that_it_read(browser, server):
    opened(browser, server, "memory")
    trace(browser)
    rows, before = slots_of(server, TEXT)
    assert len(spans(browser, "memory-text")) == len(rows)
    spans(browser, "memory-text")[before + 4].click()
    for h, head in enumerate(browser.all("#memory-token .head")):
        shown = [tuple(each.text.split()) for each in head.find_elements("css selector", ".slot")]
        assert shown == [(str(slot), "%.2f" % weight) for slot, weight in rows[before + 4][h][:6]]
    browser.find("#memory-token input").click()
    assert len(browser.all("#memory-token .head:first-child .slot")) == len(rows[0][0])


def test_a_text_of_more_tokens_than_are_shown(browser, server):
    opened(browser, server, "memory")
    text = "The old king of the sea was " * 3500 + "In 1912 Paris fell . Zyx qwv " * 400
    browser.run("document.querySelector('#memory-input').value = arguments[0]", text)
    browser.find("#memory-go").click()
    eventually(lambda: browser.find("#memory-slot").is_displayed(), "a slot is chosen")
    assert "its first 20,000 tokens are shown" in browser.text("#memory-state")
    assert not browser.find("#trouble").is_displayed()
    browser.run("memoryText.focus(arguments[0]); memoryText.choose(arguments[0])", 25000)
    assert browser.find("#memory-token .slot").is_displayed()


def test_a_slot_shows_where_else_it_was_read(browser, server):
    opened(browser, server, "memory")
    trace(browser)
    rows, _ = slots_of(server, TEXT)
    m, slot = 0, int(browser.text("#memory-token .slot.chosen .n"))  # the page begins with a slot read twice
    places = [(p, h) for p, row in enumerate(rows) for h, head in enumerate(row) if slot in dict(head)]
    assert "Slot %d of memory %d" % (slot, m) in browser.text("#memory-slot")
    assert "Read %d times in this text, at %d tokens" % (len(places), len({p for p, _ in places})) in browser.text("#memory-slot")
    marked = [i for i, span in enumerate(spans(browser, "memory-text"))
              if any(c[0] == "r" and c[1:].isdigit() for c in span.get_attribute("class").split())]
    assert marked == sorted({p for p, _ in places}) and len(marked) >= 2
    texts = browser.run("return memoryNow.tokens.map((token) => token.text)")
    listed = sorted(each.text.split() for each in browser.all("#memory-slot .place .context"))
    assert listed == sorted("".join(texts[max(0, p - 4):p + 5]).split() for p, _ in places)  # with the words around
    other = next(i for i, each in enumerate(browser.all("#memory-token .slot")) if each.text.split()[0] != str(slot))
    wanted = browser.all("#memory-token .slot")[other].text.split()[0]
    name = browser.all("#memory-token .slot")[other].get_attribute("aria-label")
    assert re.fullmatch(r"slot %s of memory 0, weight \d\.\d{3}" % wanted, name)
    browser.all("#memory-token .slot")[other].click()
    assert browser.text("#memory-slot h2") == "Slot %s of memory 0" % wanted
    browser.find("#memory-slot .place").click()
    assert browser.text("#memory-token .slot.chosen .n") == wanted


def test_the_map_shows_the_table_and_leads_to_slots(browser, server):
    opened(browser, server, "memory")
    trace(browser)
    rows, _ = slots_of(server, TEXT)
    reads = [slot for row in rows for head in row for slot, _ in head]
    total = server.get("/info").json()["model"]["memories"][0]["slots"]
    assert browser.text("#map-state") == "%s reads of %s slots among %s." % tuple(
        format(n, ",") for n in (len(reads), len(set(reads)), total))
    assert browser.run("""const pixels = document.querySelector('#map').getContext('2d').getImageData(0, 0, 512, 512).data;
        return new Set(new Uint32Array(pixels.buffer)).size""") > 2
    side = round(total ** 0.5)
    browser.run("document.querySelector('#map').focus()")
    browser.press(Keys.ARROW_RIGHT)  # to slot 0
    browser.press(Keys.ARROW_RIGHT)
    browser.press(Keys.ARROW_DOWN)
    assert browser.text("#map-state").startswith("Slot %d: " % (side + 1))
    browser.press(Keys.ENTER)
    assert browser.text("#memory-slot h2") == "Slot %d of memory 0" % (side + 1)


def test_what_this_port_does_not_tell_is_said_in_a_line(browser, server):
    opened(browser, server, "memory")
    trace(browser)
    before = browser.text("#map-state")
    browser.run("""const select = document.querySelector('#map-of'); select.value = 'all';
        select.dispatchEvent(new Event('change'))""")
    eventually(lambda: browser.text("#map-state") != before, "why there is no map of all traffic")
    assert "--memory-counts on" in browser.text("#map-state") and "--admin-port" in browser.text("#map-state")
    assert "This server has no overlays." in browser.text("#compare-overlay-note")
    assert not browser.find("#compare-overlay").is_enabled()


def test_memory_by_keyboard_alone(browser, server):
    opened(browser, server, "memory")
    browser.find("#tab-memory").send_keys(Keys.TAB)
    browser.press(Keys.CONTROL, Keys.ENTER)
    eventually(lambda: browser.find("#memory-look").is_displayed(), "the text is traced")
    for _ in range(2):  # the button, the first token
        browser.press(Keys.TAB)
    browser.press(Keys.ARROW_RIGHT)
    browser.press(Keys.ENTER)
    word = browser.focused().text
    assert word in browser.text("#memory-token h2")
    browser.press(Keys.TAB)  # to the first slot
    slot = browser.focused().text.split()[0]
    browser.press(Keys.ENTER)
    assert browser.text("#memory-slot h2") == "Slot %s of memory 0" % slot


def test_two_texts_side_by_side_with_a_memory_switched_off(browser, server):
    opened(browser, server, "memory")
    browser.run("document.querySelector('#memory-input').value = arguments[0]", TEXT)
    browser.fill("#compare-max", "16")

    def both():
        browser.find("#compare-go").click()
        eventually(lambda: browser.text("#compare-go") == "Write both" and browser.text("#compare-right-state"), "both")
        return written(browser, "compare-left"), written(browser, "compare-right")

    left, right = both()
    assert left == right and "Both texts are the same." in browser.text("#compare-state")
    browser.find("#compare-switches input").click()
    left, right = both()
    body = {"prompt": TEXT, "max_tokens": 16, "temperature": 0.8, "seed": 1}
    off = {"ablate": [{"memory": 0}]}
    assert left == server.ok("/generate", body)["choices"][0]["text"]
    assert right == server.ok("/generate", {**body, **off})["choices"][0]["text"]
    for side, fields in (("left", {}), ("right", off)):
        perplexity = server.ok("/score", {"text": TEXT, **fields})["results"][0]["perplexity"]
        assert near(browser.text("#compare-%s-state" % side).split(": ")[1], perplexity)
    if left != right:
        assert browser.all("#compare-right .differs") and "They part at token" in browser.text("#compare-state")
    browser.find("#compare-reset").click()
    assert browser.all("#compare-switches input:not(:checked)") == []


def test_heads_and_slots_can_be_switched_off(browser, server):
    opened(browser, server, "memory")
    trace(browser)
    slot = int(browser.text("#memory-token .slot.chosen .n"))
    browser.find("#memory-slot .second").click()
    assert "slot %d is off" % slot in browser.text("#compare-switches .chip")
    browser.find("#compare-switches .of-heads input").click()
    browser.fill("#compare-max", "4")
    browser.find("#compare-go").click()
    eventually(lambda: browser.text("#compare-right-state"), "both texts")
    off = [{"memory": 0, "head": 0}, {"memory": 0, "slots": [slot]}]
    perplexity = server.ok("/score", {"text": TEXT, "ablate": off})["results"][0]["perplexity"]
    assert near(browser.text("#compare-right-state").split(": ")[1], perplexity)
    browser.find("#compare-switches .chip").click()
    assert browser.all("#compare-switches .chip") == []
    assert browser.text("#memory-slot .second") == "Switch this slot off"


def test_several_memories_are_told_apart(browser, golden):
    with Server(model=golden("xlm/pkm12-2mem")) as s:
        memories = s.get("/info").json()["model"]["memories"]
        opened(browser, s, "memory")
        trace(browser, "ka fe ci da ka fe")
        names = ["Memory %d · layer %d" % (m, memory["layer"]) for m, memory in enumerate(memories)]
        assert len(names) == 2 and [each.text for each in browser.all("#map-memory option")] == names
        assert all(name in browser.text("#memory-token") and name in browser.text("#compare-switches") for name in names)
        browser.run("""const select = document.querySelector('#map-memory'); select.value = 1;
            select.dispatchEvent(new Event('change'))""")
        assert " reads of " in browser.text("#map-state")


def test_a_model_without_memories_says_so(browser, golden):
    with Server(model=golden("xlm/dense12")) as s:
        opened(browser, s, "memory")
        assert "no product-key memories" in browser.text("#memory-state")
        assert not browser.find("#memory-go").is_enabled() and not browser.find("#compare").is_displayed()
        assert "no memories" in browser.text("#served")


def test_a_model_without_a_tokenizer_takes_ids(browser, golden, tmp_path):
    model = shutil.copytree(golden("xlm/pkm12-2mem"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    del config["tokenizer"]
    (model / "config.json").write_text(json.dumps(config))
    with Server(model=str(model)) as s:
        opened(browser, s, "score")
        score(browser, "5 6 7, 8")
        assert [span.text for span in spans(browser, "score-text")] == ["⟨5⟩", "⟨6⟩", "⟨7⟩", "⟨8⟩"]
        browser.run("document.querySelector('#score-input').value = 'words'")
        browser.find("#score-go").click()
        eventually(lambda: "token ids" in browser.text("#trouble"), "what to give")


def test_traces_that_the_server_refuses_are_named(browser):
    with Server("--memory-trace", "off") as s:
        opened(browser, s, "memory")
        assert "--memory-trace off" in browser.text("#memory-state")
        assert not browser.find("#memory-go").is_enabled()


# ---- Now -------------------------------------------------------------------------------------


def test_now_shows_what_the_server_does(browser, server):
    opened(browser, server, "now")
    eventually(lambda: browser.all(".plot"), "the plots")
    server.ok("/generate", {"prompt": "The old man", "max_tokens": 200, "ignore_eos": True})

    def of(title):
        return next(each.text for each in browser.all(".plot") if each.text.startswith(title))

    # In ms or in s, as fast as the machine is; a dash stands for nothing seen yet.
    eventually(lambda: re.search(r"\d m?s p50", of("Time to first token"))
               and re.search(r"\d m?s p99", of("End-to-end latency")), "latencies")
    eventually(lambda: browser.run("return [...document.querySelectorAll('.plot .line')].filter("
                                   "(line) => line.getAttribute('d').includes('L')).length") >= 8, "lines")
    for title in ("Tokens", "Requests", "Batch", "KV cache", "Prompt tokens from the cache", "Inter-token latency"):
        assert of(title)
    assert "pkmserve" not in browser.text("#now-state") and "every two seconds" in browser.text("#now-state")
    row = browser.text("#now-memory tbody tr")
    memory = server.get("/info").json()["model"]["memories"][0]
    assert row.startswith("layer %d %s" % (memory["layer"], format(memory["slots"], ",")))

    def metric(name):
        """Of the first memory, by weight."""
        return float(re.search(r'^pkmserve_memory_%s\{[^}]*\} (\S+)' % name, server.get("/metrics").text, re.M)[1])

    def figures_are_told():
        shown = browser.run("return [...document.querySelectorAll('#now-memory tbody tr:first-child td')]"
                            ".map((cell) => cell.textContent)")[1:]
        told = [100 * metric("used_ratio"), metric("kl_nats"), metric("top90_slots")]
        units = [each.split()[1:] for each in shown]
        return units == [["%"], ["nats"], []] and all(map(near, shown, told))

    eventually(figures_are_told, "the memory's figures are those of /metrics")
    assert "A sample, not all: one position in 64" in browser.text("#now-memory")


def test_the_view_that_is_closed_asks_for_nothing(browser, server):
    opened(browser, server, "now")
    eventually(lambda: browser.all(".plot"), "the plots")
    browser.find("#tab-write").click()
    before = browser.requests()
    assert any(url.endswith("/metrics") for url in before)
    write(browser, max=4)
    assert not any(url.endswith("/metrics") for url in browser.requests())
