"""Stages 2 and 3: the small net and its drafts, and that widening left its function alone."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import nf4
from benchmarks.gpu.models import NOISE_SEED
from benchmarks.gpu.nets import overlap, texts
from benchmarks.gpu.run import Run
from benchmarks.gpu.widening import Widening, widen

__all__ = ["base_net_and_drafts", "relative_error", "widening"]

#: float32 sums of up to 20,000 terms, through a few layers: 1e-6 is usual, a wrong head order gives order 1
FLOAT32_ERROR = 1e-5
FOUND_WITHIN = 0.03  # of the acceptance asked for: 14 halvings leave 4e-5 of noise, so that only a flat curve misses
ALIKE_IN_NF4 = 0.85  # equal most probable tokens: rounding to bfloat16 leaves 0.96, nf4 off its grid about a half
NUM_TEXTS = 2


def base_net_and_drafts(run: Run) -> None:
    """Build the small net, scale its head, and find the noise of each draft."""
    models, ids = run.models, run.models.texts()
    base = models.base()
    with torch.no_grad():
        top = base(input_ids=ids[:, :64], use_cache=False).logits.float().softmax(dim=-1).amax(dim=-1).mean()
    run.value("most probable token, mean probability", float(top), "")
    for acceptance in run.sizes.acceptances:
        epsilon = models.epsilon(acceptance)
        found, agreement = overlap(base, models.noisy_base(acceptance), ids)
        run.value(f"noise for acceptance {acceptance}", epsilon, "of std")
        run.value(f"acceptance found, {acceptance} asked", found, "")
        run.value(f"greedy agreement at acceptance {acceptance}", agreement, "")
        run.check(f"acceptance {acceptance} was found", abs(found - acceptance) <= FOUND_WITHIN, f"{found:.3f}")
    run.record.facts["seeds"] = {"noise": NOISE_SEED}


def relative_error(net: Any, other: Any, ids: Tensor) -> float:
    """Largest difference of two nets' scores on `ids` [rows, length], over the largest score."""
    with torch.no_grad():
        expected, found = (each(input_ids=ids, use_cache=False).logits.float() for each in (net, other))
    return float((found - expected).abs().max() / expected.abs().max())


def widening(run: Run) -> None:
    """The widened nets in float32 against the small one: scores, and greedy texts token for token."""
    base, ids = run.models.base(), texts(NUM_TEXTS, 48, run.sizes.draft_vocab, 7, run.device)
    for name in ("0.5b", "7b"):
        given = run.sizes.widenings[name]
        # Two identity layers show as much as two dozen, in less memory.
        wide = widen(base, Widening(given.copies, given.kv_copies, min(2, given.identity_layers)))
        error = relative_error(base, wide, ids)
        run.value(f"{name} widened, relative error in float32", error, "")
        run.check(f"{name} widened computes the small net's scores", error <= FLOAT32_ERROR, f"{error:.1e}")
        _check_texts(run, name, base, wide, ids)
        del wide
        run.models.free()
    if run.models.why_no_nf4 is None:
        _check_nf4(run)


def _check_texts(run: Run, name: str, base: Any, wide: Any, ids: Tensor) -> None:
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    options["max_new_tokens"] = min(64, run.sizes.parity_tokens)
    expected, found = (net.generate(input_ids=ids, **options).tolist() for net in (base, wide))
    num = sum(one == other for one, other in zip(expected, found, strict=True))
    run.check(f"{name} widened writes the small net's texts", num == len(expected), f"{num} of {len(expected)}")


def _check_nf4(run: Run) -> None:
    """One function in 16 and in 4 bits: the base stands on nf4's grid."""
    given = run.sizes.widenings["0.5b"]
    wide = Widening(given.copies, given.kv_copies)
    pair = [widen(run.models.base(), wide, torch.bfloat16, linear) for linear in (None, nf4.linear)]
    _, agreement = overlap(pair[0], pair[1], run.models.texts())
    run.value("nf4 against bf16, equal most probable tokens", agreement, "")
    run.check("nf4 and bf16 are one function", agreement >= ALIKE_IN_NF4, f"{agreement:.1%} of tokens equal")
