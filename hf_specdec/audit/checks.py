"""What an audit finds, as plain data."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AuditResult", "Check", "Divergence"]


@dataclass(frozen=True)
class Check:
    """One question, its answer and the numbers behind it.

    Attributes:
        name: what was checked.
        is_passed: whether the answer is as it has to be.
        summary: one line with what was measured.
        facts: the numbers, as plain JSON data.
    """

    name: str
    is_passed: bool
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Divergence:
    """Where a greedy text first parts from plain's.

    Attributes:
        batch: rows of the call.
        row: of the batch; the prompt's number where prompts run one by one.
        position: new token, from 0.
        plain_id, speculative_id: what either chose.
        plain_logit, speculative_logit: plain's own scores of the two.
        margin: plain's best score minus its second best.
        bound: the largest difference of two scores that rounding in the target's precision explains.
    """

    batch: int
    row: int
    position: int
    plain_id: int
    speculative_id: int
    plain_logit: float
    speculative_logit: float
    margin: float
    bound: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference: both margin and the two tokens' own gap are within the bound."""
        return self.margin <= self.bound and self.plain_logit - self.speculative_logit <= self.bound  # NaN is no tie

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, row {self.row}, position {self.position}: plain {self.plain_id} "
            f"({self.plain_logit:.6g}), speculative {self.speculative_id} ({self.speculative_logit:.6g}), top-2 margin "
            f"{self.margin:.3g}, bound {self.bound:.3g}"
        )


@dataclass(frozen=True)
class AuditResult:
    """All checks of one audit.

    Attributes:
        setting: what was audited: models, dtype, method, seed, sizes, the false-alarm rate.
        checks: in the order they ran.
        divergences: every first difference of a greedy text.
        notes: what the calls' reports had to say.
        seconds: of the whole audit.
    """

    setting: dict[str, Any]
    checks: list[Check]
    divergences: list[Divergence]
    notes: list[str]
    seconds: float

    @property
    def is_passed(self) -> bool:
        """Whether every check passed."""
        return all(check.is_passed for check in self.checks)

    def check(self, name: str) -> Check:
        """The check called `name`."""
        return next(check for check in self.checks if check.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON data."""
        return {"is_passed": self.is_passed, **dataclasses.asdict(self)}
