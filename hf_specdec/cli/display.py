"""Results as tables for people."""

__all__ = ["show_result"]

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_specdec.cli.runs import Result, Run, median_speed


def show_result(console: Console, result: Result) -> None:
    """Print speeds side by side, then what the report says about the drafts."""
    console.print(_speeds(result))
    if result.report is not None:
        console.print(_facts(result.report))
    console.print()


def _speeds(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for heading in ("tokens/s", "seconds", "tokens"):
        table.add_column(heading, justify="right")
    table.add_column("")
    if result.plain:
        table.add_row("plain", *_cells(result.plain), "")
    speedup = f"[bold]{result.speedup:.2f}x[/]" if result.speedup is not None else ""
    table.add_row("speculative", *_cells(result.speculative), speedup)
    return table


def _cells(runs: list[Run]) -> tuple[str, str, str]:
    middle = sorted(runs, key=lambda run: run.tokens_per_second)[len(runs) // 2]
    return f"{median_speed(runs):.1f}", f"{middle.seconds:.2f}", str(middle.num_tokens)


def _facts(report: Any) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    if report.reason is not None:
        table.add_row("plain, because", escape(report.reason))
    if report.steps:
        table.add_row(
            "mean acceptance length", f"{report.mean_acceptance_length:.2f} tokens per target pass (plain: 1.00)"
        )
        rates = "  ".join(f"{position}: {rate:.2f}" for position, rate in enumerate(report.acceptance_by_position, 1))
        table.add_row("acceptance by position", rates or "nothing was drafted")
        table.add_row(
            "acceptance rate", f"{report.acceptance_rate:.2f}   ({report.draft_utilization:.2f} of all drafted)"
        )
        parts = ("draft", "verify", "prefill", "other")
        seconds = "  ".join(f"{part} {getattr(report, part + '_seconds'):.2f}" for part in parts)
        table.add_row("seconds", seconds)
    if report.decision and report.reason is None:
        table.add_row("decision", escape(report.decision))
    for note in report.notes:
        table.add_row("note", escape(note))
    return table
