"""Stages 0 and 1: what the device is, and the handful of speeds that everything else is made of."""

import contextlib
import inspect
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.clock import Case
from benchmarks.gpu.nets import Shape, base_net
from benchmarks.gpu.passes import CachedPass
from benchmarks.gpu.predictions import HOST_MS, MICRO
from benchmarks.gpu.run import Run
from benchmarks.gpu.widening import Widening, widen

__all__ = ["device_facts", "micro"]

NUM_OPS = 1000
DEPTHS = (4, 12)  # layers of the two nets whose difference is the host's time per layer
GPU_QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total"


def device_facts(run: Run) -> None:
    """Versions, clocks, the CPU that has to issue everything, and which optional parts are there."""
    facts = run.record.facts
    facts["cpu"] = _cpu_name()
    facts["cuda"], facts["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    facts["nf4"] = run.models.why_no_nf4 or "works"
    if run.models.why_no_nf4 is not None:
        run.note(f"nf4 is left out: {run.models.why_no_nf4}")
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        facts["varlen_attn"] = str(inspect.signature(varlen_attn))
    if run.is_cuda:
        found: Any = torch.cuda.get_device_properties(run.device)
        facts["gpu"] = {
            "name": found.name,
            "bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
            "capability": f"{found.major}.{found.minor}",
        }
        clock.warm_up(run.device)  # an idle GPU would show its idle clocks
        facts["nvidia-smi"] = _nvidia_smi()


def _cpu_name() -> str | None:
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def _nvidia_smi() -> dict[str, str] | None:
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return dict(zip(GPU_QUERY.split(","), done.stdout.strip().split(", "), strict=False)) if done.stdout else None


def micro(run: Run) -> None:
    """Bandwidths, and what a launch, a layer and a wait cost the host."""
    _bandwidth(run)
    _tiny_ops(run)
    _host_per_layer(run)
    if run.is_cuda:
        _graph_of_tiny_kernels(run)
        _pinned_copy(run)


def _bandwidth(run: Run) -> None:
    dtype = torch.bfloat16 if run.is_cuda else torch.float32
    num = run.sizes.micro_bytes // dtype.itemsize
    source = torch.ones(num, dtype=dtype, device=run.device)
    copy, vector = torch.empty_like(source), torch.ones(8192 if run.is_cuda else 256, dtype=dtype, device=run.device)
    matrix = source.view(-1, len(vector))
    cases = {"copy": Case(lambda: copy.copy_(source)), "read": Case(lambda: matrix @ vector)}
    timings = clock.measure(cases, run.device, run.rounds)
    for name, num_bytes in (("copy", 2 * source.nbytes), ("read", source.nbytes)):
        raw = [num_bytes / seconds / 1e12 for seconds in timings[name].device_seconds or timings[name].seconds]
        run.value(f"bandwidth, {name}", statistics.median(raw), "TB/s", MICRO[name], raw)
        run.bytes_per_second = max(run.bytes_per_second or 0.0, max(raw) * 1e12)


def _tiny_ops(run: Run) -> None:
    tensor = torch.zeros(64, device=run.device)

    def work() -> None:
        for _ in range(NUM_OPS):
            tensor.add_(1)

    timing = clock.measure({"ops": Case(work)}, run.device, run.rounds)["ops"]
    raw = [seconds / NUM_OPS * 1e6 for seconds in timing.issue_seconds]
    run.value("one tiny operation, issued", statistics.median(raw), "µs", MICRO["tiny op"], raw)


def _host_per_layer(run: Run) -> None:
    """A layer's time in a pass so narrow that only the host matters: the slope between two depths."""
    dtype = torch.bfloat16 if run.is_cuda else torch.float32
    cases = {}
    for depth in DEPTHS:
        net = widen(base_net(Shape(64, 2, 1, 32, 64, depth, 64, 64), 0, run.device), Widening(), dtype)
        cases[str(depth)] = CachedPass(net, run.sizes.context, 1).case()
    timings = clock.measure(cases, run.device, 4 * run.rounds)
    short, long = (timings[str(depth)].median for depth in DEPTHS)
    per_layer = (long - short) / (DEPTHS[1] - DEPTHS[0]) * 1e3
    run.value("a layer, issued eagerly", per_layer, "ms", MICRO["host per layer"])
    run.host_factor = per_layer / HOST_MS["bf16"]
    if run.has_predictions:
        run.note(f"Eager predictions are scaled by this host's factor, {run.host_factor:.2f}.")


def _graph_of_tiny_kernels(run: Run) -> None:
    tensor = torch.zeros(64, device=run.device)

    def work() -> None:
        for _ in range(NUM_OPS):
            tensor.add_(1)

    timing = clock.measure({"graph": clock.capture(work).case()}, run.device, run.rounds)["graph"]
    raw = [seconds / NUM_OPS * 1e6 for seconds in timing.device_seconds]
    run.value("one tiny kernel in a graph", statistics.median(raw), "µs", MICRO["graph kernel"], raw)
    launch = [seconds * 1e6 for seconds in timing.issue_seconds]
    run.value("launching that graph", statistics.median(launch), "µs", raw=launch)


def _pinned_copy(run: Run) -> None:
    """What the loop pays per step to know what it accepted."""
    source = torch.zeros(16, dtype=torch.int32, device=run.device)
    pinned, event = torch.zeros(16, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
    raw = []
    for _ in range(200):
        torch.cuda.synchronize(run.device)
        started = time.perf_counter()
        pinned.copy_(source, non_blocking=True)
        event.record()
        event.synchronize()
        raw.append((time.perf_counter() - started) * 1e6)
    run.value("64 bytes to the host and a wait", statistics.median(raw), "µs", MICRO["pinned copy"], raw[-20:])
