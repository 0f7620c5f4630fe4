import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.statistics import SpeculationCounters


def exactly(text):
    return f"^{re.escape(text)}$"


def one_row(counters, draft_length, accepted, emitted=None, drafted=None):
    counters.record_step(
        draft_length,
        [draft_length if drafted is None else drafted],
        [accepted],
        [accepted + 1 if emitted is None else emitted],
        [True],
        draft_seconds=0.0,
        verify_seconds=0.0,
    )


def test_counts_of_two_rows_are_those_of_their_walks():
    counters = SpeculationCounters("draft_model")
    counters.record_prefill(2, seconds=0.5)
    counters.record_step(3, [3, 2], [3, 0], [4, 1], [True, True], 0.25, 1.0)
    counters.record_step(3, [3, 9], [1, 9], [1, 9], [True, False], 0.25, 1.0)
    counters.finish(4.0)
    report = counters.report()
    report.check()
    assert report.draft_lengths == [3, 3]
    assert (report.target_passes, report.steps) == (2, 3)
    assert (report.drafted, report.reached, report.accepted) == (8, 3 + 1 + 2, 4)
    assert (report.prefill_emitted, report.emitted, report.cut) == (2, 8, 1)
    assert report.accepted_histogram == [1, 1, 0, 1]
    assert report.acceptance_by_position == [2 / 3, 1 / 2, 1.0]
    assert report.acceptance_rate == 4 / 6
    assert report.draft_utilization == 4 / 8
    assert report.mean_acceptance_length == 6 / 3
    assert (report.draft_seconds, report.verify_seconds, report.prefill_seconds) == (0.5, 2.0, 0.5)
    assert report.other_seconds == 1.0
    assert report.decision == "Drafted 3 tokens per step with draft_model: 2.00 tokens per target pass and row."


def test_a_call_without_steps_has_plains_rates():
    counters = SpeculationCounters("draft_model")
    counters.record_prefill(1, 0.1)
    report = counters.report()
    report.check()
    assert (report.acceptance_rate, report.draft_utilization, report.mean_acceptance_length) == (0.0, 0.0, 1.0)
    assert (report.acceptance_by_position, report.accepted_histogram) == ([], [])
    assert report.decision == "The prefill gave every token that was asked for: nothing was drafted."


def test_steps_without_a_draft_count_as_plain_passes():
    counters = SpeculationCounters("draft_model")
    one_row(counters, draft_length=0, accepted=0)
    report = counters.report()
    assert (report.steps, report.drafted, report.mean_acceptance_length) == (1, 0, 1.0)
    assert report.accepted_histogram == [1]


def test_a_position_never_reached_has_rate_zero():
    counters = SpeculationCounters("draft_model")
    one_row(counters, draft_length=3, accepted=0)
    assert counters.report().acceptance_by_position == [0.0, 0.0, 0.0]


def test_dropped_tokens_move_from_emitted_to_cut():
    counters = SpeculationCounters("draft_model")
    counters.record_prefill(1, 0.0)
    one_row(counters, draft_length=4, accepted=4)
    counters.record_dropped(2)
    report = counters.report()
    report.check()
    assert (report.emitted, report.cut, report.mean_acceptance_length) == (4, 2, 3.0)


def test_more_tokens_than_the_steps_emitted_cannot_be_dropped():
    counters = SpeculationCounters("draft_model")
    counters.record_prefill(1, 0.0)
    one_row(counters, draft_length=1, accepted=0)
    with pytest.raises(
        ValueError,
        match=exactly("Cannot drop 2 tokens: the steps emitted 1, and the tokens of the prefill are never dropped."),
    ):
        counters.record_dropped(2)


@pytest.mark.parametrize(("drafted", "accepted", "emitted"), [(3, 0, 1), (1, 2, 1), (2, 1, 3), (2, 1, -1), (2, -1, 0)])
def test_impossible_counts_are_refused(drafted, accepted, emitted):
    with pytest.raises(ValueError, match=r"^Impossible counts in row 0: 0 <= accepted -?\d <= drafted \d <= draft_len"):
        one_row(SpeculationCounters("draft_model"), 2, accepted, emitted, drafted)


def test_notes_are_kept_once_in_order():
    counters = SpeculationCounters("draft_model")
    for text in ("first", "second", "first"):
        counters.note(text)
    assert counters.report().notes == ["first", "second"]


def test_a_report_is_not_changed_by_later_steps():
    counters = SpeculationCounters("draft_model")
    one_row(counters, 2, 1)
    report = counters.report()
    one_row(counters, 2, 2)
    assert (report.draft_lengths, report.accepted_histogram) == ([2], [0, 1, 0])


def test_seconds_of_a_merged_call_are_not_counted_twice():
    inner, outer = SpeculationCounters("draft_model"), SpeculationCounters("draft_model")
    inner.record_prefill(1, 1.0)
    inner.finish(2.0)
    outer.merge(inner)
    assert outer.report().other_seconds == 1.0
    outer.finish(2.5)
    assert outer.report().other_seconds == 1.5


def test_the_reason_of_a_merged_call_becomes_a_note_where_another_part_speculated():
    inner, outer = SpeculationCounters("draft_model"), SpeculationCounters("draft_model")
    inner.reason = "no draft"
    outer.record_prefill(1, 0.0)
    outer.merge(inner)
    report = outer.report()
    assert report.reason is None
    assert report.notes == ["Plain decoding ran in a part of the call: no draft"]


def test_the_reason_of_a_merged_call_is_the_reason_where_nothing_else_ran():
    inner, outer = SpeculationCounters("draft_model"), SpeculationCounters("draft_model")
    inner.reason = "no draft"
    outer.merge(inner)
    assert (outer.report().reason, outer.report().notes) == ("no draft", [])


def test_changing_draft_lengths_and_a_reason_stand_in_the_decision():
    counters = SpeculationCounters("draft_model")
    one_row(counters, 4, 4)
    one_row(counters, 2, 0)
    assert counters.report().decision.startswith("Drafted 2 to 4 tokens per step with draft_model: 3.00 tokens")
    counters.reason = "draft logits were NaN"
    assert counters.report().decision == "Plain decoding: draft logits were NaN"
    counters.decision = "Drafting paused."
    assert counters.report().decision == "Drafting paused."


@st.composite
def row_steps(draw, draft_length):
    drafted = draw(st.integers(0, draft_length))
    accepted = draw(st.integers(0, drafted))
    return drafted, accepted, draw(st.integers(0, accepted + 1)), draw(st.booleans())


@st.composite
def calls(draw):
    num_rows = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 5), max_size=6))
    return num_rows, [(length, [draw(row_steps(length)) for _ in range(num_rows)]) for length in lengths]


def count(call):
    num_rows, steps = call
    counters = SpeculationCounters("draft_model")
    counters.record_prefill(num_rows, 0.0)
    for draft_length, rows in steps:
        drafted, accepted, emitted, is_running = map(list, zip(*rows, strict=True))
        counters.record_step(draft_length, drafted, accepted, emitted, is_running, 0.0, 0.0)
    return counters


@given(calls(), st.data())
def test_every_token_is_accounted_for(call, data):
    num_rows, steps = call
    counters = count(call)
    running = [(length, *row[:3]) for length, rows in steps for row in rows if row[3]]
    dropped = data.draw(st.integers(0, sum(emitted for *_, emitted in running)))
    counters.record_dropped(dropped)
    report = counters.report()
    report.check()
    assert report.emitted == num_rows + sum(emitted for *_, emitted in running) - dropped
    assert report.steps == len(running)
    assert report.reached == sum(min(accepted + 1, drafted) for _, drafted, accepted, _ in running)
    assert len(report.acceptance_by_position) == max((length for length, _ in steps), default=0)
    assert all(0.0 <= rate <= 1.0 for rate in report.acceptance_by_position)


@given(calls(), calls())
def test_merging_sums_the_calls(first, second):
    merged = count(first)
    merged.merge(count(second))
    report, parts = merged.report(), [count(first).report(), count(second).report()]
    report.check()
    for name in ("target_passes", "steps", "drafted", "reached", "accepted", "emitted", "cut", "prefill_emitted"):
        assert getattr(report, name) == sum(getattr(part, name) for part in parts)
    assert report.draft_lengths == parts[0].draft_lengths + parts[1].draft_lengths
