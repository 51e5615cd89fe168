"""Asks PyTorch for tensors on the card, each of a size of its own, and writes for each call which
frames Python itself says it is made from.

    stacks.py FOLDER

FOLDER/frames.json has a line of JSON for each: [bytes, operator, [[file, function, line], ...]],
innermost first. Then it says "checkpoint asked", waits for a line, and ends with "done".
"""

import itertools
import json
import os
import sys

import torch

SIZES = itertools.count(3000001, 1000)
FRAMES = open(os.path.join(sys.argv[1], "frames.json"), "w", encoding="utf-8")


def name(code):
    return getattr(code, "co_qualname", code.co_name)


def note(operator):
    """Writes down the frames of whoever calls, and gives the size to ask for."""
    frame, frames = sys._getframe(1), []
    while frame:
        frames.append([frame.f_code.co_filename, name(frame.f_code), frame.f_lineno])
        frame = frame.f_back
    size = next(SIZES)
    print(json.dumps([size, operator, frames]), file=FRAMES, flush=True)
    return size


class Cache:
    """Calls on one line, so that the frames noted are those of the call."""

    def __init__(self):
        self.kept = []

    def insert(self):
        self.kept.append(torch.empty(note("empty"), dtype=torch.uint8, device="cuda"))


def zeros():
    return torch.zeros(note("zeros"), dtype=torch.uint8, device="cuda")


def descend(depth, call):
    return call() if depth == 0 else descend(depth - 1, call)


def main():
    cache = Cache()
    for depth in (0, 1, 5):
        descend(depth, cache.insert)
        descend(depth, zeros)
    # C code between one Python function and another.
    sorted([3, 1, 2], key=lambda _: cache.insert() or 0)


main()
print("checkpoint asked", flush=True)
sys.stdin.readline()
print("done", flush=True)
