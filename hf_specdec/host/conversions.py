"""Which copy of its draft a pair uses under `draft_quantization="auto"`: the draft itself, or one in fewer bits.

What layers in fewer bits cost here is timed on some of the draft's own. Where that is much less, the copy is made when
the draft is bound or loaded (`settle`); else at the beginning of a call, once it has earned its making (`conversion`).
Only for drafts on the CPU, where kernels differ that much, and only where K follows measurement too. A copy that turns
out slower than the draft was is given up for good; one that was made before the draft itself was ever timed stays.

Kept weakly by target and draft.
"""

import dataclasses
import importlib.util
import statistics
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_specdec.config import SpeculativeConfig
from hf_specdec.conversion import ConversionPrice, best_conversion, has_evidence, is_worse
from hf_specdec.host.draft_copy import forget_copy, own_copy, why_unconvertible
from hf_specdec.host.families import weights_key
from hf_specdec.host.knowledge import known_of
from hf_specdec.host.linears import bytes_per_weight, converted, is_linear, why_slow
from hf_specdec.host.memory import available_memory
from hf_specdec.speed_model import PairKnowledge

__all__ = ["draft_in_use", "settle"]

MIN_WEIGHTS = 16_000_000
"""Weights in linear layers below which a pass is not a matter of bytes."""
SAMPLE_WEIGHTS = 16_000_000
"""Weights that are converted to find the price: more than caches keep."""
GUESSED_SHARE = 0.4
"""What a pass in fewer bits may come to at best; before that pays, not even the price is asked."""
ASKING_SECONDS = 1.0
"""What asking the price takes, about."""
SURE_SHARE = 0.75
"""Share of its seconds to which the layers of a draft must come for a copy that is made before anything was decoded."""
ALIKE = 1.1
"""8 bits, which keep more tokens, may cost this much more than 4."""
CACHE_FLOATS = 24_000_000
TIMED_PASSES = 3


@dataclass
class _Choice:
    """Of one target and draft. `quantization` None: the draft as it is; `is_settled`: for good."""

    weights: Hashable
    quantization: str | None = None
    is_settled: bool = False


@dataclass(frozen=True)
class _Timing:
    """Seconds of all layers that a quantization converts, for one row, before and after, and of converting them."""

    quantization: str
    as_it_is: float
    converted: float
    making: float

    def price(self, pass_seconds: float) -> ConversionPrice:
        """For a draft that takes `pass_seconds` a pass, all in all."""
        share = max(0.05, 1 - (self.as_it_is - self.converted) / pass_seconds)
        return ConversionPrice(self.quantization, share, self.making)


_LOCK = threading.RLock()
_CHOICES: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, _Choice]]" = weakref.WeakKeyDictionary()
_TIMINGS: "weakref.WeakKeyDictionary[Any, list[_Timing]]" = weakref.WeakKeyDictionary()


def settle(target: Any, draft: Any, config: SpeculativeConfig) -> None:
    """Make a copy of `draft` now, as part of loading it, where its layers are much faster in fewer bits on this CPU.

    Args:
        target, draft: the models; `draft` may be None.
        config: the flag.
    """
    if draft is None or draft is target or not _is_asked(config):
        return
    with _LOCK:
        choice = _choice_of(target, draft)
        if choice.is_settled or choice.quantization is not None:
            return
        fast = [timing for timing in _timings(draft) if timing.converted < SURE_SHARE * timing.as_it_is]
        best = min(fast, key=lambda timing: timing.converted, default=None)
        if best is not None:
            alike = [timing for timing in fast if timing.converted <= ALIKE * best.converted]
            choice.quantization = _affordable(choice, draft, alike[0].quantization)
        if choice.quantization is not None:
            own_copy(draft, dataclasses.replace(config, draft_quantization=choice.quantization), target)


def draft_in_use(target: Any, draft: Any, config: SpeculativeConfig, method: str, batch: int, length: int) -> Any:
    """`draft`, or the copy of it that pays.

    Args:
        target, draft: the models; `draft` may be None.
        config: the flag. With a schedule of draft lengths what is in use stays: it replays a call.
        method: the drafter's name.
        batch, length: rows and tokens of the text.
    """
    if draft is None or draft is target or not _is_asked(config):
        return draft
    with _LOCK:
        choice = _choice_of(target, draft)
        if choice.is_settled:
            return draft
        knowledge = known_of(target, draft, method, batch, length)
        if choice.quantization is None and not config.draft_lengths and knowledge is not None:
            choice.quantization = _earned(choice, draft, knowledge, batch)
        if choice.quantization is None:
            return draft
        copied = own_copy(draft, dataclasses.replace(config, draft_quantization=choice.quantization), target)
        found = known_of(target, copied, method, batch, length, like=knowledge)
        if not config.draft_lengths and found and knowledge and is_worse(found, knowledge, batch):
            forget_copy(draft, choice.quantization)
            choice.quantization, choice.is_settled = None, True
            return draft
        return copied


def _is_asked(config: SpeculativeConfig) -> bool:
    is_measured = config.num_speculative_tokens == "auto" and not config.deterministic
    return is_measured and config.draft_quantization == "auto" and config.draft_vocab is None


def _choice_of(target: Any, draft: Any) -> _Choice:
    choices = _CHOICES.setdefault(target, weakref.WeakKeyDictionary())
    weights = weights_key(draft)
    choice = choices.get(draft)
    if choice is None or choice.weights != weights:
        choice = choices[draft] = _Choice(weights, is_settled=not _may_pay(draft))
    return choice


def _may_pay(draft: Any) -> bool:
    """Whether the draft is of a kind that a copy in fewer bits could make faster."""
    if any(weight.device.type != "cpu" or not weight.is_floating_point() for weight in draft.parameters()):
        return False
    return _num_linear(draft) >= MIN_WEIGHTS and why_unconvertible(draft, "int8") is None


def _num_linear(draft: Any) -> int:
    """Weights in linear layers, the head among them."""
    return sum(_num_weights(module) for module in draft.modules() if is_linear(module))


def _num_weights(module: Any) -> int:
    return cast(Tensor, module.weight).numel()


def _earned(choice: _Choice, draft: Any, knowledge: PairKnowledge, batch: int) -> str | None:
    """The copy that has earned its making; None, mostly, until it has."""
    if not has_evidence(knowledge, batch):
        return None
    if draft not in _TIMINGS and not best_conversion(
        knowledge, batch, [ConversionPrice("", GUESSED_SHARE, ASKING_SECONDS)]
    ):
        return None
    pass_seconds = knowledge.costs.draft.seconds(1)
    price = best_conversion(knowledge, batch, [timing.price(pass_seconds) for timing in _timings(draft)])
    return None if price is None else _affordable(choice, draft, price.quantization)


def _affordable(choice: _Choice, draft: Any, quantization: str) -> str | None:
    """`quantization`, if there is memory for the copy and as much again; else None, for good."""
    if 2 * _num_linear(draft) * bytes_per_weight(quantization) > available_memory():
        choice.is_settled = True
        return None
    return quantization


def _timings(draft: Any) -> "list[_Timing]":
    if draft not in _TIMINGS:
        _TIMINGS[draft] = _measured(draft)
    return _TIMINGS[draft]


@torch.inference_mode(False)
@torch.no_grad()
def _measured(draft: Any) -> "list[_Timing]":
    """What copies of `draft` take, by the first of its layers."""
    head = draft.get_output_embeddings()
    layers = [module for module in draft.modules() if is_linear(module) and module is not head]
    total, sample, sampled = sum(_num_weights(layer) for layer in layers), [], 0
    for layer in layers:
        sample.append(layer)
        sampled += _num_weights(layer)
        if sampled >= SAMPLE_WEIGHTS:
            break
    as_it_is, timings = _seconds_of(sample), []
    for quantization in _candidates(draft):
        started = time.perf_counter()
        copies = [converted(layer, quantization) for layer in sample]
        making = time.perf_counter() - started
        with_head = quantization == "int8" and is_linear(head)
        times = (total + (_num_weights(head) if with_head else 0)) / sampled
        timings.append(_Timing(quantization, as_it_is * times, _seconds_of(copies) * times, making * times))
    return timings


def _candidates(draft: Any) -> list[str]:
    is_packed = importlib.util.find_spec("bitsandbytes") is not None and why_slow("nf4", draft.device) is None
    return ["int8", "nf4"] if is_packed else ["int8"]


def _seconds_of(layers: Sequence[nn.Module]) -> float:
    """Seconds of one row through each of `layers`, with what caches hold of them pushed out."""
    others = torch.zeros(CACHE_FLOATS)
    inputs = []
    for layer in layers:
        weight: Any = getattr(layer, "weight", None)
        size = getattr(layer, "in_features", None) or weight.shape[0]  # GPT-2's layers are transposed and say less
        dtype = weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else None
        inputs.append(torch.ones(1, 1, size, dtype=dtype or getattr(layer, "compute_dtype", None)))
    times = []
    for _ in range(TIMED_PASSES):
        others.add_(1)
        started = time.perf_counter()
        for layer, rows in zip(layers, inputs, strict=True):
            layer(rows)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
