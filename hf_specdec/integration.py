"""`enable()`, `register()` and the handles that undo them.

`register()` installs the wraps, counted: the first handle installs, the last removal puts the originals back.
`enable()` registers, binds a draft to one target and writes the flag into its generation config; handles stack per
target.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import transformers

from hf_specdec.config import SpeculativeConfig, normalise
from hf_specdec.host import binding
from hf_specdec.host.conversions import settle
from hf_specdec.host.draft_copy import own_copy
from hf_specdec.host.drafts import check_pair
from hf_specdec.host.generate import FLAG, TESTED_RANGE, Hooks, is_disabled, unexpected_hooks
from hf_specdec.host.loading import load_draft
from hf_specdec.registry import DRAFTERS, lookup
from hf_specdec.report import SpeculationReport

__all__ = ["Handle", "enable", "register", "report"]

logger = logging.getLogger("hf_specdec")

_HOOKS = Hooks()
_LOCK = _HOOKS.lock  # one lock: a target may be collected, and its registration removed, at any point of any thread
_REGISTRATIONS: list[bool] = []  # one entry per live registration: whether it allows drafts named in data
_PROBLEMS_NAMED: set[str] = set()
_MISSING = object()
_SAVED: "weakref.WeakKeyDictionary[Any, _SavedConfig]" = weakref.WeakKeyDictionary()


class Handle:
    """Undoes what made it. A context manager; `remove()` may be called in any order and more than once."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Put things back as they were found; harmless when done already."""
        with _LOCK:
            undo, self._undo = self._undo, None
            if undo is not None:
                undo()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def register(config_drafts: bool = True) -> Handle:
    """Make the flag known to every `generate()` of this process. Inert for calls without the flag.

    Args:
        config_drafts: whether a draft that is *named in data* (a generation_config.json, a request) may be loaded;
            safetensors only, no remote code, relative paths inside the checkpoint's folder.

    Returns:
        A handle; after the last one is removed, transformers is as it was found. Safe from several threads. With
        ``HF_SPECDEC=0`` in the environment the flag is still understood, and every call decodes plainly.
    """
    with _LOCK:
        if not _REGISTRATIONS:
            problem = unexpected_hooks()
            if problem is not None:
                if problem not in _PROBLEMS_NAMED:
                    _PROBLEMS_NAMED.add(problem)
                    logger.warning(
                        "hf_specdec stays inert: %s in transformers %s; tested with %s.",
                        problem,
                        transformers.__version__,
                        TESTED_RANGE,
                    )
                return Handle(lambda: None)
            _HOOKS.install()
        _REGISTRATIONS.append(config_drafts)
        _HOOKS.config_drafts = all(_REGISTRATIONS)
        return Handle(lambda: _unregister(config_drafts))


def _unregister(config_drafts: bool) -> None:
    _REGISTRATIONS.remove(config_drafts)
    _HOOKS.config_drafts = all(_REGISTRATIONS)
    if not _REGISTRATIONS:
        _HOOKS.uninstall()


def enable(target: Any, draft: Any = None, **config: Any) -> Handle:
    """Make every `generate()` of `target` speculative: same call, same distribution, fewer target passes.

    Args:
        target: a loaded transformers model (or a PEFT model, compiled model or pipeline around one).
        draft: a Hub id, a folder, or a loaded PreTrainedModel with the target's tokenizer; may be `target` itself. A
            name is loaded at once: dtype="auto", on the device of the target's output head, eval mode, safetensors.
            On a CPU a copy of it in fewer bits may be made as well, in seconds (see `draft_quantization`).
        **config: keys of `SpeculativeConfig`, e.g. ``num_speculative_tokens=5``.

    Returns:
        A handle. Handles stack: the newest wins, `remove()` in any order.

    Raises:
        TypeError, ValueError: a wrong key or value, a draft that does not fit; raised before any model work.
    """
    target = binding.unwrap(target)
    if not callable(getattr(target, "generate", None)) or not hasattr(target, "generation_config"):
        raise TypeError(f"enable() expects a transformers model that can generate, got {type(target).__name__}.")
    flag = normalise(config) if config else {}
    assert isinstance(flag, dict)
    if is_disabled():
        return register()  # nothing is loaded or written; scripts that use the flag run as they are
    if draft is None and flag.get("model") is not None:
        draft = flag["model"]
    if isinstance(draft, str) or hasattr(draft, "__fspath__"):
        flag = {**flag, "model": str(draft)}
        draft = load_draft(
            str(draft),
            revision=flag.get("revision"),
            dtype=flag.get("dtype"),
            device=flag.get("device"),
            quantization=flag.get("quantization"),
            target=target,
        )
    if draft is not None:
        draft = binding.unwrap(draft)
        check_pair(target, draft)
        own_copy(draft, SpeculativeConfig(**flag), target, is_in_code=True)  # made now, and its errors are heard now
        settle(target, draft, SpeculativeConfig(**flag))
    lookup("method", DRAFTERS, flag.get("method", "auto")).check(target, SpeculativeConfig(**flag))
    is_auto = flag.get("method", "auto") == "auto"
    if is_auto:
        is_order = flag.get("num_speculative_tokens", "auto") != "auto"
        flag["method"] = "draft_model" if draft is not None and (is_order or "model" not in flag) else "auto"
    return _bound(target, binding.Binding(target, draft, flag, is_auto))


def _bound(target: Any, bound: binding.Binding) -> Handle:
    registration = register()
    with _LOCK:
        if target not in _SAVED:
            _SAVED[target] = _SavedConfig(target)
        binding.bind(target, bound)
        _SAVED[target].write(target, bound.flag)
    # Weak both ways: a handle that is still held keeps neither the target nor the draft alive.
    of_target, of_binding = weakref.ref(target), weakref.ref(bound)

    # A target that is dropped leaves nothing behind.
    at_end = weakref.finalize(target, registration.remove)

    def undo() -> None:
        at_end.detach()
        model, binding_left = of_target(), of_binding()
        if model is not None and binding_left is not None:
            _unbind(model, binding_left)
        registration.remove()

    return Handle(undo)


def _unbind(target: Any, bound: binding.Binding) -> None:
    binding.unbind(target, bound)
    if bindings := binding.bindings_of(target):
        _SAVED[target].write(target, bindings[-1].flag)
    else:
        _SAVED.pop(target).restore()


class _SavedConfig:
    """What a target's generation config held before the first `enable()`."""

    def __init__(self, target: Any) -> None:
        self.config = target.generation_config
        names = (FLAG, "_from_model_config", "_original_object_hash")
        self.values = {name: vars(self.config).get(name, _MISSING) for name in names}

    def write(self, target: Any, flag: dict[str, Any]) -> None:
        """Put `flag` into the config that was found (the user may have replaced it since)."""
        config = self.config
        was_pristine = self.values["_original_object_hash"] == self._hash_without_flag()
        setattr(config, FLAG, dict(flag))
        # A config marked as made from the model config would lose the flag when read back from JSON.
        config._from_model_config = False
        if was_pristine:  # saving validates strictly what looks modified; the flag alone must not make it unsavable
            config._original_object_hash = hash(config)

    def _hash_without_flag(self) -> Any:
        found = vars(self.config).get(FLAG, _MISSING)
        if found is not _MISSING:
            delattr(self.config, FLAG)
        try:
            return hash(self.config)
        finally:
            if found is not _MISSING:
                setattr(self.config, FLAG, found)

    def restore(self) -> None:
        """Leave the config as it was found."""
        for name, value in self.values.items():
            if value is not _MISSING:
                setattr(self.config, name, value)
            elif name in vars(self.config):
                delattr(self.config, name)


def report(model: Any) -> SpeculationReport | None:
    """What the last finished `generate()` with the flag did on `model`, None before the first.

    Args:
        model: the target, or a PEFT model, compiled model or pipeline around it.

    Returns:
        The report of this thread's last call, else of any thread's; nested generates of one call are summed.
    """
    return binding.last_report(binding.unwrap(model))
