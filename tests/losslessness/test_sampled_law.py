"""Does `generate(do_sample=True)` with the flag on draw texts from the target's own law, and would we notice if not?

The statistic compares thousands of rows with plain sampling's law, which is computed exactly (`sampled_law`). All cases
together raise a false alarm with probability FALSE_FAIL_RATE over the choice of seeds; the seeds are fixed. The sample
size is such that the same statistic rejects every wrong rule of `mutants`.
"""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from scipy import stats
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, WatermarkingConfig

import hf_specdec
from hf_specdec.coins import Coins
from hf_specdec.drafters import Draft
from hf_specdec.drafters.composite import CompositeDrafter
from hf_specdec.drafters.early_exit import EarlyExitDrafter
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.drafters.ngram import NgramDrafter
from hf_specdec.host import processors
from hf_specdec.host.cache import RaggedCache
from hf_specdec.registry import DRAFTERS, VERIFIERS
from hf_specdec.verification import BlockVerifier, StandardVerifier
from tests.losslessness import tiny_pairs
from tests.losslessness.exact_law import Process, Tables, ideal_accepted_law
from tests.losslessness.mutants import (
    DRAW_MUTANTS,
    KEEP_THE_LAW,
    LENGTH_MUTANTS,
    MUTANTS,
    registered_class,
    show_prefixes_one_short,
    take_another_row,
)
from tests.losslessness.tiny_pairs import DRAFTS, NUM_ROWS, VOCAB, Case, p_value, plainly, sample

FALSE_FAIL_RATE = 1e-6
SEED = 20240
RULES = {"standard": StandardVerifier, "block": BlockVerifier}
MUTANT = "mutant of the tests"

TEMPERATURE = {"temperature": 0.7}
FLAT = {"temperature": 1.5}  # under flat laws, and with short drafts, wrong rules show most
LIVELY = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}  # texts still repeat themselves
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
        "look-ups and a model in one batch": Case(rule, 4, COMBINED, prompts="ragged", draft="look-up or model"),
        "a point mass": Case(rule, 4, COMBINED, draft="point mass"),
        "a bfloat16 draft": Case(rule, 4, COMBINED, draft="bfloat16"),
        "an 8-bit draft": Case(rule, 4, COMBINED, draft="eight bits"),
        "a short list of ids": Case(rule, 4, COMBINED, draft="short list", eos_id=5),
        "a short list and no processors": Case(rule, 4, {"top_k": 0}, draft="short list", prompts="ragged"),
        "looked up": Case(rule, 4, LIVELY, draft="ngram", prompts="ragged"),
        "looked up, with EOS": Case(rule, 4, TEMPERATURE, draft="ngram", prompts="ragged", eos_id=1),
        "looked up in other calls": Case(rule, 4, TEMPERATURE, draft="suffix", prompts="ragged", rows_per_call=300),
        "first layers": Case(rule, 4, COMBINED, draft="early_exit", target_layers=3, prompts="ragged"),
        "first layers, with EOS": Case(rule, 2, TEMPERATURE, draft="early_exit", target_layers=2, eos_id=1),
    }.items()
}


def allowed_after(_, ids):
    """Depends on the text's length and on its last token."""
    return [token for token in range(VOCAB) if (token + int(ids[-1]) + len(ids)) % 3]


def allowed_in_row(row, ids):
    """Depends on the prompt that the text is of, and on its last token."""
    return [token for token in range(VOCAB) if (token + int(ids[-1]) + row) % 3]


class FavourSum(LogitsProcessor):
    """A user's own, which depends on the whole prefix and says that it is position-wise."""

    position_wise = True

    def __call__(self, input_ids, scores):
        favoured = input_ids.sum(dim=-1, keepdim=True) % VOCAB
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 1.5))


# Every other processor that changes the law. By the scores alone …
OF_SCORES = {
    "typical": Case(options={"typical_p": 0.8}),
    "epsilon": Case(options={"epsilon_cutoff": 0.05}),
    "eta": Case(options={"eta_cutoff": 0.05}),
    "top-h": Case(options={"top_h": 0.7}),
    "suppressed": Case(options={"suppress_tokens": [4]}),
    "renormalised": Case(options={"renormalize_logits": True, "temperature": 0.7}),
}
# … by the text before the token …
BY_ROW = {"num_rows": 600, "rows_per_call": 15}  # processors that are called row by row: slow in large batches
OF_TEXT = {
    "no repeated n-gram": Case(options={"no_repeat_ngram_size": 2}),
    "bad words": Case(options={"bad_words_ids": [[3], [1, 2]]}, **BY_ROW),
    "sequence bias": Case(
        options={"sequence_bias": [[[2], 1.5], [[1, 3], -4.0], [[4, 2], 3.0], [[2, 5], 3.0]]}, **BY_ROW
    ),
    "prefix function": Case(options={"prefix_allowed_tokens_fn": allowed_after}, **BY_ROW),
    # Its other seeding scheme asks for 40 tokens at least: too many for a law by enumeration, see the parity suite.
    "watermark": Case(
        options={"watermarking_config": WatermarkingConfig(greenlist_ratio=0.5, bias=1.5, context_width=1)}, **BY_ROW
    ),
    "a user's own": Case(options={"logits_processor": LogitsProcessorList([FavourSum()])}, **BY_ROW),
}
# … by its length …
OF_LENGTH = {
    "min length": Case(options={"min_length": 9}, eos_id=1),  # the fourth new token of the longest prompt is the ninth
    "min new tokens": Case(options={"min_new_tokens": 4}, eos_id=1),
    "exponential decay": Case(options={"exponential_decay_length_penalty": (3, 2.5)}, eos_id=1, **BY_ROW),
    "forced EOS": Case(options={"forced_eos_token_id": [2, 4]}, **BY_ROW),
    "suppressed at the beginning": Case(options={"begin_suppress_tokens": [1, 4]}, **BY_ROW),
}
OF_A_PROMPT_OF_ONE = {  # elsewhere nothing is forced at the beginning
    "forced BOS": Case(options={"forced_bos_token_id": 3}, prompts="one token", **BY_ROW),
    "suppressed after a forced BOS": Case(
        options={"forced_bos_token_id": 3, "begin_suppress_tokens": [1, 4]}, prompts="one token", **BY_ROW
    ),
}
# … and by the row, so that every row must meet its own.
OF_ROW = {
    "repetition penalty past the padding": Case(options={"repetition_penalty": 3.0}),
    "encoder repetition penalty": Case(options={"encoder_repetition_penalty": 1.5}, **BY_ROW),
    "encoder no repeated n-gram": Case(options={"encoder_no_repeat_ngram_size": 2}, **BY_ROW),
}
KINDS = OF_SCORES | OF_TEXT | OF_LENGTH | OF_A_PROMPT_OF_ONE | OF_ROW
# Each under both rules; of the slow ones, one row meets one rule and a batch the other.
EVERY_PROCESSOR = {
    f"{name}-{rule}": replace(case, rule=rule, draft_length=2)
    for i, (name, case) in enumerate(KINDS.items())
    for j, rule in enumerate(RULES)
    if case.rows_per_call is None or name in OF_A_PROMPT_OF_ONE or (i + j) % 2 == 0
}
# Rows of different lengths, left-padded, at positions 1 to 3 of a block.
IN_A_BATCH = {
    f"{name} in a ragged batch-{rule}": replace(case, rule=rule, draft_length=3, prompts="ragged")
    for i, (name, case) in enumerate(KINDS.items())
    for j, rule in enumerate(RULES)
    if name in OF_TEXT | OF_LENGTH | OF_ROW and (i + j) % 2
}
IN_A_BATCH |= {
    f"prefix function by row-{rule}": Case(
        rule,
        3,
        {"prefix_allowed_tokens_fn": allowed_in_row},
        prompts="ragged",
        uses_num_return_sequences=True,
        **BY_ROW,
    )
    for rule in RULES
}
# Of the slow ones, a few texts for the fast suite.
FEW = {
    f"{name}, few texts": replace(case, num_rows=150)
    for name, case in IN_A_BATCH.items()
    if name.startswith(("forced EOS", "encoder no repeated n-gram"))
}
CASES = GRID | OTHERS | EVERY_PROCESSOR | IN_A_BATCH | FEW
REJECT_BELOW = FALSE_FAIL_RATE / len(CASES)
# One cell of the grid per rule and processor stays fast, each draft length equally often.
FAST_CELLS = {
    f"{name}-{rule}-{LENGTHS[(i + j) % len(LENGTHS)]}"
    for i, name in enumerate(PROCESSORS)
    for j, rule in enumerate(RULES)
}
# One of each kind; look-ups, which are slow, under one rule.
FAST = {
    *FAST_CELLS,
    *(name for name in OTHERS if not name.startswith("look") or name == "looked up-standard"),
    *FEW,
    "typical-standard",
    *(name for name in IN_A_BATCH if name.startswith(("no repeated n-gram", "min new tokens", "repetition penalty"))),
}
PARAMETERS = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES]


ONE_FAST = [pytest.param(rule, marks=[] if rule == "standard" else pytest.mark.slow) for rule in RULES]


@pytest.fixture
def mutant():
    """A function that registers a mutant around a rule, and gives the name it is registered under."""

    def register(name: str, rule: str) -> str:
        hf_specdec.register_verifier(MUTANT, registered_class(name, rule))
        return MUTANT

    yield register
    VERIFIERS.pop(MUTANT, None)


def law_p_value(case: Case) -> float:
    samples, totals = sample(case, SEED)
    assert sum(len(tokens) for _, tokens in samples) == case.num_rows
    assert totals.accepted > 0
    return p_value(samples)


@pytest.mark.parametrize("name", PARAMETERS)
def test_texts_have_the_law_of_plain_sampling(name):
    samples, totals = sample(CASES[name], SEED)
    assert 0.2 <= totals.acceptance_rate <= 0.8, str(totals.reports[0])
    assert max(totals.draft_lengths) == CASES[name].draft_length
    assert p_value(samples) >= REJECT_BELOW


def test_plain_sampling_has_the_computed_law():
    samples, totals = sample(Case(options=COMBINED, prompts="ragged", eos_id=2), SEED, plainly)
    assert not totals.reports
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


@pytest.mark.parametrize("rule", ONE_FAST)
def test_sampled_law_rejects_looked_up_tokens_for_which_another_law_is_reported(rule, monkeypatch):
    propose = NgramDrafter.propose

    def with_uniform_probs(self, sequence, draft_length, uniforms):
        draft = propose(self, sequence, draft_length, uniforms)
        return replace(draft, probs=torch.full((*draft.token_ids.shape, VOCAB), 1 / VOCAB))

    monkeypatch.setattr(NgramDrafter, "propose", with_uniform_probs)
    assert law_p_value(OTHERS[f"looked up-{rule}"]) < REJECT_BELOW


ONE_SHORT = OF_TEXT | OF_LENGTH | OF_A_PROMPT_OF_ONE


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if case.rows_per_call else []) for name, case in ONE_SHORT.items()],
)
def test_sampled_law_rejects_prefixes_that_are_one_token_short(name, monkeypatch):
    wrong = show_prefixes_one_short(processors.BlockProcessors.__call__)
    monkeypatch.setattr(processors.BlockProcessors, "__call__", wrong)
    assert law_p_value(replace(ONE_SHORT[name], draft_length=3)) < REJECT_BELOW


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IN_A_BATCH if "encoder" in name or "by row" in name])
def test_sampled_law_rejects_another_rows_answer(name, monkeypatch):
    monkeypatch.setattr(processors, "_one_row", take_another_row(processors._one_row, 3))
    assert law_p_value(IN_A_BATCH[name]) < REJECT_BELOW


def test_sampled_law_rejects_another_rows_padding(monkeypatch):
    def wrong(processor, scores, sequence, first):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = processor.prompt_ignore_length.roll(sequence.batch // 3)
        return right(processor, scores, sequence, first)

    right = processors.VECTORISED[RepetitionPenaltyLogitsProcessor]
    monkeypatch.setitem(processors.VECTORISED, RepetitionPenaltyLogitsProcessor, wrong)
    [case] = [case for name, case in IN_A_BATCH.items() if "past the padding" in name]
    assert law_p_value(case) < REJECT_BELOW


def test_every_processor_that_changes_the_law_has_a_case():
    """One sets what is not finite, which leaves finite scores alone; those decoded plainly are transformers' own."""
    made = set()
    for case in CASES.values():
        oracle = tiny_pairs.oracles(case, tiny_pairs.llama())[0]
        made |= {type(processor).__name__ for processor in oracle.processors(1)}
    shipped = {name for name, how in processors.processor_table() if not how.startswith("plain decoding")}
    assert shipped - made == {"InfNanRemoveLogitsProcessor"}


@pytest.mark.parametrize("rule", ONE_FAST)
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
    samples, totals = sample(case, SEED)
    law = full_acceptance_probability(samples[0][0], DRAFTS["noisy"](samples[0][0].model), rule, draft_length)
    return float(stats.binomtest(totals.num_accepting(draft_length), NUM_ROWS, law).pvalue)


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
    [(oracle, tokens)], _ = sample(Case(verifier, 4, {"top_k": 2}, num_rows=256), SEED)
    return int((oracle.next_probs(tokens).gather(2, tokens[..., None]) == 0).sum())


class ChosenAfterTheDraw(CompositeDrafter):
    """A wrong drafter: both propose, and the model's proposal is kept only where the look-up would not have said the
    same first token. Which drafter serves a row then depends on a token that was drawn and may be dropped."""

    def propose(self, sequence, draft_length, uniforms):
        look_up, model = (part.propose(sequence, draft_length, uniforms) for part in self.parts)
        ids = torch.zeros_like(model.token_ids)
        ids[:, : look_up.token_ids.shape[1]] = look_up.token_ids
        is_same = (look_up.lengths > 0) & (ids[:, 0] != model.token_ids[:, 0])
        one_hot = torch.zeros_like(model.probs).scatter_(2, ids[..., None], 1.0)
        return Draft(
            torch.where(is_same[:, None], ids, model.token_ids),
            torch.where(is_same[:, None, None], one_hot, model.probs),
            torch.where(is_same, look_up.lengths, model.lengths),
        )


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_sampled_law_rejects_a_drafter_chosen_after_the_draw(rule, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "auto", ChosenAfterTheDraw)
    case = Case(rule, 4, FLAT, draft="look-up or model", num_rows=3 * NUM_ROWS)  # a small fault
    assert law_p_value(case) < REJECT_BELOW


class ShortenedAfterTheDraw(ModelDrafter):
    """A wrong drafter: it ends its draft before a token that its own law found unlikely. K then depends on a token that
    was drawn and is dropped."""

    def propose(self, sequence, draft_length, uniforms):
        draft = super().propose(sequence, draft_length, uniforms)
        drawn = draft.probs.gather(2, draft.token_ids[..., None])[..., 0]
        return replace(draft, lengths=(drawn > 0.25).long().cumprod(dim=1).sum(dim=1))


@pytest.mark.parametrize("rule", RULES)
def test_sampled_law_rejects_a_draft_length_chosen_after_the_draw(rule, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "draft_model", ShortenedAfterTheDraw)
    assert law_p_value(Case(rule, 4, TEMPERATURE)) < REJECT_BELOW


FIRST_LAYERS = {"draft": "early_exit", "target_layers": 3}


class JudgedByAnotherDepth(EarlyExitDrafter):
    """A wrong drafter: its tokens are drawn after one layer, and q is the law after two."""

    def __init__(self, request):
        super().__init__(request)
        self.deeper = EarlyExitDrafter(replace(request, config=replace(request.config, early_exit_layer=2)))

    def propose(self, sequence, draft_length, uniforms):
        other = self.deeper.propose(sequence, draft_length, uniforms)
        return replace(super().propose(sequence, draft_length, uniforms), probs=other.probs)


@pytest.mark.parametrize("rule", ONE_FAST)
def test_sampled_law_rejects_first_layers_judged_by_another_depth(rule, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "early_exit", JudgedByAnotherDepth)
    assert law_p_value(Case(rule, 4, FLAT, **FIRST_LAYERS)) < REJECT_BELOW


@pytest.mark.parametrize("rule", ONE_FAST)
def test_sampled_law_rejects_keys_that_stay_where_drafting_left_them(rule, monkeypatch):
    """The rollback before the verify pass is what takes drafted keys out of the target's cache."""
    right = Case(rule, 2, TEMPERATURE, **FIRST_LAYERS)
    assert law_p_value(right) >= REJECT_BELOW
    set_lengths, taken_over = RaggedCache.set_lengths, []

    def forgotten(self, lengths, live_rows=None):
        longest = max(self.row_lengths.host)
        is_after_drafting = taken_over and longest > max(lengths)
        taken_over.append(longest)
        set_lengths(self, [longest] * len(lengths) if is_after_drafting else lengths, live_rows)

    monkeypatch.setattr(RaggedCache, "set_lengths", forgotten)
    assert law_p_value(right) < REJECT_BELOW
