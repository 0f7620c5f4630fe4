"""Tiny targets with flat laws, drafts of every kind for them, and whole calls of `generate()` that sample many rows."""

import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec.drafters import Draft, Drafter, model
from hf_specdec.registry import DRAFTERS
from hf_specdec.report import SpeculationReport
from tests.losslessness.sampled_law import PAD, Oracle, combined

VOCAB = 6
POINT_MASS = "point mass of the tests"
PROMPTS = {"one": [[5, 2, 3]], "one token": [[5]], "ragged": [[2, 5, 1, 3, 4], [4, 2], [1, 1, 5, 2]]}
NUM_NEW_TOKENS = 8
NUM_ROWS = 3000


@dataclass(frozen=True)
class Case:
    """One way to call `generate()`.

    Attributes:
        rule: name of a registered verifier.
        draft_length: K.
        options: of `generate()`; the oracle's processors come from them too.
        draft: a key of `DRAFTS`, "point mass", or one of `OWN_METHODS`.
        prompts: a key of `PROMPTS`.
        target_vocab: rows of the target's head.
        target_layers: of the target.
        eos_id: the id that ends a text.
        uses_num_return_sequences: whether rows come from there instead of a repeated prompt.
        num_new_tokens: of every row.
        num_rows: texts that are sampled, shared evenly among the prompts.
        rows_per_call: of them in one call; None: all. Processors that are called row by row take a time that grows with
            its square.
    """

    rule: str = "block"
    draft_length: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    draft: str = "noisy"
    prompts: str = "one"
    target_vocab: int = VOCAB
    target_layers: int = 1
    eos_id: int | None = None
    uses_num_return_sequences: bool = False
    num_new_tokens: int = NUM_NEW_TOKENS
    num_rows: int = NUM_ROWS
    rows_per_call: int | None = None


@dataclass(frozen=True)
class Totals:
    """What several calls did."""

    reports: list[SpeculationReport]

    @property
    def accepted(self) -> int:
        return sum(report.accepted for report in self.reports)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / sum(report.reached for report in self.reports)

    @property
    def draft_lengths(self) -> list[int]:
        return [length for report in self.reports for length in report.draft_lengths]

    def num_accepting(self, num_tokens: int) -> int:
        """Row-steps that accepted exactly `num_tokens`."""
        return sum(sum(report.accepted_histogram[num_tokens : num_tokens + 1]) for report in self.reports)


def llama(vocab: int = VOCAB, num_layers: int = 1) -> LlamaForCausalLM:
    """A layer or few in float32, laws flat enough that every text of three tokens comes up."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        return LlamaForCausalLM(config).eval()


def noisy(target: LlamaForCausalLM, vocab: int | None = None, noise: float = 0.35) -> LlamaForCausalLM:
    """A copy with noise on every matrix, its tables cut or padded to `vocab` rows."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(11)
    if vocab is not None:
        with torch.random.fork_rng():
            torch.manual_seed(13)
            draft.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return draft


DRAFTS = {
    "noisy": noisy,
    "smaller vocabulary": lambda target: noisy(target, target.config.vocab_size - 2),
    "larger vocabulary": lambda target: noisy(target, target.config.vocab_size + 2),
    "bfloat16": lambda target: noisy(target).to(torch.bfloat16),
    "short list": noisy,
    "eight bits": noisy,
    "look-up or model": noisy,
}
# Keys of the flag that go with a draft.
FLAGS: dict[str, dict[str, Any]] = {
    "short list": {"draft_vocab": 4},
    "eight bits": {"draft_quantization": "int8"},
    # Under "auto" both may serve a row of one step; the schedule fixes K only.
    "look-up or model": {"num_speculative_tokens": "auto", "draft_lengths": [3, 4, 2, 3, 4, 4, 3, 2]},
}


OWN_METHODS = ("ngram", "suffix", "early_exit")
"""Methods without a draft model."""


class PointMassDrafter(Drafter):
    """Proposes one certain successor for every token. Leaves the text's scratch alone, as a third party's may."""

    def propose(self, sequence, draft_length: int, uniforms: Tensor) -> Draft:
        successors = torch.tensor([1, 0, 0, 1, 1, 2], device=sequence.device)
        ids = [sequence.tail(1)[:, 0]]
        for _ in range(draft_length):
            ids.append(successors[ids[-1]])
        lengths = torch.full_like(sequence.lengths, draft_length)
        return Draft(torch.stack(ids[1:], dim=1), None, lengths)


def as_draft(oracle: Oracle, draft: LlamaForCausalLM) -> Oracle:
    """The law that `draft` draws from where `oracle` samples plainly."""
    return replace(oracle, model=draft)


def sample(case: Case, seed: int, generate=None) -> tuple[list[tuple[Oracle, Tensor]], Totals]:
    """Calls of `generate()`: (what plain sampling would do, new tokens of its rows) per prompt, and what the calls did.

    `generate` is `speculatively` (the default) or `plainly`.
    """
    target = llama(case.target_vocab, case.target_layers)
    laws = oracles(case, target)
    ids, mask = torch.stack([law.prompt for law in laws]), torch.stack([law.mask for law in laws])
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": case.num_new_tokens, **case.options}
    options |= {"pad_token_id": PAD, "eos_token_id": case.eos_id}
    num_calls = case.num_rows // (case.rows_per_call or case.num_rows)
    repeats = case.num_rows // num_calls // len(laws)
    if case.uses_num_return_sequences:
        options |= {"input_ids": ids, "attention_mask": mask, "num_return_sequences": repeats}
    else:
        inputs = {"input_ids": ids, "attention_mask": mask}
        options |= {name: value.repeat_interleave(repeats, dim=0) for name, value in inputs.items()}
    tokens, reports = [], []
    for call in range(num_calls):
        sequences, report = (generate or speculatively)(case, target, options, seed + call)
        new = sequences[:, ids.shape[1] :]
        new = torch.nn.functional.pad(new, (0, case.num_new_tokens - new.shape[1]), value=PAD)  # all rows ended early
        tokens.append(new.unflatten(0, (len(laws), repeats)))
        reports += [] if report is None else [report]
    return list(zip(laws, torch.cat(tokens, dim=1), strict=True)), Totals(reports)


def oracles(case: Case, target: LlamaForCausalLM) -> list[Oracle]:
    """The law of each of the case's prompts, left-padded to one length."""
    prompts = PROMPTS[case.prompts]
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return [
        Oracle(target, ids[row], mask[row], case.options, case.eos_id, case.num_new_tokens, row)
        for row in range(len(prompts))
    ]


def plainly(case: Case, target, options: dict, seed: int) -> tuple[Tensor, None]:
    """transformers' own loop."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return target.generate(**options), None


def speculatively(case: Case, target, options: dict, seed: int) -> tuple[Tensor, SpeculationReport]:
    """The same call with the flag on."""
    flag: dict[str, Any] = {"num_speculative_tokens": case.draft_length, "rejection_sample_method": case.rule}
    flag |= FLAGS.get(case.draft, {})
    draft = None
    if case.draft == "point mass":
        flag["method"] = POINT_MASS
        hf_specdec.register_drafter(POINT_MASS, PointMassDrafter)
    elif case.draft in OWN_METHODS:
        flag["method"] = case.draft
    else:
        draft = DRAFTS[case.draft](target)
    try:
        with torch.random.fork_rng(), hf_specdec.enable(target, draft, **flag):
            torch.manual_seed(seed)
            sequences = target.generate(**options)
            report = hf_specdec.report(target)
    finally:
        DRAFTERS.pop(POINT_MASS, None)
    assert report is not None
    assert report.reason is None, report.reason
    report.check()
    return sequences, report


def p_value(samples: list[tuple[Oracle, Tensor]]) -> float:
    """How likely plain sampling is to deviate this much from its law, over all prompts."""
    return combined([oracle.p_value(tokens) for oracle, tokens in samples])


def judge_by_unprocessed_draft(monkeypatch) -> SimpleNamespace:
    """Make `ModelDrafter` report q as it was before the call's processors, while tokens are drawn after them."""
    softmax, counter = model.sampling.softmax_probs, SimpleNamespace(num_calls=0)

    class Drafter(model.ModelDrafter):
        def __init__(self, request):
            process = request.process

            def remembered(scores, sequence, first):
                self.raw.append(softmax(scores[:, 0]))
                counter.num_calls += 1
                return process(scores, sequence, first)

            super().__init__(replace(request, process=remembered))

        def propose(self, sequence, draft_length, uniforms):
            self.raw = []
            draft = super().propose(sequence, draft_length, uniforms)
            return replace(draft, probs=torch.stack(self.raw, dim=1))

    monkeypatch.setitem(DRAFTERS, "draft_model", Drafter)
    return counter
