"""PEFT adapters on a target: what they allow, and a context in which they are off.

Only looks at what PEFT left in the model; does not import it, so nothing here needs it installed.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["adapters_off", "in_turn", "why_adapters", "why_no_base"]

_TURNS: "weakref.WeakKeyDictionary[Any, threading.RLock]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def _layers(model: Any) -> list[Any]:
    """What adapters put into `model`: layers around a base layer, and modules saved in place of an original one (peft's
    BaseTunerLayer and AuxiliaryTrainingWrapper, recognised by their switch)."""
    replaced = ("base_layer", "original_module")
    return [m for m in model.modules() if hasattr(m, "_disable_adapters") and any(hasattr(m, n) for n in replaced)]


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Run `model` without its adapters; every layer's switch is put back as found, also after an exception."""
    layers = _layers(model)
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer._disable_adapters = was_off


@contextlib.contextmanager
def in_turn(model: Any) -> Iterator[None]:
    """Wait until no other thread is in here with the same `model`: switches are the model's, not a call's."""
    with _LOCK:
        turn = _TURNS.setdefault(model, threading.RLock())
    with turn:
        yield


def why_adapters(model: Any) -> str | None:
    """The reason why a model with its present adapters decodes plainly, or None."""
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    if owner is not model and getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt-learning adapter (its virtual tokens are not in the text)"
    if any(layer._forward_pre_hooks for layer in _layers(model)):
        return "adapter_names (rows of different adapters)"
    return None


def why_no_base(model: Any) -> str | None:
    """The reason why there is no base model to draft with, or None."""
    layers = _layers(model)
    if not layers:
        return "no draft: method 'base' drafts with the adapters off, and the target has none"
    if any(getattr(layer, "merged", False) for layer in layers):
        return "no draft: method 'base' cannot switch merged adapters off"
    if all(layer._disable_adapters for layer in layers):
        return "no draft: the target's adapters are off already"
    return None
