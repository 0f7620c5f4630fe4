"""The lossless rules: which drafted tokens stay, and which token follows them.

Per row, x_1 ... x_L were drafted from q; p is the target's law at each of the L + 1 positions.

- *standard* walks left to right and keeps x_i iff u_i * q(x_i) < p(x_i); after the first rejection the next token comes
  from norm(max(0, p - q)), after L acceptances from p (the bonus). Chen et al. 2023 (arXiv 2302.01318), Algorithm 2;
  Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1.
- *block* keeps the longest prefix whose own coin allows it, in expectation at least as many tokens for the same drafts.
  Sun et al. 2024 (arXiv 2403.10444), Algorithm 2.

A drafter without probabilities is a point mass on its token, so one rule serves every drafter. Both rules are exact if
q is the very tensor that the token was drawn from. Shape-static, without host reads. Knows nothing of models or caches.
"""

__all__ = [
    "BlockVerifier",
    "StandardVerifier",
    "Verdict",
    "Verifier",
    "verify_block",
    "verify_greedy",
    "verify_standard",
]

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from hf_specdec.registry import register_verifier
from hf_specdec.sampling import draw, residual_weights
from hf_specdec.shapes import BatchInts, DraftIds, DraftProbs, TargetProbs, VerifyIds, VerifyUniforms

_LOG_RATIO_OF_IMPOSSIBLE_DRAFT = 1500.0
"""Stands for log(p / 0); beyond any log-ratio of two float64 numbers, and finite so that sums stay defined."""


class Verdict(NamedTuple):
    """What a verifier decides in one step."""

    num_accepted: BatchInts
    """Drafted tokens that stay, 0 to the row's draft length."""
    next_ids: BatchInts
    """The token after them: resampled after a rejection, else the bonus."""
    accept_probs: Float[Tensor, "batch draft"]
    """min(1, p / q) of each drafted token, float64; 0 beyond the row's draft length and where p or q is NaN."""
    survival_probs: Float[Tensor, "batch draft"] | None = None
    """Probability, given the draft, that at least its first i tokens stay, float64; None: the product of `accept_probs`
    up to i, which is what it is for a rule that goes token by token."""


class Verifier(ABC):
    """A lossless rule. Register a subclass with `register_verifier` and name it in ``rejection_sample_method``."""

    @abstractmethod
    def __call__(
        self,
        target_probs: TargetProbs,
        draft_probs: DraftProbs | None,
        draft_ids: DraftIds,
        draft_lengths: BatchInts,
        uniforms: VerifyUniforms,
    ) -> Verdict:
        """Decide one step of every row.

        Args:
            target_probs: p at every drafted position and after the last one.
            draft_probs: q, the very tensor each draft id was drawn from; None for a point mass on the draft ids.
            draft_ids: drafted tokens; ids beyond a row's length are valid ids without meaning.
            draft_lengths: drafted tokens per row, 0 to `draft`.
            uniforms: float64 in [0, 1). Column i is the coin of drafted token i, the last column the final draw's.

        Returns:
            The verdict. A row with NaN is decided too, with ids inside the vocabulary: finding NaN is the caller's job.
        """


@final
class StandardVerifier(Verifier):
    """Accept or reject token by token: Chen et al. 2023 (arXiv 2302.01318), Algorithm 2."""

    def __call__(
        self,
        target_probs: TargetProbs,
        draft_probs: DraftProbs | None,
        draft_ids: DraftIds,
        draft_lengths: BatchInts,
        uniforms: VerifyUniforms,
    ) -> Verdict:
        """Keep the leading tokens with u * q < p; see `Verifier.__call__`."""
        target_at, draft_at = _probs_at_ids(target_probs, draft_probs, draft_ids)
        is_drafted = _is_drafted(draft_ids, draft_lengths)
        coins = uniforms[:, : draft_ids.shape[1]].double()
        # Strictly: p = 0 is rejected even by a coin of 0, and q = 0 < p is accepted by every coin.
        is_accepted = is_drafted & (coins * draft_at < target_at)
        num_accepted = is_accepted.long().cumprod(dim=1).sum(dim=1)
        next_ids = _draw_next(target_probs, draft_probs, draft_ids, draft_lengths, uniforms, num_accepted)
        accept_probs = _accept_probs(target_at, draft_at, is_drafted)
        return Verdict(num_accepted, next_ids, accept_probs, accept_probs.cumprod(dim=1))


@final
class BlockVerifier(Verifier):
    """Accept or reject prefixes as blocks: Sun et al. 2024 (arXiv 2403.10444), Algorithm 2."""

    def __call__(
        self,
        target_probs: TargetProbs,
        draft_probs: DraftProbs | None,
        draft_ids: DraftIds,
        draft_lengths: BatchInts,
        uniforms: VerifyUniforms,
    ) -> Verdict:
        """Keep the longest prefix i with u_i < h_i; see `Verifier.__call__`."""
        width = draft_ids.shape[1]
        target_at, draft_at = _probs_at_ids(target_probs, draft_probs, draft_ids)
        is_drafted = _is_drafted(draft_ids, draft_lengths)
        prefix_probs = _prefix_probs(target_at, draft_at)
        keep_probs = _keep_probs(target_probs, draft_probs, target_at, prefix_probs, draft_lengths)
        is_kept = is_drafted & (uniforms[:, :width].double() < keep_probs)
        positions = torch.arange(1, width + 1, device=draft_ids.device)
        num_accepted = functional.pad(positions * is_kept, (1, 0)).amax(dim=1)
        scale = functional.pad(prefix_probs, (1, 0), value=1.0).gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        next_ids = _draw_next(target_probs, draft_probs, draft_ids, draft_lengths, uniforms, num_accepted, scale)
        survival = torch.where(is_drafted, prefix_probs, 0.0).nan_to_num(nan=0.0)  # Sun et al. 2024, Lemma 3
        return Verdict(num_accepted, next_ids, _accept_probs(target_at, draft_at, is_drafted), survival)


def verify_greedy(target_ids: VerifyIds, draft_ids: DraftIds, draft_lengths: BatchInts) -> Verdict:
    """The same rule between point masses: keep drafted tokens while they are the target's own.

    Args:
        target_ids: the target's argmax at every drafted position and after the last one.
        draft_ids: drafted tokens.
        draft_lengths: drafted tokens per row, 0 to `draft`.
    """
    is_accepted = _is_drafted(draft_ids, draft_lengths) & (draft_ids == target_ids[:, : draft_ids.shape[1]])
    num_accepted = is_accepted.long().cumprod(dim=1).sum(dim=1)
    next_ids = target_ids.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    return Verdict(num_accepted, next_ids, is_accepted.double(), is_accepted.double().cumprod(dim=1))


def _is_drafted(draft_ids: DraftIds, draft_lengths: BatchInts) -> Bool[Tensor, "batch draft"]:
    """Which positions lie within the row's draft."""
    return torch.arange(draft_ids.shape[1], device=draft_ids.device) < draft_lengths.unsqueeze(1)


def _probs_at_ids(
    target_probs: TargetProbs, draft_probs: DraftProbs | None, draft_ids: DraftIds
) -> tuple[Float[Tensor, "batch draft"], Float[Tensor, "batch draft"]]:
    """p and q of the drafted tokens, float64."""
    index = draft_ids.long().unsqueeze(-1)
    target_at = target_probs.gather(-1, index).squeeze(-1).double()
    if draft_probs is None:
        return target_at, torch.ones_like(target_at)
    return target_at, draft_probs.gather(-1, index).squeeze(-1).double()


def _accept_probs(
    target_at: Float[Tensor, "batch draft"],
    draft_at: Float[Tensor, "batch draft"],
    is_drafted: Bool[Tensor, "batch draft"],
) -> Float[Tensor, "batch draft"]:
    """min(1, p / q) within the row's draft; 0 for p = 0, also over q = 0, and for NaN."""
    ratio = torch.where(draft_at <= target_at, 1.0, target_at / draft_at)
    return torch.where(is_drafted & (target_at > 0), ratio, 0.0).nan_to_num(nan=0.0)


def _prefix_probs(
    target_at: Float[Tensor, "batch draft"], draft_at: Float[Tensor, "batch draft"]
) -> Float[Tensor, "batch draft"]:
    """p_i = min(p_{i-1} * r_i, 1) with p_0 = 1 and r = p / q, for all prefixes at once.

    With S the cumulative sum of log r and S_0 = 0, log p_i = S_i - max_{j <= i} S_j: a walk reflected at 0.
    """
    if target_at.shape[1] == 0:
        return target_at
    log_ratio = (target_at / draft_at).log().clamp(max=_LOG_RATIO_OF_IMPOSSIBLE_DRAFT)
    walk = torch.where(target_at > 0, log_ratio, float("-inf")).cumsum(dim=1)
    return (walk - walk.cummax(dim=1).values.clamp(min=0.0)).exp()


def _keep_probs(
    target_probs: TargetProbs,
    draft_probs: DraftProbs | None,
    target_at: Float[Tensor, "batch draft"],
    prefix_probs: Float[Tensor, "batch draft"],
    draft_lengths: BatchInts,
) -> Float[Tensor, "batch draft"]:
    """h_i of Sun et al. 2024, equation (4): the probability of keeping prefix i, given that no longer one is kept.

    h_i = a / (a + 1 - p_i) with a = sum_x max(p_i * p(x) - q(x), 0) at the position after prefix i, and h_L = p_L.
    """
    width = prefix_probs.shape[1]
    shorter = prefix_probs[:, :-1]
    if draft_probs is None:
        excess = shorter * (1.0 - target_at[:, 1:]).clamp(min=0.0)
    else:
        # One temporary of (batch, draft - 1, vocab), in the probabilities' own dtype.
        difference = target_probs[:, 1:width] * shorter.to(target_probs.dtype).unsqueeze(-1)
        excess = difference.sub_(draft_probs[:, 1:]).clamp_(min=0).sum(dim=-1).double()
    whole = excess + (1.0 - shorter)
    # 0 / 0: p_i = 1 and p = q after the prefix, so that nothing speaks against keeping it.
    keep_shorter = torch.where(whole == 0, 1.0, excess / whole)
    is_last = torch.arange(1, width + 1, device=prefix_probs.device) == draft_lengths.unsqueeze(1)
    return torch.where(is_last, prefix_probs, functional.pad(keep_shorter, (0, 1)))


def _draw_next(
    target_probs: TargetProbs,
    draft_probs: DraftProbs | None,
    draft_ids: DraftIds,
    draft_lengths: BatchInts,
    uniforms: VerifyUniforms,
    num_accepted: BatchInts,
    scale: Float[Tensor, " batch"] | None = None,
) -> Int[Tensor, " batch"]:
    """The token after the accepted ones: from max(0, scale * p - q), or from p where the whole draft stays.

    Args:
        scale: factor on p per row; 1 if None. Without effect on the bonus token.
    """
    rows = torch.arange(draft_ids.shape[0], device=draft_ids.device)
    target_row = target_probs[rows, num_accepted]
    if draft_ids.shape[1] == 0:
        return draw(target_row, uniforms[:, -1])
    rejected = num_accepted.clamp(max=draft_ids.shape[1] - 1)
    if draft_probs is None:
        index = draft_ids.long().gather(1, rejected.unsqueeze(1))
        draft_row = torch.zeros_like(target_row).scatter_(1, index, 1.0)
    else:
        draft_row = draft_probs[rows, rejected]
    is_bonus = num_accepted == draft_lengths
    draft_row = torch.where(is_bonus.unsqueeze(1), 0.0, draft_row)
    if scale is not None:
        scale = torch.where(is_bonus, 1.0, scale).to(target_row.dtype)
    return draw(residual_weights(target_row, draft_row, scale), uniforms[:, -1])


verify_standard = StandardVerifier()
verify_block = BlockVerifier()
register_verifier("standard", StandardVerifier)
register_verifier("block", BlockVerifier)
