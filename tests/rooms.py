#!/usr/bin/env python3
"""Draws server/ from its real includes and checks it: a folder includes only folders below it, and no
files include each other in a circle.

    python3 tests/rooms.py          the graph of the folders: who includes whom, how often
    python3 tests/rooms.py --check  prints what breaks the rules; exit 1 if anything does

A .c file, its header and its _inside.h are one node. tests/lint.sh runs the check."""

import collections
import glob
import os
import re
import sys

# From the bottom up; server/README.md says what each folder holds. "." is main.c and serve.c.
FLOORS = [["version"], ["json"], ["options"], ["io", "net"], ["generate", "score"], ["api", "cli"], ["."], ["none"]]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
INCLUDE = re.compile(r'^#include "(server/[^"]+)"', re.M)


def room(path):
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "version" if parts[1] == "version.h" else "."


def node_of(path):
    name = os.path.splitext(path)[0]
    return name[:-len("_inside")] if name.endswith("_inside") else name


def includes():
    """{file: [included file]}"""
    files = sorted(glob.glob("server/**/*.[ch]", recursive=True))
    return {path: INCLUDE.findall(open(path).read()) for path in files}


def circles(graph):
    """Strongly connected parts of more than one node (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return [part for part in found if len(part) > 1]


def check(files):
    problems = []
    for path, included in files.items():
        if room(path) not in FLOOR:
            problems.append("%s: tests/rooms.py does not know its folder" % path)
            continue
        for other in included:
            if room(other) != room(path) and FLOOR[room(other)] >= FLOOR[room(path)]:
                problems.append("%s: includes %s, which is not below it" % (path, other))
    graph = collections.defaultdict(set)
    for path, included in files.items():
        node = node_of(path)
        graph[node] |= {node_of(other) for other in included} - {node}
    for part in circles({node: graph[node] & set(graph) for node in graph}):
        problems.append("a circle of includes: " + " ".join(sorted(part)))
    return problems


def draw(files):
    arrows = collections.Counter((room(path), room(other)) for path, included in files.items()
                                 for other in included if room(path) != room(other))
    for (a, b), n in sorted(arrows.items(), key=lambda each: (-FLOOR[each[0][0]], each[0])):
        print("%-9s -> %-9s %3d" % (a, b, n))
    print("%d folders on %d floors, %d arrows" % (len(FLOOR) - 1, len(FLOORS), len(arrows)))


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    files = includes()
    if sys.argv[1:] != ["--check"]:
        draw(files)
        return
    problems = check(files)
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
