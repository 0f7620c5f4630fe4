"""K from what the machine in front of us costs and how much of the drafts is kept, measured in the calls themselves.

Before each step the expected speed of every K is computed from `StepCosts` and `AcceptanceRecord`s, and the fastest is
taken. What that needs to be right:

* *Opening.* A pair that was never seen starts from the models' sizes. The first step of a call is not timed (it takes
  the cache over); then the draft is timed, and the plain pass (K = 0) twice.
* *Exploring.* A count of rows that was never tried takes at least as long as the next smaller one. While that bound
  promises a faster K, it is tried once; each count is tried once only, so the regret is bounded.
* *Standing aside and probing.* Where K = 0 is fastest nothing is drafted, and nothing is learnt; so after a while one
  step drafts again. Each probe that did not pay doubles the distance to the next, until probing costs `PROBE_SHARE` of
  the time; a probe that paid is followed by another.
* *Reading.* A draft that has not read the text yet (its prefill, or what was written while others drafted) is charged
  for it over the tokens that are still to come.

All of it outlives the call in a `PairKnowledge`. Knows nothing of tensors, models or caches: seconds come as numbers.
"""

from dataclasses import dataclass
from typing import final

from hf_specdec.acceptance import AcceptanceRecord
from hf_specdec.draft_length import DraftPlan, LengthChoice, Sources, StepOutcome, StepState, by_record
from hf_specdec.speed_model import PairKnowledge, SpeedModel
from hf_specdec.statistics import SpeculationCounters

__all__ = ["LENGTHS", "MeasuredLength"]

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
FIRST_DISTANCE = 6
"""Steps until the first probe, at least, …"""
FIRST_SHARE = 0.06
"""… and so many that the first probe costs this share of them."""
PROBE_SHARE = 0.01
EXPLORE_GAIN = 1.05
FIRST_DRAFT = 2
TIMING_STEPS = 16
TIMING_SHARE = 0.25
KEPT_AT_BEST = 0.95
FADING = 64
"""Steps without drafting after which what was seen before counts half."""
NUM_PLAIN = 2
"""Plain passes measured before K = 0 is compared with anything."""


@dataclass
class _Totals:
    """Sums over the call's steps, for the prediction and what came of it."""

    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    emitted: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    steps: int = 0
    batch: int = 0
    drafting_steps: int = 0
    drafted: int = 0


@final
class MeasuredLength(LengthChoice):
    """The fastest K by measurement.

    Args:
        knowledge: of this pair, updated in place.
        cost_guess: seconds of a draft forward in target passes, until one was measured.
    """

    learns = True
    most = LENGTHS[-1]

    def __init__(self, knowledge: PairKnowledge, cost_guess: float) -> None:
        self.knowledge, self._cost_guess = knowledge, cost_guess
        self._speed = SpeedModel(knowledge, cost_guess)
        self._num_steps = 0
        self._idle = knowledge.idle
        self._probed: int | None = None  # the part that the last step probed
        self._has_paid = self._has_drafted = False
        self.totals = _Totals()
        knowledge.begin_call()

    def begin(self, read_seconds: float) -> None:
        """See `LengthChoice.begin`: the draft's reading is guessed from the target's."""
        self._speed.read_guess = self._cost_guess * read_seconds

    # --- choosing

    def choose(self, state: StepState, sources: Sources) -> int:
        """See `LengthChoice.choose`."""
        probed, self._probed = self._probed, None
        plans = {plan.length: plan for plan in (sources.plan(state, length) for length in self._lengths(state))}
        if self._wants_plain(state):
            return 0
        if self._wants_draft(state, plans):
            return FIRST_DRAFT
        rates = {length: self._speed.rate(state, plan) for length, plan in plans.items()}
        best = max(rates, key=lambda length: rates[length])
        tried = self._worth_trying(state, plans, rates[best])
        if tried is not None:
            return tried
        if best:
            self._used(plans[best])
            return best
        return self._probe(state, plans, probed)

    def _lengths(self, state: StepState) -> list[int]:
        """What may be drafted: not much more than was tried before."""
        widest = self.knowledge.costs.verify.largest // state.batch - 1
        most = min(state.limit, max(4, 2 * widest))
        offered = {min(offer.length, most) for part in state.parts if part.is_free for offer in part.offers}
        return sorted({length for length in LENGTHS if length <= most} | offered)

    def _wants_plain(self, state: StepState) -> bool:
        verify = self.knowledge.costs.verify
        return self._num_steps > 1 and verify.num_observations(state.batch) < NUM_PLAIN and not verify.is_empty

    def _wants_draft(self, state: StepState, plans: dict[int, DraftPlan]) -> bool:
        """Whether a draft that was never timed should be, since its size says little where launches take the time: if
        that cannot cost more than `TIMING_SHARE` of the call, once."""
        plan = plans.get(FIRST_DRAFT)
        if not 1 <= self._num_steps < TIMING_STEPS or plan is None or not self.knowledge.is_draft_cold:
            return False
        part = state.parts[plan.parts[plan.lengths.index(plan.length)]]
        plain = self._speed.verify(state.batch)
        cost = self._speed.read(part.debt) + self._cost_guess * FIRST_DRAFT * plain
        return not part.is_free and cost < TIMING_SHARE * state.remaining * plain

    def _worth_trying(self, state: StepState, plans: dict[int, DraftPlan], best_rate: float) -> int | None:
        """A K whose pass was never timed and which may be faster than the best one known."""
        verify = self.knowledge.costs.verify
        if verify.is_empty:
            return None
        promising = {
            length: rate
            for length, plan in plans.items()
            if length
            and not verify.num_observations(state.batch * (length + 1))
            and (rate := self._speed.rate(state, plan, is_lower_bound=True)) > EXPLORE_GAIN * best_rate
        }
        return max(promising, key=lambda length: promising[length]) if promising else None

    def _probe(self, state: StepState, plans: dict[int, DraftPlan], probed: int | None) -> int:
        """K of a step in which nothing pays by what is known: 0, or a probe of a part that was idle for long."""
        distances = self.knowledge.distances
        if probed is not None and not self._has_paid and not self._may_pay(state, probed):
            distances[probed] = self._next_distance(state, probed, self._distance(state, probed))
        for length, plan in sorted(plans.items()):
            if not length:
                continue
            part = plan.parts[plan.lengths.index(length)]
            self._idle[part] = self._idle.get(part, 0) + 1
            is_due = self._idle[part] > self._distance(state, part) or (probed == part and self._has_paid)
            if is_due and self._can_probe(state, part):
                self._fade(state, plan, 0.5 ** (self._idle[part] / FADING))
                self._idle[part] = 0
                self._probed = part
                return length
            break
        return 0

    def _fade(self, state: StepState, plan: DraftPlan, kept: float) -> None:
        for row, (part, length) in enumerate(zip(plan.parts, plan.lengths, strict=True)):
            record = self.knowledge.records.get(state.parts[part].offers[row].record) if length else None
            if record is not None:
                record.fade(kept)

    def _may_pay(self, state: StepState, part: int) -> bool:
        """Whether one token would pay at the highest acceptance that what was seen leaves open."""
        records = [self.knowledge.records.get(offer.record) for offer in state.parts[part].offers]
        rate = max((record.highest_rate for record in records if record is not None), default=1.0)
        return rate > self._probe_cost(state, part, has_read=True)

    def _can_probe(self, state: StepState, part: int) -> bool:
        """Whether the part would pay if nearly all its tokens were kept, with what it has to read first."""
        plain, best = self._speed.verify(state.batch), 0.0
        for length in self._lengths(state)[1:]:
            seconds = self._speed.verify(state.batch * (length + 1), is_lower_bound=True)
            if not state.parts[part].is_free:
                seconds += self._speed.draft(length, state.batch)
            best = max(best, (1 + KEPT_AT_BEST * length) * plain / seconds)
        saved = state.remaining * (1 - 1 / best) * plain if best > 1 else 0.0
        return saved > 2 * self._speed.read(state.parts[part].debt)

    def _distance(self, state: StepState, part: int) -> int:
        """Steps from one probe of `part` to the next."""
        known = self.knowledge.distances.get(part)
        return max(FIRST_DISTANCE, round(self._probe_cost(state, part) / FIRST_SHARE)) if known is None else known

    def _next_distance(self, state: StepState, part: int, distance: int) -> int:
        is_cheap = self._probe_cost(state, part) <= PROBE_SHARE * distance
        return distance if is_cheap or self.knowledge.costs.verify.is_empty else 2 * distance

    def _probe_cost(self, state: StepState, part: int, has_read: bool = False) -> float:
        """What a step of one drafted token takes beyond a plain one, in plain steps."""
        plain = self._speed.verify(state.batch)
        extra = self._speed.verify(2 * state.batch) - plain
        if not state.parts[part].is_free:
            extra += self._speed.draft(1, state.batch) + (0.0 if has_read else self._speed.read(state.batch))
        return extra / plain

    def _used(self, plan: DraftPlan) -> None:
        for part, length in zip(plan.parts, plan.lengths, strict=True):
            if length:
                self._idle[part] = 0
                self.knowledge.distances.pop(part, None)

    # --- learning

    def learn(self, state: StepState, plan: DraftPlan, outcome: StepOutcome) -> None:
        """See `LengthChoice.learn`."""
        costs = self.knowledge.costs
        if self._num_steps:  # the first step takes the cache over: nobody pays for that again
            costs.verify.add(state.batch * (plan.length + 1), outcome.verify_seconds)
        served = {part for part, length in zip(plan.parts, plan.lengths, strict=True) if length}
        if any(not state.parts[part].is_free for part in served):
            debt = sum(state.parts[part].debt for part in served)
            if debt:
                costs.read.add(debt, outcome.read_seconds)
            self._time_draft(plan.length, outcome.draft_seconds)
        for offer, rows in by_record(state, plan, outcome.survivals):
            record = self.knowledge.records.setdefault(offer.record, AcceptanceRecord(offer.prior))
            record.update(rows)
        seconds = outcome.read_seconds + outcome.draft_seconds + outcome.verify_seconds
        plain = state.num_running / self._speed.verify(state.batch)
        self._has_paid = outcome.emitted / (seconds - outcome.read_seconds) > plain
        self._num_steps += 1
        if not served or any(not state.parts[part].is_free for part in served):
            self.knowledge.seconds += seconds
        self._add_up(state, plan, outcome, seconds)

    def _time_draft(self, length: int, seconds: float) -> None:
        """The first forwards of a call are slow: they stand only until others were timed."""
        knowledge = self.knowledge
        if self._has_drafted and knowledge.is_draft_cold:
            knowledge.costs.draft.clear()
            knowledge.is_draft_cold = False
        if self._has_drafted or knowledge.is_draft_cold:
            knowledge.costs.draft.add(length, seconds)
        self._has_drafted = True

    def _add_up(self, state: StepState, plan: DraftPlan, outcome: StepOutcome, seconds: float) -> None:
        totals, tokens = self.totals, self._speed.tokens(state, plan)
        totals.expected_tokens += tokens
        if not self.knowledge.costs.verify.is_empty:  # else seconds would be in target passes
            totals.expected_seconds += self._speed.seconds(state, plan, tokens)
        totals.emitted += outcome.emitted
        totals.seconds += seconds
        totals.plain_seconds += self._speed.verify(state.batch) * outcome.emitted / state.num_running
        totals.steps += 1
        totals.batch = state.batch
        totals.drafting_steps += plan.length > 0
        totals.drafted += plan.length

    # --- deciding, telling

    def why_aside(self, state: StepState, sources: Sources) -> str | None:
        """Why nothing is worth drafting in a whole call of one drafter, with the numbers; None if something may be. A
        call that stands aside counts towards the next probe."""
        costs, record = self.knowledge.costs, self.knowledge.records.get(state.parts[0].offers[0].record)
        if record is None or costs.draft.is_empty or costs.verify.num_observations(state.batch) < NUM_PLAIN:
            return None
        plans = [sources.plan(state, length) for length in self._lengths(state)]
        if max(plans, key=lambda plan: self._speed.rate(state, plan)).length:
            return None
        idle = self._idle.get(0, 0) + state.remaining
        if self._can_probe(state, 0) and idle > self._distance(state, 0):
            return None
        self._idle[0] = idle
        return f"{self._price(state.batch, record)}: nothing is drafted"

    def _price(self, batch: int, record: AcceptanceRecord) -> str:
        return (
            f"a draft token costs {self._speed.draft(1, batch) / self._speed.verify(batch):.2f} of a target pass and "
            f"{record.rate:.0%} of them are kept"
        )

    def sum_up(self, counters: SpeculationCounters) -> None:
        """See `LengthChoice.sum_up`."""
        totals, costs = self.totals, self.knowledge.costs
        if not totals.emitted or not costs.verify.num_observations(totals.batch):
            return
        counters.predicted_speedup = (
            totals.expected_tokens / totals.expected_seconds * totals.plain_seconds / totals.emitted
        )
        counters.measured_speedup = totals.plain_seconds / totals.seconds
        if not costs.draft.is_empty:
            counters.cost_coefficient = self._speed.draft(1, totals.batch) / self._speed.verify(totals.batch)
        counters.decision = self._told(counters)

    def _told(self, counters: SpeculationCounters) -> str:
        totals, speeds = self.totals, f"measured {counters.measured_speedup:.2f}x"
        cost = "what is looked up costs nothing"
        if counters.cost_coefficient is not None:
            cost = f"a draft token costs {counters.cost_coefficient:.2f} of a target pass"
        if not totals.drafting_steps:
            return f"Nothing was drafted: {cost}; {speeds}"
        told = f"{cost} and {counters.acceptance_rate:.0%} of those reached were kept"
        length = totals.drafted / totals.drafting_steps
        where = "" if totals.drafting_steps == totals.steps else f" in {totals.drafting_steps} of {totals.steps} steps"
        told = f"{told}: {length:.1f} tokens per step{where}, predicted {counters.predicted_speedup:.2f}x, {speeds}"
        return told[0].upper() + told[1:]
