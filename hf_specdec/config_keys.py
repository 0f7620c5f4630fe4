"""What each key of the flag may hold, and what becomes of the keys that only vLLM knows.

Keys are those of vLLM's SpeculativeConfig (vllm/config/speculative.py, and the keys of its older releases) wherever it
has one. Each is used here, or named once in the log as having no meaning here, or refused because the text would no
longer follow the target's distribution. Values are turned into plain JSON data.

Knows nothing of where the flag stands (`config`), of models or of transformers.
"""

import difflib
import json
import logging
import os
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch

from hf_specdec.registry import DRAFTERS, VERIFIERS, lookup

__all__ = ["USED_KEYS", "check_lookup", "clean_value", "shown", "validated"]

logger = logging.getLogger("hf_specdec")

# Valid before (and without) the modules that register themselves under these names on import.
_OWN_METHODS = ("auto", "base", "draft_model", "early_exit", "ngram", "suffix")
_OWN_REJECTION_METHODS = ("block", "standard")

_OTHER_METHOD = "it belongs to a drafting method that is not in use"
_INTERNAL = "it is internal to vLLM's engine"
_PLACEMENT = "target and draft run where their weights are"
_SCHEDULING = "there is no request scheduler inside generate()"
_FROM_LENGTHS = "num_speculative_tokens says how much is proposed after a match"
_DRAFT_DRAWS = "drafts are drawn from the draft's own distribution when sampling, greedily when not"
_NO_MEANING = {
    "acceptance_method": "rejection_sample_method chooses the rule",
    "attention_backend": "the draft keeps the attention implementation that it was loaded with",
    "code_revision": "code from a model repository is not run",
    "disable_by_batch_size": _SCHEDULING,
    "disable_eagle_block_drop": _OTHER_METHOD,
    "disable_log_stats": "hf_specdec.report(model) has the numbers of the last call",
    "disable_logprobs": "scores and logits are returned as plain decoding returns them",
    "disable_mqa_scorer": _INTERNAL,
    "disable_padded_drafter_batch": "rows of different lengths are always drafted together",
    "draft_load_config": _INTERNAL,
    "draft_model_config": _INTERNAL,
    "draft_parallel_config": _INTERNAL,
    "draft_sample_method": _DRAFT_DRAWS,
    "draft_tensor_parallel_size": _PLACEMENT,
    "dspark_draft_topk": _OTHER_METHOD,
    "enable_adaptive_verification": _OTHER_METHOD,
    "enable_chunked_prefill": _SCHEDULING,
    "enforce_eager": _INTERNAL,
    "index_share_for_mtp_iteration": _OTHER_METHOD,
    "kv_cache_dtype": "the draft's cache has the dtype of the draft",
    "max_model_len": "the draft's own config says how long its texts may be",
    "moe_backend": _INTERNAL,
    "num_speculative_tokens_per_batch_size": "num_speculative_tokens holds for every batch size",
    "parallel_drafting": _OTHER_METHOD,
    "speculative_token_tree": "a draft is one line of tokens, not a tree",
    "suffix_decoding_max_cached_requests": "kept texts are bounded by their tokens, not by their number",
    "suffix_decoding_max_spec_factor": _FROM_LENGTHS,
    "suffix_decoding_max_tree_depth": "matches are followed as far as they go, up to 64 tokens",
    "suffix_decoding_min_token_prob": _FROM_LENGTHS,
    "target_model_config": _INTERNAL,
    "target_parallel_config": _INTERNAL,
    "tensor_parallel_size": _PLACEMENT,
    "use_heterogeneous_vocab": "a draft needs the target's tokenizer",
    "use_local_argmax_reduction": _PLACEMENT,
}
_TYPICAL = "typical acceptance keeps draft tokens that the target would have rejected"
_SYNTHETIC = "synthetic acceptance keeps draft tokens without asking the target"
_LOSSY_KEYS = {
    "posterior_alpha": _TYPICAL,
    "posterior_threshold": _TYPICAL,
    "synthetic_acceptance_length": _SYNTHETIC,
    "synthetic_acceptance_rate": _SYNTHETIC,
    "synthetic_acceptance_rates": _SYNTHETIC,
}
_LOSSY_VALUES = {
    ("acceptance_method", "typical_acceptance_sampler"): _TYPICAL,
    ("rejection_sample_method", "synthetic"): _SYNTHETIC,
    ("rejection_sample_method", "typical_acceptance_sampler"): _TYPICAL,
}
# Keys without meaning here whose value may still ask for another law: only these values are known not to.
_LAWFUL_VALUES = {"acceptance_method": ("rejection_sampler",), "draft_sample_method": ("greedy", "probabilistic")}

_named_keys: set[str] = set()


def validated(data: Mapping[Any, Any]) -> dict[str, Any]:
    """The used keys of `data` with plain values; other keys are named once or refused.

    A key whose value is None counts as not given.

    Raises:
        TypeError, ValueError: as `clean_value`; ValueError for an unknown or a lossy key.
    """
    clean = {}
    for key, value in data.items():
        if key not in USED_KEYS and key not in _NO_MEANING and key not in _LOSSY_KEYS:
            raise ValueError(_unknown_key(key))
        if value is None:
            continue
        if key in USED_KEYS:
            clean[key] = clean_value(key, value)
            continue
        _refuse_lossy(key, value)
        if key not in _named_keys:
            _named_keys.add(key)
            logger.warning("speculative_config key %r has no meaning here and is ignored: %s.", key, _NO_MEANING[key])
    if "prompt_lookup_min" in clean and "prompt_lookup_max" in clean:
        check_lookup(clean["prompt_lookup_min"], clean["prompt_lookup_max"])
    return clean


def check_lookup(least: int, most: int) -> None:
    """Raises ValueError unless an n-gram can have at least `least` and at most `most` tokens."""
    if least > most:
        raise ValueError(
            f"prompt_lookup_min must be at most prompt_lookup_max, got {least} and {most}. Lower the one or raise the "
            "other; given alone, the other follows."
        )


def _unknown_key(key: Any) -> str:
    near = difflib.get_close_matches(str(key), [*USED_KEYS, *_NO_MEANING], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown speculative_config key {key!r}.{hint} Available: {', '.join(sorted(USED_KEYS))}."


def _refuse_lossy(key: str, value: Any) -> None:
    """Raises ValueError for a key or value with which the text would not follow the target's distribution."""
    reason = _LOSSY_KEYS.get(key)
    if reason is None and isinstance(value, str):
        reason = _LOSSY_VALUES.get((key, value))
    remedy = "so the text would not follow the target's distribution. Leave it out: every rule here is lossless."
    if reason is not None:
        raise ValueError(f"{key}={shown(value, with_type=False)} is refused: {reason}, {remedy}")
    lawful = _LAWFUL_VALUES.get(key)
    if lawful is not None and value not in lawful:
        raise ValueError(
            f"{key}={shown(value, with_type=False)} is refused: only {' and '.join(map(repr, lawful))} are known to "
            f"keep the target's distribution. Leave it out: every rule here is lossless."
        )


def clean_value(key: str, value: Any) -> Any:
    """The plain JSON value of one used key.

    Args:
        key: one of `USED_KEYS`.
        value: what the user gave; not None.

    Raises:
        TypeError: a value of another type than the key holds.
        ValueError: an unknown name, a value out of range, or one that would make the text lossy.
    """
    _refuse_lossy(key, value)
    return USED_KEYS[key](key, value)


def shown(value: Any, with_type: bool = True) -> str:
    """A value for an error message: its repr when that is short, and its type."""
    name = type(value).__name__
    text = repr(value)
    if len(text) > 60:  # a whole model or config: the type says more than a wall of text
        return f"an object of type {name}"
    return f"{text} ({name})" if with_type else text


def _text(key: str, value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise TypeError(f"{key} must be a non-empty string, got {shown(value)}. Leave it out for the default.")


def _method(key: str, value: Any) -> str:
    name = _text(key, value)
    try:
        lookup(key, {**dict.fromkeys(_OWN_METHODS, object), **DRAFTERS}, name)
    except ValueError as error:
        if "/" not in name and os.sep not in name:
            raise
        hint = f'To name a draft model, pass {{"model": {json.dumps(name)}}}.'
        raise ValueError(f"{error} {hint}") from None
    return name


def _rejection_method(key: str, value: Any) -> str:
    name = _text(key, value)
    lookup(key, {**dict.fromkeys(_OWN_REJECTION_METHODS, object), **VERIFIERS}, name)
    return name


def _model(key: str, value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and value:
        return value
    raise TypeError(
        f"{key} must be a Hub id or a folder, got {shown(value)}. A loaded draft goes to "
        "hf_specdec.enable(target, draft), or to generate(assistant_model=draft, speculative_config=True)."
    )


def _num_speculative_tokens(key: str, value: Any) -> int | str:
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if isinstance(value, str) and value == "auto":
        return value
    if is_int and int(value) >= 1:
        return int(value)
    if not is_int:
        raise TypeError(f'{key} must be an integer of at least 1 or "auto", got {shown(value)}.')
    raise ValueError(
        f'{key} must be at least 1 or "auto", got {value}. To decode without drafting, pass speculative_config=False.'
    )


def _draft_lengths(key: str, value: Any) -> list[int]:
    expected = f"{key} must be a list of integers of at least 0, one per step"
    hint = "For the same number in every step, pass num_speculative_tokens."
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{expected}, got {shown(value)}. {hint}")
    for length in value:
        if not isinstance(length, Integral) or isinstance(length, bool):
            raise TypeError(f"{expected}, got {shown(length)} in it.")
        if length < 0:
            raise ValueError(f"{expected}, got {length} in it.")
    return [int(length) for length in value]


def _num_looked_up(key: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{key} must be an integer of at least 1, got {shown(value)}.")
    if value < 1:
        raise ValueError(f"{key} must be at least 1, got {value}: it counts the tokens of an n-gram.")
    return int(value)


def _early_exit_layer(key: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{key} must be an integer of at least 1, got {shown(value)}.")
    if value < 1:
        raise ValueError(f"{key} must be at least 1, got {value}: it counts the target's layers that draft.")
    return int(value)


def _switch(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError(f"{key} must be True or False, got {shown(value)}.")


def _on_inexact(key: str, value: Any) -> str:
    name = _text(key, value)
    lookup(key, dict.fromkeys(("speculate", "plain"), object), name)
    return name


def _quantization(key: str, value: Any) -> str | dict[str, Any]:
    if isinstance(value, str) and value:
        return value
    try:
        if isinstance(value, Mapping):
            return json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{key} must hold plain JSON values only: {error}.") from None
    raise TypeError(
        f"{key} must be the name of a quantization method or a dict, got {shown(value)}. "
        "Of a quantization config object, pass its to_dict()."
    )


def _dtype(key: str, value: Any) -> str:
    name = str(value).removeprefix("torch.")
    if isinstance(value, torch.dtype) or (isinstance(value, str) and name == "auto"):
        return name
    if isinstance(value, str) and isinstance(getattr(torch, name, None), torch.dtype):
        return name
    expected = f'{key} must be "auto" or the name of a torch dtype such as "bfloat16"'
    raise (ValueError if isinstance(value, str) else TypeError)(f"{expected}, got {shown(value)}.")


def _device(key: str, value: Any) -> str | int:
    expected = f'{key} must be a torch device such as "cpu" or "cuda:0", or the index of an accelerator'
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{expected}, got {value}.")
        return int(value)
    if not isinstance(value, str):
        raise TypeError(f"{expected}, got {shown(value)}.")
    try:
        torch.device(value)
    except RuntimeError:
        raise ValueError(f"{expected}, got {value!r}.") from None
    return value


def _draft_quantization(key: str, value: Any) -> str:
    name = _text(key, value)
    lookup(key, dict.fromkeys(("auto", "none", "int8", "nf4"), object), name)
    return name


def _draft_vocab(key: str, value: Any) -> int | str | dict[str, Any]:
    expected = f'{key} must be a number of ids, a file of token counts, or {{"size": number, "counts": file}}'
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping):
        for name in value:
            if name not in ("size", "counts"):
                raise ValueError(f"{expected}, got the key {name!r} in it.")
        counts, size = (value.get(name) for name in ("counts", "size"))
        if not isinstance(counts, (str, os.PathLike)) or not os.fspath(counts):
            raise TypeError(f"{expected}, got {shown(counts)} as counts.")
        return {"size": _num_ids(f"{key}['size']", size), "counts": os.fspath(counts)}
    if isinstance(value, Integral):
        return _num_ids(key, value)
    raise TypeError(f"{expected}, got {shown(value)}.")


def _num_ids(key: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{key} must be an integer of at least 1, got {shown(value)}.")
    if value < 1:
        raise ValueError(f"{key} must be at least 1, got {value}. To draft all ids, leave it out.")
    return int(value)


USED_KEYS: dict[str, Callable[[str, Any], Any]] = {
    "method": _method,
    "model": _model,
    "revision": _text,
    "num_speculative_tokens": _num_speculative_tokens,
    "draft_lengths": _draft_lengths,
    "deterministic": _switch,
    "rejection_sample_method": _rejection_method,
    "on_inexact": _on_inexact,
    "prompt_lookup_min": _num_looked_up,
    "prompt_lookup_max": _num_looked_up,
    "early_exit_layer": _early_exit_layer,
    "quantization": _quantization,
    "dtype": _dtype,
    "device": _device,
    "draft_quantization": _draft_quantization,
    "draft_vocab": _draft_vocab,
}
"""The keys with a meaning here, in the order of `SpeculativeConfig`'s fields, and what makes their value plain."""
