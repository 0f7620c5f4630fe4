"""A target whose first layers draft on its own keys gives plain's text and keys, token for token, in float32."""

import itertools

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.host import cache as cache_module
from tests.comparison import assert_same_text, assert_speculated, first_layers_draft, plain
from tests.parity.test_caches import assert_same_cache, cache_of, cache_option
from tests.zoo import FAMILIES, pair, prompts

ROWS = {1: (9,), 3: (11, 5, 8)}
NEW_TOKENS = 24
SLIDING = ("Mistral", "Gemma3")
CASES = [
    pytest.param(
        entry.name,
        implementation,
        marks=[pytest.mark.slow] * (entry.is_slow or number > 0),
        id=f"{entry.name}-{implementation}",
    )
    for entry in FAMILIES
    for number, implementation in enumerate(entry.implementations)
    if entry.reason is None
]


def speculate(target, draft_length=4, layer=1, **options):
    """`target`'s call with its first layers drafting, and its report."""
    output, report = first_layers_draft((target, target), draft_length, layer, **options)
    assert report.reason is None, report.reason
    assert report.notes == []
    return output, report


@pytest.mark.parametrize("draft_length", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_text_equals_plain_for_every_family(name, implementation, batch, draft_length):
    target, _ = pair(name, implementation)
    options = {**prompts(ROWS[batch]), "max_new_tokens": NEW_TOKENS}
    text, report = speculate(target, draft_length, **options)
    assert_same_text(text, plain(target, **options))
    assert_speculated(report, rejects=batch > 1)  # one row of one family happens to be drafted without a fault
    assert max(report.draft_lengths) == draft_length


@pytest.mark.parametrize("is_ended", [False, True], ids=["no eos", "rows end early"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "returned"])
@pytest.mark.parametrize("name", SLIDING)
def test_sliding_layers_keep_what_a_rejection_needs_again(name, is_kept, is_ended, monkeypatch):
    """Buffers so small that keys outside the window are dropped every few tokens, rows far apart."""
    monkeypatch.setattr(cache_module, "MIN_GROWTH", 2)
    bases, make_room = [], cache_module.RaggedSlidingLayer.make_room

    def watched(self, width):
        make_room(self, width)
        bases.append(self.base)

    monkeypatch.setattr(cache_module.RaggedSlidingLayer, "make_room", watched)
    target, _ = pair(name)
    options = {**prompts((23, 5, 14)), "max_new_tokens": 70, "return_dict_in_generate": is_kept}
    if is_ended:
        text = plain(target, **{**options, "return_dict_in_generate": False})
        options["eos_token_id"] = int(text[1, 23 + 12])
    expected, (actual, report) = plain(target, **options), speculate(target, 5, **options)
    assert_same_text(actual.sequences if is_kept else actual, expected.sequences if is_kept else expected)
    assert_speculated(report)
    assert is_ended or max(bases) > 23  # past the prompt: keys were dropped while drafting
    if is_kept:
        assert_same_cache(cache_of(actual), cache_of(expected))


@pytest.mark.parametrize("draft_length", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["Llama", *SLIDING, "GPT-2"])
def test_returned_cache_is_plains_and_a_second_turn_goes_on_from_it(name, batch, draft_length):
    target, _ = pair(name)
    options = {**prompts(ROWS[batch]), "max_new_tokens": 12, "return_dict_in_generate": True}
    turns = {}
    for is_plain in (True, False):
        output = plain(target, **options) if is_plain else speculate(target, draft_length, **options)[0]
        turns[is_plain] = [output]
        ids = torch.cat([output.sequences, torch.full_like(output.sequences[:, :3], 7)], dim=1)
        mask = torch.ones_like(ids)
        mask[:, : max(ROWS[batch])] = options["attention_mask"]
        again = {**options, "input_ids": ids, "attention_mask": mask, **cache_option(target, cache_of(output))}
        turns[is_plain].append(plain(target, **again) if is_plain else speculate(target, draft_length, **again)[0])
    for actual, expected in zip(turns[False], turns[True], strict=True):
        assert_same_text(actual.sequences, expected.sequences)
    assert_same_cache(cache_of(turns[False][1]), cache_of(turns[True][1]))


def test_hidden_states_are_the_targets_alone(llama):
    target, _ = llama
    options = {**prompts((9,)), "max_new_tokens": 10, "return_dict_in_generate": True, "output_hidden_states": True}
    expected, (actual, _) = plain(target, **options), speculate(target, **options)
    assert len(actual.hidden_states) == 10
    pair_of_states = (itertools.chain(*output.hidden_states) for output in (actual, expected))
    for ours, theirs in zip(*pair_of_states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class NoTokenTwice(LogitsProcessor):
    """A stateful processor: called once per committed token."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(int(input_ids[0, -1]))
        return scores.index_fill(1, torch.tensor(self.seen[-5:]), -torch.inf)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"max_length": 20, "max_new_tokens": None},
        {"logits_processor": NoTokenTwice},
    ],
    ids=["processors", "max_length", "one by one"],
)
def test_processors_and_limits_are_plains(llama, options):
    target, _ = llama
    options = {**prompts((9,)), "max_new_tokens": 20, **options}

    def made():
        processor = options.get("logits_processor")
        return options if processor is None else {**options, "logits_processor": LogitsProcessorList([processor()])}

    assert_same_text(speculate(target, **made())[0], plain(target, **made()))


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_any_number_of_layers_may_draft(layer):
    target = next(entry for entry in FAMILIES if entry.name == "Gemma3").build(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2
    )
    options = {**prompts(ROWS[3]), "max_new_tokens": NEW_TOKENS}
    text, report = speculate(target, 3, layer, **options)
    assert_same_text(text, plain(target, **options))
    assert report.accepted > 0
