"""The plugin's own copy of a draft: weights in fewer bits, and an output head cut to a short list of ids.

A draft step reads every weight of the draft once, so its price is bytes. The copy is another draft, with a law q of its
own; any q is exact (Chen et al. 2023, arXiv 2302.01318, Theorem 1), so all that a copy can lose is acceptance.

The user's draft is never changed. The copy shares the storage of whatever it does not convert (embeddings first of
all), never a Parameter or a module. It is made once per draft and settings, serves every target, is made anew when the
draft's weights were replaced or moved, and goes when the draft goes.

What the bits are is `linears`' to know; which ids are frequent, `token_counts`'.
"""

import copy
import itertools
import json
import threading
import time
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from hf_specdec.config import SpeculativeConfig
from hf_specdec.host.families import weights_key
from hf_specdec.host.linears import QUANTIZATIONS, bytes_per_weight, check_kernels, converted, is_linear, why_slow
from hf_specdec.host.loading import find_tokenizer
from hf_specdec.host.sources import counts_in_code, counts_in_data
from hf_specdec.token_counts import read_token_counts, short_list

__all__ = [
    "copy_facts",
    "copy_quantization",
    "facts_of_copies",
    "forget_copy",
    "kept_ids",
    "made_copies",
    "original",
    "own_copy",
    "why_unconvertible",
]


@dataclass(frozen=True)
class _Copy:
    """A copy, kept with its draft (None: there was nothing to convert); `weights` are the draft's, as they were."""

    model: Any
    weights: Hashable
    number: int = field(default_factory=itertools.count().__next__)


@dataclass(frozen=True)
class _About:
    """What is known of a copy; nothing here keeps it or its draft alive."""

    draft: weakref.ref
    kept_ids: Tensor | None
    quantization: str | None
    facts: tuple[str, ...]


_LOCK = threading.RLock()
_COPIES: "weakref.WeakKeyDictionary[Any, dict[Hashable, _Copy]]" = weakref.WeakKeyDictionary()
_ABOUT: "weakref.WeakKeyDictionary[Any, _About]" = weakref.WeakKeyDictionary()


def own_copy(draft: Any, config: SpeculativeConfig, target: Any, is_in_code: bool = False) -> Any:
    """`draft`, or the copy of it that `draft_quantization` and `draft_vocab` ask for.

    Args:
        draft: a loaded model that fits the target.
        config: the flag.
        target: the ids that end its texts are in every short list; where its checkpoint lies counts may be.
        is_in_code: whether a path in `draft_vocab` stands in the user's code; in data it may only point into the
            target's checkpoint folder.

    Raises:
        ImportError: a quantization whose library is not installed.
        ValueError: a draft or a device that cannot be converted, or token counts that cannot be used.
    """
    quantization = config.draft_quantization if config.draft_quantization in QUANTIZATIONS else None
    vocab = config.draft_vocab
    if quantization is None and vocab is None:
        return draft
    name = vocab.get("counts") if isinstance(vocab, dict) else vocab
    name = name if isinstance(name, str) else None
    counts = name if name is None or is_in_code else counts_in_data(name, target)
    ends = _end_ids(target) if vocab is not None else ()
    key = quantization, json.dumps(vocab, sort_keys=True), counts, ends
    with _LOCK:
        copies, weights = _COPIES.setdefault(draft, {}), weights_key(draft)
        held = copies.get(key)
        if held is None or held.weights != weights:
            copies.pop(key, None)  # before the next one takes its memory
            kept = _kept(draft, vocab, counts, ends)
            needs_none = quantization is None and kept is None
            held = copies[key] = _Copy(None if needs_none else _made(draft, quantization, kept), weights)
        return draft if held.model is None else held.model


def made_copies(draft: Any) -> frozenset[int]:
    """The numbers of the copies of `draft` that there are; one that is made anew has a new number."""
    with _LOCK:
        copies = {} if draft is None else _COPIES.get(draft, {})
        return frozenset(held.number for held in copies.values() if held.model is not None)


def forget_copy(draft: Any, quantization: str) -> None:
    """Let go of the copies of `draft` in `quantization`."""
    with _LOCK:
        copies = _COPIES.get(draft, {})
        for key in [key for key in copies if isinstance(key, tuple) and key[0] == quantization]:
            del copies[key]


def why_unconvertible(draft: Any, quantization: str) -> str | None:
    """Why `own_copy` would refuse, or None."""
    try:
        _check_convertible(draft, quantization)
    except (ImportError, ValueError) as error:
        return str(error)
    return None


def kept_ids(model: Any) -> Tensor | None:
    """int64 [kept], ascending: the ids behind the rows of a copy's cut head; None for every other model."""
    about = None if model is None else _ABOUT.get(model)
    return None if about is None else about.kept_ids


def original(model: Any) -> Any:
    """The draft that `model` is a copy of, else `model`."""
    about = None if model is None else _ABOUT.get(model)
    return model if about is None else about.draft() or model


def copy_quantization(model: Any) -> str | None:
    """What the linear layers of a copy were converted to; None if `model` is no copy, or none that was converted."""
    about = None if model is None else _ABOUT.get(model)
    return None if about is None else about.quantization


def copy_facts(model: Any) -> tuple[str, ...]:
    """What was made of the draft, how long that took, and what to know of it; empty if `model` is no copy."""
    about = None if model is None else _ABOUT.get(model)
    return () if about is None else about.facts


def facts_of_copies(draft: Any) -> tuple[str, ...]:
    """What was made of `draft` so far, copy by copy."""
    with _LOCK:
        copies = [] if draft is None else list(_COPIES.get(draft, {}).values())
    return tuple(fact for held in copies for fact in copy_facts(held.model))


# --- the short list -------------------------------------------------------------------------------------------------


def _kept(draft: Any, vocab: Any, counts: str | None, ends: tuple[int, ...]) -> Tensor | None:
    """The ids of the short list; None if it holds every id, or there is none."""
    if vocab is None:
        return None
    num_ids = _head(draft).out_features
    size = vocab if isinstance(vocab, int) else vocab.get("size") if isinstance(vocab, dict) else None
    frequent = [] if counts is None else read_token_counts(counts_in_code(counts))
    ids = short_list(num_ids, size, frequent, {*ends, *_end_ids(draft), *_special_ids(draft)})
    return None if len(ids) == num_ids else torch.tensor(ids)


def _end_ids(model: Any) -> tuple[int, ...]:
    """The ids that end texts, as the model's configs name them."""
    ids: set[int] = set()
    for config in (model.config.get_text_config(decoder=True), getattr(model, "generation_config", None)):
        ends = getattr(config, "eos_token_id", None)
        ids.update([] if ends is None else [ends] if isinstance(ends, int) else ends)
    return tuple(sorted(ids))


def _special_ids(draft: Any) -> set[int]:
    tokenizer = find_tokenizer(draft)
    return set() if tokenizer is None else {token for token in tokenizer.all_special_ids if token is not None}


def _head(draft: Any) -> nn.Linear:
    head = draft.get_output_embeddings()
    if type(head) is nn.Linear:
        return head
    raise ValueError(
        f"draft_vocab cuts a plain linear output head, and {type(draft).__name__} has {type(head).__name__}. "
        "Leave draft_vocab out."
    )


# --- the copy -------------------------------------------------------------------------------------------------------


# Parameters made in inference mode would stay bound to it.
@torch.inference_mode(False)
@torch.no_grad()
def _made(draft: Any, quantization: str | None, kept: Tensor | None) -> Any:
    if quantization is not None:
        _check_convertible(draft, quantization)
    started = time.perf_counter()
    model = _shallow_copy(draft)
    num_bytes, done = 0.0, []
    if kept is not None:
        _cut_head(model, kept)
        num_bytes += _num_bytes(_head(model).weight) if quantization != "int8" else 0  # which converts the head too
        done.append(f"cut to {len(kept):,} of {_head(draft).out_features:,} ids")
    if quantization is not None:
        num_bytes += _convert(model, quantization)
        done.insert(0, f"converted to {quantization}")
    slow = None if quantization is None else why_slow(quantization, draft.device)
    made = f"Draft {' and '.join(done)} in {time.perf_counter() - started:.1f} s, {_shown(num_bytes)}."
    facts = (made,) if slow is None else (made, slow)
    _ABOUT[model] = _About(weakref.ref(draft), None if kept is None else kept.to(_device(model)), quantization, facts)
    return model


def _shallow_copy(draft: Any) -> Any:
    """New modules, configs and Parameters over the same storage."""
    memo: dict[int, Any] = {}
    for weight in draft.parameters():
        # A subclass (bitsandbytes' packed weights) carries more than its storage, and is shared as it is.
        is_plain = type(weight) is nn.Parameter
        memo[id(weight)] = nn.Parameter(weight.detach(), requires_grad=False) if is_plain else weight
    for buffer in draft.buffers():
        memo[id(buffer)] = buffer.detach()
    return copy.deepcopy(draft, memo).eval()


def _cut_head(model: Any, kept: Tensor) -> None:
    """Replace the head by its rows `kept`. A tied embedding keeps all of its rows."""
    head = _head(model)
    weight, rows = head.weight, kept.to(head.weight.device)
    cut = nn.Linear(head.in_features, len(kept), bias=head.bias is not None, device="meta")
    cut.weight = nn.Parameter(weight[rows], requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias[rows], requires_grad=False)
    _replace(model, {_name_of(model, head): cut.eval()})
    model.config.get_text_config(decoder=True).tie_word_embeddings = False


def _convert(model: Any, quantization: str) -> float:
    """Convert the linear layers; the bytes that they take. 4 bits leave the head alone, as transformers does."""
    head = model.get_output_embeddings() if quantization == "nf4" else None
    layers = {name: module for name, module in model.named_modules() if is_linear(module) and module is not head}
    weights = sum(cast(Tensor, layer.weight).numel() for layer in layers.values())
    dtype = next(iter(layers.values())).weight.dtype
    for name in list(layers):  # one by one: what is done needs no second copy
        _replace(model, {name: converted(layers.pop(name), quantization)})
    if quantization == "int8":
        _widen(model)
    else:
        model.config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return weights * bytes_per_weight(quantization)


def _widen(model: Any) -> None:
    """Let everything between 8-bit layers compute in float32: CPUs without bfloat16 arithmetic are slow in that. The
    embedding stays as it is, and its output is widened."""
    embedding = model.get_input_embeddings()
    for module in model.modules():
        for name, weight in module._parameters.items():
            if module is not embedding and weight is not None and weight.is_floating_point():
                module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)
    embedding.register_forward_hook(_float32)
    model.config.get_text_config(decoder=True).dtype = torch.float32


def _float32(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float()


def _check_convertible(draft: Any, quantization: str) -> None:
    name = type(draft).__name__
    devices = {weight.device for weight in draft.parameters()}
    if any(device.type == "meta" for device in devices):
        raise ValueError(
            f"The draft {name} is offloaded. Leave draft_quantization out, or load the draft without device_map."
        )
    if getattr(draft, "is_quantized", False) or getattr(draft, "hf_quantizer", None) is not None:
        raise ValueError(f"The draft {name} is quantized already. Leave draft_quantization out.")
    for device in devices:
        check_kernels(quantization, device)
    embedding = draft.get_input_embeddings().weight
    others = [weight.numel() for weight in draft.parameters() if weight is not embedding]
    linear = sum(m.weight.numel() for m in draft.modules() if is_linear(m) and m.weight is not embedding)
    if 2 * linear < sum(others):
        raise ValueError(
            f"Most weights of the draft {name} are not in linear layers, which are all that draft_quantization "
            "converts. Leave it out."
        )


def _replace(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _device(model: Any) -> torch.device:
    device = model.device
    return torch.device("cpu") if device.type == "meta" else device


def _num_bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


def _shown(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
