"""A run: stages in order until the deadline, what each found, and the JSON file that is complete after every stage.

A stage that fails takes nothing with it: its exception is kept and the next one begins. Whether the run passed is
decided by correctness alone: no check failed, and no correctness stage broke off.

Knows nothing of what the stages do.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import Models, Sizes
from benchmarks.gpu.predictions import Range

__all__ = ["Check", "Run", "Stage", "StageRecord", "Value", "run_stages"]


@dataclass(frozen=True)
class Check:
    """A question of correctness and its answer."""

    name: str
    is_passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Value:
    """A measured number beside its prediction.

    Attributes:
        name, value, unit: what was measured.
        predicted: None where nothing was predicted for this device and size.
        raw: every repetition, in the same unit; empty for derived numbers.
        is_shown: whether the table has a row for it.
    """

    name: str
    value: float
    unit: str
    predicted: Range | None = None
    raw: list[float] = field(default_factory=list)
    is_shown: bool = True


@dataclass
class StageRecord:
    """What a stage found.

    Attributes:
        status: "done", "skipped" or "error".
        reason: why it was skipped, or the error.
        facts: anything else, as plain JSON data.
    """

    number: int
    title: str
    is_correctness: bool
    status: str = "done"
    reason: str = ""
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_passed(self) -> bool:
        """No check failed, and correctness was not broken off."""
        return all(check.is_passed for check in self.checks) and not (self.is_correctness and self.status == "error")


@dataclass
class Run:
    """What stages work with, and where they write what they find.

    Attributes:
        device, is_tiny, sizes, models: what is measured.
        deadline: of the run, on `time.monotonic`'s clock.
        rounds: repetitions of every timing.
        has_predictions: whether device and sizes are those that predictions are for.
        host_factor: this host's time per layer over that of the host predicted for (stage 1).
        bytes_per_second: the most that copying or reading a large tensor reached (stage 1); None before.
    """

    device: torch.device
    is_tiny: bool
    sizes: Sizes
    models: Models
    deadline: float
    rounds: int = 5
    has_predictions: bool = False
    host_factor: float = 1.0
    bytes_per_second: float | None = None
    record: StageRecord = field(default_factory=lambda: StageRecord(-1, "", False))
    _stage_end: float = float("inf")

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    def seconds_left(self) -> float:
        """Of the stage and of the run, whichever ends first."""
        return min(self._stage_end, self.deadline) - time.monotonic()

    def begin(self, record: StageRecord, seconds: float) -> None:
        """Write to `record` from now on, for `seconds` at most."""
        self.record, self._stage_end = record, time.monotonic() + seconds

    def check(self, name: str, is_passed: bool, detail: str = "") -> None:
        """Keep a correctness check."""
        self.record.checks.append(Check(name, bool(is_passed), detail))

    def value(
        self,
        name: str,
        value: float,
        unit: str,
        predicted: Range | None = None,
        raw: Sequence[float] = (),
        is_shown: bool = True,
    ) -> None:
        """Keep a number; its prediction is dropped where it is for other devices or sizes."""
        predicted = predicted if self.has_predictions else None
        self.record.values.append(Value(name, value, unit, predicted, [float(f"{x:.5g}") for x in raw], is_shown))

    def note(self, text: str) -> None:
        """Keep a remark."""
        self.record.notes.append(text)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        work: does it.
        least: seconds without which it is not begun.
        seconds: that it may take; its loops end then.
        is_correctness: whether an exception in it fails the run.
        needs_cuda: skipped elsewhere.
    """

    number: int
    title: str
    work: Callable[[Run], None]
    least: float
    seconds: float
    is_correctness: bool = False
    needs_cuda: bool = False


def run_stages(
    run: Run, stages: Sequence[Stage], head: dict[str, Any], path: Path | None, tell: Callable[[str], None]
) -> list[StageRecord]:
    """Run `stages`; write `head` and all records so far to `path` after each."""
    records: list[StageRecord] = []
    for stage in stages:
        record = StageRecord(stage.number, stage.title, stage.is_correctness)
        records.append(record)
        tell(f"stage {stage.number}: {stage.title} ({run.deadline - time.monotonic():.0f} s left)")
        started = time.monotonic()
        run.begin(record, stage.seconds)
        why_not = _why_not(run, stage)
        if why_not is None:
            _guarded(run, stage, record)
        else:
            record.status, record.reason = "skipped", why_not
        record.seconds = time.monotonic() - started
        tell(f"  {record.status} after {record.seconds:.1f} s{': ' + record.reason if record.reason else ''}")
        if path is not None:
            write(path, {**head, "stages": [asdict(each) for each in records]})
    return records


def _why_not(run: Run, stage: Stage) -> str | None:
    if stage.needs_cuda and not run.is_cuda:
        return "needs a CUDA device"
    left = run.deadline - time.monotonic()
    least = 0.0 if run.is_tiny else stage.least
    return None if left > least else f"{max(left, 0):.0f} s left, at least {least:.0f} s needed"


def _guarded(run: Run, stage: Stage, record: StageRecord) -> None:
    try:
        stage.work(run)
    except Exception as error:  # one stage's failure must not cost the others
        frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        record.status, record.reason = "error", f"{type(error).__name__}: {error}".splitlines()[0]
        record.facts["frames"] = frames[-6:]
        if isinstance(error, torch.OutOfMemoryError):
            run.models.free()


def write(path: Path, data: dict[str, Any]) -> None:
    """Write `data` to `path`; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)
