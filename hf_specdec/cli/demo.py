"""``specdec demo``: three prompts on a pair of real models, plain beside speculative."""

__all__ = ["PROMPTS", "demo"]

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer


class PairName(StrEnum):
    """The names of `models.PAIRS`, as the command line offers them."""

    SMOLLM2 = "smollm2"
    QWEN = "qwen2.5-coder"


@dataclass(frozen=True)
class Prompt:
    """One thing to ask, and the temperature that suits it."""

    title: str
    text: str
    temperature: float


PROMPTS = (
    Prompt("Chat", "Explain to a ten-year-old why the sky is blue, in one short paragraph.", 0.7),
    Prompt("Code", "Write a Python function that returns the n-th Fibonacci number, with a docstring.", 0.0),
    Prompt(
        "Editing",
        "Rename the variable `x` to `total` and return the whole function, nothing else:\n\n"
        "```python\ndef add_all(numbers):\n    x = 0\n    for number in numbers:\n        x = x + number\n"
        "    return x\n```",
        0.0,
    ),
)


def demo(
    pair: Annotated[
        PairName, typer.Option(help="smollm2: 93 MB, about a minute; qwen2.5-coder: 1.6 GB.")
    ] = PairName.SMOLLM2,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy; by default each prompt has its own.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens drafted in every step; by default chosen from measured costs.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is decoded each way.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Decode a chat, a code and an editing prompt, plainly and speculatively, and show both speeds."""
    from rich.console import Console
    from rich.markup import escape

    from hf_specdec.cli.display import show_result
    from hf_specdec.cli.models import PAIRS, resolve
    from hf_specdec.cli.runs import Settings, fail, load, measure

    progress, console = Console(file=sys.stderr, quiet=is_json), Console(quiet=is_json)
    chosen = PAIRS[pair.value]
    console.print(f"[bold]{chosen.target}[/] drafted by [bold]{chosen.draft}[/]\n{escape(chosen.note)}\n")
    try:
        import hf_specdec

        target, draft = resolve(chosen.target, progress), resolve(chosen.draft, progress)
        model, tokenizer = load(target, dtype="bfloat16", device=None, is_silent=is_json, console=progress)
        length = "auto" if num_speculative_tokens is None else num_speculative_tokens
        with progress.status(f"Loading {draft}"):
            handle = hf_specdec.enable(model, draft, num_speculative_tokens=length)
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise fail(error) from error
    results = {}
    with handle:
        for prompt in PROMPTS:
            settings = Settings(prompt.temperature if temperature is None else temperature, max_new_tokens, seed=seed)
            streamer = None
            if not is_json:
                from transformers import TextStreamer

                streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                console.rule(f"{prompt.title}, temperature {settings.temperature:g}", align="left")
                console.print(escape(prompt.text) + "\n", style="dim", highlight=False)
            result = measure(model, tokenizer, prompt.text, settings, streamer=streamer, num_rounds=rounds)
            results[prompt.title.lower()] = result.to_dict() | {"temperature": settings.temperature}
            console.print()
            if not is_json:
                show_result(console, result)
    if is_json:
        print(json.dumps({"target": chosen.target, "draft": chosen.draft, "prompts": results}, ensure_ascii=False))
