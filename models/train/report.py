"""Progress of a training run: lines on the terminal, everything in log.jsonl, and its curves as SVG.

As a command it draws the curves of several runs together:

    python report.py --runs ../run/memory ../run/dense --out curves.svg
"""
import argparse
import json
import math
import os
import sys
import time
from html import escape

from files import run

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 840, 420, 60, 30, 210, 45
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94", "#b8860b", "#444444", "#0b8a8f", "#a83279")


class Reporter:
    """A progress bar on a terminal, a line now and then elsewhere, and everything in log.jsonl."""

    def __init__(self, folder, step, total_steps, step_tokens, every):
        self.folder, self.total, self.step_tokens, self.every = folder, total_steps, step_tokens, every
        self.log = open(os.path.join(folder, "log.jsonl"), "a", encoding="utf-8", buffering=1)
        self.loss, self.n = 0.0, 0
        self.t0, self.step0 = time.time(), step
        self.live = sys.stderr.isatty()

    def record(self, **fields):
        self.log.write(json.dumps(fields) + "\n")

    def say(self, line):
        print("\n" * self.live + line, file=sys.stderr, flush=True)

    def step(self, step, loss, norm, lr):
        """loss and norm are tensors, which are read only where a line is due: a GPU need not wait."""
        self.loss, self.n = self.loss + loss, self.n + 1
        if (step + 1) % self.every:
            return
        elapsed, mean = time.time() - self.t0, float(self.loss) / self.n
        speed = (step + 1 - self.step0) * self.step_tokens / elapsed
        self.record(step=step + 1, loss=mean, grad_norm=float(norm), lr=lr, tok_per_s=speed,
                    seconds=elapsed)
        self.loss, self.n = 0.0, 0
        line = f"step {step + 1} loss {mean:.4f} lr {lr:.2e} {speed:.0f} tok/s"
        if self.total:
            left = int((self.total - step - 1) * self.step_tokens / speed)
            n_done = int(20 * (step + 1) / self.total)
            line = (f"[{'#' * n_done}{'.' * (20 - n_done)}] {step + 1}/{self.total} loss {mean:.4f} "
                    f"lr {lr:.2e} {speed:.0f} tok/s eta {left // 3600}:{left // 60 % 60:02}:{left % 60:02}")
        print("\r" + line if self.live else line, end="" if self.live else "\n",
              file=sys.stderr, flush=True)

    def validated(self, step, found):
        self.record(step=step, **found)
        self.say(f"step {step} " + " ".join(f"{k} {v:.4f}" for k, v in found.items()))
        draw({"": self.folder}, os.path.join(self.folder, "curves.svg"))


def curves(folder):
    """-> {name: {step: loss}} of a log; what was logged twice counts as the second time"""
    found = {}
    with open(os.path.join(folder, "log.jsonl"), encoding="utf-8") as f:
        for line in f:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # The last line of a run that was killed.
            for key, value in record.items():
                if key.endswith("loss") and math.isfinite(value):
                    name = "training" if key == "loss" else key[:-len("_loss")]
                    found.setdefault(name, {})[record["step"]] = value
    return found


def ticks(low, high):
    """Round numbers from low to high, 4 to 9 of them."""
    step = 10.0 ** math.floor(math.log10(high - low))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if (high - low) / s <= 9)
    first = math.ceil(low / step)
    return [i * step for i in range(first, int(math.floor(high / step + 1e-9)) + 1)]


def draw(runs, out):
    """runs {label: folder} -> whether there are losses yet: then a chart of them over steps is written"""
    lines = [((label + " " + name).strip(), sorted(points.items()))
             for label, folder in runs.items() for name, points in sorted(curves(folder).items())]
    lines = [(name, points) for name, points in lines if len(points) > 1]
    if not lines:
        return False
    last = max(points[-1][0] for _, points in lines)
    # The first tenth of a run falls steeply: what is above its end is cut off.
    shown = [v for _, points in lines for s, v in points if s >= last / 10] or \
        [v for _, points in lines for _, v in points]
    low, high = min(shown), max(shown)
    high += (high - low) * 0.05 or 1.0
    x = lambda s: LEFT + (WIDTH - LEFT - RIGHT) * s / last
    y = lambda v: TOP + (HEIGHT - TOP - BOTTOM) * (high - min(v, high)) / (high - low)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
             f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for v in ticks(low, high):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}" '
                     f'stroke="#ddd"/><text x="{LEFT - 6}" y="{y(v) + 4:.1f}" '
                     f'text-anchor="end">{v:.4g}</text>')
    for s in ticks(0, last):
        parts.append(f'<text x="{x(s):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{s:.0f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'
                 f'<text x="{LEFT}" y="{TOP - 12}">loss, nats per token</text>')
    for i, (name, points) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        label_y = TOP + 10 + 18 * i
        parts.append(f'<line x1="{WIDTH - RIGHT + 12}" x2="{WIDTH - RIGHT + 34}" y1="{label_y}" '
                     f'y2="{label_y}" stroke="{colour}" stroke-width="3"/>'
                     f'<text x="{WIDTH - RIGHT + 40}" y="{label_y + 4}">{escape(name)} '
                     f'{points[-1][1]:.3f}</text>')
    with open(out, "w", encoding="utf-8") as f:
        f.write("\n".join(parts) + "\n</svg>\n")
    return True


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--runs", nargs="+", required=True, help="folders of train.py, with log.jsonl")
    ap.add_argument("--out", required=True, help="SVG file to write")
    args = ap.parse_args()
    last = [os.path.basename(os.path.normpath(folder)) for folder in args.runs]
    labels = last if len(set(last)) == len(last) else args.runs
    if not draw(dict(zip(labels, args.runs)), args.out):
        raise SystemExit(f"{', '.join(args.runs)}: no losses of two steps yet: nothing to draw")


if __name__ == "__main__":
    run(main)
