"""``specdec generate``: one prompt, one target, one draft."""

__all__ = ["generate"]

import json
import sys
from typing import Annotated

import typer


def generate(
    target: Annotated[str, typer.Option(help="Hub id or folder of the model that verifies.")],
    draft: Annotated[str, typer.Option(help="Hub id or folder of the small model that drafts.")],
    prompt: Annotated[str, typer.Option(help="The prompt; '-' reads it from standard input.")],
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens drafted in every step; by default chosen from measured costs.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Put the prompt into the chat template; by default if there is one."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode plainly, in turn, and show both speeds.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often --compare runs each.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, bfloat16, float16, float32.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Of the target; by default CUDA where there is one.")] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Stream a completion, then show how the drafting went."""
    from rich.console import Console

    from hf_specdec.cli.display import show_result
    from hf_specdec.cli.models import resolve
    from hf_specdec.cli.runs import Settings, fail, load, measure

    progress = Console(file=sys.stderr, quiet=is_json)
    settings = Settings(temperature, max_new_tokens, chat, seed)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    try:
        import hf_specdec

        model, tokenizer = load(
            resolve(target, progress), dtype=dtype, device=device, is_silent=is_json, console=progress
        )
        config = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
        with progress.status(f"Loading {draft}"):
            handle = hf_specdec.enable(model, resolve(draft, progress), **config)
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise fail(error) from error
    with handle:
        streamer = None
        if not is_json:
            from transformers import TextStreamer

            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        result = measure(model, tokenizer, prompt, settings, streamer=streamer, num_rounds=rounds if compare else 0)
    if is_json:
        print(json.dumps({"target": target, "draft": draft, **result.to_dict()}, ensure_ascii=False))
    else:
        print()
        show_result(Console(), result)
