"""The command line, ``specdec``: one file per command.

Importing it is quick: torch and transformers are imported inside the commands.
"""

__all__ = ["app"]

import typer

from hf_specdec.cli.audit import audit
from hf_specdec.cli.benchmark import benchmark
from hf_specdec.cli.demo import demo
from hf_specdec.cli.estimate import estimate
from hf_specdec.cli.export import app as export
from hf_specdec.cli.generate import generate
from hf_specdec.cli.plan import plan
from hf_specdec.cli.report import report
from hf_specdec.cli.serve import PASSES_ARGUMENTS, serve

app = typer.Typer(
    name="specdec",
    help="Lossless speculative sampling inside transformers' generate().",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(generate)
app.command()(demo)
app.command()(estimate)
app.command()(plan)
app.command()(benchmark)
app.add_typer(export, name="export")
app.command()(report)
app.command()(audit)
app.command(context_settings=PASSES_ARGUMENTS)(serve)
