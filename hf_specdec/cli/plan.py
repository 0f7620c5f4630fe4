"""``specdec plan``: does it fit, where does it go, and how fast should it be? From configs alone."""

__all__ = ["plan"]

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_specdec.placement.machine import Machine

ERROR_STATUS = 2


def plan(
    target: Annotated[str, typer.Argument(help="Hub id or folder of the model that verifies.")],
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Of the target: nf4, fp4 or int8.")] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="Memory of a GPU (24GiB), or a card's name (RTX 4090); once per GPU. By default what is here."
        ),
    ] = None,
    cpu: Annotated[str | None, typer.Option(help="Memory of the CPU that may be used.")] = None,
    disk: Annotated[str | None, typer.Option(help="Room on a disk for what fits nowhere else.")] = None,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens of a row, prompt included.")] = 8192,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows of a call.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, bfloat16, float16, float32.")] = "auto",
    draft_dtype: Annotated[str, typer.Option(help="Of the draft; float16 is bfloat16 without a GPU.")] = "float16",
    draft_quantization: Annotated[str | None, typer.Option(help="Of the draft: nf4, fp4 or int8.")] = None,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            help="1008GB/s (of every GPU; of the CPU where there is none), or of one place: 0=936GB/s, cpu=40GB/s, "
            "disk=3GB/s, link=25GB/s (CPU to GPU)."
        ),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of drafted tokens that is assumed to be kept.")
    ] = 0.7,
    draft_length: Annotated[int, typer.Option(min=1, help="K that verify passes have room for.")] = 16,
    headroom: Annotated[
        float | None, typer.Option(min=0.0, max=0.9, help="Share of each device that stays free.")
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Plan from configs: exit status 0 if it fits, 1 if not, 2 for what cannot be planned."""
    from rich.console import Console

    from hf_specdec.cli.models import resolve
    from hf_specdec.cli.runs import fail

    progress = Console(file=sys.stderr, quiet=is_json)
    try:
        machine = _machine(gpu, cpu, disk, bandwidth, headroom)
        from hf_specdec.pair import plan_pair
        from hf_specdec.placement.sizes import Workload

        made = plan_pair(
            resolve(target, progress),
            None if draft is None else resolve(draft, progress),
            machine=machine,
            workload=Workload(max_batch, max_length, draft_length, acceptance),
            quantization=quantization,
            dtype=dtype,
            draft_dtype=draft_dtype,
            draft_quantization=draft_quantization,
        )
    except Exception as error:  # a config that nobody foresaw included
        fail(_in_one_line(error))
        raise typer.Exit(ERROR_STATUS) from error
    if is_json:
        print(json.dumps({"target": target, "draft": draft, "plan": made.to_dict()}, ensure_ascii=False))
    else:
        _show(Console(width=None if sys.stdout.isatty() else 120), made)
    raise typer.Exit(0 if made.fits else 1)


def _in_one_line(error: Exception) -> Exception:
    """`error` where its message says what to do; else its kind and the first line of it."""
    message = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    is_ours = isinstance(error, (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError))
    if is_ours and " " in message and "\n" not in message:
        return error
    return ValueError(f"This cannot be planned: {type(error).__name__}: {message.partition(chr(10))[0][:250]}")


def _machine(
    gpus: list[str] | None,
    cpu: str | None,
    disk: str | None,
    bandwidths: list[str] | None,
    headroom: float | None,
) -> "Machine":
    """The devices that were named; what is here where none was."""
    from hf_specdec.placement.machine import make_machine, read_bytes

    if not gpus and cpu is None:
        from hf_specdec.host.placement import find_machine

        here = find_machine(headroom=headroom).devices
        memory: dict[Any, int] = {device.key: device.memory_bytes for device in here}
        names = {device.key: device.name for device in here}
    else:
        memory, names = {}, {}
        for index, text in enumerate(gpus or ()):
            memory[index], names[index] = _gpu(text)
        if cpu is not None:
            memory["cpu"] = read_bytes(cpu)
    if disk is not None:
        memory["disk"] = read_bytes(disk)
    rates = _rates(bandwidths or [], memory)
    return make_machine(memory, names, rates, headroom)


def _gpu(text: str) -> tuple[int, str]:
    """(bytes, name) of a GPU given by its memory or by a card's name."""
    from hf_specdec.placement.cards import CARDS, find_card
    from hf_specdec.placement.machine import GIB, read_bytes

    card = find_card(text)
    try:
        amount = read_bytes(text)
    except ValueError:
        if card is None:
            listing = ", ".join(card.name for card in CARDS)
            raise ValueError(f"{text!r} is neither an amount of memory (24GiB) nor a known card: {listing}.") from None
        return int(card.gib * GIB), card.name
    if card is not None and text.strip().isdigit():  # "4090" is no number of bytes
        return int(card.gib * GIB), card.name
    return amount, ""


def _rates(texts: list[str], memory: dict[Any, int]) -> dict[str, float]:
    from hf_specdec.placement.machine import read_rate

    places = [*map(str, memory), "gpu", "link"]
    rates: dict[str, float] = {}
    for text in texts:
        place, equals, rate = text.partition("=")
        if not equals:
            place, rate = ("gpu" if 0 in memory else "cpu"), text
        if place not in places:
            raise ValueError(
                f"--bandwidth names {place!r}, which is no device of this plan. Available: {', '.join(places)}."
            )
        rates[place] = read_rate(rate)
    return rates


def _show(console: Any, made: Any) -> None:
    from rich.markup import escape

    from hf_specdec.placement.table import facts, speeds, table

    console.print(table(made))
    console.print()
    for line in facts(made):
        console.print(f"[dim]{escape(line)}[/]")
    if made.fits:
        for line in speeds(made):
            console.print(escape(line), highlight=False)
        console.print("[bold]It fits.[/]")
        return
    console.print(f"[bold red]It does not fit.[/] {escape(made.shortage)}", highlight=False)
    for change in made.changes:
        console.print(f"would fit: {escape(change)}", highlight=False)
    if not made.changes:
        console.print("No single change would make it fit: take a smaller model.")
