"""Asks PyTorch for tensors on the card, each of a size of its own, and writes for each call which
frames Python itself says it is made from.

Each line is JSON: [bytes, [[file, function, line], ...]], innermost first. Ends with "done".
"""

import itertools
import json
import sys

import torch

SIZES = itertools.count(3000001, 1000)


def name(code):
    return getattr(code, "co_qualname", code.co_name)


def note():
    """Writes down the frames of whoever calls, and gives the size to ask for."""
    frame, frames = sys._getframe(1), []
    while frame:
        frames.append([frame.f_code.co_filename, name(frame.f_code), frame.f_lineno])
        frame = frame.f_back
    size = next(SIZES)
    print(json.dumps([size, frames]), flush=True)
    return size


class Cache:
    def __init__(self):
        self.kept = []

    def insert(self):
        self.kept.append(torch.empty(note(), dtype=torch.uint8, device="cuda"))


def zeros():
    return torch.zeros(note(), dtype=torch.uint8, device="cuda")


def descend(depth, call):
    return call() if depth == 0 else descend(depth - 1, call)


def main():
    cache = Cache()
    for depth in (0, 1, 5):
        descend(depth, cache.insert)
        descend(depth, zeros)
    sorted([3, 1, 2], key=lambda _: cache.insert() or 0)


main()
print("done", flush=True)
