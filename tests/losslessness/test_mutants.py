"""Does the exact law reject every wrong rule, by far more than its tolerance?"""

import pytest
import torch

from hf_specdec.verification import BlockVerifier, StandardVerifier
from tests.losslessness.exact_law import (
    Process,
    accepted_law,
    ideal_accepted_law,
    random_tables,
    speculative_law,
    target_law,
    total_variation,
)
from tests.losslessness.mutants import (
    DRAW_MUTANTS,
    KEEP_THE_LAW,
    LENGTH_MUTANTS,
    MUTANTS,
    AcceptAtZero,
    DropTheBonus,
    Mutant,
    registered_class,
)

RULES = {"standard": StandardVerifier, "block": BlockVerifier}
# Nine orders of magnitude above what the right rules are held to in test_exact_law.py.
REJECTED_ABOVE = 1e-3
# A point mass has no q to take from the wrong place, and dropping its token depends on nothing that was drawn.
NEED_PROBS = {"q taken before the warpers", "drop after draw"}
IS_BIASED = sorted(set(MUTANTS) - KEEP_THE_LAW)


def make_process(verifier, rule: str, **changes) -> Process:
    return Process(random_tables(3, 6, seed=5), verifier, rule, 2, 3, **changes)


def text_deviation(process: Process) -> float:
    law = speculative_law(process)
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-12)
    return total_variation(law, target_law(process))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", IS_BIASED)
def test_exact_law_rejects_the_mutant(name, rule):
    assert text_deviation(make_process(MUTANTS[name](RULES[rule]()), rule)) > REJECTED_ABOVE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", sorted(set(IS_BIASED) - NEED_PROBS))
def test_exact_law_rejects_the_mutant_with_a_point_mass_draft(name, rule):
    process = make_process(MUTANTS[name](RULES[rule]()), rule, is_point_mass=True)
    assert text_deviation(process) > REJECTED_ABOVE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAW_MUTANTS)
def test_exact_law_rejects_the_mutant_of_the_drafter(name, rule):
    assert text_deviation(make_process(RULES[rule](), rule, draw=DRAW_MUTANTS[name])) > REJECTED_ABOVE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LENGTH_MUTANTS)
def test_exact_law_rejects_the_mutant_of_the_draft_length(name, rule):
    process = make_process(RULES[rule](), rule, lengths_after_eos=LENGTH_MUTANTS[name], eos_ids=torch.tensor([1]))
    assert text_deviation(process) > REJECTED_ABOVE


@pytest.mark.parametrize("rule", RULES)
def test_number_of_tokens_rejects_a_dropped_bonus(rule):
    process = make_process(DropTheBonus(RULES[rule]()), rule)
    assert text_deviation(process) <= 1e-12
    assert total_variation(accepted_law(process), ideal_accepted_law(process)) > REJECTED_ABOVE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_point_mass", [False, True])
def test_coin_of_zero_rejects_accepting_at_p_equal_to_zero(rule, is_point_mass):
    target_probs = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    draft_probs = None if is_point_mass else torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    arguments = (target_probs, draft_probs, torch.tensor([[0]]), torch.tensor([1]), torch.zeros(1, 2).double())
    assert text_deviation(make_process(AcceptAtZero(RULES[rule]()), rule, is_point_mass=is_point_mass)) <= 1e-12
    assert RULES[rule]()(*arguments).num_accepted.tolist() == [0]
    assert AcceptAtZero(RULES[rule]())(*arguments).num_accepted.tolist() == [1]


@pytest.mark.parametrize("rule", RULES)
def test_mutant_without_a_mutation_is_lossless(rule):
    assert text_deviation(make_process(Mutant(RULES[rule]()), rule)) <= 1e-12


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_can_be_registered_by_name(name):
    verifier = registered_class(name, "block")()
    assert isinstance(verifier, MUTANTS[name])
    assert isinstance(verifier.inner, BlockVerifier)
