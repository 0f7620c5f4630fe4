"""What the caller sees, column by column.

Rows run ahead of one another; a caller sees whole columns. A column is released when every row has it: then criteria
of the caller's own are asked with the (batch, length) ids, once per length and in order, and the streamer gets the
column's tokens, as in plain decoding. A row that such a criterion ends gives back the tokens it was ahead.
"""

from typing import Any

import torch
from torch import Tensor

from hf_specdec.host.criteria import Criteria
from hf_specdec.host.outputs import OutputRecorder
from hf_specdec.host.ranks import Ranks
from hf_specdec.sequence import Sequence

__all__ = ["Emission"]


class Emission:
    """Releases columns and decides when the call ends.

    Args:
        sequence: the text.
        criteria: when rows end.
        streamer: the caller's, or None; its prompt was put by `generate()`.
        pad_id: what finished rows get, None if plain has no such id.
        recorder: scores and states per column.
        ranks: the processes that share the target; the leader's criteria decide.

    Attributes:
        lengths: columns that each row has now.
        released: columns that the caller has seen.
        is_done: whether the call has ended, at `released` columns.
    """

    def __init__(
        self,
        sequence: Sequence,
        criteria: Criteria,
        streamer: Any,
        pad_id: int | None,
        recorder: OutputRecorder,
        ranks: Ranks,
    ) -> None:
        self.sequence, self.criteria, self.streamer, self.pad_id = sequence, criteria, streamer, pad_id
        self._ranks = ranks
        self._asks_others, self._asks_time = ranks.any_of(bool(criteria.others), criteria.has_timers)
        self.recorder = recorder
        self.lengths = list(sequence.host_lengths)
        self._seen = sequence.ids[:, : sequence.prompt_length]  # what criteria of the caller's own have been shown
        self._num_dropped = 0
        self.tokens = sequence.new_tokens
        self.stopped_at: list[int | None] = [None] * sequence.batch
        self.released = sequence.prompt_length
        self.is_done = False

    def advance(self, new_tokens: list[list[int]], ended: list[bool], stop_hits: list[int] | None) -> list[int]:
        """Take a step's tokens; `lengths`, `released` and `is_done` follow. Returns the tokens each row took.

        Args:
            new_tokens: per row, cut after an end-of-sequence id and at the maximum length.
            ended: rows that this cut ended.
            stop_hits: see `Criteria.stop_string_hits`.
        """
        taken = []
        for row, tokens in enumerate(new_tokens):
            tokens = self._cut(row, tokens, ended[row], len(tokens) + 1 if stop_hits is None else stop_hits[row])
            self.tokens[row] += tokens
            self.lengths[row] += len(tokens)
            taken.append(len(tokens))
        self._release()
        return taken

    def take_dropped(self) -> int:
        """Tokens given back since the last call: rows that a criterion ended had run ahead."""
        dropped, self._num_dropped = self._num_dropped, 0
        return dropped

    def _cut(self, row: int, tokens: list[int], ended: bool, hit: int) -> list[int]:
        start = self.lengths[row]
        if hit <= len(tokens) and self.stopped_at[row] is None:
            self.stopped_at[row] = start + hit
            tokens = tokens[:hit] if self.criteria.pads_finished_rows else tokens
        elif ended and self.stopped_at[row] is None:
            self.stopped_at[row] = start + len(tokens)
        return tokens

    def _is_stopped(self, row: int, length: int) -> bool:
        end = self.stopped_at[row]
        return end is not None and end <= length

    def _release(self) -> None:
        rows = range(len(self.lengths))
        pads = self.criteria.pads_finished_rows
        while not self.is_done:
            column = self.released
            if not all(self.lengths[row] > column or (pads and self._is_stopped(row, column)) for row in rows):
                break
            if self._asks_others:
                self._ask_others(column + 1)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([self._token(row, column) for row in rows]))
            self.released = column + 1
            self.is_done = all(self._is_stopped(row, self.released) for row in rows)
        if not self.is_done and self._asks_time:
            is_up = self.criteria.is_time_up(self.sequence.ids[:, : self.released])
            self.is_done = bool(self._ranks.read(torch.tensor([[is_up]]))[0][0])
        if self.is_done:
            for row in rows:
                self._give_back(row, self.released)

    def _give_back(self, row: int, end: int) -> None:
        surplus = self.lengths[row] - end
        if surplus > 0:
            del self.tokens[row][len(self.tokens[row]) - surplus :]
            self._num_dropped += surplus
            self.lengths[row] = end

    def _token(self, row: int, column: int) -> int:
        index = column - self.sequence.prompt_length
        if index < len(self.tokens[row]):
            return self.tokens[row][index]
        assert self.pad_id is not None  # a row ends before the others only where plain pads
        return self.pad_id

    def _ask_others(self, length: int) -> None:
        column = [self._token(row, length - 1) for row in range(len(self.lengths))]
        column_ids = torch.tensor(column, dtype=torch.long, device=self._seen.device)[:, None]
        self._seen = ids = torch.cat([self._seen, column_ids], dim=1)
        scores = self.recorder.scores_until(length - self.sequence.prompt_length)
        done = torch.zeros(len(self.lengths), dtype=torch.bool, device=ids.device)
        for criterion in self.criteria.others:
            done = done | torch.as_tensor(criterion(ids, scores), device=ids.device)
        for row, is_done in enumerate(self._ranks.read(done[None])[0]):
            if is_done and not self._is_stopped(row, length):
                self.stopped_at[row] = length
                if self.criteria.pads_finished_rows:
                    self._give_back(row, length)

    def padded_ids(self, length: int) -> Tensor:
        """int64 [batch, length] as plain has them at this length."""
        start = self.sequence.prompt_length
        new = [[self._token(row, column) for column in range(start, length)] for row in range(self.sequence.batch)]
        new_ids = torch.tensor(new, dtype=torch.long, device=self.sequence.device).view(self.sequence.batch, -1)
        return torch.cat([self.sequence.ids[:, :start], new_ids], dim=1)

    def rows_over(self) -> list[bool]:
        """Which rows produce no more tokens."""
        limit = self.criteria.max_length
        return [
            self.is_done
            or (limit is not None and length >= limit)
            or (self.criteria.pads_finished_rows and end is not None)
            for length, end in zip(self.lengths, self.stopped_at, strict=True)
        ]

    def finish(self) -> Tensor:
        """End the stream; returns the sequences [batch, length]."""
        if self.streamer is not None:
            self.streamer.end()
        ids = self.padded_ids(self.released)
        self.criteria.remind(ids)
        return ids
