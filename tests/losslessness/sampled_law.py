"""The law of plain sampling, computed exactly, and how well texts that the whole loop sampled agree with it.

Oracle: the target's own logits without a cache, then transformers' own processors on every prefix. Two statistics:

* *first*: all texts of the first three new tokens are enumerated; Pearson's chi-square of their counts, rare texts
  pooled.
* *later*: given its own prefix, each later token is one draw from a known p. The surprises (one-hot - p), summed per
  last token before it, are martingale sums with known covariance: chi-square of their quadratic forms.

Both are small, p-values near 0, only if some token did not come from p; their rows are independent draws, so nothing is
compared with another sample.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

PAD = 0
NUM_FIRST = 3
# Pearson's statistic has chi-square tails down to p-values of 1e-8 only where no cell is nearly empty.
MIN_EXPECTED = 25.0
# The same for sums of surprises: a direction in which next to nothing could happen is no normal variable.
MIN_VARIANCE = 25.0


@dataclass(frozen=True)
class Oracle:
    """Plain sampling of `model` after one `prompt`.

    Attributes:
        prompt: int64 [seq], left-padded.
        mask: int64 [seq], 0 on padding.
        options: of `generate()`, from which transformers makes its processors.
        eos_id: the id that ends a text, which is then filled with `PAD`; None if none does.
        num_new_tokens: what the call may add: processors that look at the maximum length see it.
        row: which prompt of the call this is, for functions that are told.
    """

    model: PreTrainedModel
    prompt: Tensor
    mask: Tensor
    options: dict[str, Any]
    eos_id: int | None = None
    num_new_tokens: int = 1
    row: int = 0

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    @torch.no_grad()
    def next_probs(self, tokens: Tensor) -> Tensor:
        """float64 [rows, new, vocab]: the law of each of `tokens` [rows, new] given the prompt and those before it."""
        rows, seq = tokens.shape[0], len(self.prompt)
        ids = torch.cat([self.prompt.expand(rows, -1), tokens], dim=1)
        mask = torch.cat([self.mask.expand(rows, -1), torch.ones_like(tokens)], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
        processors = self.processors(rows)
        columns = range(seq, ids.shape[1])
        scores = [processors(ids[:, :column], logits[:, column - 1]) for column in columns]
        return torch.stack(scores, dim=1).double().softmax(dim=-1)

    def processors(self, rows: int) -> LogitsProcessorList:
        """Those of a plain call with this prompt `rows` times."""
        options = {**self.options, "max_new_tokens": self.num_new_tokens, "eos_token_id": self.eos_id}
        allowed = options.get("prefix_allowed_tokens_fn")
        if allowed is not None:
            options["prefix_allowed_tokens_fn"] = lambda _, ids: allowed(self.row, ids)
        return plain_processors(self.model, self.prompt.expand(rows, -1), self.mask.expand(rows, -1), options)

    def is_running(self, tokens: Tensor) -> Tensor:
        """bool [rows, new]: tokens that were drawn, the rest is padding after an end."""
        is_eos = torch.zeros_like(tokens) if self.eos_id is None else (tokens == self.eos_id).long()
        return is_eos.cumsum(dim=1) - is_eos == 0

    def first_law(self) -> Tensor:
        """float64 [vocab ** NUM_FIRST]: the joint law of the first new tokens, the first one in the highest place."""
        texts = torch.tensor(list(itertools.product(range(self.vocab), repeat=NUM_FIRST)))
        probs = self.next_probs(texts).gather(2, texts[..., None])[..., 0]
        probs = torch.where(self.is_running(texts), probs, (texts == PAD).double())
        return probs.prod(dim=1)

    def p_value(self, tokens: Tensor) -> float:
        """How likely plain sampling is to deviate from its law as much as `tokens` [rows, new] do, or more."""
        return combined([first_p_value(self, tokens), later_p_value(self, tokens)])


class _Made(Exception):
    """The processors are there; nothing of the call is needed beyond them."""


def plain_processors(model: PreTrainedModel, ids: Tensor, mask: Tensor, options: dict) -> LogitsProcessorList:
    """The list that a plain `generate()` of `ids` makes; it may hold tensors with one entry per row."""
    lists: list[LogitsProcessorList] = []
    make = model._get_logits_processor

    def watched(*args, **kwargs):
        lists.append(make(*args, **kwargs))
        raise _Made

    model._get_logits_processor = watched
    try:
        model.generate(input_ids=ids, attention_mask=mask, do_sample=True, pad_token_id=PAD, **options)
    except _Made:
        return lists[0]
    finally:
        del model._get_logits_processor
    raise AssertionError("generate() made no processors")


def combined(p_values: list[float]) -> float:
    """One p-value for several, by Bonferroni: valid whatever their dependence."""
    return min(1.0, len(p_values) * min(p_values))


def first_p_value(oracle: Oracle, tokens: Tensor) -> float:
    """Pearson's chi-square of the first tokens' joint counts; 0 if a text came out that cannot."""
    law = oracle.first_law().numpy()
    places = oracle.vocab ** torch.arange(NUM_FIRST - 1, -1, -1)
    counts = np.bincount((tokens[:, :NUM_FIRST] * places).sum(dim=1).numpy(), minlength=len(law))
    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law * len(tokens)
    order = np.argsort(expected)
    # Rare texts share cells, rarest first, so that every cell expects enough.
    cells = np.floor(np.cumsum(expected[order]) / MIN_EXPECTED).astype(int)
    cells = np.minimum(cells, cells[-1] - 1).clip(min=0)
    expected, counts = (np.bincount(cells, weights=values[order]) for values in (expected, counts))
    expected, counts = expected[expected > 0], counts[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1)) if len(expected) > 1 else 1.0


def later_p_value(oracle: Oracle, tokens: Tensor) -> float:
    """Chi-square of the summed surprises of the tokens after the first ones; 0 if a token came out that cannot."""
    probs = oracle.next_probs(tokens)[:, NUM_FIRST:].flatten(0, 1).numpy()
    is_running = oracle.is_running(tokens)[:, NUM_FIRST:].flatten().numpy()
    before, drawn = (tokens[:, NUM_FIRST + shift : tokens.shape[1] + shift].flatten().numpy() for shift in (-1, 0))
    probs, before, drawn = probs[is_running], before[is_running], drawn[is_running]
    if (probs[np.arange(len(drawn)), drawn] == 0).any():
        return 0.0
    surprises = np.eye(oracle.vocab)[drawn] - probs
    statistic, freedom = 0.0, 0
    for token in range(oracle.vocab):
        group = before == token
        total = surprises[group].sum(axis=0)
        covariance = np.diag(probs[group].sum(axis=0)) - probs[group].T @ probs[group]
        variances, directions = np.linalg.eigh(covariance)
        is_used = variances > MIN_VARIANCE
        statistic += ((total @ directions[:, is_used]) ** 2 / variances[is_used]).sum()
        freedom += int(is_used.sum())
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
