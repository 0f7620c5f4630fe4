"""Numbers from raw records: speeds, ratios to plain with intervals, acceptance, the draft's cost.

    speed   = Σ tokens / Σ seconds                 over prompts, seeds and rows: pooled, not a mean of ratios
    speedup = speed of an arm / speed of plain     plain's runs before and after the others pooled

Its 95 % interval is a percentile bootstrap over prompts, drawn within each kind, arm and plain together.

Pure: takes the ledger's records, knows nothing of files or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "Drafting",
    "Prediction",
    "Ratio",
    "auto_arms",
    "best_arm",
    "best_fixed_arm",
    "draft_of",
    "drafting",
    "drift",
    "identical",
    "is_auto",
    "of_arm",
    "outside_share",
    "peak_bytes",
    "predictions",
    "relative",
    "share_within",
    "speed",
    "speedup",
]

Record = dict[str, Any]
NUM_RESAMPLES = 10_000
PARTS = ("draft", "verify", "prefill", "other")  # of a call's seconds


@dataclass(frozen=True)
class Ratio:
    """A speedup over plain.

    Attributes:
        value: of the pooled speeds.
        low, high: ends of the 95 % interval; None with fewer than three prompts, which bound nothing.
        num_prompts: distinct prompts (groups of prompts in a batch).
    """

    value: float
    low: float | None
    high: float | None
    num_prompts: int

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" ({self.low:.2f}–{self.high:.2f})"
        return f"{self.value:.2f}×{interval}"


@dataclass(frozen=True)
class Drafting:
    """How the drafts of one arm went, pooled over its records.

    Attributes:
        mean_acceptance_length: tokens per target pass and row.
        acceptance_rate: accepted ÷ reached.
        by_position: accepted ÷ reached of each draft position; None where none was reached.
        cost_coefficient: seconds per draft pass ÷ seconds per verify pass (forward, processors, rule), the draft's
            prefill included; None if nothing was drafted.
        mean_draft_length: tokens drafted per step, the average over steps; None where a ledger does not say.
        shares: draft, verify, prefill and other seconds ÷ all of them.
        reasons: why plain decoding ran, if it did.
    """

    mean_acceptance_length: float
    acceptance_rate: float
    by_position: list[float | None]
    cost_coefficient: float | None
    mean_draft_length: float | None
    shares: dict[str, float]
    reasons: list[str]


@dataclass(frozen=True)
class Prediction:
    """What the cost model expected of one run, and what a clock beside it saw.

    Attributes:
        prompt: its name.
        predicted: the report's speedup of the call's steps.
        measured: plain's seconds per token ÷ this run's, on the same prompt in the same run, the target's prefill
            taken off both.
    """

    prompt: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted ÷ measured."""
        return self.predicted / self.measured


def speed(records: Sequence[Record]) -> float:
    """Pooled tokens per second."""
    return sum(sum(record["tokens"]) for record in records) / sum(record["seconds"] for record in records)


def of_arm(records: Sequence[Record], arm: str) -> list[Record]:
    """The records of one arm; "plain" is all of plain's."""
    return [record for record in records if arm in (record["arm"], "plain" if record["family"] == "plain" else None)]


def speedup(records: Sequence[Record], arm: str, seed: int = 0) -> Ratio:
    """Speed of `arm` ÷ speed of plain on the prompts that both decoded.

    Args:
        records: of one or several kinds, same mode and batch.
        arm: its name.
        seed: of the bootstrap.

    Raises:
        ValueError: no prompt was decoded both ways.
    """
    mine, plain = _by_prompt(of_arm(records, arm)), _by_prompt(of_arm(records, "plain"))
    kinds: dict[str, list[list[float]]] = {}
    for key in mine.keys() & plain.keys():
        kinds.setdefault(key[0], []).append([*mine[key], *plain[key]])
    if not kinds:
        raise ValueError(f"No prompt was decoded both plainly and by {arm!r}.")
    num_prompts = sum(map(len, kinds.values()))
    value = float(_ratios(np.array([row for rows in kinds.values() for row in rows]).sum(axis=0)))
    if num_prompts < 3:
        return Ratio(value, None, None, num_prompts)
    draws = np.random.default_rng(seed)
    sums = np.zeros((NUM_RESAMPLES, 4))
    for kind in sorted(kinds):
        table = np.array(sorted(kinds[kind]))
        sums += table[draws.integers(0, len(table), (NUM_RESAMPLES, len(table)))].sum(axis=1)
    low, high = np.percentile(_ratios(sums), (2.5, 97.5))
    return Ratio(value, float(low), float(high), num_prompts)


def _by_prompt(records: Sequence[Record]) -> dict[tuple[str, str], tuple[float, float]]:
    """(tokens, seconds) of each (kind, prompt)."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for record in records:
        key = (record.get("kind", ""), record["prompt"])
        tokens, seconds = sums.get(key, (0.0, 0.0))
        sums[key] = tokens + sum(record["tokens"]), seconds + record["seconds"]
    return sums


def _ratios(sums: Any) -> Any:
    """[..., (tokens, seconds, plain's tokens, plain's seconds)] → speed ÷ plain's speed."""
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])


def best_arm(records: Sequence[Record], family: str) -> str | None:
    """The fastest arm of a family on these records (a choice made afterwards: at its best, not as it comes)."""
    names = dict.fromkeys(record["arm"] for record in records if record["family"] == family)
    return max(names, key=lambda name: speed(of_arm(records, name)), default=None)


def is_auto(arm: str) -> bool:
    """Whether the plugin chose K itself in `arm`."""
    return arm.startswith("ours-auto")


def draft_of(arm: str) -> str:
    """What the draft of one of our arms was converted to: "nf4", "int8", or "" for the draft as given."""
    return next((part for part in arm.split("-")[1:] if part in ("nf4", "int8")), "")


def auto_arms(records: Sequence[Record]) -> list[str]:
    """Our arms that chose K themselves, in the order of their names."""
    return sorted({record["arm"] for record in records if is_auto(record["arm"])})


def best_fixed_arm(records: Sequence[Record], draft: str | None = None) -> str | None:
    """The fastest of our arms with a fixed K, look-ups included.

    Args:
        records: of one cell.
        draft: only those that `draft_of` gives this for, and look-ups; None: all.
    """
    fixed = [record for record in records if not is_auto(record["arm"])]
    if draft is not None:
        fixed = [r for r in fixed if draft_of(r["arm"]) == draft or r["arm"].startswith("ngram-")]
    return best_arm(fixed, "ours")


def relative(records: Sequence[Record], arm: str, other: str) -> float:
    """Pooled speed of `arm` ÷ that of `other`, both on these records."""
    return speed(of_arm(records, arm)) / speed(of_arm(records, other))


def predictions(records: Sequence[Record], arm: str) -> list[Prediction]:
    """Predicted and measured speedup of each run of `arm` that has a prediction."""
    plain: dict[Any, list[Record]] = {}
    for record in of_arm(records, "plain"):
        plain.setdefault(_run_key(record), []).append(record)
    found = []
    for record in of_arm(records, arm):
        report, beside = record.get("report") or {}, plain.get(_run_key(record))
        if not report.get("predicted_speedup") or not beside:
            continue
        prefill = report["prefill_seconds"]
        mine, other = _seconds_per_token([record], prefill), _seconds_per_token(beside, prefill)
        if mine and other:
            found.append(Prediction(record["prompt"], report["predicted_speedup"], other / mine))
    return found


def _run_key(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("kind", "mode", "batch", "prompt", "seed"))


def _seconds_per_token(runs: Sequence[Record], prefill: float) -> float:
    """Seconds after the prefill ÷ tokens after the first; 0.0 where there is none."""
    tokens = sum(sum(run["tokens"]) - len(run["tokens"]) for run in runs)
    seconds = sum(run["seconds"] - prefill for run in runs)
    return seconds / tokens if tokens and seconds > 0 else 0.0


def share_within(found: Sequence[Prediction], tolerance: float) -> tuple[float, float]:
    """(share of predictions within `tolerance` of what was measured, distance of the worst).

    Raises:
        ValueError: there are none.
    """
    if not found:
        raise ValueError("No prediction was made.")
    distances = [abs(prediction.ratio - 1) for prediction in found]
    return sum(distance <= tolerance for distance in distances) / len(distances), max(distances)


def outside_share(records: Sequence[Record], arm: str) -> float | None:
    """Share of the steps' seconds that neither draft nor verify took (the rule and the processors are in verify); None
    where `arm` keeps no report or made no step."""
    reports = [record["report"] for record in of_arm(records, arm) if record.get("report")]
    parts = {name: sum(report[f"{name}_seconds"] for report in reports) for name in ("draft", "verify", "other")}
    return parts["other"] / sum(parts.values()) if parts["verify"] else None


def drift(records: Sequence[Record]) -> float:
    """Plain's speed after the other arms ÷ before them: what the machine itself did in between."""
    return speed(of_arm(records, "plain-last")) / speed(of_arm(records, "plain-first"))


def identical(records: Sequence[Record], arm: str) -> tuple[int, int]:
    """(texts equal to plain's token by token, texts) of an arm; means something in greedy decoding only."""
    rows = [row for record in of_arm(records, arm) for row in record["differs_at"] or ()]
    return sum(row is None for row in rows), len(rows)


def peak_bytes(records: Sequence[Record], arm: str) -> int:
    """Largest peak memory of any run of an arm, the weights of target and draft included."""
    return max(record["peak_bytes"] for record in of_arm(records, arm))


def drafting(records: Sequence[Record], arm: str) -> Drafting | None:
    """How the drafts of `arm` went; None where it keeps no report (plain, other implementations)."""
    reports = [record["report"] for record in of_arm(records, arm) if record.get("report")]
    if not reports:
        return None
    total = {name: sum(report[name] for report in reports) for name in ("steps", "accepted", "reached", "cut")}
    parts = {name: sum(report[f"{name}_seconds"] for report in reports) for name in PARTS}
    draft_passes = sum(report["draft_passes"] for report in reports)
    target_passes = sum(report["target_passes"] for report in reports)
    cost = None
    if draft_passes and target_passes and parts["verify"]:
        cost = (parts["draft"] / draft_passes) / (parts["verify"] / target_passes)
    steps, seconds = total["steps"], sum(parts.values())
    return Drafting(
        mean_acceptance_length=(total["accepted"] + steps - total["cut"]) / steps if steps else 1.0,
        acceptance_rate=total["accepted"] / total["reached"] if total["reached"] else 0.0,
        by_position=_by_position(reports),
        cost_coefficient=cost,
        mean_draft_length=_mean_draft_length(reports),
        shares={name: part / seconds if seconds else 0.0 for name, part in parts.items()},
        reasons=sorted({report["reason"] for report in reports if report["reason"]}),
    )


def _mean_draft_length(reports: Sequence[Record]) -> float | None:
    counts = [report["steps_by_draft_length"] for report in reports if report.get("steps_by_draft_length")]
    steps = sum(sum(each.values()) for each in counts)
    return sum(int(length) * count for each in counts for length, count in each.items()) / steps if steps else None


def _by_position(reports: Sequence[dict[str, Any]]) -> list[float | None]:
    width = max(len(report["acceptance_by_position"]) for report in reports)
    accepted, reached = np.zeros(width), np.zeros(width)
    for report in reports:
        for position, (kept, seen) in enumerate(_counts_by_position(report)):
            accepted[position] += kept
            reached[position] += seen
    return [float(kept / seen) if seen else None for kept, seen in zip(accepted, reached, strict=True)]


def _counts_by_position(report: dict[str, Any]) -> list[tuple[int, int]]:
    """(accepted, reached) of each draft position.

    A position is reached only through accepted ones, so the first that accepted nothing was reached by what is left of
    `reached`, and those behind it by none.
    """
    counts, left = [], report["reached"]
    for position, rate in enumerate(report["acceptance_by_position"]):
        accepted = sum(report["accepted_histogram"][position + 1 :])
        reached = round(accepted / rate) if accepted else left
        counts.append((accepted, reached))
        left -= reached
    return counts
