"""Checks vramscope against a real card, its driver and PyTorch; prints one JSON report.

Every check gives {"status": "ok" | "failed" | "skipped", "detail": one line, "numbers": {...}}, and
none keeps another from running. Programs under test are this file again, started with --child: the
agent traces them, and they say on standard output what they did, which is compared with what the
agent wrote. Nothing here changes a setting of the card.

Standard library only; Python 3.8 or later.
"""

import argparse
import ctypes
import glob
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

TOTAL_SECONDS = 225
MIB = 1 << 20
# No usual size, so that it is known again.
MALLOC_BYTES = 65 * MIB + 512
PINNED_BYTES = 64 * MIB
PAIRS = 2000
TURNS = 3
STEPS = 60
MOVE_PAGES = 279  # x86-64's system call number
PAGE = 4096
# The name has changed over the releases.
EXPANDABLE = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


class Skip(Exception):
    """A check cannot be made here."""


class Failed(Exception):
    """A check found something wrong."""

    def __init__(self, detail, numbers=None):
        super().__init__(detail)
        self.numbers = numbers or {}


# ---------------------------------------------------------------- CUDA by ctypes


def load(names, what):
    """The first library of some names that loads."""
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise Skip("%s does not load: %s" % (what, "; ".join(reasons[:2]) or "not found"))


def libcuda():
    return load(["libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"], "libcuda")


def libcudart():
    """The system's, a toolkit's, or the one that comes with PyTorch."""
    names = ["libcudart.so.13", "libcudart.so.12", "libcudart.so"]
    folders = ["/usr/local/cuda/lib64", "/usr/local/cuda*/targets/*/lib"]
    for folder in sys.path:
        folders += [folder + "/nvidia/cuda_runtime/lib", folder + "/nvidia/cu*/lib", folder + "/torch/lib"]
    for folder in folders:
        names += sorted(glob.glob(folder + "/libcudart.so.[0-9]*"))
    return load(names, "libcudart")


def mapped(prefix):
    """Path of a library that this process has mapped."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(None, 5)[-1].strip()
            if os.path.basename(path).startswith(prefix):
                return path
    return None


def must(result, call):
    if result != 0:
        raise Failed("%s returned %d" % (call, result))


class Nvml:
    """What NVML says; reads only."""

    def __init__(self):
        self.lib = load(["libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1"], "NVML")
        must(self.lib.nvmlInit_v2(), "nvmlInit_v2")
        self.card = ctypes.c_void_p()
        must(self.lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.card)), "nvmlDeviceGetHandleByIndex_v2")

    def text(self, function, *before):
        buffer = ctypes.create_string_buffer(96)
        must(getattr(self.lib, function)(*before, buffer, 96), function)
        return buffer.value.decode(errors="replace")

    def used(self):
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        must(self.lib.nvmlDeviceGetMemoryInfo(self.card, ctypes.byref(memory)), "nvmlDeviceGetMemoryInfo")
        return memory[2]

    def used_by(self, pid):
        """Bytes of one process; None where NVML does not tell (as in some containers)."""

        class Info(ctypes.Structure):
            _fields_ = [
                ("pid", ctypes.c_uint),
                ("used", ctypes.c_ulonglong),
                ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint),
            ]

        infos = (Info * 256)()
        count = ctypes.c_uint(256)
        function = getattr(self.lib, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if function is None or function(self.card, ctypes.byref(count), infos) != 0:
            return None
        for info in infos[: count.value]:
            if info.pid == pid and info.used != 2**64 - 1:
                return info.used
        return None


# ---------------------------------------------------------------- programs under test


def child_where():
    found = {}
    for name, loader, prefix in [
        ("libcuda", libcuda, "libcuda.so"),
        ("libcudart", libcudart, "libcudart.so"),
    ]:
        try:
            loader()
            found[name] = mapped(prefix)
        except Skip as reason:
            found[name + "_missing"] = str(reason)
    return found


def child_malloc():
    cuda = libcudart()
    must(cuda.cudaFree(None), "cudaFree(0)")
    address = ctypes.c_void_p()
    must(cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(MALLOC_BYTES)), "cudaMalloc")
    used = None
    try:
        used = Nvml().used_by(os.getpid())
    except (Skip, Failed):
        pass
    must(cuda.cudaFree(address), "cudaFree")
    # The agent looks at what a process maps some time after it started.
    time.sleep(1.5)
    return {"pid": os.getpid(), "address": address.value, "bytes": MALLOC_BYTES, "nvml_process_bytes": used}


def child_pairs():
    """Nanoseconds of a cudaMalloc/cudaFree pair, the median, measured from inside."""
    cuda = libcudart()
    must(cuda.cudaFree(None), "cudaFree(0)")
    address = ctypes.c_void_p()
    pointer, size = ctypes.byref(address), ctypes.c_size_t(2 * MIB)
    malloc, free = cuda.cudaMalloc, cuda.cudaFree
    times = []
    end = time.monotonic() + 8
    for i in range(PAIRS):
        started = time.perf_counter_ns()
        failed = malloc(pointer, size) or free(address)
        times.append(time.perf_counter_ns() - started)
        must(failed, "cudaMalloc/cudaFree")
        if i % 64 == 0:
            # The agent has to keep up with what it is measured on.
            time.sleep(0.001)
            if time.monotonic() > end:
                break
    return {"pair_ns": statistics.median(times), "pairs": len(times)}


def child_pinned():
    cuda = libcudart()
    must(cuda.cudaFree(None), "cudaFree(0)")
    address = ctypes.c_void_p()
    must(cuda.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(PINNED_BYTES), 0), "cudaHostAlloc")
    count = PINNED_BYTES // PAGE
    addresses = (ctypes.c_void_p * count)(*range(address.value, address.value + PINNED_BYTES, PAGE))
    status = (ctypes.c_int * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    asked = libc.syscall(
        ctypes.c_long(MOVE_PAGES), 0, ctypes.c_ulong(count), addresses, None, status, 0
    )
    if asked != 0:
        raise Skip("move_pages: %s" % os.strerror(ctypes.get_errno()))
    nodes = {}
    for node in status:
        nodes[str(node)] = nodes.get(str(node), 0) + 1
    # The agent looks while the buffer is there.
    time.sleep(1)
    must(cuda.cudaFreeHost(address), "cudaFreeHost")
    return {"pid": os.getpid(), "bytes": PINNED_BYTES, "pages_by_node": nodes}


def child_proc_address():
    """For each name asked, what cuGetProcAddress gives and which exports lie there."""
    cuda = libcuda()
    must(cuda.cuInit(0), "cuInit")
    version = ctypes.c_int()
    must(cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    names = json.loads(sys.stdin.read())
    at = {}
    for name in names:
        function = getattr(cuda, name, None)
        if function is not None:
            at.setdefault(ctypes.cast(function, ctypes.c_void_p).value, []).append(name)
    two = getattr(cuda, "cuGetProcAddress_v2", None)
    answers = {}
    for name in names:
        base, per_thread = name, 0
        for ending in ("_ptsz", "_ptds"):
            if base.endswith(ending):
                base, per_thread = base[: -len(ending)], 2
        if base[-3:-1] == "_v" and base[-1].isdigit():
            base = base[:-3]
        address = ctypes.c_void_p()
        arguments = [base.encode(), ctypes.byref(address), version, ctypes.c_ulonglong(per_thread)]
        if two is not None:
            found = ctypes.c_int()
            code = two(*arguments, ctypes.byref(found))
        else:
            code = cuda.cuGetProcAddress(*arguments)
        answers[name] = {
            "asked": base,
            "result": code,
            "address": address.value,
            "exports": at.get(address.value, []),
        }
    return {"driver_version": version.value, "answers": answers}


def torch_or_skip():
    if os.environ.get("VRAMSCOPE_GPU_CHECK_NO_TORCH"):
        raise Skip("PyTorch is hidden by VRAMSCOPE_GPU_CHECK_NO_TORCH")
    try:
        import torch
    except Exception as error:  # A broken installation fails in many ways.
        raise Skip("PyTorch cannot be imported: %s" % error)
    if not torch.cuda.is_available():
        raise Skip("PyTorch %s sees no GPU" % torch.__version__)
    return torch


def torch_memory(torch):
    stats = torch.cuda.memory_stats()
    return {
        "reserved_peak_bytes": stats["reserved_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "allocated_peak_bytes": stats["allocated_bytes.all.peak"],
        "segments": stats["segment.all.allocated"],
    }


def child_expandable():
    torch = torch_or_skip()
    blocks = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    answer = torch_memory(torch)
    del blocks
    return dict(answer, pid=os.getpid(), torch=torch.__version__)


def child_account():
    torch = torch_or_skip()
    nvml = None
    try:
        nvml = Nvml()
    except (Skip, Failed):
        pass
    kept = [torch.empty(n * MIB, dtype=torch.uint8, device="cuda") for n in (1, 3, 20, 64, 200)]
    torch.cuda.synchronize()
    answer = torch_memory(torch)
    answer["nvml_process_bytes"] = nvml.used_by(os.getpid()) if nvml else None
    del kept
    return dict(answer, pid=os.getpid(), torch=torch.__version__)


def child_framework():
    """Allocates in many ways through PyTorch, and gives its own account at each checkpoint."""
    torch = torch_or_skip()
    cuda = libcudart()
    # Time for the agent to hook what was just loaded.
    time.sleep(1.5)
    checkpoints = []

    def block(count):
        return torch.empty(count, dtype=torch.uint8, device="cuda")

    def checkpoint(name):
        # The allocator reports its totals with a block: these are fresh.
        fresh = block(1)
        del fresh
        stats = torch.cuda.memory_stats()
        segments = [
            {
                "address": segment["address"],
                "bytes": segment["total_size"],
                "expandable": segment.get("is_expandable", False),
                "blocks": [
                    [address, size, requested]
                    for address, size, requested, state in blocks_of(segment)
                    if state == "active_allocated"
                ],
            }
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == 0
        ]
        mark = PAGE * (1000 + len(checkpoints))
        buffer = ctypes.c_void_p()
        must(cuda.cudaHostAlloc(ctypes.byref(buffer), ctypes.c_size_t(mark), 0), "cudaHostAlloc")
        must(cuda.cudaFreeHost(buffer), "cudaFreeHost")
        checkpoints.append(
            {
                "name": name,
                "mark_bytes": mark,
                "allocated_bytes": stats["allocated_bytes.all.current"],
                "reserved_bytes": stats["reserved_bytes.all.current"],
                "requested_bytes": stats.get("requested_bytes.all.current"),
                "blocks": stats["allocation.all.current"],
                "ooms": stats["num_ooms"],
                "segments": segments,
            }
        )

    sizes = [1, 513, 100_000, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB, 21 * MIB, 99 * MIB + 7]
    blocks = [block(size) for size in sizes]
    checkpoint("sizes")
    del blocks[::3]
    checkpoint("frees")
    with torch.cuda.stream(torch.cuda.Stream()):
        blocks += [block(size) for size in (700 << 10, 6 * MIB, 30 * MIB)]
    torch.cuda.synchronize()
    checkpoint("stream")
    torch.cuda.empty_cache()
    checkpoint("empty_cache")
    # A limit of the program's own: nothing else on the card is touched.
    total = torch.cuda.get_device_properties(0).total_memory
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((reserved + 64 * MIB) / total, 0)
    try:
        blocks.append(block(256 * MIB))
        raise Failed("a request beyond the program's limit was met")
    except RuntimeError as error:  # torch.OutOfMemoryError, under its name of any version.
        if "out of memory" not in str(error):
            raise
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    checkpoint("oom")
    weight = torch.randn(1 << 20, device="cuda", requires_grad=True)
    for _ in range(3):
        (weight * weight).sum().backward()
        weight.grad = None
    torch.cuda.synchronize()
    checkpoint("backward")
    del weight
    blocks.clear()
    checkpoint("freed")
    return {"pid": os.getpid(), "torch": torch.__version__, "checkpoints": checkpoints}


def blocks_of(segment):
    """(address, bytes, requested bytes, state) of each block; older releases give no addresses."""
    address = segment["address"]
    for found in segment["blocks"]:
        yield found.get("address", address), found["size"], found.get("requested_size"), found["state"]
        address += found["size"]


def child_train():
    """Milliseconds of one training step, the median."""
    torch = torch_or_skip()
    torch.manual_seed(1)
    width = 2048
    layers = []
    for _ in range(4):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    times = []
    for step in range(STEPS):
        # Sizes change, so that the allocator has work.
        batch = torch.randn(256 + 32 * (step % 8), width, device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        if step >= 10:
            times.append((time.perf_counter_ns() - started) / 1e6)
    return {"step_ms": statistics.median(times), "steps": len(times), "torch": torch.__version__}


CHILDREN = {
    "where": child_where,
    "malloc": child_malloc,
    "pairs": child_pairs,
    "pinned": child_pinned,
    "proc_address": child_proc_address,
    "expandable": child_expandable,
    "account": child_account,
    "framework": child_framework,
    "train": child_train,
}


def run_child(name):
    try:
        answer = {"ok": CHILDREN[name]()}
    except Skip as reason:
        answer = {"skip": str(reason)}
    except Failed as reason:
        answer = {"fail": str(reason)}
    print("ANSWER " + json.dumps(answer), flush=True)
    return 0


# ---------------------------------------------------------------- the checking side


class State:
    """What a program holds, as far as rows tell, on its first card."""

    def __init__(self):
        self.blocks = {}
        self.device = {}
        self.mapped = {}
        self.ooms = 0
        self.said = (None, None)

    def take(self, row):
        op, kind, address = row["op"], row.get("memory_kind"), row.get("address")
        if row["layer"] == "framework":
            if row.get("device") != 0:
                return
            if op == "oom":
                self.ooms += 1
            elif op == "alloc":
                self.blocks[address] = (row["bytes"], row.get("requested_bytes"))
            elif op == "free":
                self.blocks.pop(address, None)
            if row.get("allocator_allocated_bytes") is not None:
                self.said = (row["allocator_allocated_bytes"], row.get("allocator_reserved_bytes"))
            return
        held = {"device": self.device, "vmm_mapped": self.mapped}.get(kind)
        if held is None or not row["counted"] or row.get("result", 0) != 0:
            return
        if op in ("alloc", "map"):
            held[address] = row["bytes"]
        else:
            held.pop(address, None)

    def is_mapped(self, address, length):
        end = address + length
        while address < end:
            if address not in self.mapped:
                return False
            address += self.mapped[address]
        return address == end

    def differences(self, truth):
        """Lines, one for each place where the program says otherwise."""
        requested = [requested for _, requested in self.blocks.values()]
        ours = {
            "allocated_bytes": sum(size for size, _ in self.blocks.values()),
            "blocks": len(self.blocks),
            "ooms": self.ooms,
            "requested_bytes": None if None in requested else sum(requested),
            "reserved_bytes": self.said[1],
        }
        for name, value in ours.items():
            if truth[name] is not None and value != truth[name]:
                yield "%s: rows %s, torch %s" % (name, value, truth[name])
        if self.said[0] != truth["allocated_bytes"]:
            yield "allocated as reported last: rows %s, torch %s" % (self.said[0], truth["allocated_bytes"])
        for segment in truth["segments"]:
            address, length = segment["address"], segment["bytes"]
            if segment["expandable"]:
                found = self.is_mapped(address, length)
            else:
                found = self.device.get(address) == length
            if not found:
                yield "segment %#x of %d bytes is not in the rows" % (address, length)
            for start, size, asked in segment["blocks"]:
                row = self.blocks.get(start)
                if row is None or row[0] != size or asked is not None and row[1] != asked:
                    yield "block %#x: rows %s, torch %s" % (start, row, (size, asked))


class Checker:
    def __init__(self, agent, folder):
        self.agent = agent
        self.folder = folder
        self.ends = time.monotonic() + TOTAL_SECONDS
        self.libraries = []
        self.where = {}
        self.traces = 0
        self.bpf_works = False

    def limit(self, seconds):
        left = self.ends - time.monotonic()
        if left < 3:
            raise Skip("no time is left of %d s" % TOTAL_SECONDS)
        return min(seconds, left)

    def run(self, command, seconds, env=None, text=None):
        """Runs to the end; (exit code, standard output, standard error)."""
        limit = self.limit(seconds)
        full = dict(os.environ)
        full.update(env or {})
        try:
            done = subprocess.run(
                command,
                input=text if text is not None else "",
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=full,
                timeout=limit,
                universal_newlines=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise Failed("%s was not over after %.0f s" % (os.path.basename(command[0]), limit))
        except OSError as error:
            raise Failed("%s does not start: %s" % (command[0], error))
        return done.returncode, done.stdout, done.stderr

    @staticmethod
    def answer(name, code, out, err):
        for line in reversed(out.splitlines()):
            if line.startswith("ANSWER "):
                answer = json.loads(line[7:])
                if "skip" in answer:
                    raise Skip(answer["skip"])
                if "fail" in answer:
                    raise Failed(answer["fail"])
                return answer["ok"]
        raise Failed("program %r ended with %s: %s" % (name, code, last_line(err)))

    def program(self, name):
        return [sys.executable, os.path.abspath(__file__), "--child", name]

    def untraced(self, name, seconds=60, env=None, text=None):
        return self.answer(name, *self.run(self.program(name), seconds, env, text))

    def traced(self, name, seconds=75, env=None):
        """Runs a program under the agent: (its answer, the summary, the trace's folder)."""
        if not self.bpf_works:
            raise Skip("the agent cannot trace here, see check bpf")
        self.traces += 1
        folder = os.path.join(self.folder, "%02d-%s" % (self.traces, name))
        command = [self.agent, "trace", "--json", "-o", folder]
        if self.libraries:
            command += ["--libraries", ",".join(self.libraries)]
        command += ["--"] + self.program(name)
        code, out, err = self.run(command, seconds, env)
        answer = self.answer(name, code, out, err)
        return answer, summary_of(err), folder

    def rows(self, folder, table):
        code, out, err = self.run([self.agent, "rows", folder, "--table", table], 30)
        if code != 0:
            raise Failed("vramscope-agent rows: %s" % last_line(err))
        return [json.loads(line) for line in out.splitlines() if line.strip()]

    # Each check gives (detail, numbers), or raises.

    def check_system(self):
        numbers = {"kernel": platform.release(), "machine": platform.machine(), "python": platform.python_version()}
        self.where = self.untraced("where")
        numbers.update(self.where)
        self.libraries = [path for path in (self.where.get("libcuda"), self.where.get("libcudart")) if path]
        for path in ("/proc/driver/nvidia/version",):
            if os.path.exists(path):
                with open(path) as file:
                    numbers["kernel_module"] = file.readline().strip()
        try:
            nvml = Nvml()
            numbers["driver"] = nvml.text("nvmlSystemGetDriverVersion")
            numbers["card"] = nvml.text("nvmlDeviceGetName", nvml.card)
            numbers["used_bytes"] = nvml.used()
        except (Skip, Failed, AttributeError) as reason:
            numbers["nvml_missing"] = str(reason)
        numbers["root"] = os.geteuid() == 0
        if "libcuda" not in numbers or numbers["libcuda"] is None:
            raise Skip(numbers.get("libcuda_missing", "no libcuda"), numbers)
        return "kernel %s, driver %s" % (numbers["kernel"], numbers.get("driver", "unknown")), numbers

    def check_bpf(self):
        folder = os.path.join(self.folder, "bpf")
        code, _, err = self.run([self.agent, "trace", "--json", "-o", folder, "--", "true"], 30)
        if code != 0:
            raise Failed(last_line(err))
        self.bpf_works = True
        summary = summary_of(err)
        numbers = {"agent": self.run([self.agent, "--version"], 10)[1].strip()}
        for key in ("libraries", "hooked", "not_hooked", "features"):
            if key in summary:
                numbers[key] = summary[key]
        return "programs loaded and attached", numbers

    def check_one_malloc(self):
        answer, summary, folder = self.traced("malloc")
        rows = [row for row in self.rows(folder, "alloc_events") if row["pid"] == answer["pid"]]
        of_it = [row for row in rows if row.get("address") == answer["address"] and row["op"] == "alloc"]
        counted = [row for row in of_it if row["counted"]]
        frees = [
            row
            for row in rows
            if row.get("address") == answer["address"] and row["op"] == "free" and row["counted"]
        ]
        numbers = {
            "bytes": answer["bytes"],
            "rows": len(of_it),
            "counted_rows": len(counted),
            "counted_bytes": sum(row["bytes"] for row in counted),
            "counted_frees": len(frees),
            "apis": sorted({row["api"] for row in of_it}),
            "other_counted_allocations": sum(
                1 for row in rows if row["op"] == "alloc" and row["counted"] and row not in of_it
            ),
            "lost": summary.get("lost"),
        }
        if len(counted) != 1 or numbers["counted_bytes"] != answer["bytes"] or len(frees) != 1:
            raise Failed("one cudaMalloc and cudaFree should count once each", numbers)
        return "one cudaMalloc gave one counted row, its cudaFree another", numbers

    def check_proc_address(self):
        _, _, folder = self.traced("malloc")
        names = set()
        for process in self.rows(folder, "processes"):
            for entry in process.get("coverage") or []:
                if entry["attached"] and entry["symbol"].startswith("cu") and not entry["symbol"].startswith("cuda"):
                    names.add(entry["symbol"])
        if not names:
            raise Skip("the agent hooked no function of libcuda")
        answer = self.untraced("proc_address", text=json.dumps(sorted(names)))
        same, elsewhere, unknown = [], {}, []
        for name, given in sorted(answer["answers"].items()):
            if given["result"] != 0 or not given["address"]:
                unknown.append(name)
            elif set(given["exports"]) & names:
                same.append(name)
            else:
                elsewhere[name] = given
        numbers = {
            "driver_version": answer["driver_version"],
            "asked": len(answer["answers"]),
            "at_a_hooked_export": len(same),
            "unknown_to_the_driver": unknown,
            "elsewhere": elsewhere,
        }
        if elsewhere:
            raise Failed("cuGetProcAddress gives code that no hook covers: %s" % ", ".join(elsewhere), numbers)
        return "cuGetProcAddress gave a hooked export for %d names" % len(same), numbers

    def check_pinned_numa(self):
        answer, _, folder = self.traced("pinned")
        rows = [row for row in self.rows(folder, "host_buffers") if row["pid"] == answer["pid"]]
        rows = [row for row in rows if row["bytes"] == answer["bytes"]]
        numbers = {"move_pages": answer["pages_by_node"], "rows": len(rows)}
        if not rows:
            raise Failed("the agent wrote no placement of the pinned buffer", numbers)
        seen = {}
        for entry in rows[0]["pages"]:
            node = "-2" if entry.get("node") is None else str(entry["node"])
            seen[node] = seen.get(node, 0) + entry["pages"]
        numbers.update(agent=seen, gpu_node=rows[0].get("gpu_node"), misplaced_bytes=rows[0].get("misplaced_bytes"))

        def shares(pages):
            total = float(sum(pages.values())) or 1.0
            return {node: count / total for node, count in pages.items()}

        mine, theirs = shares(answer["pages_by_node"]), shares(seen)
        apart = max(abs(mine.get(node, 0) - theirs.get(node, 0)) for node in set(mine) | set(theirs))
        numbers["largest_difference_of_shares"] = apart
        # The agent samples one page of each 2 MiB.
        if apart > 0.05:
            raise Failed("the agent's placement differs from move_pages", numbers)
        return "the agent's placement agrees with move_pages", numbers

    def check_expandable_segments(self):
        answer, summary, _ = self.traced("expandable", env=EXPANDABLE)
        kinds = by_kind(summary, answer["pid"])
        physical = kinds.get("vmm_physical", {})
        numbers = {"torch": answer, "agent": kinds}
        if not physical.get("allocations"):
            raise Failed("no cuMemCreate of PyTorch's expandable segments was seen", numbers)
        if physical["peak_bytes"] < answer["reserved_peak_bytes"]:
            raise Failed("fewer bytes created than PyTorch reserved", numbers)
        return "expandable segments are seen: %d bytes created, %d reserved" % (
            physical["peak_bytes"],
            answer["reserved_peak_bytes"],
        ), numbers

    def check_accounting(self):
        answer, summary, _ = self.traced("account")
        kinds = by_kind(summary, answer["pid"])
        physical = sum(
            kinds.get(kind, {}).get("peak_bytes", 0) for kind in ("device", "managed", "array", "vmm_physical")
        )
        nvml = answer["nvml_process_bytes"]
        numbers = {
            "traced_peak_bytes": physical,
            "torch": answer,
            "agent": kinds,
            "traced_over_torch_bytes": physical - answer["reserved_peak_bytes"],
            "nvml_over_traced_bytes": None if nvml is None else nvml - physical,
            "lost": summary.get("lost"),
        }
        if physical < answer["reserved_peak_bytes"]:
            raise Failed("fewer bytes traced than PyTorch reserved", numbers)
        if nvml is not None and nvml < physical - 2 * MIB:
            raise Failed("more bytes traced than NVML gives the process", numbers)
        return "traced %d bytes, PyTorch reserved %d, NVML gives the process %s" % (
            physical,
            answer["reserved_peak_bytes"],
            nvml,
        ), numbers

    def check_framework(self):
        return self.framework({})

    def check_framework_expandable(self):
        return self.framework(EXPANDABLE)

    def framework(self, env):
        """PyTorch's own account at each checkpoint against what follows from the rows."""
        answer, summary, folder = self.traced("framework", env=env)
        rows = [row for row in self.rows(folder, "alloc_events") if row["pid"] == answer["pid"]]
        rows.sort(key=lambda row: (row["ts_ns"], row["seq"]))
        of_framework = [row for row in rows if row["layer"] == "framework"]
        numbers = {"torch": answer["torch"], "framework_rows": len(of_framework), "lost": summary.get("lost")}
        if not of_framework:
            reasons = set()
            for process in self.rows(folder, "processes"):
                for entry in process.get("coverage") or []:
                    if not entry["attached"] and "c10" in os.path.basename(entry["library"]):
                        reasons.add("%s: %s" % (entry["symbol"], entry.get("reason")))
            numbers["not_hooked"] = sorted(reasons)
            raise Failed("no row of PyTorch's allocator", numbers)
        differences, blocks = [], 0
        for truth in answer["checkpoints"]:
            state = State()
            for row in rows:
                if row.get("bytes") == truth["mark_bytes"] and row.get("memory_kind") == "pinned_host":
                    break
                state.take(row)
            else:
                raise Failed("checkpoint %s has no mark in the rows" % truth["name"], numbers)
            differences += ["%s: %s" % (truth["name"], line) for line in state.differences(truth)]
            blocks += sum(len(segment["blocks"]) for segment in truth["segments"])
        numbers.update(checkpoints=len(answer["checkpoints"]), blocks=blocks, differences=differences[:20])
        if differences:
            raise Failed("the rows differ from torch.cuda's own account in %d places" % len(differences), numbers)
        return "%d checkpoints and %d blocks equal torch.cuda's own account" % (
            numbers["checkpoints"],
            blocks,
        ), numbers

    def turns(self, name, figure, seconds, turns):
        """Medians of a figure untraced and traced, in turns."""
        plain, traced, lost = [], [], {}
        for _ in range(turns):
            plain.append(self.untraced(name, seconds)[figure])
            answer, summary, _ = self.traced(name, seconds)
            traced.append(answer[figure])
            for cause, count in (summary.get("lost") or {}).items():
                lost[cause] = lost.get(cause, 0) + count
        before, after = statistics.median(plain), statistics.median(traced)
        return {
            "untraced_" + figure: before,
            "traced_" + figure: after,
            "added": after - before,
            "ratio": after / before if before else None,
            "lost": lost,
        }

    def check_pair_cost(self):
        numbers = self.turns("pairs", "pair_ns", 25, TURNS)
        return "tracing adds %.0f ns to a cudaMalloc/cudaFree pair of %.0f ns" % (
            numbers["added"],
            numbers["untraced_pair_ns"],
        ), numbers

    def check_training_cost(self):
        numbers = self.turns("train", "step_ms", 45, 2)
        return "a training step takes %.2f ms untraced, %.2f ms traced" % (
            numbers["untraced_step_ms"],
            numbers["traced_step_ms"],
        ), numbers


def last_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:400] if lines else "(it printed nothing)"


def summary_of(err):
    for line in reversed(err.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    raise Failed("the agent printed no summary: %s" % last_line(err))


def by_kind(summary, pid):
    """The summary's totals of one process, over devices, by kind of memory."""
    kinds = {}
    for line in summary.get("totals", []):
        if line["pid"] != pid:
            continue
        total = kinds.setdefault(line["memory_kind"], {})
        for key in ("allocations", "frees", "allocated_bytes", "peak_bytes", "live_at_exit_bytes"):
            total[key] = total.get(key, 0) + line.get(key, 0)
    return kinds


CHECKS = [
    "system",
    "bpf",
    "one_malloc",
    "proc_address",
    "pinned_numa",
    "pair_cost",
    "accounting",
    "expandable_segments",
    "framework",
    "framework_expandable",
    "training_cost",
]


def main():
    parser = argparse.ArgumentParser(description="Checks vramscope on a machine with an NVIDIA GPU.")
    parser.add_argument("--agent", help="path of vramscope-agent")
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", choices=CHECKS, help="only this check (and system, bpf)")
    options = parser.parse_args()
    if options.child:
        return run_child(options.child)
    agent = options.agent or shutil.which("vramscope-agent")
    if not agent or not os.access(agent, os.X_OK):
        print(json.dumps({"tool": "vramscope gpu-check", "checks": {}, "error": "no vramscope-agent to run"}))
        return 2

    started = time.monotonic()
    checks = {}
    with tempfile.TemporaryDirectory(prefix="vramscope-gpu-check-") as folder:
        checker = Checker(agent, folder)
        for name in CHECKS:
            if options.only and name not in options.only + ["system", "bpf"]:
                continue
            print("checking %s …" % name, file=sys.stderr, flush=True)
            began = time.monotonic()
            try:
                detail, numbers = getattr(checker, "check_" + name)()
                status = "ok"
            except Skip as reason:
                status, detail = "skipped", str(reason.args[0])
                numbers = reason.args[1] if len(reason.args) > 1 else {}
            except Failed as reason:
                status, detail, numbers = "failed", str(reason), reason.numbers
            except Exception as error:  # One check's surprise must not take the others' answers.
                status, detail, numbers = "failed", "%s: %s" % (type(error).__name__, error), {}
            checks[name] = {
                "status": status,
                "detail": detail,
                "numbers": numbers,
                "seconds": round(time.monotonic() - began, 1),
            }
            print("  %s: %s" % (status, detail), file=sys.stderr, flush=True)
    system = checks.get("system", {}).get("numbers", {})
    report = {
        "tool": "vramscope gpu-check",
        "agent": checks.get("bpf", {}).get("numbers", {}).get("agent"),
        "kernel": system.get("kernel"),
        "driver": system.get("driver"),
        "card": system.get("card"),
        "checks": checks,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(report, indent=2, sort_keys=False))
    return 1 if any(check["status"] == "failed" for check in checks.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
