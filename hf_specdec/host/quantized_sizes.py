"""Which weights a quantizer converts, and how many bytes they will have: asked from the quantizer, on the meta device.

For bitsandbytes its rule is followed where that package is missing: planning needs no quantizer. Written against
transformers 5.17 to 5.24 and bitsandbytes 0.50.
"""

__all__ = [
    "CONSTANTS",
    "QUANTIZATIONS",
    "called",
    "filler",
    "is_bitsandbytes",
    "nearest",
    "quantize",
    "read_quantization",
    "tell_device",
]

import copy
import difflib
import importlib.util
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

QUANTIZATIONS = ("nf4", "fp4", "int8")
WITHOUT_FP8 = ("T4", "V100", "A10", "A40", "A6000", "RTX 20", "RTX 30")
"""In names of cards of a compute capability below 8.9, on which transformers dequantizes fp8."""
BLOCK = 64
"""Weights per constant of bitsandbytes' 4-bit formats."""
NESTED_BLOCK = 256
CONSTANTS_SHARE = 0.1
"""Of other quantized weights: transformers' own reserve for them."""
CONSTANTS = "hf_specdec_constants"
"""Name of the buffer that stands for a weight's scales."""


def filler(num_bytes: int) -> torch.Tensor:
    """A meta tensor of that size."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def read_quantization(quantization: Any, dtype: torch.dtype, *, must_load: bool = True) -> tuple[str | None, Any]:
    """What to call `quantization`, and the config that ``from_pretrained`` takes.

    Args:
        quantization: None, "nf4", "fp4", "int8", a config of transformers, or one as a dict: with "quant_method", or
            keywords of `BitsAndBytesConfig`.
        dtype: in which 4-bit weights compute, unless a config says otherwise.
        must_load: whether bitsandbytes has to be installed for the names that need it; sizes can be told without.

    Raises:
        ValueError: an unknown name or key.
        ImportError: bitsandbytes is needed and missing.
    """
    if quantization is None:
        return None, None
    if isinstance(quantization, QuantizationConfigMixin):
        return called(quantization), quantization
    if isinstance(quantization, Mapping) and "quant_method" in quantization:
        config = AutoQuantizationConfig.from_dict(dict(quantization))
        return called(config), config
    options = _options(quantization, dtype)
    if importlib.util.find_spec("bitsandbytes") is not None:
        config = BitsAndBytesConfig(**options)
        return called(config), config
    if must_load:
        raise ImportError(
            f"quantization={quantization!r} needs bitsandbytes, which is not installed: "
            "pip install 'hf_specdec[bitsandbytes]'."
        )
    config = SimpleNamespace(quant_method="bitsandbytes", **{"load_in_8bit": False, **options})
    return called(config), config


def _options(quantization: Any, dtype: torch.dtype) -> dict[str, Any]:
    """`quantization` as keywords of `BitsAndBytesConfig`."""
    if isinstance(quantization, Mapping):
        known = set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}
        for key in quantization:
            if key not in known:
                listing = ", ".join(sorted(known))
                raise ValueError(f"Unknown key {key!r} in quantization.{nearest(key, known)} Available: {listing}.")
        if not (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
            raise ValueError("quantization as a dict needs load_in_4bit=True or load_in_8bit=True.")
        four = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": dtype}  # the first as bitsandbytes has it
        return {**(four if quantization.get("load_in_4bit") else {}), **quantization}
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"Unknown quantization {quantization!r}.{nearest(quantization, QUANTIZATIONS)} Available: "
            f"{', '.join(QUANTIZATIONS)}, a dict of BitsAndBytesConfig keywords, or a quantization config of "
            "transformers."
        )
    if quantization == "int8":
        return {"load_in_8bit": True}
    return {"load_in_4bit": True, "bnb_4bit_quant_type": quantization, "bnb_4bit_compute_dtype": dtype}


def nearest(word: Any, words: Collection[str]) -> str:
    """What to add to a message on a `word` that is none of `words`."""
    near = difflib.get_close_matches(str(word).casefold(), list(words), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def called(config: Any) -> str:
    """What people call the method of `config`."""
    if is_bitsandbytes(config):
        return "int8" if getattr(config, "load_in_8bit", False) else str(getattr(config, "bnb_4bit_quant_type", "4bit"))
    method = getattr(config, "quant_method", type(config).__name__)
    return str(getattr(method, "value", method))


def is_bitsandbytes(config: Any) -> bool:
    """Whether bitsandbytes does it."""
    method = getattr(config, "quant_method", None)
    return str(getattr(method, "value", method)).startswith("bitsandbytes")


def tell_device(config: Any, gpus: Sequence[str], is_here: bool) -> None:
    """Have a checkpoint in fp8 or mxfp4 dequantized where transformers does so, by the devices that are planned for.

    Args:
        config: of the model; changed.
        gpus: names of the GPUs, "" for an unknown one, which is taken for a recent one.
        is_here: whether these are this machine's, whose packages then count.
    """
    saved = getattr(config, "quantization_config", None)
    method = saved.get("quant_method") if isinstance(saved, Mapping) else None
    if not isinstance(saved, Mapping) or method not in ("fp8", "mxfp4"):
        return
    is_kept = bool(gpus)
    if method == "fp8":
        is_kept = is_kept and not any(old in name for name in gpus for old in WITHOUT_FP8)
    elif is_here:
        is_kept = is_kept and all(importlib.util.find_spec(name) is not None for name in ("triton", "kernels"))
    if not is_kept:
        config.quantization_config = {**saved, "dequantize": True}


# --- the weights ----------------------------------------------------------------------------------------------------


def quantize(
    model: Any,
    config: Any,
    is_pre_quantized: bool,
    dtype: torch.dtype,
    plain: Mapping[str, tuple[int, int, torch.dtype]],
) -> dict[str, tuple[int, int]]:
    """Make the converted weights of `model` as large as they will be; by name, (bytes, bytes of their constants)."""
    if isinstance(config, SimpleNamespace):
        sizes = _by_rule(model, config)
    elif called(config) == "mxfp4" and is_pre_quantized and not config.dequantize:
        # transformers would look at this machine instead of the one that is planned for, and fetch kernels
        sizes = {key: 0.5 for key, weight in model.named_parameters() if ".experts." in key and weight.dim() == 3}
    else:
        sizes = _by_quantizer(model, config, is_pre_quantized, dtype)
    result = {}
    for name, element_bytes in sizes.items():
        owner, _, attribute = name.rpartition(".")
        module, weight = model.get_submodule(owner), model.get_parameter(name)
        num_bytes = math.ceil(weight.numel() * element_bytes)
        rows = weight.shape[1 if isinstance(module, Conv1D) else 0]
        constants = _constants(config, weight.numel(), rows, num_bytes)
        module._parameters[attribute] = nn.Parameter(filler(num_bytes), requires_grad=False)
        module.register_buffer(CONSTANTS, filler(constants), persistent=False)
        result[name] = (num_bytes, constants)
    for name, tensor in list(model.named_parameters()):  # replacing a linear made its bias float32
        is_other = name in plain and name not in result and tensor.dtype != plain[name][2]
        if is_other and tensor.is_floating_point() and tensor.element_size() > 1:  # fp8 stays as the quantizer made it
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._parameters[attribute] = nn.Parameter(
                tensor.to(plain[name][2]), requires_grad=False
            )
    return result


def _by_quantizer(model: Any, config: Any, is_pre_quantized: bool, dtype: torch.dtype) -> dict[str, float]:
    """Bytes per element of each weight that transformers' quantizer converts."""
    quantizer: Any = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=is_pre_quantized)
    keywords = {"device_map": None, "checkpoint_files": None, "dtype": dtype}
    accepted = inspect.signature(quantizer.preprocess_model).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    quantizer.preprocess_model(
        model=model, **{key: value for key, value in keywords.items() if takes_all or key in accepted}
    )
    return {
        name: float(quantizer.param_element_size(model, name, weight))
        for name, weight in model.named_parameters()
        if quantizer.param_needs_quantization(model, name)
    }


def _by_rule(model: Any, config: Any) -> dict[str, float]:
    """The same for bitsandbytes, without it: every linear but those that transformers leaves alone."""
    kept = HfQuantizer.get_modules_to_not_convert(model, None, getattr(model, "_keep_in_fp32_modules", None))
    return {
        f"{name}.weight": 1.0 if config.load_in_8bit else 0.5
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and not _is_kept(name, kept)
    }


def _is_kept(name: str, kept: Sequence[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") or name.endswith(f".{each}") for each in kept)


def _constants(config: Any, count: int, rows: int, num_bytes: int) -> int:
    """Bytes of a weight's scales, which lie beside it and are no parameters."""
    if not is_bitsandbytes(config):
        return math.ceil(num_bytes * CONSTANTS_SHARE)
    if getattr(config, "load_in_8bit", False):
        return 4 * rows
    blocks = math.ceil(count / BLOCK)
    if getattr(config, "bnb_4bit_use_double_quant", False):
        return blocks + 4 * math.ceil(blocks / NESTED_BLOCK) + 4 * 256
    return 4 * blocks
