"""The text being written: committed ids of every row, with room for the block under verification.

`ids[row, :lengths[row]]` is committed; what lies beyond is scratch (drafted tokens wait there so that logits
processors see each position's own prefix). Lengths exist twice, as a tensor for the step functions and as a host list
that follows the loop's one read per step. Columns index `input_ids` as the caller sees them. Knows nothing of models
or caches.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from hf_specdec.shapes import SeqIds

__all__ = ["Sequence"]

MIN_GROWTH = 256


class Sequence:
    """Committed ids [batch, lengths] of a call.

    Args:
        prompt_ids: int64 [batch, seq], left-padded.
        max_length: columns after which every row ends (None: no limit).

    Attributes:
        new_tokens: per row, the ids committed after the prompt, on the host. Lists that only grow, but for a row that
            ended: it may give back its last ones.
    """

    def __init__(self, prompt_ids: SeqIds, max_length: int | None) -> None:
        batch, seq = prompt_ids.shape
        self.device = prompt_ids.device
        self.prompt_length = seq
        self.max_length = max_length
        self.ids = torch.zeros((batch, seq + MIN_GROWTH), dtype=torch.long, device=self.device)
        self.ids[:, :seq] = prompt_ids
        self.set_lengths([seq] * batch)
        self.is_finished = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.finished = [False] * batch
        self.new_tokens: list[list[int]] = [[] for _ in range(batch)]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.ids.shape[0]

    @property
    def live_rows(self) -> list[int]:
        """Rows that still produce tokens."""
        return [row for row, is_done in enumerate(self.finished) if not is_done]

    def set_lengths(self, lengths: Rows[int]) -> None:
        """Set how many columns of each row are committed."""
        self.host_lengths = list(lengths)
        self.lengths = torch.tensor(self.host_lengths, dtype=torch.long, device=self.device)

    def advance(self, num_emitted: Tensor, lengths: Rows[int]) -> None:
        """Commit `num_emitted` [batch] more columns per row; `lengths` is the same on the host."""
        self.host_lengths = list(lengths)
        self.lengths = self.lengths + num_emitted

    def set_finished(self, finished: Rows[bool]) -> None:
        """Set which rows have ended."""
        if list(finished) != self.finished:
            self.finished = list(finished)
            self.is_finished = torch.tensor(self.finished, dtype=torch.bool, device=self.device)

    def remaining(self, row: int) -> int:
        """Tokens that `row` may still get."""
        if self.finished[row]:
            return 0
        return (1 << 30) if self.max_length is None else self.max_length - self.host_lengths[row]

    def limits(self) -> Tensor:
        """int64 [batch]: columns at which each row ends."""
        limit = (1 << 30) if self.max_length is None else self.max_length
        return torch.full((self.batch,), limit, dtype=torch.long, device=self.device)

    def reserve(self, width: int) -> None:
        """Make room for `width` columns past the longest row."""
        needed = max(self.host_lengths) + width
        if needed > self.ids.shape[1]:
            room = max(needed, self.ids.shape[1] + max(MIN_GROWTH, self.ids.shape[1] // 2))
            grown = self.ids.new_zeros((self.batch, room))
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown

    def rewrite(self, new_tokens: Rows[Rows[int]]) -> None:
        """Put each row's `new_tokens` behind its committed ids, whatever stands there."""
        for row, tokens in enumerate(new_tokens):
            start = self.host_lengths[row]
            self.ids[row, start : start + len(tokens)] = self.ids.new_tensor(tokens)

    def tail(self, width: int) -> Tensor:
        """The last `width` committed ids of each row [batch, width]."""
        columns = self.lengths[:, None] + torch.arange(-width, 0, device=self.device)
        return self.ids.gather(1, columns.clamp(min=0))

    def write(self, column: int, ids: Tensor) -> None:
        """Put `ids` [batch] or [batch, n] from `column` past each row's length on (scratch)."""
        ids = ids.reshape(self.batch, -1)
        columns = torch.arange(column, column + ids.shape[1], device=self.device)
        self.ids.scatter_(1, self.lengths[:, None] + columns, ids)
