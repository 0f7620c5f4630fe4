"""What every drafter does: propose tokens after each row's committed text.

A drafter lives for one `generate()` call. It sees the text (`Sequence`), says what it proposes and the law it drew
from, and keeps whatever state of its own; after a rejection it finds shorter rows the next time it is asked, nothing
else.

To add one: subclass `Drafter`, implement `propose`, `hf_specdec.register_drafter("name", cls)`; it is then a `method`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_specdec.config import SpeculativeConfig
from hf_specdec.draft_length import DraftPlan, Offer
from hf_specdec.sequence import Sequence

__all__ = ["Draft", "DraftFailure", "DraftPlan", "DraftRequest", "Drafter", "Offer"]


class DraftFailure(RuntimeError):
    """The draft cannot go on (out of memory, an error inside its model, NaN): the call continues plainly."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of one step.

    Attributes:
        token_ids: int64 [batch, draft]; any valid id beyond a row's length.
        probs: float32 [batch, draft, vocab] (target vocabulary), the very tensor each token was drawn from; None for a
            point mass on `token_ids`.
        lengths: int64 [batch], tokens proposed per row, 0 included.
        is_broken: bool [batch], rows in which the draft gave NaN (its proposal ends before); None: does not happen.
    """

    token_ids: Tensor
    probs: Tensor | None
    lengths: Tensor
    is_broken: Tensor | None = None

    @classmethod
    def nothing(cls, sequence: Sequence) -> "Draft":
        """No proposal for any row."""
        return cls(sequence.ids.new_zeros((sequence.batch, 0)), None, torch.zeros_like(sequence.lengths))


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter is made from.

    Attributes:
        config: the flag.
        method: the drafter's name, what "auto" came to.
        target: the target model.
        model: the draft model, None for drafters without one.
        padding_mask: int64 [batch, seq] of the prompt, 0 on padding; None if there is none.
        history_ids: int64 [batch, past] ids that a handed-over cache already holds before the prompt's first column;
            None if there are none or they are not known.
        is_sampling: whether tokens are drawn (True) or chosen greedily.
        eos_ids: int64 [num_eos] or None; drafting ends after one of them.
        process: the call's position-wise logits processors: ``process(scores [batch, 1, vocab], sequence, first)`` →
            scores, where position 0 follows `first` scratch tokens; None when there are none.
        vocab_size: rows of the target's output head.
        prefill_chunk_size: tokens per prefill pass, None for all at once.
        resume: state that a former call of this drafter left beside the cache (see `Drafter.keep`), or None.
        target_call: the target in this call (`host.target.TargetModel`), which lends its keys; None outside the loop.
    """

    config: SpeculativeConfig
    target: Any
    method: str = "draft_model"
    model: Any = None
    padding_mask: Tensor | None = None
    history_ids: Tensor | None = None
    is_sampling: bool = False
    eos_ids: Tensor | None = None
    process: Callable[[Tensor, Sequence, int], Tensor] | None = None
    vocab_size: int = 0
    prefill_chunk_size: int | None = None
    resume: Any = None
    target_call: Any = None


class Drafter(ABC):
    """Proposes tokens for one call.

    Class attributes:
        needs_model: whether a draft model has to be found.
        has_probs: whether `Draft.probs` is given when sampling (else tokens are point masses).
        changes_target: whether drafting changes the target for a while; calls on one target then take turns.
        is_free: whether drafting needs no forward of any model.
        is_on_target_keys: whether it drafts on the target's own keys: it has no text to read first, and nothing to
            draft with outside a call's loop.
        record: name under which the acceptance of its tokens is kept.
        prior: acceptance expected of them before anything was measured.
    """

    needs_model: ClassVar[bool] = False
    has_probs: ClassVar[bool] = False
    changes_target: ClassVar[bool] = False
    is_free: ClassVar[bool] = False
    is_on_target_keys: ClassVar[bool] = False
    record: ClassVar[str] = "draft"
    prior: ClassVar[float] = 0.6

    def __init__(self, request: DraftRequest) -> None:
        self.request = request

    @classmethod
    def why_unfit(cls, target: Any) -> str | None:
        """The reason why this drafter cannot draft for `target` at all, or None."""
        return None

    @classmethod
    def check(cls, target: Any, config: SpeculativeConfig) -> None:
        """Raise ValueError for settings that do not fit `target`; asked by `enable` and at every call."""

    @classmethod
    def why_wrong(cls, target: Any, config: SpeculativeConfig) -> str | None:
        """As `why_unfit`, once nothing else speaks against a call on `target`, so it may be run to find out."""
        return None

    @classmethod
    def cost(cls, target: Any, config: SpeculativeConfig) -> float:
        """Seconds of a draft forward in target passes until one was measured, where there is no draft model. Default: a
        whole pass."""
        return 1.0

    @classmethod
    def variant(cls, target: Any, config: SpeculativeConfig) -> str:
        """What tells costs and acceptance under `config` from those under other settings of the same method."""
        return ""

    @property
    def parts(self) -> "list[Drafter]":
        """The drafters among which each row's is chosen: this one alone, except where several are put together."""
        return [self]

    def offers(self, sequence: Sequence, limit: int) -> list[Offer]:
        """What could be proposed now, one entry per row and at most `limit` tokens each; known before anything is
        drafted or drawn. Default: as much as may be asked."""
        return [Offer(limit, self.record, self.prior)] * sequence.batch

    def debt(self, sequence: Sequence) -> int:
        """Tokens, all rows together, that have to be read before the next draft; default: none."""
        return 0

    def prepare(self, sequence: Sequence, plan: DraftPlan) -> None:
        """Read what has to be read for the step's draft. Called once before `propose`, and timed apart from it.

        Raises:
            DraftFailure: as `propose`.
        """

    @abstractmethod
    def propose(self, sequence: Sequence, draft_length: int, uniforms: Tensor) -> Draft:
        """Propose up to `draft_length` ≥ 1 tokens after each row's committed text.

        Args:
            sequence: the text; scratch beyond each row's length may be written.
            draft_length: width of the result at most.
            uniforms: float64 [batch, draft_length], one coin per row and drafted token, on `sequence.device`.

        Raises:
            DraftFailure: the draft cannot go on. Any other exception is taken for one too, unless a logits processor
                of the call raised it.
        """

    def set_aside(self, sequence: Sequence, rows: list[int]) -> None:
        """What was just proposed for `rows` is not used: another drafter serves them."""

    def max_draft_length(self, sequence: Sequence) -> int:
        """Most tokens that may be drafted now (a draft with a short context says less); default: no limit. Asked once
        at the beginning of every step, also of one that drafts nothing."""
        return 1 << 30

    def keep(self) -> Any:
        """State worth keeping beside the returned cache for a later turn; None if there is none."""
        return None

    def close(self, sequence: Sequence) -> None:
        """The call ends, whatever happened in it; `sequence` is its text. Always called, once."""
