"""Grammar-constrained decoding: transformers' own prefix function, and xgrammar's processor, which keeps state."""

import json

import pytest
import torch

import hf_specdec
from tests.integration.texts import TEXT_VOCAB, text_pair, tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def prompt():
    return tokenizer()("Describe the person.", return_tensors="pt", add_special_tokens=False)


@pytest.mark.parametrize("do_sample", [False, True])
def test_xgrammar_processor_constrains_the_text_and_speculation_runs(do_sample):
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    target, draft = text_pair()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=TEXT_VOCAB)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

    def call():
        processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
        return {
            **prompt(),
            "max_new_tokens": 60,
            "do_sample": do_sample,
            "logits_processor": [processor],
            "eos_token_id": 2,
        }

    plain = target.generate(**call())
    torch.manual_seed(1)
    with hf_specdec.enable(target, draft, num_speculative_tokens=4):
        text = target.generate(**call())
        report = hf_specdec.report(target)
    assert report.reason is None
    assert report.accepted > 0
    written = json.loads(tokenizer().decode(text[0, prompt()["input_ids"].shape[1] :], skip_special_tokens=True))
    assert set(written) == {"name", "age"}
    if not do_sample:
        assert text.tolist() == plain.tolist()


def test_draft_that_only_proposes_forbidden_ids_ends_with_acceptance_zero():
    """outlines#845, HF#40726: only even ids are allowed; a draft that wants odd ones is corrected token by token."""
    target, draft = text_pair()
    with torch.no_grad():
        draft.lm_head.weight[::2] *= -1.0
    call = {**prompt(), "max_new_tokens": 20, "do_sample": False}
    allowed = list(range(0, TEXT_VOCAB, 2))
    constrained = {**call, "prefix_allowed_tokens_fn": lambda _, ids: allowed}
    plain = target.generate(**constrained)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        text = target.generate(**constrained)
    new = text[0, call["input_ids"].shape[1] :].tolist()
    assert text.tolist() == plain.tolist()
    assert all(token % 2 == 0 for token in new)
    assert hf_specdec.report(target).reason is None
