"""Is a copy of the draft in fewer bits made exactly when it has earned its making?"""

import pytest

from hf_specdec.acceptance import AcceptanceRecord
from hf_specdec.conversion import ConversionPrice, best_conversion, best_rate, has_evidence, is_worse
from hf_specdec.speed_model import PairKnowledge


def known(c: float = 0.4, kept: float = 0.9, seconds: float = 100.0, batch: int = 1) -> PairKnowledge:
    """A pair on a flat machine with passes of 0.1 s, measured to nine rows per row of the batch."""
    knowledge = PairKnowledge(seconds=seconds, is_draft_cold=False)
    for _ in range(4):
        for rows in range(1, 10):
            knowledge.costs.verify.add(rows * batch, 0.1)
        for length in (1, 4):
            knowledge.costs.draft.add(length, 0.1 * c * length)
    record = knowledge.records["draft"] = AcceptanceRecord(0.6)
    for _ in range(40):
        record.update([[kept**position for position in range(1, 9)]])
    return knowledge


def test_best_rate_is_that_of_the_closed_formula():
    """(1 - a^(K+1)) / (1 - a) / (1 + K c), Leviathan et al. 2023, Theorem 3.8, at its best K."""
    expected = max((1 - 0.9 ** (k + 1)) / 0.1 / (0.1 * (1 + 0.4 * k)) for k in range(17))
    assert best_rate(known(), 1) == pytest.approx(expected, rel=0.01)


def test_half_the_price_is_worth_what_the_formula_says():
    half = best_rate(known().at_price(0.5), 1)
    assert half == pytest.approx(best_rate(known(c=0.2), 1), rel=0.01)
    assert half / best_rate(known(), 1) > 1.3


@pytest.mark.parametrize(("seconds", "is_made"), [(1.0, False), (8.0, False), (14.0, True), (100.0, True)])
def test_a_copy_is_made_once_it_would_have_saved_what_making_it_takes(seconds, is_made):
    """At half the price some 28 % of the time is saved: 3 s of making are earned after some 11 s."""
    price = ConversionPrice("int8", 0.5, 3.0)
    assert best_conversion(known(seconds=seconds), 1, [price]) == (price if is_made else None)


def test_the_copy_that_saves_most_is_taken_first():
    prices = [ConversionPrice("int8", 0.5, 3.0), ConversionPrice("nf4", 0.3, 6.0)]
    assert best_conversion(known(), 1, prices) == prices[1]


@pytest.mark.parametrize(
    ("pair", "share"),
    [
        (known(kept=0.02), 0.3),  # nothing is kept, nothing is drafted, nothing can be saved
        (known(c=0.002), 0.5),  # the draft costs nothing as it is
        (known(), 1.1),  # fewer bits take longer here
        (known(c=4.0), 0.9),
    ],
    ids=["useless draft", "cheap draft", "slow kernels", "far too dear"],
)
def test_nothing_is_made_where_it_saves_nothing(pair, share):
    pair.seconds = 1e6
    assert best_conversion(pair, 1, [ConversionPrice("int8", share, 1.0)]) is None


def test_a_draft_that_pays_only_in_fewer_bits_is_found():
    pair = known(c=1.0, kept=0.9)
    price = ConversionPrice("int8", 0.3, 3.0)
    assert best_rate(pair, 1) == pytest.approx(10.0, rel=0.03)  # plain
    assert best_conversion(pair, 1, [price]) == price


def test_nothing_is_judged_before_enough_was_seen():
    assert has_evidence(known(), 1)
    assert not has_evidence(PairKnowledge(), 1)
    assert not has_evidence(known(), 12)  # passes of twelve rows were never timed
    cold = known()
    cold.is_draft_cold = True
    assert not has_evidence(cold, 1)


def test_rows_are_counted_together():
    pair = known(batch=4)
    assert best_rate(pair, 4) == pytest.approx(4 * best_rate(known(), 1), rel=0.01)


def test_a_copy_that_keeps_too_little_is_given_up():
    assert is_worse(known(c=0.2, kept=0.3), known(), 1)
    assert not is_worse(known(c=0.2), known(), 1)
    few = known(c=0.2, kept=0.3)
    few.records["draft"].num_updates = 5
    assert not is_worse(few, known(), 1)


def test_a_copy_begins_with_what_is_known_of_the_draft():
    copied, pair = PairKnowledge(), known()
    copied.take_over(pair)
    assert copied.costs.verify.seconds(4) == pytest.approx(0.1)
    assert copied.costs.draft.is_empty
    assert copied.records["draft"].rate == pytest.approx(pair.records["draft"].rate)
    copied.records["draft"].update([[0.0]])
    copied.costs.verify.add(4, 9.0)
    assert pair.records["draft"].num_updates == 40  # its own, not shared
    assert pair.costs.verify.num_observations(4) == 4
