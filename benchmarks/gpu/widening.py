"""Function-preserving widening by tiling: a small net's function at a large net's cost.

The residual becomes r copies of itself, X = [x, …, x]. RMSNorm's mean over X is that over x, so eps stays. A linear
over r copies sums r times what it should, which the norm weight before it takes back by a factor 1/r:

    norms               tile(w) / r
    q, k, v, gate, up   columns tiled; q heads r times, KV heads c times (c divides r), MLP units r times
    o, down             columns tiled like the rows before them and divided by r, rows tiled r times
    embedding, head     columns tiled, so that one matrix can still serve as both

Each of the c copies of a KV head serves r / c copies of its own group of query heads (`head_order`). Rotary embedding,
head dimension and attention scale do not change. An *identity layer* has both norm weights zero: attention and MLP then
add exactly 0 in every precision while all of their weights, which are not zero, are read at full price.

Exact in real arithmetic. For r a power of two, dividing by r is exact in floating point too, and blocks of 64 weights
stay whole where rows are multiples of 64, so that block-wise quantization commutes with it.

Knows nothing of what is measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.nets import LINEARS, NORMS, assemble

__all__ = ["Widening", "head_order", "widen"]

Part = Tensor | nn.Module


@dataclass(frozen=True)
class Widening:
    """How much wider and deeper.

    Attributes:
        copies: r, of the residual, the query heads and the MLP units.
        kv_copies: c, of the KV heads; divides `copies`.
        identity_layers: layers added that change nothing.
        is_shared: whether identity layers use the weights of the real ones, in turn, instead of their own copies. Every
            layer still reads a whole layer's weights, but what a large layer leaves in caches may help the next one a
            little.

    Raises:
        ValueError: `kv_copies` does not divide `copies`.
    """

    copies: int = 1
    kv_copies: int = 1
    identity_layers: int = 0
    is_shared: bool = False

    def __post_init__(self) -> None:
        if self.copies % self.kv_copies:
            raise ValueError(f"kv_copies must divide copies, got {self.kv_copies} and {self.copies}.")

    def config(self, base: Any) -> LlamaConfig:
        """The widened net's configuration."""
        wide = {
            "hidden_size": base.hidden_size * self.copies,
            "intermediate_size": base.intermediate_size * self.copies,
            "num_hidden_layers": base.num_hidden_layers + self.identity_layers,
            "num_attention_heads": base.num_attention_heads * self.copies,
            "num_key_value_heads": base.num_key_value_heads * self.kv_copies,
        }
        return LlamaConfig(**{**base.to_dict(), **wide, "attn_implementation": "sdpa"})


def head_order(num_heads: int, num_kv_heads: int, copies: int, kv_copies: int) -> list[int]:
    """The base's query head behind each widened one, in the order (KV copy, KV head, query copy, head of the group).

    Query heads that share a KV head have to stand side by side, which plain tiling breaks as soon as there is more than
    one KV head.
    """
    group = num_heads // num_kv_heads
    return [
        kv_head * group + member
        for _ in range(kv_copies)
        for kv_head in range(num_kv_heads)
        for _ in range(copies // kv_copies)
        for member in range(group)
    ]


@torch.no_grad()
def widen(
    base: LlamaForCausalLM,
    widening: Widening,
    dtype: torch.dtype | None = None,
    linear: Callable[[Tensor], nn.Module] | None = None,
) -> LlamaForCausalLM:
    """The widened net, on the base's device.

    Args:
        base: a net of `nets`.
        widening: how much.
        dtype: of the result; None: the base's. Weights are rounded before they are tiled.
        linear: makes a module of each layer's weight [out, in], for example a quantized one; None: ordinary linears.
    """
    dtype = base.dtype if dtype is None else dtype
    parts: dict[str, Part] = _outside_layers(base, widening.copies, dtype)
    real: list[dict[str, Part]] = []
    depth = base.config.num_hidden_layers
    for index in range(depth + widening.identity_layers):
        layer: Any = base.model.layers[index % depth]
        if index < depth or not widening.is_shared:
            tiled = _tiled_linears(layer, base.config, widening, dtype)
            made: dict[str, Part] = {f"{name}.weight": weight for name, weight in tiled.items()}
            if linear is not None:
                made = {name: linear(weight) for name, weight in tiled.items()}
            real.append(made)
        factor = 1 / widening.copies if index < depth else 0.0
        for name in NORMS:
            weight = layer.get_submodule(name).weight.to(dtype) * factor
            parts[f"model.layers.{index}.{name}.weight"] = weight.repeat(widening.copies)
        chosen = real[index] if index < len(real) else real[index % depth]
        parts |= {f"model.layers.{index}.{name}": part for name, part in chosen.items()}
    return assemble(widening.config(base.config), parts)


def _outside_layers(base: LlamaForCausalLM, copies: int, dtype: torch.dtype) -> dict[str, Part]:
    parts: dict[str, Part] = {
        "model.embed_tokens.weight": base.model.embed_tokens.weight.to(dtype).repeat(1, copies),
        "model.norm.weight": (base.model.norm.weight.to(dtype) / copies).repeat(copies),
    }
    if not base.config.tie_word_embeddings:
        parts["lm_head.weight"] = base.lm_head.weight.to(dtype).repeat(1, copies)
    return parts


def _tiled_linears(layer: Any, config: Any, widening: Widening, dtype: torch.dtype) -> dict[str, Tensor]:
    """The widened weights of one layer's linears, [out, in] each, in memory of their own."""
    copies, kv_copies = widening.copies, widening.kv_copies
    q, k, v, o, gate, up, down = (layer.get_submodule(name).weight.to(dtype) for name in LINEARS)
    order = head_order(config.num_attention_heads, config.num_key_value_heads, copies, kv_copies)
    heads = torch.tensor(order, device=q.device)
    by_head = (config.num_attention_heads, config.head_dim)
    tiled = (
        q.unflatten(0, by_head)[heads].flatten(0, 1).repeat(1, copies),
        k.repeat(kv_copies, copies),
        v.repeat(kv_copies, copies),
        (o / copies).unflatten(1, by_head)[:, heads].flatten(1, 2).repeat(copies, 1),
        gate.repeat(copies, copies),
        up.repeat(copies, copies),
        (down / copies).repeat(copies, copies),
    )
    return dict(zip(LINEARS, tiled, strict=True))
