"""Several drafters for one call: each row is served by the one that is expected to keep most of its tokens.

Which one that is was decided before anything was drafted or drawn (`draft_length.Sources`), from committed text alone:
so each row's q is the law of the drafter that served it, a point mass where that has none, and the rule stays exact.

Prior art: prompt lookup before a draft model in the samplers of llama.cpp and vLLM (one for the whole batch).
"""

import dataclasses
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from hf_specdec.drafters.base import Draft, Drafter, DraftPlan, DraftRequest
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.drafters.ngram import NgramDrafter
from hf_specdec.registry import register_drafter
from hf_specdec.sequence import Sequence

__all__ = ["CompositeDrafter"]


@final
class CompositeDrafter(Drafter):
    """n-gram where it has a match that pays, else the draft model."""

    needs_model: ClassVar[bool] = True
    has_probs: ClassVar[bool] = True

    def __init__(self, request: DraftRequest) -> None:
        super().__init__(request)
        self._parts: list[Drafter] = [
            NgramDrafter(dataclasses.replace(request, method="ngram")),
            ModelDrafter(dataclasses.replace(request, method="draft_model")),
        ]
        self._plan: DraftPlan | None = None
        self._rows: list[int] = []

    @property
    def parts(self) -> list[Drafter]:
        """n-gram, model."""
        return self._parts

    def prepare(self, sequence: Sequence, plan: DraftPlan) -> None:
        """Remember who serves which row; those that do read what they have to."""
        self._plan, self._rows = plan, sequence.live_rows
        for index in self._serving():
            self._parts[index].prepare(sequence, plan)

    def _serving(self) -> list[int]:
        assert self._plan is not None
        return sorted({part for part, length in zip(self._plan.parts, self._plan.lengths, strict=True) if length})

    def propose(self, sequence: Sequence, draft_length: int, uniforms: Tensor) -> Draft:
        """See `Drafter.propose`."""
        assert self._plan is not None
        serving = self._serving()
        drafts = {index: self._parts[index].propose(sequence, draft_length, uniforms) for index in serving}
        for index in serving:
            others = [row for row, part in zip(self._rows, self._plan.parts, strict=True) if part != index]
            self._parts[index].set_aside(sequence, others)
        if len(drafts) == 1:
            return self._only(serving[0], drafts[serving[0]], sequence)
        return self._mixed(drafts, sequence, draft_length)

    def _is_served_by(self, index: int, sequence: Sequence) -> Tensor:
        assert self._plan is not None
        served = [False] * sequence.batch
        for row, part in zip(self._rows, self._plan.parts, strict=True):
            served[row] = part == index
        return torch.tensor(served, device=sequence.device)

    def _only(self, index: int, draft: Draft, sequence: Sequence) -> Draft:
        """One drafter's rows; rows that the plan gives to another have nothing."""
        lengths = torch.where(self._is_served_by(index, sequence), draft.lengths, 0)
        return Draft(draft.token_ids, draft.probs, lengths, draft.is_broken)

    def _mixed(self, drafts: dict[int, Draft], sequence: Sequence, draft_length: int) -> Draft:
        ids = sequence.ids.new_zeros((sequence.batch, draft_length))
        lengths = torch.zeros_like(sequence.lengths)
        is_broken = torch.zeros_like(sequence.is_finished)
        probs: Tensor | None = None
        if self.request.is_sampling:
            shape = (sequence.batch, draft_length, self.request.vocab_size)
            probs = torch.zeros(shape, dtype=torch.float32, device=sequence.device)
        for index, draft in drafts.items():
            is_served, width = self._is_served_by(index, sequence), draft.token_ids.shape[1]
            ids[:, :width] = torch.where(is_served[:, None], draft.token_ids, ids[:, :width])
            lengths = torch.where(is_served, draft.lengths, lengths)
            if draft.is_broken is not None:
                is_broken = is_broken | (is_served & draft.is_broken)
            if probs is not None:
                law = draft.probs
                if law is None:
                    law = torch.zeros_like(probs[:, :width]).scatter_(2, draft.token_ids[..., None], 1.0)
                probs[:, :width] = torch.where(is_served[:, None, None], law, probs[:, :width])
        return Draft(ids, probs, lengths, is_broken)

    def max_draft_length(self, sequence: Sequence) -> int:
        """What the longest-winded part still holds."""
        return max(part.max_draft_length(sequence) for part in self._parts)

    def keep(self) -> Any:
        """The model's keys."""
        return self._parts[-1].keep()

    def close(self, sequence: Sequence) -> None:
        """See `Drafter.close`."""
        for part in self._parts:
            part.close(sequence)


register_drafter("auto", CompositeDrafter)
