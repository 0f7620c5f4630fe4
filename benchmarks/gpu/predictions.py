"""What was predicted for an H200 before anything was measured on one, so that a miss shows.

Every number is derived in docs/design (the page "gpu-check"), where its sources stand. Times are milliseconds, batch 1,
short context. A pass takes as long as its slower half, device or host:

    eager(M) = max(graph(M), layers · host milliseconds per layer · host factor)
    tokens per step = E(K) = (1 − α^(K+1)) / (1 − α)          Leviathan et al. 2023 (arXiv 2211.17192), equation 1
    step = K · draft + target(K + 1) + loop

The host factor is measured (stage 1): this host's time per layer over `HOST_MS["bf16"]`.
"""

from dataclasses import dataclass

__all__ = ["MICRO", "Range", "assisted", "eager_ms", "expected_tokens", "graph_ms", "ours", "plain", "spread"]


@dataclass(frozen=True)
class Range:
    """A prediction and the bounds outside of which it was wrong."""

    value: float
    low: float
    high: float

    def holds(self, measured: float) -> bool:
        """Whether `measured` lies within the bounds."""
        return self.low <= measured <= self.high


def spread(value: float, share: float = 0.2) -> Range:
    """`value` give or take a share of it."""
    return Range(value, value * (1 - share), value * (1 + share))


MICRO = {
    "copy": Range(4.3, 3.9, 4.7),  # TB/s
    "read": Range(4.1, 3.9, 4.3),  # TB/s
    "tiny op": Range(6.0, 4.0, 8.0),  # µs on the host
    "host per layer": Range(0.25, 0.14, 0.6),  # ms
    "graph kernel": Range(1.65, 1.3, 2.0),  # µs
    "pinned copy": Range(15.0, 10.0, 25.0),  # µs
    "texts that part": Range(0.5, 0.1, 0.9),  # share of bf16 texts of 128 tokens
    "margin": Range(0.03, 0.0, 0.1),  # top-2 margin where bf16 texts part
    "packing saves": Range(57.0, 30.0, 90.0),  # µs per layer at 8,192 slots
    "never slower": Range(1.0, 0.97, 9.9),  # × plain
}

#: milliseconds per layer that a fast host takes to issue an eager forward
HOST_MS = {"bf16": 0.25, "nf4": 0.40}
#: milliseconds per step that the loop itself takes on a fast host, and transformers' assisted loop per step, per draft
#: token and per verify pass
LOOP_MS, ASSISTED_STEP_MS, ASSISTED_DRAFT_MS, ASSISTED_VERIFY_MS = 0.6, 3.0, 1.5, 0.6


@dataclass(frozen=True)
class Cost:
    """A model's predicted times.

    Attributes:
        layers: of the model.
        kind: of its linears, a key of `HOST_MS`.
        graph: rows from which on a pass under a CUDA graph takes so many milliseconds.
        share: half width of the bounds, as a share.
        extra_rows: milliseconds that more than one row adds to an eager pass (masks).
    """

    layers: int
    kind: str
    graph: dict[int, float]
    share: float = 0.15
    extra_rows: float = 0.0


COSTS = {
    "7b bf16": Cost(28, "bf16", {1: 5.3, 2: 5.5}, extra_rows=0.4),
    "7b nf4": Cost(28, "nf4", {1: 3.6, 2: 3.7, 4: 3.8, 5: 3.9, 6: 5.5, 8: 6.2, 49: 9.4}, 0.2, 0.3),
    "70b nf4": Cost(74, "nf4", {1: 21.0, 8: 22.0, 17: 45.0}, 0.3),
    "0.5b": Cost(24, "bf16", {1: 1.8}, 0.22),
    "small": Cost(4, "bf16", {1: 0.30}, 0.22),
}
MOST_DRAFTED = 8  # of the draft lengths that "auto" is predicted to choose from


def graph_ms(model: str, rows: int = 1) -> Range:
    """A pass over `rows` rows under a CUDA graph."""
    cost = COSTS[model]
    return spread(cost.graph[max(start for start in cost.graph if start <= rows)], cost.share)


def eager_ms(model: str, rows: int = 1, host_factor: float = 1.0) -> Range:
    """An eager pass over `rows` rows."""
    cost = COSTS[model]
    host = cost.layers * HOST_MS[cost.kind] + (cost.extra_rows if rows > 1 else 0.0)
    return spread(max(graph_ms(model, rows).value, host * host_factor))


def expected_tokens(acceptance: float, draft_length: int) -> float:
    """E(K), tokens that a step gives."""
    return sum(acceptance**i for i in range(draft_length + 1))


def plain(target: str, host_factor: float = 1.0) -> Range:
    """Tokens per second of plain eager decoding."""
    return spread(1e3 / eager_ms(target, 1, host_factor).value)


def ours(target: str, draft: str, acceptance: float, draft_length: int | None, host_factor: float = 1.0) -> Range:
    """Tokens per second of the eager loop with K = `draft_length`; None: the best K."""
    if draft_length is None:
        lengths = range(MOST_DRAFTED + 1)
        best = max(ours(target, draft, acceptance, length, host_factor).value for length in lengths)
        return Range(best, best * 0.8, best * 1.2)
    drafting = draft_length * eager_ms(draft, 1, host_factor).value
    step = drafting + eager_ms(target, draft_length + 1, host_factor).value + LOOP_MS * host_factor
    return spread(1e3 * expected_tokens(acceptance, draft_length) / step)


def assisted(target: str, draft: str, acceptance: float, draft_length: int, host_factor: float = 1.0) -> Range:
    """Tokens per second of transformers' assisted decoding with a constant K."""
    drafting = draft_length * (eager_ms(draft, 1, host_factor).value + ASSISTED_DRAFT_MS * host_factor)
    around = (ASSISTED_STEP_MS + ASSISTED_VERIFY_MS) * host_factor
    step = drafting + eager_ms(target, draft_length + 1, host_factor).value + around
    return spread(1e3 * expected_tokens(acceptance, draft_length) / step)
