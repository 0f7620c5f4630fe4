"""Pictures of a ledger: speed and acceptance, what was predicted and where the time went, and sweeps.

Up to three figures per device, a row per experiment: ``<device>.svg`` (speedup by kind of text and drafter, acceptance
by position), ``<device>-steps.svg`` (predicted against measured, seconds per token by part) and ``<device>-sweeps.svg``
(speedup and acceptance against temperature or batch size), each where a ledger has something to show. A figure carries
the digest of the results that it was drawn from, so that a stale one is noticed without drawing it again. Needs
matplotlib (the extra ``report``). What is drawn inside the axes is `panels`' to know.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_specdec.benchmark import panels
from hf_specdec.benchmark.ledger import Ledger

__all__ = ["digest_in", "draw", "results_digest"]

NAMES = ("", "-steps", "-sweeps")
Panel = Callable[[Any, str, list[dict[str, Any]]], None]


def results_digest(ledgers: Mapping[str, Ledger]) -> str:
    """Fingerprint of the results of one device."""
    texts = [ledger.path.read_bytes() for _, ledger in sorted(ledgers.items())]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def digest_in(figure: Path) -> str | None:
    """The digest of the results that `figure` was drawn from, None if there is no such figure."""
    found = re.search(r"results ([0-9a-f]{16})", figure.read_text(encoding="utf-8")) if figure.is_file() else None
    return found[1] if found else None


def draw(device: str, ledgers: Mapping[str, Ledger], folder: Path) -> list[Path]:
    """Draw the figures of one device into `folder` as SVG; the same results give the same files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("svg")
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'hf_specdec[report]'.") from error
    options: dict[Any, Any] = {
        "svg.hashsalt": device,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    records = {name: ledger.records() for name, ledger in ledgers.items()}
    sweeps = {name: found for name, found in records.items() if panels.swept(found)}
    others = {name: panels.one_row(found) for name, found in records.items() if name not in sweeps}
    plans: tuple[tuple[dict[str, list[dict[str, Any]]], tuple[Panel, Panel]], ...] = (
        (others or sweeps, (panels.speedups, panels.positions)),
        (others, (panels.predicted, panels.parts)),
        (sweeps, (panels.sweep_speed, panels.sweep_acceptance)),
    )
    description = f"drawn from results {results_digest(ledgers)}"
    drawn = []
    with matplotlib.rc_context(options):
        for name, (rows, both) in zip(NAMES, plans, strict=True):
            path = folder / f"{device}{name}.svg"
            path.unlink(missing_ok=True)
            if rows:
                _figure(path, device, rows, both, description)
                drawn.append(path)
    return drawn


def _figure(
    path: Path, device: str, rows: Mapping[str, list[dict[str, Any]]], both: tuple[Panel, Panel], description: str
) -> None:
    from matplotlib import pyplot

    size = (9.5, 3.1 * len(rows))
    figure, axes = pyplot.subplots(len(rows), 2, figsize=size, squeeze=False, width_ratios=(3, 2))
    for row, (name, records) in zip(axes, rows.items(), strict=True):
        for axis, panel in zip(row, both, strict=True):
            panel(axis, name, records)
    figure.suptitle(device)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Description": description})
    pyplot.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
