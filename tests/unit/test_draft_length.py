"""Do plans keep to limits, name who serves each row from text alone, and replay from the lengths that came of them?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.draft_length import ConstantLength, Offer, Part, Planner, Sources, StepOutcome, StepState, TableLength


def state(ngram: list[int] | None, limit: int = 16, batch: int | None = None, has_model: bool = True) -> StepState:
    rows = len(ngram) if ngram is not None else 1
    parts = [Part([Offer(length, "ngram 3", 0.7) for length in ngram], is_free=True)] if ngram is not None else []
    if has_model:
        parts.append(Part([Offer(limit, "draft", 0.6)] * rows))
    return StepState(batch or rows, rows, limit, limit + 1, parts)


def test_constant_length_is_cut_at_the_limit_only():
    planner = Planner(ConstantLength(5), Sources(0.3))
    assert planner.plan(state(None)).length == 5
    assert planner.plan(state(None, limit=2)).length == 2
    assert planner.plan(state(None, limit=0)).length == 0


def test_a_bound_on_memory_cuts_every_step():
    planner = Planner(ConstantLength(8), Sources(0.3), schedule=[7, 2], most=3)
    assert [planner.plan(state(None)).length for _ in range(3)] == [3, 2, 3]


def test_schedule_goes_before_the_choice():
    planner = Planner(ConstantLength(5), Sources(0.3), schedule=[1, 0, 3])
    assert [planner.plan(state(None)).length for _ in range(5)] == [1, 0, 3, 5, 5]


def test_without_drafters_nothing_is_planned():
    assert Planner(ConstantLength(5), Sources(0.3)).plan(StepState(1, 1, 9, 10, [])).length == 0


def test_rows_with_a_match_are_served_by_the_look_up():
    plan = Sources(0.3).plan(state([8, 8, 8]), 4)
    assert (plan.parts, plan.lengths) == ([0, 0, 0], [4, 4, 4])


def test_rows_without_a_match_are_served_by_the_model_where_that_pays():
    plan = Sources(0.05).plan(state([8, 0, 0]), 4)
    assert plan.parts == [0, 1, 1]
    plan = Sources(0.5).plan(state([8, 8, 8, 0]), 4)
    assert (plan.parts[:3], plan.lengths) == ([0, 0, 0], [4, 4, 4, 0])


def test_without_any_match_the_model_serves_whatever_it_costs():
    assert Sources(5.0).plan(state([0, 0]), 3).parts == [1, 1]


def test_a_look_up_alone_drafts_as_far_as_it_can():
    plan = Sources(1.0).plan(state([3, 0, 9], has_model=False), 6)
    assert (plan.length, plan.lengths) == (6, [3, 0, 6])


def test_a_look_up_that_fails_is_left_for_the_model():
    sources, now = Sources(0.1), state([8])
    for _ in range(20):
        plan = sources.plan(now, 4)
        if plan.parts != [0]:
            break
        sources.update(now, plan, [[0.0] * 4])
    assert plan.parts == [1]


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(0, 16),
    st.floats(0.01, 3.0),
    st.lists(st.floats(0, 1), max_size=6),
)
def test_a_plan_asked_for_its_own_length_is_the_same_plan(ngram, length, cost, seen):
    """That is what a replay asks for."""
    sources, now = Sources(cost), state(ngram)
    for rate in seen:
        plan = sources.plan(now, 4)
        sources.update(now, plan, [[rate**i for i in range(1, n + 1)] for n in plan.lengths])
    plan = sources.plan(now, length)
    assert sources.plan(now, plan.length) == plan
    assert max(plan.lengths, default=0) == plan.length <= length


@pytest.mark.parametrize(("batch", "expected"), [(1, 4), (3, 4), (4, 3), (8, 1), (64, 1)])
def test_table_keeps_a_pass_at_sixteen_rows(batch, expected):
    planner = Planner(TableLength(), Sources(0.3))
    assert planner.plan(state(None, batch=batch)).length == expected


def test_table_gives_look_ups_more():
    assert Planner(TableLength(), Sources(0.3)).plan(state([12])).length == 8
    assert Planner(TableLength(), Sources(0.3)).plan(state([0])).length == 4


def test_outcomes_are_wanted_only_where_something_follows_from_them():
    assert not Planner(ConstantLength(3), Sources(0.3)).learns
    assert Planner(ConstantLength(3), Sources(0.3), has_parts=True).learns


def test_records_are_kept_apart_by_what_was_offered():
    sources, now = Sources(0.3), state([4, 4])
    plan = sources.plan(now, 4)
    Planner(ConstantLength(4), sources).learn(now, plan, StepOutcome([[1.0] * 4, [0.0] * 4], 6, 0.0, 0.0, 1.0))
    assert set(sources.records) >= {"ngram 3"}
    assert sources.records["ngram 3"].num_updates == 1
