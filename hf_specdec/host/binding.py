"""Which draft is bound to which target, and what the last call did. Weak: nothing here keeps a target alive.

A binding never holds its own target (``enable(T, T)`` is legal), and models are never stored in a config.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

__all__ = [
    "Binding",
    "bind",
    "bindings_of",
    "draft_memories",
    "failed_drafts",
    "last_report",
    "loaded_drafts",
    "record_report",
    "unbind",
    "unwrap",
]


class Binding:
    """One `enable()`: the draft it brought and the flag it wrote.

    Args:
        target: the model it is for.
        draft: its draft model, may be the target itself; None if the draft is named in `flag` only.
        flag: plain data, as written into the target's generation config.
        is_auto: whether no method was named: the flag of a draft that is an object says "draft_model", since whoever
            reads it from a file or a copy has no draft, but here other drafters may help it.
    """

    def __init__(self, target: Any, draft: Any, flag: dict[str, Any], is_auto: bool = False) -> None:
        self._is_own_draft = draft is target
        self._draft = None if self._is_own_draft else draft
        self._target = weakref.ref(target)
        self.flag, self.is_auto = flag, is_auto

    @property
    def draft(self) -> Any:
        """The draft model, or None."""
        return self._target() if self._is_own_draft else self._draft


class _Bindings(list):
    """A target's bindings, kept in its `__dict__`: models that draft for one another are then garbage like any cycle.
    A copy of the target, or one read from a pickle, starts without any."""

    def __deepcopy__(self, memo: dict) -> "_Bindings":
        return _Bindings()

    def __reduce__(self) -> tuple:
        return _Bindings, ()


_LOCK = threading.RLock()
_ATTRIBUTE = "_hf_specdec_bindings"
_REPORTS: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
_LOADED: "weakref.WeakKeyDictionary[Any, dict[Any, Any]]" = weakref.WeakKeyDictionary()
_FAILED: "weakref.WeakKeyDictionary[Any, dict[Any, str]]" = weakref.WeakKeyDictionary()
_THREAD = threading.local()
#: cache object → what a drafter keeps beside it
draft_memories: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def bindings_of(target: Any) -> Sequence[Binding]:
    """The live bindings of `target`, oldest first."""
    return vars(target).get(_ATTRIBUTE, ())


def bind(target: Any, bound: Binding) -> None:
    """Add a binding; the newest wins."""
    vars(target).setdefault(_ATTRIBUTE, _Bindings()).append(bound)


def unbind(target: Any, bound: Binding) -> None:
    """Remove a binding; the last one leaves nothing in the target."""
    bindings = vars(target)[_ATTRIBUTE]
    bindings.remove(bound)
    if not bindings:
        del vars(target)[_ATTRIBUTE]


def loaded_drafts(target: Any) -> dict[Any, Any]:
    """Drafts that were loaded for `target` because data named them; they live as long as it does."""
    with _LOCK:
        return _LOADED.setdefault(target, {})


def failed_drafts(target: Any) -> dict[Any, str]:
    """Why drafts that data named could not be loaded for `target`, by what was asked for."""
    with _LOCK:
        return _FAILED.setdefault(target, {})


def unwrap(model: Any) -> Any:
    """The transformers model inside a pipeline, a PEFT model or a compiled wrapper."""
    for _ in range(8):
        if hasattr(model, "generate") and hasattr(model, "get_base_model"):  # peft
            model = model.get_base_model()
        elif hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif not hasattr(model, "generate") and hasattr(model, "model"):  # pipeline
            model = model.model
        else:
            break
    return model


def record_report(target: Any, report: Any) -> None:
    """Remember what the last call on `target` did, for this thread and as the newest of all."""
    if not hasattr(_THREAD, "reports"):
        _THREAD.reports = weakref.WeakKeyDictionary()
    _THREAD.reports[target] = report
    with _LOCK:
        _REPORTS[target] = report


def last_report(target: Any) -> Any:
    """The last report of this thread, else (streamers run `generate` in a thread of their own) of any thread, else
    None."""
    own = getattr(_THREAD, "reports", {}).get(target)
    with _LOCK:
        return own if own is not None else _REPORTS.get(target)
