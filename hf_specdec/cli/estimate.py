"""``specdec estimate``: will it help on this pair and this machine? Costs, acceptance, and the speed of every K."""

__all__ = ["PROMPTS", "estimate"]

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

PROMPTS = {
    "code": (
        "Write a Python function that merges overlapping intervals, with type hints and a docstring.",
        "Write a small Python class for a bank account with deposit, withdraw and a list of its transactions.",
    ),
    "copy": (
        "Rename `n` to `count` in this function and return the whole function.\n\n"
        "def average(values):\n    total = 0.0\n    n = 0\n    for value in values:\n        total += value\n"
        "        n += 1\n    if n == 0:\n        raise ValueError('no values')\n    return total / n\n",
        "Correct the spelling of this notice and change nothing else.\n\n"
        "The libary will be closed on Monday and Tuseday, because the heating is repaired. Books that are due on these "
        "days may be returned untill Friday. The reading room on the second floor stays open. We appologise for the "
        "trouble.\n",
    ),
    "prose": (
        "Describe a harbour town early in the morning, as the opening of a short story.",
        "Explain to a curious child why the moon seems to change its shape.",
    ),
}
"""By kind of text, since they draft differently: writing a program, returning much of the prompt, open writing."""


def estimate(
    target: Annotated[str, typer.Option(help="Hub id or folder of the model that verifies.")],
    draft: Annotated[
        str | None, typer.Option(help="Hub id or folder of the draft; none estimates look-ups only.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A text file, one prompt per line, or TOML as benchmarks/prompts.toml; by default six."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Spent on measuring at most, loading apart.")] = 60.0,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a call.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    method: Annotated[str, typer.Option(help="The drafter; auto is the draft, without one ngram.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=16, help="Of each text.")] = 64,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted speed against K into this SVG file.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, bfloat16, float16, float32.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Of the target; by default CUDA where there is one.")] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure for up to a minute, then say whether drafting pays, where, and with how many tokens."""
    from rich.console import Console

    from hf_specdec.cli.models import resolve
    from hf_specdec.cli.runs import Settings, fail, load

    progress = Console(file=sys.stderr, quiet=is_json)
    try:
        texts = _read(prompts)
        if plot is not None:
            _pyplot()  # what is missing is said before anything is loaded
        model, tokenizer = load(
            resolve(target, progress), dtype=dtype, device=device, is_silent=is_json, console=progress
        )
        from hf_specdec.benchmark.running import encoder
        from hf_specdec.estimate import run_estimate

        encode = encoder(tokenizer, model.device)
        ids = {kind: [encode([text])["input_ids"][0] for text in several] for kind, several in texts.items()}
        options = {name: value for name, value in Settings(temperature).keywords().items() if name != "max_new_tokens"}
        with progress.status("Loading the draft") as status:
            result = run_estimate(
                model,
                None if draft is None else resolve(draft, progress),
                ids,
                budget_seconds=seconds,
                batch=batch,
                max_new_tokens=max_new_tokens,
                options=options,
                seed=seed,
                progress=lambda step: status.update(f"Estimating: {step}"),
                method=method,
            )
        if plot is not None:
            _draw(result, plot)
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise fail(error) from error
    if is_json:
        print(json.dumps({"target": target, "draft": draft, **result.to_dict()}, ensure_ascii=False))
    else:
        _show(Console(width=None if sys.stdout.isatty() else 120), result)


# --- prompts --------------------------------------------------------------------------------------------------------


def _read(path: Path | None) -> dict[str, list[str]]:
    """Prompts by kind; those of a text file are one kind, named after the file."""
    if path is None:
        return {kind: list(texts) for kind, texts in PROMPTS.items()}
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        kinds = _from_toml(path.name, text)
    else:
        kinds = {path.stem: [line.strip() for line in text.splitlines() if line.strip()]}
    if not any(kinds.values()):
        raise ValueError(f"{path} holds no prompts. Write one per line, or [[prompt]] tables with kind and text.")
    return kinds


def _from_toml(name: str, text: str) -> dict[str, list[str]]:
    import tomllib

    entries, kinds = tomllib.loads(text).get("prompt", []), dict[str, list[str]]()
    if not isinstance(entries, list):
        raise ValueError(f"{name} must hold [[prompt]] tables, got one [prompt]. Double its brackets.")
    for number, entry in enumerate(entries, 1):
        found = {key: str(entry.get(key, "")).strip() for key in ("kind", "text")}
        for key, value in found.items():
            if not value:
                raise ValueError(
                    f"Prompt {number} in {name} must say {key}. Expected kind and text, got {list(entry)}."
                )
        kinds.setdefault(found["kind"], []).append(found["text"])
    return kinds


# --- showing --------------------------------------------------------------------------------------------------------


def _show(console: Any, result: Any) -> None:
    from rich.markup import escape

    drafting = [kind for kind in result.kinds if kind.draft is not None]
    replayed = [kind for kind in result.kinds if kind.draft is None and kind.lookup.rows]
    shown = [(kind.kind, kind.asked) for kind in drafting or replayed]
    if shown:
        console.print(_speeds(shown))
        console.print()
        console.print(_acceptance(result.kinds))
        console.print()
    for fact in _costs(result.costs, result.setting["batch"]):
        console.print(f"[dim]cost[/]  {fact}")
    for text in result.not_measured:
        console.print(f"[dim]not measured[/]  {escape(text)}")
    for note in result.notes:
        console.print(f"[dim]note[/]  {escape(note)}")
    if shown:
        chosen = ", ".join(f"K = {each.auto_length} on {escape(kind)}" for kind, each in shown)
        console.print(f'[dim]"auto" settles at[/]  {chosen}')
    console.print(f"[bold]{escape(result.verdict)}[/]")
    setting = result.setting
    console.print(f"[dim]{setting['dtype']} on {setting['device']}, {result.seconds:.0f} s of measuring[/]")


def _speeds(shown: list[tuple[str, Any]]) -> Any:
    """A row per K; the fastest K of each kind is bold. Seconds of a step stand once where all kinds have the same."""
    from rich.markup import escape
    from rich.table import Table

    seconds = [[row.step_seconds for row in each.rows] for _, each in shown]
    is_shared = all(each == seconds[0] for each in seconds)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("\nK", "\ns per step") if is_shared else ("\nK",):
        table.add_column(heading, justify="right")
    for kind, _ in shown:
        own = () if is_shared else ("\ns per step",)
        for heading in (f"{escape(kind)}\ntokens per pass", *own, "\ntokens/s", "\n÷ plain"):
            table.add_column(heading, justify="right")
    for rows in zip(*(each.rows for _, each in shown), strict=True):
        cells = [str(rows[0].draft_length), *([f"{rows[0].step_seconds:.4f}"] if is_shared else [])]
        for row, (_, each) in zip(rows, shown, strict=True):
            ratio = f"{row.speedup:.2f}x"
            cells.append(f"{row.expected_tokens:.2f}")
            cells += [] if is_shared else [f"{row.step_seconds:.4f}"]
            cells.append(f"{row.tokens_per_second:.1f}")
            cells.append(f"[bold]{ratio}[/]" if row == each.best else ratio)
        table.add_row(*cells)
    return table


def _acceptance(kinds: list[Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("text", "drafter", "steps with a draft", "kept", "by position", "best"):
        table.add_column(heading, justify="right" if heading in ("steps with a draft", "kept") else "left")
    for kind in kinds:
        for name, each in (("draft", kind.draft), ("look-up", kind.lookup)):
            if each is None:
                continue
            best = f"{each.best.speedup:.2f}x at K = {each.best.draft_length}" if each.rows else ""
            rates = " ".join(f"{rate:.2f}" for rate in each.acceptance_by_position[:8])
            table.add_row(
                escape(kind.kind), name, f"{each.share_drafting:.0%}", f"{each.acceptance_rate:.0%}", rates, best
            )
    return table


def _costs(costs: dict[str, Any], batch: int) -> list[str]:
    if not costs:
        return []
    passes = ", ".join(f"{rows}: {seconds:.4f}" for rows, seconds in costs["pass_seconds_by_rows"].items())
    facts = [f"a target pass by rows, in seconds: {passes}"]
    if costs["draft_token_seconds"] is not None:
        rows = "one row" if batch == 1 else f"{batch} rows"
        share = f"{costs['cost_coefficient']:.2f} of a target pass over {rows}"
        facts.append(f"a draft token {costs['draft_token_seconds']:.4f} s, {share}")
    prefill = f"{costs['prefill_tokens']} prompt tokens: target {costs['target_prefill_seconds']:.3f} s"
    if costs["draft_prefill_seconds"] is not None:
        prefill += f", draft {costs['draft_prefill_seconds']:.3f} s; once per call, not in the table"
    return [*facts, prefill]


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'hf_specdec[report]'.") from error
    return pyplot


def _draw(result: Any, path: Path) -> None:
    """Predicted speed ÷ plain against K: a line per kind, look-ups dashed, best K marked."""
    pyplot = _pyplot()
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
        for number, kind in enumerate(result.kinds):
            for name, each, style in (("draft", kind.draft, "-"), ("look-up", kind.lookup, "--")):
                if each is None or not each.rows:
                    continue
                lengths, speeds = zip(*[(row.draft_length, row.speedup) for row in each.rows], strict=True)
                axis.plot(lengths, speeds, style, color=f"C{number}", label=f"{kind.kind}, {name}")
                axis.plot(each.best.draft_length, each.best.speedup, "o", color=f"C{number}", markersize=4)
        axis.axhline(1.0, color="#333333", linewidth=0.8)
        axis.set_xlabel("tokens drafted per step (K)")
        axis.set_ylabel("predicted speed ÷ plain")
        axis.set_ylim(bottom=0)
        if result.kinds:
            axis.legend(frameon=False, fontsize=8)
        figure.tight_layout()
        figure.savefig(path, format="svg")
        pyplot.close(figure)
