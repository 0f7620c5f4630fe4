"""What an estimate finds, as plain data, and the sentence that says it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_specdec.auto_length import LENGTHS

__all__ = ["Estimate", "KindEstimate", "LengthRow", "Prediction", "verdict_on"]

WORTH = 1.05
"""A smaller speedup is not worth a draft, nor certain in a minute."""


@dataclass(frozen=True)
class LengthRow:
    """What is predicted of drafting `draft_length` tokens in every step.

    Attributes:
        draft_length: K.
        expected_tokens: per target pass and row; plain is 1.00.
        step_seconds: of drafting and verifying.
        tokens_per_second: all rows together.
        speedup: ÷ plain's tokens per second.
    """

    draft_length: int
    expected_tokens: float
    step_seconds: float
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True)
class Prediction:
    """One drafter on one kind of text.

    Attributes:
        rows: by K, from 0; empty where it cannot be said.
        acceptance_rate: kept ÷ reached.
        acceptance_by_position: the same by position of the draft.
        share_drafting: share of the steps in which there was something to propose.
    """

    rows: list[LengthRow]
    acceptance_rate: float
    acceptance_by_position: list[float]
    share_drafting: float = 1.0

    @property
    def best(self) -> LengthRow:
        """The fastest K; the shortest of equally fast ones."""
        return max(self.rows, key=lambda row: row.speedup)

    @property
    def auto_length(self) -> int:
        """K at which "auto" settles: the fastest of those it tries."""
        return max((row for row in self.rows if row.draft_length in LENGTHS), key=lambda row: row.speedup).draft_length

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON data."""
        chosen = {"best_length": self.best.draft_length, "auto_length": self.auto_length} if self.rows else {}
        return {**dataclasses.asdict(self), **chosen}


@dataclass(frozen=True)
class KindEstimate:
    """One kind of text.

    Attributes:
        kind: its name.
        num_tokens: new tokens on which this rests, all calls together.
        draft: the method's own drafts; None for a look-up.
        lookup: prompt lookup on the same texts; no speeds where a batch has several rows, which run apart.
    """

    kind: str
    num_tokens: int
    draft: Prediction | None
    lookup: Prediction

    @property
    def asked(self) -> Prediction:
        """Of the method that was asked about."""
        return self.lookup if self.draft is None else self.draft


@dataclass(frozen=True)
class Estimate:
    """The answer.

    Attributes:
        verdict: one plain sentence, or two.
        setting: what was asked, and where.
        costs: seconds of a target pass by rows, of a draft token, of the prompt, and what they are to each other.
        kinds: by kind of text.
        not_measured: what is missing or interpolated, and why.
        notes: facts from the calls' reports.
        seconds: spent.
    """

    verdict: str
    setting: dict[str, Any]
    costs: dict[str, Any]
    kinds: list[KindEstimate]
    not_measured: list[str]
    notes: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON data."""
        data = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        data["kinds"] = [
            {
                "kind": kind.kind,
                "num_tokens": kind.num_tokens,
                "draft": None if kind.draft is None else kind.draft.to_dict(),
                "lookup": kind.lookup.to_dict(),
            }
            for kind in self.kinds
        ]
        return data


def verdict_on(kinds: Sequence[KindEstimate], cost_coefficient: float | None) -> str:
    """One plain sentence, and one on look-ups where they pay too."""
    if not kinds:
        return "Nothing can be said: too little was measured. Allow more seconds."
    told = _sentence([(kind.kind, kind.asked) for kind in kinds], cost_coefficient)
    if kinds[0].draft is None:
        return told
    paying = [(kind.kind, kind.lookup.best) for kind in kinds if kind.lookup.rows and kind.lookup.best.speedup >= WORTH]
    if not paying:
        return told
    free = ", ".join(f"{best.speedup:.1f}x on {kind}" for kind, best in paying)
    return f"{told} Look-up alone (method='ngram', no draft): {free}."


def _sentence(asked: list[tuple[str, Prediction]], cost_coefficient: float | None) -> str:
    asked = [(kind, prediction) for kind, prediction in asked if len(prediction.rows) > 1]
    if not asked:
        return "Nothing can be said: nothing was drafted."
    ordered = sorted(asked, key=lambda each: -each[1].best.speedup)
    gains = [(kind, each.best) for kind, each in ordered if each.best.speedup >= WORTH]
    if gains:
        parts = [f"{best.speedup:.1f}x at K = {best.draft_length} on {kind}" for kind, best in gains]
        parts += [f"on {kind} no K pays" for kind, each in ordered if each.best.speedup < WORTH]
        return f"Yes: expect {'; '.join(parts)}."
    rates = [each.acceptance_rate for _, each in asked]
    lowest, highest = f"{min(rates):.0%}", f"{max(rates):.0%}"
    kept = f"{lowest} are kept" if lowest == highest else f"{lowest} to {highest} are kept"
    if cost_coefficient is None:
        share = max(each.share_drafting for _, each in asked)
        cost, kept = f"at most {share:.0%} of the steps find something to propose", kept.replace("are", "of it is")
    else:
        cost = f"a draft token costs {cost_coefficient:.2f} of a target pass"
    gain = ordered[0][1].best.speedup - 1
    return f"No: {cost} and {kept}; no K {'pays' if gain < 0.005 else f'gains more than {gain:.0%}'}."
