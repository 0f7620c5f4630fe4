"""Linear layers of a draft in 4 or 8 bits, made from weights in memory.

"nf4": bitsandbytes' 4-bit layers (Dettmers et al. 2023, arXiv 2305.14314), computing in the weights' dtype, as
transformers loads them. They pay where bitsandbytes multiplies packed weights: on CUDA, and on CPUs with AVX512-BF16.
Elsewhere it unpacks each matrix at each pass.

"int8": torch's 8-bit kernels for CPUs. Weights have one scale per output row. Inputs are rounded to 8 bits in the
layer, with one scale for a whole tensor: every row of inputs is therefore divided by its largest entry first, or one
token with outliers would blank all others.

Knows nothing of models.
"""

import functools
import importlib
import warnings
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

__all__ = ["QUANTIZATIONS", "Int8Linear", "bytes_per_weight", "check_kernels", "converted", "is_linear", "why_slow"]

_BYTES = {"int8": 1.0, "nf4": 0.5 + 4 / 64}  # 4-bit weights have one float32 scale for every 64 of them
QUANTIZATIONS = tuple(_BYTES)
_SMALLEST = torch.finfo(torch.float32).tiny


def is_linear(module: Any) -> bool:
    """Whether `module` is a plain linear layer; a subclass may do anything."""
    return type(module) is nn.Linear or type(module) is Conv1D


def bytes_per_weight(quantization: str) -> float:
    """Memory of one converted weight, scales included."""
    return _BYTES[quantization]


def check_kernels(quantization: str, device: torch.device) -> None:
    """Raise unless layers on `device` can be converted.

    Raises:
        ImportError: "nf4" without bitsandbytes.
        ValueError: "int8" on an accelerator, or in a torch without these kernels.
    """
    if quantization == "nf4":
        try:
            importlib.import_module("bitsandbytes")
        except ImportError:
            raise ImportError(
                'draft_quantization="nf4" needs bitsandbytes, which is not installed: '
                "pip install 'hf_specdec[bitsandbytes]'."
            ) from None
    elif device.type != "cpu":
        raise ValueError(
            f'draft_quantization="int8" has kernels for CPUs, and the draft is on {device}. Pass "nf4" or leave it out.'
        )
    elif not (hasattr(torch, "_make_per_channel_quantized_tensor") and hasattr(torch.ops.quantized, "linear_prepack")):
        raise ValueError(
            f'draft_quantization="int8" needs 8-bit kernels, which torch {torch.__version__} has not. Leave it out.'
        )


def why_slow(quantization: str, device: torch.device) -> str | None:
    """What a user should know of layers that are slower than they were, or None."""
    if quantization != "nf4" or device.type != "cpu" or _has_avx512bf16():
        return None
    return (
        "bitsandbytes multiplies 4-bit weights on CPUs with AVX512-BF16 only and unpacks them at every pass on this "
        'one: draft_quantization="int8" is faster here.'
    )


@functools.cache
def _has_avx512bf16() -> bool:
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


@torch.no_grad()
def converted(module: nn.Module, quantization: str) -> nn.Module:
    """A layer in `quantization` that computes what `module` (see `is_linear`) does; `module` is left as it is."""
    weight = cast(Tensor, module.weight).detach()
    weight = weight.t().contiguous() if isinstance(module, Conv1D) else weight
    bias = cast(Tensor | None, module.bias)
    bias = None if bias is None else bias.detach().clone()
    return Int8Linear(weight, bias) if quantization == "int8" else _four_bit(weight, bias)


def _four_bit(weight: Tensor, bias: Tensor | None) -> nn.Module:
    import bitsandbytes

    rows, columns = weight.shape
    layer: Any = bitsandbytes.nn.Linear4bit(
        columns, rows, bias is not None, weight.dtype, compress_statistics=False, quant_type="nf4", device="meta"
    )
    parameter: Any = bitsandbytes.nn.Params4bit
    packed = parameter(weight, requires_grad=False, compress_statistics=False, quant_type="nf4", module=layer)
    layer.weight = packed.to(weight.device)  # this is what packs it
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return layer.eval()


@final
class Int8Linear(nn.Module):
    """float32 out of any float in: x Wᵀ + b with W in 8 bits.

    Args:
        weight: float [out, in].
        bias: float [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed_bytes = weight.numel()
        wide = weight.float()
        scales = wide.abs().amax(dim=1).clamp_min(_SMALLEST * 127) / 127
        with warnings.catch_warnings():  # torch means to drop quantized tensors one day: see check_kernels
            warnings.simplefilter("ignore")
            whole = (wide / scales[:, None]).round_().to(torch.int8)  # a third of the time that torch's own takes
            rounded = torch._make_per_channel_quantized_tensor(whole, scales, torch.zeros_like(scales).long(), 0)
            self._packed = torch.ops.quantized.linear_prepack(rounded, None)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[*, in] → float32 [*, out]."""
        rows = inputs.reshape(-1, self.in_features).float()
        if rows.shape[0] == 1:
            output = self._multiply(rows)
        else:
            largest = rows.abs().amax(dim=1, keepdim=True).clamp_min(_SMALLEST)
            output = self._multiply(rows / largest) * largest
        if self.bias is not None:
            output = output + self.bias
        return output.view(*inputs.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        # 7 bits of inputs: without VNNI two products of 8 bits overflow the 16 bits that they are summed in.
        return torch.ops.quantized.linear_dynamic(rows, self._packed, True)

    def extra_repr(self) -> str:
        """As `nn.Linear` says it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
