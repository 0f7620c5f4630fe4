"""What would fit where a plan does not: one change at a time, nearest first.

Nearest is what changes the result least: the draft's precision, a context at least half as long, the target's
precision, no draft, a much shorter context, offload.
"""

__all__ = ["Replan", "changes_that_fit", "what_keeps_the_draft"]

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from hf_specdec.placement.machine import gib
from hf_specdec.placement.plan import Plan

STEP = 256
"""Lengths are looked at in these steps."""
PLENTY = 1 << 50


@runtime_checkable
class Replan(Protocol):
    """Plans again, with one thing changed."""

    def __call__(
        self,
        *,
        quantization: str | None = None,
        draft_quantization: str | None = None,
        max_length: int | None = None,
        has_draft: bool = True,
        spill_to: str | None = None,
        spill_bytes: int = PLENTY,
    ) -> Plan | None:
        """The plan, or None where the change makes no sense."""
        ...


def changes_that_fit(plan: Plan, replan: Replan) -> list[str]:
    """Sentences, nearest change first; empty if nothing helps."""
    return list(_changes(plan, replan))


def what_keeps_the_draft(plan: Plan, replan: Replan) -> str | None:
    """A sentence on a change under which a plan that fits without its draft has room for it; None if there is none."""
    if plan.draft is None or plan.draft_device is not None or plan.draft.quantization is not None:
        return None
    found = replan(draft_quantization="nf4")
    if found is None or not found.fits or found.draft_device is None:
        return None
    return "With the draft in nf4 (draft_quantization='nf4') it would stay."


def _changes(plan: Plan, replan: Replan) -> Iterator[str]:
    has_draft = plan.draft is not None
    if plan.draft is not None and plan.draft.quantization is None:
        found = replan(draft_quantization="nf4")
        if found is not None and found.fits and found.draft_device is not None:
            yield "the draft in nf4"
    length = _longest(plan, replan)
    asked = plan.workload.max_length
    if length is not None and 2 * length >= asked:
        yield f"max_length {length} instead of {asked}"
    for quantization in _lower(plan.target.quantization):
        found = replan(quantization=quantization)
        if found is not None and found.fits:
            size = gib(found.target.weights + found.target.constants)
            without = "" if found.draft_device is not None or not has_draft else ", without the draft"
            yield f"the target in {quantization} ({size} GiB){without}"
    if has_draft and (found := replan(has_draft=False)) is not None and found.fits:
        yield "no draft (look-ups draft), or a smaller one"
    if length is not None and 2 * length < asked:
        yield f"max_length {length} instead of {asked}"
    for place, what in (("cpu", "the CPU"), ("disk", "disk")):
        found = replan(spill_to=place)
        if found is None or not found.fits:
            continue
        held = sum(device.weights for device in found.devices if device.label == place)
        without = "" if found.draft_device is not None or not has_draft else ", without the draft"
        if held and not found.num_offloaded:
            yield f"the whole target on {what}, which takes {gib(held)} GiB there{without}"
        elif found.num_offloaded:
            yield f"offload of {found.num_offloaded} layers to {what}, which takes {gib(held)} GiB there{without}"
        elif found.draft_device == place:
            yield f"the draft on {what}"


def _lower(quantization: str | None) -> tuple[str, ...]:
    return {None: ("int8", "nf4"), "int8": ("nf4",)}.get(quantization, ())


def _longest(plan: Plan, replan: Replan) -> int | None:
    """The longest shorter max_length that fits, in steps; None if none does."""
    low, high = 0, (plan.workload.max_length - 1) // STEP
    while low < high:
        middle = (low + high + 1) // 2
        found = replan(max_length=middle * STEP)
        if found is not None and found.fits:
            low = middle
        else:
            high = middle - 1
    return low * STEP or None
