"""Does `generate(do_sample=True)` with the flag on draw texts from the target's own law, and would we notice if not?

The statistic compares thousands of rows with plain sampling's law, which is computed exactly (`sampled_law`). All cases
together raise a false alarm with probability FALSE_FAIL_RATE over the choice of seeds; the seeds are fixed. The sample
size is such that the same statistic rejects every wrong rule of `mutants`.
"""

import itertools

import pytest
import torch
from scipy import stats

import hf_specdec
from hf_specdec.coins import Coins
from hf_specdec.registry import VERIFIERS
from hf_specdec.verification import BlockVerifier, StandardVerifier
from tests.losslessness import tiny_pairs
from tests.losslessness.exact_law import Process, Tables, ideal_accepted_law
from tests.losslessness.mutants import DRAW_MUTANTS, KEEP_THE_LAW, LENGTH_MUTANTS, MUTANTS, registered_class
from tests.losslessness.tiny_pairs import DRAFTS, VOCAB, Case, p_value, plainly, sample

FALSE_FAIL_RATE = 1e-6
SEED = 20240
NUM_ROWS = 3000
RULES = {"standard": StandardVerifier, "block": BlockVerifier}
MUTANT = "mutant of the tests"

TEMPERATURE = {"temperature": 0.7}
FLAT = {"temperature": 1.5}  # under flat laws, and with short drafts, wrong rules show most
COMBINED = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
PROCESSORS = {
    "temperature": TEMPERATURE,
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.25},
    "repetition penalty": {"repetition_penalty": 1.5},
    "combined": COMBINED,
}
LENGTHS = (1, 2, 4)
GRID = {
    f"{name}-{rule}-{length}": Case(rule, length, options)
    for name, options in PROCESSORS.items()
    for rule in RULES
    for length in LENGTHS
}
OTHERS = {
    f"{name}-{case.rule}": case
    for rule in RULES
    for name, case in {
        "ragged left padding": Case(rule, 4, COMBINED, prompts="ragged"),
        "num_return_sequences": Case(rule, 2, TEMPERATURE, prompts="ragged", uses_num_return_sequences=True),
        "EOS inside blocks": Case(rule, 4, TEMPERATURE, eos_id=1),
        "EOS in a ragged batch": Case(rule, 3, COMBINED, prompts="ragged", eos_id=2),
        "a smaller draft vocabulary": Case(rule, 4, COMBINED, draft="smaller vocabulary", target_vocab=VOCAB + 2),
        "a larger draft vocabulary": Case(rule, 4, COMBINED, draft="larger vocabulary"),
        "a point mass": Case(rule, 4, COMBINED, draft="point mass"),
        "a bfloat16 draft": Case(rule, 4, COMBINED, draft="bfloat16"),
    }.items()
}
# Every other processor that changes the law, each under both rules.
EVERY_PROCESSOR = {
    f"{name}-{rule}": Case(rule, 2, options)
    for rule in RULES
    for name, options in (
        ("typical", {"typical_p": 0.8}),
        ("epsilon", {"epsilon_cutoff": 0.05}),
        ("eta", {"eta_cutoff": 0.05}),
        ("top-h", {"top_h": 0.7}),
        ("no repeated n-gram", {"no_repeat_ngram_size": 2}),
        ("bad words", {"bad_words_ids": [[3], [1, 2]]}),
        ("sequence bias", {"sequence_bias": [[[2], 1.5], [[1, 3], -2.0]]}),
        ("suppressed", {"suppress_tokens": [4]}),
        ("suppressed at the beginning", {"begin_suppress_tokens": [1]}),
        ("encoder repetition penalty", {"encoder_repetition_penalty": 1.5}),
        ("renormalised", {"renormalize_logits": True, "temperature": 0.7}),
    )
}
CASES = GRID | OTHERS | EVERY_PROCESSOR
REJECT_BELOW = FALSE_FAIL_RATE / len(CASES)
# One cell of the grid per rule and processor stays fast, each draft length equally often.
FAST_CELLS = {
    f"{name}-{rule}-{LENGTHS[(i + j) % len(LENGTHS)]}"
    for i, name in enumerate(PROCESSORS)
    for j, rule in enumerate(RULES)
}
GRID_PARAMETERS = [pytest.param(name, marks=[] if name in FAST_CELLS else pytest.mark.slow) for name in GRID]


@pytest.fixture
def mutant():
    """A function that registers a mutant around a rule, and gives the name it is registered under."""

    def register(name: str, rule: str) -> str:
        hf_specdec.register_verifier(MUTANT, registered_class(name, rule))
        return MUTANT

    yield register
    VERIFIERS.pop(MUTANT, None)


def law_p_value(case: Case) -> float:
    samples, report = sample(case, NUM_ROWS, SEED)
    assert sum(len(tokens) for _, tokens in samples) == NUM_ROWS
    assert report.accepted > 0
    return p_value(samples)


@pytest.mark.parametrize(
    "name", [*GRID_PARAMETERS, *OTHERS, *(pytest.param(name, marks=pytest.mark.slow) for name in EVERY_PROCESSOR)]
)
def test_texts_have_the_law_of_plain_sampling(name):
    samples, report = sample(CASES[name], NUM_ROWS, SEED)
    assert 0.2 <= report.acceptance_rate <= 0.8, str(report)
    assert max(report.draft_lengths) == CASES[name].draft_length
    assert p_value(samples) >= REJECT_BELOW


def test_plain_sampling_has_the_computed_law():
    samples, report = sample(Case(options=COMBINED, prompts="ragged", eos_id=2), NUM_ROWS, SEED, plainly)
    assert report is None
    assert p_value(samples) >= REJECT_BELOW


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", sorted(set(MUTANTS) - KEEP_THE_LAW))
def test_sampled_law_rejects_the_mutant(name, rule, mutant):
    assert law_p_value(Case(mutant(name, rule), 2, FLAT)) < REJECT_BELOW


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAW_MUTANTS)
def test_sampled_law_rejects_the_mutant_of_the_drafter(name, rule, monkeypatch):
    monkeypatch.setattr("hf_specdec.drafters.model.sampling.draw", DRAW_MUTANTS[name])
    assert law_p_value(Case(rule, 4, TEMPERATURE)) < REJECT_BELOW


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LENGTH_MUTANTS)
def test_sampled_law_rejects_the_mutant_of_the_draft_length(name, rule, monkeypatch):
    monkeypatch.setattr("hf_specdec.drafters.model.draft_lengths_after_eos", LENGTH_MUTANTS[name])
    assert law_p_value(Case(rule, 4, TEMPERATURE, eos_id=3)) < REJECT_BELOW


@pytest.mark.parametrize("rule", RULES)
def test_sampled_law_rejects_a_draft_whose_law_is_taken_before_the_processors(rule, monkeypatch):
    process = tiny_pairs.judge_by_unprocessed_draft(monkeypatch)
    assert law_p_value(Case(rule, 4, COMBINED)) < REJECT_BELOW
    assert process.num_calls > 0


@pytest.mark.parametrize("rule", RULES)
def test_number_of_full_acceptances_rejects_a_dropped_bonus(rule, mutant):
    """Texts keep their law without the bonus; only K tokens are never accepted any more."""
    assert full_acceptances(rule, rule) >= REJECT_BELOW
    assert full_acceptances(mutant("drop the bonus", rule), rule) < REJECT_BELOW
    assert law_p_value(Case(MUTANT, 2, FLAT)) >= REJECT_BELOW


def full_acceptances(verifier: str, rule: str, draft_length: int = 2) -> float:
    """p-value of how often a first step accepts its whole draft, against the papers' formula for `rule`.

    With K + 2 tokens in all no later step drafts K, so the histogram's last entry counts first steps only.
    """
    case = Case(verifier, draft_length, TEMPERATURE, num_new_tokens=draft_length + 2)
    samples, report = sample(case, NUM_ROWS, SEED)
    law = full_acceptance_probability(samples[0][0], DRAFTS["noisy"](samples[0][0].model), rule, draft_length)
    accepted = report.accepted_histogram[draft_length] if len(report.accepted_histogram) > draft_length else 0
    return float(stats.binomtest(accepted, NUM_ROWS, law).pvalue)


def full_acceptance_probability(oracle, draft, rule: str, draft_length: int) -> float:
    """P(n = K) in the step after the prefill's token, from p and q on every prefix."""
    vocab, total = oracle.vocab, 0.0
    firsts = oracle.next_probs(torch.zeros(1, 1, dtype=torch.long))[0, 0]
    laws = [oracle, tiny_pairs.as_draft(oracle, draft)]
    for first in range(vocab):
        tables: list[list] = [[], []]
        for depth in range(draft_length):
            texts = torch.tensor(list(itertools.product(range(vocab), repeat=depth)), dtype=torch.long)
            texts = torch.cat([torch.full((len(texts), 1), first), texts, torch.zeros(len(texts), 1).long()], dim=1)
            for table, law in zip(tables, laws, strict=True):
                table.append(law.next_probs(texts)[:, -1])
        process = Process(Tables(*tables), RULES[rule](), rule, draft_length, 1)
        total += float(firsts[first] * ideal_accepted_law(process)[draft_length])
    return total


@pytest.mark.parametrize("rule", RULES)
def test_coin_of_zero_lets_no_impossible_token_through(rule, mutant, monkeypatch):
    """Chance never gives a coin of exactly 0, so every accept coin is made 0 here; the final draw keeps its own."""
    next_coins = Coins.next

    def zero_coins(self, draft_length):
        draft, verify = next_coins(self, draft_length)
        return draft, torch.cat([torch.zeros_like(verify[:, :-1]), verify[:, -1:]], dim=1)

    monkeypatch.setattr(Coins, "next", zero_coins)
    assert num_impossible(rule) == 0
    assert num_impossible(mutant("<= for < at p = 0", rule)) > 0


def num_impossible(verifier: str) -> int:
    """Tokens that top-k forbids after their own prefix, in a sample with the rule `verifier`."""
    [(oracle, tokens)], _ = sample(Case(verifier, 4, {"top_k": 2}), 256, SEED)
    return int((oracle.next_probs(tokens).gather(2, tokens[..., None]) == 0).sum())
