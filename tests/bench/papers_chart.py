"""The results of papers.py as one picture, papers.svg: a panel per figure, written by hand so that nothing needs
to be installed. Ours are marks and bars; what the paper says is dashed."""

import json
import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 480, 320  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 74, 50  # its margins
COLORS = ["#1f6fb4", "#d9622b", "#3a9447", "#8b5ab0", "#8a8a8a"]
PAPER = 'stroke="#444" stroke-width="1.2" stroke-dasharray="5 4" fill="none"'


class Panel:
    """Axes in a corner of the picture. x and y map a value to 0..1 of the plot."""

    def __init__(self, column, row, title, x, y, y_label):
        self.parts, self.x, self.y = [], x, y
        self.left, self.top = column * WIDTH + LEFT, row * HEIGHT + TOP
        self.width, self.height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        self.legend_x, self.legend_y = 0, 0
        self.text(self.left - LEFT + 10, self.top - 54, title, 'font-weight="bold" font-size="13"')
        self.text(self.left - LEFT + 10, self.top - 39, y_label, 'fill="#555"')
        self.add('<path d="M%.1f %.1fv%.1fh%.1f" stroke="#222" fill="none"/>' %
                 (self.left, self.top, self.height, self.width))

    def add(self, text):
        self.parts.append(text)

    def text(self, x, y, text, more=""):
        self.add('<text x="%.1f" y="%.1f" %s>%s</text>' % (x, y, more, escape(str(text))))

    def at(self, x, y):
        return self.left + self.x(x) * self.width, self.top + (1 - self.y(y)) * self.height

    def tick_x(self, x, label):
        px, _ = self.at(x, 1)
        self.text(px, self.top + self.height + 15, label, 'text-anchor="middle"')

    def label_x(self, label):
        self.text(self.left + self.width / 2, self.top + self.height + 34, label, 'text-anchor="middle" fill="#555"')

    def tick_y(self, y, label):
        py = self.top + (1 - self.y(y)) * self.height
        self.add('<path d="M%.1f %.1fh%.1f" stroke="#ddd"/>' % (self.left, py, self.width))
        self.text(self.left - 6, py + 4, label, 'text-anchor="end"')

    def line(self, points, color, legend=None, style=None):
        path = " ".join("%s%.1f %.1f" % ("L" if i else "M", *self.at(x, y)) for i, (x, y) in enumerate(points))
        self.add('<path d="%s" %s/>' % (path, style or 'stroke="%s" stroke-width="2" fill="none"' % color))
        for x, y in points if style is None else []:
            self.add('<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>' % (*self.at(x, y), color))
        self.legend(color, legend, style)

    def bar(self, x, width, y, color):
        px, py = self.at(x, y)
        self.add('<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>' %
                 (px, py, width * self.width, self.top + self.height - py, color))

    def legend(self, color, text, style=None):
        if text is None:
            return
        length = 30 + 6.4 * len(text)
        if self.legend_x + length > self.width:
            self.legend_x, self.legend_y = 0, 15
        x, y = self.left + self.legend_x, self.top - 22 + self.legend_y
        self.legend_x += length
        self.add('<path d="M%.1f %.1fh16" %s/>' % (x, y - 4, style or 'stroke="%s" stroke-width="3"' % color))
        self.text(x + 20, y, text)


def linear(top):
    return lambda v: v / top


def log(low, high):
    return lambda v: math.log(v / low) / math.log(high / low)


def measured(result, **labels):
    """The cases that have these labels and were measured."""
    return [case for case in result["cases"]
            if case.get("ratio") and all(case.get(name) == value for name, value in labels.items())]


def ticks(top):
    step = 0.25 if top <= 1.5 else 0.5 if top <= 3 else 1
    return [i * step for i in range(int(top / step) + 1)]


def top_of(result, names):
    """A little more than the highest ratio."""
    return 1.06 * max([case["ratio"][name] for case in measured(result) for name in names] + [1])


def memory_size(result, column, row):
    names = result["metrics"]
    slots = sorted({case["slots"] for case in result["cases"] if case["slots"]})
    top = top_of(result, names)
    panel = Panel(column, row, "Table 4, figure 7: slots", log(slots[0] * 0.8, slots[-1] * 1.2), linear(top),
                  "speed over the model without a memory")
    for y in ticks(top):
        panel.tick_y(y, "%g" % y)
    for n in slots:
        panel.tick_x(n, "%d²" % math.isqrt(n))
    panel.label_x("slots")
    for i, (kind, name) in enumerate((kind, name) for kind in ("product", "flat") for name in names):
        points = [(case["slots"], case["ratio"][name]) for case in measured(result, kind=kind)]
        panel.line(points, COLORS[i], "%s, %s" % (kind, name)) if points else None
    return panel


def depth(result, column, row):
    name = result["metrics"][0]
    cases = measured(result)
    groups = sorted({(case["width"], case["layers"]) for case in cases})
    top = max(top_of(result, [name]), 2.1)
    panel = Panel(column, row, "Figure 4: depth, width, memories", linear(len(groups)), linear(top),
                  "%s: speed over the deepest model of the width without a memory" % name)
    for y in ticks(top):
        panel.tick_y(y, "%g" % y)
    n_most = max(case["memories"] for case in cases)
    for case in cases:
        x = groups.index((case["width"], case["layers"])) + 0.1 + 0.8 * case["memories"] / (n_most + 1)
        panel.bar(x, 0.75 / (n_most + 1) / len(groups), case["ratio"][name], COLORS[case["memories"]])
        if case["paper"]:
            panel.line([(x - 0.15, case["paper"]), (x + 0.35, case["paper"])], None, style=PAPER)
    for i, (width, layers) in enumerate(groups):
        panel.tick_x(i + 0.5, "%d×%d" % (layers, width))
    for n in range(n_most + 1):
        panel.legend(COLORS[n], "dense" if n == 0 else "%d memor%s" % (n, "y" if n == 1 else "ies"))
    panel.legend(None, "paper", PAPER)
    panel.label_x("layers × width")
    return panel


def heads_and_k(result, column, row):
    name = result["metrics"][0]
    ks = sorted({case["k"] for case in result["cases"] if case["k"]})
    top = top_of(result, [name])
    panel = Panel(column, row, "Figure 6: heads and k", log(ks[0] * 0.9, ks[-1] * 1.1), linear(top),
                  "%s: speed over the model without a memory" % name)
    for y in ticks(top):
        panel.tick_y(y, "%g" % y)
    for k in ks:
        panel.tick_x(k, k)
    panel.label_x("k, slots read per head")
    for i, heads in enumerate(sorted({case["heads"] for case in result["cases"] if case["heads"]})):
        points = [(case["k"], case["ratio"][name]) for case in measured(result, heads=heads)]
        panel.line(points, COLORS[i], "%d head%s" % (heads, "s" if heads > 1 else "")) if points else None
    return panel


def searches(result, column, row):
    products = [case for case in result["cases"] if case["kind"] == "product" and case["paper"]]
    slots = [case["slots"] for case in products]
    values = [case["paper"] for case in products]
    values += [ratio for case in measured(result, kind="product") for ratio in case["ratio"].values()]
    low, high = min(values + [1]) / 1.3, max(values) * 1.5
    panel = Panel(column, row, "Section 3.2: product keys over flat keys", log(slots[0] * 0.8, slots[-1] * 1.2),
                  log(low, high), "searches alone: how many times faster")
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        panel.tick_y(10.0 ** power, "%g" % 10.0 ** power)
    for n in slots:
        panel.tick_x(n, "%d²" % math.isqrt(n))
    panel.label_x("slots")
    panel.line(list(zip(slots, (case["paper"] for case in products))), None, "paper's count", PAPER)
    for i, name in enumerate(result["metrics"]):
        points = [(case["slots"], case["ratio"][name]) for case in measured(result, kind="product")]
        panel.line(points, COLORS[i], name) if points else None
    return panel


PANELS = {"table4": memory_size, "figure4": depth, "figure6": heads_and_k, "counts": searches}


def write(folder):
    """papers.svg of the results in the folder; a figure without one is left out."""
    parts = []
    machines = []
    for figure, draw in PANELS.items():
        path = folder / ("papers-%s.json" % figure)
        if path.exists():
            result = json.loads(path.read_text())
            parts += draw(result, len(machines) % 2, len(machines) // 2).parts
            machines.append("%s, %s, %s, %s clock" % (result["machine"]["cpu"], result["machine"]["device"],
                                                      result["dtype"], result["clock"]))
    if not machines:
        raise SystemExit("papers.py: no papers-*.json in %s to draw: measure first" % folder)
    height = (len(machines) + 1) // 2 * HEIGHT
    for i, machine in enumerate(sorted(set(machines))):
        parts.append('<text x="10" y="%d" fill="#555">%s</text>' % (height + 16 + 16 * i, escape(machine)))
    height += 10 + 16 * len(set(machines))
    (folder / "papers.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">\n'
        '<rect width="100%%" height="100%%" fill="white"/>\n%s\n</svg>\n' % (2 * WIDTH, height, "\n".join(parts)))
