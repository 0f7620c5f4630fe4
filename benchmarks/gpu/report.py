"""The tables at the end: what ran, which checks failed, and predicted beside measured."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.gpu.run import StageRecord, Value

__all__ = ["show", "significant"]


def show(console: Console, records: Sequence[StageRecord], has_predictions: bool) -> None:
    """Print everything worth reading of `records`."""
    console.print(_stages(records))
    console.print(_values(records))
    if not has_predictions:
        console.print("Predictions are for an H200 at full size; none are shown here.", style="dim")
    for record in records:
        for note in record.notes:
            console.print(f"stage {record.number}: {escape(note)}", style="dim")
    failed = [(record, check) for record in records for check in record.checks if not check.is_passed]
    for record, check in failed:
        console.print(f"[red]FAILED[/] stage {record.number}, {escape(check.name)}: {escape(check.detail)}")
    num_checks = sum(len(record.checks) for record in records)
    if num_checks:
        console.print(f"{num_checks - len(failed)} of {num_checks} correctness checks passed.")
    else:
        console.print("[yellow]No correctness check ran.[/]")


def _stages(records: Iterable[StageRecord]) -> Table:
    table = _table("stage", "", "status", "seconds", "checks")
    for record in records:
        passed = sum(check.is_passed for check in record.checks)
        checks = f"{passed} of {len(record.checks)}" if record.checks else ""
        status = record.status + (f": {record.reason}" if record.reason else "")
        table.add_row(str(record.number), record.title, escape(status), f"{record.seconds:.1f}", checks)
    return table


def _values(records: Iterable[StageRecord]) -> Table:
    table = _table("stage", "", "predicted", "measured", "n", "")
    for record in records:
        for value in record.values:
            if value.is_shown:
                table.add_row(str(record.number), escape(value.name), *_cells(value))
    return table


def _cells(value: Value) -> tuple[str, str, str, str]:
    num, unit = str(len(value.raw)) if value.raw else "", f" {value.unit}" if value.unit else ""
    measured = f"{significant(value.value)}{unit}"
    if value.predicted is None:
        return "–", measured, num, ""
    low, high = significant(value.predicted.low), significant(value.predicted.high)
    expected = f"{significant(value.predicted.value)} ({low}–{high})"
    return expected, measured, num, "" if value.predicted.holds(value.value) else "[yellow]outside[/]"


def significant(value: float) -> str:
    """Three significant digits, without an exponent where it can be read."""
    if value == 0 or not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("predicted", "measured", "seconds", "n") else "left")
    return table
