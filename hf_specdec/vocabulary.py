"""Which draft ids mean which target ids.

One tokenizer, two embedding tables: models of a family pad their tables to different sizes (Qwen2.5-0.5B has 151,936
rows, Qwen2.5-7B 152,064). Ids below the smaller size are shared. A draft token is drawn from the shared ids only, so
q = 0 on ids that only the target has, and the target still gives those by residual or bonus (Chen et al. 2023,
arXiv 2302.01318, Theorem 1 holds for any q). A text with an id that the draft cannot embed is one to draft no more for.
A head that was cut to a short list of ids is the same case: q = 0 on all others, which the draft still embeds.

Knows nothing of models or caches; a tokenizer is anything with `get_vocab()`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["MAX_PADDING_ROWS", "Disagreement", "VocabularyMap", "check_vocabularies", "compare_vocabularies"]

MAX_PADDING_ROWS = 1024
"""Rows by which padding alone may tell two sizes apart: Qwen2.5 0.5B and 7B differ by 128; other pads are powers of two
up to 1,024. A larger difference is another vocabulary."""

_REMEDY = (
    "Accept/resample compares probabilities token by token: use a draft with the same tokenizer, "
    "or speculative_config=False."
)


@runtime_checkable
class HasVocabulary(Protocol):
    """A tokenizer, as far as this module needs one."""

    def get_vocab(self) -> Mapping[str, int]:
        """Every token's text and id, added tokens included."""
        ...


@dataclass(frozen=True)
class VocabularyMap:
    """How the rows of the draft's output head and embedding stand to the target's.

    Attributes:
        target_size: rows of the target's output head.
        draft_size: rows of the draft's embedding, and of its output head unless that was cut.
        kept_ids: int64 [kept], ascending: the ids that the rows of a cut head stand for; None for a whole head.
    """

    target_size: int
    draft_size: int
    kept_ids: Tensor | None = field(default=None, compare=False)

    @property
    def shared_size(self) -> int:
        """Ids below this one exist on both sides."""
        return min(self.target_size, self.draft_size)

    @property
    def head_size(self) -> int:
        """Rows of the draft's output head."""
        return self.draft_size if self.kept_ids is None else len(self.kept_ids)

    @cached_property
    def short_ids(self) -> Tensor | None:
        """int64 [short]: the target's ids that a cut head can give, in the order of its rows; None for a whole head."""
        return None if self.kept_ids is None else self.kept_ids[self.kept_ids < self.shared_size]

    def to_short_logits(self, draft_logits: Float[Tensor, "*rows kept"]) -> Float[Tensor, "*rows short"]:
        """The logits of a cut head over `short_ids`, float32 or wider.

        Raises:
            ValueError: as `to_target_logits`.
        """
        self._check_width(draft_logits)
        assert self.short_ids is not None
        return _widened(draft_logits[..., : len(self.short_ids)])  # ascending: what only the draft has comes last

    def to_target_logits(self, draft_logits: Float[Tensor, "*rows draft_vocab"]) -> Float[Tensor, "*rows vocab"]:
        """The draft's logits over the target's ids: −inf on target-only ids, draft-only ids dropped before drawing.

        Returns:
            float32, or the logits' own dtype where that is wider. Between equal sizes nothing but the upcast is done,
            and logits that need none come back as the same tensor.

        Raises:
            ValueError: the logits have another width than the draft's output head was said to have.
        """
        if self.short_ids is not None:
            logits = self.to_short_logits(draft_logits)
            whole = logits.new_full((*logits.shape[:-1], self.target_size), float("-inf"))
            return whole.index_copy_(-1, self.short_ids.to(logits.device), logits)
        self._check_width(draft_logits)
        logits = _widened(draft_logits[..., : self.shared_size] if self.draft_size > self.target_size else draft_logits)
        if self.target_size == self.shared_size:
            return logits
        return torch.nn.functional.pad(logits, (0, self.target_size - self.shared_size), value=float("-inf"))

    def _check_width(self, draft_logits: Tensor) -> None:
        if draft_logits.shape[-1] != self.head_size:
            raise ValueError(
                f"Expected draft logits over {self.head_size} tokens, got {draft_logits.shape[-1]}. "
                "Build the VocabularyMap from the sizes of the output heads."
            )

    def is_embeddable(self, token_ids: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Whether the draft has an embedding for each id of the target."""
        return token_ids < self.draft_size


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Disagreement:
    """The first shared id that does not mean the same on both sides; a text is None where there is no token."""

    token_id: int
    target_text: str | None
    draft_text: str | None

    def __str__(self) -> str:
        target, draft = ("no token" if text is None else repr(text) for text in (self.target_text, self.draft_text))
        return f"Target and draft disagree on token {self.token_id}: {target} and {draft}. {_REMEDY}"


def compare_vocabularies(
    target_vocab: Mapping[str, int], draft_vocab: Mapping[str, int], shared_size: int
) -> Disagreement | None:
    """The first id below `shared_size` that the two sides read differently; None when they agree.

    A difference is an id with two texts, or a text with two ids of which one is shared. An id that has a text on one
    side only is none: padding rows, and special tokens that one tokenizer added and the other left unused.

    Args:
        target_vocab: text → id of the target's tokenizer.
        draft_vocab: text → id of the draft's tokenizer.
        shared_size: ids from here on are never compared in verification.
    """
    # One dictionary look-up per token; the sides are inverted only for the few tokens that are left over.
    target_left = {index: text for text, index in target_vocab.items() if draft_vocab.get(text) != index}
    draft_left = {index: text for text, index in draft_vocab.items() if target_vocab.get(text) != index}
    moved = {min(index, draft_vocab[text]) for index, text in target_left.items() if text in draft_vocab}
    differing = [index for index in moved | (target_left.keys() & draft_left.keys()) if index < shared_size]
    if not differing:
        return None
    first = min(differing)
    return Disagreement(first, _text_of(first, target_vocab, target_left), _text_of(first, draft_vocab, draft_left))


def check_vocabularies(
    target_size: int,
    draft_size: int,
    target_tokenizer: HasVocabulary | None = None,
    draft_tokenizer: HasVocabulary | None = None,
) -> VocabularyMap:
    """The map between the two vocabularies, once they are known to be one vocabulary with different padding.

    Args:
        target_size: rows of the target's output head.
        draft_size: rows of the draft's output head and embedding.
        target_tokenizer: compared id by id when both are given; the result is kept per pair of tokenizers.
        draft_tokenizer: see `target_tokenizer`.

    Raises:
        ValueError: sizes further apart than padding explains, or tokenizers that disagree on a shared id.
    """
    if abs(target_size - draft_size) > MAX_PADDING_ROWS:
        raise ValueError(
            f"The target has {target_size:,} token rows and the draft {draft_size:,}; padding explains a difference of "
            f"at most {MAX_PADDING_ROWS:,}. {_REMEDY}"
        )
    vocabulary = VocabularyMap(target_size, draft_size)
    if target_tokenizer is not None and draft_tokenizer is not None and target_tokenizer is not draft_tokenizer:
        disagreement = _compare_once(target_tokenizer, draft_tokenizer, vocabulary.shared_size)
        if disagreement is not None:
            raise ValueError(str(disagreement))
    return vocabulary


_Results = dict[tuple[int, int, int], Disagreement | None]
_compared: WeakKeyDictionary[Any, WeakKeyDictionary[Any, _Results]] = WeakKeyDictionary()


def _compare_once(target: HasVocabulary, draft: HasVocabulary, shared_size: int) -> Disagreement | None:
    """`compare_vocabularies`, remembered for as long as both tokenizers live and keep their number of tokens."""
    key = (shared_size, _num_tokens(target), _num_tokens(draft))
    try:
        results = _compared.setdefault(target, WeakKeyDictionary()).setdefault(draft, {})
    except TypeError:  # a tokenizer that cannot be hashed or weakly referenced is compared each time
        results = {}
    if key not in results:
        results[key] = compare_vocabularies(target.get_vocab(), draft.get_vocab(), shared_size)
    return results[key]


def _num_tokens(tokenizer: Any) -> int:
    """Tokens of the tokenizer now, 0 when it cannot say: adding one makes an earlier comparison stale."""
    return len(tokenizer) if hasattr(tokenizer, "__len__") else 0


def _text_of(token_id: int, vocab: Mapping[str, int], left: Mapping[int, str]) -> str | None:
    if token_id in left:
        return left[token_id]
    return next((text for text, index in vocab.items() if index == token_id), None)
