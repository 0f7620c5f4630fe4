"""Does the record find the acceptance of each position, also of those never drafted, and does it follow a change?"""

import random

import pytest

from hf_specdec.acceptance import AcceptanceRecord


def drafted(record: AcceptanceRecord, rates: list[float], steps: int, seed: int = 0) -> None:
    """Steps whose position i is kept with probability `rates[i]`."""
    rng = random.Random(seed)
    for _ in range(steps):
        survivals, survival = [], 1.0
        for rate in rates:
            survival *= float(rng.random() < rate)
            survivals.append(survival)
        record.update([survivals])


def test_nothing_seen_gives_the_prior():
    record = AcceptanceRecord(0.5)
    assert record.rate == 0.5
    assert record.expected(3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert record.expected(0) == 0.0


def test_expected_tokens_follow_leviathans_formula():
    record = AcceptanceRecord(0.6)
    drafted(record, [0.8] * 4, 400)
    assert record.expected(4) == pytest.approx(sum(0.8**i for i in range(1, 5)), rel=0.15)


def test_positions_have_rates_of_their_own():
    record = AcceptanceRecord(0.6)
    drafted(record, [0.9, 0.2, 0.9], 400)
    assert record.expected(1) == pytest.approx(0.9, abs=0.07)
    assert record.expected(2) - record.expected(1) == pytest.approx(0.18, abs=0.1)


def test_positions_never_drafted_continue_the_last_one():
    record = AcceptanceRecord(0.6)
    drafted(record, [0.9, 0.9], 300)
    assert record.expected(6) == pytest.approx(sum(0.9**i for i in range(1, 7)), rel=0.15)


def test_probabilities_count_as_they_are():
    record = AcceptanceRecord(0.1)
    for _ in range(200):
        record.update([[0.5, 0.25], [0.5, 0.25]])
    assert record.expected(2) == pytest.approx(0.75, rel=0.03)


def test_a_change_is_seen_within_some_thirty_steps():
    record = AcceptanceRecord(0.6)
    drafted(record, [0.9] * 3, 300)
    drafted(record, [0.1] * 3, 35, seed=1)
    assert record.expected(1) < 0.4


def test_fading_keeps_the_rate_and_halves_the_evidence():
    record = AcceptanceRecord(0.6)
    drafted(record, [0.1] * 2, 300)
    before = record.rate
    record.fade()
    assert record.rate == pytest.approx(before, abs=0.05)
    for _ in range(6):
        record.update([[1.0, 1.0]])
    faded = record.rate
    stubborn = AcceptanceRecord(0.6)
    drafted(stubborn, [0.1] * 2, 300)
    for _ in range(6):
        stubborn.update([[1.0, 1.0]])
    assert faded > stubborn.rate
