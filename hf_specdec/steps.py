"""The tensor work that ends one step: write the block, cut it, and pack what the host reads.

A block is a row's accepted tokens and the token after them. It ends early after the first end-of-sequence token inside
it (that token stays) and at the row's length limit. Every shape is fixed by the draft length, no value is read by the
host, and `ids` is written in place: the same code runs eagerly and inside a captured CUDA graph.

Source: the append step of Chen et al. 2023 (arXiv 2302.01318), Algorithm 2. Knows nothing of models, caches or rules.
"""

__all__ = ["Committed", "commit", "draft_lengths_after_eos", "pack"]

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hf_specdec.shapes import BatchFlags, BatchInts, DraftIds, VerifyIds


class Committed(NamedTuple):
    """What one step added to each row."""

    block_ids: VerifyIds
    """Accepted drafted tokens, then the next token; without meaning after the first `num_accepted` + 1."""
    num_emitted: BatchInts
    """Leading ids of the block that were written; 0 for rows that had finished before."""
    is_finished: BatchFlags
    """Rows that are finished now."""


def commit(
    ids: Int[Tensor, "batch capacity"],
    lengths: BatchInts,
    is_finished: BatchFlags,
    draft_ids: DraftIds,
    num_accepted: BatchInts,
    next_ids: BatchInts,
    eos_ids: Int[Tensor, " num_eos"] | None,
    max_lengths: BatchInts | Int[Tensor, ""],
) -> Committed:
    """Append each row's block to `ids`, in place, and say how much of it counts.

    `lengths` is left alone: the caller adds `num_emitted`. Nothing outside the emitted part of `ids` changes.

    Args:
        ids: the rows' texts, right-aligned padding allowed on the left; `capacity` is at least every row's limit.
        lengths: where each row's next token goes.
        is_finished: rows that take no more tokens.
        draft_ids: drafted tokens.
        num_accepted: drafted tokens that stay, per row.
        next_ids: the token after them.
        eos_ids: tokens that end a row; None if none does.
        max_lengths: length at which a row is finished, per row or one for all.
    """
    block_ids = torch.cat([draft_ids, next_ids.unsqueeze(1)], dim=1)
    block_ids = block_ids.scatter(1, num_accepted.unsqueeze(1), next_ids.unsqueeze(1))
    is_emitted = torch.arange(block_ids.shape[1], device=ids.device) <= num_accepted.unsqueeze(1)
    is_emitted = is_emitted & _is_before_end(block_ids, eos_ids)
    room = (max_lengths - lengths).clamp(min=0).masked_fill(is_finished, 0)
    num_emitted = torch.minimum(is_emitted.sum(dim=1), room)
    is_finished = is_finished | (lengths + num_emitted >= max_lengths)
    if eos_ids is not None:
        last_ids = block_ids.gather(1, (num_emitted - 1).clamp(min=0).unsqueeze(1))
        # A row that emits nothing is finished already, so its meaningless last id does no harm.
        is_finished = is_finished | _is_any(last_ids, eos_ids).squeeze(1)
    _write(ids, lengths, block_ids, num_emitted)
    return Committed(block_ids, num_emitted, is_finished)


def draft_lengths_after_eos(
    draft_ids: DraftIds, draft_lengths: BatchInts, eos_ids: Int[Tensor, " num_eos"] | None
) -> BatchInts:
    """Draft lengths when drafting ends after a drafted end-of-sequence token.

    The token itself stays in the draft: whether a drafted token is kept must not depend on what it turned out to be.

    Args:
        draft_ids: drafted tokens.
        draft_lengths: drafted tokens per row so far.
        eos_ids: tokens that end a row; None if none does.
    """
    return torch.minimum(draft_lengths, _is_before_end(draft_ids, eos_ids).sum(dim=1))


def pack(*columns: Int[Tensor, "batch ..."] | Bool[Tensor, "batch ..."]) -> Int[Tensor, "batch total"]:
    """One int64 tensor of all columns, for the one host read of a step.

    Args:
        columns: each of shape (batch,) or (batch, n), integers or flags.
    """
    return torch.cat([column.reshape(column.shape[0], -1).long() for column in columns], dim=1)


def _is_before_end(ids: Int[Tensor, "batch n"], eos_ids: Int[Tensor, " num_eos"] | None) -> Bool[Tensor, "batch n"]:
    """Positions up to and including the row's first end-of-sequence token."""
    if eos_ids is None:
        return torch.ones_like(ids, dtype=torch.bool)
    is_eos = _is_any(ids, eos_ids).long()
    return is_eos.cumsum(dim=1) == is_eos


def _is_any(ids: Int[Tensor, "batch n"], eos_ids: Int[Tensor, " num_eos"]) -> Bool[Tensor, "batch n"]:
    """Which ids are among `eos_ids`; not torch.isin, which sorts, and waits for the device, when there are many."""
    return (ids.unsqueeze(-1) == eos_ids).any(dim=-1)


def _write(
    ids: Int[Tensor, "batch capacity"], lengths: BatchInts, block_ids: VerifyIds, num_emitted: BatchInts
) -> None:
    """Put the first `num_emitted` ids of each block at the row's length; write every other slot back as it was."""
    capacity = ids.shape[1]
    offsets = torch.arange(block_ids.shape[1], device=ids.device)
    slots = (lengths.unsqueeze(1) + offsets).clamp(max=capacity - 1)
    # Slots beyond the capacity fold onto the last one: they must carry the very value that belongs there.
    sources = slots - lengths.unsqueeze(1)
    is_written = (sources >= 0) & (sources < num_emitted.unsqueeze(1))
    values = block_ids.gather(1, sources.clamp(min=0)).to(ids.dtype)
    ids.scatter_(1, slots, torch.where(is_written, values, ids.gather(1, slots)))
