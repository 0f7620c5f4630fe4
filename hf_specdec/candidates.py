"""Any drafter of ours inside transformers' own assisted decoding (batch 1).

transformers asks a `CandidateGenerator` for a continuation and the logits it was drawn from. Ours hands over log q of
the very tensor its tokens were drawn from, or of a point mass; what a model drafter keeps follows the text by itself.
"""

from typing import Any, final

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters import Draft, Drafter, DraftRequest
from hf_specdec.host.draft_copy import own_copy
from hf_specdec.host.draft_model import output_vocab_size
from hf_specdec.host.drafts import check_pair
from hf_specdec.host.processors import BlockProcessors, why_not_position_wise
from hf_specdec.registry import DRAFTERS, lookup
from hf_specdec.sequence import Sequence

__all__ = ["SpeculativeCandidateGenerator"]


@final
class SpeculativeCandidateGenerator(CandidateGenerator):
    """A drafter of ours as transformers' candidate generator.

    Args:
        target: the model that verifies.
        draft: the draft model, None for methods without one.
        logits_processor: the call's processors; those that are position-wise are applied to the draft too.
        do_sample: whether transformers draws (candidates come with log q) or compares argmaxes.
        eos_token_id: ids after which nothing is drafted.
        max_length: length at which the text ends; nothing is drafted past it.
        **config: keys of `SpeculativeConfig`.

    Raises:
        ValueError: a draft that does not fit the target, a wrong key, or a batch larger than one when asked.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        *,
        logits_processor: Any = None,
        do_sample: bool = False,
        eos_token_id: int | list[int] | Tensor | None = None,
        max_length: int | None = None,
        **config: Any,
    ) -> None:
        self.config = SpeculativeConfig.from_dict(config)
        self._method = self.config.method
        if self._method == "auto":  # nothing is measured here: one drafter serves the call
            self._method = "ngram" if draft is None else "draft_model"
        self._class: type[Drafter] = lookup("method", DRAFTERS, self._method)
        if self._class.is_on_target_keys:
            raise ValueError(
                f"method={self._method!r} drafts on the target's own keys, which transformers' assisted decoding does "
                "not lend. Use enable(), or another method."
            )
        if self._class.needs_model:
            check_pair(target, draft)
            draft = own_copy(draft, self.config, target, is_in_code=True)
        self._target, self._draft, self._max_length = target, draft, max_length
        self._is_sampling = do_sample
        self._eos = None if eos_token_id is None else torch.as_tensor(eos_token_id).flatten()
        # Without the processors q is the draft's own law: exact all the same, only less often accepted.
        usable = bool(logits_processor) and why_not_position_wise(logits_processor) is None
        self._process = BlockProcessors(logits_processor, self._eos) if usable else None
        self._drafter: Drafter | None = None
        self._sequence: Sequence | None = None

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Candidates after `input_ids` int64 [1, seq].

        Returns:
            `input_ids` with the drafted ids appended, and float32 log q [1, draft, vocab] (None when not sampling).
        """
        if input_ids.shape[0] != 1:
            raise ValueError(f"transformers' assisted decoding takes one row at a time, got {input_ids.shape[0]}.")
        draft = self._propose(input_ids)
        count = 0 if draft is None else int(draft.lengths[0])
        if draft is None or count == 0:
            return input_ids, None
        ids = draft.token_ids[:, :count]
        return torch.cat([input_ids, ids.to(input_ids.device)], dim=1), self._log_probs(draft, ids)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int | Tensor) -> None:
        """Nothing to learn: the draft length is an order."""

    def _propose(self, input_ids: Tensor) -> Draft | None:
        sequence, length = self._follow(input_ids), input_ids.shape[1]
        drafter = self._drafter
        assert drafter is not None
        room = self.config.draft_length if self._max_length is None else self._max_length - length - 1
        width = min(self.config.draft_length, room, drafter.max_draft_length(sequence))
        if width < 1 or length < 2:  # a draft step reads the last two tokens
            return None
        sequence.reserve(width + 1)
        return drafter.propose(sequence, width, torch.rand((1, width), dtype=torch.float64, device=input_ids.device))

    def _follow(self, input_ids: Tensor) -> Sequence:
        length = input_ids.shape[1]
        if self._sequence is None or length < self._sequence.prompt_length:
            self._sequence = Sequence(input_ids, self._max_length)
            self._drafter = self._class(self._request(input_ids))
        sequence = self._sequence
        sequence.reserve(max(0, length - sequence.host_lengths[0]))
        sequence.ids[:, :length] = input_ids
        sequence.set_lengths([length])
        sequence.new_tokens = [input_ids[0, sequence.prompt_length :].tolist()]
        return sequence

    def _request(self, input_ids: Tensor) -> DraftRequest:
        return DraftRequest(
            config=self.config,
            method=self._method,
            target=self._target,
            model=self._draft,
            is_sampling=self._is_sampling,
            eos_ids=None if self._eos is None else self._eos.to(input_ids.device),
            process=self._process,
            vocab_size=output_vocab_size(self._target),
        )

    def _log_probs(self, draft: Draft, ids: Tensor) -> Tensor | None:
        if not self._is_sampling:
            return None
        if draft.probs is not None:
            return draft.probs[:, : ids.shape[1]].log()
        shape = (*ids.shape, output_vocab_size(self._target))
        log_probs = torch.full(shape, -torch.inf, device=ids.device)
        return log_probs.scatter(2, ids[..., None], 0.0)
