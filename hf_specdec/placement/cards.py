"""Known graphics cards: memory, bandwidth and arithmetic by their makers' data sheets.

Memory is what the driver shows (``nvidia-smi``), a little less than what the box says. Arithmetic is dense bfloat16
with float32 sums (float16 where a card has no bfloat16).

Sources: NVIDIA's data sheets "V100", "T4", "A10", "A100", "L4", "L40S", "H100", "H200", "RTX A6000", "RTX 6000 Ada" and
"HGX B200"; NVIDIA's architecture white papers on GA102, AD102 and RTX Blackwell for the GeForce cards; AMD's data sheet
"Instinct MI300X".
"""

__all__ = ["CARDS", "Card", "find_card"]

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A card: GiB, bytes per second, floating-point operations per second."""

    name: str
    gib: float
    bandwidth: float
    arithmetic: float


def _card(name: str, gib: float, gigabytes_per_second: int, teraflops: int) -> Card:
    return Card(name, gib, gigabytes_per_second * 1e9, teraflops * 1e12)


CARDS = (
    _card("T4", 15.0, 320, 65),
    _card("V100", 16.0, 900, 125),
    _card("V100 32GB", 32.0, 900, 125),
    _card("A10", 22.5, 600, 125),
    _card("A100 40GB", 40.0, 1555, 312),
    _card("A100 80GB", 80.0, 2039, 312),
    _card("L4", 22.5, 300, 121),
    _card("L40S", 45.0, 864, 362),
    _card("H100", 79.6, 3350, 989),
    _card("H100 PCIe", 79.6, 2000, 756),
    _card("H200", 140.4, 4800, 989),
    _card("B200", 179.0, 8000, 2250),
    _card("RTX 3090", 24.0, 936, 71),
    _card("RTX 4080", 16.0, 717, 97),
    _card("RTX 4090", 24.0, 1008, 165),
    _card("RTX 5090", 31.8, 1792, 209),
    _card("RTX A6000", 48.0, 768, 155),
    _card("RTX 6000 Ada", 48.0, 960, 364),
    _card("MI300X", 191.7, 5300, 1307),
)


OTHER_CARDS = frozenset({"laptop", "mobile", "max"})
"""Words of cards that share a desktop card's name and have less of everything ("Max-Q")."""
SHARED_WORDS = frozenset({"rtx", "pcie", "ada"})


def find_card(name: str) -> Card | None:
    """The known card that `name` means ("RTX 4090", "4090", "NVIDIA A100-SXM4-80GB"), None if there is none."""
    words = _words(name)
    if words & OTHER_CARDS:
        return None
    # The most specific first: "A100 80GB" before "A100 40GB" has no say, "V100 32GB" before "V100".
    fitting = [card for card in CARDS if _words(card.name) <= words]
    if fitting:
        return max(fitting, key=lambda card: len(_words(card.name)))
    short = [card for card in CARDS if words & _models(card) and words <= _words(card.name)]
    return short[0] if short else None


def _models(card: Card) -> set[str]:
    """Words of its name that no amount of memory and no family of cards goes by."""
    return {word for word in _words(card.name) - SHARED_WORDS if not re.fullmatch(r"\d+gb", word)}


def _words(name: str) -> set[str]:
    """Words that tell cards apart: "RTX A6000" is one, "RTX 6000 Ada" another."""
    spaced = re.sub(r"rtx(?=\w)", "rtx ", name.lower())
    words = set(re.findall(r"[a-z0-9]+", spaced))
    return words - {"nvidia", "amd", "geforce", "tesla", "instinct", "gpu", "graphics", "generation"}
