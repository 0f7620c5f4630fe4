"""One forward of a causal LM over W tokens per row, with per-row positions, on a per-row cache.

Serves the target (verify passes) and the draft (draft steps, catch-up) alike. Knows which keywords a model's forward
takes and on which device it wants its inputs; leaves what the logits mean to the caller.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from hf_specdec.host.cache import RaggedCache

__all__ = ["ModelRunner", "cache_keyword", "forward_keywords", "input_device"]


def forward_keywords(model: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters of `model.forward`."""
    return frozenset(inspect.signature(model.forward).parameters)


def cache_keyword(model: torch.nn.Module) -> str:
    """The keyword under which `model.forward` takes its cache: "cache", or "past_key_values" in older transformers."""
    names = forward_keywords(model)
    if not names & {"cache", "past_key_values"}:  # hidden behind **kwargs: as this transformers names it
        mixin: Any = GenerationMixin
        names = frozenset(inspect.signature(mixin.prepare_inputs_for_generation).parameters)
    return "cache" if "cache" in names else "past_key_values"


def input_device(model: Any, ids: Tensor) -> torch.device:
    """Where `model` wants its inputs. With offloaded weights ("meta" until needed) accelerate's hooks move them, and
    they may stay where they are."""
    device = model.device
    return ids.device if device.type == "meta" else device


class ModelRunner:
    """Forwards of `model` on `cache`.

    Args:
        model: a causal LM.
        cache: its keys, with per-row lengths.
        padding_mask: int64 [batch, slots] of the prompt, 0 on padding; None if there is none.
        last_positions: int64 [..., batch, 1], the position id of the last slot in `padding_mask`'s range.
        num_slots: slots that the prompt fills.
        max_slots: no slot at or past this one is ever committed; positions beyond are clamped (learned positions end).
        max_positions: positions that the model has; where rows differ in padding, a slot does not tell.
        extra: further keywords of every forward, e.g. output_hidden_states.
    """

    def __init__(
        self,
        model: Any,
        cache: RaggedCache,
        padding_mask: Tensor | None,
        last_positions: Tensor | None,
        num_slots: int,
        max_slots: int,
        max_positions: int = 1 << 30,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.max_slots, self.max_positions = max_slots, max_positions
        self._keywords = forward_keywords(model)
        self._device: torch.device | None = None
        self._extra = {cache_keyword(model): cache, "use_cache": True, "return_dict": True, **(extra or {})}
        self._mask = padding_mask
        cache.is_padded = padding_mask is not None and bool((padding_mask == 0).any())
        self._offsets: Tensor | None = None
        if "position_ids" in self._keywords and last_positions is not None:
            self._offsets = last_positions - (num_slots - 1)

    def through(self, model: Any) -> "ModelRunner":
        """Forwards of `model`, which has the first of this one's layers, on the same keys; they collect no outputs."""
        other = copy.copy(self)
        other.model = model
        other._extra = {name: value for name, value in self._extra.items() if not name.startswith("output_")}
        return other

    def forward(self, ids: Tensor, lengths: Sequence[int] | None = None, num_logits: int = 0) -> Any:
        """Run `ids` [batch, width]; row b's tokens take the slots from `lengths[b]` on (None: where the cache stands).

        `num_logits` > 0 asks for that many last logits only. Returns the model's output; the cache's lengths stay put.
        """
        width = ids.shape[1]
        if lengths is not None:
            self.cache.row_lengths.set(lengths)
        self.cache.make_room(width)
        if self._device is None:  # asking walks through the parameters: once per call
            self._device = input_device(self.model, ids)
        inputs: dict[str, Any] = {**self._extra, "input_ids": ids.to(self._device)}
        if self._offsets is not None:
            inputs["position_ids"] = self._position_ids(self._offsets, width, inputs["input_ids"].device)
        if self._mask is not None:
            inputs["attention_mask"] = self._padding(self._mask, self.cache.row_lengths.longest + width)
        if num_logits and "logits_to_keep" in self._keywords:
            inputs["logits_to_keep"] = num_logits
        return self.model(**inputs)

    def _position_ids(self, offsets: Tensor, width: int, device: torch.device) -> Tensor:
        slots = self.cache.row_lengths.on(device)[:, None] + torch.arange(width, device=device)
        # Slots inside the padding come before position 0; learned positions have none there.
        positions = slots.clamp(max=self.max_slots - 1) + offsets.to(device)
        return positions.clamp(0, self.max_positions - 1)

    def _padding(self, mask: Tensor, slots: int) -> Tensor:
        """The 2-D mask over `slots` slots: the prompt's, then ones."""
        missing = slots - mask.shape[1]
        if missing > 0:  # doubled, so that it is copied O(log n) times
            grown = mask.new_ones((mask.shape[0], mask.shape[1] + missing))
            self._mask = mask = torch.cat([mask, grown], dim=1)
        return mask[:, :slots]
