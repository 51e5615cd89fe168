"""Calls the library's cuMemAlloc_v2 and cuMemFree_v2 from so many Python frames.

Usage: python.py LIBRARY. Says "ready PID". Then, for each line "FRAMES CALLS PAUSE_AFTER": makes so
many pairs of calls with so many frames on the stack, rests a moment after each PAUSE_AFTER pairs,
and says "done".
"""

import ctypes
import os
import sys
import time

library = ctypes.PyDLL(sys.argv[1])
allocate, free = library.cuMemAlloc_v2, library.cuMemFree_v2
address = ctypes.c_size_t()
where = ctypes.byref(address)


def descend(frames, pairs):
    if frames > 1:
        return descend(frames - 1, pairs)
    for _ in range(pairs):
        allocate(where, 1)
        free(address)


def run(frames, pairs, pause_after):
    while pairs > 0:
        # This function and the module make two.
        descend(frames - 2, min(pairs, pause_after))
        pairs -= pause_after
        time.sleep(0.02)


print("ready", os.getpid(), flush=True)
for line in sys.stdin:
    run(*map(int, line.split()))
    print("done", flush=True)
