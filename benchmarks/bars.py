"""What the project asks of itself, and what was measured beside it, as Markdown.

Every row is a ratio within one run. Rows that miss a target stay.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import RESULTS, Records, groups, markdown, setting
from hf_specdec.benchmark.experiment import is_greedy
from hf_specdec.benchmark.ledger import Ledger, read_results
from hf_specdec.benchmark.summary import (
    auto_arms,
    best_arm,
    best_fixed_arm,
    draft_of,
    outside_share,
    predictions,
    relative,
    share_within,
)

__all__ = ["BARS", "Bar", "bars"]


@dataclass(frozen=True)
class Bar:
    """One target: what has to be reached, and what is aimed at; `at_most` where less is better."""

    what: str
    must: float
    aim: float
    at_most: bool = False

    def verdict(self, value: float) -> str:
        """How `value` compares."""
        sign = -1 if self.at_most else 1
        if sign * value >= sign * self.aim:
            return "aim"
        if sign * value >= sign * self.must:
            return "must"
        return f"missed by {abs(value - self.must) / self.must:.0%}"


BARS = {
    "fixed": Bar("auto ÷ best fixed K of the same draft, look-ups included", 0.93, 0.97),
    "assisted": Bar("auto ÷ transformers' assisted at its best, geometric mean over kinds and modes", 1.25, 1.6),
    "engine": Bar("ours ÷ {engine}, same draft and K", 1.05, 1.15),
    "plain code": Bar("auto ÷ plain", 2.0, 2.8),
    "plain copy": Bar("auto ÷ plain", 2.0, 3.0),
    "plain prose": Bar("auto ÷ plain", 1.4, 1.7),
    "model only": Bar("auto with a draft that cannot pay ÷ plain", 0.97, 1.0),
    "nf4 all": Bar("auto ÷ plain", 1.15, 1.35),
    "nf4 copy": Bar("auto ÷ plain", 1.3, 1.8),
    "random": Bar("auto with a random draft at T = 1.5 ÷ plain", 0.97, 1.0),
    "batch": Bar("auto ÷ plain", 0.97, 1.0),
    "batch code": Bar("auto ÷ plain", 1.1, 1.3),
    "offload code": Bar("auto ÷ plain", 4.0, 5.0),
    "predicted": Bar("share of prompts with predicted ÷ measured within 10 %", 0.9, 1.0),
    "worst": Bar("largest distance of predicted ÷ measured from 1", 0.2, 0.1, at_most=True),
    "outside": Bar("share of step time outside draft and verify", 0.03, 0.015, at_most=True),
}
"""Every cell is held to "fixed", "predicted", "worst" and "outside"; the others are meant for one pair."""
PAIR, NF4_PAIR, RANDOM_PAIR = "qwen2.5-coder", "qwen2.5-coder-nf4", "qwen2.5-coder-random"
OFFLOAD_PAIR = "qwen2.5-coder-offload"  # in any dtype
BarRow = tuple[Bar, str, str, float]  # the bar, where, the arm, what was measured


def bars(results: Path = RESULTS) -> str:
    """What was measured beside what the project asks of itself, slow rows included."""
    parts = []
    for device, ledgers in read_results(results).items():
        rows = [
            (
                Path(name).name,
                where,
                arm,
                bar.what,
                _shown(bar, value),
                _shown(bar, bar.must),
                _shown(bar, bar.aim),
                bar.verdict(value),
            )
            for name, ledger in ledgers.items()
            for bar, where, arm, value in _bar_rows(Path(name).name, ledger)
        ]
        if rows:
            headings = ("pair", "cell", "arm", "what", "measured", "must", "aim", "reached")
            parts.append(f"**{device}**\n\n" + markdown(headings, rows, right=("measured", "must", "aim")))
    return "\n\n".join(parts) if parts else "*No ledger holds an arm that chooses K yet.*"


def _shown(bar: Bar, value: float) -> str:
    sign = ("≤ " if bar.at_most else "≥ ") if value in (bar.must, bar.aim) else ""
    return f"{sign}{value:.1%}" if "share" in bar.what or bar.at_most else f"{sign}{value:.2f}"


def _bar_rows(pair: str, ledger: Ledger) -> Iterator[BarRow]:
    for batch, mode, kind, records in groups(ledger):
        where = f"{mode}, {kind}, batch {batch}"
        for arm in auto_arms(records):
            yield from _cell_rows(pair, (batch, mode, kind), where, records, arm)
        if (pair, batch, kind) == (PAIR, 1, "code") and is_greedy(mode):
            yield from _engine_rows(where, records)
    if pair == PAIR:
        yield from _assisted_rows(ledger)


def _cell_rows(pair: str, cell: tuple[int, str, str], where: str, records: Records, arm: str) -> Iterator[BarRow]:
    batch, _, kind = cell
    if pair == RANDOM_PAIR:
        yield BARS["random"], where, arm, relative(records, arm, "plain")
        return
    if arm == "ours-auto-model":
        if pair == NF4_PAIR:
            yield BARS["model only"], where, arm, relative(records, arm, "plain")
        return
    best = best_fixed_arm(records, draft_of(arm))
    if kind != "all" and best:
        yield BARS["fixed"], f"{where}, best: {setting(best)}", arm, relative(records, arm, best)
    key = _plain_bar(pair, batch, kind)
    if key in BARS:
        yield BARS[key], where, arm, relative(records, arm, "plain")
    if kind == "all":
        return
    found = predictions(records, arm)
    if found:
        share, worst = share_within(found, 0.1)
        yield BARS["predicted"], where, arm, share
        yield BARS["worst"], where, arm, worst
    outside = outside_share(records, arm)
    if outside is not None:
        yield BARS["outside"], where, arm, outside


def _plain_bar(pair: str, batch: int, kind: str) -> str:
    """The name of the bar for auto ÷ plain, if this cell has one."""
    if pair == NF4_PAIR and batch == 1:
        return f"nf4 {kind}"
    if pair.startswith(OFFLOAD_PAIR):
        return f"offload {kind}"
    if pair == PAIR and batch == 1:
        return f"plain {kind}"
    if pair == PAIR and batch == 4 and kind != "all":
        return "batch code" if kind == "code" else "batch"
    return ""


def _engine_rows(where: str, records: Records) -> Iterator[BarRow]:
    """Ours at the same fixed K, against each engine's arms."""
    arms = {record["arm"]: record["family"] for record in records}
    for arm, family in sorted(arms.items()):
        mine = f"ours-{arm.rpartition('-')[2]}"
        if family in ("flashspec", "economize") and mine in arms:
            bar = BARS["engine"]
            named = Bar(bar.what.format(engine=family), bar.must, bar.aim)
            yield named, where, mine, relative(records, mine, arm)


def _assisted_rows(ledger: Ledger) -> Iterator[BarRow]:
    cells = [r for batch, _, kind, r in groups(ledger) if batch == 1 and kind != "all" and best_arm(r, "assisted")]
    for arm in sorted({arm for records in cells for arm in auto_arms(records)} - {"ours-auto-model"}):
        ratios = [
            relative(records, arm, best_arm(records, "assisted") or "")
            for records in cells
            if arm in auto_arms(records)
        ]
        value = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield BARS["assisted"], f"batch 1, {len(ratios)} cells", arm, value
