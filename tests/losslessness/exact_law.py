"""The exact law of the emitted text, by enumeration through the functions that the loop calls.

Tables give p and q for every prefix. One step from a prefix is a function of its uniforms (one per drafted token, one
coin per drafted token, one final), piecewise constant in each: it is evaluated once per cell of a product grid with all
breakpoints (from the papers' formulas, written anew), weighted with the cell's volume, from border to border of steps.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_specdec.sampling import draw
from hf_specdec.steps import commit, draft_lengths_after_eos
from hf_specdec.verification import Verifier

MAX_ROWS = 200_000


@dataclass(frozen=True)
class Tables:
    """p and q per prefix: `target[t]` and `draft[t]` are (vocab ** t, vocab), a prefix being a number in base vocab."""

    target: list[Tensor]
    draft: list[Tensor]

    @property
    def vocab(self) -> int:
        return self.target[0].shape[-1]


@dataclass(frozen=True)
class Process:
    """One way to decode: tables, a rule, how many tokens are drafted where, and what ends a text."""

    tables: Tables
    verifier: Verifier
    rule: str
    num_drafted: int
    num_tokens: int
    eos_ids: Tensor | None = None
    is_point_mass: bool = False
    has_unequal_lengths: bool = False
    draw: Callable[..., Tensor] = draw
    lengths_after_eos: Callable[..., Tensor] = draft_lengths_after_eos


@dataclass
class Outcomes:
    """Weighted outcomes of one step, in chunks: from which prefix, with what weight, and the text that came out."""

    sources: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    num_accepted: list[Tensor] = field(default_factory=list)
    codes: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    is_finished: list[Tensor] = field(default_factory=list)


def random_tables(vocab: int, depth: int, seed: int, kind: str = "random") -> Tables:
    """Context-dependent tables for prefixes of length 0 to depth - 1.

    Args:
        kind: "random"; "zeros" (a third of p and of q is 0); "equal" (p = q); "disjoint" (supports share one token);
            "near" (p and q differ by 1e-9); "sharp" (q far more peaked than p).
    """
    generator = torch.Generator().manual_seed(seed)

    def logits(length: int) -> Tensor:
        return torch.randn(vocab**length, vocab, generator=generator, dtype=torch.float64)

    target, draft = [], []
    for length in range(depth):
        p, q = logits(length), logits(length)
        if kind == "zeros":
            p, q = _with_zeros(p, generator), _with_zeros(q, generator)
        elif kind == "equal":
            q = p.clone()
        elif kind == "near":
            q = p + 1e-9 * q
        elif kind == "sharp":
            q = 4 * q
        elif kind == "disjoint":
            p[:, vocab // 2 + 1 :] = -torch.inf
            q[:, : vocab // 2] = -torch.inf
        target.append(p.softmax(-1))
        draft.append(q.softmax(-1))
    return Tables(target, draft)


def constant_tables(target_row: list[float], draft_row: list[float], depth: int) -> Tables:
    """The same p and q after every prefix."""
    rows = (torch.tensor(row, dtype=torch.float64) for row in (target_row, draft_row))
    target, draft = ([row.expand(len(row) ** t, -1) for t in range(depth)] for row in rows)
    return Tables(target, draft)


def target_law(process: Process) -> Tensor:
    """Law of the first T tokens of ordinary decoding, (vocab ** T,); after its end a text is filled with its EOS."""
    vocab = process.tables.vocab
    law = torch.ones(1, dtype=torch.float64)
    codes = torch.zeros(1, dtype=torch.long)
    is_ended = torch.zeros(1, dtype=torch.bool)
    for length in range(process.num_tokens):
        rows = process.tables.target[length][codes]
        repeat = torch.zeros_like(rows).scatter(1, (codes % vocab).unsqueeze(1), 1.0)
        rows = torch.where(is_ended.unsqueeze(1), repeat, rows)
        law = (law.unsqueeze(1) * rows).reshape(-1)
        is_eos = torch.zeros(vocab, dtype=torch.bool)
        if process.eos_ids is not None:
            is_eos[process.eos_ids] = True
        is_ended = (is_ended.unsqueeze(1) | is_eos).reshape(-1)
        codes = (codes.unsqueeze(1) * vocab + torch.arange(vocab)).reshape(-1)
    return law


def speculative_law(process: Process) -> Tensor:
    """Law of the first T emitted tokens, through draw, draft_lengths_after_eos, the verifier and commit."""
    vocab, num_tokens = process.tables.vocab, process.num_tokens
    law = torch.zeros(vocab**num_tokens, dtype=torch.float64)
    borders = [torch.zeros(vocab**t, dtype=torch.float64) for t in range(num_tokens)]
    borders[0] += 1.0
    for length in range(num_tokens):
        prefixes = (borders[length] > 0).nonzero().squeeze(1)
        outcomes = step_outcomes(process, length, prefixes)
        for source, weight, code, new_length, is_finished in zip(
            outcomes.sources, outcomes.weights, outcomes.codes, outcomes.lengths, outcomes.is_finished, strict=True
        ):
            mass = borders[length][source] * weight
            law.index_add_(0, code[is_finished], mass[is_finished])
            for border in range(length + 1, num_tokens):
                here = ~is_finished & (new_length == border)
                borders[border].index_add_(0, code[here] // vocab ** (num_tokens - border), mass[here])
    return law


def accepted_law(process: Process) -> Tensor:
    """Law of the number of accepted tokens in the first step, (num_drafted + 1,)."""
    outcomes = step_outcomes(process, 0, torch.zeros(1, dtype=torch.long))
    law = torch.zeros(process.num_drafted + 1, dtype=torch.float64)
    return law.index_add_(0, torch.cat(outcomes.num_accepted), torch.cat(outcomes.weights))


def ideal_accepted_law(process: Process) -> Tensor:
    """The same from the papers: P(n >= i) is E[prod min(1, r)] for the standard rule and E[p_i] for the block rule.

    Leviathan et al. 2023, section 3.1; Sun et al. 2024, lemma on the acceptance of sub-blocks. Needs no EOS.
    """
    tables = process.tables
    reach = kept = torch.ones(1, dtype=torch.float64)
    at_least = [torch.ones((), dtype=torch.float64)]
    for length in range(process.num_drafted):
        p, q = tables.target[length], tables.draft[length]
        if process.is_point_mass:
            q = torch.zeros_like(q).scatter(1, q.argmax(1, keepdim=True), 1.0)
        ratio = torch.where(q > 0, p / q, 0.0)
        ratio = ratio.clamp(max=1.0) if process.rule == "standard" else ratio
        kept = (kept.unsqueeze(1) * ratio).clamp(max=1.0).reshape(-1)
        reach = (reach.unsqueeze(1) * q).reshape(-1)
        at_least.append((reach * kept).sum())
    at_least.append(torch.zeros((), dtype=torch.float64))
    return -torch.stack(at_least).diff()


def total_variation(one: Tensor, other: Tensor) -> float:
    """Half the L1 distance."""
    return 0.5 * float((one - other).abs().sum())


def step_outcomes(process: Process, length: int, prefixes: Tensor) -> Outcomes:
    """Every outcome of one step from the given prefixes of `length` tokens."""
    paths = _drafts(process, length, prefixes)
    outcomes = Outcomes()
    num_cells = math.prod(points.shape[1] + 1 for points in _breakpoints(process, *paths[2:]))
    for chunk in zip(*(part.split(max(1, MAX_ROWS // num_cells)) for part in paths), strict=True):
        _verify_and_commit(process, length, chunk, outcomes)
    return outcomes


def _with_zeros(logits: Tensor, generator: torch.Generator) -> Tensor:
    is_zero = torch.rand(logits.shape, generator=generator) < 1 / 3
    is_zero.scatter_(1, logits.argmax(1, keepdim=True), False)
    return logits.masked_fill(is_zero, -torch.inf)


def _drafts(process: Process, length: int, prefixes: Tensor) -> tuple[Tensor, ...]:
    """Every draft from every prefix: (prefixes, weights, ids, lengths, p rows, q rows)."""
    vocab, tables, width = process.tables.vocab, process.tables, process.num_drafted
    sources, codes = prefixes, prefixes
    weights = torch.ones(len(prefixes), dtype=torch.float64)
    ids = torch.zeros(len(prefixes), 0, dtype=torch.long)
    draft_rows = torch.zeros(len(prefixes), 0, vocab, dtype=torch.float64)
    target_rows = tables.target[length][codes].unsqueeze(1)
    for position in range(width):
        rows = tables.draft[length + position][codes]
        if process.is_point_mass:
            rows = torch.zeros_like(rows).scatter(1, rows.argmax(1, keepdim=True), 1.0)
        middles, widths = _cells(rows.cumsum(1)[:, :-1])
        keep = (widths > 0).nonzero()[:, 0]
        new_ids = process.draw(rows[keep], middles[widths > 0])
        sources, weights = sources[keep], weights[keep] * widths[widths > 0]
        codes = codes[keep] * vocab + new_ids
        ids = torch.cat([ids[keep], new_ids.unsqueeze(1)], 1)
        draft_rows = torch.cat([draft_rows[keep], rows[keep].unsqueeze(1)], 1)
        target_rows = torch.cat([target_rows[keep], tables.target[length + position + 1][codes].unsqueeze(1)], 1)
    lengths = torch.full((len(ids),), width)
    if process.has_unequal_lengths:
        lengths = (sources * 7 + length + 1) % (width + 1)
    lengths = process.lengths_after_eos(ids, lengths, process.eos_ids)
    return sources, weights, ids, lengths, target_rows, draft_rows


def _verify_and_commit(process: Process, length: int, chunk: tuple[Tensor, ...], outcomes: Outcomes) -> None:
    """Evaluate every cell of the uniforms for some drafts and append what came out."""
    sources, weights, ids, lengths, target_rows, draft_rows = chunk
    grid = [_cells(points) for points in _breakpoints(process, ids, lengths, target_rows, draft_rows)]
    combos = torch.tensor(list(itertools.product(*(range(middles.shape[1]) for middles, _ in grid))))
    uniforms = torch.stack([middles[:, combos[:, c]] for c, (middles, _) in enumerate(grid)], dim=-1)
    volumes = torch.stack([widths[:, combos[:, c]] for c, (_, widths) in enumerate(grid)], dim=-1).prod(-1)
    row, cell = (volumes > 0).nonzero(as_tuple=True)
    verdict = process.verifier(
        target_rows[row],
        None if process.is_point_mass else draft_rows[row],
        ids[row],
        lengths[row],
        uniforms[row, cell],
    )
    vocab, num_tokens = process.tables.vocab, process.num_tokens
    text = torch.zeros(len(row), num_tokens, dtype=torch.long)
    text[:, :length] = sources[row].unsqueeze(1) // vocab ** torch.arange(length - 1, -1, -1) % vocab
    start = torch.full((len(row),), length)
    committed = commit(
        text, start, torch.zeros(len(row), dtype=torch.bool), ids[row], verdict.num_accepted, verdict.next_ids,
        process.eos_ids, torch.tensor(num_tokens),
    )  # fmt: skip
    new_lengths = start + committed.num_emitted
    last_ids = text.gather(1, (new_lengths - 1).unsqueeze(1))
    text = torch.where(torch.arange(num_tokens) < new_lengths.unsqueeze(1), text, last_ids)
    outcomes.sources.append(sources[row])
    outcomes.weights.append(weights[row] * volumes[row, cell])
    outcomes.num_accepted.append(verdict.num_accepted)
    outcomes.codes.append((text * vocab ** torch.arange(num_tokens - 1, -1, -1)).sum(1))
    outcomes.lengths.append(new_lengths)
    outcomes.is_finished.append(committed.is_finished)


def _cells(breakpoints: Tensor) -> tuple[Tensor, Tensor]:
    """Midpoints and widths of the cells into which [0, 1) is cut, (rows, breakpoints + 1) each."""
    inner = breakpoints.nan_to_num(0.0).clamp(0, 1).sort(1).values
    edges = torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=1.0)
    return (edges[:, 1:] + edges[:, :-1]) / 2, edges.diff(dim=1)


def _breakpoints(
    process: Process, ids: Tensor, lengths: Tensor, target_rows: Tensor, draft_rows: Tensor
) -> list[Tensor]:
    """All places where a step can change, per uniform: one tensor (rows, n) per coin, and one for the final draw.

    A mutant that rewires its inputs is asked what its inner rule sees; one that shares a uniform has all of them in it.
    """
    rewire = getattr(process.verifier, "rewire", None)
    if rewire is not None:
        uniforms = torch.zeros(ids.shape[0], ids.shape[1] + 1, dtype=torch.float64)
        target_rows, seen_rows, ids, lengths, _ = rewire(target_rows, draft_rows, ids, lengths, uniforms)
        draft_rows = draft_rows if seen_rows is None else seen_rows
    thresholds, scales = _thresholds(process.rule, ids, lengths, target_rows, draft_rows)
    residuals = (scales.unsqueeze(-1) * target_rows[:, :-1] - draft_rows).clamp(min=0)
    weights = torch.cat([target_rows, residuals], 1)
    final = (weights.cumsum(-1) / weights.sum(-1, keepdim=True))[..., :-1].flatten(1)
    if getattr(process.verifier, "shares_uniform", False):
        nothing = final[:, :0]
        return [torch.cat([thresholds, final], 1)] + [nothing] * ids.shape[1]
    return [*thresholds.unsqueeze(-1).unbind(1), final]


def _thresholds(
    rule: str, ids: Tensor, lengths: Tensor, target_rows: Tensor, draft_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Where each coin turns from keep to reject, (rows, K), and p's factor in the residual after 0 ... K - 1 tokens."""
    index = ids.unsqueeze(-1)
    ratio = (target_rows[:, :-1].gather(2, index) / draft_rows.gather(2, index)).squeeze(-1)
    scales = [torch.ones(len(ids), dtype=torch.float64)]
    if rule == "standard":
        return ratio, scales[0].unsqueeze(1).expand(-1, ids.shape[1])
    thresholds = [ratio[:, :0]]
    for position in range(ids.shape[1]):
        scales.append((scales[-1] * ratio[:, position]).clamp(max=1.0))
        if position + 1 == ids.shape[1]:
            thresholds.append(scales[-1].unsqueeze(1))
            continue
        after = (
            (scales[-1].unsqueeze(1) * target_rows[:, position + 1] - draft_rows[:, position + 1]).clamp(min=0).sum(1)
        )
        whole = after + 1 - scales[-1]
        middle = torch.where(whole > 0, after / whole, 1.0)
        thresholds.append(torch.where(lengths == position + 1, scales[-1], middle).unsqueeze(1))
    return torch.cat(thresholds, 1), torch.stack(scales, 1)[:, : ids.shape[1]]
