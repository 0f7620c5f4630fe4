"""Do drawn tokens follow the laws they were drawn from? A G-test over cells, each draw with a law of its own.

Draw i has law p_i, known before it. A cell c collects O_c draws and expects E_c = Σ_i p_i(c). The statistic
G = 2 Σ_c O_c ln(O_c / E_c) is compared with chi-square of (cells − 1) degrees. With one law for all draws this is the
ordinary likelihood-ratio test; with different ones the surprises O − E have a smaller covariance, since
Σ_i p_i p_iᵀ ⪰ E Eᵀ / n, so that the p-value is too large rather than too small. Williams' correction (Biometrika 63,
1976) takes off what finite cells add.

Three ways to form cells, since a fault shows in one and hides in another: by token, by rank in the law, and by how
much likelier a token is under the target than under the draft (where every wrong rule of accepting shows).
"""

import torch
from torch import Tensor

__all__ = ["LawCounts", "chi_square_at", "g_test"]

# Expected draws per cell: below, the chi-square law is not good enough at p-values of 1e-7.
MIN_EXPECTED = 25.0
RANKS = (1, 2, 4, 8, 16)  # cells: rank 1, 2, 3–4, 5–8, 9–16, the rest
LOG_RATIOS = (-1.0, -0.3, 0.0, 0.3, 1.0)


def g_test(observed: Tensor, expected: Tensor) -> tuple[float, int, float]:
    """Pools rare cells, rarest first, then tests.

    Args:
        observed: float64 [cells], counts.
        expected: float64 [cells], of the same total.

    Returns:
        (G, degrees of freedom, p-value); (0, 0, 1) if everything falls into one cell.
    """
    order = expected.argsort()
    expected, observed = expected[order], observed[order]
    cells = _pooled(expected)
    size = int(cells.max()) + 1
    pooled_expected = expected.new_zeros(size).index_add_(0, cells, expected)
    pooled_observed = observed.new_zeros(size).index_add_(0, cells, observed)
    freedom, total = size - 1, pooled_expected.sum()
    if freedom == 0:
        return 0.0, 0, 1.0
    terms = torch.where(pooled_observed > 0, pooled_observed * (pooled_observed / pooled_expected).log(), 0.0)
    correction = 1 + ((total / pooled_expected).sum() - 1) / (6 * total * freedom)
    statistic = max(0.0, float(2 * terms.sum() / correction))
    return statistic, freedom, _chi_square_tail(statistic, freedom)


def _pooled(expected: Tensor) -> Tensor:
    """The cell of each of the ascending `expected`, so that every cell expects at least `MIN_EXPECTED`."""
    cells, cell, mass = [], 0, 0.0
    for value in expected.tolist():
        if mass >= MIN_EXPECTED:
            cell, mass = cell + 1, 0.0
        cells.append(cell)
        mass += value
    is_last_short = mass < MIN_EXPECTED and cell > 0
    return torch.tensor(cells).clamp(max=cell - is_last_short)


def _chi_square_tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square_at(tail: float, freedom: int) -> float:
    """The value that chi-square of `freedom` degrees exceeds with probability `tail`."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _chi_square_tail(middle, freedom) > tail else (low, middle)
    return high


class LawCounts:
    """Observed and expected counts of one sample, in every kind of cell."""

    def __init__(self) -> None:
        self.num_draws = 0
        self.num_impossible = 0
        self._counts: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, probs: Tensor, drawn: Tensor, draft_probs: Tensor | None = None) -> None:
        """Take draws in.

        Args:
            probs: [n, vocab], the law of each.
            drawn: int64 [n].
            draft_probs: [n, vocab], the draft's law there; None: no cells by ratio.
        """
        n, vocab = probs.shape
        if n == 0:
            return
        index = drawn[:, None]
        at = probs.gather(1, index)[:, 0]
        self.num_draws += n
        self.num_impossible += int((at <= 0).sum())
        self._add("token", torch.bincount(drawn, minlength=vocab), probs.sum(dim=0, dtype=torch.float64))
        self._add("rank", *_by_rank(probs, index))
        if draft_probs is not None:
            self._add("p/q", *_by_ratio(probs, index, draft_probs))

    def _add(self, kind: str, observed: Tensor, expected: Tensor) -> None:
        observed, expected = observed.double().cpu(), expected.double().cpu()
        if kind in self._counts:
            observed, expected = observed + self._counts[kind][0], expected + self._counts[kind][1]
        self._counts[kind] = observed, expected

    def tests(self) -> dict[str, tuple[float, int, float]]:
        """Per kind of cell: (G, degrees of freedom, p-value)."""
        return {kind: g_test(observed, expected) for kind, (observed, expected) in self._counts.items()}


def _by_rank(probs: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    top = probs.topk(min(RANKS[-1], probs.shape[1]), dim=1)
    edges = [rank for rank in RANKS if rank <= top.values.shape[1]]
    is_it = top.indices == index
    expected, observed, start = [], [], 0
    for edge in edges:
        expected.append(top.values[:, start:edge].sum(dtype=torch.float64))
        observed.append(is_it[:, start:edge].sum())
        start = edge
    rest = probs.sum(dtype=torch.float64) - torch.stack(expected).sum()
    expected.append(rest.clamp(min=0))
    observed.append(len(probs) - torch.stack(observed).sum())
    return torch.stack(observed), torch.stack(expected)


def _by_ratio(probs: Tensor, index: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    ratio = torch.where(probs > 0, probs.log() - draft_probs.log(), -torch.inf)
    cells = torch.bucketize(ratio, torch.tensor(LOG_RATIOS, device=probs.device))
    size = len(LOG_RATIOS) + 1
    expected = torch.zeros(size, dtype=torch.float64, device=probs.device)
    expected.index_add_(0, cells.flatten(), probs.flatten().double())
    return torch.bincount(cells.gather(1, index)[:, 0], minlength=size), expected
