"""How many tokens a step drafts, and which drafter serves which row, decided before anything is drafted or drawn.

    speed(K) = E[tokens](K) / (seconds of a target pass over batch x (K + 1) rows + seconds of drafting K tokens)

K = 0 is a legal answer: the step is then plain decoding. Two decisions, apart so that a call can be replayed:

* K comes from a `LengthChoice`: an order, a table by shape, or measured costs and acceptance (`auto_length`). What
  was chosen stands in `report.draft_lengths`, and the same list given as a schedule is followed.
* Given K, `Sources` says which drafter serves each row. It knows the text of this call and the models' sizes only, no
  time, so a schedule of K replays the whole call bit for bit.

Whatever is decided here, the law of the text does not change: a decision sees committed tokens, times and acceptance,
never a token that was drafted and could still be dropped. Knows nothing of tensors, models or caches.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from hf_specdec.acceptance import AcceptanceRecord
from hf_specdec.statistics import SpeculationCounters

__all__ = [
    "ConstantLength",
    "DraftPlan",
    "LengthChoice",
    "Offer",
    "Part",
    "Planner",
    "Sources",
    "StepOutcome",
    "StepState",
    "TableLength",
]


@dataclass(frozen=True)
class Offer:
    """What a drafter could propose for one row in the step that begins.

    Attributes:
        length: most tokens.
        record: name of the acceptance record that the row's proposal belongs to.
        prior: expected acceptance of a token before anything was measured.
    """

    length: int
    record: str
    prior: float = 0.6


@dataclass(frozen=True)
class Part:
    """One drafter in the step that begins.

    Attributes:
        offers: one per running row.
        is_free: drafting needs no forward of any model.
        debt: tokens, all rows together, that it has to read before it can draft.
    """

    offers: list[Offer]
    is_free: bool = False
    debt: int = 0


@dataclass(frozen=True)
class StepState:
    """What is known when a step begins.

    Attributes:
        batch: rows of a target pass, finished ones included.
        num_running: rows that still produce tokens.
        limit: most tokens that any row may draft.
        remaining: tokens that the longest-running row may still get.
        parts: the drafters.
    """

    batch: int
    num_running: int
    limit: int
    remaining: int
    parts: Sequence[Part]


@dataclass(frozen=True)
class DraftPlan:
    """The decision.

    Attributes:
        length: K, the widest row's draft.
        parts: per running row, the index of the part that serves it.
        lengths: per running row, tokens to draft.
    """

    length: int
    parts: list[int]
    lengths: list[int]


@dataclass(frozen=True)
class StepOutcome:
    """What came of a step.

    Attributes:
        survivals: per running row, the probability that at least i drafted tokens stay, i = 1 … drafted.
        emitted: tokens taken, all rows together.
        read_seconds, draft_seconds, verify_seconds: of the draft's reading, of drafting, and of all that followed.
    """

    survivals: list[list[float]]
    emitted: int
    read_seconds: float
    draft_seconds: float
    verify_seconds: float


@final
class Sources:
    """Which part serves each row, given K: the one that is expected to keep most tokens, and a costly one only where it
    pays by the models' sizes.

    Args:
        cost_coefficient: bytes of a draft pass ÷ bytes of a target pass; stands for c, since it does not vary. At most
            `MOST`: where launches and not bytes take the time, bytes say too much.
    """

    MOST = 0.5

    def __init__(self, cost_coefficient: float) -> None:
        self.cost_coefficient = min(cost_coefficient, self.MOST)
        self.records: dict[str, AcceptanceRecord] = {}

    def plan(self, state: StepState, length: int) -> DraftPlan:
        """The plan for a step of `length` drafted tokens, or as many as there are. Asked for the length that came of
        it, it is the same plan: that is what a replay asks for."""
        while True:
            plan = self._plan(state, length)
            if plan.length == length:
                return plan
            length = plan.length

    def _plan(self, state: StepState, length: int) -> DraftPlan:
        if length == 0 or not state.parts:
            return DraftPlan(0, [0] * state.num_running, [0] * state.num_running)
        parts = [0] * state.num_running
        if len(state.parts) > 1:
            parts = self._chosen(state, length)
        lengths = self._lengths(state, parts, length)
        costly = next((index for index, part in enumerate(state.parts) if not part.is_free), None)
        if costly is not None and max(lengths) < length:  # a length is an order: who can draft that much does
            parts = [costly] * state.num_running
            lengths = self._lengths(state, parts, length)
        return DraftPlan(max(lengths), parts, lengths)

    @staticmethod
    def _lengths(state: StepState, parts: list[int], length: int) -> list[int]:
        return [min(length, state.limit, state.parts[part].offers[row].length) for row, part in enumerate(parts)]

    def _chosen(self, state: StepState, length: int) -> list[int]:
        parts = self._without_costly(state, length)
        if any(not part.is_free for part in state.parts):
            best = self._best_of_all(state, length)
            if self._pays(state, length, parts, best):
                return best
        return parts

    def update(self, state: StepState, plan: DraftPlan, survivals: Sequence[Sequence[float]]) -> None:
        """Learn from a step; same text, same records."""
        for offer, rows in by_record(state, plan, survivals):
            self._record(offer).update(rows)

    def _record(self, offer: Offer) -> AcceptanceRecord:
        record = self.records.get(offer.record)
        if record is None:
            record = self.records[offer.record] = AcceptanceRecord(offer.prior)
        return record

    def _expected(self, state: StepState, part: int, row: int, length: int) -> float:
        offer = state.parts[part].offers[row]
        return self._record(offer).expected(min(length, offer.length))

    def _without_costly(self, state: StepState, length: int) -> list[int]:
        free = [index for index, part in enumerate(state.parts) if part.is_free] or [0]
        return [
            max(free, key=lambda part: self._expected(state, part, row, length)) for row in range(state.num_running)
        ]

    def _best_of_all(self, state: StepState, length: int) -> list[int]:
        every = range(len(state.parts))
        return [
            max(every, key=lambda part: self._expected(state, part, row, length)) for row in range(state.num_running)
        ]

    def _pays(self, state: StepState, length: int, without: list[int], best: list[int]) -> bool:
        """Whether what a costly part adds to the free ones is worth its forwards, counted in target passes. Where they
        offer nothing it does not matter: whoever asked for this length knows what it costs."""
        added, alone = (
            sum(self._expected(state, part, row, length) for row, part in enumerate(parts)) for parts in (best, without)
        )
        if not any(
            state.parts[part].is_free and state.parts[part].offers[row].length for row, part in enumerate(without)
        ):
            return True
        tokens, tokens_without = state.num_running + added, state.num_running + alone
        return tokens > tokens_without * (1 + length * self.cost_coefficient)


def by_record(
    state: StepState, plan: DraftPlan, survivals: Sequence[Sequence[float]]
) -> Iterable[tuple[Offer, list[Sequence[float]]]]:
    """The step's rows that drafted something, grouped by the record they belong to."""
    groups: dict[str, tuple[Offer, list[Sequence[float]]]] = {}
    for row, survival in enumerate(survivals):
        if len(survival):
            offer = state.parts[plan.parts[row]].offers[row]
            groups.setdefault(offer.record, (offer, []))[1].append(survival)
    return groups.values()


class LengthChoice(ABC):
    """Chooses K."""

    learns: bool = False
    """Whether `learn` wants every step's outcome."""
    most: int = 0
    """No step drafts more."""

    def begin(self, read_seconds: float) -> None:
        """The target's prefill is done and took `read_seconds` per token."""

    @abstractmethod
    def choose(self, state: StepState, sources: Sources) -> int:
        """K of the step that begins, at most `state.limit`."""

    def learn(self, state: StepState, plan: DraftPlan, outcome: StepOutcome) -> None:
        """Take a step's outcome into account; nothing to learn by default."""

    def sum_up(self, counters: SpeculationCounters) -> None:
        """Put what was decided, and why, into the call's report; default: nothing beyond the counts."""


@final
class ConstantLength(LengthChoice):
    """An order: every step drafts `length` tokens, shorter only at limits."""

    def __init__(self, length: int) -> None:
        self.length = self.most = length

    def choose(self, state: StepState, sources: Sources) -> int:
        """See `LengthChoice.choose`."""
        return min(self.length, state.limit)


@final
class TableLength(LengthChoice):
    """K by shape alone, for texts that one seed reproduces on any machine: a pass of at most 16 rows."""

    ROWS, COSTLY, FREE = 16, 4, 8
    most = FREE

    def choose(self, state: StepState, sources: Sources) -> int:
        """A free part may fill the pass; a draft with forwards of its own draws four tokens where they fit."""
        fits = max(1, self.ROWS // state.batch - 1)
        free = min(self.FREE, fits, state.limit)
        plan = sources.plan(state, free)
        if plan.length and all(state.parts[part].is_free for part in plan.parts):
            return free
        return min(self.COSTLY, fits, state.limit)


@final
class Planner:
    """One call's decisions: a schedule first, then the choice.

    Args:
        choice: chooses K where the schedule says nothing.
        sources: which drafter serves which row.
        schedule: K of the first steps.
        most: no step drafts more.
        has_parts: whether more than one drafter may serve a row.

    Attributes:
        learns: whether every step's outcome is wanted.
    """

    def __init__(
        self,
        choice: LengthChoice,
        sources: Sources,
        schedule: Iterable[int] = (),
        most: int = 1 << 30,
        has_parts: bool = False,
    ) -> None:
        self.choice, self.sources, self.most = choice, sources, most
        self._schedule = iter(schedule)
        self.learns = choice.learns or has_parts

    def plan(self, state: StepState) -> DraftPlan:
        """The step's plan; to be asked once per step."""
        asked = next(self._schedule, None)
        length = self.choice.choose(state, self.sources) if asked is None else asked
        return self.sources.plan(state, max(0, min(length, state.limit, self.most)))

    def learn(self, state: StepState, plan: DraftPlan, outcome: StepOutcome) -> None:
        """Take a step's outcome into account."""
        self.sources.update(state, plan, outcome.survivals)
        self.choice.learn(state, plan, outcome)
