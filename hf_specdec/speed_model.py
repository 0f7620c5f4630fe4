"""The speed of a planned step: expected tokens, expected seconds, and what they rest on.

    tokens(plan)  = rows + Σ over rows of the tokens expected to stay of their drafts                  (`acceptance`)
    seconds(plan) = t_verify(batch x (K + 1)) + t_draft(K) + t_read, spread over what it serves        (`costs`)

What was never measured is guessed: a target pass is one second, a draft pass its share of that by the models' sizes,
and reading costs the draft that share of what it costs the target. Knows nothing of what is chosen (`auto_length`).
"""

import copy
from dataclasses import dataclass, field
from typing import final

from hf_specdec.acceptance import AcceptanceRecord
from hf_specdec.costs import StepCosts
from hf_specdec.draft_length import DraftPlan, StepState

__all__ = ["PairKnowledge", "SpeedModel"]

TEXT_KEPT = 0.15
"""Share of what was seen of drafts that counts in the next call: its text is another."""


@dataclass
class PairKnowledge:
    """What is remembered of one target and draft, for one batch size and length of text.

    Attributes:
        costs: seconds.
        records: acceptance by kind of draft.
        distances: per drafter, steps between probes.
        idle: per drafter, steps in which it could have drafted and did not.
        is_draft_cold: whether the draft was never timed but in the first forwards of a call.
        seconds: of all steps that the draft served, or could have served.
    """

    costs: StepCosts = field(default_factory=StepCosts)
    records: dict[str, AcceptanceRecord] = field(default_factory=dict)
    distances: dict[int, int] = field(default_factory=dict)
    idle: dict[int, int] = field(default_factory=dict)
    is_draft_cold: bool = True
    seconds: float = 0.0

    def at_price(self, pass_share: float) -> "PairKnowledge":
        """A copy for a draft whose passes take `pass_share` of these seconds and keep as much."""
        copied = copy.deepcopy(self)
        copied.costs.draft, copied.costs.read = self.costs.draft.scaled(pass_share), self.costs.read.scaled(pass_share)
        return copied

    def take_over(self, other: "PairKnowledge") -> None:
        """Begin from what is known of a draft that keeps as much at another price."""
        copied = copy.deepcopy(other)
        self.costs.verify, self.records = copied.costs.verify, copied.records
        for record in self.records.values():
            record.num_updates = 0

    def begin_call(self) -> None:
        """What other calls taught counts less than what this one will."""
        self.costs.age()
        for record in self.records.values():
            record.fade(TEXT_KEPT)


@final
class SpeedModel:
    """Predicts steps from what is known of a pair.

    Args:
        knowledge: read, and given a record for each kind of draft that it does not know.
        cost_guess: seconds of a draft forward in target passes, until one was measured.

    Attributes:
        read_guess: seconds per token that the draft reads, until it has read any.
    """

    def __init__(self, knowledge: PairKnowledge, cost_guess: float) -> None:
        self.knowledge, self._cost_guess = knowledge, cost_guess
        self.read_guess = 0.0

    def predicted(self, state: StepState, plan: DraftPlan) -> tuple[float, float]:
        """(tokens, seconds) expected of a step that follows `plan`, all rows together."""
        tokens = self.tokens(state, plan)
        return tokens, self.seconds(state, plan, tokens)

    def rate(self, state: StepState, plan: DraftPlan, is_lower_bound: bool = False) -> float:
        """Expected tokens per second."""
        tokens = self.tokens(state, plan)
        return tokens / self.seconds(state, plan, tokens, is_lower_bound)

    def tokens(self, state: StepState, plan: DraftPlan) -> float:
        """Expected tokens of a step, all rows together."""
        tokens = float(state.num_running)
        for row, (part, length) in enumerate(zip(plan.parts, plan.lengths, strict=True)):
            if length:
                offer = state.parts[part].offers[row]
                record = self.knowledge.records.get(offer.record)
                if record is None:
                    record = self.knowledge.records[offer.record] = AcceptanceRecord(offer.prior)
                tokens += record.expected(length)
        return tokens

    def seconds(self, state: StepState, plan: DraftPlan, tokens: float, is_lower_bound: bool = False) -> float:
        """Expected seconds of a step that gives `tokens`; with `is_lower_bound` the least that its pass may take."""
        seconds = self.verify(state.batch * (plan.length + 1), is_lower_bound)
        costly = {
            part
            for part, length in zip(plan.parts, plan.lengths, strict=True)
            if length and not state.parts[part].is_free
        }
        for part in costly:
            debt = state.parts[part].debt
            seconds += self.draft(plan.length, state.batch)
            # Spread over the tokens that it serves: at least this step's, at most those that were read.
            served = max(tokens, min(float(debt), float(state.remaining * state.num_running)))
            seconds += self.read(debt) * tokens / served
        return seconds

    def verify(self, rows: int, is_lower_bound: bool = False) -> float:
        """Seconds of a target pass over `rows` rows."""
        curve = self.knowledge.costs.verify
        if curve.is_empty:
            return 1.0
        return curve.least_seconds(rows) if is_lower_bound else curve.seconds(rows)

    def draft(self, length: int, batch: int) -> float:
        """Seconds of drafting `length` tokens for each of `batch` rows."""
        curve = self.knowledge.costs.draft
        return self._cost_guess * length * self.verify(batch) if curve.is_empty else curve.seconds(length)

    def read(self, tokens: int) -> float:
        """Seconds that the draft takes to read `tokens` tokens."""
        if not tokens:
            return 0.0
        costs = self.knowledge.costs
        if costs.read.is_empty:
            return self.read_guess * tokens
        seconds = costs.read.seconds(tokens)
        # A pass over few tokens is a pass over one, whatever a long prompt took.
        return min(seconds, costs.draft.seconds(1) * tokens) if not costs.draft.is_empty else seconds
