"""bitsandbytes' nf4 linears for nets that were put together in memory.

nf4 (Dettmers et al. 2023, arXiv 2305.14314) takes blocks of 64 weights to 16 levels times the block's largest. Weights
that are levels already stay what they are, so a base that was put on the grid once gives a 16-bit and a 4-bit target of
one function. Double quantization is off: it would move the scales.

Imports bitsandbytes only when asked to.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["linear", "on_grid", "why_not"]

BLOCK = 64
# Levels lie at most 0.304 of the block's largest weight apart; half of that, and a little for bfloat16.
LARGEST_ERROR = 0.16


def why_not(device: torch.device) -> str | None:
    """The reason why nf4 linears cannot be used on `device`, None if they can: one is tried."""
    try:
        weight = torch.linspace(-1, 1, 4 * BLOCK * BLOCK, device=device).view(BLOCK, -1)
        error = float((on_grid(weight) - weight).abs().max())
        rows = torch.eye(weight.shape[1], dtype=torch.bfloat16, device=device)[:2]
        product = linear(weight)(rows).float()
        error = max(error, float((product - weight[:, :2].T).abs().max()))
    except Exception as failure:  # whatever a missing library or kernel raises
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    return None if error <= LARGEST_ERROR else f"a product is wrong by {error:.2g}, at most {LARGEST_ERROR} is rounding"


@torch.no_grad()
def on_grid(weight: Tensor) -> Tensor:
    """`weight` [out, in] rounded to nf4's levels, in its own dtype."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return functional.dequantize_4bit(codes, state).to(weight.dtype)


def linear(weight: Tensor) -> nn.Module:
    """A linear without bias that holds `weight` [out, in] in nf4 and multiplies in bfloat16."""
    from bitsandbytes import nn as layers

    bnb: Any = layers  # its annotations do not say what it takes

    with torch.device("meta"):
        module = bnb.Linear4bit(
            weight.shape[1],
            weight.shape[0],
            bias=False,
            compute_dtype=torch.bfloat16,
            compress_statistics=False,
            quant_type="nf4",
        )
    module.weight = bnb.Params4bit(
        weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4", module=module
    ).to(weight.device)
    return module.eval()
