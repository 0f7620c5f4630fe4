"""Greedy text against plain's: how often do they part, and were the two tokens nearly tied where they do?

A pass over K + 1 rows sums in another order than a pass over one row, so that scores differ in the last bits. In
float32 that is of order 1e-6 and the text is plain's. In 8-bit significands it is not: the bound below says how large a
gap rounding can explain; anything larger is a fault.
"""

from typing import Any

import torch
from torch import Tensor

from hf_specdec.audit.checks import Check, Divergence
from hf_specdec.audit.pair import Pair

__all__ = ["greedy_check"]

# float32 scores of one text agree to about 1e-5 whatever the shape of the pass (tests/parity); ten times that is a tie.
EXACT_BOUND = 1e-4
# Both scores carry an error of a few units in the last place of the head's output (its own rounding is half a unit, the
# hidden state's errors add the rest): two units each, four for their difference.
UNITS = 4
# Activations of int8 products have 7 bits, those of 4-bit ones are computed in bfloat16's 8 at best.
QUANTIZED_EPS = 2**-7


def noise_bound(dtype: torch.dtype, is_quantized: bool, largest: float) -> float:
    """The largest difference of two scores of magnitude `largest` that rounding explains."""
    if dtype in (torch.float32, torch.float64) and not is_quantized:
        return EXACT_BOUND
    eps = torch.finfo(dtype).eps
    return max(EXACT_BOUND, UNITS * largest * (max(eps, QUANTIZED_EPS) if is_quantized else eps))


def greedy_check(pair: Pair, max_new_tokens: int) -> tuple[Check, list[Divergence], list[str], str | None]:
    """Every prompt alone, then all in one left-padded batch.

    Returns:
        The check, the divergences, the notes of the calls, and why a call did not speculate (None: all did).
    """
    found: list[Divergence] = []
    notes: list[str] = []
    num_rows = num_tokens = 0
    batches = [[prompt] for prompt in pair.prompts]
    if len(pair.prompts) > 1:
        batches.append(pair.prompts)
    for number, prompts in enumerate(batches):
        inputs = pair.batch(prompts)
        plain_ids, scores = _texts(pair, inputs, False, max_new_tokens)
        ids, _ = _texts(pair, inputs, None, max_new_tokens)
        report = pair.report()
        notes += [note for note in report.notes if note not in notes]
        if report.reason is not None:
            return Check("greedy text", False, f"Plain decoding ran: {report.reason}"), [], notes, report.reason
        num_rows += len(prompts)
        num_tokens += int(_is_text(pair, plain_ids).sum())
        first_row = number if len(prompts) == 1 else 0
        found += _divergences(pair, plain_ids, ids, scores, first_row)
    return _judged(found, num_rows, num_tokens), found, notes, None


def _texts(pair: Pair, inputs: dict[str, Tensor], flag: Any, max_new_tokens: int) -> tuple[Tensor, Any]:
    output = pair.generate(
        inputs,
        0,
        flag,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        pad_token_id=pair.pad_id,
        return_dict_in_generate=True,
        output_scores=flag is False,
    )
    return output.sequences[:, inputs["input_ids"].shape[1] :].cpu(), output.scores


def _is_text(pair: Pair, ids: Tensor) -> Tensor:
    """bool [batch, new]: tokens up to a row's end, the rest is padding."""
    is_eos = torch.isin(ids, torch.tensor(pair.eos_ids, dtype=torch.long)).long()
    return is_eos.cumsum(dim=1) - is_eos == 0


def _divergences(pair: Pair, plain_ids: Tensor, ids: Tensor, scores: Any, first_row: int) -> list[Divergence]:
    width = max(plain_ids.shape[1], ids.shape[1])
    both = [torch.nn.functional.pad(each, (0, width - each.shape[1]), value=-1) for each in (plain_ids, ids)]
    found = []
    for row, (plain, speculative) in enumerate(zip(*both, strict=True)):
        where = (plain != speculative).nonzero()
        if not len(where):
            continue
        position = int(where[0])
        row_scores = scores[min(position, len(scores) - 1)][row].float().cpu()
        finite = row_scores[row_scores.isfinite()]
        best = row_scores.topk(2).values
        plain_id, speculative_id = int(plain[position]), int(speculative[position])
        # -1: one text is over where the other goes on, which no tie explains.
        plain_logit, logit = (float(row_scores[i]) if i >= 0 else -torch.inf for i in (plain_id, speculative_id))
        is_quantized = bool(getattr(pair.target, "is_quantized", False))
        bound = noise_bound(pair.target.dtype, is_quantized, float(finite.abs().max()))
        margin = float(best[0] - best[1])
        found.append(
            Divergence(
                batch=len(plain_ids),
                row=first_row + row,
                position=position,
                plain_id=plain_id,
                speculative_id=speculative_id,
                plain_logit=plain_logit,
                speculative_logit=logit,
                margin=margin,
                bound=bound,
            )
        )
    return found


def _judged(found: list[Divergence], num_rows: int, num_tokens: int) -> Check:
    too_far = [divergence for divergence in found if not divergence.is_near_tie]
    summary = f"{len(found)} of {num_rows} texts part from plain's in {num_tokens} tokens"
    if found:
        widest = max(max(d.margin, d.plain_logit - d.speculative_logit) for d in found)
        summary += f"; widest margin {widest:.3g}, {len(too_far)} beyond what rounding explains"
    facts = {
        "num_texts": num_rows,
        "num_tokens": num_tokens,
        "num_divergent": len(found),
        "rate": len(found) / num_rows,
    }
    return Check("greedy text", not too_far, summary + ".", facts | {"num_beyond_bound": len(too_far)})
