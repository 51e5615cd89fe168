"""Exercises PyTorch's CUDA memory from Python, and says at each checkpoint what PyTorch itself knows:
torch.cuda.memory_stats() and torch.cuda.memory_snapshot().

    script.py FOLDER

The same protocol and the same form of file as harness.cpp, where both are described. Only with device
memory that costs nothing (the stand-ins): it fills the card.
"""

import ctypes
import json
import os
import sys
import threading

import torch

KIB = 1 << 10
MIB = 1 << 20

STATS = [
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
]
COUNTS = ["num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"]


class Program:
    def __init__(self, folder):
        self.folder = folder
        self.checkpoints = 0
        # c10's id of each stream in use, by the handle that snapshots name it with.
        self.streams = {0: 0}
        # What was seen right after a request of device 0 failed.
        self.failures = []
        # In this process the runtime that PyTorch uses, and so the one that is traced.
        self.cudart = ctypes.CDLL("libcudart.so.13")

    def new_stream(self):
        stream = torch.cuda.Stream()
        self.streams[stream.cuda_stream] = stream.stream_id
        return stream

    def stats(self, device):
        nested = torch.cuda.memory_stats_as_nested_dict(device)
        answer = {"device": device}
        for name in STATS:
            answer[name] = nested[name]["all"]
        for name in COUNTS:
            answer[name] = nested[name]
        return answer

    def segment(self, segment):
        blocks = []
        for block in segment["blocks"]:
            state = block["state"]
            if state == "active_awaiting_free":
                state = "active_pending_free"
            blocks.append(
                {
                    "address": block["address"],
                    "bytes": block["size"],
                    "requested_bytes": block["requested_size"],
                    "state": state,
                }
            )
        return {
            "device": segment["device"],
            "address": segment["address"],
            "bytes": segment["total_size"],
            "allocated_bytes": segment["allocated_size"],
            "active_bytes": segment["active_size"],
            "requested_bytes": segment["requested_size"],
            "stream": self.streams[segment["stream"]],
            "type": segment["segment_type"],
            "expandable": segment["is_expandable"],
            "pool": list(segment["segment_pool_id"]),
            "blocks": blocks,
        }

    def checkpoint(self, name):
        mark = 4096 * (1000 + self.checkpoints)
        self.checkpoints += 1
        devices = [self.stats(device) for device in range(torch.cuda.device_count())]
        segments = torch.cuda.memory_snapshot()
        answer = {
            "name": name,
            "mark_bytes": mark,
            "devices": devices,
            "segments": [self.segment(segment) for segment in segments],
            "failures": self.failures,
        }
        with open(os.path.join(self.folder, name + ".json"), "w") as file:
            json.dump(answer, file)
        buffer = ctypes.c_void_p()
        code = self.cudart.cudaHostAlloc(ctypes.byref(buffer), ctypes.c_size_t(mark), 0)
        code = code or self.cudart.cudaFreeHost(buffer)
        if code != 0:
            sys.exit("script: cudaHostAlloc or cudaFreeHost returned %d" % code)
        print("checkpoint " + name, flush=True)
        if not sys.stdin.readline():
            sys.exit("script: nobody waits at checkpoint " + name)

    def runs_out(self, count):
        try:
            block(count)
        except torch.OutOfMemoryError:
            stats = self.stats(0)
            self.failures.append(
                {
                    "tried_bytes": count,
                    "allocated_bytes": stats["allocated_bytes"]["current"],
                    "reserved_bytes": stats["reserved_bytes"]["current"],
                    "retries": stats["num_alloc_retries"],
                    "ooms": stats["num_ooms"],
                    "device_free_bytes": torch.cuda.mem_get_info()[0],
                }
            )
            return True
        return False


def block(count, device="cuda"):
    return torch.empty(count, dtype=torch.uint8, device=device)


def numbers(seed):
    """Numbers that are the same in every run."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def churn(kept, seed, rounds, most):
    """Allocates and frees at random, so that blocks are split, joined and found again."""
    source = numbers(seed)
    for _ in range(rounds):
        if kept and (len(kept) > most or next(source) % 3 == 0):
            victim = next(source) % len(kept)
            kept[victim] = kept[-1]
            kept.pop()
        else:
            limits = [64 * KIB, 64 * KIB, 64 * KIB, MIB, MIB, 10 * MIB, 50 * MIB, 200 * MIB]
            limit = limits[next(source) % len(limits)]
            kept.append(block(1 + next(source) % limit))


def must(condition, what):
    if not condition:
        sys.exit("script: " + what)


def training(program):
    """Steps of a small model whose kernels do nothing; the memory is what counts."""
    torch.manual_seed(1)
    weights = [torch.randn(512, 700, device="cuda", requires_grad=True) for _ in range(4)]
    biases = [torch.zeros(700, device="cuda", requires_grad=True) for _ in range(4)]
    optimizer = torch.optim.Adam(weights + biases, lr=1e-3, foreach=False)
    for step in range(6):
        # Sizes change, so that the allocator has work.
        batch = torch.randn(512, 700, device="cuda")
        scale = torch.randn(64 * (1 + step % 3), 1, 1, device="cuda")
        hidden = batch
        for weight, bias in zip(weights, biases):
            hidden = torch.nn.functional.dropout(torch.relu(hidden * weight + bias), 0.1)
        loss = (hidden * scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 3:
            program.checkpoint("training-backward")
        optimizer.step()
    program.checkpoint("training")


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: script.py FOLDER")
    program = Program(sys.argv[1])
    must(torch.cuda.is_available(), "PyTorch sees no card")
    torch.cuda.init()
    program.checkpoint("start")

    sizes = [1, 100, 511, 512, 513, 4096, 100_000, 512 * KIB, MIB - 1, MIB, MIB + 1, 3 * MIB, 7 * MIB + 100]
    sizes += [10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 21 * MIB, 99 * MIB + 7, 512 * MIB, 1024 * MIB + 12345, 777]
    blocks = [block(size) for size in sizes]
    program.checkpoint("sizes")
    for index in range(0, len(blocks), 3):
        blocks[index] = None
    for index in range(len(blocks) - 1, 10, -2):
        blocks[index] = None
    program.checkpoint("frees")

    # There and back again: what was copied to the card is what comes back.
    host = torch.arange(100_000, dtype=torch.int64)
    card = host.to("cuda")
    must(torch.equal(card.to("cpu"), host), "a copy to the card and back changed it")
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    must(pinned.is_pinned(), "a pinned buffer is none")
    pinned.fill_(7)
    there = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    must(torch.equal(there.cpu(), pinned), "a copy of pinned memory to the card and back changed it")
    program.checkpoint("copies")
    del card, there, pinned

    streams = [program.new_stream() for _ in range(3)]
    of_streams = []
    for turn, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            for size in (700 * KIB, 300 * KIB, 6 * MIB, 30 * MIB, 90 * MIB):
                of_streams.append(block(size + turn))
    del of_streams[1::2]
    program.checkpoint("streams")

    kept = []
    churn(kept, 1, 1500, 24)
    program.checkpoint("churn")
    torch.cuda.empty_cache()
    program.checkpoint("empty-cache")

    elsewhere = [block(12 * MIB, "cuda:1"), block(300, "cuda:1"), block(12 * MIB, "cuda:1")]
    elsewhere[0] = None
    program.checkpoint("second-device")

    of_threads = [[] for _ in range(4)]
    threads = [threading.Thread(target=churn, args=(of_threads[n], 10 + n, 300, 5)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    program.checkpoint("threads")

    of_threads.clear()
    kept.clear()
    of_streams.clear()
    blocks.clear()
    training(program)
    torch.cuda.empty_cache()
    program.checkpoint("trained")

    # What is cached has to be given back before a larger request fits.
    free, total = torch.cuda.mem_get_info()
    part = free // 8 // (2 * MIB) * (2 * MIB)
    blocks.append(block(1000))
    parts = [block(part) for _ in range(6)]
    del parts
    with torch.cuda.stream(streams[1]):
        blocks.append(block(4 * part))
    program.checkpoint("retry")

    must(program.runs_out(total + 2 * MIB) and program.runs_out(5 * part), "a request that cannot be met was met")
    blocks.append(block(5 * MIB))
    must(program.runs_out(1 << 40), "a request that cannot be met was met")
    program.checkpoint("oom")

    blocks.clear()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    blocks.append(block(part))
    must(program.runs_out(2 * part), "a request beyond the limit was met")
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    program.checkpoint("limit")

    # A block that another stream may still use is free for the program, and not for the allocator
    # until it looks at that stream again.
    first, second = block(25 * MIB), block(200 * KIB)
    first.record_stream(streams[2])
    second.record_stream(streams[2])
    del first, second
    program.checkpoint("pending")
    blocks.append(block(3 * KIB))
    program.checkpoint("pending-over")

    # A pool of its own: its blocks serve no other request.
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = [block(size) for size in (90 * KIB, 3 * MIB, 40 * MIB)]
        del pooled[1]
    pooled.append(block(3 * MIB))
    program.checkpoint("private-pool")
    pooled.clear()
    del pool

    blocks.clear()
    elsewhere.clear()
    torch.cuda.empty_cache()
    program.checkpoint("end")
    print("done", flush=True)


main()
