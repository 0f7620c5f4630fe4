"""What transformers' own assisted decoding gets wrong or refuses today, and what the flag gives for the same call.

Each test first shows the fault of the built-in (so that a release that mends it is noticed), then that ours holds.
"""

import copy

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import hf_specdec
from tests.integration.pairs import noisy_copy, pair, prompts
from tests.integration.texts import text_pair, tokenizer

NEW = 24


def one_row():
    return {key: value[:1] for key, value in prompts(1).items()}


def assisted(target, draft, **options):
    """transformers' own, with a constant draft length."""
    draft = copy.deepcopy(draft)
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return target.generate(**options, assistant_model=draft)


def ours(target, draft, **options):
    with hf_specdec.enable(target, draft, num_speculative_tokens=5):
        output = target.generate(**options)
        report = hf_specdec.report(target)
    assert report.reason is None
    assert report.accepted > 0
    return output


def test_batch_is_refused_by_the_builtin():
    target, draft = pair()
    call = {**prompts(3), "max_new_tokens": NEW, "do_sample": False}
    with pytest.raises(ValueError, match="batch_size = 1"):
        assisted(target, draft, **call)
    assert ours(target, draft, **call).tolist() == target.generate(**call).tolist()


def test_several_returned_sequences_are_refused_by_the_builtin():
    target, draft = pair()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3}
    with pytest.raises(ValueError, match="num_return_sequences"):
        assisted(target, draft, **call)
    assert ours(target, draft, **call).shape[0] == 3


class EndsAtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] == self.length)


def test_criterion_is_asked_once_per_block_by_the_builtin():
    target, _ = pair()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False}
    draft = copy.deepcopy(target)  # always right: whole blocks are accepted
    end = call["input_ids"].shape[1] + 3
    stops = {"stopping_criteria": StoppingCriteriaList([EndsAtLength(end)])}
    plain = target.generate(**call, **stops)
    assert plain.shape[1] == end
    assert assisted(target, draft, **call, **stops).shape[1] > end
    assert ours(target, draft, **call, **stops).tolist() == plain.tolist()


def test_stop_strings_beside_a_draft_raise_in_the_builtin():
    target, draft = text_pair()
    inputs = tokenizer()("Hello there", return_tensors="pt", add_special_tokens=False)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    free = tokenizer().decode(target.generate(**call)[0, inputs["input_ids"].shape[1] :])
    stops = {"stop_strings": [free[5:7]], "tokenizer": tokenizer()}
    plain = target.generate(**call, **stops)
    with pytest.raises(Exception, match="stop_strings|tokenizer"):
        assisted(target, draft, **call, **stops)
    assert ours(target, draft, **call, **stops).tolist() == plain.tolist()


def test_second_turn_on_a_filled_cache_is_plains_text():
    """Upstream: silently different tokens, or an error, when a cache of an earlier turn is handed over."""
    target, draft = pair()
    first = {**one_row(), "max_new_tokens": 8, "do_sample": False}

    def second_turn(decode):
        cache = DynamicCache(config=target.config)
        keyword = {cache_keyword(target): cache}
        ids = target.generate(**first, **keyword)
        ids = torch.cat([ids, first["input_ids"][:, :4]], dim=1)
        return decode(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **keyword
        )

    plain = second_turn(target.generate)
    assert second_turn(lambda **call: ours(target, draft, **call)).tolist() == plain.tolist()
    try:
        builtin = second_turn(lambda **call: assisted(target, draft, **call)).tolist()
    except Exception as error:
        builtin = error
    assert builtin != plain.tolist()


def cache_keyword(model):
    from hf_specdec.host.runner import cache_keyword as keyword

    return keyword(model)


def test_number_of_drafted_tokens_at_the_call_is_ignored_by_the_builtin():
    target, draft = pair()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False}
    widths = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    target.generate(**call, assistant_model=draft, num_assistant_tokens=2)
    assert max(widths[1:]) != 3
    widths.clear()
    with hf_specdec.enable(target, draft):
        target.generate(**call, speculative_config={"num_speculative_tokens": 2})
    hook.remove()
    assert max(widths[1:]) == 3


def test_heuristic_schedule_changes_the_drafts_config_in_the_builtin():
    target, draft = pair()
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    before = draft.generation_config.to_dict()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False}
    ours(target, draft, **call)
    assert draft.generation_config.to_dict() == before
    target.generate(**call, assistant_model=draft)
    assert draft.generation_config.to_dict() != before


def test_padded_vocabulary_is_refused_by_the_builtin():
    target, _ = pair()
    draft = noisy_copy(target)
    draft.resize_token_embeddings(target.config.vocab_size + 24)
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False}
    with pytest.raises(ValueError, match="different tokenizers"):
        assisted(target, draft, **call)
    assert ours(target, draft, **call).tolist() == target.generate(**call).tolist()


@pytest.mark.parametrize("options", [{"use_cache": False}, {"num_beams": 2}])
def test_what_cannot_speculate_decodes_plainly_with_its_reason(options):
    target, draft = pair()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False, **options}
    plain = target.generate(**call)
    with hf_specdec.enable(target, draft):
        assert target.generate(**call).tolist() == plain.tolist()
    assert hf_specdec.report(target).reason in ("use_cache=False", "beam search")
