"""How large a model will be once it is loaded, from its config alone.

A `Skeleton` is the model on the meta device, as it will be: weights that the quantizer converts have as many bytes as
after loading, the quantizer's constants and each layer's KV cache are buffers beside them. So what accelerate adds up
on it is what a device will hold.

- Which weights are converted, transformers' own quantizer says (`quantized_sizes`).
- What a layer caches, the model says: a forward over two meta tokens fills a real cache, whose shapes are read.

Written against transformers 5.17 to 5.24. Knows nothing of devices.
"""

__all__ = ["Skeleton", "read_config", "read_dtype"]

import contextlib
import copy
import difflib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig
from transformers.quantizers import AutoQuantizationConfig

from hf_specdec.host.quantized_sizes import CONSTANTS, called, filler, is_bitsandbytes, quantize
from hf_specdec.host.runner import cache_keyword
from hf_specdec.placement.sizes import ModelSizes, Piece

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_CACHE = "hf_specdec_cache"


# --- what the user wrote --------------------------------------------------------------------------------------------


def read_config(source: str, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of the checkpoint at `source`, a folder or a Hub id.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json, so it is no checkpoint. Pass a folder that save_pretrained made."
        )
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:
        if isinstance(error, OSError) and not folder.is_dir():
            raise ValueError(
                f"Cannot find a config of {source!r}: it is no folder here, and the Hub has no such model or cannot be "
                "reached."
            ) from error
        if "trust_remote_code" in str(error):
            raise ValueError(f"{source!r} needs code of its own. If you trust it: trust_remote_code=True.") from error
        first = (str(error).strip().splitlines() or [""])[0][:250]
        raise ValueError(f"Cannot read the config of {source!r}: {type(error).__name__}: {first}") from error


def read_dtype(dtype: str | torch.dtype | None, config: PretrainedConfig, what: str) -> torch.dtype:
    """`dtype` of the weights of `what`; "auto" and None are the checkpoint's."""
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        near = difflib.get_close_matches(name, DTYPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown dtype {name!r} for the {what}.{hint} Available: {', '.join(DTYPES)}.")
    if name != "auto":
        return getattr(torch, name)
    saved = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(saved, str):
        saved = getattr(torch, saved.removeprefix("torch."), None)
    return saved if isinstance(saved, torch.dtype) else torch.float32


# --- the skeleton ---------------------------------------------------------------------------------------------------


class Skeleton:
    """A causal LM on the meta device with every tensor as large as after loading.

    Args:
        config: of the model; copied.
        dtype: of weights that are not quantized.
        quantization: what to call it, and its config, as `read_quantization` gives them; a checkpoint that is quantized
            already needs none.
        name: for people.
        trust_remote_code: whether code that the checkpoint brings may run.

    Attributes:
        model: the module tree, for accelerate.
        sizes: the same in numbers.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        quantization: tuple[str | None, Any] = (None, None),
        name: str = "",
        trust_remote_code: bool = False,
    ) -> None:
        config = copy.deepcopy(config)
        method, quantizer_config = quantization
        saved = getattr(config, "quantization_config", None)
        is_pre_quantized = saved is not None
        if saved is not None:
            quantizer_config = AutoQuantizationConfig.from_dict(dict(saved)) if isinstance(saved, Mapping) else saved
            method = called(quantizer_config)
            delattr(config, "quantization_config")
        self.model = _on_meta(config, dtype, trust_remote_code)
        layers = _layer_names(self.model, config.get_text_config())
        cached = _cached(self.model, config, len(layers))
        plain = {key: (t.numel(), t.element_size(), t.dtype) for key, t in _tensors(self.model)}
        sizes = (
            {} if quantizer_config is None else quantize(self.model, quantizer_config, is_pre_quantized, dtype, plain)
        )
        self._layers = [self.model.get_submodule(layer) for layer in layers]
        measured = self._measured(config, dtype, method, quantizer_config, name, layers, cached, plain, sizes)
        self.sizes = replace(measured, is_pre_quantized=is_pre_quantized)

    @property
    def no_split(self) -> list[str]:
        """Classes of modules that stay on one device; where a model says nothing, its decoder layers."""
        said: list[str] = list(getattr(self.model, "_no_split_modules", None) or ())
        return said or sorted({type(layer).__name__ for layer in self._layers})

    @contextlib.contextmanager
    def holding(self, cache_bytes: Sequence[int]) -> Iterator[nn.Module]:
        """The module tree with `cache_bytes[i]` in layer i, as one more buffer."""
        for layer, size in zip(self._layers, cache_bytes, strict=True):
            layer.register_buffer(_CACHE, filler(size), persistent=False)
        try:
            yield self.model
        finally:
            for layer in self._layers:
                delattr(layer, _CACHE)

    def _measured(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        method: str | None,
        quantizer_config: Any,
        name: str,
        layers: list[str],
        cached: list[tuple[int, int | None]],
        plain: Mapping[str, tuple[int, int, torch.dtype]],
        quantized: Mapping[str, tuple[int, int]],
    ) -> ModelSizes:
        text = config.get_text_config()
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        is_tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
        names = {id(module): key for key, module in self.model.named_modules()}
        experts, chosen = _experts(text)
        pieces, seen = [], set[int]()
        for key, module in self.model.named_modules():
            own = [
                (f"{key}.{each}" if key else each, tensor)
                for each, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                if not (id(tensor) in seen or seen.add(id(tensor)))
            ]
            if not own:
                continue
            constants = sum(quantized[full][1] for full, _ in own if full in quantized)
            total = sum(tensor.nbytes for full, tensor in own if not full.endswith(CONSTANTS))
            is_table = isinstance(module, nn.Embedding) and not (is_tied and module is embedding)
            pieces.append(
                Piece(
                    name=key,
                    weight_bytes=total,
                    state_bytes=constants,
                    plain_bytes=sum(math.prod(plain[full][:2]) for full, _ in own if full in plain),
                    read_bytes=0 if is_table else total + constants,
                    products=0 if is_table else sum(_products(full, tensor, plain, quantized) for full, tensor in own),
                    share=chosen / experts if experts and ".experts" in f".{key}" else 1.0,
                    is_quantized=any(full in quantized for full, _ in own),
                    layer=next((i for i, layer in enumerate(layers) if f"{key}.".startswith(f"{layer}.")), None),
                )
            )
        return ModelSizes(
            name=name,
            pieces=tuple(pieces),
            slot_bytes=tuple(size for size, _ in cached),
            windows=tuple(window for _, window in cached),
            head=names[id(embedding if is_tied or head is None else head)],
            hidden_size=text.hidden_size,
            intermediate_size=_dense_width(text),
            vocab_size=text.vocab_size,
            element_bytes=dtype.itemsize,
            largest_quantized=max((plain[full][0] for full in quantized if full in plain), default=0),
            dtype=str(dtype).removeprefix("torch."),
            quantization=method,
            spills_plain=is_bitsandbytes(quantizer_config),
            expert_fan=chosen,
            expert_size=_width(text, _EXPERT_WIDTHS) if experts else 0,
            max_positions=getattr(text, "max_position_embeddings", None),
            eager_heads=text.num_attention_heads if _is_eager(self.model) else 0,
        )


def _on_meta(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(f"{config.model_type!r} is no causal language model that transformers can load.") from error
    model.tie_weights()
    return model.eval()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _layer_names(model: nn.Module, text: Any) -> list[str]:
    """Of the decoder's layers, in order: the first list of modules with as many as the config says."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers:
            return [f"{name}.{index}" for index in range(len(module))]
    raise ValueError(f"Cannot find {text.num_hidden_layers} decoder layers in {type(model).__name__}.")


def _experts(text: Any) -> tuple[int, int]:
    """(experts, how many of them a token goes through); (0, 0) for dense models."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(text, name, None))), 0)
    return (experts, getattr(text, "num_experts_per_tok", None) or experts) if experts else (0, 0)


_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_EXPERT_WIDTHS = ("moe_intermediate_size", *_WIDTHS)


def _width(text: Any, names: Sequence[str]) -> int:
    """The first of `names` that the config has, the largest where it lists one for each layer."""
    for name in names:
        size = getattr(text, name, None)
        if isinstance(size, (list, tuple)) and size:
            size = max(size)
        if isinstance(size, int) and size:
            return size
    return 4 * text.hidden_size


def _dense_width(text: Any) -> int:
    """Of the widest MLP that all tokens go through: dense layers beside layers of experts, shared experts."""
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    together = (getattr(text, "n_shared_experts", None) or 0) * (getattr(text, "moe_intermediate_size", None) or 0)
    return max(_width(text, _WIDTHS), shared, together)


def _is_eager(model: Any) -> bool:
    """Whether transformers will write attention's scores out: it was asked to, or the model knows nothing else."""
    text = model.config.get_text_config()
    return "eager" in (getattr(each, "_attn_implementation", None) for each in (model.config, text))


def _products(
    name: str, tensor: torch.Tensor, plain: Mapping[str, tuple[int, int, torch.dtype]], quantized: Mapping[str, Any]
) -> int:
    if name in quantized and name in plain:
        return plain[name][0]
    return tensor.numel() if tensor.dim() > 1 else 0


# --- caches ---------------------------------------------------------------------------------------------------------


def _cached(model: Any, config: PretrainedConfig, num_layers: int) -> list[tuple[int, int | None]]:
    """By layer: bytes of keys and values per token and row, and the window (None: all tokens)."""
    cache = DynamicCache(config=config)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.zeros((1, 2), dtype=torch.long, device="meta")
            model(input_ids=ids, use_cache=True, **{cache_keyword(model): cache})
        found = [_of_layer(layer) for layer in cache.layers]
    except Exception:  # reads values (GPT-2 scales attention by one), or has inputs of its own
        found = []
    if len(found) != num_layers or not any(size for size, _ in found):
        found = _from_config(config, model.dtype.itemsize)
    return found


def _of_layer(layer: Any) -> tuple[int, int | None]:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        return 0, None  # shares another layer's keys, or has none
    slots = keys.shape[-2]
    return (keys.nbytes + values.nbytes) // slots, getattr(layer, "sliding_window", None)


def _from_config(config: PretrainedConfig, element_bytes: int) -> list[tuple[int, int | None]]:
    """The same by the config's numbers: grouped heads, latents, and the windows of the cache that it asks for."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = 2 * heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    if rank := getattr(text, "kv_lora_rank", None):
        width = rank + text.qk_rope_head_dim
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers] or [None] * text.num_hidden_layers
    return [(width * element_bytes, window) for window in windows]
