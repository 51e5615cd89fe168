"""A program of known stacks: it allocates through ctypes, and writes for each call which frames
Python itself says it is made from. The call's size is its name.

Usage: frames.py [C10]. Without an argument it calls the runtime's cudaMalloc, with the path of the
stand-in c10 that framework's allocator. It says "ready PID" once the libraries are loaded, and goes
on when a line comes. Each expectation is a line of JSON: [bytes, [[file, function, line], ...]],
innermost first.
"""

import asyncio
import ctypes
import itertools
import json
import os
import sys
import threading

C10 = sys.argv[1] if len(sys.argv) > 1 else None
LIBRARY = C10 or "libcudart.so.13"
# The one lets the GIL go while it calls, the other keeps it.
LIBRARIES = [ctypes.CDLL(LIBRARY), ctypes.PyDLL(LIBRARY)]
SIZES = itertools.count(1001)
LOCK = threading.Lock()
# What is too long to be sent is read of the living process.
KEPT = []


def allocating(library):
    """The function that allocates, which gives 0 if it did."""
    if not C10:
        return library.cudaMalloc
    function = library.fake_c10_allocate
    function.restype = ctypes.c_uint64
    # Made of the answer after the call: no frame of it is in the call's stack.
    function.errcheck = lambda address, *_: 0 if address else 1
    return function


FUNCTIONS = [allocating(library) for library in LIBRARIES]


def arguments(size):
    """What is given to that function: of c10 also device, stream, and the place of its probe."""
    if C10:
        return ctypes.c_uint64(size), ctypes.c_uint8(0), ctypes.c_int64(3), ctypes.c_int(size % 4)
    return ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(size)


def name(code):
    return getattr(code, "co_qualname", code.co_name)


def note(kind):
    """Writes down the frames of whoever calls, and gives the arguments of the call to be made."""
    frame, frames = sys._getframe(1), []
    while frame:
        frames.append([frame.f_code.co_filename, name(frame.f_code), frame.f_lineno])
        frame = frame.f_back
    with LOCK:
        size = next(SIZES)
        print(json.dumps([size, frames]), flush=True)
    return arguments(size)


class Caller:
    """Calls on one line, so that the frames noted are those of the call."""

    def __init__(self, function):
        self.function = function

    def call(self, *_):
        assert self.function(*note(self)) == 0; return 0

    def produce(self):
        for _ in range(2):
            yield self.call()

    def delegate(self):
        yield from self.produce()

    def __lt__(self, other):
        self.call()
        return False

    @property
    def attribute(self):
        return self.call()

    @staticmethod
    def through(caller):
        return caller.call()


def decorate(function):
    def wrapped(*arguments, **named):
        return function(*arguments, **named)
    return wrapped


@decorate
def descend(depth, caller):
    return caller.call() if depth == 0 else descend(depth - 1, caller)


def plain(caller):
    caller.call()
    (lambda: caller.call())()
    list(caller.produce())
    list(caller.delegate())
    # C code that calls back, once and in a loop.
    sorted([caller, Caller(caller.function)])
    sorted([1, 2], key=lambda _: caller.call())
    list(map(caller.call, range(2)))
    caller.attribute
    Caller.through(caller)
    [caller.call() for _ in range(2)]
    {caller.call(): 1 for _ in range(1)}
    exec("caller.call()", {"caller": caller})
    eval("[caller.call()\n for _ in range(1)]", {"caller": caller})
    try:
        raise ValueError
    except ValueError:
        caller.call()
    with Context(caller):
        pass
    for depth in (9, 24):
        descend(depth, caller)


class Context:
    def __init__(self, caller):
        self.caller = caller

    def __enter__(self):
        self.caller.call()

    def __exit__(self, *_):
        self.caller.call()


async def leaf(caller):
    await asyncio.sleep(0)
    caller.call()


async def produce(caller):
    for _ in range(2):
        yield caller.call()


async def tasks(caller):
    await asyncio.gather(*[leaf(caller) for _ in range(3)])
    async for _ in produce(caller):
        pass
    await asyncio.get_running_loop().run_in_executor(None, caller.call)


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def callbacks(caller):
    """The C library calls Python."""
    libc = ctypes.CDLL(None)
    values = (ctypes.c_int * 2)(2, 1)
    libc.qsort(values, ctypes.c_size_t(2), ctypes.c_size_t(4), CALLBACK(caller.call))


def names(caller):
    """Names of one, two and four bytes a character, and longer than what is sent."""
    for file in ("d\xe9j\xe0.py", "\u0434\u0430\u0442\u0430.py", "\U0001f40d.py", "/x" * 400 + "/y.py"):
        space = {"caller": caller}
        exec(compile("def caf\xe9():\n  caller.call()\n", file, "exec"), space)
        space["caf\xe9"]()
        KEPT.append(space)
    long = "f" * 300
    space = {"caller": caller}
    exec(compile(f"def {long}():\n\n  caller.call()\n", "long.py", "exec"), space)
    space[long]()
    KEPT.append(space)


def tables(caller):
    """Functions whose line tables are longer than what is sent."""
    for lines in (200, 6000):
        source = "def large(caller):\n" + "  x = 1\n" * lines + "  caller.call()\n"
        space = {}
        exec(compile(source, f"large{lines}.py", "exec"), space)
        space["large"](caller)
        KEPT.append(space)


def freed(caller):
    """Code objects that are freed at once: the next one takes their place in memory."""
    for index in range(300):
        space = {"caller": caller}
        source = "\n" * (index % 50) + f"def f{index}():\n  caller.call()\n"
        exec(compile(source, f"file{index}.py", "exec"), space)
        space[f"f{index}"]()


def deep(caller):
    for depth in (40, 150):
        descend(depth, caller)


def everything():
    for function in FUNCTIONS:
        caller = Caller(function)
        plain(caller)
        callbacks(caller)
        asyncio.run(tasks(caller))
        threads = [threading.Thread(target=plain, args=(caller,)) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    names(caller)
    tables(caller)
    freed(caller)
    deep(caller)


print(f"ready {os.getpid()}", flush=True)
sys.stdin.readline()
everything()
print("done", flush=True)
sys.stdin.readline()
