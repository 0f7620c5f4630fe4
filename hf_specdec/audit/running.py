"""Runs an audit: every check on one pair, in the order of what a failure would mean for the next."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import hf_specdec
from hf_specdec.audit.checks import AuditResult, Check, Divergence
from hf_specdec.audit.greedy import greedy_check
from hf_specdec.audit.observer import CONTROLS
from hf_specdec.audit.pair import Pair
from hf_specdec.audit.probes import replay_check, residual_check, vocabulary_check
from hf_specdec.audit.sampled import FALSE_ALARM_RATE, Sample, control_check, draft_check, draw_sample, law_check
from hf_specdec.config import SpeculativeConfig
from hf_specdec.host import binding

__all__ = ["run_audit"]

LAW_SEED, CONTROL_SEED = 1_000, 500_000


def run_audit(
    target: Any,
    draft: Any,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int = 64,
    num_samples: int = 512,
    temperature: float = 1.0,
    seed: int = 0,
    control: str = "resample from p",
    progress: Callable[[str], None] = lambda step: None,
    **config: Any,
) -> AuditResult:
    """Audit speculation on a pair.

    Args:
        target: a loaded model, as `enable` takes it.
        draft: its draft: a name, a folder or a model; None for methods without one.
        prompts: int64 [seq] each, one or more.
        max_new_tokens: of greedy texts and replays.
        num_samples: texts sampled for the law, and as many for the control.
        temperature: of sampled calls.
        seed: of everything random.
        control: the wrong rule that has to be caught, a key of `observer.CONTROLS`.
        progress: told what runs.
        **config: further keys of the flag.

    Raises:
        ValueError: no prompts, an empty one, or an unknown control.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("An audit needs at least one prompt, each of at least one token.")
    if control not in CONTROLS:
        raise ValueError(f"Unknown control {control!r}. Available: {', '.join(CONTROLS)}.")
    started, target = time.perf_counter(), binding.unwrap(target)
    flag = SpeculativeConfig(**config)
    with torch.random.fork_rng(), hf_specdec.enable(target, draft, **config):
        bound = binding.bindings_of(target)[-1].draft
        pair = Pair(target, bound, list(prompts), flag.rejection_sample_method, flag.draft_length, temperature, seed)
        checks, divergences, notes = _run_checks(pair, max_new_tokens, num_samples, control, progress)
    setting = {
        "target": type(target).__name__,
        "draft": None if bound is None else type(bound).__name__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "is_quantized": bool(getattr(target, "is_quantized", False)),
        "device": str(target.device),
        "flag": flag.to_dict(),
        "num_prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "num_samples": num_samples,
        "temperature": temperature,
        "seed": seed,
        "false_alarm_rate": FALSE_ALARM_RATE,
    }
    return AuditResult(setting, checks, divergences, notes, time.perf_counter() - started)


def _run_checks(
    pair: Pair, max_new_tokens: int, num_samples: int, control: str, progress: Callable[[str], None]
) -> tuple[list[Check], list[Divergence], list[str]]:
    progress("greedy texts")
    greedy, divergences, notes, why_not = greedy_check(pair, max_new_tokens)
    if why_not is not None:
        return [Check("speculates", False, f"Plain decoding ran: {why_not}. There is nothing to audit.")], [], notes
    progress(f"{num_samples} sampled texts")
    sample = draw_sample(pair, num_samples, LAW_SEED)
    speculates = _speculation_check(sample)
    if not speculates.is_passed:
        return [speculates, greedy], divergences, notes
    progress(f"{num_samples} texts of the control '{control}'")
    wrong = draw_sample(pair, num_samples, CONTROL_SEED, control)
    progress("replays")
    checks = [
        speculates,
        greedy,
        law_check(sample),
        control_check(wrong, control, num_samples),
        draft_check(sample.observed),
        vocabulary_check(sample.observed),
        residual_check(sample.observed),
        replay_check(pair, max_new_tokens),
    ]
    notes += [note for report in sample.reports for note in report.notes]
    return checks, divergences, list(dict.fromkeys(notes))


def _speculation_check(sample: Sample) -> Check:
    reasons = [report.reason for report in sample.reports if report.reason is not None]
    drafted = sum(report.drafted for report in sample.reports)
    if reasons:
        return Check("speculates", False, f"Plain decoding ran: {reasons[0]}. There is nothing to audit.")
    if not drafted:
        return Check("speculates", False, "Nothing was drafted. There is nothing to audit.")
    for report in sample.reports:
        report.check()
    summary = f"{drafted} tokens drafted in {sum(report.steps for report in sample.reports)} row-steps."
    return Check("speculates", True, summary, {"drafted": drafted, "acceptance_rate": sample.acceptance_rate})
