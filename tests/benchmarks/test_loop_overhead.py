"""How long does the loop itself take per step at batch 1, beyond forwards, softmax and draws?

Models here do nothing: a forward writes one key per layer, as any model must, and gives logits it has kept. So a step's
time is the loop, its bookkeeping and the small tensor work; the time of softmax, draws and the rule is measured apart on the
same shapes and taken off. Nothing is asserted about seconds: ``pytest -m benchmark tests/benchmarks`` shows them.
"""

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
        self.num_forwards, self.seconds = 0, 0.0
        self.eval()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, logits_to_keep=0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        started = time.perf_counter()
        cache: DynamicCache = past_key_values if past_key_values is not None else kwargs["cache"]
        width = input_ids.shape[1]
        for layer in range(NUM_LAYERS):
            cache.update(self.state[:, :, :width], self.state[:, :, :width], layer)
        logits = self.kept[:, : logits_to_keep or width]
        output = CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        self.num_forwards += 1
        self.seconds += time.perf_counter() - started
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
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - started) / repeats


@pytest.mark.parametrize("is_sampling", [False, True], ids=["greedy", "sampling"])
def test_time_of_a_step_at_batch_one(is_sampling, benchmark):
    target, draft = Stub(0), Stub(1)
    prompt = torch.ones(1, 8, dtype=torch.long)
    config = GenerationConfig(
        do_sample=is_sampling, max_new_tokens=NUM_NEW_TOKENS, pad_token_id=0, eos_token_id=None, top_k=0
    )
    seen: list[float] = []

    def call() -> None:
        for model in (target, draft):
            model.num_forwards, model.seconds = 0, 0.0
        target.generate(prompt, generation_config=config)
        report = hf_specdec.report(target)
        assert report is not None
        assert report.reason is None
        seconds = report.draft_seconds + report.verify_seconds + report.other_seconds
        seen.append((seconds - target.seconds - draft.seconds) / report.target_passes)

    with hf_specdec.enable(target, draft, num_speculative_tokens=DRAFT_LENGTH):
        benchmark.pedantic(call, rounds=5, warmup_rounds=1)
    mathematics = mathematics_seconds(is_sampling)
    benchmark.extra_info["step_ms"] = min(seen) * MILLISECONDS
    benchmark.extra_info["mathematics_ms"] = mathematics * MILLISECONDS
    benchmark.extra_info["loop_ms_per_step"] = (min(seen) - mathematics) * MILLISECONDS
    print(f"\n{'sampling' if is_sampling else 'greedy'}: {benchmark.extra_info}")
