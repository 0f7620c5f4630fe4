"""From measured seconds and acceptance to the speed of every draft length.

    speed(K) = E[tokens](K) / (seconds of a target pass over batch x (K + 1) rows + seconds of drafting K tokens)

by the cost model with which "auto" chooses (`speed_model`). Look-ups depend on where in the text a step stands, so they
are not predicted but replayed: each text is read again, and what would have been proposed is compared with what was
written. Knows nothing of models.
"""

from collections.abc import Iterator, Sequence

from hf_specdec.acceptance import AcceptanceRecord
from hf_specdec.config import SpeculativeConfig
from hf_specdec.costs import StepCosts
from hf_specdec.draft_length import Offer, Part, Sources, StepState, TableLength
from hf_specdec.drafters.ngram import Found
from hf_specdec.estimate.result import LengthRow, Prediction
from hf_specdec.speed_model import PairKnowledge, SpeedModel
from hf_specdec.suffix_index import SuffixIndex

__all__ = ["looked_up", "predict"]

LONGEST = 16
"""Largest K in the table."""


def predict(costs: StepCosts, survivals: Sequence[Sequence[float]], batch: int = 1) -> Prediction:
    """Speeds for K = 0 … `LONGEST` by the cost model of "auto".

    Args:
        costs: measured; passes, and drafting if `survivals` is not empty.
        survivals: per drafted row of a step, the probability that at least i tokens stay, i = 1 … drafted.
        batch: rows.
    """
    kept, seen = _sums(survivals)
    rate = sum(kept) / sum(seen) if seen else 0.0
    record = AcceptanceRecord(rate)  # nothing is expected but what was seen
    record.update(survivals)
    model = SpeedModel(PairKnowledge(costs, {"draft": record}), cost_guess=1.0)
    state = StepState(batch, batch, LONGEST, 1 << 20, [Part([Offer(LONGEST, "draft", rate)] * batch)])
    sources, steps = Sources(1.0), []
    for length in range(LONGEST + 1 if seen else 1):
        tokens, seconds = model.predicted(state, sources.plan(state, length))
        steps.append((length, tokens / batch, seconds))
    by_position = [part / whole for part, whole in zip(kept, seen, strict=True) if whole]
    return Prediction(_rows(steps, batch), rate, by_position)


def looked_up(
    texts: Sequence[tuple[list[int], list[int]]], costs: StepCosts | None, config: SpeculativeConfig
) -> Prediction:
    """What prompt lookup would have kept of (prompt, what was written) pairs, and how fast one row would have been.

    A text that was sampled has the target's law, so a proposed token is met with the probability that it is kept with.

    Args:
        texts: token ids.
        costs: measured passes; None: no speeds.
        config: the range of n.
    """
    steps = []
    for length in range(LONGEST + 1):
        pairs = [pair for text in texts for pair in _replayed(*text, length, config)]
        if costs is None or not pairs:
            break
        seconds = sum(costs.verify.seconds(drafted + 1) for drafted, _ in pairs) / len(pairs)
        steps.append((length, 1 + sum(kept for _, kept in pairs) / len(pairs), seconds))
    pairs = [pair for text in texts for pair in _replayed(*text, TableLength.FREE, config)]
    kept, seen = _sums([[float(place < right) for place in range(drafted)] for drafted, right in pairs])
    share = sum(drafted > 0 for drafted, _ in pairs) / max(len(pairs), 1)
    by_position = [part / whole for part, whole in zip(kept, seen, strict=True) if whole]
    return Prediction(_rows(steps, 1), sum(kept) / sum(seen) if seen else 0.0, by_position, share)


def _replayed(prompt: list[int], new: list[int], length: int, config: SpeculativeConfig) -> Iterator[tuple[int, int]]:
    """(proposed, kept) of each step that writes `new` after `prompt`."""
    index, place = SuffixIndex(config.prompt_lookup_min, config.prompt_lookup_max), 1  # one token from the prefill
    index.extend([*prompt, *new[:1]])
    while place < len(new):
        proposal = Found(index, *index.match()).read(min(length, len(new) - place - 1))
        kept = next((i for i, token in enumerate(proposal) if token != new[place + i]), len(proposal))
        yield len(proposal), kept
        index.extend(new[place : place + kept + 1])
        place += kept + 1


def _rows(steps: list[tuple[int, float, float]], batch: int) -> list[LengthRow]:
    if not steps:
        return []
    plain = steps[0][1] / steps[0][2]
    return [
        LengthRow(length, tokens, seconds, batch * tokens / seconds, tokens / seconds / plain)
        for length, tokens, seconds in steps
    ]


def _sums(survivals: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Per position: tokens kept, tokens reached."""
    width = max(map(len, survivals), default=0)
    kept, seen = [0.0] * width, [0.0] * width
    for row in survivals:
        before = 1.0
        for place, survival in enumerate(row):
            seen[place] += before
            kept[place] += survival
            before = survival
    return kept, seen
