"""Quantized real targets on a CPU: greedy text is the same quantized target's without the flag, up to near-ties."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.cli.models import fetch

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    # bitsandbytes speaks of what it may do later
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TARGET, DRAFT = "smollm2-135m", "smol-draft"
PROMPTS = ("List three primary colours.", "Write a Python function that reverses a string.")
NEW = 32
LOUD = "bitsandbytes.autograd._functions"
# Passes over another number of rows sum in another order: bfloat16 keeps 8 bits of a logit, and layers add up to a few
# times its last one.
NEAR_TIE = 2**-6
# 8 bits round each row's activations to 1/127 of its largest: a last bit that differed may become as much.
NEAR_TIE_OF_INT8 = 2**-5


def quantized(kind):
    from transformers import BitsAndBytesConfig

    if kind is None:
        return None
    if kind.startswith("int8"):
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=float(kind.partition(":")[2]))
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.bfloat16)


def load(name, kind):
    return AutoModelForCausalLM.from_pretrained(
        fetch(name), dtype=torch.bfloat16, quantization_config=quantized(kind), device_map={"": "cpu"}
    ).eval()


def assert_same_but_for_ties(plain, sequences, prompt_length, near_tie):
    """Where a row first parts from plain's, plain's logits of the two tokens have to be nearly tied."""
    for row, (expected, actual) in enumerate(zip(plain.sequences.tolist(), sequences.tolist(), strict=True)):
        first = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
        if first is None:  # a row that parted may have ended elsewhere, and the batch with it
            continue
        logits = plain.logits[first - prompt_length][row]
        theirs, ours = logits[expected[first]].item(), logits[actual[first]].item()
        assert theirs - ours <= near_tie * logits.abs().max().item(), (
            f"row {row}, position {first}: plain {expected[first]} at {theirs}, speculative {actual[first]} at {ours}"
        )


@pytest.mark.parametrize(
    ("target_kind", "draft_kind"), [("nf4", None), ("nf4", "nf4"), ("fp4", None), ("int8:0", None), ("int8:6", None)]
)
def test_greedy_text_is_the_same_quantized_targets(target_kind, draft_kind, caplog):
    target, draft = load(TARGET, target_kind), load(DRAFT, draft_kind)
    tokenizer = AutoTokenizer.from_pretrained(fetch(TARGET), padding_side="left")
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    options = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    with caplog.at_level(logging.ERROR, logger=LOUD):
        plain = target.generate(**options, return_dict_in_generate=True, output_logits=True)
    flag = {"num_speculative_tokens": 3, "draft_quantization": "none"}
    with caplog.at_level(logging.WARNING), hf_specdec.enable(target, draft, **flag):
        sequences = target.generate(**options)
    report = hf_specdec.report(target)
    assert report.reason is None
    assert report.accepted > 0
    report.check()
    near_tie = NEAR_TIE_OF_INT8 if target_kind.startswith("int8") else NEAR_TIE
    assert_same_but_for_ties(plain, sequences, inputs["input_ids"].shape[1], near_tie)
    assert "inputs will be cast" not in caplog.text
    assert any("LLM.int8()" in note for note in report.notes) == (target_kind == "int8:6")
