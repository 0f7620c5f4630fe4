"""From scores to probabilities, and from probabilities and uniforms to token ids.

A draw is the inverse of the cumulative distribution: for weights w and a uniform u in [0, 1), the first index x with
w_0 + ... + w_x > u * (w_0 + ... + w_V-1). Sums are float64, so a vocabulary of 152k float32 weights loses nothing, and
a token of weight zero never comes out, whatever u is. Randomness is always an argument.

Source: residual norm(max(0, p - q)) of Leviathan et al. 2023 (arXiv 2211.17192), section 2.3, and of Chen et al. 2023
(arXiv 2302.01318), Algorithm 2. Shape-static and free of host reads, so that it can be captured into a CUDA graph.
Knows nothing of models, processors or verification rules.
"""

__all__ = ["draw", "residual_probs", "residual_weights", "softmax_probs"]

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

BLOCK_WIDTH = 512
"""Weights per block of the two-level search of `draw`; about the square root of the largest vocabularies."""

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def softmax_probs(scores: Float[Tensor, "*lead vocab"]) -> Float[Tensor, "*lead vocab"]:
    """Probabilities of processed scores, in float32 or wider.

    Args:
        scores: logits after their processors, any float dtype; -inf means impossible.

    Returns:
        The softmax over `vocab`: half precision is widened to float32 *before* the exponentials, float32 and float64
        stay. A row that is all -inf, or holds NaN or +inf, is NaN.
    """
    dtype = torch.float32 if scores.dtype in _HALF_DTYPES else scores.dtype
    return torch.softmax(scores, dim=-1, dtype=dtype)


def draw(probs: Float[Tensor, "*lead vocab"], uniforms: Float[Tensor, "*lead"]) -> Int[Tensor, "*lead"]:
    """One token id per row by inverse CDF.

    A wide vocabulary is searched in two levels, block sums first and then inside one block: the same cumulative sum in
    float64, without a serial pass over all of it.

    Args:
        probs: non-negative weights; they need not sum to 1.
        uniforms: one number in [0, 1) per row.

    Returns:
        The first id whose cumulative sum exceeds u * total. An id of weight 0 is never returned as long as the row has
        a positive weight; a row of zeros or NaN gives some id inside the vocabulary.
    """
    vocab = probs.shape[-1]
    if vocab <= 2 * BLOCK_WIDTH:
        reach = _reach(probs)
        return _first_above(reach, uniforms.to(torch.float64) * reach.amax(dim=-1))
    num_missing = -vocab % BLOCK_WIDTH
    padded = functional.pad(probs, (0, num_missing)) if num_missing else probs
    blocks = padded.unflatten(-1, (-1, BLOCK_WIDTH))
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    reach = _reach(sums)
    mass = uniforms.to(torch.float64) * reach.amax(dim=-1)
    block_ids = _first_above(reach, mass).unsqueeze(-1)
    before = functional.pad(sums.cumsum(dim=-1), (1, 0)).gather(-1, block_ids).squeeze(-1)
    inside = blocks.take_along_dim(block_ids.unsqueeze(-1), dim=-2).squeeze(-2)
    ids = block_ids.squeeze(-1) * BLOCK_WIDTH + _first_above(_reach(inside), mass - before)
    return ids.clamp(max=vocab - 1)


def _reach(weights: Float[Tensor, "*lead n"]) -> Float[Tensor, "*lead n"]:
    """Float64 cumulative sum, and 0 where the weight is 0: such an index exceeds no threshold."""
    return torch.where(weights > 0, weights.cumsum(dim=-1, dtype=torch.float64), 0.0)


def _first_above(reach: Float[Tensor, "*lead n"], mass: Float[Tensor, "*lead"]) -> Int[Tensor, "*lead"]:
    """First index whose reach exceeds `mass`, which is kept below the largest reach (u * total can round up to it)."""
    total = reach.amax(dim=-1)
    threshold = torch.minimum(mass.clamp(min=0), torch.nextafter(total, torch.zeros_like(total)))
    # argmax gives the first of equal values; searchsorted would trust parallel scans to be monotone to the last bit.
    return (reach > threshold.unsqueeze(-1)).to(torch.uint8).argmax(dim=-1)


def residual_weights(
    target_probs: Float[Tensor, "*lead vocab"],
    draft_probs: Float[Tensor, "*lead vocab"],
    scale: Float[Tensor, "*lead"] | None = None,
) -> Float[Tensor, "*lead vocab"]:
    """max(0, scale * p - q), not normalised; p itself where that has no mass.

    No mass means that p and q differ by rounding only, so p is the right law to draw from.

    Args:
        target_probs: p.
        draft_probs: q.
        scale: factor on p per row, of p's dtype (block verification); 1 if None.
    """
    scaled = target_probs if scale is None else scale.unsqueeze(-1) * target_probs
    weights = (scaled - draft_probs).clamp_min_(0)
    return torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, target_probs)


def residual_probs(
    target_probs: Float[Tensor, "*lead vocab"], draft_probs: Float[Tensor, "*lead vocab"]
) -> Float[Tensor, "*lead vocab"]:
    """norm(max(0, p - q)), the law of the token that replaces a rejected one (Leviathan et al. 2023, section 2.3).

    Args:
        target_probs: p.
        draft_probs: q.

    Returns:
        Probabilities over `vocab`; p where the residual has no mass.
    """
    weights = residual_weights(target_probs, draft_probs)
    return weights / weights.sum(dim=-1, keepdim=True)
