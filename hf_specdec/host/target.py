"""The target during one call: verify passes over a block, and the cache that the caller gets back.

`slot = column + shift`, where `shift` is what a handed-over cache held before the prompt's first column.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdec.host.cache import RaggedCache
from hf_specdec.host.runner import ModelRunner
from hf_specdec.sequence import Sequence

__all__ = ["TargetModel"]


class TargetModel:
    """Scores blocks with `model` on the keys of a prefilled cache.

    Args:
        model: the target.
        cache: the DynamicCache that the prefill filled; taken over at the first verify pass.
        padding_mask: int64 [batch, slots] or None.
        position_ids: what the prefill used, int64 [..., batch or 1, slots], or None.
        sequence: the text, still at the prompt.
        is_kept: whether the cache outlives the call.
        extra: keywords of every forward.
    """

    def __init__(
        self,
        model: Any,
        cache: DynamicCache,
        padding_mask: Tensor | None,
        position_ids: Tensor | None,
        sequence: Sequence,
        is_kept: bool,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.is_kept = model, is_kept
        self.source = cache
        self.held = cache.get_seq_length()
        self.shift = self.held - sequence.prompt_length
        self.name = type(model).__name__
        self._padding_mask, self._extra = padding_mask, extra
        self._last_positions = None if position_ids is None else position_ids[..., -1:]
        self._runner: ModelRunner | None = None
        self._valid = [self.held] * sequence.batch

    def _start(self, sequence: Sequence) -> ModelRunner:
        if self._runner is None:
            limit = (1 << 30) if sequence.max_length is None else sequence.max_length + self.shift
            cache = RaggedCache(self.source, [self.held] * sequence.batch)
            self._runner = ModelRunner(
                self.model, cache, self._padding_mask, self._last_positions, self.held, limit, extra=self._extra
            )
        return self._runner

    def slots(self, sequence: Sequence) -> list[int]:
        """Slots that each row's text takes; the keys of its last token are not there yet."""
        return [length + self.shift for length in sequence.host_lengths]

    def make_room(self, sequence: Sequence, width: int) -> None:
        """Prepare passes over `width` slots past what is committed."""
        self._at_end(sequence).cache.make_room(width)

    def _at_end(self, sequence: Sequence) -> ModelRunner:
        """Every row's keys end where its text does: what was written past it is forgotten."""
        runner = self._start(sequence)
        # A row that has ended no longer holds a sliding window open, unless its keys are to be returned.
        lengths = [length - 1 for length in self.slots(sequence)]
        runner.cache.set_lengths(lengths, None if self.is_kept else sequence.live_rows)
        return runner

    def lend(self, model: Any, sequence: Sequence) -> ModelRunner:
        """Forwards of `model`, whose layers are the target's first ones, on the target's own keys. What it writes past
        the text is written again by the next `score`, at least as far."""
        return self._start(sequence).through(model)

    def score(self, sequence: Sequence, draft_ids: Tensor) -> tuple[Tensor, Any]:
        """One forward over each row's last token and its draft.

        Args:
            sequence: the text.
            draft_ids: int64 [batch, draft].

        Returns:
            logits float32 [batch, draft + 1, vocab] on the text's device (position w follows w drafted tokens), and the
            hidden states per layer if the caller asked for them.
        """
        runner = self._at_end(sequence)
        self._valid = [length - 1 for length in self.slots(sequence)]
        output = runner.forward(torch.cat([sequence.tail(1), draft_ids], dim=1))
        logits = output.logits.to(dtype=torch.float32, device=sequence.device)
        return logits, getattr(output, "hidden_states", None)

    def release(self, sequence: Sequence, sequences: Tensor | None) -> DynamicCache | None:
        """Hand the keys back to the cache they came from, as plain decoding would have left it.

        Args:
            sequence: the text; every row's keys reach its last token but one.
            sequences: the returned ids [batch, length]; rows that ended early get the keys of their padding, as plain's
                have. None when the call was broken off: what all rows have is handed back.
        """
        if self._runner is None:
            return self.source
        if not self.is_kept:
            return None
        valid = [length - 1 + self.shift for length in sequence.host_lengths]
        if sequences is None:
            valid = [min(pair) for pair in zip(valid, self._valid, strict=True)]
            return self._runner.cache.give_back(min(valid))
        width = sequences.shape[1] - 1 + self.shift
        missing = max(width - length for length in valid)
        if missing > 0:
            columns = torch.tensor(valid, device=sequences.device)[:, None] - self.shift
            columns = columns + torch.arange(missing, device=sequences.device)
            self._runner.forward(sequences.gather(1, columns.clamp(max=sequences.shape[1] - 1)), valid, num_logits=1)
        return self._runner.cache.give_back(width)
