"""``specdec export vllm``: the same pair under vLLM, as one command."""

__all__ = ["app"]

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="The same pair in another engine.", no_args_is_help=True)


@app.callback()
def export() -> None:
    """The same pair in another engine."""


@app.command()
def vllm(
    target: Annotated[str, typer.Option(help="Hub id or folder of the model that verifies.")],
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft; none looks up in the text.")] = None,
    flag: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            help="The flag as JSON; the other options win. By default what the target's folder has saved.",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="draft_model, ngram or suffix.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to draft per step.")] = None,
    estimate: Annotated[
        Path | None, typer.Option(help="Output of specdec estimate --json: decides the draft length.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Output of specdec plan --json: GPUs, context length, rows, quantization.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="Of the target: nf4.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of the target.")] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print arguments, configuration and notes as JSON.")] = False,
) -> None:
    """Print the exact vllm serve command; what differs there goes to standard error."""
    from hf_specdec.cli.runs import fail, rich_escape
    from hf_specdec.config_keys import USED_KEYS, validated
    from hf_specdec.export import PASSED, export_vllm

    try:
        given: dict[str, Any] = _saved(target) if flag is None else _parsed(flag, "--speculative-config")
        options = {"model": draft, "method": method, "num_speculative_tokens": num_speculative_tokens}
        given |= {key: value for key, value in options.items() if value is not None}
        own = {key: value for key, value in given.items() if key in USED_KEYS or key not in PASSED}
        result = export_vllm(
            target,
            {**validated(own), **{key: value for key, value in given.items() if key not in own}},
            quantization=quantization,
            revision=revision,
            estimate=None if estimate is None else _parsed(estimate.read_text(encoding="utf-8"), str(estimate)),
            plan=None if plan is None else _parsed(plan.read_text(encoding="utf-8"), str(plan)),
            num_heads=_num_heads(target),
        )
    except (OSError, TypeError, ValueError) as error:
        raise fail(error) from error
    if is_json:
        data = {"arguments": result.arguments, "speculative_config": result.speculative_config, "notes": result.notes}
        print(json.dumps(data, ensure_ascii=False))
        return
    from rich.console import Console

    for note in result.notes:
        Console(stderr=True).print(f"[dim]note[/]  {rich_escape(note)}", highlight=False)
    print(result.command, file=sys.stdout)


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ValueError(f"{name} must hold one JSON object, got {type(data).__name__}.")
    return data


def _saved(target: str) -> dict[str, Any]:
    """The flag that was saved with the target, if its folder is here."""
    path = Path(target).expanduser() / "generation_config.json"
    if not path.is_file():
        return {}
    flag = _parsed(path.read_text(encoding="utf-8"), str(path)).get("speculative_config")
    return dict(flag) if isinstance(flag, dict) else {}


def _num_heads(target: str) -> int | None:
    """Attention heads, where the target's folder is here."""
    path = Path(target).expanduser() / "config.json"
    if not path.is_file():
        return None
    config = _parsed(path.read_text(encoding="utf-8"), str(path))
    heads = (config.get("text_config") or config).get("num_attention_heads")
    return heads if isinstance(heads, int) else None
