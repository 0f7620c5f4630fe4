"""Is the law of the emitted text the target's own law, exactly?"""

import pytest
import torch

from hf_specdec.verification import BlockVerifier, StandardVerifier
from tests.losslessness import exact_law
from tests.losslessness.exact_law import (
    Process,
    accepted_law,
    constant_tables,
    ideal_accepted_law,
    random_tables,
    speculative_law,
    target_law,
    total_variation,
)

# Float64: some hundred thousand products of at most ten factors, each good to 1e-16, add up to well under this.
TOLERANCE = 1e-12
RULES = {"standard": StandardVerifier(), "block": BlockVerifier()}
# vocab, drafted, tokens: with more tokens than a step can emit every text crosses a step border, with fewer many do.
SIZES = [(2, 3, 5), (3, 2, 4), (3, 3, 4), (4, 2, 3), (5, 1, 3), (5, 2, 3)]
KINDS = ["random", "zeros", "equal", "near", "disjoint", "sharp"]


def make_process(rule: str, vocab: int, num_drafted: int, num_tokens: int, kind: str = "random", **changes) -> Process:
    seed = 1000 * vocab + 100 * num_drafted + KINDS.index(kind)
    tables = random_tables(vocab, num_tokens + num_drafted + 1, seed, kind)
    return Process(tables, RULES[rule], rule, num_drafted, num_tokens, **changes)


def assert_lossless(process: Process) -> None:
    law = speculative_law(process)
    assert float(law.sum()) == pytest.approx(1.0, abs=TOLERANCE)
    assert total_variation(law, target_law(process)) <= TOLERANCE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "num_drafted", "num_tokens"), SIZES)
def test_text_has_the_law_of_the_target(rule, vocab, num_drafted, num_tokens):
    assert_lossless(make_process(rule, vocab, num_drafted, num_tokens))


@pytest.mark.parametrize("rule", RULES)
def test_text_has_the_law_of_the_target_at_the_largest_sizes(rule):
    assert_lossless(make_process(rule, 3, 3, 5))
    assert_lossless(make_process(rule, 4, 3, 3))
    assert_lossless(make_process(rule, 5, 3, 2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_law_holds_for_zeros_equal_and_far_apart_tables(rule, kind):
    assert_lossless(make_process(rule, 3, 2, 4, kind))
    assert_lossless(make_process(rule, 4, 3, 2, kind))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["random", "zeros"])
def test_law_holds_when_rows_draft_different_numbers_of_tokens(rule, kind):
    process = make_process(rule, 3, 3, 4, kind, has_unequal_lengths=True)
    _, _, _, lengths, _, _ = exact_law._drafts(process, 2, torch.arange(9))
    assert set(lengths.tolist()) == {0, 1, 2, 3}
    assert_lossless(process)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["random", "zeros", "equal"])
def test_law_holds_for_a_draft_that_is_a_point_mass(rule, kind):
    assert_lossless(make_process(rule, 4, 3, 4, kind, is_point_mass=True))
    assert_lossless(make_process(rule, 3, 2, 4, kind, is_point_mass=True, has_unequal_lengths=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("eos_ids", [[2], [0, 2]])
@pytest.mark.parametrize("is_point_mass", [False, True])
def test_law_holds_when_drafting_and_texts_end_at_eos(rule, eos_ids, is_point_mass):
    changes = {"eos_ids": torch.tensor(eos_ids), "is_point_mass": is_point_mass}
    assert_lossless(make_process(rule, 3, 2, 4, **changes))
    assert_lossless(make_process(rule, 3, 3, 4, "zeros", has_unequal_lengths=True, **changes))


@pytest.mark.parametrize("rule", RULES)
def test_law_holds_without_any_draft(rule):
    assert_lossless(make_process(rule, 3, 0, 3))


@pytest.mark.parametrize("rule", RULES)
def test_law_holds_when_the_draw_searches_in_two_levels(rule, monkeypatch):
    monkeypatch.setattr("hf_specdec.sampling.BLOCK_WIDTH", 2)
    assert_lossless(make_process(rule, 5, 2, 3, "zeros"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_point_mass", [False, True])
def test_number_of_accepted_tokens_has_the_law_of_the_paper(rule, is_point_mass):
    for kind in KINDS:
        process = make_process(rule, 3, 3, 1, kind, is_point_mass=is_point_mass)
        assert total_variation(accepted_law(process), ideal_accepted_law(process)) <= TOLERANCE


def test_block_rule_accepts_at_least_as_many_tokens_in_expectation():
    gains = []
    for seed in range(20):
        tables = random_tables(3, 5, seed, KINDS[seed % 2])
        means = [
            float(accepted_law(Process(tables, RULES[rule], rule, 3, 1)) @ torch.arange(4.0, dtype=torch.float64))
            for rule in ("block", "standard")
        ]
        gains.append(means[0] - means[1])
    assert min(gains) >= -TOLERANCE
    assert max(gains) > 0.05


def test_four_drafted_tokens_at_acceptance_0_8_emit_3_36_tokens():
    process = Process(constant_tables([0.6, 0.4], [0.8, 0.2], 6), RULES["standard"], "standard", 4, 1)
    emitted = 1 + float(accepted_law(process) @ torch.arange(5.0, dtype=torch.float64))
    assert emitted == pytest.approx((1 - 0.8**5) / (1 - 0.8), abs=TOLERANCE)
    assert emitted == pytest.approx(3.3616, abs=TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_draft_of_two_tokens_keeps_the_law_of_the_target(rule):
    # huggingface/transformers#32867: judged by its probabilities (0.8, 0.2) the greedy draft gave (0.75, 0.25).
    tables = constant_tables([0.6, 0.4], [0.8, 0.2], 3)
    law = speculative_law(Process(tables, RULES[rule], rule, 1, 1, is_point_mass=True))
    assert law.tolist() == pytest.approx([0.6, 0.4], abs=TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["random", "zeros", "sharp"])
def test_grid_contains_every_breakpoint(rule, kind, monkeypatch):
    process = make_process(rule, 3, 3, 2, kind, has_unequal_lengths=True)
    generator = torch.Generator().manual_seed(0)
    original = exact_law._cells

    def anywhere_inside(breakpoints):
        middles, widths = original(breakpoints)
        offsets = torch.rand(widths.shape, generator=generator, dtype=torch.float64) - 0.5
        return middles + 0.999 * offsets * widths, widths

    for length in range(2):
        prefixes = torch.arange(3**length)
        at_middle = exact_law.step_outcomes(process, length, prefixes)
        with monkeypatch.context() as patch:
            patch.setattr(exact_law, "_cells", anywhere_inside)
            elsewhere = exact_law.step_outcomes(process, length, prefixes)
        # Cells thinner than the rounding of a breakpoint may fall on either side of it.
        is_thick = torch.cat(at_middle.weights) > 1e-12
        for name in ("num_accepted", "codes", "lengths"):
            one, other = torch.cat(getattr(at_middle, name)), torch.cat(getattr(elsewhere, name))
            assert torch.equal(one[is_thick], other[is_thick])
