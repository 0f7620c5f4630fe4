"""``specdec serve``: transformers' server, with a draft."""

__all__ = ["PASSES_ARGUMENTS", "serve"]

import sys
from typing import Annotated, Any

import typer

#: settings of the command: what it does not know is for `transformers serve`
PASSES_ARGUMENTS = {"ignore_unknown_options": True}


def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="What `transformers serve` takes.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Hub id or folder of the draft; by default what the checkpoint's generation_config names."),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens drafted in every step; 4 by default.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How drafts are made, e.g. 'base' for a model with adapters.")
    ] = None,
) -> None:
    """Run `transformers serve` speculatively: [MODEL] and all its options, plus those below.

    Requests are OpenAI's; "speculative_config" in one may be false, true or the number of tokens to draft. What the
    last request on each model did: GET /specdec/report. The server's own options: transformers serve --help.
    """
    from rich.console import Console

    from hf_specdec.cli.models import resolve
    from hf_specdec.cli.runs import fail

    given = {"num_speculative_tokens": num_speculative_tokens, "method": method}
    config: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        from hf_specdec.serve import serve as run

        source = None if draft is None else resolve(draft, Console(file=sys.stderr))
        run(arguments or [], source, **config)
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise fail(error) from error
