"""The nets of a run, by name: made when first asked for, kept until `free`.

    base            the small float32 net, on nf4's grid where bitsandbytes works
    target          "7b bf16", "7b nf4" (one function, on the grid), "70b nf4"
    draft           "0.5b" (many layers) or "small" (few), one function each per acceptance rate

Knows nothing of what is measured.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.gpu import nf4
from benchmarks.gpu.nets import (
    LINEARS,
    Shape,
    assemble,
    base_net,
    bisect,
    cut_vocabulary,
    noise_for,
    overlap,
    scale_head,
    texts,
    with_noise,
)
from benchmarks.gpu.widening import Widening, widen

__all__ = ["FULL", "TINY", "Models", "Sizes"]

BASE_SEED, NOISE_SEED, TEXT_SEED, OTHER_SEED = 0, 1, 2, 3
TOP_PROBABILITY = 0.6
LARGEST_NOISE = 0.6


@dataclass(frozen=True)
class Sizes:
    """Everything that `--tiny` makes smaller.

    Attributes:
        base: the small net.
        widenings: by the name of a target without its kind, or of a draft.
        draft_vocab: rows of the drafts' tables, fewer than the target's as in one family's models.
        acceptances: the drafts' Σ min(p, q).
        rows: M of the pass times.
        large_rows: the same for the 70B.
        context: slots that a measured pass finds filled.
        new_tokens: of a timed text.
        parity_tokens: of a text that has to equal plain's.
        law_rows: sampled texts per rule.
        positions: (rows, length) of the teacher-forced texts.
        slots: capacities of the attention micro-benchmark.
        micro_bytes: of a copied tensor and of a matrix that is read.
        text_rounds: repetitions of whole texts.
    """

    base: Shape
    widenings: dict[str, Widening]
    draft_vocab: int
    acceptances: tuple[float, ...] = (0.8, 0.6)
    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 32, 33, 49)
    large_rows: tuple[int, ...] = (1, 2, 4, 5, 8, 9, 16, 17)
    context: int = 64
    new_tokens: int = 64
    parity_tokens: int = 128
    law_rows: int = 8192
    positions: tuple[int, int] = (4, 128)
    slots: tuple[int, ...] = (512, 8192)
    micro_bytes: int = 2**31
    text_rounds: int = 5


#: widths of Qwen2.5-7B, Qwen2.5-0.5B and about a 70B's, by doubling a net of 448
FULL = Sizes(
    base=Shape(448, 7, 1, 64, 2368, 4, vocab=152_064, num_tokens=151_936),
    widenings={
        "7b": Widening(8, 8, 24),
        "0.5b": Widening(2, 2, 20),
        "small": Widening(),
        "70b": Widening(16, 16, 70, is_shared=True),
    },
    draft_vocab=151_936,
)
TINY = Sizes(
    base=Shape(128, 2, 1, 64, 128, 2, vocab=320, num_tokens=304),
    widenings={
        "7b": Widening(2, 2, 1),
        "0.5b": Widening(2, 1, 1),
        "small": Widening(),
        "70b": Widening(2, 2, 2, is_shared=True),
    },
    draft_vocab=304,
    acceptances=(0.7,),
    rows=(1, 5),
    large_rows=(1, 5),
    context=16,
    new_tokens=6,
    parity_tokens=16,
    law_rows=512,
    positions=(2, 64),
    slots=(32, 64),
    micro_bytes=2**20,
    text_rounds=1,
)


class Models:
    """See the module."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.why_no_nf4 = nf4.why_not(device)
        self._made: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def free(self, *keep: str) -> None:
        """Drop every target and draft but the targets named; base, noise and acceptances stay."""
        for key in list(self._made):
            if key[0] in ("target", "draft") and key[1] not in keep:
                del self._made[key]
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def texts(self) -> Tensor:
        """Teacher-forced ids [rows, length]."""
        return texts(*self.sizes.positions, self.sizes.draft_vocab, TEXT_SEED, self.device)

    def base(self, seed: int = BASE_SEED) -> LlamaForCausalLM:
        """The small net, its head scaled to a most probable token of 0.6."""
        return self._once(("base", seed), lambda: self._base(seed))

    def _base(self, seed: int) -> LlamaForCausalLM:
        net = base_net(self.sizes.base, seed, self.device)
        if self.why_no_nf4 is None:
            parts = {name: weight.data for name, weight in net.named_parameters()}
            for name in parts:
                if name.removesuffix(".weight").endswith(LINEARS):
                    parts[name] = nf4.on_grid(parts[name])
            net = assemble(net.config, parts)
        scale_head(net, self.texts(), TOP_PROBABILITY)
        return net

    def epsilon(self, acceptance: float) -> float:
        """Noise at which a draft has this acceptance rate at temperature 1."""
        return self._once(("epsilon", acceptance), lambda: self._epsilon(acceptance))

    def _epsilon(self, acceptance: float) -> float:
        base, noise, ids = self.base(), self._noise(), self.texts()

        def acceptance_of(epsilon: float) -> float:
            return overlap(base, with_noise(base, noise, epsilon), ids)[0]

        return bisect(acceptance_of, 0.0, LARGEST_NOISE, acceptance)

    def _noise(self) -> dict[str, Tensor]:
        return self._once(("noise", 0), lambda: noise_for(self.base(), NOISE_SEED))

    def noisy_base(self, acceptance: float) -> LlamaForCausalLM:
        """The base with noise, float32, the target's vocabulary: what a draft of this acceptance rate computes."""
        return with_noise(self.base(), self._noise(), self.epsilon(acceptance))

    def target(self, name: str) -> LlamaForCausalLM:
        """A target: "7b bf16", "7b nf4" or "70b nf4"."""
        size, kind = name.split()
        linear = nf4.linear if kind == "nf4" else None
        return self._once(
            ("target", name), lambda: widen(self.base(), self.sizes.widenings[size], torch.bfloat16, linear)
        )

    def draft(self, name: str, acceptance: float | None, has_full_vocab: bool = False) -> LlamaForCausalLM:
        """A bfloat16 draft, "0.5b" or "small".

        Args:
            name: which.
            acceptance: its rate; None: a net of its own that knows nothing of the target.
            has_full_vocab: transformers' assisted decoding takes tables of one size only; both share their weights.
        """
        if not has_full_vocab:
            full = self.draft(name, acceptance, has_full_vocab=True)
            return self._once(("draft", name, acceptance, "cut"), lambda: cut_vocabulary(full, self.sizes.draft_vocab))

        def make() -> LlamaForCausalLM:
            small = self.base(OTHER_SEED) if acceptance is None else self.noisy_base(acceptance)
            return widen(small, self.sizes.widenings[name], torch.bfloat16)

        return self._once(("draft", name, acceptance), make)
