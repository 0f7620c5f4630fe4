"""Rolling back is forgetting: whatever was committed and dropped before, a pass sees a fresh prefill of its rows."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_specdec.host import cache as cache_module
from hf_specdec.host.cache import RaggedCache, RaggedSlidingLayer
from hf_specdec.host.masks import install_masks, uninstall_masks
from hf_specdec.host.runner import ModelRunner, cache_keyword
from tests.comparison import assert_parity, speculate
from tests.zoo import VOCAB, WINDOW, pair, prompts

# Logits are of order 10 and go through two layers in float32; a wrong mask or a lost key moves them by more than 0.1.
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
BOTH_KINDS = pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral", "GPT-2"])


def _settings(examples):
    """Fixtures are not reset between examples, and none of them has to be."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture
def ragged_masks():
    """The masks that rows of different lengths need."""
    originals = install_masks()
    yield
    uninstall_masks(originals)


@pytest.fixture
def small_buffers(monkeypatch):
    """Buffers that are full every few tokens, so that growing and sliding happen often."""
    monkeypatch.setattr(cache_module, "MIN_GROWTH", 4)


class Rows:
    """Texts on a `RaggedCache`: passes over blocks, of which rows keep different numbers of tokens."""

    def __init__(self, model, lengths, seed):
        self.model, prompt = model, prompts(lengths, seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.padding = [max(lengths) - length for length in lengths]
        self.texts = [row[pad:].tolist() for row, pad in zip(prompt["input_ids"], self.padding, strict=True)]
        source = DynamicCache(config=model.config)
        mask = prompt["attention_mask"]
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        with torch.no_grad():
            model(**prompt, position_ids=positions, **{cache_keyword(model): source}, use_cache=True)
        self.cache = RaggedCache(source, [max(lengths)] * len(lengths))
        self.runner = ModelRunner(model, self.cache, mask, positions[:, -1:], max(lengths), 1 << 30)

    def slots(self):
        """Committed slots per row."""
        return [len(text) + pad for text, pad in zip(self.texts, self.padding, strict=True)]

    def random_block(self, width):
        """Ids [batch, width] of nobody's choice."""
        return torch.randint(3, VOCAB, (len(self.texts), width), generator=self.generator)

    @torch.no_grad()
    def score(self, block):
        """Logits [batch, width, vocab] of a pass over `block` at each row's length."""
        self.cache.set_lengths(self.slots())
        return self.runner.forward(block).logits

    @torch.no_grad()
    def fresh(self, row, block):
        """The same from one uncached pass over that row alone."""
        ids = torch.tensor([self.texts[row] + block[row].tolist()])
        return self.model(input_ids=ids, use_cache=False).logits[0, -block.shape[1] :]

    def keep(self, block, counts):
        """Commit the first `counts[row]` tokens of each row; the rest is forgotten."""
        for text, ids, count in zip(self.texts, block.tolist(), counts, strict=True):
            text += ids[:count]


STEPS = st.lists(
    st.integers(1, 5).flatmap(
        lambda width: st.tuples(st.just(width), st.lists(st.integers(0, width), min_size=3, max_size=3))
    ),
    min_size=1,
    max_size=7,
)
LENGTHS = st.lists(st.integers(1, 14), min_size=3, max_size=3).map(tuple)


@BOTH_KINDS
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@_settings(12)
@given(lengths=LENGTHS, steps=STEPS, seed=st.integers(0, 99))
def test_any_commits_and_rollbacks_equal_a_fresh_prefill(
    ragged_masks, small_buffers, name, implementation, lengths, steps, seed
):
    rows = Rows(pair(name, implementation)[0], lengths, seed)
    for width, counts in steps:
        block = rows.random_block(width)
        logits = rows.score(block)
        for row in range(3):
            torch.testing.assert_close(logits[row], rows.fresh(row, block), **CLOSE)
        rows.keep(block, counts)


@_settings(15)
@given(
    lengths=LENGTHS,
    steps=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(-6, 5), min_size=3, max_size=3)), min_size=2, max_size=7
    ),
    seed=st.integers(0, 99),
)
def test_full_layers_roll_back_as_far_as_wanted(ragged_masks, small_buffers, lengths, steps, seed):
    rows = Rows(pair("Llama")[0], lengths, seed)
    for width, counts in steps:
        block = rows.random_block(width)
        logits = rows.score(block)
        for row in range(3):
            torch.testing.assert_close(logits[row], rows.fresh(row, block), **CLOSE)
        rows.keep(block, [max(0, min(count, width)) for count in counts])
        for text, count in zip(rows.texts, counts, strict=True):
            if count < 0 and len(text) > -count:  # also tokens that had been committed
                del text[count:]


@BOTH_KINDS
@_settings(6)
@given(lengths=LENGTHS, steps=STEPS, seed=st.integers(0, 99))
def test_given_back_keys_equal_a_fresh_prefill(ragged_masks, small_buffers, name, lengths, steps, seed):
    model = pair(name)[0]
    rows = Rows(model, lengths, seed)
    for width, counts in steps:
        block = rows.random_block(width)
        rows.score(block)
        rows.keep(block, counts)
    shortest = min(rows.slots())
    if max(shortest, 2) - 1 < max(lengths):
        return  # nothing was committed by some row
    held = rows.cache.give_back(shortest)
    assert type(held) is DynamicCache
    assert held.get_seq_length() == shortest
    for row, (text, pad) in enumerate(zip(rows.texts, rows.padding, strict=True)):
        source = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=torch.tensor([text[: shortest - pad]]), **{cache_keyword(model): source}, use_cache=True)
        for layer, fresh in zip(held.layers, source.layers, strict=True):
            count = min(fresh.keys.shape[-2], layer.keys.shape[-2])
            torch.testing.assert_close(layer.keys[row, :, -count:], fresh.keys[0, :, -count:], **CLOSE)
            torch.testing.assert_close(layer.values[row, :, -count:], fresh.values[0, :, -count:], **CLOSE)


@BOTH_KINDS
@_settings(8)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4).map(tuple),
    draft_length=st.integers(1, 9),
    count=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_whole_calls_equal_plain_for_any_prompt_and_draft_length(
    small_buffers, name, lengths, draft_length, count, seed
):
    assert_parity(
        pair(name), draft_length, accepts=False, rejects=False, **prompts(lengths, seed), max_new_tokens=count
    )


@pytest.mark.parametrize("name", ["Gemma3", "Mistral"])
def test_sliding_layers_stay_bounded_on_a_long_text(ragged_masks, small_buffers, name):
    rows = Rows(pair(name)[0], (9, 4, 6), 0)
    largest = 0
    for step in range(60):
        block = rows.random_block(4)
        rows.score(block)
        rows.keep(block, [4 - (step + row) % 2 for row in range(3)])
        sliding = [layer for layer in rows.cache.layers if isinstance(layer, RaggedSlidingLayer)]
        largest = max(largest, *(layer.keys.shape[-2] for layer in sliding))
        for layer in sliding:  # never less than what a live row still sees
            assert layer.base <= max(0, min(rows.cache.row_lengths.host) - WINDOW + 1)
    assert min(rows.slots()) > 200
    spread = max(rows.slots()) - min(rows.slots())
    # The window, how far rows are apart, one pass, and the growth of the last time: not the text.
    assert largest <= 2 * (WINDOW + spread + 4 + 4)


def test_sliding_layers_of_target_and_draft_stay_bounded_in_a_call(monkeypatch, small_buffers, mistral):
    held = []
    make_room = RaggedSlidingLayer.make_room

    def remembered(self, *args):
        make_room(self, *args)
        held.append((id(self), self.keys.shape[-2]))

    monkeypatch.setattr(RaggedSlidingLayer, "make_room", remembered)
    speculate(mistral, **prompts((12, 5, 9)), max_new_tokens=220)
    assert len({layer for layer, _ in held}) == 4  # two of the target, two of the draft
    # Rows drift apart by tens of slots here, the text has 232.
    assert max(slots for _, slots in held) < 120


def test_rows_that_have_ended_hold_no_window_open(ragged_masks, small_buffers):
    rows = Rows(pair("Mistral")[0], (9, 4, 6), 0)
    for _ in range(60):
        block = rows.random_block(3)
        rows.cache.set_lengths(rows.slots(), live_rows=[1, 2])
        with torch.no_grad():
            logits = rows.runner.forward(block).logits
        for row in (1, 2):
            torch.testing.assert_close(logits[row], rows.fresh(row, block), **CLOSE)
        rows.keep(block, [0, 3, 2])
    assert all(layer.keys.shape[-2] < 2 * (WINDOW + 60 + 8) for layer in rows.cache.layers)


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_draft_sees_its_whole_window_after_rejections(monkeypatch, name):
    """Sliding must not drop what a draft that is rolled back needs: it proposes the same with small buffers."""
    histograms = []
    for growth in (4, 256):
        monkeypatch.setattr(cache_module, "MIN_GROWTH", growth)
        _, report = speculate(pair(name), 8, **prompts((12, 5, 9)), max_new_tokens=120)
        histograms.append(report.accepted_histogram)
    assert histograms[0] == histograms[1]
