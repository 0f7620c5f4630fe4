"""Stage 10: attention of a verify pass over a long cache, three ways.

    repeat    keys and values copied for every query head of their group, then sdpa with a mask: what transformers does
    packed    the group's queries stacked as rows of one head, so that nothing is copied; the same numbers
    varlen    torch's variable-length attention, which reads a row's own length only (where this torch has it)

Times are per layer, of a graph of as many calls as a 7B has layers on a CUDA device.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import clock
from benchmarks.gpu.clock import Case
from benchmarks.gpu.predictions import MICRO
from benchmarks.gpu.run import Run

__all__ = ["attention", "packed", "repeated"]

NUM_CALLS = 28
WIDTHS = (1, 5)
#: products of bfloat16 (8 bits) and float32 (24 bits) numbers, summed in another order
TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 1e-5}


def repeated(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention with copied keys and values.

    Args:
        query: [batch, heads, verify, head_dim].
        key, value: [batch, kv_heads, slots, head_dim].
        mask: bool [batch, 1, verify, slots].

    Returns:
        [batch, heads, verify, head_dim].
    """
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def packed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The same as `repeated`, without copies; `mask` is repeated once for the group's stacked queries."""
    batch, heads, verify, head_dim = query.shape
    kv_heads = key.shape[1]
    rows = query.reshape(batch, kv_heads, heads // kv_heads * verify, head_dim)
    output = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return output.reshape(batch, heads, verify, head_dim)


def attention(run: Run) -> None:
    """Every width and capacity; that packing changes nothing is a check."""
    dtype = torch.bfloat16 if run.is_cuda else torch.float32
    for slots in run.sizes.slots:
        for width in WIDTHS:
            _one_shape(run, width, slots, dtype)


def _one_shape(run: Run, width: int, slots: int, dtype: torch.dtype) -> None:
    base, wide = run.sizes.base, run.sizes.widenings["7b"]
    heads, kv_heads = base.heads * wide.copies, base.kv_heads * wide.kv_copies
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(run.device, dtype)

    query, key, value = normal(1, heads, width, 64), normal(1, kv_heads, slots, 64), normal(1, kv_heads, slots, 64)
    last_seen = torch.arange(slots - width, slots, device=run.device)
    mask = (torch.arange(slots, device=run.device) <= last_seen[:, None])[None, None]
    group_mask = mask.repeat(1, 1, heads // kv_heads, 1)
    ways: dict[str, Callable[[], Tensor]] = {
        "repeat": lambda: repeated(query, key, value, mask),
        "packed": lambda: packed(query, key, value, group_mask),
    }
    if run.is_cuda:
        ways["varlen"] = _varlen(query, key, value)
    expected, shape = ways["repeat"](), f"{width} of {slots} slots"
    scale = float(expected.abs().max())
    error = float((ways["packed"]() - expected).abs().max()) / scale
    run.check(f"packed queries = copied keys, {shape}", error <= TOLERANCE[dtype], f"relative error {error:.1e}")
    times = _microseconds(run, ways, expected, shape)
    is_large = width > 1 and slots == max(run.sizes.slots)
    saved = times["repeat"] - times["packed"]
    run.value(f"packing saves per layer, {shape}", saved, "µs", MICRO["packing saves"] if is_large else None)


def _microseconds(run: Run, ways: dict[str, Callable[[], Tensor]], expected: Tensor, shape: str) -> dict[str, float]:
    """Per call, by way; a way that does not run here is noted and left out."""
    cases: dict[str, Case] = {}
    for name, way in ways.items():
        try:
            if name == "varlen":
                error = float((way() - expected).abs().max() / expected.abs().max())
                run.value(f"varlen, relative error, {shape}", error, "", is_shown=False)
            cases[name] = _many(run, way)
        except Exception as error:  # a signature, a missing kernel or a failed capture: whatever torch raises
            run.note(f"{name} attention, {shape}: {type(error).__name__}: {error}".splitlines()[0])
    timings = clock.measure(cases, run.device, run.rounds)
    times = {name: timing.device_median / NUM_CALLS * 1e6 for name, timing in timings.items()}
    for name, microseconds in times.items():
        raw = [each / NUM_CALLS * 1e6 for each in timings[name].device_seconds or timings[name].seconds]
        run.value(f"attention, {name}, {shape}", microseconds, "µs", raw=raw)
    return times


def _many(run: Run, way: Callable[[], Tensor]) -> Case:
    def work() -> None:
        for _ in range(NUM_CALLS):
            way()

    return clock.capture(work).case() if run.is_cuda else Case(work)


def _varlen(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """One row whose queries are its last tokens; the cache would have to be stored [slots, kv_heads, head_dim]."""
    width, slots = query.shape[2], key.shape[2]
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    starts = [torch.tensor([0, length], dtype=torch.int32, device=query.device) for length in (width, slots)]

    def way() -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(q, k, v, starts[0], starts[1], width, slots, window_size=(-1, 0), enable_gqa=True)
        assert isinstance(output, Tensor)
        return output.transpose(0, 1)[None]

    return way
