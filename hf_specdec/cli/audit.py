"""``specdec audit``: is it lossless on this pair and these prompts? With a wrong rule that has to be caught."""

__all__ = ["PROMPTS", "audit"]

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

PROMPTS = (
    "The three most important things to know about the history of Rome are",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "Dear Ms. Miller,\n\nthank you for your letter of the",
    "Q: Why is the sky blue?\nA:",
)


def audit(
    target: Annotated[str, typer.Option(help="Hub id or folder of the model that verifies.")],
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft; none for some methods.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file, one prompt per line; by default four.")] = None,
    method: Annotated[str, typer.Option(help="The drafter.")] = "draft_model",
    rejection_sample_method: Annotated[str, typer.Option(help="The rule: block or standard.")] = "block",
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="Tokens drafted in every step.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of each greedy text.")] = 64,
    samples: Annotated[
        int, typer.Option(min=16, help="Texts sampled for the law; the better the draft, the more it takes.")
    ] = 512,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of sampled texts.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, bfloat16, float16, float32.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Of the target; by default CUDA where there is one.")] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check losslessness on a pair: greedy text, sampled law with a negative control, probes. Exit status 1 if not."""
    from rich.console import Console

    from hf_specdec.cli.models import resolve
    from hf_specdec.cli.runs import fail, load

    progress = Console(file=sys.stderr, quiet=is_json)
    try:
        texts = _read(prompts)
        model, tokenizer = load(
            resolve(target, progress), dtype=dtype, device=device, is_silent=is_json, console=progress
        )
        from hf_specdec.audit import run_audit

        ids = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
        with progress.status("Auditing") as status:
            result = run_audit(
                model,
                None if draft is None else resolve(draft, progress),
                ids,
                max_new_tokens=max_new_tokens,
                num_samples=samples,
                temperature=temperature,
                seed=seed,
                progress=lambda step: status.update(f"Auditing: {step}"),
                method=method,
                rejection_sample_method=rejection_sample_method,
                num_speculative_tokens=num_speculative_tokens,
            )
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise fail(error) from error
    if is_json:
        print(json.dumps({"target": target, "draft": draft, **result.to_dict()}, ensure_ascii=False))
    else:
        _show(Console(), result, tokenizer)
    raise typer.Exit(0 if result.is_passed else 1)


def _read(path: Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"{path} holds no prompts. Write one per line.")
    return texts


def _show(console: Any, result: Any, tokenizer: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("check", "", "measured"):
        table.add_column(heading)
    for check in result.checks:
        table.add_row(check.name, "[green]ok[/]" if check.is_passed else "[bold red]FAILED[/]", escape(check.summary))
    console.print(table)
    if result.divergences:
        console.print(_divergences(result.divergences, tokenizer))
    for note in result.notes:
        console.print(f"[dim]note[/] {escape(note)}")
    verdict = "[green]Lossless as far as this audit can see[/]" if result.is_passed else "[bold red]Not passed[/]"
    setting = result.setting
    console.print(
        f"{verdict}: {setting['dtype']} on {setting['device']}, seed {setting['seed']}, {result.seconds:.0f} s"
    )


def _divergences(divergences: list, tokenizer: Any) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Where greedy texts part from plain's", title_justify="left", box=None, header_style="dim")
    for heading in ("batch", "row", "position", "plain", "logit", "speculative", "logit", "margin", "bound", ""):
        table.add_column(heading, justify="left" if heading in ("plain", "speculative", "") else "right")
    for each in divergences[:20]:
        words = [escape(repr(tokenizer.decode([i]))) if i >= 0 else "end" for i in (each.plain_id, each.speculative_id)]
        table.add_row(
            str(each.batch),
            str(each.row),
            str(each.position),
            words[0],
            f"{each.plain_logit:.4g}",
            words[1],
            f"{each.speculative_logit:.4g}",
            f"{each.margin:.3g}",
            f"{each.bound:.3g}",
            "near-tie" if each.is_near_tie else "[bold red]beyond rounding[/]",
        )
    return table
