"""The draft's model during one call: prefill, catch-up, one-token steps, and its keys for the next turn.

Draft slots count from the first token that the draft knows: `slot = column + shift`, where `shift` is the number of ids
that a handed-over cache held before the prompt's first column (0 when they are not known: drafting then starts from the
prompt, which costs acceptance, never exactness).
"""

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdec.drafters.base import DraftFailure, DraftRequest
from hf_specdec.host.cache import RaggedCache
from hf_specdec.host.draft_copy import kept_ids
from hf_specdec.host.runner import ModelRunner, cache_keyword, forward_keywords, input_device
from hf_specdec.sequence import Sequence
from hf_specdec.vocabulary import VocabularyMap

__all__ = ["DraftMemory", "DraftModel", "output_vocab_size"]


def output_vocab_size(model: Any) -> int:
    """Rows of `model`'s output head."""
    return model.config.get_text_config(decoder=True).vocab_size


@dataclass
class DraftMemory:
    """A draft's keys after a call, kept beside the cache that the call returned.

    Attributes:
        model: weak reference to the draft.
        method: the drafter's name: one model may draft in more than one way.
        ids: int64 [batch, slots], the tokens behind the keys (and the last one, whose keys are still missing).
        padding_mask: int64 [batch, seq] or None, as the call had it.
        cache: the keys.
        valid: slots per row that hold keys of `ids`.
    """

    model: weakref.ref
    method: str
    ids: Tensor
    padding_mask: Tensor | None
    cache: RaggedCache
    valid: list[int]

    def common_prefix(self, request: DraftRequest, ids: Tensor) -> list[int] | None:
        """Slots per row that can be used again for `ids` [batch, seq]; None if these are not the same rows."""
        is_same_draft = self.model() is request.model and self.method == request.method
        if not is_same_draft or ids.shape[0] != self.ids.shape[0] or not self._pads_alike(request.padding_mask):
            return None
        width = min(ids.shape[1], self.ids.shape[1])
        same = (ids[:, :width] == self.ids[:, :width].to(ids.device)).long().cumprod(dim=1).sum(dim=1).tolist()
        return [min(length, valid) for length, valid in zip(same, self.valid, strict=True)]

    def _pads_alike(self, mask: Tensor | None) -> bool:
        def padding(m: Tensor | None) -> list[int] | None:
            return None if m is None or bool((m != 0).all()) else (m == 0).sum(dim=1).tolist()

        return padding(mask) == padding(self.padding_mask)


class DraftModel:
    """The draft model of one call. Its forwards raise `DraftFailure`, whatever goes wrong inside them.

    Args:
        request: what to draft for.
        around: makes the context in which every forward runs.
    """

    feed_width = 2
    """Tokens of the text that a step's first forward takes."""

    def __init__(
        self, request: DraftRequest, around: Callable[[], AbstractContextManager] = contextlib.nullcontext
    ) -> None:
        self.request, self.model, self._around = request, request.model, around
        self.vocabulary = VocabularyMap(request.vocab_size, output_vocab_size(request.model), kept_ids(request.model))
        history = request.history_ids
        self.shift = 0 if history is None else history.shape[1]
        self.valid: list[int] = []
        self._runner: ModelRunner | None = None
        self._blocked = torch.zeros((), dtype=torch.bool)  # per row from the prefill on
        self._padding = self._row_padding()
        config = self.model.config.get_text_config(decoder=True)
        self._max_positions: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self._sequence: Sequence | None = None

    def _row_padding(self) -> list[int]:
        mask = self.request.padding_mask
        return [] if mask is None else (mask == 0).sum(dim=1).tolist()

    def room(self, sequence: Sequence) -> int:
        """Tokens that fit behind the longest row in the draft's context. Asked once a step, also where nothing is
        drafted: a rejection in the step before is seen here."""
        self._forget_rejected(sequence)
        padding = self._padding or [0] * sequence.batch
        return self._max_positions - max(
            sequence.host_lengths[row] + self.shift - padding[row] for row in sequence.live_rows
        )

    def debt(self, sequence: Sequence) -> int:
        """Tokens, all rows together, that a step would have to read before drafting."""
        lengths = [length + self.shift for length in sequence.host_lengths]
        if self._runner is None:
            memory = self.request.resume
            held = min(memory.valid, default=0) if isinstance(memory, DraftMemory) else 0
            return sequence.batch * max(0, max(lengths) - 1 - held)
        return sequence.batch * max(0, *(length - 2 - valid for length, valid in zip(lengths, self.valid, strict=True)))

    def is_blocked(self, feed: Tensor) -> Tensor:
        """bool [batch]: rows that hold an id which the draft cannot embed; `feed` are their newest ids."""
        self._blocked = self._blocked | ~self.vocabulary.is_embeddable(feed).all(dim=1)
        return self._blocked

    def follow(self, sequence: Sequence, draft_length: int) -> None:
        """Bring the draft's keys to two tokens short of every row's end (prefill, catch-up, or nothing to do), and make
        room for a step of `draft_length` tokens."""
        if self._runner is None:
            self._prefill(sequence)
        self._sequence = sequence
        self._forget_rejected(sequence)
        lengths = [length + self.shift for length in sequence.host_lengths]
        behind = max(length - 2 - valid for length, valid in zip(lengths, self.valid, strict=True))
        if behind > 0:
            columns = torch.tensor(self.valid, device=sequence.device)[:, None] - self.shift
            columns = columns + torch.arange(behind, device=sequence.device)
            ids = sequence.ids.gather(1, columns.clamp(0, sequence.ids.shape[1] - 1))
            # Steps that drafted nothing did not look at what they committed.
            is_text = columns < sequence.lengths[:, None]
            self._blocked = self._blocked | (is_text & ~self.vocabulary.is_embeddable(ids)).any(dim=1)
            self._forward(ids, self.valid)
            self.valid = [length - 2 for length in lengths]
        # Room is made here, at the lengths to which a rejection may take the rows back, and not between drafted tokens.
        assert self._runner is not None
        self._runner.cache.set_lengths([length - 2 for length in lengths], sequence.live_rows)
        self._runner.cache.make_room(draft_length + 1)

    def _forget_rejected(self, sequence: Sequence) -> None:
        """Of what the last step fed, the accepted tokens stay true; the row's newest token was never fed."""
        fed = [length + self.shift - 1 for length in sequence.host_lengths]
        self.valid = [min(pair) for pair in zip(self.valid, fed, strict=False)]  # none before the prefill

    def forget_drafted(self, sequence: Sequence, rows: list[int]) -> None:
        """Of the keys of `rows`, only those of committed text stay true."""
        for row in rows:
            self.valid[row] = min(self.valid[row], sequence.host_lengths[row] + self.shift)

    def next_scores(self, feed: Tensor, sequence: Sequence, position: int, is_short: bool = False) -> Tensor:
        """Scores [batch, target vocab] float32 for drafted position `position`; `feed` [batch, 2 or 1] are its
        inputs. `is_short`: over `vocabulary.short_ids` only."""
        first = position - 1 if position else -2
        starts = [length + self.shift + first for length in sequence.host_lengths]
        output = self._forward(feed, starts)
        self.valid = [start + feed.shape[1] for start in starts]
        logits = output.logits[:, -1].to(sequence.device)
        return self.vocabulary.to_short_logits(logits) if is_short else self.vocabulary.to_target_logits(logits)

    def _forward(self, ids: Tensor, starts: list[int]) -> Any:
        assert self._runner is not None
        try:
            with self._around():
                return self._runner.forward(ids.clamp(max=self.vocabulary.draft_size - 1), starts, num_logits=1)
        except Exception as error:  # whatever a draft model may raise: the call must go on without it
            raise DraftFailure(f"{type(error).__name__}: {error}") from error

    def _prefill(self, sequence: Sequence) -> None:
        prompt = sequence.ids[:, : sequence.prompt_length]
        history = self.request.history_ids
        context = prompt if history is None else torch.cat([history.to(prompt.device), prompt], dim=1)
        self._blocked = ~self.vocabulary.is_embeddable(context).all(dim=1)
        context = context.clamp(max=self.vocabulary.draft_size - 1)
        try:
            with self._around():
                self._read_context(context)
        except Exception as error:
            raise DraftFailure(f"{type(error).__name__}: {error}") from error

    def _read_context(self, context: Tensor) -> None:
        mask, positions = self.request.padding_mask, _positions(self.request.padding_mask, context)
        # A step reads the prompt's last token again: a sliding layer filled up to it would have dropped what that sees.
        length = max(1, context.shape[1] - 1)
        cache, done = self._resumed(context)
        if cache is None:
            done = min(length, self.request.prefill_chunk_size or length)
            cache = self._first_chunk(context[:, :done], mask, positions)
        last, slots = positions[:, -1:], context.shape[1]
        self._runner = ModelRunner(self.model, cache, mask, last, slots, 1 << 30, self._max_positions)
        while done < length:
            stop = min(length, done + (self.request.prefill_chunk_size or length))
            self._runner.forward(context[:, done:stop], [done] * context.shape[0], num_logits=1)
            done = stop
        self.valid = [length] * context.shape[0]

    def _resumed(self, context: Tensor) -> tuple[RaggedCache | None, int]:
        memory = self.request.resume
        if not isinstance(memory, DraftMemory):  # a look-up leaves no keys
            return None, 0
        usable = memory.common_prefix(self.request, context)
        if not usable or min(usable) == 0 or not memory.cache.can_roll_back(min(usable)):
            return None, 0
        return memory.cache, min(usable)

    def _first_chunk(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> RaggedCache:
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        keywords, device = forward_keywords(self.model), input_device(self.model, ids)
        inputs: dict[str, Any] = {cache_keyword(self.model): cache, "use_cache": True, "return_dict": True}
        if mask is not None:
            inputs["attention_mask"] = mask[:, : ids.shape[1]].to(device)
        if "position_ids" in keywords:
            inputs["position_ids"] = positions[:, : ids.shape[1]].to(device)
        if "logits_to_keep" in keywords:
            inputs["logits_to_keep"] = 1
        self.model(input_ids=ids.to(device), **inputs)
        return RaggedCache(cache, [ids.shape[1]] * ids.shape[0])

    def keep(self) -> Any:
        """The keys with the ids they belong to; the draft must not be used in this call any more."""
        if self._runner is None:  # never asked, as with a budget of one token: what was kept before stays good
            return self.request.resume
        if self._sequence is None:
            return None
        sequence, history = self._sequence, self.request.history_ids
        ids = sequence.ids[:, : max(sequence.host_lengths)]
        if history is not None:
            ids = torch.cat([history.to(ids.device), ids], dim=1)
        lengths = [length + self.shift for length in sequence.host_lengths]
        valid = [min(valid, length - 1) for valid, length in zip(self.valid, lengths, strict=True)]
        return DraftMemory(
            weakref.ref(self.model),
            self.request.method,
            ids.clone(),
            self.request.padding_mask,
            self._runner.cache,
            valid,
        )


def _positions(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Position ids [batch or 1, seq] as `generate()` makes them."""
    if mask is None:
        return torch.arange(ids.shape[1], device=ids.device)[None]
    return (mask.long().cumsum(dim=-1) - 1).masked_fill(mask == 0, 0)
