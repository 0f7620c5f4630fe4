"""Times of small pieces of work: medians over shuffled rounds, by the host's clock and by the device's events.

`seconds` is what a caller waits, from an idle device to an idle device. `issue_seconds` is when the call returned:
where it is nearly all of `seconds`, the host is what the work waits for. `device_seconds` lies between two events.

Knows nothing of models.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Captured", "Case", "Timing", "capture", "measure", "synchronize", "warm_up"]

WARM_UP_SECONDS = 1.0  # an idle GPU runs at a fraction of its clock


@dataclass(frozen=True)
class Case:
    """Work to be timed, and what has to be done before each time, untimed."""

    work: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass
class Timing:
    """One entry per repetition; `device_seconds` stays empty without a CUDA device."""

    seconds: list[float] = field(default_factory=list)
    issue_seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of `seconds`."""
        return statistics.median(self.seconds)

    @property
    def device_median(self) -> float:
        """Of `device_seconds`, of `seconds` without a CUDA device."""
        return statistics.median(self.device_seconds or self.seconds)

    @property
    def issue_share(self) -> float:
        """Part of the time that the host took to issue the work: near 1, launches are what is waited for."""
        return statistics.median(self.issue_seconds) / self.median


def synchronize(device: torch.device) -> None:
    """Wait for everything issued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(device: torch.device) -> None:
    """On a CUDA device at least a second of work, so that clocks are up."""
    if device.type != "cuda":
        return
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_SECONDS:
        for _ in range(20):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure(
    cases: Mapping[str, Case],
    device: torch.device,
    rounds: int = 5,
    seed: int = 0,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, Timing]:
    """Every case `rounds` times, in an order drawn for each round, after one untimed time.

    Args:
        cases: by name.
        device: that they run on.
        rounds: at least 5 for a median.
        seed: of the order.
        is_over: asked before each round but the first; True ends it.
    """
    shuffle, timings = random.Random(seed).shuffle, {name: Timing() for name in cases}
    warm_up(device)
    for case in cases.values():
        case.prepare()
        case.work()
    for number in range(rounds):
        if number and is_over():
            break
        names = list(cases)
        shuffle(names)
        for name in names:
            _repeat(cases[name], timings[name], device)
    return timings


def _repeat(case: Case, timing: Timing, device: torch.device) -> None:
    case.prepare()
    synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
    started = time.perf_counter()
    for event in events[:1]:
        event.record()
    case.work()
    for event in events[1:]:
        event.record()
    issued = time.perf_counter()
    synchronize(device)
    timing.seconds.append(time.perf_counter() - started)
    timing.issue_seconds.append(issued - started)
    if events:
        timing.device_seconds.append(events[0].elapsed_time(events[1]) / 1e3)


@dataclass(frozen=True)
class Captured:
    """A CUDA graph and what its work returned, filled anew by every replay."""

    graph: Any
    output: Any

    def case(self) -> Case:
        """Replaying it."""
        return Case(self.graph.replay)


@torch.no_grad()
def capture(work: Callable[[], Any], pool: Any = None) -> Captured:
    """Capture `work` into a CUDA graph, after three runs on a side stream that let libraries set themselves up.

    Args:
        work: reads nothing on the host, and finds the same tensors at the same places each time.
        pool: of `torch.cuda.graph_pool_handle()`, for graphs that are never replayed at once.
    """
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = work()
    graph.replay()
    torch.cuda.synchronize()
    return Captured(graph, output)
