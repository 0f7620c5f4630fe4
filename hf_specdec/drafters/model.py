"""A smaller model of the same tokenizer drafts: one narrow forward per drafted token.

The first forward of a step takes the last two committed tokens. After a fully accepted block the draft owes two
tokens (its own last one was drawn, not read), else one; reading one again is harmless and keeps one shape.

Source: Chen et al. 2023 (arXiv 2302.01318), Algorithm 2, the draft's half.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_specdec import sampling
from hf_specdec.drafters.base import Draft, Drafter, DraftPlan, DraftRequest
from hf_specdec.host.draft_model import DraftModel
from hf_specdec.registry import register_drafter
from hf_specdec.sequence import Sequence
from hf_specdec.steps import draft_lengths_after_eos

__all__ = ["ModelDrafter"]


class ModelDrafter(Drafter):
    """Drafts with `request.model`."""

    needs_model: ClassVar[bool] = True
    has_probs: ClassVar[bool] = True

    def __init__(
        self, request: DraftRequest, around: Callable[[], AbstractContextManager] = contextlib.nullcontext
    ) -> None:
        super().__init__(request)
        self.model = DraftModel(request, around)

    def debt(self, sequence: Sequence) -> int:
        """The prompt before the first draft; later what was written while nothing, or something else, drafted."""
        return self.model.debt(sequence)

    def prepare(self, sequence: Sequence, plan: DraftPlan) -> None:
        """Bring the draft's keys up to the text."""
        self.model.follow(sequence, plan.length)

    def propose(self, sequence: Sequence, draft_length: int, uniforms: Tensor) -> Draft:
        """See `Drafter.propose`. Rows whose text holds an id that the draft cannot embed draft nothing more."""
        self.model.follow(sequence, draft_length)
        batch, device = sequence.batch, sequence.device
        ids = sequence.ids.new_zeros((batch, draft_length))
        lengths = torch.full((batch,), draft_length, dtype=torch.long, device=device)
        probs = None
        if self.request.is_sampling:
            probs = torch.zeros((batch, draft_length, self.request.vocab_size), dtype=torch.float32, device=device)
        any_broken = torch.zeros(batch, dtype=torch.bool, device=device)
        feed, short = sequence.tail(self.model.feed_width), self._short_ids(device)
        lengths = torch.where(self.model.is_blocked(feed), 0, lengths)
        for position in range(draft_length):
            scores = self.model.next_scores(feed, sequence, position, short is not None)
            if self.request.process is not None:
                scores = self.request.process(scores[:, None], sequence, position)[:, 0]
            if probs is None:
                token = scores.argmax(dim=-1)
                is_broken = scores.gather(1, token[:, None])[:, 0].isnan()
            else:
                law = sampling.softmax_probs(scores).to(probs.dtype)
                token = sampling.draw(law, uniforms[:, position])
                is_broken = law[:, 0].isnan()  # one NaN makes the whole softmax NaN
                if short is None:
                    probs[:, position] = law
                else:  # q is 0 on all other ids
                    probs[:, position].index_copy_(1, short, law)
            token = token if short is None else short[token]
            lengths = torch.where(is_broken, lengths.clamp(max=position), lengths)
            any_broken = any_broken | is_broken
            ids[:, position] = token
            if self.request.process is not None:
                sequence.write(position, token)
            feed = token[:, None]
        return Draft(ids, probs, draft_lengths_after_eos(ids, lengths, self.request.eos_ids), any_broken)

    def _short_ids(self, device: torch.device) -> Tensor | None:
        """The ids to choose from, if they are few; None where processors have to see scores of all ids."""
        ids = self.model.vocabulary.short_ids if self.request.process is None else None
        return None if ids is None else ids.to(device)

    def set_aside(self, sequence: Sequence, rows: list[int]) -> None:
        """The keys of tokens that were fed for `rows` are not those of their text."""
        self.model.forget_drafted(sequence, rows)

    def max_draft_length(self, sequence: Sequence) -> int:
        """What the draft's own context still holds."""
        return self.model.room(sequence)

    def keep(self) -> Any:
        """The draft's keys, for a later turn on the same cache."""
        return self.model.keep()


register_drafter("draft_model", ModelDrafter)
