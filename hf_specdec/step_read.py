"""What the host reads of a step, in one integer tensor: tokens, ends, counts, and how likely the draft was to stay.

Where several processes share the target, every one of them reads what the first one has. Knows nothing of models.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.drafters.base import Draft
from hf_specdec.host.ranks import Ranks
from hf_specdec.steps import Committed, pack
from hf_specdec.verification import Verdict

__all__ = ["StepRead", "read_step"]

SURVIVAL_SCALE = 1 << 30
"""Probabilities travel in the step's integer tensor."""


@dataclass(frozen=True)
class StepRead:
    """What the host knows of a step, per row."""

    new_tokens: list[list[int]]
    ended: list[bool]
    drafted: list[int]
    accepted: list[int]
    target_is_nan: list[bool]
    draft_is_broken: list[bool]
    stop_hits: list[int] | None
    survivals: list[list[float]]


def read_step(
    ranks: Ranks,
    committed: Committed,
    verdict: Verdict,
    draft: Draft,
    is_nan: Tensor | None,
    hits: Tensor | None,
    has_survivals: bool = False,
) -> StepRead:
    """The step's one host read, the leader's on every rank; with `has_survivals` also how likely each prefix of the
    draft was to stay."""
    no = torch.zeros_like(committed.num_emitted)
    width = draft.token_ids.shape[1]
    survivals = (survival_probs(verdict) * SURVIVAL_SCALE).long() if has_survivals else no[:, None][:, :0]
    told = pack(
        committed.num_emitted,
        committed.is_finished,
        draft.lengths,
        verdict.num_accepted,
        no if is_nan is None else is_nan,
        no if draft.is_broken is None else draft.is_broken,
        no if hits is None else hits,
        committed.block_ids,
        survivals,
    )
    packed = ranks.read(told)
    columns = list(zip(*(row[:7] for row in packed), strict=True))
    return StepRead(
        new_tokens=[row[7 : 7 + row[0]] for row in packed],
        ended=[bool(value) for value in columns[1]],
        drafted=list(columns[2]),
        accepted=list(columns[3]),
        target_is_nan=[bool(value) for value in columns[4]],
        draft_is_broken=[bool(value) for value in columns[5]],
        stop_hits=None if hits is None else list(columns[6]),
        survivals=[[value / SURVIVAL_SCALE for value in row[8 + width : 8 + width + row[2]]] for row in packed],
    )


def survival_probs(verdict: Verdict) -> Tensor:
    """float64 [batch, draft]: the probability, given the draft, that at least i of its tokens stay."""
    if verdict.survival_probs is not None:
        return verdict.survival_probs
    return verdict.accept_probs.cumprod(dim=1)
