"""``specdec benchmark``: answer an experiment's question on this machine, and keep the answer in the ledger."""

__all__ = ["benchmark"]

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

RESULTS, SCRATCH = Path("benchmarks/results"), Path("build/benchmarks")


def benchmark(
    path: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="A file of benchmarks/experiments.")],
    is_quick: Annotated[
        bool, typer.Option("--quick", help="2 prompts of each kind, 48 new tokens, batch 1; not for the ledger.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help=f"Folder of results; by default {RESULTS}, with --quick or --arms {SCRATCH}."),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(help="Only these, plain always: names or patterns, separated by commas, e.g. 'ours-*'."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only these cells: kind/mode/batch, or a pattern: 'code/*'. Repeatable.")
    ] = None,
    is_rerun: Annotated[bool, typer.Option("--rerun", help="Measure cells again that the ledger holds.")] = False,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES", min=0, help="Begin no cell that would end later than this, by the time of the last one."
        ),
    ] = None,
) -> None:
    """Measure plain, transformers' assisted and our decoding on the same prompts; resumes where it was stopped."""
    import time
    from fnmatch import fnmatchcase

    from rich.console import Console

    from hf_specdec.cli.runs import fail

    console = Console(stderr=True)
    ends_at = None if deadline is None else time.monotonic() + 60 * deadline

    def tell(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    try:
        from hf_specdec.benchmark.arms import arms_of
        from hf_specdec.benchmark.environment import device_name
        from hf_specdec.benchmark.experiment import read_experiment
        from hf_specdec.benchmark.ledger import Ledger
        from hf_specdec.benchmark.running import run_experiment

        experiment = read_experiment(path)
        experiment = experiment.quick() if is_quick else experiment
        patterns = [name.strip() for name in arms.split(",")] if arms else ["*"]
        chosen = [
            arm
            for arm in arms_of(experiment, tell)
            if arm.family == "plain" or any(fnmatchcase(arm.name, pattern) for pattern in patterns)
        ]
        cells = [cell for cell in experiment.cells() if not only or any(fnmatchcase(cell.key, p) for p in only)]
        if not cells:
            keys = ", ".join(cell.key for cell in experiment.cells())
            raise ValueError(f"No cell matches {', '.join(only or ())}. Available: {keys}.")
        # Part of a question is no answer to it: it must not replace one.
        folder = out or (SCRATCH if is_quick or arms else RESULTS)
        models = _load(experiment, console)
        ledger = Ledger.of(folder, device_name(models.target.device), experiment.name)
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise fail(error) from error
    run_experiment(
        experiment,
        chosen,
        models,
        ledger,
        chooses=cells.__contains__,
        is_rerun=is_rerun,
        ends_at=ends_at,
        tell=tell,
    )
    _show(ledger, [cell.key for cell in cells if cell.key in ledger.data["cells"]])
    print(ledger.path)


def _load(experiment: Any, console: Any) -> Any:
    """Target and draft of an experiment, in its dtype, on the device that the command line uses."""
    import tempfile
    import weakref

    from hf_specdec.benchmark.environment import model_facts
    from hf_specdec.benchmark.running import Models, encoder, offload_layers, randomise
    from hf_specdec.cli.models import resolve
    from hf_specdec.cli.runs import load

    sources = {role: resolve(getattr(experiment, role), console) for role in ("target", "draft")}
    common: dict[str, Any] = {"dtype": experiment.dtype, "device": None, "is_silent": not sys.stderr.isatty()}
    quantized = {"target": experiment.target_quantization, "draft": None}
    loaded = {
        role: load(source, **common, console=console, quantization=quantized[role]) for role, source in sources.items()
    }
    target, tokenizer = loaded["target"]
    if experiment.target_offload == "disk":
        folder = tempfile.TemporaryDirectory(prefix="specdec-offload-")
        weakref.finalize(target, folder.cleanup)
        offload_layers(target, folder.name)
    if experiment.has_random_draft:
        randomise(loaded["draft"][0])
    facts = {role: model_facts(loaded[role][0], source) for role, source in sources.items()}
    return Models(target, loaded["draft"][0], encoder(tokenizer, target.device), facts)


def _show(ledger: Any, keys: list[str]) -> None:
    """One line per cell and arm."""
    from rich.console import Console
    from rich.table import Table

    from hf_specdec.benchmark.summary import drafting, of_arm, speed, speedup

    table = Table(box=None, header_style="dim")
    for heading in ("cell", "arm", "tokens/s", "speed ÷ plain", "tokens per pass", "c"):
        table.add_column(heading, justify="left" if heading in ("cell", "arm") else "right")
    for key in keys:
        cell = ledger.data["cells"][key]
        records = [{**cell["cell"], **record} for record in cell["records"]]
        for arm in dict.fromkeys(record["arm"] for record in sorted(records, key=lambda record: record["arm"])):
            drafts = drafting(records, arm)
            cost = None if drafts is None else drafts.cost_coefficient
            table.add_row(
                key,
                arm,
                f"{speed(of_arm(records, arm)):.1f}",
                str(speedup(records, arm)),
                "" if drafts is None else f"{drafts.mean_acceptance_length:.2f}",
                "" if cost is None else f"{cost:.2f}",
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
