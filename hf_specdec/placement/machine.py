"""The devices that models can be put on: memory, and how fast it is read.

Rates are the data sheet's; `Device.read_rate` is what a pass achieves of them. Knows nothing of models.
"""

__all__ = ["GIB", "Device", "Machine", "gib", "make_machine", "read_bytes", "read_rate"]

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_specdec.placement.cards import Card, find_card

GIB = 1024**3
GB = 1e9
ACHIEVED = 0.85
"""Share of the data sheet's bandwidth that reading weights achieves: 81 to 89 % on H200, H100, A100 and RTX 4090."""
QUANTIZED_ACHIEVED = 0.6
"""Share of that which 4- and 8-bit kernels on a GPU achieve."""
HEADROOM = 0.06
"""Of a GPU, left free: CUDA's context, fragments, what a processor allocates."""
CPU_HEADROOM = 0.10
ASSUMED_GPU = (500 * GB, 60e12)
"""(bytes per second, products per second x 2) of a GPU that is no known card."""
ASSUMED_CPU = (30 * GB, 0.8e12)
"""Two cores with AVX512-BF16: a 1.5B model in bfloat16 takes 121 ms for one row and 4 ms for each further one."""
ASSUMED_DISK = 2 * GB
ASSUMED_LINK = 12 * GB
"""From the CPU's memory to a GPU, pageable, as accelerate's hooks copy."""

MIN_BARE, MAX_BYTES = 2**20, 2**60
"""A number without a unit that is smaller was meant in GiB; no device has more."""

_UNITS: dict[str, int] = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

Key = int | str
"""A device as accelerate names it: the index of a GPU, "cpu" or "disk"."""


@dataclass(frozen=True)
class Device:
    """One place for weights.

    Attributes:
        key: the index of a GPU, "cpu" or "disk".
        memory_bytes: what may be used of it, headroom included.
        bandwidth: bytes per second by the data sheet.
        arithmetic: floating-point operations per second.
        name: of the card, for people.
        headroom: share of the memory that stays free.
        is_assumed: whether the rates are guesses.
    """

    key: Key
    memory_bytes: int
    bandwidth: float
    arithmetic: float = 0.0
    name: str = ""
    headroom: float = HEADROOM
    is_assumed: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether passes run here rather than on the CPU."""
        return isinstance(self.key, int)

    @property
    def usable_bytes(self) -> int:
        """Memory less headroom."""
        return int(self.memory_bytes * (1 - self.headroom))

    @property
    def label(self) -> str:
        """As torch writes it."""
        return f"cuda:{self.key}" if self.is_gpu else str(self.key)

    def read_rate(self, is_quantized: bool = False) -> float:
        """Bytes per second that a pass reads weights with."""
        return self.bandwidth * ACHIEVED * (QUANTIZED_ACHIEVED if is_quantized and self.is_gpu else 1.0)


@dataclass(frozen=True)
class Machine:
    """Devices in the order in which they are filled: GPUs, then "cpu", then "disk"; `link` is bytes per second from the
    CPU's memory to a GPU."""

    devices: tuple[Device, ...]
    link: float = ASSUMED_LINK

    def __getitem__(self, key: Key) -> Device:
        for device in self.devices:
            if device.key == key:
                return device
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(device.key == key for device in self.devices)

    @property
    def running(self) -> tuple[Device, ...]:
        """Where passes can run: the GPUs, or the CPU of a machine without any."""
        return tuple(device for device in self.devices if device.is_gpu) or tuple(
            device for device in self.devices if device.key == "cpu"
        )


def gib(num_bytes: int | float) -> str:
    """`num_bytes` in GiB, for people; small amounts with more digits."""
    value = num_bytes / GIB
    return f"{value:.2f}" if abs(value) >= 0.05 or not num_bytes else f"{value:.2g}"


def read_bytes(text: str | int | float) -> int:
    """A number of bytes: ``24GiB``, ``800MB``, ``1e9`` or a number.

    Raises:
        TypeError: neither text nor a number.
        ValueError: it is none, negative, too large, or text of a small number without a unit.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return _checked(text, text)
    if not isinstance(text, str):
        raise TypeError(f"An amount of memory must be text or a number of bytes, got {text!r}. Write it as '24GiB'.")
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"Cannot read {text!r} as an amount of memory. Write it as 24GiB, 800MB or a number of bytes.")
    unit = found[2].upper()
    amount = float(found[1]) * (_BINARY if found[3] else _UNITS)[unit]
    if 0 < amount < MIN_BARE and not unit:
        raise ValueError(f"{text.strip()!r} would be {amount:g} bytes. Write an amount of memory with its unit: 24GiB.")
    return _checked(amount, text)


def _checked(amount: int | float, text: object) -> int:
    if math.isfinite(amount) and 0 <= amount <= MAX_BYTES:
        return int(amount)
    raise ValueError(f"{text!r} is no amount of memory: it must be between 0 and {MAX_BYTES:.2g} bytes.")


def read_rate(text: str) -> float:
    """Bytes per second: ``1008GB/s``, ``3.35TB/s``; a bare number is GB/s.

    Raises:
        ValueError: it is none, or not positive.
    """
    try:
        bare = text.strip().lower().removesuffix("/s")
        rate = float(bare) * GB if re.fullmatch(r"\d+(\.\d+)?", bare) else float(read_bytes(bare))
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise ValueError(f"Cannot read {text!r} as a bandwidth. Write it as 1008GB/s or 3.35TB/s.")
    return rate


def make_machine(
    memory: Mapping[Key, int],
    names: Mapping[Key, str] | None = None,
    bandwidths: Mapping[str, float] | None = None,
    headroom: float | None = None,
) -> Machine:
    """The machine with `memory` bytes on each device.

    Args:
        memory: bytes by device key.
        names: names of cards by device key; a known one gives its rates.
        bandwidths: bytes per second by "0", "1", …, "gpu" (every GPU), "cpu", "disk", or "link" (CPU to GPU).
        headroom: share of each device that stays free; by default 6 % of a GPU, 10 % of the CPU, none of a disk.

    Raises:
        ValueError: a bandwidth that is not positive.
    """
    given, devices = dict(bandwidths or {}), []
    for place, rate in given.items():
        if not 0 < rate < math.inf:
            raise ValueError(f"The bandwidth of {place!r} must be positive, got {rate}.")
    for key in sorted(memory, key=_rank):
        name = (names or {}).get(key, "")
        card = find_card(name) if name else None
        rates, is_assumed = _rates(key, card)
        told = given.get(str(key), given.get("gpu") if isinstance(key, int) else None)
        share = 0.0 if key == "disk" else headroom
        if share is None:
            share = HEADROOM if isinstance(key, int) else CPU_HEADROOM
        devices.append(Device(key, memory[key], told or rates[0], rates[1], name, share, is_assumed and told is None))
    return Machine(tuple(devices), given.get("link", ASSUMED_LINK))


def _rank(key: Key) -> tuple[int, int]:
    return (0, key) if isinstance(key, int) else (1 + (key == "disk"), 0)


def _rates(key: Key, card: Card | None) -> tuple[tuple[float, float], bool]:
    if card is not None:
        return (card.bandwidth, card.arithmetic), False
    if isinstance(key, int):
        return ASSUMED_GPU, True
    return (ASSUMED_CPU, True) if key == "cpu" else ((ASSUMED_DISK, 0.0), True)


def labels(devices: Iterable[Device]) -> str:
    """`devices` with their memory, for messages."""
    return ", ".join(f"{device.label} {gib(device.memory_bytes)} GiB" for device in devices) or "no device"
