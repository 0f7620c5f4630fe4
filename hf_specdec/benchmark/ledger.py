"""The ledger: one JSON file per device and experiment, one record per line, written cell by cell.

``<results>/<device>/<experiment>.json`` holds the question, and for each cell its digest, where it was taken and the
raw records. A rerun replaces a cell; nothing is edited by hand. Numbers are derived in `summary`, never stored.
"""

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Ledger", "read_results"]


class Ledger:
    """The results file at `path`, read if it is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"experiment": {}, "cells": {}}
        if path.is_file():
            self.data = json.loads(path.read_text(encoding="utf-8"))

    @classmethod
    def of(cls, results: Path, device: str, experiment: str) -> "Ledger":
        """The ledger of one experiment on one kind of device."""
        return cls(results / device / f"{experiment}.json")

    def holds(self, key: str, digest: str) -> bool:
        """Whether the cell `key` is there, measured for the question with this digest."""
        return self.data["cells"].get(key, {}).get("digest") == digest

    def put(self, experiment: dict[str, Any], key: str, cell: dict[str, Any]) -> None:
        """Replace the cell `key` and write the file; a reader never sees half a file."""
        self.data["experiment"] = experiment
        self.data["cells"][key] = cell
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(_text(self.data), encoding="utf-8")
        os.replace(scratch, self.path)

    def records(self) -> list[dict[str, Any]]:
        """The records of all cells, each with its cell's kind, mode and batch."""
        return [{**cell["cell"], **record} for cell in self.data["cells"].values() for record in cell["records"]]


def read_results(results: Path) -> dict[str, dict[str, Ledger]]:
    """All ledgers below `results`, by device and experiment, in the order of their names."""
    ledgers: dict[str, dict[str, Ledger]] = {}
    for path in sorted(results.glob("*/*/**/*.json")):
        device, *name = path.relative_to(results).with_suffix("").parts
        ledgers.setdefault(device, {})["/".join(name)] = Ledger(path)
    return ledgers


def _text(data: dict[str, Any]) -> str:
    """JSON with one record per line, so that a rerun reads as a diff."""
    cells = []
    for key, cell in data["cells"].items():
        head = {name: value for name, value in cell.items() if name != "records"}
        lines = ",\n".join("  " + json.dumps(record) for record in cell["records"])
        cells.append(f' {json.dumps(key)}: {json.dumps(head)[:-1]}, "records": [\n{lines}\n ]}}')
    return f'{{"experiment": {json.dumps(data["experiment"])},\n"cells": {{\n' + ",\n".join(cells) + "\n}}\n"
