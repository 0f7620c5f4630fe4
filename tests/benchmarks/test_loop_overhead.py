"""How long does the loop itself take per step at batch 1, beyond forwards, softmax and draws?

Models here do nothing: a forward writes one key per layer, as any model must, and gives logits it has kept. So a step's
time is the loop, its bookkeeping and the small tensor work; softmax, draws and the rule are measured apart on the same
shapes and taken off, and so are `generate()`'s preparations, by a call that ends with the prefill. Processor time, so
that a busy machine tells the same. Nothing is asserted about seconds. Shape checks cost more than the loop, so run it
without them: ``pytest -o addopts= -s -m benchmark tests/benchmarks``.
"""

import statistics
import time
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_specdec
from hf_specdec import sampling
from hf_specdec.verification import verify_block

VOCAB, DRAFT_LENGTH, NUM_NEW_TOKENS, NUM_LAYERS = 512, 4, 400, 2
MILLISECONDS = 1e3

pytestmark = [pytest.mark.benchmark(group="loop overhead"), pytest.mark.slow]


class Stub(LlamaForCausalLM):
    """A causal LM in name: its logits were made beforehand, and follow the position alone."""

    __module__ = LlamaForCausalLM.__module__  # passes for the family, which is not tried before it is trusted

    def __init__(self, seed: int):
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=4096,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
        super().__init__(config)
        generator = torch.Generator().manual_seed(seed)
        self.kept = torch.randn(1, 16, VOCAB, generator=torch.Generator().manual_seed(0))
        self.kept = self.kept + 0.7 * seed * torch.randn(self.kept.shape, generator=generator)
        self.state = torch.zeros(1, 1, 64, 8)
        self.spent = [0.0]  # a list: setting an attribute of a module is slow
        self.eval()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        logits_to_keep=0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        started = time.process_time()
        cache: DynamicCache = past_key_values if past_key_values is not None else kwargs["cache"]
        width = input_ids.shape[1]
        for layer in range(NUM_LAYERS):
            cache.update(self.state[:, :, :width], self.state[:, :, :width], layer)
        logits = self.kept[:, : logits_to_keep or width]
        output = CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        self.spent[0] += time.process_time() - started
        return output


def mathematics_seconds(is_sampling: bool, repeats: int = 300) -> float:
    """Seconds of one step's softmax, draws and rule, on the loop's shapes."""
    scores = torch.randn(1, DRAFT_LENGTH + 1, VOCAB)
    uniforms = torch.rand(1, DRAFT_LENGTH + 1, dtype=torch.float64)
    lengths = torch.tensor([DRAFT_LENGTH])

    def step() -> None:
        if not is_sampling:
            for position in range(DRAFT_LENGTH):
                scores[:, position].argmax(dim=-1)
            scores.argmax(dim=-1)
            return
        probs = torch.empty(1, DRAFT_LENGTH, VOCAB)
        ids = torch.empty(1, DRAFT_LENGTH, dtype=torch.long)
        for position in range(DRAFT_LENGTH):
            probs[:, position] = sampling.softmax_probs(scores[:, position])
            ids[:, position] = sampling.draw(probs[:, position], uniforms[:, position])
        verify_block(sampling.softmax_probs(scores), probs, ids, lengths, uniforms)

    step()
    started = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - started) / repeats


@pytest.mark.parametrize("is_sampling", [False, True], ids=["greedy", "sampling"])
def test_time_of_a_step_at_batch_one(is_sampling, benchmark):
    target, draft = Stub(0), Stub(1)
    prompt = torch.ones(1, 8, dtype=torch.long)
    options = {"do_sample": is_sampling, "pad_token_id": 0, "eos_token_id": None}
    options |= {"top_k": 0} if is_sampling else {}
    seen: list[float] = []

    def call(num_new_tokens: int = NUM_NEW_TOKENS) -> float:
        """Processor seconds outside of the stubs."""
        target.spent[0] = draft.spent[0] = 0.0
        started = time.process_time()
        target.generate(prompt, generation_config=GenerationConfig(max_new_tokens=num_new_tokens, **options))
        return time.process_time() - started - target.spent[0] - draft.spent[0]

    def timed() -> None:
        preparations = call(1)
        seconds = call() - preparations
        report = hf_specdec.report(target)
        assert report is not None
        assert report.reason is None
        assert 0.2 <= report.acceptance_rate <= 0.8
        seen.append(seconds / report.target_passes)

    with hf_specdec.enable(target, draft, num_speculative_tokens=DRAFT_LENGTH):
        benchmark.pedantic(timed, rounds=8, warmup_rounds=1)
    mathematics = mathematics_seconds(is_sampling)
    found = {"best step": min(seen), "median step": statistics.median(seen), "softmax, draws and rule": mathematics}
    found |= {"best loop": min(seen) - mathematics, "median loop": statistics.median(seen) - mathematics}
    benchmark.extra_info.update({f"{name} (ms)": round(value * MILLISECONDS, 3) for name, value in found.items()})
    print(f"\n{'sampling' if is_sampling else 'greedy'}: {dict(benchmark.extra_info)}")
