"""``specdec report``: draw the ledger's figures."""

__all__ = ["report"]

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Option(help="Folder of the ledger.")] = Path("benchmarks/results"),
    figures: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("docs/figures"),
) -> None:
    """Draw the figures of each device: speedups and acceptance, predictions and seconds by part, and sweeps."""
    from hf_specdec.benchmark.figures import draw
    from hf_specdec.benchmark.ledger import read_results
    from hf_specdec.cli.runs import fail

    ledgers = read_results(results)
    if not ledgers:
        raise fail(ValueError(f"{results} holds no results yet. Run specdec benchmark first."))
    try:
        for device, by_name in ledgers.items():
            print(*draw(device, by_name, figures), sep="\n")
    except ImportError as error:
        raise fail(error) from error
