"""Why a call decodes plainly. Each reason is one line a user understands; the report and one warning carry it.

Fallback is no way out: attention-only decoders with position-wise processors, any stopping criterion, scores in the
output and any batch speculate. What is left stands here.
"""

import logging
import threading
import weakref
from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationMixin, LogitsProcessorList

from hf_specdec.host.adapters import why_adapters
from hf_specdec.host.cache import unsupported_layer
from hf_specdec.host.draft_copy import original
from hf_specdec.host.families import why_frequencies_move, why_not_ragged, why_slots_matter, why_window_without_mask
from hf_specdec.host.masks import RAGGED_IMPLEMENTATIONS
from hf_specdec.host.processors import why_not_in_batch
from hf_specdec.host.ranks import num_ranks

__all__ = [
    "NOT_WORTH_IT",
    "NO_DRAFT",
    "is_sampled",
    "mode_reason",
    "say_once",
    "warn_once",
    "why_draft_unfit",
    "why_plain",
]

logger = logging.getLogger("hf_specdec")

NO_DRAFT = "no draft"
NOT_WORTH_IT = "drafting does not pay here"

# What `generate()` hands to `_sample` and the loop knows how to carry on.
_HANDLED = {
    "attention_mask",
    "assistant_tokenizer",
    "cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "tokenizer",
    "use_cache",
}

_LOCK = threading.Lock()
_WARNED: "weakref.WeakKeyDictionary[Any, set[str]]" = weakref.WeakKeyDictionary()


def warn_once(model: Any, reason: str) -> None:
    """Log at WARNING that `model` decodes plainly because of `reason`, once per model and reason."""
    say_once(model, f"{type(model).__name__} decodes plainly, without speculation: {reason}.")


def say_once(model: Any, fact: str) -> None:
    """Log `fact` at WARNING, once per model."""
    with _LOCK:
        seen = _WARNED.setdefault(model, set())
        is_new = fact not in seen
        seen.add(fact)
    if is_new:
        logger.warning("%s", fact)


def is_sampled(model: Any, options: Any) -> bool:
    """Whether `generate()` comes to sampling or greedy search if nothing raises; `options(name)` looks an option up."""
    mixin: Any = GenerationMixin
    return _why_other_mode(options) is None and type(model)._sample is mixin._sample


def mode_reason(model: Any, options: Any) -> str:
    """Why `generate()` never came to sampling or greedy search; `options(name)` looks an option up."""
    return _why_other_mode(options) or f"{type(model).__name__} has a decoding loop of its own"


def _why_other_mode(options: Any) -> str | None:
    if (options("num_beams") or 1) > 1:
        return "beam search"
    if options("custom_generate") is not None:
        return "custom_generate"
    for name in ("constraints", "force_words_ids", "dola_layers", "penalty_alpha"):
        if options(name):
            return f"decoding mode of {name}"
    return None


def why_plain(
    model: Any, generation_config: Any, processors: LogitsProcessorList, synced: bool, inputs: dict, ids: Tensor
) -> str | None:
    """The reason for plain decoding of a call that has come to `_sample` with `ids` [batch, seq] and `inputs` (its
    model_kwargs), or None."""
    if synced:
        return "synced_gpus (ranks must run the same number of forwards)"
    if model.config.is_encoder_decoder:
        return "encoder-decoder target"
    if not inputs.get("use_cache"):
        return "use_cache=False"
    if generation_config.output_attentions:
        return "output_attentions"
    cache = inputs["cache"] if "cache" in inputs else inputs.get("past_key_values")
    return (
        _why_cache(model, cache)
        or _why_inputs(inputs)
        or why_adapters(model)
        or why_not_in_batch(processors, ids.shape[0] * num_ranks(model))
        or _why_attention(model, inputs)
        or why_window_without_mask(model, cache)
        or why_slots_matter(model, ids.shape[0])
        or why_not_ragged(model)
        or why_frequencies_move(model, _most_slots(generation_config, inputs, ids))
    )


def _most_slots(generation_config: Any, inputs: dict, ids: Tensor) -> int | None:
    """Slots that the text may fill: its maximum length, and what a cache holds before new ids given alone."""
    mask = inputs.get("attention_mask")
    held = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", ids.shape[1])
    longest = generation_config.max_length
    return None if longest is None else longest + max(0, held - ids.shape[1])


def _why_cache(model: Any, cache: Any) -> str | None:
    if getattr(model, "_is_stateful", False):
        return f"recurrent state of {type(model).__name__}"
    if cache is None:
        return f"{type(model).__name__} brings a cache of its own"
    if type(cache) is not DynamicCache:
        return f"{type(cache).__name__} has one length for all rows"
    if cache.offloading:
        return "offloaded cache"
    layer = unsupported_layer(cache)
    return None if layer is None else f"cache layer {layer} cannot be rolled back per row"


def _why_inputs(inputs: dict) -> str | None:
    for name, value in inputs.items():
        if name in _HANDLED or not isinstance(value, (Tensor, list, tuple, dict)):
            continue
        if isinstance(value, Tensor) or value:  # a multimodal class's text-only call brings mm_encoder_outputs={}
            return f"model input {name}"
    return None


def _why_attention(model: Any, inputs: dict) -> str | None:
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation in RAGGED_IMPLEMENTATIONS:
        return None
    return f"attention implementation {implementation} has no masks for rows of different lengths"


def why_draft_unfit(draft: Any) -> str | None:
    """The reason why `draft` cannot draft (recurrent state, a failed check), or None."""
    draft = original(draft)  # a copy runs the same code, and its rounding is not a fault
    name = type(draft).__name__
    if getattr(draft, "_is_stateful", False):
        return f"the draft {name} has recurrent state"
    layer = unsupported_layer(DynamicCache(config=draft.config.get_text_config(decoder=True)))
    if layer is not None:
        return f"the draft's cache layer {layer} cannot be rolled back per row"
    why = why_not_ragged(draft)
    return None if why is None else f"draft: {why}"
