"""Processors of which nothing is known: called as plain decoding calls them, whatever is drafted and rejected."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import hf_specdec
from hf_specdec import one_by_one
from tests.comparison import assert_same_text, assert_speculated, plain, speculate
from tests.losslessness.mutants import MUTANTS
from tests.zoo import VOCAB, pair, prompts


class Counting(LogitsProcessor):
    """Keeps state: what it favours depends on how often it was asked; remembers the prefixes."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(tuple(input_ids[0].tolist()))
        favoured = 5 + 7 * len(self.prefixes) % (VOCAB - 5)
        bias = torch.zeros_like(scores)
        bias[:, favoured] = 4.0 if len(self.prefixes) % 3 == 0 else 0.0
        return scores + bias


class KeepingACache(LogitsProcessor):
    """Extends a running sum by the newest id only: a prefix that was never committed would spoil it for good."""

    def __init__(self):
        self.length, self.total = 0, 0

    def __call__(self, input_ids, scores):
        for token in input_ids[0, self.length :].tolist():
            self.total += token
        assert self.length < input_ids.shape[1], "asked twice for one position"
        self.length = input_ids.shape[1]
        scores = scores.clone()
        scores[:, 5 + self.total % (VOCAB - 5)] += 3.0
        return scores


@pytest.mark.parametrize("draft_length", [1, 3, 8])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_counting_processor_is_called_once_per_committed_token_in_order(name, draft_length):
    ours, theirs = Counting(), Counting()
    options = {**prompts((9,)), "max_new_tokens": 30}
    expected = plain(pair(name)[0], logits_processor=LogitsProcessorList([theirs]), **options)
    text, report = speculate(pair(name), draft_length, logits_processor=LogitsProcessorList([ours]), **options)
    assert_same_text(text, expected)
    assert_speculated(report)
    assert ours.prefixes == theirs.prefixes


@pytest.mark.parametrize("draft_length", [1, 4])
def test_cache_keeping_processor_never_sees_a_rejected_continuation(draft_length):
    options = {**prompts((9,)), "max_new_tokens": 30, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    expected = plain(pair("Llama")[0], logits_processor=LogitsProcessorList([KeepingACache()]), **options)
    processors = LogitsProcessorList([KeepingACache()])
    members = list(processors)
    text, report = speculate(pair("Llama"), draft_length, logits_processor=processors, **options)
    assert_same_text(text, expected)
    assert_speculated(report)
    assert list(processors) == members


def test_processor_is_not_asked_after_the_text_has_ended():
    target = pair("Llama")[0]
    options = {**prompts((9,)), "max_new_tokens": 30}
    whole = plain(target, logits_processor=LogitsProcessorList([Counting()]), **options)[0].tolist()
    for end in (12, 14, 17):
        ours, theirs = Counting(), Counting()
        ending = {**options, "eos_token_id": [whole[end]]}
        expected = plain(target, logits_processor=LogitsProcessorList([theirs]), **ending)
        text, _ = speculate(pair("Llama"), 6, logits_processor=LogitsProcessorList([ours]), **ending)
        assert_same_text(text, expected)
        assert ours.prefixes == theirs.prefixes


def test_scores_of_the_output_are_those_that_the_processor_gave():
    options = {
        **prompts((9,)),
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = plain(pair("Llama")[0], logits_processor=LogitsProcessorList([Counting()]), **options)
    output, _ = speculate(pair("Llama"), 3, logits_processor=LogitsProcessorList([Counting()]), **options)
    for kind in ("scores", "logits"):
        for ours, theirs in zip(getattr(output, kind), getattr(expected, kind), strict=True):
            # Float32 rounding of differently shaped passes over the same numbers.
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_several_rows_with_an_unknown_processor_decode_plainly_and_say_why():
    options = {**prompts((9, 5)), "max_new_tokens": 12}
    expected = plain(pair("Llama")[0], logits_processor=LogitsProcessorList([Counting()]), **options)
    text, report = speculate(pair("Llama"), logits_processor=LogitsProcessorList([Counting()]), **options)
    assert_same_text(text, expected)
    assert "Counting is not known to be position-wise" in report.reason


class SkewedByHistory(LogitsProcessor):
    """Position-wise in truth, but nothing says so: its law can be computed for any prefix."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 5 + int(input_ids.sum()) % 7] += 1.0
        return RepetitionPenaltyLogitsProcessor(1.3)(input_ids, scores)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, "always accept", "resample from p"])
def test_sampled_law_of_one_by_one_verification_is_the_targets(wrong, monkeypatch):
    """Chi-square of the joint law of three tokens against the target's exact one; one row a call. Wrong rules fail."""
    from scipy.stats import chi2

    false_fail_rate, draws = 1e-6, 700
    if wrong is not None:
        right = one_by_one.StandardVerifier
        monkeypatch.setattr(one_by_one, "StandardVerifier", lambda: MUTANTS[wrong](right()))
    target, draft = pair("Llama")
    prompt = prompts((6,))["input_ids"]
    processors = LogitsProcessorList([SkewedByHistory()])
    torch.manual_seed(0)
    counts: dict[tuple[int, int], int] = {}
    accepted = reached = 0
    options = {"max_new_tokens": 3, "top_k": 2, "temperature": 1.5, "do_sample": True}
    with hf_specdec.enable(target, draft, num_speculative_tokens=2):
        for _ in range(draws):
            ids = target.generate(prompt, logits_processor=processors, **options)
            report = hf_specdec.report(target)
            accepted, reached = accepted + report.accepted, reached + report.reached
            key = tuple(ids[0, -2:].tolist()), int(ids[0, -3])
            counts[key] = counts.get(key, 0) + 1
    statistic, cells = 0.0, 0
    for (last, first), expected in _law(target, processors, prompt, options).items():
        if expected * draws >= 5:
            statistic += (counts.pop((last, first), 0) - expected * draws) ** 2 / (expected * draws)
            cells += 1
    p_value = chi2.sf(statistic, cells - 1)
    if wrong is not None:
        assert p_value < false_fail_rate
        return
    assert 0.2 <= accepted / reached <= 0.95  # both branches ran
    assert sum(counts.values()) < 0.1 * draws  # nothing impossible, only rare cells left
    assert p_value > false_fail_rate


def _law(target, processors, prompt, options):
    """Exact probability of ((second, third), first) new tokens."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    warpers = [*processors, TemperatureLogitsWarper(options["temperature"]), TopKLogitsWarper(options["top_k"])]

    @torch.no_grad()
    def nexts(ids):
        scores = target(ids).logits[:, -1].float()
        for warper in warpers:
            scores = warper(ids, scores)
        probs = scores.double().softmax(dim=-1)[0]
        return [(token, float(probs[token])) for token in probs.nonzero()[:, 0].tolist()]

    law = {}
    for first, p1 in nexts(prompt):
        one = torch.cat([prompt, torch.tensor([[first]])], dim=1)
        for second, p2 in nexts(one):
            two = torch.cat([one, torch.tensor([[second]])], dim=1)
            for third, p3 in nexts(two):
                law[(second, third), first] = p1 * p2 * p3
    return law
