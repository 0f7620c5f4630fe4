"""The choice of a layout: reserve, lay out, add up again, take the fastest that fits.

1. Reserved before any weight: headroom, the passes' activations, the draft with its cache; the target's cache goes with
   its layers.
2. `lay_out` (accelerate, through `host.placement`) puts the target's modules into what is left.
3. What lies where is added up here and compared with the devices; the cache of an offloaded layer lies where it runs.
4. Of the layouts that fit, with the draft on each device and without one, the fastest by `speed` is taken; where only
   the target has room, the one without.
"""

__all__ = ["LayOut", "make_plan"]

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from hf_specdec.placement.adding_up import Attempt, added_up, layout_of
from hf_specdec.placement.machine import Key, Machine, gib
from hf_specdec.placement.plan import ModelUse, Plan
from hf_specdec.placement.sizes import ModelSizes, Workload
from hf_specdec.placement.speed import Layout, pass_bytes_by_device

NEARLY = 1.02
"""A draft leaves the device of the target's head only for more than that."""
MAX_ROUNDS = 8
"""Of reserving the caches of offloaded layers; each round offloads more or ends."""


@runtime_checkable
class LayOut(Protocol):
    """Puts the target's modules on devices."""

    def __call__(
        self, budgets: Mapping[Key, int], cache_bytes: Sequence[int], *, is_balanced: bool, may_spill: bool
    ) -> dict[str, Key] | None:
        """A device map within `budgets` bytes, `cache_bytes` of each layer's cache lying with the layer.

        Args:
            budgets: by device, in the order in which they are filled.
            cache_bytes: by layer.
            is_balanced: share the weights evenly among GPUs, instead of filling one after the other.
            may_spill: whether "cpu" and "disk" may be used beside GPUs, "disk" beside the CPU.

        Returns:
            None if it cannot be done.
        """
        ...


def make_plan(
    target: ModelSizes, draft: ModelSizes | None, machine: Machine, workload: Workload, lay_out: LayOut
) -> Plan:
    """The best layout of both models on `machine`.

    Returns:
        A plan; with ``fits`` False it holds the attempt that lacked least.
    """
    plain = _best(_attempts(target, None, None, machine, workload, lay_out))
    if draft is None:
        return _plan(plain, target, None, machine, workload)
    drafted = _with_draft(target, draft, machine, workload, lay_out)
    why = _why_without(plain, drafted)
    if why is not None:
        return _plan(plain, target, draft, machine, workload).noted(why)
    return _plan(drafted, target, draft, machine, workload)


def _with_draft(
    target: ModelSizes, draft: ModelSizes, machine: Machine, workload: Workload, lay_out: LayOut
) -> Attempt | None:
    """The best attempt with the draft on some device, beside the target's head if that costs next to nothing."""
    each = [
        _best(_attempts(target, draft, device.key, machine, workload, lay_out))
        for device in machine.devices
        if device.key != "disk"
    ]
    found = [attempt for attempt in each if attempt is not None]
    fitting = [attempt for attempt in found if attempt.fits]
    if not fitting:
        return min(found, key=lambda attempt: attempt.lacking, default=None)
    fastest = max(attempt.speed for attempt in fitting)
    near = [attempt for attempt in fitting if attempt.speed * NEARLY >= fastest]
    return max(near, key=lambda each: (-each.layout.num_running, each.is_beside_head, each.least_headroom))


def _why_without(plain: Attempt | None, drafted: Attempt | None) -> str | None:
    """Why the target goes without the draft, which is slower or has no room, or None."""
    if plain is None or not plain.fits:
        return None
    if drafted is None or not drafted.fits:
        lacking = "" if drafted is None else f" ({gib(drafted.lacking)} GiB are lacking)"
        return (
            f"No draft: there is no room for it beside the target{lacking}; look-ups draft. A smaller draft, one in "
            "nf4 or a shorter max_length may have room."
        )
    pushed = drafted.layout.spilled_bytes - plain.layout.spilled_bytes
    on_cpu = drafted.draft_device == "cpu" and drafted.layout.main != "cpu"
    if drafted.speed > plain.speed or not (pushed > 0 or on_cpu):
        return None
    layers = drafted.layout.spilled_layers - plain.layout.spilled_layers
    does = f"would push {layers} layers ({gib(pushed)} GiB) of the target off" if pushed > 0 else "would run on the CPU"
    return (
        f"No draft: it {does}, and {drafted.speed:.3g} tokens/s with it are fewer than {plain.speed:.3g} without; "
        "look-ups draft."
    )


def _best(attempts: Iterator[Attempt]) -> Attempt | None:
    """The fastest that fits, of equally fast ones the one that leaves most on its fullest device; else the nearest."""
    found = list(attempts)
    fitting = [attempt for attempt in found if attempt.fits]
    if fitting:
        return max(fitting, key=lambda attempt: (round(attempt.speed, 6), attempt.least_headroom))
    return min(found, key=lambda attempt: attempt.lacking, default=None)


def _attempts(
    target: ModelSizes,
    draft: ModelSizes | None,
    draft_key: Key | None,
    machine: Machine,
    workload: Workload,
    lay_out: LayOut,
) -> Iterator[Attempt]:
    caches = target.cache_bytes(workload)
    budgets = _budgets(target, draft, draft_key, machine, workload)
    whole = target.held_bytes + sum(caches)
    ran = {device.key: budgets[device.key] for device in machine.running}
    maps: list[dict[str, Key]] = [{"": key} for key, budget in ran.items() if whole <= budget]
    if len(ran) > 1 and whole <= sum(ran.values()):
        found = (lay_out(ran, caches, is_balanced=is_balanced, may_spill=False) for is_balanced in (True, False))
        maps += [device_map for device_map in found if device_map is not None]
    attempts = [added_up(target, device_map, draft, draft_key, machine, workload) for device_map in maps]
    yield from attempts
    if any(attempt.fits for attempt in attempts):
        return  # with layers offloaded it would not be faster
    if len(machine.devices) > len(ran):
        yield from _spilling(target, draft, draft_key, machine, workload, lay_out, budgets, caches)
    yield added_up(target, _overfull(ran, whole, caches, lay_out), draft, draft_key, machine, workload)


def _overfull(ran: Mapping[Key, int], whole: int, caches: Sequence[int], lay_out: LayOut) -> dict[str, Key]:
    """A layout that does not fit, each running device taking its share: shows how much is lacking where."""
    for more in (1.1, 1.3, 1.6) if len(ran) > 1 else ():
        room = {
            key: int(more * whole * max(budget, 1) / sum(max(each, 1) for each in ran.values()))
            for key, budget in ran.items()
        }
        found = lay_out(room, caches, is_balanced=False, may_spill=False)
        if found is not None:
            return found
    return {"": max(ran, key=lambda key: ran[key])}


def _spilling(
    target: ModelSizes,
    draft: ModelSizes | None,
    draft_key: Key | None,
    machine: Machine,
    workload: Workload,
    lay_out: LayOut,
    budgets: Mapping[Key, int],
    caches: Sequence[int],
) -> Iterator[Attempt]:
    """With layers offloaded: their caches lie where they run, and take room there."""
    main, ratio = machine.running[0].key, _spilled_ratio(target)
    stays = sum(budgets[device.key] for device in machine.running) / (target.held_bytes + sum(caches))
    reserved = int(sum(caches) * max(0.0, 0.9 - stays))  # near what will be offloaded, so that few rounds are needed
    for _ in range(MAX_ROUNDS):
        room = {
            key: int((budget + reserved) * ratio) if key != main and not isinstance(key, int) else budget
            for key, budget in budgets.items()
        }
        room[main] = max(0, room[main] - reserved)
        found = lay_out(room, caches, is_balanced=False, may_spill=True)
        if found is None or set(found.values()) == {"disk"}:  # nothing is left to run on
            return
        if target.spills_plain and set(found.values()) == {"cpu", "disk"}:  # bitsandbytes would then quantize nothing
            return
        attempt = added_up(target, found, draft, draft_key, machine, workload)
        needed = _spilled_cache(attempt.layout, caches)
        if needed <= reserved:
            yield attempt
            return
        reserved = needed


def _spilled_cache(layout: Layout, caches: Sequence[int]) -> int:
    spilled = {piece.layer for piece in layout.sizes.pieces if piece.layer is not None and layout.is_spilled(piece)}
    return sum(caches[layer] for layer in spilled)


def _spilled_ratio(target: ModelSizes) -> float:
    """By how much less may be offloaded because it is not quantized there."""
    if not target.spills_plain:
        return 1.0
    sizes: dict[int, list[int]] = {}
    for piece in target.pieces:
        if piece.layer is not None:
            both = sizes.setdefault(piece.layer, [0, 0])
            both[0] += piece.held_bytes
            both[1] += piece.plain_bytes
    return min((held / plain for held, plain in sizes.values() if plain), default=1.0)


def _budgets(
    target: ModelSizes, draft: ModelSizes | None, draft_key: Key | None, machine: Machine, workload: Workload
) -> dict[Key, int]:
    """What is left on each device for the target's weights and caches."""
    running = {device.key for device in machine.running}
    budgets = {}
    for device in machine.devices:
        taken = target.pass_bytes(workload) if device.key in running else 0
        if draft is not None and device.key == draft_key:
            taken += draft.held_bytes + sum(draft.cache_bytes(workload)) + draft.pass_bytes(workload, is_draft=True)
        budgets[device.key] = max(0, device.usable_bytes - taken)
    return budgets


def _plan(
    attempt: Attempt | None, target: ModelSizes, draft: ModelSizes | None, machine: Machine, workload: Workload
) -> Plan:
    if attempt is None:  # nothing could even be laid out
        keys = [device.key for device in machine.running]
        attempt = added_up(target, {"": keys[0]}, None, None, machine, workload)
    read = sum(pass_bytes_by_device(attempt.layout, workload).values())
    drafting = attempt.draft
    if drafting is None and draft is not None:
        drafting = layout_of(draft, {"": attempt.layout.main})
    draft_use = None
    if drafting is not None:
        draft_use = ModelUse.of(drafting.sizes, workload, sum(pass_bytes_by_device(drafting, workload).values()))
    used = {use.label for use in attempt.uses if use.needed}
    plan = Plan(
        fits=attempt.fits,
        devices=attempt.uses,
        device_map=attempt.device_map if attempt.fits else {},
        draft_device=attempt.draft_device,
        target=ModelUse.of(target, workload, read),
        draft=draft_use,
        workload=workload,
        plain_tokens_per_second=attempt.speeds.plain,
        speculative_tokens_per_second=attempt.speeds.speculative,
        draft_length=attempt.speeds.draft_length,
        is_speed_assumed=any(device.is_assumed and device.label in used for device in machine.devices),
    )
    return plan.noted(*_notes(attempt, plan))


def _notes(attempt: Attempt, plan: Plan) -> Iterator[str]:
    layout, draft = attempt.layout, attempt.draft
    if attempt.fits and (spilled := layout.spilled_bytes):
        count = layout.spilled_layers
        plain = ", unquantized, as this quantizer leaves what it offloads" if layout.sizes.spills_plain else ""
        yield (
            f"{count} of {layout.sizes.num_layers} layers are offloaded{plain}: every pass copies {gib(spilled)} "
            "GiB, for 1 row as for many, so long drafts pay."
        )
    for sizes in (layout.sizes, *([] if draft is None else [draft.sizes])):
        if sizes.max_positions is not None and plan.workload.max_length > sizes.max_positions:
            yield (
                f"max_length={plan.workload.max_length} is more than the {sizes.max_positions} positions that "
                f"{sizes.name} was made for."
            )
    if draft is None or plan.draft is None:
        return
    if plan.draft.weights > plan.target.weights:
        yield (
            f"The draft ({gib(plan.draft.weights)} GiB) is larger than the target ({gib(plan.target.weights)} GiB): a "
            "draft pass hardly costs less than a target pass. draft_quantization='nf4' or a smaller draft would help."
        )
    if attempt.fits and plan.draft_length == 0:
        yield (
            f"At an acceptance rate of {plan.workload.acceptance_rate:g} this draft is not expected to pay here; with "
            'num_speculative_tokens="auto" it is asked only where measurements say otherwise.'
        )
