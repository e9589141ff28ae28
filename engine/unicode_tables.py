#!/usr/bin/env python3
"""Writes unicode_table.c and nfc_table.c, beside this file: what unicode.h and nfc.h say of code points.

    unicode_tables.py [--check]

The Unicode version decides which ids a text gets, so it is fixed here: 16.0.0, that of the pre-tokenizers
of Hugging Face's package `tokenizers`. Python 3.14 has it as `unicodedata`; for another one the package
`unicodedata2` 16.0.0 brings it. --check writes nothing and fails if a file differs.
"""

import os
import sys

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

VERSION = "16.0.0"
OTHER, LETTER, NUMBER, MARK, SPACE, OTHER_NUMBER, JOINER, UNSTABLE = 0, 1, 2, 3, 4, 5, 6, 8
BLOCK = 64  # code points of a block of the table
TABLE_END = 0x32400  # beyond it there is nothing but the marks of SELECTORS
SELECTORS = range(0xE0100, 0xE01F0)
SPACES = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F,
          0x205F, 0x3000}
# The symbols with the property Alphabetic, and the two characters with Join_Control.
CIRCLED = {*range(0x24B6, 0x24EA), *range(0x1F130, 0x1F14A), *range(0x1F150, 0x1F16A), *range(0x1F170, 0x1F18A)}
JOIN_CONTROLS = {0x200C, 0x200D}
HANGUL = range(0xAC00, 0xD7A4)
HANGUL_V, HANGUL_T = range(0x1161, 0x1176), range(0x11A8, 0x11C3)


def decomposition(code):
    """The canonical mapping of one step: a tuple of one or two code points, or None."""
    mapping = unicodedata.decomposition(chr(code))
    if not mapping or mapping.startswith("<"):
        return None
    return tuple(int(part, 16) for part in mapping.split())


def composes(code, pair):
    """Whether the pair becomes code again, which the exclusions forbid."""
    return unicodedata.normalize("NFC", "".join(map(chr, pair))) == chr(code)


def tables():
    pairs = {}  # code: (first, second or 0)
    seconds = {*HANGUL_V, *HANGUL_T}
    for code in range(0x110000):
        found = decomposition(code)
        if found is not None and code not in HANGUL:
            pairs[code] = found + (0,) if len(found) == 1 else found
    composed = sorted((pair, code) for code, pair in pairs.items() if pair[1] and composes(code, pair))
    seconds |= {pair[1] for pair, code in composed}
    bits = []
    for code in range(0x110000):
        category = unicodedata.category(chr(code))
        joins = category == "Pc" or code in CIRCLED or code in JOIN_CONTROLS
        value = SPACE if code in SPACES else OTHER_NUMBER if category == "No" else JOINER if joins \
            else {"L": LETTER, "N": NUMBER, "M": MARK}.get(category[0], OTHER)
        stable = not unicodedata.combining(chr(code)) and code not in seconds \
            and (0xD800 <= code < 0xE000 or unicodedata.normalize("NFC", chr(code)) == chr(code))
        bits.append(value if stable else value | UNSTABLE)
    for code in range(TABLE_END, 0x110000):
        assert bits[code] == (MARK if code in SELECTORS else OTHER), hex(code)
    return bits, pairs, composed


HEAD = """/* Made by unicode_tables.py from Unicode %s: %s */
#include "%s"

"""


def rows(cells, form):
    """The cells as lines of at most 100 columns."""
    lines = ["   "]
    for cell in cells:
        text = " " + form % cell + ","
        if len(lines[-1]) + len(text) > 100:
            lines.append("   ")
        lines[-1] += text
    return "".join(line + "\n" for line in lines)


def class_file(bits):
    blocks, index = {}, []
    for at in range(0, TABLE_END, BLOCK):
        block = tuple(bits[at:at + BLOCK])
        index.append(blocks.setdefault(block, len(blocks)))
    words = []
    for block in blocks:
        for at in range(0, BLOCK, 16):
            words.append(sum(value << 4 * i for i, value in enumerate(block[at:at + 16])))
    assert len(blocks) <= 0xFFFF
    return (HEAD % (VERSION, "see unicode.h.", "engine/unicode.h")
            + "/* clang-format off */\nconst uint16_t unicode_block[%d] = {\n" % len(index)
            + rows(index, "%d") + "};\n\nconst uint64_t unicode_word[%d] = {\n" % len(words)
            + rows(words, "0x%x") + "};\n")


def nfc_file(pairs, composed):
    by_code = sorted(pairs)
    where = {code: number for number, code in enumerate(by_code)}
    marks = []  # [first, last, class]
    for code in range(0x110000):
        order = unicodedata.combining(chr(code))
        if order and marks and marks[-1][1:] == [code - 1, order]:
            marks[-1][1] = code
        elif order:
            marks.append([code, code, order])
    cells = [(code, *pairs[code]) for code in by_code]
    return (HEAD % (VERSION, "see nfc.h.", "engine/nfc.h")
            + "/* clang-format off */\nconst int nfc_n_mapping = %d;\n" % len(cells)
            + "const struct nfc_mapping nfc_mapping[] = {\n" + rows(cells, "{%d,%d,%d}")
            + "};\n\nconst int nfc_n_pair = %d;\nconst uint16_t nfc_pair[] = {\n" % len(composed)
            + rows([where[code] for _, code in composed], "%d")
            + "};\n\nconst int nfc_n_marks = %d;\nconst struct nfc_marks nfc_marks[] = {\n" % len(marks)
            + rows([tuple(mark) for mark in marks], "{%d,%d,%d}") + "};\n")


def main():
    if unicodedata.unidata_version != VERSION:
        sys.exit("unicode_tables.py: Unicode %s is needed, this Python has %s: use Python 3.14, or"
                 " install unicodedata2 %s" % (VERSION, unicodedata.unidata_version, VERSION))
    bits, pairs, composed = tables()
    folder = os.path.dirname(os.path.abspath(__file__))
    for name, text in (("unicode_table.c", class_file(bits)), ("nfc_table.c", nfc_file(pairs, composed))):
        path = os.path.join(folder, name)
        if "--check" not in sys.argv[1:]:
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
        elif open(path, encoding="ascii").read() != text:
            sys.exit("%s differs from what unicode_tables.py makes" % path)


main()
