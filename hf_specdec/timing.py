"""Seconds of the parts of a step without extra synchronisation.

On a CPU the clock is read. On an accelerator events are recorded into the queue and read after the step's one host
read, when they have passed. Knows nothing of what it times.
"""

import time
from typing import Any

import torch

__all__ = ["StepTimer"]


class StepTimer:
    """Marks in time; `seconds` between two marks can be asked once the device has passed both."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: dict[str, Any] = {}  # seconds, or events on an accelerator

    def mark(self, name: str) -> None:
        """Remember now as `name`."""
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[name] = event
        else:
            self._marks[name] = time.perf_counter()

    def seconds(self, start: str, end: str) -> float:
        """Seconds from mark `start` to mark `end`."""
        first, last = self._marks[start], self._marks[end]
        return first.elapsed_time(last) / 1e3 if self._on_device else last - first
