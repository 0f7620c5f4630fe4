"""Ways of decoding that are timed against each other on one prompt: whole calls of `generate()`, in shuffled rounds.

Every round runs every racer once, in an order of its own; rounds end with the stage's time, after the first one at the
earliest. A racer's speed is the median over its rounds, and how many there were stands beside it.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hf_specdec
from benchmarks.gpu import clock
from benchmarks.gpu.nets import PAD, texts
from benchmarks.gpu.predictions import Range
from benchmarks.gpu.run import Run
from hf_specdec.benchmark.arms import Arm, Ours

__all__ = ["MODES", "Racer", "keep", "prompt", "race"]

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T = 1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "T = 1.5": {"do_sample": True, "temperature": 1.5, "top_k": 0, "top_p": 1.0},
}
PROMPT_LENGTH = 32


@dataclass
class Racer:
    """One way of decoding, and its times.

    Attributes:
        name: what is timed, as the table shows it.
        arm: the way.
        target, draft: its models; draft is None where the arm takes none.
        mode: a key of `MODES`.
        rows: of the batch.
        predicted: tokens per second.
        against: the racer that it is compared with, by name; None: it is that one.
        predicted_ratio: of its speed to that one's.
    """

    name: str
    arm: Arm
    target: Any
    draft: Any
    mode: str
    rows: int = 1
    predicted: Range | None = None
    against: str | None = None
    predicted_ratio: Range | None = None
    tokens_per_second: list[float] = field(default_factory=list)
    report: Any = None
    text: list[list[int]] = field(default_factory=list)


def prompt(run: Run, rows: int) -> dict[str, Tensor]:
    """Rows of equal length."""
    ids = texts(rows, PROMPT_LENGTH, run.sizes.draft_vocab, 11, run.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def race(run: Run, racers: Sequence[Racer], share: float = 1.0) -> None:
    """Run rounds until all are done or `share` of the time that the stage has left is over."""
    rounds, reserve = run.sizes.text_rounds, (1 - share) * run.seconds_left()
    clock.warm_up(run.device)
    shuffle = random.Random(0).shuffle
    for racer in racers:
        _once(run, racer, seed=0, new_tokens=run.sizes.new_tokens // 2, is_kept=False)
    for number in range(rounds):
        if number and run.seconds_left() < reserve:
            run.note(f"Medians of {number} instead of {rounds} rounds: the stage's time was over.")
            break
        order = list(racers)
        shuffle(order)
        for racer in order:
            _once(run, racer, seed=number, new_tokens=run.sizes.new_tokens)


def _once(run: Run, racer: Racer, seed: int, new_tokens: int, is_kept: bool = True) -> None:
    inputs = prompt(run, racer.rows)
    options = {**MODES[racer.mode], "max_new_tokens": new_tokens, "pad_token_id": PAD}
    torch.manual_seed(seed)
    with racer.arm.set_up(racer.target, racer.draft) as decode:
        clock.synchronize(run.device)
        started = time.perf_counter()
        ids = decode(**inputs, **options)
        clock.synchronize(run.device)
        seconds = time.perf_counter() - started
        report = hf_specdec.report(racer.target) if racer.arm.family == "ours" else None
    if not is_kept:
        return
    racer.tokens_per_second.append(new_tokens * racer.rows / seconds)
    racer.report, racer.text = report, ids[:, PROMPT_LENGTH:].tolist()


def keep(run: Run, racers: Sequence[Racer], show: Sequence[str] = ("ours", "assisted", "plain")) -> None:
    """Write medians, ratios, acceptance and whether ours speculated into the run's record.

    Args:
        run: of the race.
        racers: after it.
        show: families whose ratios have a row in the table; speeds have one for plain only.
    """
    medians = {racer.name: statistics.median(racer.tokens_per_second) for racer in racers}
    facts: dict[str, Any] = run.record.facts.setdefault("racers", {})
    for racer in racers:
        family, raw = racer.arm.family, racer.tokens_per_second
        is_shown = family == "plain" or racer.against is None
        run.value(racer.name, medians[racer.name], "tokens/s", racer.predicted, raw, is_shown)
        if racer.against is not None:
            ratio = medians[racer.name] / medians[racer.against]
            run.value(racer.name, ratio, "× plain", racer.predicted_ratio, is_shown=family in show)
        facts[racer.name] = {"rounds": len(raw)}
        if racer.report is not None:
            facts[racer.name] |= _report_facts(racer.report)
            if (
                isinstance(racer.arm, Ours) and racer.arm.config["num_speculative_tokens"] != "auto"
            ):  # which may find plain decoding best
                reason = racer.report.reason
                run.check(f"{racer.name} speculated", reason is None, reason or "")


def _report_facts(report: Any) -> dict[str, Any]:
    names = ("acceptance_rate", "mean_acceptance_length", "draft_seconds", "verify_seconds", "other_seconds")
    facts: dict[str, Any] = {name: round(getattr(report, name), 4) for name in names}
    return {**facts, "draft_lengths": report.draft_lengths, "decision": report.decision, "notes": report.notes}
