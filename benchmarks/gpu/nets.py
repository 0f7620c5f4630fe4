"""Random Llama nets that need no download: seeded, put together from given tensors, and made into drafts by noise.

Weights have std gain / √fan_in, embeddings std 1. With gain 1.1 the next token depends on the context without being
chaotic, and the head's scale sets how sure the net is. A draft is the same net with ε · std · Gaussian added to the
linears of its layers: ε sets the acceptance rate Σ min(p, q), found by bisection on teacher-forced positions.

Knows nothing of widths (`widening`), quantization (`nf4`) or what is measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

__all__ = [
    "LINEARS",
    "NORMS",
    "PAD",
    "Shape",
    "assemble",
    "base_net",
    "bisect",
    "cut_vocabulary",
    "noise_for",
    "overlap",
    "scale_head",
    "texts",
    "with_noise",
]

PAD = 0
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")
POSITIONS = 1 << 15  # rotary positions cost nothing
LOGITS_BYTES = 64 * 2**20  # of float32 scores held at once


@dataclass(frozen=True)
class Shape:
    """Sizes of a net.

    Attributes:
        hidden, heads, kv_heads, head_dim, mlp, layers: as Llama has them; hidden = heads · head_dim is not needed.
        vocab: rows of embedding and head.
        num_tokens: ids that are tokens; the rest of `vocab` is padding, with a head of zeros: it hardly comes up.
        is_tied: whether embedding and head are one matrix (which then has no padding).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    layers: int
    vocab: int
    num_tokens: int
    is_tied: bool = False

    def config(self) -> LlamaConfig:
        """The configuration, with scaled-dot-product attention and no special tokens but padding."""
        config: Any = LlamaConfig
        return config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=self.is_tied,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )


def assemble(config: LlamaConfig, parts: Mapping[str, Tensor | nn.Module]) -> LlamaForCausalLM:
    """A model made of the given tensors themselves: nothing is initialised, nothing copied.

    Args:
        config: of the model.
        parts: parameters by name; a module under a linear's name takes that linear's place.

    Raises:
        ValueError: a parameter was not given.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for name, part in parts.items():
        owner, _, leaf = name.rpartition(".")
        value = nn.Parameter(part, requires_grad=False) if isinstance(part, Tensor) else part
        setattr(model.get_submodule(owner), leaf, value)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    missing = [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
    if missing:
        raise ValueError(f"Expected a tensor for every parameter, got none for {missing[0]} ({len(missing)} in all).")
    # Its buffer is not a parameter and was made on the meta device.
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(model.model.embed_tokens.weight.device)
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    return model.eval()


def base_net(shape: Shape, seed: int, device: torch.device, gain: float = 1.1) -> LlamaForCausalLM:
    """A float32 net drawn from `seed`, the same on every device. Norms are 1 give or take a tenth."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return (torch.randn(size, generator=generator) * std).to(device)

    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = [(width, shape.hidden), (keys, shape.hidden), (keys, shape.hidden), (shape.hidden, width)]
    sizes += [(shape.mlp, shape.hidden), (shape.mlp, shape.hidden), (shape.hidden, shape.mlp)]
    parts = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden, std=1.0)}
    for layer in range(shape.layers):
        for name, (rows, columns) in zip(LINEARS, sizes, strict=True):
            parts[f"model.layers.{layer}.{name}.weight"] = normal(rows, columns, std=gain / columns**0.5)
        for name in NORMS:
            parts[f"model.layers.{layer}.{name}.weight"] = 1 + normal(shape.hidden, std=0.1)
    parts["model.norm.weight"] = 1 + normal(shape.hidden, std=0.1)
    if not shape.is_tied:
        parts["lm_head.weight"] = normal(shape.vocab, shape.hidden, std=1 / shape.hidden**0.5)
        parts["lm_head.weight"][shape.num_tokens :] = 0
    return assemble(shape.config(), parts)


def texts(num_rows: int, length: int, num_tokens: int, seed: int, device: torch.device) -> Tensor:
    """int64 [num_rows, length]: random ids, `PAD` left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(PAD + 1, num_tokens, (num_rows, length), generator=generator).to(device)


@torch.no_grad()
def scale_head(net: LlamaForCausalLM, ids: Tensor, top_probability: float) -> float:
    """Scale the head so that the most probable token of a position of `ids` [rows, length] has `top_probability` in the
    mean; returns the factor."""
    logits = torch.cat([chunk.float() for chunk in _logit_chunks(net, ids)])

    def mean_top(log_scale: float) -> float:
        return float((logits * 2**log_scale).softmax(dim=-1).amax(dim=-1).mean())

    factor = 2 ** bisect(mean_top, -8.0, 8.0, top_probability)
    net.lm_head.weight.mul_(factor)
    return factor


def noise_for(net: LlamaForCausalLM, seed: int) -> dict[str, Tensor]:
    """Gaussian noise of each layer linear's own spread, by parameter name."""
    generator = torch.Generator().manual_seed(seed)
    noise = {}
    for name, weight in net.named_parameters():
        if name.removesuffix(".weight").endswith(LINEARS):
            noise[name] = torch.randn(weight.shape, generator=generator).to(weight) * weight.std()
    return noise


def with_noise(net: LlamaForCausalLM, noise: Mapping[str, Tensor], epsilon: float) -> LlamaForCausalLM:
    """A net that shares everything with `net` but has `epsilon` of `noise` on its layers' linears."""
    parts = {name: weight.data for name, weight in net.named_parameters()}
    return assemble(net.config, parts | {name: parts[name] + epsilon * each for name, each in noise.items()})


@torch.no_grad()
def overlap(target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: Tensor) -> tuple[float, float]:
    """How well `draft` knows `target` on every position of `ids` [rows, length].

    Returns:
        The acceptance rate at temperature 1, mean Σ min(p, q), and the share of equal most probable tokens.
    """
    accepted = agreed = num = 0.0
    for target_logits, draft_logits in zip(_logit_chunks(target, ids), _logit_chunks(draft, ids), strict=True):
        p, q = (logits.float().softmax(dim=-1) for logits in (target_logits, draft_logits))
        accepted += float(torch.minimum(p[:, : q.shape[1]], q[:, : p.shape[1]]).sum())
        agreed += float((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        num += len(p)
    return accepted / num, agreed / num


def _logit_chunks(net: LlamaForCausalLM, ids: Tensor):
    """Scores [positions, vocab] of all positions, so many at a time that they fit."""
    hidden = net.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    for chunk in hidden.split(max(1, LOGITS_BYTES // (4 * net.config.vocab_size))):
        yield net.lm_head(chunk)


def bisect(function: Callable[[float], float], low: float, high: float, goal: float, num_steps: int = 14) -> float:
    """Where the monotone `function` meets `goal` between `low` and `high`."""
    is_rising = function(high) > function(low)
    for _ in range(num_steps):
        middle = (low + high) / 2
        if (function(middle) < goal) == is_rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def cut_vocabulary(net: LlamaForCausalLM, num_rows: int) -> LlamaForCausalLM:
    """The same net with the first `num_rows` rows of embedding and head; shares all its weights."""
    config = LlamaConfig(**{**net.config.to_dict(), "vocab_size": num_rows, "attn_implementation": "sdpa"})
    parts = {name: weight.data for name, weight in net.named_parameters()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in parts:
            parts[name] = parts[name][:num_rows]
    return assemble(config, parts)
