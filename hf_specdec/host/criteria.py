"""Stopping criteria asked on every accepted prefix, not once per block.

Those that transformers ships are split by what they look at: end-of-sequence ids and the maximum length are cut on the
device by `steps.commit`; stop strings look at the tail, so the block's prefixes become rows of one call; time is read
once a step. Any other criterion is called exactly as plain calls it, by `host.emission`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria

from hf_specdec.sequence import Sequence

__all__ = ["Criteria"]


class Criteria:
    """A call's stopping criteria, sorted.

    Attributes:
        eos_ids: int64 [num_eos] on the text's device, or None.
        max_length: columns at which every row ends, or None.
        pads_finished_rows: whether plain pads a row after its end (it does once any criterion has `eos_token_id`);
            without, a stopped row goes on with real tokens until the last row has stopped.
        others: criteria called column by column.
    """

    def __init__(self, criteria: Iterable, device: torch.device) -> None:
        criteria = list(criteria)
        eos = [c.eos_token_id.to(device).flatten() for c in criteria if type(c) is EosTokenCriteria]
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        built_in = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria, MaxTimeCriteria)
        self.eos_ids: Tensor | None = torch.cat(eos).long() if eos else None
        self.max_length: int | None = min(lengths) if lengths else None
        self.pads_finished_rows = any(hasattr(c, "eos_token_id") for c in criteria)
        self.others = [c for c in criteria if type(c) not in built_in]
        self._stop_strings: list[Any] = [c for c in criteria if type(c) is StopStringCriteria]
        self._timers: list[Any] = [c for c in criteria if type(c) is MaxTimeCriteria]
        self._lengths: list[Any] = [c for c in criteria if type(c) is MaxLengthCriteria]

    def stop_string_hits(self, sequence: Sequence, width: int) -> Tensor | None:
        """int64 [batch]: how many of the `width` block ids (in the scratch of `sequence`) complete a stop string,
        counted from 1; width + 1 where none does. None without stop strings."""
        if not self._stop_strings:
            return None
        hits = torch.zeros((sequence.batch, width), dtype=torch.bool, device=sequence.device)
        ends = sequence.lengths[:, None] + torch.arange(1, width + 1, device=sequence.device)
        for criterion in self._stop_strings:
            tail = torch.arange(-criterion.maximum_token_len, 0, device=sequence.device)
            columns = ends[..., None] + tail  # [batch, width, tail]
            ids = sequence.ids[:, None].expand(-1, width, -1).gather(2, columns.clamp(min=0))
            # Before the first column there is nothing: an id past the vocabulary matches no string.
            ids = torch.where(columns < 0, torch.iinfo(torch.int32).max, ids)
            hits |= criterion(ids.flatten(0, 1), None).view_as(hits)
        order = torch.arange(1, width + 1, device=sequence.device)
        return torch.where(hits, order, width + 1).amin(dim=1)

    def remind(self, ids: Tensor) -> None:
        """Let the length criteria give their reminder that a text has passed the model's maximum; plain asks at every
        length, and the last but one is enough."""
        for criterion in self._lengths:
            criterion(ids[:, :-1], None)

    @property
    def has_stop_strings(self) -> bool:
        """Whether a criterion looks for strings."""
        return bool(self._stop_strings)

    @property
    def has_timers(self) -> bool:
        """Whether a criterion looks at the clock."""
        return bool(self._timers)

    def is_time_up(self, ids: Tensor) -> bool:
        """Whether a time criterion says stop; `ids` [batch, length] as plain passes them."""
        return any(bool(timer(ids, None).all()) for timer in self._timers)
