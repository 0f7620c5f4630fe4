"""A plan as tables for people, all amounts in GiB."""

__all__ = ["facts", "speeds", "table"]

from collections.abc import Iterator
from typing import Any

from hf_specdec.placement.machine import gib
from hf_specdec.placement.plan import DeviceUse, ModelUse, Plan


def table(plan: Plan) -> Any:
    """A rich table: a row per device."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("device")
    shown.add_column("target layers")
    for heading in ("weights", "KV cache", "passes", "draft", "headroom"):
        shown.add_column(heading, justify="right")
    for device in plan.devices:
        draft = gib(device.draft_weights + device.draft_cache) if device.draft_weights else ""
        name = f"{device.label} {device.name}".strip()
        left = gib(device.headroom) if device.fits else f"[bold red]{gib(device.headroom)}[/]"
        cells = (gib(amount) if amount else "" for amount in (device.weights, device.cache, device.passes))
        shown.add_row(f"{name}, {gib(device.memory)} GiB", _layers(device), *cells, draft, left)
    return shown


def _layers(device: DeviceUse) -> str:
    """Layers by runs, and the output head: ``28 (0-27), head``."""
    runs: list[list[int]] = []
    for layer in device.layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    listed = " ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    parts = [f"{len(device.layers)} ({listed})"] if runs else []
    return ", ".join([*parts, *(["head"] if device.has_head else [])])


def facts(plan: Plan) -> Iterator[str]:
    """What the table does not show: the models' totals, and the notes."""
    yield f"target {_model(plan.target)}"
    if plan.draft is not None:
        where = f"on {_label(plan.draft_device)}" if plan.draft_device is not None else "not placed"
        yield f"draft {_model(plan.draft)}, {where}"
    workload = plan.workload
    rows = "1 row" if workload.max_batch == 1 else f"{workload.max_batch} rows"
    yield f"room for {rows} of {workload.max_length} tokens, and verify passes of {workload.rows} rows"
    yield from plan.notes


def speeds(plan: Plan) -> Iterator[str]:
    """Bytes of a pass by device, and what they predict."""
    for device in plan.devices:
        if device.target_read or device.draft_read:
            draft = f", a draft token {gib(device.draft_read)} GiB" if device.draft_read else ""
            yield f"read on {device.label}: a target pass {gib(device.target_read)} GiB{draft}"
    guessed = " (bandwidths assumed: name a card or give --bandwidth)" if plan.is_speed_assumed else ""
    yield f"predicted plain: {plan.plain_tokens_per_second:.3g} tokens/s{guessed}"
    if plan.speculative_tokens_per_second is not None:
        at = f" at K = {plan.draft_length}" if plan.draft_length else " at most, so nothing would be drafted"
        yield (
            f"predicted speculative: {plan.speculative_tokens_per_second:.3g} tokens/s{at}, if "
            f"{plan.workload.acceptance_rate:.0%} of the drafted tokens are kept"
        )


def _model(use: ModelUse) -> str:
    quantized = f"{use.quantization} and {use.dtype}" if use.quantization else use.dtype
    constants = f" + {gib(use.constants)} GiB of constants" if use.constants else ""
    return f"{use.name}: {quantized}, {gib(use.weights)} GiB{constants}, KV cache up to {gib(use.cache)} GiB"


def _label(key: Any) -> str:
    return f"cuda:{key}" if isinstance(key, int) else str(key)
