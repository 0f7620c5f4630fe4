"""A machine and a text that exist as numbers only, to try choices of K on.

A text of independent tokens: each drafted token is kept with probability α, which changes once midway. A machine:
seconds of a pass by rows, of a draft forward, of reading, each with log-normal noise. One row, one model that drafts.
"""

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.auto_length import MeasuredLength
from hf_specdec.draft_length import Offer, Part, Planner, Sources, StepOutcome, StepState
from hf_specdec.speed_model import PairKnowledge

MACHINES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1.0 + 0.015 * (rows - 1),
    "staircase": lambda rows: 1.0 if rows <= 4 else 1.25 if rows <= 8 else 2.0 if rows <= 16 else 3.0,
    "offload": lambda rows: 1.0 + 0.007 * (rows - 1),
}
PROMPT = 60
READ_SHARE = 0.05
"""Seconds of reading one token of a prompt, in draft forwards."""
LIMIT = 32


@dataclass(frozen=True)
class World:
    machine: str
    cost_coefficient: float
    rates: tuple[float, float]
    num_tokens: int
    noise: float = 0.1

    def verify(self, rows: int) -> float:
        return MACHINES[self.machine](rows)

    def read(self, tokens: int) -> float:
        return self.cost_coefficient * max(1.0, READ_SHARE * tokens) if tokens else 0.0

    def rate(self, position: int) -> float:
        return self.rates[position >= self.num_tokens // 2]


def constant_seconds(world: World, length: int) -> float:
    """Expected seconds of the text when every step drafts `length` tokens."""
    total = world.read(PROMPT) if length else 0.0
    for rate in world.rates:
        tokens = sum(rate**i for i in range(length + 1))
        step = world.verify(length + 1) + length * world.cost_coefficient
        total += world.num_tokens / 2 / tokens * step
    return total


def best_constant(world: World) -> tuple[int, float]:
    """(K, seconds) of the best fixed K."""
    return min(((length, constant_seconds(world, length)) for length in range(LIMIT + 1)), key=lambda pair: pair[1])


def auto_seconds(world: World, seed: int, knowledge: PairKnowledge | None = None) -> tuple[float, list[int]]:
    """(seconds, K of every step) of the measured choice."""
    rng = random.Random(seed)

    def noisy(seconds: float) -> float:
        return seconds * math.exp(rng.gauss(0.0, world.noise)) if seconds else 0.0

    choice = MeasuredLength(knowledge or PairKnowledge(), world.cost_coefficient)
    choice.begin(READ_SHARE)
    planner = Planner(choice, Sources(world.cost_coefficient))
    position, debt, total, lengths = 0, PROMPT, 0.0, []
    while position < world.num_tokens:
        remaining = world.num_tokens - position
        limit = min(LIMIT, remaining - 1)
        state = StepState(1, 1, limit, remaining, [Part([Offer(limit, "model", 0.6)], debt=debt)])
        plan = planner.plan(state)
        rate, kept = world.rate(position), 0
        while kept < plan.length and rng.random() < rate:
            kept += 1
        survivals = [1.0 if i < kept else 0.0 for i in range(plan.length)]
        # Greedy knows whether later tokens agree too, but a prefix that is lost stays lost.
        read = noisy(world.read(debt)) if plan.length else 0.0
        draft = noisy(world.cost_coefficient * plan.length)
        verify = noisy(world.verify(plan.length + 1))
        planner.learn(state, plan, StepOutcome([survivals], kept + 1, read, draft, verify))
        total += read + draft + verify
        lengths.append(plan.length)
        position += kept + 1
        debt = 0 if plan.length else debt + 1
    return total, lengths


def regret(world: World, seed: int) -> float:
    """Share of the best fixed K's speed that the measured choice loses."""
    return 1 - best_constant(world)[1] / auto_seconds(world, seed)[0]


COSTS = (0.05, 0.2, 0.5, 1.2)
RATES = (0.05, 0.3, 0.6, 0.9)
NUM_STEPS = 300
NUM_SEEDS = 2


def world(machine: str, cost: float, before: float, after: float) -> World:
    """A text as long as what the best fixed K writes in `NUM_STEPS` steps."""
    length, _ = best_constant(World(machine, cost, (before, after), 1000))
    tokens = sum(sum(rate**i for i in range(length + 1)) for rate in (before, after)) / 2
    return World(machine, cost, (before, after), 2 * int(NUM_STEPS * tokens / 2))


def main() -> None:
    """Print the mean regret of every world as JSON."""
    worlds = itertools.product(MACHINES, COSTS, RATES, RATES)
    found = {str(key): statistics.mean(regret(world(*key), seed) for seed in range(NUM_SEEDS)) for key in worlds}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
