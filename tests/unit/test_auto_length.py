"""Does the measured choice of K find what a machine and a text allow, stand aside where nothing pays, and come back?

Machines and texts are simulated (`tests/simulation.py`): 10 % log-normal noise on every time, one change of acceptance
midway, the draft's prefill and its catch-ups counted. Regret is the share of the best fixed K's speed that is lost.
"""

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from hf_specdec.auto_length import MeasuredLength
from hf_specdec.draft_length import Offer, Part, Planner, Sources, StepOutcome, StepState
from hf_specdec.speed_model import PairKnowledge
from hf_specdec.statistics import SpeculationCounters
from tests.simulation import World, auto_seconds, regret, world

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("measured")


def test_regret_is_at_most_five_per_cent_on_average_and_ten_at_worst():
    """All machines, costs and pairs of acceptances, in a process where no types are checked at every call."""
    run = subprocess.run([sys.executable, "-m", "tests.simulation"], cwd=ROOT, capture_output=True, text=True)
    found = json.loads(run.stdout)
    assert len(found) == 3 * 4 * 16
    assert statistics.mean(max(0.0, value) for value in found.values()) <= 0.05
    assert max(found.values()) <= 0.10, max(found, key=lambda key: found[key])


def test_a_choice_that_never_stands_aside_fails_the_same_bar(monkeypatch):
    """The bar is able to fail: K = 4 always."""
    monkeypatch.setattr(MeasuredLength, "choose", lambda self, state, sources: min(4, state.limit))
    assert regret(world("flat", 0.05, 0.05, 0.05), 0) > 0.10


def test_a_draft_that_costs_more_than_the_target_is_timed_and_left_alone():
    _, lengths = auto_seconds(world("flat", 1.2, 0.9, 0.9), 0)
    assert 1 <= sum(length > 0 for length in lengths) <= 2


def test_probes_of_a_useless_draft_get_rarer():
    _, lengths = auto_seconds(World("flat", 0.5, (0.02, 0.02), 600), 0)
    probes = [step for step, length in enumerate(lengths) if length and step > 20]
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert 2 <= len(probes) <= 20
    assert statistics.mean(gaps[-2:]) > 1.5 * gaps[0]


def test_a_draft_that_became_good_is_found_again():
    _, lengths = auto_seconds(World("flat", 0.2, (0.02, 0.9), 800), 0)
    assert statistics.mean(lengths[-40:]) >= 3
    assert statistics.mean(length > 0 for length in lengths[40:300]) < 0.25


def test_a_second_call_begins_where_the_first_one_ended():
    made, knowledge = World("flat", 0.05, (0.9, 0.9), 400), PairKnowledge()
    auto_seconds(made, 0, knowledge)
    _, lengths = auto_seconds(made, 1, knowledge)
    assert min(lengths[:5]) >= 4


def test_long_drafts_are_reached_where_passes_are_flat():
    _, lengths = auto_seconds(World("offload", 0.01, (0.95, 0.95), 1500), 0)
    assert max(lengths) >= 16
    assert statistics.mean(lengths[-20:]) >= 10


def test_staircase_keeps_k_at_the_edge_of_a_step():
    _, lengths = auto_seconds(World("staircase", 0.05, (0.8, 0.8), 700), 0)
    common = statistics.multimode(lengths[100:])
    assert set(common) <= {3, 7}


def state(remaining: int = 100, debt: int = 0, batch: int = 1) -> StepState:
    return StepState(batch, batch, remaining - 1, remaining, [Part([Offer(remaining - 1, "draft")] * batch, debt=debt)])


def taught(acceptance: float, cost: float, batch: int = 1) -> MeasuredLength:
    """A choice that has seen forty steps of K = 0 and K = 2."""
    choice = MeasuredLength(PairKnowledge(), cost)
    planner = Planner(choice, Sources(cost), schedule=[0, 2] * 20)
    for _ in range(40):
        plan = planner.plan(state(batch=batch))
        survivals = [[acceptance, acceptance**2][: plan.length]] * batch
        emitted = batch * (1 + (plan.length > 0 and acceptance > 0.5))
        planner.learn(state(batch=batch), plan, StepOutcome(survivals, emitted, 0.0, cost * plan.length, 1.0))
    return choice


def test_a_prompt_too_long_to_read_for_what_is_left_is_not_read():
    choice = taught(0.8, 0.1)
    for tokens in (10, 1000):
        choice.knowledge.costs.read.add(tokens, tokens * 0.05)
    assert choice.choose(state(), Sources(0.1)) > 0
    assert choice.choose(state(remaining=200, debt=4000), Sources(0.1)) == 0
    assert choice.choose(state(remaining=4000, debt=4000), Sources(0.1)) > 0


def test_whole_call_stands_aside_only_with_evidence_and_until_a_probe_is_due():
    assert MeasuredLength(PairKnowledge(), 0.5).why_aside(state(), Sources(0.5)) is None
    assert taught(0.9, 0.2).why_aside(state(), Sources(0.2)) is None
    choice = taught(0.02, 0.6)
    choice.knowledge.distances[0] = 250
    asides = [choice.why_aside(state(), Sources(0.6)) for _ in range(4)]
    assert asides[0] is not None
    assert "costs 0.60 of a target pass" in asides[0]
    assert None in asides


def test_decision_says_cost_acceptance_length_and_both_speeds():
    choice, counters = taught(0.9, 0.2), SpeculationCounters("draft_model")
    counters.record_prefill(1, 0.1)
    for _ in range(20):
        counters.record_step(2, [2], [1], [2], [True], 0.4, 1.0)
    choice.sum_up(counters)
    assert counters.decision.startswith(
        "A draft token costs 0.20 of a target pass and 50% of those reached were kept: 2.0 "
    )
    assert "in 20 of 40 steps, predicted " in counters.decision
    assert counters.measured_speedup == pytest.approx((20 + 40) / (20 * 1.0 + 20 * 1.4), rel=0.05)
    assert counters.cost_coefficient == pytest.approx(0.2)


def test_prediction_meets_what_is_measured_in_a_steady_world():
    made = World("flat", 0.2, (0.7, 0.7), 800, noise=0.05)
    knowledge, counters = PairKnowledge(), SpeculationCounters("draft_model")
    auto_seconds(made, 0, knowledge)
    choices = []
    original = MeasuredLength.__init__

    def remembered(self, *args):
        original(self, *args)
        choices.append(self)

    MeasuredLength.__init__ = remembered
    try:
        auto_seconds(made, 1, knowledge)
    finally:
        MeasuredLength.__init__ = original
    choices[0].sum_up(counters)
    assert counters.predicted_speedup == pytest.approx(counters.measured_speedup, rel=0.1)
