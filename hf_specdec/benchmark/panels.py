"""What each figure shows, one function per panel: (axis, name of the experiment, its records).

Knows nothing of files; axes are matplotlib's.
"""

import re
from collections.abc import Callable
from typing import Any

from hf_specdec.benchmark.summary import (
    PARTS,
    Ratio,
    auto_arms,
    best_arm,
    draft_of,
    drafting,
    of_arm,
    predictions,
    speed,
    speedup,
)

__all__ = ["one_row", "parts", "positions", "predicted", "speedups", "sweep_acceptance", "sweep_speed", "swept"]

Records = list[dict[str, Any]]
MODE_LABELS = {"sampling": "T = 1"}
COLOURS = ("#1f6fb4", "#d1702b", "#3d8f4e", "#8a5aa8")
PART_COLOURS = ("#d1702b", "#1f6fb4", "#9a9a9a", "#333333")


def _fixed(draft: str) -> Callable[[Records], str | None]:
    return lambda records: best_arm(
        [r for r in records if re.fullmatch(r"ours(-\w+)?-\d+", r["arm"]) and draft_of(r["arm"]) == draft], "ours"
    )


def _named(arm: str) -> Callable[[Records], str | None]:
    return lambda records: arm if any(record["arm"] == arm for record in records) else None


#: shown as, which arm of a cell, colour
SERIES: tuple[tuple[str, Callable[[Records], str | None], str], ...] = (
    ("transformers' assisted, best", lambda records: best_arm(records, "assisted"), "#9a9a9a"),
    ("transformers' lookup", _named("assisted-lookup"), "#cccccc"),
    ("draft model, best K", _fixed(""), "#8fbfe8"),
    ("4-bit draft, best K", _fixed("nf4"), "#e9b48f"),
    ("look-up, best K", lambda r: best_arm([x for x in r if x["arm"].startswith("ngram-")], "ours"), "#a8d3b0"),
    ("auto", _named("ours-auto"), "#1f6fb4"),
    ("auto, 4-bit draft", _named("ours-auto-nf4"), "#d1702b"),
)


def one_row(records: Records) -> Records:
    """The records of batch 1, else all."""
    return [record for record in records if record["batch"] == 1] or records


def swept(records: Records) -> str | None:
    """What an experiment varies: "temperature", "batch", or None."""
    if len({record["mode"] for record in records if record["mode"].startswith("T=")}) > 1:
        return "temperature"
    return "batch" if len({record["batch"] for record in records}) > 2 else None


def _cell(records: Records, **wanted: Any) -> Records:
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def _whiskers(ratio: Ratio) -> list[list[float]] | None:
    if ratio.low is None or ratio.high is None:
        return None
    return [[max(0.0, ratio.value - ratio.low)], [max(0.0, ratio.high - ratio.value)]]


def speedups(axis: Any, name: str, records: Records) -> None:
    """A bar per kind, mode and series; whiskers are 95 % intervals."""
    cells = list(dict.fromkeys((record["mode"], record["kind"]) for record in records))
    groups = [_cell(records, mode=mode, kind=kind) for mode, kind in cells]
    series = [each for each in SERIES if any(each[1](group) for group in groups)]
    width = 0.85 / max(1, len(series))
    for offset, (label, pick, colour) in enumerate(series):
        for place, group in enumerate(groups):
            arm = pick(group)
            if arm is None:
                continue
            ratio = speedup(group, arm)
            at = place + (offset - (len(series) - 1) / 2) * width
            axis.bar(
                at, ratio.value, width, color=colour, yerr=_whiskers(ratio), capsize=2, ecolor="#333333", label=label
            )
            label = "_"
    axis.axhline(1.0, color="#333333", linewidth=0.8)
    axis.set_xticks(range(len(cells)), [f"{kind}\n{MODE_LABELS.get(mode, mode)}" for mode, kind in cells])
    axis.set_ylabel("speed ÷ plain")
    axis.set_title(name, loc="left")
    axis.set_ylim(0, axis.get_ylim()[1] * (1.25 if len(series) < 4 else 1.45))
    axis.legend(frameon=False, loc="upper left", ncols=3, fontsize=7)


def positions(axis: Any, name: str, records: Records) -> None:
    """Accepted ÷ reached at each position of our longest draft, a line per kind and mode."""
    lengths = [int(record["arm"][5:]) for record in records if re.fullmatch(r"ours-\d+", record["arm"])]
    longest = max(lengths, default=0)
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    for mode, kind in dict.fromkeys((record["mode"], record["kind"]) for record in records):
        drafts = drafting(_cell(records, mode=mode, kind=kind), f"ours-{longest}")
        if drafts is None:
            continue
        points = [(place, rate) for place, rate in enumerate(drafts.by_position, 1) if rate is not None]
        places, rates = [place for place, _ in points], [rate for _, rate in points]
        style = {"greedy": "-", "sampling": "--"}.get(mode, ":")
        colour = COLOURS[kinds.index(kind) % len(COLOURS)]
        label = f"{kind}, {MODE_LABELS.get(mode, mode)}"
        axis.plot(places, rates, style, color=colour, marker="o", markersize=3, label=label)
    axis.set_ylim(0, 1.05)
    axis.set_xticks(range(1, longest + 1))
    axis.set_xlabel(f"position in the draft (K = {longest})")
    axis.set_ylabel("accepted ÷ reached")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=7, ncols=2, loc="lower left", handlelength=3)


def predicted(axis: Any, name: str, records: Records) -> None:
    """A point per run of the arms that choose K; on the line the prediction came true, in the band within 10 %."""
    axis.set_title(name, loc="left")
    axis.set_xlabel("measured speed ÷ plain, after the prefill")
    axis.set_ylabel("predicted")
    found = {arm: predictions(records, arm) for arm in auto_arms(records)}
    most = max((max(each.predicted, each.measured) for runs in found.values() for each in runs), default=0.0)
    if not most:
        axis.text(0.5, 0.5, "no prediction in this ledger", transform=axis.transAxes, ha="center", color="#777777")
        axis.set_axis_off()
        return
    ends = [0.0, most * 1.1]
    axis.fill_between(ends, [0.0, ends[1] * 0.9], [0.0, ends[1] * 1.1], color="#eeeeee", label="within 10 %")
    axis.plot(ends, ends, color="#333333", linewidth=0.8)
    for colour, (arm, runs) in zip(COLOURS, found.items(), strict=False):
        measured, told = [each.measured for each in runs], [each.predicted for each in runs]
        axis.scatter(measured, told, s=14, color=colour, alpha=0.8, label=arm)
    axis.set_xlim(*ends)
    axis.set_ylim(*ends)
    axis.legend(frameon=False, fontsize=7, loc="upper left")


def parts(axis: Any, name: str, records: Records) -> None:
    """Milliseconds per token by part of the call, a bar per arm of ours, plain above them."""
    arms = sorted({r["arm"] for r in records if r["family"] == "ours"}, key=_by_number)
    each = [(arm, drafting(records, arm), 1e3 / speed(of_arm(records, arm))) for arm in arms]
    axis.barh(0, 1e3 / speed(of_arm(records, "plain")), color="#dddddd", label="plain")
    for place, (_, drafts, total) in enumerate(each, 1):
        left = 0.0
        for part, colour in zip(PARTS, PART_COLOURS, strict=True):
            width = total * drafts.shares[part] if drafts else 0.0
            axis.barh(place, width, left=left, color=colour, label=part if place == 1 else "_")
            left += width
    axis.set_yticks(range(len(each) + 1), ["plain", *arms], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ms per token, all kinds and modes")
    axis.set_xlim(0, axis.get_xlim()[1] * 1.35)
    axis.legend(frameon=False, fontsize=7, loc="center right")


def _by_number(arm: str) -> tuple[str, int]:
    stem, _, number = arm.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (arm, 0)


# --- sweeps


def _places(records: Records) -> tuple[str, list[tuple[float, Records]]]:
    """What the horizontal axis is, and the records at each of its values."""
    if swept(records) == "temperature":
        modes = {r["mode"] for r in records if r["mode"].startswith("T=")}
        values = sorted((float(mode.removeprefix("T=")), mode) for mode in modes)
        first = min(record["batch"] for record in records)
        return "temperature", [(value, _cell(records, mode=mode, batch=first)) for value, mode in values]
    mode = records[0]["mode"]
    return "batch size", [(b, _cell(records, mode=mode, batch=b)) for b in sorted({r["batch"] for r in records})]


def _stands_aside(records: Records, arm: str) -> bool:
    """Whether more than half of the arm's steps drafted nothing, calls that were handed to plain decoding included."""
    reports = [record["report"] for record in of_arm(records, arm) if record.get("report")]
    counts = [report.get("steps_by_draft_length") or {"0": 1} for report in reports]
    steps, idle = sum(sum(each.values()) for each in counts), sum(each.get("0", 0) for each in counts)
    return bool(steps) and idle > steps / 2


def sweep_speed(axis: Any, name: str, records: Records) -> None:
    """Speedup along the sweep: auto, and a fixed K dashed; a ring where auto drafts in fewer than half of its steps."""
    label, places = _places(records)
    is_marked = False
    for colour, kind in zip(COLOURS, dict.fromkeys(record["kind"] for record in records), strict=False):
        for arm, style in (("ours-auto", "-"), (_fixed("")(_cell(records, kind=kind)), "--")):
            cells = [(value, _cell(found, kind=kind)) for value, found in places]
            cells = [(value, found) for value, found in cells if arm and of_arm(found, arm)]
            if not cells or arm is None:
                continue
            ratios = [speedup(found, arm) for _, found in cells]
            values = [value for value, _ in cells]
            line = [ratio.value for ratio in ratios]
            axis.plot(values, line, style, color=colour, marker="o", markersize=3, label=f"{kind}, {_words(arm)}")
            if style == "-":
                lows = [ratio.value if ratio.low is None else ratio.low for ratio in ratios]
                highs = [ratio.value if ratio.high is None else ratio.high for ratio in ratios]
                axis.fill_between(values, lows, highs, color=colour, alpha=0.15, linewidth=0)
                aside = [(v, r.value) for (v, found), r in zip(cells, ratios, strict=True) if _stands_aside(found, arm)]
                if aside:
                    x, y = zip(*aside, strict=True)
                    told = "_" if is_marked else "auto stands aside"
                    axis.scatter(x, y, s=70, facecolors="none", edgecolors="#333333", label=told, zorder=3)
                    is_marked = True
    axis.axhline(1.0, color="#333333", linewidth=0.8)
    axis.set_title(name, loc="left")
    axis.set_xlabel(label)
    axis.set_xticks([value for value, _ in places])
    axis.set_ylabel("speed ÷ plain")
    axis.set_ylim(0, axis.get_ylim()[1] * 1.3)
    axis.legend(frameon=False, fontsize=7, ncols=3, loc="upper left", handlelength=3)


def _words(arm: str) -> str:
    return "auto" if arm == "ours-auto" else f"K = {arm.rpartition('-')[2]}"


def sweep_acceptance(axis: Any, name: str, records: Records) -> None:
    """Accepted ÷ reached of the fixed K along the sweep, of auto where there is none."""
    label, places = _places(records)
    for colour, kind in zip(COLOURS, dict.fromkeys(record["kind"] for record in records), strict=False):
        arm = _fixed("")(_cell(records, kind=kind)) or "ours-auto"
        found = [(value, drafting(_cell(cell, kind=kind), arm)) for value, cell in places]
        points = [(value, drafts.acceptance_rate) for value, drafts in found if drafts]
        values, rates = [value for value, _ in points], [rate for _, rate in points]
        axis.plot(values, rates, color=colour, marker="o", markersize=3, label=f"{kind}, {_words(arm)}")
    axis.set_ylim(0, 1.05)
    axis.set_xticks([value for value, _ in places])
    axis.set_xlabel(label)
    axis.set_ylabel("accepted ÷ reached")
    axis.legend(frameon=False, fontsize=7, loc="lower left")
