#!/usr/bin/env python3
"""Draws the README's pictures of the page, light and dark, into tests/page/pictures: make screenshots.

The server works for a few clients meanwhile, so that the view Now has something to show."""

import glob
import os
import random
import subprocess
import sys
import threading

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(FOLDER, "..", "server"))
from browser import Browser  # noqa: E402
from server_harness import Server, eventually  # noqa: E402

PICTURES = os.path.join(FOLDER, "pictures")
WIDTH = 1080
HEIGHTS = {"write": 720, "memory": 960, "now": 860}
BYTES_MAX = 300 * 1024  # of all pictures, since they are in the repository
SAMPLES = 31            # of the plots: a minute
PROMPTS = ["Once upon a time", "One day, Tom", "She said that", "In the morning"]


def work(server, over, seed):
    """A client that asks, and then thinks."""
    draw = random.Random(seed)
    while not over.wait(draw.random()):
        server.post("/generate", {"prompt": draw.choice(PROMPTS), "max_tokens": draw.randrange(20, 160), "seed": seed})


def write(browser):
    browser.fill("#write-seed", "7")
    browser.fill("#write-temperature", "0.8")
    browser.find("#write-go").click()
    eventually(lambda: "tokens/s" in browser.text("#write-state"), "the text")
    browser.run("document.querySelectorAll('#write-text .t')[12].focus()")


def memory(browser):
    browser.find("#memory-go").click()
    eventually(lambda: browser.find("#memory-look").is_displayed(), "the slots")
    browser.run("document.activeElement.blur()")


def now(browser):
    eventually(lambda: browser.run("return nowSamples.length") >= SAMPLES, "a minute of figures")


VIEWS = {"write": write, "memory": memory, "now": now}


def draw(server, browser):
    for view, use in VIEWS.items():
        browser.size(WIDTH, HEIGHTS[view])
        browser.open(server.url + "/#" + view)
        eventually(lambda: browser.text("#served") != "", "the page")
        use(browser)
        browser.run("scrollTo(0, 0)")
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            path = os.path.join(PICTURES, "%s-%s.png" % (view, scheme))
            browser.shot(path)
            subprocess.run(["pngquant", "--force", "--strip", "--speed", "1", "--nofs", "--output", path, "64", path],
                           check=True)
            print("%-36s %6.1f kB" % (os.path.relpath(path), os.path.getsize(path) / 1024))


def main():
    os.makedirs(PICTURES, exist_ok=True)
    over = threading.Event()
    with Server() as server, Browser() as browser:
        clients = [threading.Thread(target=work, args=(server, over, seed)) for seed in range(4)]
        for client in clients:
            client.start()
        try:
            draw(server, browser)
        finally:
            over.set()
            for client in clients:
                client.join()
    total = sum(os.path.getsize(path) for path in glob.glob(os.path.join(PICTURES, "*.png")))
    if total > BYTES_MAX:
        sys.exit("screenshots: the pictures have %d bytes together, the limit is %d" % (total, BYTES_MAX))


if __name__ == "__main__":
    main()
