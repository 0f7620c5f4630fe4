"""A plan: what lies where, what is left, and how fast it should be."""

__all__ = ["DeviceUse", "ModelUse", "Plan"]

from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_specdec.placement.machine import GIB, Key, gib
from hf_specdec.placement.sizes import ModelSizes, Workload


@dataclass(frozen=True)
class DeviceUse:
    """One device, in bytes.

    Attributes:
        label: as torch writes it.
        name: of the card, or "".
        memory: of the device.
        reserve: of it, what should stay free.
        layers: indices of the target's layers that lie here.
        has_head: whether the target's output head lies here.
        weights: of the target, the quantizer's constants included.
        cache: of the target, at most.
        passes: activations and logits of both, at most; a copy of the largest offloaded module.
        draft_weights, draft_cache: of the draft.
        target_read, draft_read: what one pass reads, caches half full.
    """

    label: str
    name: str
    memory: int
    reserve: int
    layers: tuple[int, ...]
    has_head: bool
    weights: int
    cache: int
    passes: int
    draft_weights: int
    draft_cache: int
    target_read: int
    draft_read: int

    @property
    def needed(self) -> int:
        """All that the plan puts here."""
        return self.weights + self.cache + self.passes + self.draft_weights + self.draft_cache

    @property
    def headroom(self) -> int:
        """What is left of the memory; negative if it does not fit."""
        return self.memory - self.needed

    @property
    def fits(self) -> bool:
        """Whether what should stay free does."""
        return self.headroom >= self.reserve


@dataclass(frozen=True)
class ModelUse:
    """A model's totals: name, dtype, quantization, bytes of weights (as ``get_memory_footprint()``), of the quantizer's
    constants, of the cache; bytes that a pass reads; whether the checkpoint
    is quantized already."""

    name: str
    dtype: str
    quantization: str | None
    weights: int
    constants: int
    cache: int
    read: int
    is_pre_quantized: bool = False

    @classmethod
    def of(cls, sizes: ModelSizes, workload: Workload, read: float) -> "ModelUse":
        """The totals of `sizes`."""
        constants = sizes.held_bytes - sizes.weight_bytes
        cache = sum(sizes.cache_bytes(workload))
        return cls(
            sizes.name,
            sizes.dtype,
            sizes.quantization,
            sizes.weight_bytes,
            constants,
            cache,
            round(read),
            sizes.is_pre_quantized,
        )

    @property
    def held(self) -> int:
        """Weights, constants and cache."""
        return self.weights + self.constants + self.cache


@dataclass(frozen=True)
class Plan:
    """Where target and draft go, and what that gives.

    Attributes:
        fits: whether everything has its place.
        devices: what each device holds; of the nearest attempt if nothing fits.
        device_map: of the target, as ``from_pretrained`` takes it; empty if nothing fits.
        draft_device: of the draft; None without one.
        target, draft: totals; `draft` is also there when the plan goes without it.
        workload: what was reserved for.
        plain_tokens_per_second, speculative_tokens_per_second: predicted, of all rows; None without a draft.
        draft_length: the K that the second belongs to; 0: drafting is not expected to pay.
        is_speed_assumed: whether a bandwidth behind them is a guess.
        notes: what a user should know.
        changes: if nothing fits, what would, nearest first.
    """

    fits: bool
    devices: tuple[DeviceUse, ...]
    device_map: dict[str, Key]
    draft_device: Key | None
    target: ModelUse
    draft: ModelUse | None
    workload: Workload
    plain_tokens_per_second: float
    speculative_tokens_per_second: float | None
    draft_length: int
    is_speed_assumed: bool
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    def noted(self, *notes: str) -> "Plan":
        """The plan with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    @property
    def num_offloaded(self) -> int:
        """Layers whose weights are copied in every pass."""
        gpus = {device.label for device in self.devices if device.label.startswith("cuda") and device.weights}
        running = gpus or {"cpu"}
        return len({layer for device in self.devices if device.label not in running for layer in device.layers})

    @property
    def shortage(self) -> str:
        """Why nothing fits, in numbers."""
        parts = [
            f"target {gib(self.target.weights + self.target.constants)} GiB, its KV cache {gib(self.target.cache)} GiB"
        ]
        if self.draft is not None and self.draft_device is not None:
            parts.append(f"draft {gib(self.draft.held)} GiB with its cache")
        parts.append(f"passes {gib(sum(device.passes for device in self.devices))} GiB")
        there = ", ".join(f"{d.label} {gib(d.memory - d.reserve)} of {gib(d.memory)} GiB" for d in self.devices)
        over = "; ".join(
            f"{d.label} would need {gib(d.needed)} GiB, {gib(d.needed + d.reserve - d.memory)} GiB too much"
            for d in self.devices
            if not d.fits
        )
        workload = f"max_batch={self.workload.max_batch}, max_length={self.workload.max_length}"
        return f"Not enough memory for {self.target.name} ({workload}): {', '.join(parts)}; usable: {there}." + (
            f" {over}." if over else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON data; bytes."""
        data = asdict(self)
        for use, device in zip(data["devices"], self.devices, strict=True):
            use |= {"headroom": device.headroom, "fits": device.fits, "layers": list(device.layers)}
        data["draft_device"] = None if self.draft_device is None else _label(self.draft_device)
        data["unit"] = {"bytes_per_gib": GIB}
        return {**data, "notes": list(self.notes), "changes": list(self.changes), "devices": list(data["devices"])}


def _label(key: Key) -> str:
    return f"cuda:{key}" if isinstance(key, int) else key
