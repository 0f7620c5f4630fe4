"""Counters of one call, per row and position of a step, and the rates derived from them.

The histogram of accepted counts and the number of walks that looked at each draft position carry everything: a walk
that accepted n of K drafted tokens looked at positions 1 … min(n + 1, K), accepted 1 … n, and gave n + 1 tokens (the
last one resampled or bonus), of which a limit or an end of text may cut some.

Host integers only: knows nothing of tensors, models or caches. The definitions stand in `report`.
"""

from collections.abc import Sequence

from hf_specdec.report import SpeculationReport

__all__ = ["SpeculationCounters"]


class SpeculationCounters:
    """What one `generate()` call did so far; filled by the loop, read once at the end.

    Attributes:
        method: the drafting method.
        reason: why plain decoding ran, for the part of the call where it did.
        decision: one line on what was decided; empty: the report says it from the counts.
        cost_coefficient, predicted_speedup, measured_speedup: see the report; None where they were not measured.
        draft_quantization, conversion_seconds: see the report.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.reason: str | None = None
        self.decision = ""
        self.cost_coefficient: float | None = None
        self.draft_quantization: str | None = None
        self.conversion_seconds = 0.0
        self.predicted_speedup: float | None = None
        self.measured_speedup: float | None = None
        self._draft_lengths: list[int] = []
        self._histogram: list[int] = []
        self._reached_at: list[int] = []
        self._drafted = 0
        self._step_emitted = 0
        self._prefill_emitted = 0
        self._draft_seconds = 0.0
        self._verify_seconds = 0.0
        self._prefill_seconds = 0.0
        self._total_seconds = 0.0
        self._notes: dict[str, None] = {}
        self._inner_reasons: dict[str, None] = {}

    def record_prefill(self, num_rows: int, seconds: float) -> None:
        """The prefill gave each of `num_rows` rows its first token, in `seconds`."""
        self._prefill_emitted += num_rows
        self._prefill_seconds += seconds

    def record_step(
        self,
        draft_length: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        emitted: Sequence[int],
        is_running: Sequence[bool],
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """One draft and one target forward over all rows.

        Args:
            draft_length: K of this step; 0 when nothing was drafted.
            drafted: draft tokens proposed, per row, at most `draft_length`.
            accepted: draft tokens kept, per row, at most `drafted`.
            emitted: tokens that the row's text grew by, at most accepted + 1.
            is_running: rows that were not finished when the step began; the others' entries are not read.
            draft_seconds: wall-clock seconds of drafting.
            verify_seconds: wall-clock seconds of the target forward and the verification.

        Raises:
            ValueError: a running row's counts are impossible.
        """
        self._draft_lengths.append(draft_length)
        _grow(self._histogram, draft_length + 1)
        _grow(self._reached_at, draft_length)
        for row, running in enumerate(is_running):
            if running:
                self._record_row(row, draft_length, drafted[row], accepted[row], emitted[row])
        self._draft_seconds += draft_seconds
        self._verify_seconds += verify_seconds

    def _record_row(self, row: int, draft_length: int, drafted: int, accepted: int, emitted: int) -> None:
        if not (0 <= accepted <= drafted <= draft_length and 0 <= emitted <= accepted + 1):
            raise ValueError(
                f"Impossible counts in row {row}: 0 <= accepted {accepted} <= drafted {drafted} <= draft_length "
                f"{draft_length} and 0 <= emitted {emitted} <= accepted + 1 must hold."
            )
        self._histogram[accepted] += 1
        for position in range(min(accepted + 1, drafted)):
            self._reached_at[position] += 1
        self._drafted += drafted
        self._step_emitted += emitted

    def record_dropped(self, num_tokens: int) -> None:
        """`num_tokens` tokens counted as emitted by steps are not: a stopping criterion ended the text before them.

        Raises:
            ValueError: more than the steps emitted.
        """
        if not 0 <= num_tokens <= self._step_emitted:
            raise ValueError(
                f"Cannot drop {num_tokens} tokens: the steps emitted {self._step_emitted}, and the tokens of the "
                "prefill are never dropped."
            )
        self._step_emitted -= num_tokens

    def note(self, text: str) -> None:
        """Adds a fact to the report, once however often it is noted."""
        self._notes[text] = None

    def merge(self, other: "SpeculationCounters") -> None:
        """Adds the counts and seconds of a `generate()` that ran inside this call."""
        self._draft_lengths += other._draft_lengths
        _add(self._histogram, other._histogram)
        _add(self._reached_at, other._reached_at)
        self._drafted += other._drafted
        self._step_emitted += other._step_emitted
        self._prefill_emitted += other._prefill_emitted
        self._draft_seconds += other._draft_seconds
        self._verify_seconds += other._verify_seconds
        self._prefill_seconds += other._prefill_seconds
        self._total_seconds += other._total_seconds
        self.conversion_seconds += other.conversion_seconds
        self.draft_quantization = self.draft_quantization or other.draft_quantization
        self._notes |= other._notes
        self._inner_reasons |= other._inner_reasons
        self.decision = self.decision or other.decision
        if other.reason is not None:
            self._inner_reasons[other.reason] = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ reached so far."""
        return _ratio(sum(n * rows for n, rows in enumerate(self._histogram)), sum(self._reached_at))

    def finish(self, total_seconds: float) -> None:
        """The whole call took `total_seconds`, calls merged so far included; `other_seconds` is what no part took."""
        self._total_seconds = total_seconds

    def report(self) -> SpeculationReport:
        """The counts so far, with the rates derived from them."""
        reason, notes = self.reason, list(self._notes)
        for inner in self._inner_reasons:
            if reason is None and not self._prefill_emitted:  # the calls inside are all there was, and none speculated
                reason = inner
            elif inner != reason:
                notes.append(f"Plain decoding ran in a part of the call: {inner}")
        steps = sum(self._histogram)
        accepted = sum(n * rows for n, rows in enumerate(self._histogram))
        reached = sum(self._reached_at)
        parts_seconds = self._draft_seconds + self._verify_seconds + self._prefill_seconds + self.conversion_seconds
        mean_acceptance_length = self._step_emitted / steps if steps else 1.0
        return SpeculationReport(
            method=self.method,
            draft_lengths=list(self._draft_lengths),
            target_passes=len(self._draft_lengths),
            steps=steps,
            drafted=self._drafted,
            reached=reached,
            accepted=accepted,
            emitted=self._prefill_emitted + self._step_emitted,
            cut=accepted + steps - self._step_emitted,
            prefill_emitted=self._prefill_emitted,
            accepted_histogram=list(self._histogram),
            acceptance_by_position=self._acceptance_by_position(),
            acceptance_rate=self.acceptance_rate,
            draft_utilization=_ratio(accepted, self._drafted),
            mean_acceptance_length=mean_acceptance_length,
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
            prefill_seconds=self._prefill_seconds,
            other_seconds=max(0.0, self._total_seconds - parts_seconds),
            reason=reason,
            decision=self.decision or self._default_decision(reason, mean_acceptance_length),
            notes=notes,
            cost_coefficient=self.cost_coefficient,
            draft_quantization=self.draft_quantization,
            conversion_seconds=self.conversion_seconds,
            predicted_speedup=self.predicted_speedup,
            measured_speedup=self.measured_speedup,
        )

    def _acceptance_by_position(self) -> list[float]:
        accepted_at = [sum(self._histogram[position + 1 :]) for position in range(len(self._reached_at))]
        return [_ratio(kept, seen) for kept, seen in zip(accepted_at, self._reached_at, strict=True)]

    def _default_decision(self, reason: str | None, mean_acceptance_length: float) -> str:
        if reason is not None:
            return f"Plain decoding: {reason}"
        if not self._draft_lengths:
            return "The prefill gave every token that was asked for: nothing was drafted."
        shortest, longest = min(self._draft_lengths), max(self._draft_lengths)
        lengths = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        return (
            f"Drafted {lengths} tokens per step with {self.method}: "
            f"{mean_acceptance_length:.2f} tokens per target pass and row."
        )


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


def _add(counts: list[int], others: Sequence[int]) -> None:
    _grow(counts, len(others))
    for index, other in enumerate(others):
        counts[index] += other


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
