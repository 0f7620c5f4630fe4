"""The uniforms of a call, so that all randomness is an argument of the functions that use it.

Knows nothing of models or rules.
"""

import torch
from torch import Tensor

__all__ = ["Coins"]

COIN_STEPS, COIN_SLOTS = 16, 32  # drawn at once: steps, and slots of a row for drafting and as many for verification


class Coins:
    """Uniforms in [0, 1), keyed by step, row and slot: K for drafting, K + 1 for the verification of a step.

    A step's coins depend on the steps before it by their number only, not by what they drafted: a call can be replayed.

    Args:
        batch: rows.
        device: where draws happen; the default generator of that device is used, as plain sampling does.
        is_drawn: False gives zeros and leaves the generator alone, as plain greedy decoding does.
    """

    def __init__(self, batch: int, device: torch.device, is_drawn: bool = True) -> None:
        self._shape, self._device = (COIN_STEPS, batch, 2 * COIN_SLOTS + 2), device
        self._make = torch.rand if is_drawn else torch.zeros
        self._block, self._step = torch.empty(0), COIN_STEPS

    def next(self, draft_length: int) -> tuple[Tensor, Tensor]:
        """float64 ([batch, draft_length], [batch, draft_length + 1]) for a step that drafts `draft_length` tokens."""
        if self._step == COIN_STEPS:
            self._block, self._step = self._make(self._shape, dtype=torch.float64, device=self._device), 0
        draft, verify, last, spare = self._block[self._step].split([COIN_SLOTS, COIN_SLOTS, 1, 1], dim=1)
        self._step += 1
        if draft_length > COIN_SLOTS:  # long drafts are rare: the rest comes from a generator of the step's own
            generator = torch.Generator(self._device).manual_seed(int(spare[0] * 2**53))
            shape = (2, len(spare), draft_length - COIN_SLOTS)
            more = torch.rand(shape, generator=generator, dtype=torch.float64, device=self._device)
            draft, verify = torch.cat([draft, more[0]], dim=1), torch.cat([verify, more[1]], dim=1)
        return draft[:, :draft_length], torch.cat([verify[:, :draft_length], last], dim=1)
