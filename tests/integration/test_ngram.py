"""Is greedy text plain's with look-ups for a draft, whatever ends or bends it, and do they speed up what repeats?"""

import threading

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec.drafters.ngram import NgramDrafter
from hf_specdec.drafters.suffix import forget, store_of
from hf_specdec.host.binding import draft_memories
from hf_specdec.host.runner import cache_keyword
from tests.integration.pairs import assert_as_plain, llama, noisy_copy, pair, prompts, speculates
from tests.integration.texts import text_pair, tokenizer

NEW = 60
METHODS = pytest.mark.parametrize("method", ["ngram", "suffix"])
BATCHES = pytest.mark.parametrize("batch", [1, 3])


@pytest.fixture
def target():
    """Greedy text of this one comes back to itself, with changes."""
    model = llama()
    assert model.config._attn_implementation == "sdpa"
    return model


def enabled(target, method="ngram", **config):
    return hf_specdec.enable(target, method=method, **{"num_speculative_tokens": 5, **config})


def assert_drafts_as_plain(target, method, inputs, **options):
    """Text is plain's; some drafted tokens were kept and some were not."""
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    plain = target.generate(**inputs, **options)
    with enabled(target, method):
        report = assert_as_plain(target, plain, **inputs, **options)
    assert report.method == method
    assert 0 < report.accepted < report.reached
    return plain, report


@METHODS
@BATCHES
def test_greedy_text_is_plains_in_fewer_passes(target, batch, method):
    _, report = assert_drafts_as_plain(target, method, prompts(batch))
    assert report.target_passes < NEW - 1
    # Rows without a match draft nothing in a step in which others do.
    assert batch == 1 or report.drafted < sum(report.draft_lengths) * batch


@METHODS
@BATCHES
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1},
        {"no_repeat_ngram_size": 4},
        {"repetition_penalty": 1.1, "no_repeat_ngram_size": 5},
        {"bad_words_ids": [[3], [7, 8]]},
        {"min_new_tokens": 20, "eos_token_id": 9},
    ],
    ids=str,
)
def test_processors_judge_looked_up_tokens_by_their_own_prefix(target, options, batch, method):
    assert_drafts_as_plain(target, method, prompts(batch, length=12), **options)


@METHODS
@BATCHES
def test_a_text_that_ends_inside_a_block_ends_as_plain(target, batch, method):
    inputs = prompts(batch)
    free = target.generate(**inputs, max_new_tokens=NEW)[:, 6:]
    num_ended = 0
    for place in range(12, 30, 4):
        options = {"eos_token_id": [free[0, place].item()], "pad_token_id": 0, "max_new_tokens": NEW}
        plain = target.generate(**inputs, **options)
        with enabled(target, method):
            assert target.generate(**inputs, **options).tolist() == plain.tolist()
            report = hf_specdec.report(target)
        assert report.reason is None
        report.check()
        num_ended += report.accepted > 0 and plain.shape[1] < 6 + NEW
    assert num_ended > 0 or batch > 1


@METHODS
@BATCHES
def test_stop_strings_end_the_text_where_plain_ends_it(batch, method):
    target, inputs, words = text_pair()[0], prompts(batch, length=8, vocab_size=90), tokenizer()
    free = target.generate(**inputs, max_new_tokens=NEW)[:, 8:]
    accepted = 0
    for place in range(10, 40, 8):
        stop = words.decode(free[0, place : place + 2])
        options = {"stop_strings": [stop], "tokenizer": words, "max_new_tokens": NEW, "pad_token_id": 0}
        plain = target.generate(**inputs, **options)
        with enabled(target, method):
            assert target.generate(**inputs, **options).tolist() == plain.tolist()
            report = hf_specdec.report(target)
        assert report.reason is None
        report.check()
        accepted += report.accepted
    assert accepted > 0


@METHODS
@BATCHES
def test_several_sequences_per_prompt_look_themselves_up(target, batch, method):
    options = {**prompts(batch), "do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW}
    greedy = target.generate(**prompts(batch), max_new_tokens=NEW)
    with enabled(target, method):
        rows = target.generate(**options, top_k=1)
        assert speculates(target).accepted > 0
        assert rows.tolist() == greedy.repeat_interleave(3, dim=0).tolist()
        torch.manual_seed(0)
        rows = target.generate(**options, temperature=0.3)
        assert speculates(target).accepted > 0
        assert len({tuple(row) for row in rows.tolist()}) == 3 * batch


@pytest.fixture
def looked_up(monkeypatch):
    """The texts that the last call's drafter looked up when it was last asked, per row."""
    texts: list[list[int]] = []
    offers = NgramDrafter.offers

    def watched(self, sequence, limit):
        result = offers(self, sequence, limit)
        texts[:] = [list(text.tokens) for text in self._texts]
        return result

    monkeypatch.setattr(NgramDrafter, "offers", watched)
    return texts


def without_padding(ids, mask):
    return [row[is_text.bool()].tolist() for row, is_text in zip(ids, mask, strict=True)]


@METHODS
def test_prompt_and_output_are_looked_up_and_padding_is_not(target, looked_up, method):
    inputs = prompts(3, length=8)
    plain, _ = assert_drafts_as_plain(target, method, inputs)
    mask = torch.cat([inputs["attention_mask"], torch.ones((3, NEW), dtype=torch.long)], dim=1)
    for text, whole in zip(looked_up, without_padding(plain, mask), strict=True):
        assert text == whole[: len(text)]
        assert len(text) >= len(whole) - 7  # but for the last block


# ------------------------------------------------------------------------------------------------ caches


@METHODS
@BATCHES
@pytest.mark.parametrize("is_whole", [True, False], ids=["all ids", "new ids"])
def test_chat_on_one_cache_is_plains_and_knows_the_turns_before(target, looked_up, is_whole, batch, method):
    inputs, said = prompts(batch, length=8), torch.tensor([[11, 12, 13]] * batch)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache, held = DynamicCache(config=target.config), 0
    with enabled(target, method):
        for _ in range(4):
            plain = target.generate(ids, attention_mask=mask, max_new_tokens=9, speculative_config=False)
            given = ids if is_whole else ids[:, held:]
            output = target.generate(
                given, attention_mask=mask, max_new_tokens=9, **{cache_keyword(target): cache}, do_sample=False
            )
            assert output.tolist() == (plain if is_whole else plain[:, held:]).tolist()
            report = hf_specdec.report(target)
            assert report.reason is None
            assert report.notes == []
            held = plain.shape[1] - 1
            assert draft_memories[cache].ids.tolist() == plain.tolist()
            mask = torch.cat([mask, torch.ones((batch, 9), dtype=torch.long)], dim=1)
            for text, whole in zip(looked_up, without_padding(plain, mask), strict=True):
                assert text == whole[: len(text)]
                assert len(text) >= len(whole) - 7
            ids = torch.cat([plain, said], dim=1)
            mask = torch.cat([mask, torch.ones((batch, 3), dtype=torch.long)], dim=1)


@pytest.mark.parametrize("methods", [("ngram", "draft_model"), ("draft_model", "ngram")], ids=" then ".join)
def test_a_cache_changes_hands_between_a_model_and_look_ups(methods):
    target, draft = pair()
    inputs, cache = prompts(1, length=8), DynamicCache(config=target.config)
    ids = inputs["input_ids"]
    for method in methods:
        plain = target.generate(ids, max_new_tokens=9)
        with hf_specdec.enable(target, draft, method=method, num_speculative_tokens=3):
            output = target.generate(ids, max_new_tokens=9, **{cache_keyword(target): cache})
            report = hf_specdec.report(target)
        assert output.tolist() == plain.tolist()
        assert (report.method, report.reason, report.notes) == (method, None, [])
        ids = torch.cat([plain, inputs["input_ids"]], dim=1)
    assert report.drafted > 0


# ------------------------------------------------------------------------------------------------ needs and report


def test_no_model_is_needed_and_one_that_is_bound_is_left_alone(target):
    draft = noisy_copy(target)
    calls = []
    draft.register_forward_pre_hook(lambda *_: calls.append(1))
    with hf_specdec.enable(target, draft, num_speculative_tokens=4):
        plain = target.generate(**prompts(1), max_new_tokens=NEW, speculative_config=False)
        calls.clear()
        report = assert_as_plain(target, plain, **prompts(1), max_new_tokens=NEW, speculative_config="ngram")
        assert (report.method, report.accepted > 0, calls) == ("ngram", True, [])


def test_a_step_without_a_match_is_a_plain_step(target):
    widths = []
    with enabled(target):
        hook = target.register_forward_pre_hook(
            lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        target.generate(**prompts(1), max_new_tokens=NEW)
        hook.remove()
    report = speculates(target)
    assert 1 in widths[1:]
    assert sum(widths[1:]) <= report.drafted + report.target_passes


@pytest.mark.parametrize(
    "config", [{"prompt_lookup_min": 3}, {"prompt_lookup_min": 1, "prompt_lookup_max": 1}], ids=str
)
def test_lookup_range_is_the_flags(target, config):
    plain = target.generate(**prompts(1), max_new_tokens=NEW)
    with enabled(target, **config):
        few = assert_as_plain(target, plain, **prompts(1), max_new_tokens=NEW)
    with enabled(target):
        many = assert_as_plain(target, plain, **prompts(1), max_new_tokens=NEW)
    assert few.drafted < many.drafted or config["prompt_lookup_min"] == 1


# ------------------------------------------------------------------------------------------------ suffix


@BATCHES
def test_second_call_on_the_same_prompt_accepts_more_than_the_first(target, batch):
    inputs = prompts(batch)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with enabled(target, "suffix"):
        first = assert_as_plain(target, plain, **inputs, max_new_tokens=NEW)
        second = assert_as_plain(target, plain, **inputs, max_new_tokens=NEW)
        assert second.accepted > first.accepted
        assert second.target_passes < first.target_passes / 2
        forget(target)
        assert assert_as_plain(target, plain, **inputs, max_new_tokens=NEW).accepted == first.accepted
    with enabled(target, "ngram"):
        assert assert_as_plain(target, plain, **inputs, max_new_tokens=NEW).accepted == first.accepted


def test_one_seed_gives_one_text_after_any_calls_when_deterministic(target):
    options = {**prompts(1), "do_sample": True, "max_new_tokens": NEW}
    texts, accepted = [], []
    with enabled(target, "suffix", deterministic=True):
        for is_deterministic in (True, False, True):
            torch.manual_seed(5)
            flag = {"deterministic": is_deterministic}
            texts.append(target.generate(**options, speculative_config=flag).tolist())
            accepted.append(speculates(target).accepted)
    assert texts[0] == texts[2]
    assert accepted[0] == accepted[2]


def test_a_call_that_raises_leaves_what_it_wrote_and_nothing_else(target):
    class Raising(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] >= 40:
                raise RuntimeError("cancelled")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    inputs = prompts(1)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with enabled(target, "suffix"):
        with pytest.raises(RuntimeError, match="cancelled"):
            target.generate(**inputs, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([Raising()]))
        [*kept, end] = store_of(target)._younger.tokens
        assert end == -1
        assert kept == plain[0, : len(kept)].tolist()
        assert len(kept) >= 39
        report = assert_as_plain(target, plain, **inputs, max_new_tokens=NEW)
    assert report.draft_lengths[:4] == [5] * 4


def test_threads_share_what_is_kept(target):
    inputs = [prompts(1, seed=seed) for seed in range(4)]
    plains = [target.generate(**each, max_new_tokens=NEW).tolist() for each in inputs]
    texts = {}

    def work(index):
        for turn in range(3):
            texts[index, turn] = target.generate(**inputs[index], max_new_tokens=NEW).tolist()

    with enabled(target, "suffix"):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {(index, turn): plains[index] for index in range(4) for turn in range(3)}
    assert store_of(target)._younger.tokens.count(-1) == 12
