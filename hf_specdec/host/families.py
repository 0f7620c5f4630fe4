"""Whether a model's forward is right on a cache with per-row lengths.

Families that the test suites cover are taken as they are. Any other causal LM, remote code included, is tried once: two
ragged rows against single-row passes, at most four passes of at most eight tokens. Wrong is never acceptable: a model
that fails decodes plainly, with the numbers in the reason.
"""

import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdec.host.cache import RaggedCache
from hf_specdec.host.runner import ModelRunner, cache_keyword, forward_keywords, input_device

__all__ = [
    "ROWS",
    "TOLERANCE",
    "VERIFIED",
    "is_covered",
    "weights_key",
    "why_frequencies_move",
    "why_not_ragged",
    "why_slots_matter",
    "why_window_without_mask",
]

# model_type of families whose every attention implementation the parity suite runs over (tests/zoo.py).
VERIFIED = frozenset({"gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "qwen3"})

# Families whose fault no pass of eight tokens shows: what is wrong with them on rows of different lengths.
_UNFIT = {"gpt_neo": "its local layers cut their window by slot inside the attention module"}

# Relative to the largest logit: well above what differently shaped kernels of the same dtype give (about 2^-8 in
# bfloat16), well below what a wrong mask or position gives (of order 1).
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}

_MASKS_OF_WINDOWS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")

_LOCK = threading.Lock()
_VERDICTS: "weakref.WeakKeyDictionary[Any, dict[Any, str | None]]" = weakref.WeakKeyDictionary()

ROWS = ((5, 3, 7, 2, 6, 4, 8, 1), (7, 2, 4, 6, 3))  # ids; the second row is left-padded


def why_not_ragged(model: Any) -> str | None:
    """The reason why `model` cannot be scored on per-row lengths, None if it can. Tried once per model and
    attention."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _UNFIT:
        return f"{type(model).__name__} cannot have rows of different lengths: {_UNFIT[config.model_type]}"
    if is_covered(model):
        return None
    key = getattr(config, "_attn_implementation", None), model.dtype, weights_key(model)
    with _LOCK:
        verdicts = _VERDICTS.setdefault(model, {})
        if key not in verdicts:
            verdicts[key] = _try(model)
        return verdicts[key]


def is_covered(model: Any) -> bool:
    """Whether the suites cover the model's family. A user's subclass and remote code have the model_type of a family
    without being it."""
    model_type = model.config.get_text_config(decoder=True).model_type
    return model_type in VERIFIED and type(model).__module__.startswith("transformers.models.")


def weights_key(model: Any) -> tuple[int, int]:
    """Changes when weights are replaced or written to: what was right by chance with fresh ones is asked again."""
    parameters = list(model.parameters())
    versions = sum(0 if parameter.is_inference() else parameter._version for parameter in parameters)
    return parameters[0].data_ptr() if parameters and parameters[0].device.type != "meta" else 0, versions


def why_window_without_mask(model: Any, cache: Any) -> str | None:
    """The reason why a cache with windows decodes plainly: the model builds no mask for them.

    transformers makes sliding layers from any config that has a window, also where the model attends to everything.
    Plain decoding then sees what the layer kept, which no mask says.
    """
    if not any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        return None
    modules = {type(module).__module__ for module in model.modules()}
    if any(hasattr(sys.modules.get(name), mask) for name in modules for mask in _MASKS_OF_WINDOWS):
        return None
    return f"{type(model).__name__} keeps a window of keys (its config has one) but builds no mask for it"


def why_slots_matter(model: Any, batch: int) -> str | None:
    """The reason why several rows decode plainly: the model counts slots where others count positions."""
    config = model.config.get_text_config(decoder=True)
    if batch > 1 and config.model_type.startswith("llama4") and getattr(config, "attn_temperature_tuning", None):
        return f"{type(model).__name__} scales its queries by slot, alike for all rows (attn_temperature_tuning)"
    return None


def why_frequencies_move(model: Any, longest: int | None) -> str | None:
    """The reason why a text of `longest` slots (None: no limit) parts from plain's because rotary frequencies follow
    the longest position of a pass (rope types dynamic and longrope), None if it does not get that far.

    A verify pass reaches K positions further than plain's pass over the same token, so it changes frequencies earlier;
    some models then drop the whole cache.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    is_by_layer_type = bool(parameters) and all(isinstance(value, dict) for value in parameters.values())
    for rope in parameters.values() if is_by_layer_type else [parameters]:
        kind = rope.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
        limit = original or config.max_position_embeddings
        if longest is None or longest > limit:
            return f"rotary frequencies of type {kind} change past {limit} positions, and this text may get there"
    return None


def _try(model: Any) -> str | None:
    name = type(model).__name__
    try:
        error, scale = _largest_error(model)
    except Exception as failure:  # a model that cannot run these passes cannot be verified
        return f"{name} failed the per-row length check: {type(failure).__name__}: {failure}"
    tolerance = TOLERANCE.get(model.dtype, 0.06) * scale
    if error <= tolerance:
        return None
    return f"{name} failed the per-row length check: logits differ by {error:.2g}, tolerance {tolerance:.2g}"


@torch.no_grad()
def _largest_error(model: Any) -> tuple[float, float]:
    """(largest difference of logits, their scale): ragged verify of 3 tokens against the same rows alone."""
    device, vocab = input_device(model, torch.empty(0)), model.config.get_text_config(decoder=True).vocab_size
    longest = max(len(row) for row in ROWS)
    ids = torch.zeros((2, longest), dtype=torch.long)
    mask = torch.zeros((2, longest), dtype=torch.long)
    for row, tokens in enumerate(ROWS):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    ids, mask = (ids % max(2, vocab - 1)).to(device), mask.to(device)
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    keyword = cache_keyword(model)
    _forward(model, ids[:, :-1], mask[:, :-1], positions[:, :-1], {keyword: cache})
    # Roll row 0 back by two more than row 1, then score three tokens in each.
    starts = [longest - 4, longest - 2]
    ragged = RaggedCache(cache, starts)
    runner = ModelRunner(model, ragged, mask, positions[:, -1:], longest, longest + 8)
    block = torch.stack([ids[row, start : start + 2] for row, start in enumerate(starts)])
    block = torch.cat([block, torch.full_like(block[:, :1], 3)], dim=1)
    scored = runner.forward(block).logits.float()
    error, scale = 0.0, 0.0
    for row, start in enumerate(starts):
        first = int((mask[row] == 0).sum())
        alone = torch.cat([ids[row, first : start + 2], block[row, 2:]])[None]
        ones = torch.ones_like(alone)
        expected = _forward(model, alone, ones, ones.cumsum(dim=-1) - 1, {}).logits[0, -3:].float()
        error = max(error, float((scored[row] - expected).abs().max()))
        scale = max(scale, float(expected.abs().max()))
    if error != error:
        raise ValueError("NaN logits")
    return error, scale


def _forward(model: Any, ids: Tensor, mask: Tensor, positions: Tensor, extra: dict[str, Any]) -> Any:
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": bool(extra), "return_dict": True, **extra}
    if "position_ids" in forward_keywords(model):
        inputs["position_ids"] = positions
    return model(input_ids=ids, **inputs)
