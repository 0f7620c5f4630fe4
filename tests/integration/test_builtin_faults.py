"""What transformers' own assisted decoding gets wrong or refuses today, and what the flag gives for the same call.

Each test shows the fault of the built-in (so that a release that mends it is noticed) and that ours holds. One is left
to `benchmarks/`: early exit is slower than plain (2.5 times with SmolLM2-135M on a CPU).
"""

import copy
import json
import logging
from inspect import signature

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import utils

import hf_specdec
from hf_specdec.verification import BlockVerifier, StandardVerifier
from tests.integration.pairs import VOCAB, llama, noisy_copy, pair, prompts
from tests.integration.texts import TEXT_VOCAB, save, text_pair, tokenizer

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


def test_recurrent_models_are_refused_by_the_builtin():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0)
    target = MambaForCausalLM(config).eval()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**call)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models|cropped"):
        assisted(target, target, **call)
    with hf_specdec.enable(target, llama()):
        assert target.generate(**call).tolist() == plain.tolist()
        assert hf_specdec.report(target).reason == "recurrent state of MambaForCausalLM"


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


def test_stop_string_that_ends_inside_a_block_is_missed_by_the_builtin():
    """Prompt lookup drafts the rest of a cycle; the criterion looks at the end of the block only."""
    target = llama(2, TEXT_VOCAB)
    with torch.no_grad():
        for layer in target.model.layers:  # the next token follows from the last one: the text is a cycle
            layer.self_attn.o_proj.weight.zero_()
    inputs = tokenizer()("N[+0H{})" * 2 + "N", return_tensors="pt", add_special_tokens=False)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": False, "stop_strings": ["0H"], "tokenizer": tokenizer()}
    plain = target.generate(**call)
    assert tokenizer().decode(plain[0, inputs["input_ids"].shape[1] :]) == "[+0H"
    assert target.generate(**call, prompt_lookup_num_tokens=6).shape[1] > plain.shape[1]
    # The draft is the target: its blocks are accepted whole, so that the stop string is completed inside of one.
    assert ours(target, copy.deepcopy(target), **call).tolist() == plain.tolist()


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


def test_padded_vocabulary_breaks_sampling_with_both_tokenizers_in_the_builtin():
    """As the message of the case above advises: one tokenizer, given twice."""
    target, _ = text_pair()
    draft = noisy_copy(target)
    draft.resize_token_embeddings(TEXT_VOCAB + 29)
    inputs = tokenizer()("Hello there", return_tensors="pt", add_special_tokens=False)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": True}
    with pytest.raises(AttributeError, match="assistant_overlap_token_ids"):
        assisted(target, draft, **call, tokenizer=tokenizer(), assistant_tokenizer=tokenizer())
    torch.manual_seed(0)
    assert ours(target, draft, **call).shape[1] == inputs["input_ids"].shape[1] + NEW


def test_probabilities_of_another_tokenizer_do_not_belong_to_the_ids_in_the_builtin(tmp_path, monkeypatch):
    """They stand in a dictionary's order. So a draft that is sure of its tokens drafts some without probability."""
    target, _ = text_pair()
    draft = llama(5, TEXT_VOCAB + 3)
    with torch.no_grad():
        draft.lm_head.weight *= 20
        draft.lm_head.weight[TEXT_VOCAB:] = 0
    save(target, tmp_path / "target")
    save(draft, tmp_path / "draft")
    path = tmp_path / "draft" / "tokenizer.json"
    written = json.loads(path.read_text())
    vocab = written["model"]["vocab"]
    characters = [token for token in vocab if vocab[token] >= 5]
    written["model"]["vocab"] |= {
        token: vocab[other] for token, other in zip(characters, characters[::-1], strict=True)
    }
    written["model"]["vocab"] |= {"ab": TEXT_VOCAB, "cd": TEXT_VOCAB + 1, "ef": TEXT_VOCAB + 2}
    path.write_text(json.dumps(written))
    target, draft = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("target", "draft"))
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / name) for name in ("target", "draft")]
    drafted_probs, rule = [], utils._speculative_sampling

    def watched(ids, logits, length, *args, **kwargs):
        drafted_probs.append(logits.softmax(dim=-1).gather(2, ids[:, -length:, None]).flatten())
        return rule(ids, logits, length, *args, **kwargs)

    monkeypatch.setattr(utils, "_speculative_sampling", watched)
    inputs = tokenizers[0]("Hello there", return_tensors="pt", add_special_tokens=False)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": True}
    torch.manual_seed(0)
    assisted(target, draft, **call, tokenizer=tokenizers[0], assistant_tokenizer=tokenizers[1])
    assert torch.cat(drafted_probs).min() < 1e-9  # a token that was never drawn from these
    with pytest.raises(ValueError, match="Target and draft disagree on token"):
        hf_specdec.enable(target, draft)


def test_residual_without_mass_is_an_error_in_the_builtin():
    """In float32 1e-9 beside two halves is lost: p <= q everywhere, and the token that only q has is rejected."""
    target_logits = torch.tensor([[[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]]])
    draft_logits, rule = torch.tensor([[[0.0, 0.0, -20.0]]]), utils._speculative_sampling
    is_done = {"is_done_candidate": False} if "is_done_candidate" in signature(rule).parameters else {}  # 5.17
    target_probs, draft_probs = target_logits.softmax(dim=-1), draft_logits.softmax(dim=-1)
    assert (target_probs[:, :1] <= draft_probs).all()
    assert draft_probs[0, 0, 2] > 0
    with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan` or element < 0"):
        rule(torch.tensor([[0, 2]]), draft_logits, 1, target_logits, **is_done)
    probs = target_probs.expand(2, -1, -1), draft_probs.expand(2, -1, -1)
    coins = torch.tensor([[0.5, 0.25], [0.5, 0.75]])
    for verify in (StandardVerifier(), BlockVerifier()):
        verdict = verify(*probs, torch.full((2, 1), 2), torch.ones(2, dtype=torch.long), coins)
        assert verdict.num_accepted.tolist() == [0, 0]
        assert verdict.next_ids.tolist() == [0, 1]


def test_nothing_is_counted_by_the_builtin():
    target, draft = pair()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    theirs = assisted(target, draft, **call)
    assert not [name for name in vars(theirs) if any(word in name for word in ("accept", "draft", "spec"))]
    report = ours(target, draft, **call).speculation
    assert report.emitted == NEW
    assert report.accepted > 0
    assert 0 < report.acceptance_rate <= 1


@pytest.mark.parametrize("name", ["use_cache", "inputs_embeds"])
def test_what_the_builtin_cannot_do_is_an_obscure_error_there_and_a_reason_here(name):
    target, draft = pair()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False}
    if name == "use_cache":
        call, reason, message = call | {"use_cache": False}, "use_cache=False", "requires a cache|use_cache=True"
    else:
        embeds = target.get_input_embeddings()(call.pop("input_ids")).detach()
        call, reason, message = call | {"inputs_embeds": embeds}, "model input inputs_embeds", "cannot reshape tensor"
    with pytest.raises((RuntimeError, ValueError), match=message):
        assisted(target, draft, **call)
    assert_reason(target, draft, reason, **call)


def test_draft_beside_beams_is_dropped_without_an_error_by_the_builtin(caplog):
    """Beams run, the draft never does, and at most a line of the log says so: nothing that a program could ask."""
    target, draft = pair()
    call = {**one_row(), "max_new_tokens": NEW, "do_sample": False, "num_beams": 2}
    runs = []
    hook = draft.register_forward_pre_hook(lambda *_: runs.append(1))
    assert target.generate(**call, assistant_model=draft).tolist() == target.generate(**call).tolist()
    hook.remove()
    assert not runs
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        assert_reason(target, draft, "beam search", **call)
    assert "decodes plainly, without speculation: beam search" in caplog.text


def assert_reason(target, draft, reason, **call):
    """Ours decodes plainly, and says why."""
    plain = target.generate(**call)
    with hf_specdec.enable(target, draft):
        assert target.generate(**call).tolist() == plain.tolist()
        assert hf_specdec.report(target).reason == reason
