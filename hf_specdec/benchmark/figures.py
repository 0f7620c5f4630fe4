"""Pictures of a ledger: speedup by kind of text with intervals, and acceptance by position of the draft.

One figure per device, a row per experiment. A figure carries the digest of the results that it was drawn from, so that
a stale one is noticed without drawing it again. Needs matplotlib (the extra ``report``).
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdec.benchmark.ledger import Ledger
from hf_specdec.benchmark.summary import best_arm, drafting, speedup

__all__ = ["digest_in", "draw", "results_digest"]

MODE_LABELS = {"sampling": "T = 1"}
COLOURS = ("#1f6fb4", "#d1702b", "#3d8f4e", "#8a5aa8")
#: shown as, family, colour
SERIES = (("transformers' assisted, best setting", "assisted", "#9a9a9a"), ("hf_specdec, best K", "ours", "#1f6fb4"))


def results_digest(ledgers: Mapping[str, Ledger]) -> str:
    """Fingerprint of the results of one device."""
    texts = [ledger.path.read_bytes() for _, ledger in sorted(ledgers.items())]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def digest_in(figure: Path) -> str | None:
    """The digest of the results that `figure` was drawn from, None if there is no such figure."""
    found = re.search(r"results ([0-9a-f]{16})", figure.read_text(encoding="utf-8")) if figure.is_file() else None
    return found[1] if found else None


def draw(device: str, ledgers: Mapping[str, Ledger], folder: Path) -> Path:
    """Draw the figure of one device into `folder` as SVG; the same results give the same file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'hf_specdec[report]'.") from error
    options: dict[Any, Any] = {
        "svg.hashsalt": device,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(options):
        rows, size = len(ledgers), (9.5, 2.9 * len(ledgers))
        figure, axes = pyplot.subplots(rows, 2, figsize=size, squeeze=False, width_ratios=(3, 2))
        for row, (name, ledger) in zip(axes, ledgers.items(), strict=True):
            records = [record for record in ledger.records() if record["batch"] == 1] or ledger.records()
            _speedups(row[0], name, records)
            _positions(row[1], records)
        figure.suptitle(device)
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{device}.svg"
        metadata = {"Date": None, "Description": f"drawn from results {results_digest(ledgers)}"}
        figure.savefig(path, metadata=metadata)
        pyplot.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    return path


def _speedups(axis: Any, name: str, records: list[dict[str, Any]]) -> None:
    """A bar per kind, mode and series; whiskers are 95 % intervals."""
    cells = list(dict.fromkeys((record["mode"], record["kind"]) for record in records))
    width = 0.8 / len(SERIES)
    for offset, (label, family, colour) in enumerate(SERIES):
        for place, (mode, kind) in enumerate(cells):
            group = [record for record in records if (record["mode"], record["kind"]) == (mode, kind)]
            arm = best_arm(group, family)
            if arm is None:
                continue
            ratio = speedup(group, arm)
            whiskers = None
            if ratio.low is not None and ratio.high is not None:
                whiskers = [[max(0.0, ratio.value - ratio.low)], [max(0.0, ratio.high - ratio.value)]]
            at = place + (offset - (len(SERIES) - 1) / 2) * width
            bar = axis.bar(at, ratio.value, width, color=colour, yerr=whiskers, capsize=2, ecolor="#333333")
            if place == 0:
                bar.set_label(label)
    axis.axhline(1.0, color="#333333", linewidth=0.8)
    axis.set_xticks(range(len(cells)), [f"{kind}\n{MODE_LABELS.get(mode, mode)}" for mode, kind in cells])
    axis.set_ylabel("speed ÷ plain")
    axis.set_title(name, loc="left")
    axis.set_ylim(0, axis.get_ylim()[1] * 1.25)
    axis.legend(frameon=False, loc="upper left", ncols=len(SERIES), fontsize=8)


def _positions(axis: Any, records: list[dict[str, Any]]) -> None:
    """Accepted ÷ reached at each position of our longest draft, a line per kind and mode."""
    longest = max((_length(record["arm"]) for record in records if record["family"] == "ours"), default=0)
    arm = f"ours-{longest}"
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    for mode, kind in dict.fromkeys((record["mode"], record["kind"]) for record in records):
        group = [record for record in records if (record["mode"], record["kind"]) == (mode, kind)]
        drafts = drafting(group, arm)
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
    axis.legend(frameon=False, fontsize=7, ncols=2, loc="lower left")


def _length(arm: str) -> int:
    number = arm.rpartition("-")[2]
    return int(number) if number.isdigit() else 0
