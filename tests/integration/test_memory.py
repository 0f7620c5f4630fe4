"""Does a call hold no more memory than its text needs?"""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import MistralConfig, MistralForCausalLM

import hf_specdec
from hf_specdec.host import cache as cache_module
from hf_specdec.host import call as call_module
from hf_specdec.host.cache import RaggedCache
from hf_specdec.sequence import Sequence
from tests.integration.pairs import assert_as_plain, llama, noisy_copy, pair, prompts, speculates

BLOCK = 256  # slots by which a buffer grows at least, as the documentation says


@pytest.fixture
def buffers(monkeypatch):
    """Slots of every key buffer that is made, in order."""
    made, enlarge = [], cache_module._enlarged

    def watched(states, room):
        made.append(room)
        return enlarge(states, room)

    monkeypatch.setattr(cache_module, "_enlarged", watched)
    return made


@pytest.fixture
def id_widths(monkeypatch):
    """Columns of the text's id buffer after each step."""
    widths, reserve = [], Sequence.reserve

    def watched(self, width):
        reserve(self, width)
        widths.append(self.ids.shape[1])

    monkeypatch.setattr(Sequence, "reserve", watched)
    return widths


class StopAt:
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_nothing_is_sized_by_the_maximum_length(buffers, id_widths):
    target, draft = pair(max_position_embeddings=10**8)
    inputs = {**prompts(2), "max_new_tokens": 10**8 - 100, "stopping_criteria": [StopAt(30)]}
    with hf_specdec.enable(target, draft, method="draft_model"):
        assert target.generate(**inputs).shape[1] == 30
        speculates(target)
    assert max(buffers) <= 6 + BLOCK
    assert max(id_widths) <= 6 + BLOCK


def test_buffers_grow_by_blocks_and_then_by_half(buffers, id_widths):
    target = llama()
    length = 1000
    inputs = {**prompts(1), "max_new_tokens": length - 6, "min_new_tokens": length - 6}
    with hf_specdec.enable(target, target, num_speculative_tokens=64):
        target.generate(**inputs)
        assert speculates(target).target_passes < 30
    # The draft's prefill leaves the prompt's last token to its first step: its buffers are one slot behind.
    both = sorted(set(buffers))
    for widths in (both[::2], both[1::2], sorted(set(id_widths))):
        assert widths[0] <= 6 + BLOCK
        steps = [later - earlier for earlier, later in itertools.pairwise(widths)]
        assert all(step >= BLOCK for step in steps)
        assert all(later <= max(1.5 * earlier, earlier + BLOCK) for earlier, later in itertools.pairwise(widths))
        assert length <= widths[-1] <= 1.5 * (length + 64)


def test_the_caches_bytes_are_those_of_its_buffers(monkeypatch):
    target, draft = pair()
    seen = []
    give_back = RaggedCache.give_back
    monkeypatch.setattr(
        RaggedCache, "give_back", lambda self, width: seen.append(self.nbytes) or give_back(self, width)
    )
    with hf_specdec.enable(target, draft, method="draft_model"):
        output = target.generate(**prompts(2), max_new_tokens=10, return_dict_in_generate=True)
    slot = 2 * 2 * 2 * 8 * 4 * 2  # layers × (key, value) × heads × width × float32 × rows
    assert seen == [(5 + 1 + BLOCK) * slot]
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    assert cache.layers[0].keys.untyped_storage().nbytes() == 15 * slot // 4  # handed back without the room to grow


def peak_bytes(function):
    """Most bytes that `function` held at one time beyond what was there, as the CPU's allocator was asked for them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_peak_beyond_plain_is_the_drafts_keys_and_a_block(do_sample):
    # Keys wide beside everything else, so that they decide the peak.
    layers, heads, width, batch, prompt, new = 4, 4, 64, 2, 600, 20
    target = llama(num_hidden_layers=layers, num_key_value_heads=heads, head_dim=width)
    draft = noisy_copy(target)
    inputs = {**prompts(batch, prompt), "max_new_tokens": new, "do_sample": do_sample}
    target.generate(**inputs)  # what is made once
    plain = peak_bytes(lambda: target.generate(**inputs))
    with hf_specdec.enable(target, draft, method="draft_model"):
        target.generate(**inputs)
        speculative = peak_bytes(lambda: target.generate(**inputs))
    slot = layers * 2 * heads * width * 4 * batch
    assert plain > prompt * slot
    draft_keys = (prompt + BLOCK) * slot
    room = BLOCK * slot
    one_layer_twice = (prompt + new + BLOCK) * slot / layers  # while a layer moves into its buffer
    activations = 0.15 * plain  # a verify block is wider than a token; far below what a second cache would take
    assert speculative - plain <= draft_keys + room + one_layer_twice + activations
    assert speculative - plain >= prompt * slot / 2  # the measure does see the draft's keys


def test_draft_length_is_cut_to_the_budget_for_probabilities(monkeypatch):
    target, draft = pair()
    batch, vocab = 3, target.config.vocab_size
    # Two rows of q and three of p are what this holds, one byte more would not make a third.
    monkeypatch.setattr(call_module, "PROBS_BYTES", (2 * 3 + 1) * batch * vocab * 4 - 1)
    with hf_specdec.enable(target, draft, num_speculative_tokens=6):
        target.generate(**prompts(batch), max_new_tokens=20, do_sample=True)
        report = speculates(target)
        assert max(report.draft_lengths) == 2
        assert [note for note in report.notes if note.startswith("Drafting 2 tokens per step instead of 6")]
        # One row has room for more, and greedy keeps no probabilities.
        target.generate(**prompts(1), max_new_tokens=20, do_sample=True)
        assert max(speculates(target).draft_lengths) == 6
        target.generate(**prompts(batch), max_new_tokens=20)
        report = speculates(target)
        assert max(report.draft_lengths) == 6
        assert report.notes == []


def test_budget_for_probabilities_is_256_megabytes():
    assert call_module.PROBS_BYTES == 256 * 2**20


def test_a_budget_too_small_for_one_token_still_drafts_one(monkeypatch):
    target, draft = pair()
    monkeypatch.setattr(call_module, "PROBS_BYTES", 10)
    with hf_specdec.enable(target, draft, method="draft_model"):
        target.generate(**prompts(2), max_new_tokens=10, do_sample=True)
        assert max(speculates(target).draft_lengths) == 1


def mistral(window):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=0,
    )
    return MistralForCausalLM(config).eval()


def test_sliding_layers_hold_the_window_and_a_block_however_long_the_text(buffers):
    window = 16
    target = mistral(window)
    inputs = {**prompts(2), "max_new_tokens": 700}
    plain = target.generate(**inputs)
    with hf_specdec.enable(target, target, num_speculative_tokens=32):
        report = assert_as_plain(target, plain, **inputs)
    assert report.target_passes < 40
    # The text is 706 slots long; a layer never holds more than the window, a step, and the block by which it grows.
    assert max(buffers) <= window + 33 + 2 * BLOCK


def test_prefill_chunk_size_holds_for_the_draft_too():
    target, draft = pair()
    widths = []
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    inputs = {**prompts(2, 40), "max_new_tokens": 8}
    plain = target.generate(**inputs)
    with hf_specdec.enable(target, draft, method="draft_model"):
        assert_as_plain(target, plain, **inputs, prefill_chunk_size=16)
    assert max(widths) == 16
    assert widths.count(16) == 2
