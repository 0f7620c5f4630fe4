"""Stage 4: is the text right on this device? In float32 it has to be plain's, and sampled tokens have to have its law.

Everything here is small: a fault of masks, positions, caches or of the rule shows in a small net as well as in a large
one, and a small net leaves time for every combination.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

import hf_specdec
from benchmarks.gpu.models import Models
from benchmarks.gpu.nets import PAD, Shape, base_net, noise_for, overlap, scale_head, texts, with_noise
from benchmarks.gpu.predictions import MICRO
from benchmarks.gpu.run import Run
from benchmarks.gpu.widening import Widening, widen
from hf_specdec.audit.greedy import greedy_check
from hf_specdec.audit.pair import Pair
from hf_specdec.audit.sampled import FALSE_ALARM_RATE, control_check, draft_check, draw_sample, law_check

__all__ = ["correctness"]

SHAPE = Shape(128, 4, 2, 32, 256, 2, vocab=512, num_tokens=500)
SHAPE_OF_LAW = Shape(32, 2, 1, 16, 32, 1, vocab=16, num_tokens=16)
TOP_PROBABILITY, TOP_PROBABILITY_OF_LAW = 0.6, 0.35  # a flat law: every cell of the test fills
NOISE, NOISE_OF_LAW = 0.1, 0.5
BOTH_BRANCHES = (0.2, 0.8)  # acceptance rates at which tokens are both kept and replaced
DRAFT_LENGTHS, PROMPT_LENGTHS = (1, 4, 8), (9, 4, 6)
LAW_DRAFT_LENGTH, CONTROL = 4, "resample from p"
GROWN_TOKENS = 300  # more than the cache leaves room for at first

Inputs = dict[str, Tensor]
Net = Any


def correctness(run: Run) -> None:
    """All of it, the most telling first."""
    target, draft = _pair(SHAPE, TOP_PROBABILITY, NOISE, run.device)
    greedy_parity(run, target, draft)
    end_inside_block(run, target, draft)
    sampled_law(run)
    grown_cache(run, target, draft)
    low_precision(run)


def _pair(shape: Shape, top_probability: float, noise: float, device: torch.device) -> tuple[Net, Net]:
    target = base_net(shape, 0, device)
    scale_head(target, texts(4, 32, shape.num_tokens, 1, device), top_probability)
    return target, with_noise(target, noise_for(target, 1), noise)


def _prompts(num_tokens: int, rows: int, device: torch.device) -> Inputs:
    """Left-padded prompts of different lengths."""
    longest = max(PROMPT_LENGTHS[:rows])
    ids = texts(rows, longest, num_tokens, 2, device)
    places = torch.arange(longest, device=device)
    starts = torch.tensor([longest - length for length in PROMPT_LENGTHS[:rows]], device=device)
    mask = (places >= starts[:, None]).long()
    return {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}


def _both(target: Net, draft: Net, inputs: Inputs, draft_length: int, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """(plain ids, our ids, our report) of one greedy call."""
    options = {"do_sample": False, "pad_token_id": PAD, **options}
    plain = target.generate(**inputs, **options)
    with hf_specdec.enable(target, draft, num_speculative_tokens=draft_length):
        ours = target.generate(**inputs, **options)
        report = hf_specdec.report(target)
    assert report is not None
    report.check()
    return plain, ours, report


def _check_same(run: Run, name: str, plain: Tensor, ours: Tensor, report: Any) -> None:
    if report.reason is not None:
        return run.check(name, False, f"decoded plainly: {report.reason}")
    is_same = plain.tolist() == ours.tolist()
    detail = f"acceptance {report.acceptance_rate:.2f}"
    if not is_same and plain.shape == ours.shape:
        row, column = (plain != ours).nonzero()[0].tolist()
        detail += f"; first difference in row {row}, column {column}"
    return run.check(name, is_same, detail)


def greedy_parity(run: Run, target: Net, draft: Net) -> None:
    """Greedy text = plain's, for every K, batch and attention."""
    for attention in ("sdpa", "eager"):
        for net in (target, draft):
            net.set_attn_implementation(attention)
        for rows, draft_length in itertools.product((1, 3), DRAFT_LENGTHS):
            inputs = _prompts(SHAPE.num_tokens, rows, run.device)
            found = _both(target, draft, inputs, draft_length, max_new_tokens=min(48, run.sizes.parity_tokens))
            name = f"greedy = plain, {attention}, batch {rows}, K = {draft_length}"
            _check_same(run, name, *found)
    for net in (target, draft):
        net.set_attn_implementation("sdpa")


def end_inside_block(run: Run, target: Net, draft: Net) -> None:
    """An end of text that is neither the first nor the last token of a verified block."""
    inputs, num_new = _prompts(SHAPE.num_tokens, 3, run.device), min(24, run.sizes.parity_tokens)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=num_new)
    new = plain[0, inputs["input_ids"].shape[1] :].tolist()
    # The prefill gives the first new token; drafted by the target itself, a block of K = 8 holds the next nine.
    eos_id = next((token for place, token in enumerate(new[:9]) if place >= 3 and new.index(token) == place), new[4])
    for name, by in (("a perfect draft", target), ("a noisy draft", draft)):
        found = _both(target, by, inputs, 8, max_new_tokens=num_new, eos_token_id=eos_id)
        _check_same(run, f"end inside a block, {name}", *found)


def grown_cache(run: Run, target: Net, draft: Net) -> None:
    """A text longer than the room that the cache has at first."""
    inputs = _prompts(SHAPE.num_tokens, 1, run.device)
    found = _both(target, draft, inputs, 8, max_new_tokens=GROWN_TOKENS)
    _check_same(run, f"greedy = plain over {GROWN_TOKENS} tokens", *found)


def sampled_law(run: Run) -> None:
    """Both rules against the target's exact law, and a wrong one that has to be caught; G-tests against chi-square,
    which together fail a faultless device once in a million runs per rule."""
    target, draft = _pair(SHAPE_OF_LAW, TOP_PROBABILITY_OF_LAW, NOISE_OF_LAW, run.device)
    acceptance, _ = overlap(target, draft, texts(4, 32, SHAPE_OF_LAW.num_tokens, 3, run.device))
    run.record.facts["law"] = {"false_fail_rate": FALSE_ALARM_RATE, "overlap": acceptance, "rows": run.sizes.law_rows}
    prompt, num_rows = texts(1, 3, SHAPE_OF_LAW.num_tokens, 4, run.device)[0], run.sizes.law_rows
    for rule in ("standard", "block"):
        flag: dict[str, Any] = {"num_speculative_tokens": LAW_DRAFT_LENGTH, "rejection_sample_method": rule}
        with hf_specdec.enable(target, draft, **flag):
            pair = Pair(target, draft, [prompt], rule, LAW_DRAFT_LENGTH, temperature=1.0, seed=5)
            sample = draw_sample(pair, num_rows, seed=0)
            checks = [law_check(sample), draft_check(sample.observed)]
            if rule == "standard":
                wrong = draw_sample(pair, num_rows, seed=500_000, control=CONTROL)
                checks.append(control_check(wrong, CONTROL, num_rows))
        for check in checks:
            run.check(f"{check.name}, rule {rule}", check.is_passed, check.summary)
        low, high = BOTH_BRANCHES
        rate = sample.acceptance_rate
        run.check(f"both branches ran, rule {rule}", low <= rate <= high, f"acceptance {rate:.2f}")


def low_precision(run: Run) -> None:
    """Greedy text in bfloat16: where it parts from plain's, the two best tokens have to be nearly tied."""
    models: Models = run.models
    nets = models.base(), models.noisy_base(run.sizes.acceptances[0])
    target, draft = (widen(net, Widening(), torch.bfloat16) for net in nets)
    prompts = [texts(1, length, run.sizes.draft_vocab, length, run.device)[0] for length in (12, 7, 9, 5)]
    with hf_specdec.enable(target, draft, num_speculative_tokens=4):
        pair = Pair(target, draft, prompts, "block", 4, temperature=1.0, seed=0)
        check, found, _, _ = greedy_check(pair, run.sizes.parity_tokens)
    run.check("bf16 texts part from plain's at near-ties only", check.is_passed, check.summary)
    run.value("bf16 texts that part from plain's", len(found) / (2 * len(prompts)), "share", MICRO["texts that part"])
    if found:
        widest = max(divergence.margin for divergence in found)
        run.value("widest top-2 margin where they part", widest, "logit", MICRO["margin"])
        run.record.facts["first differences"] = [str(divergence) for divergence in found]
