"""Do measured curves keep to what is known of passes: more rows never take less, what was tried last counts most?"""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.costs import MeasuredCurve, StepCosts


def curve(points: dict[int, float], is_proportional: bool = False) -> MeasuredCurve:
    made = MeasuredCurve(is_proportional)
    for count, seconds in points.items():
        made.add(count, seconds)
    return made


def test_tried_counts_give_their_median():
    made = MeasuredCurve()
    for seconds in (1.0, 9.0, 1.2, 1.1, 1.3):
        made.add(4, seconds)
    assert made.seconds(4) == pytest.approx(1.2, abs=0.11)
    assert made.num_observations(4) == 5


def test_between_tried_counts_seconds_are_interpolated():
    made = curve({1: 1.0, 9: 3.0})
    assert made.seconds(5) == pytest.approx(2.0)
    assert made.least_seconds(5) == 1.0


def test_beyond_what_was_tried_the_last_slope_goes_on():
    made = curve({1: 1.0, 5: 2.0})
    assert made.seconds(9) == pytest.approx(3.0)
    assert made.least_seconds(9) == 2.0
    assert curve({3: 2.0}).seconds(30) == 2.0


def test_draft_seconds_grow_with_the_count():
    made = curve({2: 1.0}, is_proportional=True)
    assert (made.seconds(1), made.seconds(6)) == (0.5, 3.0)


def test_more_rows_never_take_less_time():
    made = curve({1: 1.0, 4: 0.8, 8: 1.5})
    values = [made.seconds(rows) for rows in range(1, 20)]
    assert values == sorted(values)
    assert made.seconds(1) == made.seconds(4) == pytest.approx(0.9, abs=0.02)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.001, 100.0), min_size=1, max_size=12))
def test_every_curve_is_non_decreasing_and_above_its_lower_bound(points):
    made = curve(points)
    values = [made.seconds(count) for count in range(1, 80)]
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))
    assert all(made.least_seconds(count) <= made.seconds(count) + 1e-9 for count in range(1, 80))


def test_a_machine_that_became_slower_is_noticed_within_few_steps():
    made, rng = MeasuredCurve(), random.Random(1)
    for _ in range(100):
        made.add(1, 1.0 + 0.05 * rng.random())
    made.age()
    for _ in range(6):
        made.add(1, 2.0 + 0.05 * rng.random())
    assert made.seconds(1) > 1.5


def test_costs_of_a_pair_age_together():
    costs = StepCosts()
    for made in (costs.verify, costs.draft, costs.read):
        made.add(1, 1.0)
    costs.age()
    for made in (costs.verify, costs.draft, costs.read):
        made.add(1, 3.0)
        assert made.seconds(1) == 3.0  # equal weights would give the lower of two
