"""Adding up a layout: what each device holds, what is left, how fast it is.

What accelerate's layout comes to is added up here again, piece by piece, before it is believed. Knows nothing of how
layouts are found (`planner`).
"""

__all__ = ["Attempt", "added_up", "layout_of"]

from collections.abc import Mapping
from dataclasses import dataclass

from hf_specdec.placement.machine import Device, Key, Machine
from hf_specdec.placement.plan import DeviceUse
from hf_specdec.placement.sizes import ModelSizes, Workload
from hf_specdec.placement.speed import Layout, Speeds, pass_bytes_by_device, predict


@dataclass(frozen=True)
class Attempt:
    """One layout of both models, added up.

    Attributes:
        layout, draft: where each lies; `draft` is None without one.
        device_map: of the target.
        uses: by device.
        speeds: predicted.
    """

    layout: Layout
    draft: Layout | None
    device_map: dict[str, Key]
    uses: tuple[DeviceUse, ...]
    speeds: Speeds

    @property
    def fits(self) -> bool:
        """Whether every device keeps its headroom."""
        return all(use.fits for use in self.uses)

    @property
    def speed(self) -> float:
        """Predicted tokens per second, drafting if there is a draft."""
        return self.speeds.plain if self.speeds.speculative is None else self.speeds.speculative

    @property
    def lacking(self) -> int:
        """Bytes that are missing, over all devices."""
        return sum(max(0, use.reserve - use.headroom) for use in self.uses)

    @property
    def draft_device(self) -> Key | None:
        """Of the draft; None without one."""
        return None if self.draft is None else self.draft.main

    @property
    def is_beside_head(self) -> bool:
        """Whether the draft lies where the target's logits appear."""
        return self.draft is not None and self.draft.main == head_device(self.layout)

    @property
    def least_headroom(self) -> int:
        """What is left on the fullest of the devices that are used."""
        return min(use.headroom for use in self.uses if use.needed)


def _place(name: str, device_map: Mapping[str, Key]) -> Key:
    """The device of module `name`: the longest entry that is it or above it."""
    while name not in device_map:
        if not name:
            raise KeyError("The device map has no place for a module.")
        name = name.rpartition(".")[0]
    return device_map[name]


def layout_of(sizes: ModelSizes, device_map: Mapping[str, Key]) -> Layout:
    """The model's pieces on the devices of `device_map`; what is offloaded runs on the first GPU that is used."""
    places = {piece.name: _place(piece.name, device_map) for piece in sizes.pieces}
    gpus = [key for key in device_map.values() if isinstance(key, int)]
    return Layout(sizes, places, min(gpus, default="cpu"))


def head_device(layout: Layout) -> Key:
    if layout.sizes.head in layout.places:
        place = layout.places[layout.sizes.head]
        return place if isinstance(place, int) or place == layout.main else layout.main
    return layout.main


def added_up(
    target: ModelSizes,
    device_map: dict[str, Key],
    draft: ModelSizes | None,
    draft_key: Key | None,
    machine: Machine,
    workload: Workload,
) -> Attempt:
    """Both models, laid out: the target by `device_map`, the draft whole on `draft_key` (None: without it)."""
    layout = layout_of(target, device_map)
    drafting = None if draft is None or draft_key is None else layout_of(draft, {"": draft_key})
    uses = tuple(_use(device, layout, drafting, workload) for device in machine.devices)
    return Attempt(layout, drafting, device_map, uses, predict(layout, drafting, machine, workload))


def _use(device: Device, layout: Layout, draft: Layout | None, workload: Workload) -> DeviceUse:
    key, sizes = device.key, layout.sizes
    here = [piece for piece in sizes.pieces if layout.places[piece.name] == key]
    caches = sizes.cache_bytes(workload)
    runs = {layout.runs_on(piece) for piece in sizes.pieces}
    passes = sizes.pass_bytes(workload) if key in runs else 0
    if key == layout.main:
        passes += max((layout.held_bytes(piece) for piece in sizes.pieces if layout.is_spilled(piece)), default=0)
    drafts = draft is not None and draft.main == key
    if draft is not None and drafts:
        passes += draft.sizes.pass_bytes(workload, is_draft=True)
    return DeviceUse(
        label=device.label,
        name=device.name,
        memory=device.memory_bytes,
        reserve=device.memory_bytes - device.usable_bytes,
        layers=tuple(sorted({piece.layer for piece in here if piece.layer is not None})),
        has_head=layout.places.get(sizes.head) == key,
        weights=sum(layout.held_bytes(piece) for piece in here),
        cache=sum(caches[layer] for layer, place in layout.layer_devices().items() if place == key),
        passes=passes,
        draft_weights=draft.sizes.held_bytes if draft is not None and drafts else 0,
        draft_cache=sum(draft.sizes.cache_bytes(workload)) if draft is not None and drafts else 0,
        target_read=round(pass_bytes_by_device(layout, workload).get(key, 0)),
        draft_read=round(pass_bytes_by_device(draft, workload).get(key, 0)) if draft is not None else 0,
    )
