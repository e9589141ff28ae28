"""What the page computes itself, from numbers made up here: the model that is served does not have them all."""

import base64
import json
import struct

import pytest

from test_views import opened


def test_numbers_have_about_three_digits(browser, server):
    opened(browser, server, "write")
    for form, shown in {
            "short": {"null": "–", "NaN": "–", "7": "7", "1234567": "1,234,567", "1e9": "1.00 · 10^9", "1234.5": "1,235",
                      "123.45": "123", "12.345": "12.3", "1.2345": "1.23", "-0.012": "-0.01", "0.0012": "1.2 · 10^-3"},
            "percent": {"1": "100 %", "0.9996": "100 %", "0.999": "99.9 %", "0.1": "10.0 %", "0.0123": "1.23 %",
                        "0.0001": "0.01 %", "0.00001": "below 0.01 %", "0": "0 %"},
            "seconds": {"null": "–", "12.3": "12 s", "10": "10 s", "9.87": "9.9 s", "1": "1.0 s", "0.5": "500 ms",
                        "0.0123": "12 ms", "0.00123": "1.2 ms", "0.000123": "0.12 ms"}}.items():
        assert {x: browser.run("return %s(%s)" % (form, x)) for x in shown} == shown


def test_figures_between_two_samples_are_of_what_came_between(browser, server):
    opened(browser, server, "write")

    def text(total, buckets, count):
        lines = ['# TYPE pkmserve_x_bucket histogram', "pkmserve_t_total %g" % total, "pkmserve_x_sum %g" % (2 * count),
                 "pkmserve_x_count %g" % count]
        return "\n".join(lines + ['pkmserve_x_bucket{le="%s"} %g' % each for each in buckets.items()])

    def between(old, new, what, ms=2000):
        return browser.run("const from = {at: 1000, value: metricsOf(arguments[0])}, "
                           "to = {at: 1000 + arguments[2], value: metricsOf(arguments[1])}; return " + what, old, new, ms)

    old = text(100, {"+Inf": 40, "1": 10, "2": 40}, 40)
    new = text(150, {"+Inf": 60, "1": 14, "2": 52}, 60)  # 4 up to 1, 8 from 1 to 2, 8 above
    assert between(old, new, "rate(from, to, 't_total')") == 25
    assert between(new, old, "rate(from, to, 't_total')") is None  # another server
    assert between(old, new, "rate(from, to, 't_total')", ms=0) is None
    assert between(old, new, "meanOf(from, to, 'x')") == 2
    assert between(old, old, "meanOf(from, to, 'x')") is None
    assert between(old, new, "percentilesOf(from, to, 'x', [0.1, 0.2, 0.4, 0.9])") == [0.5, 1, 1.5, 2]
    assert between(old, old, "percentilesOf(from, to, 'x', [0.5])") == [None]
    assert between("", new, "percentilesOf(from, to, 'x', [0.5])") == pytest.approx([1 + (30 - 14) / 38])


def test_the_look_ups_of_several_memories_in_one_block_are_kept_apart(browser, server):
    opened(browser, server, "memory")
    # [position][memory][head][choice]
    slots = [[[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [[[2, 9], [1, 2]], [[6, 5], [8, 6]]], [[[1, 3], [9, 2]], [[7, 8], [6, 5]]]]
    shares = [[[[.1, .9], [.5, .5]], [[.2, .8], [.7, .3]]], [[[.6, .4], [.3, .7]], [[.5, .5], [.1, .9]]],
              [[[.8, .2], [.4, .6]], [[.9, .1], [.2, .8]]]]

    def flat(nested, kind):
        return base64.b64encode(struct.pack("<24" + kind, *(x for p in nested for m in p for h in m for x in h))).decode()

    block = {"start": 0, "n_position": 3, "memories": [4, 2], "heads": 2, "knn": 2, "indices": flat(slots, "i"),
             "weights": flat(shares, "f")}
    trace_of = "const trace = new Trace([arguments[0]]); "
    assert browser.run(trace_of + "return trace.memories()", block) == [2, 4]
    for m, place in ((4, 0), (2, 1)):
        for p in range(3):
            for h in range(2):
                read = browser.run(trace_of + "return trace.reads(arguments[1], arguments[2], arguments[3])", block, m, p, h)
                pairs = sorted(zip(shares[p][place][h], slots[p][place][h]), key=lambda pair: (-pair[0], pair[1]))
                assert [each["slot"] for each in read] == [slot for _, slot in pairs]
        found = browser.run(trace_of + "return trace.places(arguments[1], arguments[2])", block, m, 2 if m == 4 else 6)
        assert [(each["p"], each["h"]) for each in found] == [(p, h) for p in range(3) for h in range(2)
                                                              if (2 if m == 4 else 6) in slots[p][place][h]]
    # Of memory 4 slot 2 is read with .9 at 0 and .7 at 1; of memory 2 slot 6 with .9 at 1 and .8 at 0.
    assert browser.run(trace_of + "return [trace.liveliest(4), trace.liveliest(2)]", block) == [
        {"p": 0, "slot": 2}, {"p": 1, "slot": 6}]


def test_counts_of_several_memories_are_read_to_their_last_bit(browser, server):
    opened(browser, server, "memory")
    tables = {10: [0, 2**33 + 5, 1], 2: [2**32 - 1, 0]}
    header, blob = {"__metadata__": {"documents": "7"}}, b""
    for m, reads in tables.items():
        header["memories.%d.reads" % m] = {"dtype": "I64", "shape": [len(reads)], "data_offsets": [len(blob), len(blob) + 8 * len(reads)]}
        blob += struct.pack("<%dq" % len(reads), *reads)
    text = json.dumps(header).encode()
    data = base64.b64encode(struct.pack("<Q", len(text)) + text + blob).decode()
    counts = "const counts = new Counts(bytesOfBase64(arguments[0]).buffer); "
    assert browser.run(counts + "return [counts.memories(), counts.about.documents]", data) == [[2, 10], "7"]
    for m, reads in tables.items():
        seen = browser.run(counts + "const seen = []; counts.each(arguments[1], (...each) => seen.push(each)); return seen", data, m)
        assert seen == [[slot, n] for slot, n in enumerate(reads) if n > 0]


def test_where_two_texts_part(browser, server):
    opened(browser, server, "memory")
    part = """
        const side = (text, ids) => text.set(ids.map((id) => ({ id, text: "t" + id, bits: null, top: [] })));
        side(compareLeft, arguments[0]);
        side(compareRight, arguments[1]);
        const said = compareMark();
        const marked = (text) => text.spans.map((span, i) => (span.classList.contains("differs") ? i : -1)).filter((i) => i >= 0);
        return [said, marked(compareLeft), marked(compareRight)];"""
    for left, right, said in (([1, 2, 3], [1, 2, 3], ["Both texts are the same.", [], []]),
                              ([1, 2, 3], [9, 2, 3], ["They part at token 1.", [0], [0]]),
                              ([1, 2, 3], [1, 2], ["They part at token 3.", [2], []]),
                              ([1], [1, 5, 6], ["They part at token 2.", [], [1, 2]]),
                              ([1, 2, 3, 4], [1, 3, 4, 5], ["They part at token 2.", [1], [3]])):
        assert browser.run(part, left, right) == said, (left, right)
