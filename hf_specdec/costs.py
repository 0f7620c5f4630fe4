"""What a step costs here: seconds as measured functions of a count.

A pass over M rows is not M passes: weights are read once, so its seconds are nearly flat on one machine, a staircase
with quantized kernels, a line where arithmetic is what takes the time. Nothing is assumed but that more rows never take
less time: each count that was tried keeps its last observations, their weighted median (recent ones weigh more, the
machine may be shared) goes through a monotone regression, and what lies between two tried counts is interpolated.

Source of the regression: pool adjacent violators (Ayer et al. 1955). Knows nothing of models, tokens or acceptance.
"""

import bisect
from collections import deque
from collections.abc import Iterable

__all__ = ["MeasuredCurve", "StepCosts"]

KEPT = 12
"""Observations kept per count."""
HALF_LIFE = 48
"""Observations (of any count) after which one weighs half."""
AGE_OF_A_CALL = 24
"""By how many observations a new call makes the earlier ones older: text and machine have moved on."""


class MeasuredCurve:
    """Seconds as a non-decreasing function of a count.

    Args:
        is_proportional: no count takes no time, and beyond what was tried seconds grow with the count (draft forwards);
            else the last slope goes on (rows of a pass).
    """

    def __init__(self, is_proportional: bool = False) -> None:
        self._is_proportional = is_proportional
        self._observations: dict[int, deque[tuple[int, float]]] = {}
        self._clock = 0
        self._fit: tuple[list[int], list[float]] | None = None

    def add(self, count: int, seconds: float) -> None:
        """One observation."""
        self._clock += 1
        self._observations.setdefault(count, deque(maxlen=KEPT)).append((self._clock, seconds))
        self._fit = None

    def scaled(self, factor: float) -> "MeasuredCurve":
        """A copy in which everything took `factor` times as long."""
        copied = MeasuredCurve(self._is_proportional)
        copied._clock = self._clock
        for count, observations in self._observations.items():
            copied._observations[count] = deque(((then, factor * took) for then, took in observations), maxlen=KEPT)
        return copied

    def clear(self) -> None:
        """Forget everything."""
        self._observations.clear()
        self._fit = None

    def age(self) -> None:
        """Make what is known count less than what comes."""
        self._clock += AGE_OF_A_CALL
        self._fit = None

    def num_observations(self, count: int) -> int:
        """How often `count` was measured (of late)."""
        return len(self._observations.get(count, ()))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._observations

    @property
    def largest(self) -> int:
        """Largest count that was tried; 0 if none was."""
        return max(self._observations, default=0)

    def seconds(self, count: int) -> float:
        """Expected seconds of `count`; ask only when something was measured."""
        return self._value(count, is_lower_bound=False)

    def least_seconds(self, count: int) -> float:
        """The least that `count` may take, by monotony: what the next smaller tried count takes."""
        return self._value(count, is_lower_bound=True)

    def _value(self, count: int, is_lower_bound: bool) -> float:
        counts, values = self._fitted()
        place = bisect.bisect_left(counts, count)
        if place < len(counts) and counts[place] == count:
            return values[place]
        if is_lower_bound and not self._is_proportional:
            return values[max(place - 1, 0)]
        if place == len(counts):
            return self._beyond(count, counts, values)
        if place == 0:
            return values[0] * count / counts[0] if self._is_proportional else values[0]
        share = (count - counts[place - 1]) / (counts[place] - counts[place - 1])
        return values[place - 1] + share * (values[place] - values[place - 1])

    def _beyond(self, count: int, counts: list[int], values: list[float]) -> float:
        if self._is_proportional:
            return values[-1] * count / counts[-1]
        if len(counts) == 1:
            return values[-1]
        slope = (values[-1] - values[-2]) / (counts[-1] - counts[-2])
        return values[-1] + slope * (count - counts[-1])

    def _fitted(self) -> tuple[list[int], list[float]]:
        if self._fit is None:
            counts = sorted(self._observations)
            points = [self._median(self._observations[count]) for count in counts]
            self._fit = counts, _non_decreasing(points)
        return self._fit

    def _median(self, observations: Iterable[tuple[int, float]]) -> tuple[float, float]:
        """(weighted median, total weight)."""
        pairs = sorted((seconds, 0.5 ** ((self._clock - then) / HALF_LIFE)) for then, seconds in observations)
        total, below = sum(weight for _, weight in pairs), 0.0
        for seconds, weight in pairs:
            below += weight
            if below >= total / 2:
                return seconds, total
        return pairs[-1][0], total


def _non_decreasing(points: list[tuple[float, float]]) -> list[float]:
    """The non-decreasing sequence nearest to `points` (value, weight) in weighted squares."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in points:
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            before = blocks.pop()
            total = before[1] + block[1]
            block = ((before[0] * before[1] + block[0] * block[1]) / total, total, before[2] + block[2])
        blocks.append(block)
    return [value for value, _, length in blocks for _ in range(length)]


class StepCosts:
    """What one (target, draft) pair costs on the devices where it runs, for one batch size and length of text.

    Attributes:
        verify: seconds of a target pass, with everything that a step does around it, by rows M = batch x (K + 1).
        draft: seconds of drafting by K, the draft's forwards one after another.
        read: seconds of the draft's reading before it can draft (its prefill, or a catch-up), by tokens of all rows.
    """

    def __init__(self) -> None:
        self.verify = MeasuredCurve()
        self.draft = MeasuredCurve(is_proportional=True)
        self.read = MeasuredCurve()

    def age(self) -> None:
        """A new call begins: see `MeasuredCurve.age`."""
        self.verify.age()
        self.draft.age()
        self.read.age()
