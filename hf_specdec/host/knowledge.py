"""What was measured of a target and its draft, kept for later calls: weak by both models, apart by where they run.

Survives `Handle.remove()`. Also the guess that stands before anything was measured: a pass reads all weights once, so
seconds go by bytes, and bytes that are offloaded take far longer than those in place.
"""

import copy
import threading
import weakref
from typing import Any

import torch

from hf_specdec.speed_model import PairKnowledge

__all__ = ["cost_coefficient", "knowledge_of", "known_of", "pass_bytes"]

OFFLOAD_FACTOR = 20
"""Seconds of a byte that has to be fetched first ÷ seconds of one in place; a guess, replaced by measurement."""

_LOCK = threading.Lock()
_KNOWN: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[Any, PairKnowledge]]]" = (
    weakref.WeakKeyDictionary()
)


def pass_bytes(model: Any) -> float:
    """Bytes of weights that a forward reads, offloaded ones counted `OFFLOAD_FACTOR` times. Embedding tables are looked
    up, not read, unless they are the output head too."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    looked_up = None
    if table is not None and (head is None or getattr(head, "weight", None) is not table.weight):
        looked_up = table.weight
    total = 0.0
    for parameter in model.parameters():
        if parameter is not looked_up:
            factor = OFFLOAD_FACTOR if parameter.device.type == "meta" else 1
            total += parameter.numel() * parameter.element_size() * factor
    total += sum(getattr(module, "packed_bytes", 0) for module in model.modules())  # no Parameter holds them
    return max(total, 1.0)


def cost_coefficient(target: Any, draft: Any) -> float:
    """The draft's pass in target passes, by bytes: a function of the models alone."""
    return pass_bytes(draft) / pass_bytes(target)


def knowledge_of(target: Any, draft: Any, method: str, batch: int, length: int) -> PairKnowledge:
    """The one object that calls of this kind share.

    Args:
        target, draft: the models; `draft` None where none drafts.
        method: the drafter's name.
        batch: rows.
        length: tokens of the text; powers of two are kept apart.
    """
    where = _where(target, draft, method)
    bucket = length.bit_length()
    with _LOCK:
        of_target = _KNOWN.setdefault(target, weakref.WeakKeyDictionary())
        known = of_target.setdefault(target if draft is None else draft, {})
        key = (where, batch, bucket)
        if key not in known:
            near = [other for other in known if other[:2] == key[:2]]
            nearest = min(near, key=lambda other: abs(other[2] - bucket), default=None)
            known[key] = PairKnowledge() if nearest is None else copy.deepcopy(known[nearest])
        return known[key]


def known_of(
    target: Any, draft: Any, method: str, batch: int, length: int, like: PairKnowledge | None = None
) -> PairKnowledge | None:
    """What calls of this kind left, None if there was none yet.

    Args:
        target, draft, method, batch, length: as of `knowledge_of`.
        like: what is known of a draft that this one is a copy of: taken over where nothing is known.
    """
    with _LOCK:
        known = _KNOWN.get(target, {}).get(draft, {})
        is_known = any(key[0] == _where(target, draft, method) and key[1] == batch for key in known)
    if not is_known and like is None:
        return None
    found = knowledge_of(target, draft, method, batch, length)
    if not is_known and like is not None:
        found.take_over(like)
    return found


def _where(target: Any, draft: Any, method: str) -> tuple:
    return method, _place(target), None if draft is None else _place(draft), torch.get_num_threads()


def _place(model: Any) -> tuple[str, str]:
    return str(model.device), str(model.dtype)
