"""Is what a prefill really takes, beside weights and cache, within what a plan reserves for it?"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from hf_specdec.host.sizes import Skeleton
from hf_specdec.placement.sizes import Workload

LENGTH = 512
SHARED = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
CONFIGS = {
    "llama": LlamaConfig(**SHARED, intermediate_size=384),
    "llama, eager": LlamaConfig(**SHARED, intermediate_size=384, attn_implementation="eager"),
    "narrow llama": LlamaConfig(**SHARED, intermediate_size=64),
    "gpt2": GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=300, n_positions=4096),
    "mixtral": MixtralConfig(**SHARED, intermediate_size=384, num_local_experts=8, num_experts_per_tok=2),
    "wide shared expert": Qwen2MoeConfig(
        **SHARED, **EXPERTS, intermediate_size=384, shared_expert_intermediate_size=1024
    ),
    "small experts": Qwen3MoeConfig(**SHARED, **EXPERTS, intermediate_size=64, head_dim=32),
    "dense first layer": DeepseekV3Config(
        **{**SHARED, "num_key_value_heads": 4},
        intermediate_size=2048,
        moe_intermediate_size=32,
        n_routed_experts=16,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    ),
    "gemma2, eager": Gemma2Config(**SHARED, intermediate_size=384, head_dim=32),
}


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it held at once, views of the model's weights apart."""

    def __init__(self, model):
        super().__init__()
        weights = [*model.parameters(), *model.buffers()]
        self.live = {weight.untyped_storage()._cdata: 0 for weight in weights}
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._freed, storage._cdata)
        return made

    def _freed(self, key):
        self.now -= self.live.pop(key, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefill_takes_what_was_reserved(name, dtype):
    told = Skeleton(CONFIGS[name], dtype, name=name).sizes
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()
    ids = torch.randint(5, 300, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    peak = Peak(model)
    with torch.no_grad(), peak:
        held = model(ids, logits_to_keep=1)
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in held.past_key_values.layers)
    taken, reserved = peak.most - cache, told.pass_bytes(Workload(1, LENGTH, draft_length=1))
    assert taken <= reserved <= 1.5 * taken, (taken, reserved, reserved / taken)
