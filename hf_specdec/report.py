"""What the last call did: counts, rates and seconds, as one frozen value that prints well.

Every rate follows from counts per row-step (one running row in one target pass):
    acceptance_rate        = accepted / reached      draft tokens the walk looked at, min(accepted + 1, drafted) a step
    draft_utilization      = accepted / drafted      what vLLM calls acceptance rate
    mean_acceptance_length = (accepted + steps - cut) / steps    tokens a target forward gave a row; plain is 1.00
and every token is accounted for: emitted = prefill_emitted + accepted + steps - cut.

Knows nothing of models, tensors or how the counts are taken (`statistics`).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SpeculationReport"]


@dataclass(frozen=True)
class SpeculationReport:
    """Counts, rates and seconds of one finished `generate()` call.

    Attributes:
        method: the drafting method.
        draft_lengths: tokens drafted per row (K), one entry per step.
        target_passes: forwards of the target after the prefill.
        steps: passes × rows still running.
        drafted: draft tokens proposed, summed over row-steps.
        reached: draft tokens that the accept walk looked at.
        accepted: draft tokens kept.
        emitted: tokens that the caller got.
        cut: tokens produced and not emitted: beyond an end of text or a limit.
        prefill_emitted: tokens that the prefill gave, one per row.
        accepted_histogram: at n, the row-steps that accepted n draft tokens.
        acceptance_by_position: at i, accepted ÷ reached of the draft's position i + 1; 0.0 if never reached.
        acceptance_rate: accepted ÷ reached; 0.0 if nothing was drafted.
        draft_utilization: accepted ÷ drafted; 0.0 if nothing was drafted.
        mean_acceptance_length: tokens emitted per target forward of a running row; 1.0, as plain, without a step.
        draft_seconds, verify_seconds, prefill_seconds: wall-clock seconds in each part.
        other_seconds: the rest of the call.
        reason: why plain decoding ran; None when the call speculated.
        decision: one line on what was done.
        notes: facts that a user may want to know, each once.
        cost_coefficient: seconds of a draft token ÷ seconds of a plain target pass (c); None where it was not measured.
        predicted_speedup, measured_speedup: tokens per second of this call's steps ÷ those of its plain passes, as the
            cost model expected and as it came; None where draft lengths were not chosen from measurement.
        draft_quantization: what the draft's layers were converted to in the plugin's own copy; None without one.
        conversion_seconds: wall-clock seconds in which this call made that copy; 0.0 where it was there.
    """

    method: str
    draft_lengths: list[int] = field(default_factory=list)
    target_passes: int = 0
    steps: int = 0
    drafted: int = 0
    reached: int = 0
    accepted: int = 0
    emitted: int = 0
    cut: int = 0
    prefill_emitted: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    acceptance_by_position: list[float] = field(default_factory=list)
    acceptance_rate: float = 0.0
    draft_utilization: float = 0.0
    mean_acceptance_length: float = 1.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    other_seconds: float = 0.0
    reason: str | None = None
    decision: str = ""
    notes: list[str] = field(default_factory=list)
    cost_coefficient: float | None = None
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    draft_quantization: str | None = None
    conversion_seconds: float = 0.0

    @classmethod
    def plain(cls, reason: str, method: str = "plain") -> "SpeculationReport":
        """The report of a call that transformers decoded untouched, and why; its tokens are not counted."""
        return cls(method=method, reason=reason, decision=f"Plain decoding: {reason}")

    def check(self) -> None:
        """Whether the counts account for every token.

        Raises:
            ValueError: they do not; the message has the numbers.
        """
        if self.emitted != self.prefill_emitted + self.accepted + self.steps - self.cut:
            raise ValueError(
                f"Tokens are unaccounted for: emitted {self.emitted} must be prefill_emitted {self.prefill_emitted} "
                f"+ accepted {self.accepted} + steps {self.steps} - cut {self.cut}."
            )
        if not 0 <= self.accepted <= self.reached <= self.drafted:
            raise ValueError(
                f"Draft tokens are unaccounted for: accepted {self.accepted} <= reached {self.reached} "
                f"<= drafted {self.drafted} must hold."
            )
        counted = (sum(self.accepted_histogram), sum(n * rows for n, rows in enumerate(self.accepted_histogram)))
        if counted != (self.steps, self.accepted):
            raise ValueError(
                f"accepted_histogram must hold {self.steps} steps with {self.accepted} accepted tokens, "
                f"got {counted[0]} with {counted[1]}."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        notes = [f"  {'note':<14}{note}" for note in self.notes]
        if self.reason is not None and not self.steps:
            return "\n".join([f"Plain decoding ran: {self.reason}", *notes])
        lines = [
            f"Speculative decoding ({self.method})",
            _line("tokens", f"{self.emitted} emitted = {self.prefill_emitted} prefill + {self.accepted} accepted "
                            f"+ {self.steps} from the target - {self.cut} cut"),
            _line("target", f"{self.target_passes} passes, {self.mean_acceptance_length:.2f} tokens per pass and row "
                            "(plain 1.00)"),
            _line("draft", f"{self.drafted} drafted, {self.reached} reached, {self.accepted} accepted: "
                           f"acceptance {self.acceptance_rate:.2f}, utilization {self.draft_utilization:.2f}"),
            _line("by position", " ".join(f"{rate:.2f}" for rate in self.acceptance_by_position) or "-"),
            _line("seconds", f"{self.draft_seconds:.3f} draft, {self.verify_seconds:.3f} verify, "
                             f"{self.prefill_seconds:.3f} prefill, {self.other_seconds:.3f} other"),
            _line("decision", self.decision or "-"),
        ]  # fmt: skip
        if self.reason is not None:
            lines.append(_line("plain ran", self.reason))
        return "\n".join([*lines, *notes])


def _line(label: str, text: str) -> str:
    return f"  {label:<14}{text}"
