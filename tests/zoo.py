"""Tiny random causal LMs, one per family, that can show a fault.

Random models as they come are poor witnesses: tied embeddings repeat one token, attention hardly matters, and then a
wrong mask, a wrong position or a wrong ALiBi slope changes nothing. So every weight is drawn anew with a gain at which
attention decides, heads are untied, and `tests/parity/test_zoo.py` asserts for each family that plain greedy text has
at least five distinct tokens per row, changes when the padding mask is ignored, and is met by its draft on 20 to 90 %
of the tokens.

A draft is the target with noise on every weight: it has the same architecture, so a family is proved as a draft too.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["FAMILIES", "PART_ONE", "VOCAB", "WINDOW", "Family", "family", "made_pairs", "pair", "prompts"]

VOCAB = 48
MAX_POSITIONS = 256
WINDOW = 8
PAD, BOS = 0, 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_HIDDEN: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
_GROUPED: dict[str, Any] = {**_HIDDEN, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}
_MIXED = ["sliding_attention", "full_attention"]

# name → (seed at which plain text shows faults, noise at which the draft agrees on 55 to 70 % of it); found by search,
# and held to it by tests/parity/test_zoo.py
_SEED_AND_NOISE: dict[str, tuple[int, float]] = {
    "Llama": (0, 0.05),
    "Mistral": (0, 0.06),
    "Qwen2": (0, 0.04),
    "Qwen2-sliding": (0, 0.06),
    "Qwen3": (0, 0.08),
    "Gemma3": (0, 0.2),
    "GPT-2": (0, 0.15),
    "GPT-NeoX": (4, 0.1),
    "Phi": (0, 0.08),
    "OPT": (0, 0.08),
    "Gemma2": (2, 0.2),
    "Mixtral": (0, 0.04),
    "Qwen2-MoE": (0, 0.04),
    "Qwen3-MoE": (0, 0.08),
    "Phi-3": (1, 0.1),
    "GPT-Neo": (0, 0.05),
    "GPT-J": (0, 0.15),
    "BLOOM": (9, 0.06),
    "MPT": (6, 0.12),
    "Falcon": (0, 0.08),
    "Falcon-ALiBi": (2, 0.08),
    "StarCoder2": (1, 0.08),
    "OLMo2": (2, 0.15),
    "Cohere": (1, 0.1),
    "StableLM": (1, 0.06),
    "DeepSeek-V2": (0, 0.06),
    "DeepSeek-V3": (0, 0.05),
    "GPT-OSS": (0, 0.05),
    "Granite": (0, 0.03),
    "SmolLM3": (0, 0.08),
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: as the tables show it.
        model_type: transformers' name of the configuration.
        options: of the configuration.
        gain: of every weight matrix over 1 / √fan_in.
        implementations: attention implementations that the family has on CPU.
        window: slots of its sliding layers, None if it has none.
        reason: why it decodes plainly (a part of the report's reason), None if it speculates.
        is_slow: whether its parity cases run in the slow suite only.
        notes: what is special about its positions or masks.
    """

    name: str
    model_type: str
    options: dict[str, Any] = field(hash=False)
    gain: float = 1.3
    implementations: tuple[str, ...] = ("sdpa", "eager")
    window: int | None = None
    reason: str | None = None
    is_slow: bool = True
    notes: str = ""

    @property
    def seed(self) -> int:
        """The seed at which the target's text shows faults."""
        return _SEED_AND_NOISE[self.name][0]

    @property
    def noise(self) -> float:
        """The draft's noise, relative to each weight's own spread."""
        return _SEED_AND_NOISE[self.name][1]

    def build(self, seed: int | None = None, **changes: Any) -> PreTrainedModel:
        """The target: float32, eval mode, the first of `implementations`; `changes` go over `options`."""
        seed = self.seed if seed is None else seed
        config = CONFIG_MAPPING[self.model_type](**{**self.options, **changes})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=self.implementations[0], dtype=torch.float32
            )
            _redraw(model, self.gain)
        model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS)
        return model.eval()

    def build_draft(
        self, target: PreTrainedModel, seed: int | None = None, noise: float | None = None
    ) -> PreTrainedModel:
        """The target with noise on every weight."""
        seed = self.seed + 1 if seed is None else seed
        draft = copy.deepcopy(target)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in draft.parameters():
                spread = weight.std() if weight.numel() > 1 else weight.abs()
                level = self.noise if noise is None else noise
                weight += torch.randn(weight.shape, generator=generator) * spread * level
        return draft.eval()


def _redraw(model: PreTrainedModel, gain: float) -> None:
    """Draw weights at which attention and positions decide the next token; norms stay, give or take 10 %."""
    head = model.get_output_embeddings()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if head is not None and weight is head.weight:
                weight.normal_(0.0, 3.0 / weight.shape[-1] ** 0.5)
            elif id(weight) in embeddings:
                weight.normal_(0.0, 1.0)
            elif weight.ndim >= 2:
                is_qk = any(part in name for part in ("q_proj", "k_proj", "query", "key"))
                weight.normal_(0.0, gain * (1.5 if is_qk else 1.0) / weight.shape[-1] ** 0.5)
            elif name.endswith("bias") or "sink" in name:
                weight.normal_(0.0, 0.1)
            else:
                weight += 0.1 * torch.randn_like(weight)


def _llama_like(name: str, model_type: str, is_slow: bool = True, **more: Any) -> Family:
    own = {key: more.pop(key) for key in list(more) if key in Family.__dataclass_fields__}
    return Family(name, model_type, {**_GROUPED, **more}, is_slow=is_slow, **own)


FAMILIES: tuple[Family, ...] = (
    _llama_like("Llama", "llama", is_slow=False, notes="grouped-query attention"),
    _llama_like("Mistral", "mistral", is_slow=False, sliding_window=WINDOW, window=WINDOW, notes="every layer slides"),
    _llama_like("Qwen2", "qwen2", is_slow=False),
    _llama_like(
        "Qwen2-sliding",
        "qwen2",
        is_slow=False,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        window=WINDOW,
        notes="one sliding and one full layer",
    ),
    _llama_like("Qwen3", "qwen3", is_slow=False, head_dim=8),
    _llama_like(
        "Gemma3",
        "gemma3_text",
        is_slow=False,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        window=WINDOW,
        notes="one sliding and one full layer, a rotary base each",
    ),
    Family("GPT-2", "gpt2", _GPT, is_slow=False, notes="learned positions"),
    Family("GPT-NeoX", "gpt_neox", _HIDDEN, is_slow=False, notes="parallel residual, partial rotary"),
    Family("Phi", "phi", _GROUPED, is_slow=False, notes="partial rotary"),
    Family(
        "OPT",
        "opt",
        {**{k: v for k, v in _HIDDEN.items() if k != "intermediate_size"}, "ffn_dim": 48, "word_embed_proj_dim": 32},
        is_slow=False,
        notes="learned positions",
    ),
    # ------------------------------------------------------------------------------------------------- the rest
    _llama_like(
        "Gemma2",
        "gemma2",
        implementations=("eager",),
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        window=WINDOW,
        notes="one sliding and one full layer, soft-capped logits",
    ),
    _llama_like("Mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    _llama_like(
        "Qwen2-MoE",
        "qwen2_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    _llama_like("Qwen3-MoE", "qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    _llama_like("Phi-3", "phi3", sliding_window=WINDOW, window=WINDOW, notes="every layer slides, fused projections"),
    Family(
        "GPT-Neo",
        "gpt_neo",
        {
            **_COMMON,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": MAX_POSITIONS,
        },
        implementations=("eager",),
        window=WINDOW,
        reason="its local layers cut their window by slot inside the attention module",
        notes="learned positions, a local layer inside the attention module",
    ),
    Family("GPT-J", "gptj", {**_GPT, "rotary_dim": 4}, implementations=("eager",), notes="rotary on half a head"),
    Family(
        "BLOOM",
        "bloom",
        {**_COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        implementations=("eager",),
        notes="ALiBi from the padding mask",
    ),
    Family(
        "MPT",
        "mpt",
        {**_COMMON, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": MAX_POSITIONS},
        implementations=("eager",),
        notes="ALiBi from slots",
    ),
    Family(
        "Falcon",
        "falcon",
        {**_HIDDEN, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
        notes="rotary",
    ),
    Family(
        "Falcon-ALiBi", "falcon", {**_HIDDEN, "alibi": True, "multi_query": False}, notes="ALiBi from the padding mask"
    ),
    _llama_like("StarCoder2", "starcoder2", sliding_window=WINDOW, window=WINDOW, notes="every layer slides"),
    _llama_like("OLMo2", "olmo2"),
    _llama_like("Cohere", "cohere", logit_scale=1.0),
    _llama_like("StableLM", "stablelm", notes="partial rotary"),
    Family(
        "DeepSeek-V2",
        "deepseek_v2",
        {
            **_HIDDEN,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
        },
        notes="multi-head latent attention",
    ),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        {
            **_HIDDEN,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
        notes="multi-head latent attention",
    ),
    _llama_like(
        "GPT-OSS",
        "gpt_oss",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        window=WINDOW,
        implementations=("eager",),
        notes="attention sinks, one sliding and one full layer",
    ),
    _llama_like("Granite", "granite", logits_scaling=1.0),
    _llama_like("SmolLM3", "smollm3", no_rope_layers=[1, 0], notes="a layer without rotary positions"),
)

PART_ONE: tuple[Family, ...] = tuple(f for f in FAMILIES if not f.is_slow)


def family(name: str) -> Family:
    """The family called `name`."""
    return next(f for f in FAMILIES if f.name == name)


#: the pairs made so far; `conftest.py` watches that tests leave their configs alone
made_pairs: dict[tuple[str, str | None], tuple[PreTrainedModel, PreTrainedModel]] = {}


def pair(name: str, implementation: str | None = None) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(target, draft) of a family, made once; tests leave both as they found them."""
    key = (name, implementation)
    if key not in made_pairs:
        entry = family(name)
        target = entry.build()
        draft = entry.build_draft(target)
        for model in (target, draft):
            if implementation is not None:
                model.set_attn_implementation(implementation)
        made_pairs[key] = target, draft
    return made_pairs[key]


def prompts(lengths: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of rows of `lengths` tokens, left-padded."""
    generator = torch.Generator().manual_seed(100 + seed)
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}
