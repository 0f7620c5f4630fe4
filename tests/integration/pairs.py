"""Tiny targets with drafts that agree with them on some tokens only, so that both branches of the rule run.

A draft is the target with noise on its weights. Weights are drawn wide, so that distributions are peaked and greedy
text does not fall into a loop at once.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_specdec

__all__ = ["NOISE", "VOCAB", "assert_as_plain", "llama", "noisy_copy", "pair", "prompts", "speculates"]

VOCAB = 40
NOISE = 0.12


def llama(seed: int = 0, vocab_size: int = VOCAB, **changes: Any) -> LlamaForCausalLM:
    """A two-layer Llama in float32 whose text ends nowhere by itself."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**options, **changes})).eval()
    with torch.no_grad():
        model.lm_head.weight *= 4
    return model


def noisy_copy(model: PreTrainedModel, noise: float = NOISE, seed: int = 1) -> Any:
    """`model` with Gaussian noise of `noise` standard deviations of each weight."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return draft


def pair(seed: int = 0, noise: float = NOISE, **changes: Any) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """(target, draft)."""
    target = llama(seed, **changes)
    return target, noisy_copy(target, noise)


def prompts(batch: int = 1, length: int = 6, seed: int = 3, vocab_size: int = VOCAB) -> dict[str, Tensor]:
    """`generate()` inputs: ids [batch, length] from 2 on, row b left-padded by b."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, :row], mask[row, :row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def speculates(model: Any) -> hf_specdec.SpeculationReport:
    """The report of the last call, once it is known to have speculated and to account for every token."""
    report = hf_specdec.report(model)
    assert report is not None
    assert report.reason is None, report.reason
    report.check()
    assert report.drafted > 0
    return report


def assert_as_plain(model: Any, plain: Tensor, **inputs: Any) -> hf_specdec.SpeculationReport:
    """`model.generate` (with the flag on, one way or another) speculates and gives `plain`."""
    assert model.generate(**inputs).tolist() == plain.tolist()
    return speculates(model)
