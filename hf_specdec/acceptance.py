"""How much of a draft is kept, by position, from every drafted token of the last steps.

A step tells more than how many tokens it accepted: for each drafted position i the probability that the first i tokens
stay is known once target and draft have both spoken (Π min(1, p/q) for the standard rule, p̄ᵢ for block verification,
0 or 1 when greedy). Its mean over steps is S_i, and a step that drafts K tokens is expected to keep S_1 + … + S_K of
them. What is estimated is a_i = S_i / S_{i-1}, so that positions never drafted continue the last known one.

Source: Leviathan et al. 2023 (arXiv 2211.17192), §3, where one α stands for every a_i. Host floats only.
"""

import math
from collections.abc import Sequence

__all__ = ["AcceptanceRecord"]

MEMORY = 0.96
"""Weight that what was seen before keeps at each update: some 25 updates count."""
PRIOR_WEIGHT = 3.0
"""Tokens for which the prior stands."""
CHAIN_WEIGHT = 3.0
"""Tokens for which the position before stands."""
FURTHEST = 64


class AcceptanceRecord:
    """What one kind of draft met with.

    Args:
        prior: a_1 expected before anything was seen, 0 to 1.
    """

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.num_updates = 0
        self._kept: list[float] = []
        self._seen: list[float] = []
        self._expected: list[float] | None = None

    def update(self, rows: Sequence[Sequence[float]]) -> None:
        """One step: per row, the probability that at least i drafted tokens stay, for i = 1 … drafted."""
        self.num_updates += 1
        self._kept = [value * MEMORY for value in self._kept]
        self._seen = [value * MEMORY for value in self._seen]
        for survivals in rows:
            before = 1.0
            for position, survival in enumerate(survivals):
                if position == len(self._seen):
                    self._seen.append(0.0)
                    self._kept.append(0.0)
                self._seen[position] += before
                self._kept[position] += survival
                before = survival
        self._expected = None

    def fade(self, kept: float = 0.5) -> None:
        """What was seen may no longer hold (another text, a long time without drafting): the share `kept` of it counts
        on, and the prior moves to where it was."""
        self.prior = self.rate
        self._kept = [value * kept for value in self._kept]
        self._seen = [value * kept for value in self._seen]
        self._expected = None

    @property
    def highest_rate(self) -> float:
        """The rate one standard error higher: what it may be, with as little as was seen."""
        rate = self.rate
        return min(1.0, rate + math.sqrt(rate * (1 - rate) / (PRIOR_WEIGHT + sum(self._seen))))

    @property
    def rate(self) -> float:
        """Kept share of the tokens reached, all positions together."""
        return (self.prior * PRIOR_WEIGHT + sum(self._kept)) / (PRIOR_WEIGHT + sum(self._seen))

    def expected(self, draft_length: int) -> float:
        """Tokens expected to stay of a draft of `draft_length`."""
        if self._expected is None:
            self._expected = self._sums()
        return self._expected[min(draft_length, FURTHEST)]

    def _sums(self) -> list[float]:
        sums, survival, rate = [0.0], 1.0, self.rate
        for position in range(FURTHEST):
            if position < len(self._seen):
                rate = (self._kept[position] + CHAIN_WEIGHT * rate) / (self._seen[position] + CHAIN_WEIGHT)
            survival *= min(rate, 1.0)
            sums.append(sums[-1] + survival)
        return sums
