"""When a copy of the draft in fewer bits has earned what making it takes.

The draft's price is what most pairs have to pay for speculation, and a copy of it in fewer bits is cheaper on many
machines and dearer on others. So, from what was measured:

* a copy saves a share of the time: 1 - speed(draft as it is) / speed(draft at the copy's price), each at its best K and
  at the acceptance seen so far;
* it is made once that share of the seconds decoded so far is what making it takes. Whoever stops right after has lost
  at most as much again as a copy made at once would have saved: the rule for renting or buying (ski rental; Karlin et
  al. 1988, "Competitive snoopy caching").

Knows nothing of models: seconds and shares come as numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hf_specdec.auto_length import LENGTHS, NUM_PLAIN
from hf_specdec.draft_length import DraftPlan, Offer, Part, StepState
from hf_specdec.speed_model import PairKnowledge, SpeedModel

__all__ = ["ConversionPrice", "best_conversion", "best_rate", "has_evidence", "is_worse"]

RECORD = "draft"
MIN_UPDATES = 8
"""Steps that drafted before a draft is judged."""
MIN_SAVING = 0.05
"""Share of the time below which nothing is converted: fewer bits keep fewer tokens."""
WORSE = 0.97
MIN_TRIED = 24
"""Steps that drafted with a copy before it is judged."""


@dataclass(frozen=True)
class ConversionPrice:
    """What a copy in fewer bits takes.

    Attributes:
        quantization: of the copy.
        pass_share: seconds of a pass of it ÷ seconds of a pass of the draft.
        seconds: of making it.
    """

    quantization: str
    pass_share: float
    seconds: float


def has_evidence(knowledge: PairKnowledge, batch: int, num_updates: int = MIN_UPDATES) -> bool:
    """Whether enough was measured to judge a draft for `batch` rows."""
    costs, record = knowledge.costs, knowledge.records.get(RECORD)
    is_known = costs.verify.num_observations(batch) >= NUM_PLAIN and not costs.draft.is_empty
    return is_known and not knowledge.is_draft_cold and record is not None and record.num_updates >= num_updates


def best_rate(knowledge: PairKnowledge, batch: int) -> float:
    """Expected tokens per second at the best K, the model drafting for all of `batch` rows; needs evidence."""
    speed = SpeedModel(knowledge, 1.0)
    most = max(4, 2 * (knowledge.costs.verify.largest // batch - 1))  # as far as `auto_length` would go
    state = StepState(batch, batch, most, 1 << 20, [Part([Offer(most, RECORD)] * batch)])
    plans = [DraftPlan(length, [0] * batch, [length] * batch) for length in LENGTHS if length <= most]
    return max(speed.rate(state, plan) for plan in plans)


def best_conversion(knowledge: PairKnowledge, batch: int, prices: Iterable[ConversionPrice]) -> ConversionPrice | None:
    """The copy that saves most, once what it would have saved of `knowledge.seconds` is what it takes; else None."""
    now = best_rate(knowledge, batch)
    savings = [(1 - now / best_rate(knowledge.at_price(price.pass_share), batch), price) for price in prices]
    saving, price = max(savings, key=lambda pair: pair[0], default=(0.0, None))
    is_earned = price is not None and saving >= MIN_SAVING and saving * knowledge.seconds >= price.seconds
    return price if is_earned else None


def is_worse(copied: PairKnowledge, knowledge: PairKnowledge, batch: int) -> bool:
    """Whether a copy, measured, turned out slower than the draft that it is a copy of."""
    if not has_evidence(copied, batch, MIN_TRIED) or not has_evidence(knowledge, batch):
        return False
    return best_rate(copied, batch) < WORSE * best_rate(knowledge, batch)
