"""Stage 5: how long a forward over M rows takes, eagerly and under a CUDA graph.

Eager passes read and write transformers' own cache, cut back before each. A captured pass has no cache: with a short
context its attention is next to nothing beside the weights, and a graph of it can be replayed any number of times.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.gpu import clock
from benchmarks.gpu.clock import Case, Timing
from benchmarks.gpu.nets import texts
from benchmarks.gpu.predictions import eager_ms, graph_ms
from benchmarks.gpu.run import Run
from hf_specdec.host.runner import cache_keyword

__all__ = ["CachedPass", "bare_pass", "pass_times", "report_passes", "time_passes", "weight_bytes"]

#: no kernel reads weights faster than this multiple of the bandwidth that stage 1 reached
FASTEST_OVER_REACHED = 1.3
BIG_BYTES = 2**30  # smaller models may partly stay in the L2 cache


class CachedPass:
    """A forward over `num_rows` tokens after `context` cached ones."""

    def __init__(self, model: Any, context: int, num_rows: int) -> None:
        self._model, self._context = model, context
        device = model.model.embed_tokens.weight.device
        ids = texts(1, context + num_rows, model.config.vocab_size, 0, device)
        self._prompt, self._ids = ids[:, :context], ids[:, context:]
        self._cache: Any = None

    def _forward(self, ids: torch.Tensor) -> Any:
        return self._model(input_ids=ids, use_cache=True, **{cache_keyword(self._model): self._cache})

    def _prepare(self) -> None:
        if self._cache is None:
            self._cache = DynamicCache(config=self._model.config)
            self._forward(self._prompt)
        elif (extra := self._cache.get_seq_length() - self._context) > 0:
            self._cache.crop(-extra)

    def case(self) -> Case:
        """The forward, its cache cut back before."""
        return Case(lambda: self._forward(self._ids), self._prepare)


def time_passes(run: Run, model: Any, rows: Sequence[int]) -> dict[tuple[str, int], Timing]:
    """("eager" or "graph", M) → times of passes of `model`; graphs on a CUDA device only."""
    cases = {f"eager {num}": CachedPass(model, run.sizes.context, num).case() for num in rows}
    pool = torch.cuda.graph_pool_handle() if run.is_cuda else None
    for num in rows if run.is_cuda else ():
        ids = texts(1, num, model.config.vocab_size, 0, run.device)
        try:
            captured = clock.capture(bare_pass(model, ids), pool)
        except RuntimeError as error:
            run.note(f"A pass over {num} rows was not captured: {str(error).splitlines()[0]}")
            break
        cases[f"graph {num}"] = captured.case()
        if num in (rows[0], rows[-1]):
            _check_graph(run, model, ids, captured)
    timings = clock.measure(cases, run.device, run.rounds, is_over=lambda: run.seconds_left() < 0)
    return {(name.split()[0], int(name.split()[1])): timing for name, timing in timings.items()}


def bare_pass(model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A forward without cache that reads nothing on the host: transformers takes a four-dimensional mask as it is."""
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()[None, None]
    return lambda: model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def _check_graph(run: Run, model: Any, ids: torch.Tensor, captured: clock.Captured) -> None:
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
    captured.graph.replay()
    error = float((captured.output.float() - expected).abs().max() / expected.abs().max())
    # The same kernels on the same numbers, but for attention, which takes another one where it gets no mask: 8
    # significant bits, through some dozens of roundings.
    run.check(f"graph = eager, {ids.shape[1]} rows", error <= 2**-5, f"relative error {error:.1e}")


def pass_times(run: Run) -> None:
    """Targets and drafts of the end-to-end stages."""
    names = ["7b bf16", *(["7b nf4"] if run.models.why_no_nf4 is None else []), "0.5b", "small"]
    for name in names:
        is_draft = name in ("0.5b", "small")
        model = run.models.draft(name, run.sizes.acceptances[0]) if is_draft else run.models.target(name)
        report_passes(run, name, model, run.sizes.rows)


def report_passes(run: Run, name: str, model: Any, rows: Sequence[int]) -> None:
    """Measure the passes of one model and keep them, beside their predictions where `name` has some."""
    timings = time_passes(run, model, rows)
    for (mode, num), timing in timings.items():
        raw = timing.seconds if mode == "eager" else timing.device_seconds
        predicted = graph_ms(name, num)
        if mode == "eager":
            predicted = eager_ms(name, num, run.host_factor)
        shown = num in (1, 2, 5, 6, 17, 49)
        milliseconds = (timing.median if mode == "eager" else timing.device_median) * 1e3
        label = f"{name}, {mode} pass over {num} row{'s' if num > 1 else ''}"
        run.value(label, milliseconds, "ms", predicted, [seconds * 1e3 for seconds in raw], shown)
    facts = run.record.facts.setdefault("issue_share", {})
    facts[name] = {f"{mode} {num}": round(timing.issue_share, 3) for (mode, num), timing in timings.items()}
    if run.is_cuda:
        _check_floor(run, name, model, min(timing.median for timing in timings.values()))


def weight_bytes(model: Any) -> int:
    """Bytes that a pass reads: every layer's weights, shared ones each time, and the head; an embedding row is none."""
    layers = sum(weight.nbytes for layer in model.model.layers for weight in layer.parameters())
    scales = sum(
        weight.quant_state.absmax.nbytes
        for layer in model.model.layers
        for weight in layer.parameters()
        if getattr(weight, "quant_state", None) is not None
    )
    return layers + scales + model.lm_head.weight.nbytes


def _check_floor(run: Run, name: str, model: Any, seconds: float) -> None:
    """A pass that is faster than reading the weights is not a pass over this model."""
    num_bytes, reached = weight_bytes(model), run.bytes_per_second
    if reached is None or num_bytes < BIG_BYTES:
        return
    floor = num_bytes / (FASTEST_OVER_REACHED * reached)
    detail = f"{seconds * 1e3:.2f} ms for {num_bytes / 1e9:.1f} GB, at least {floor * 1e3:.2f} ms"
    run.check(f"{name} reads all its weights", seconds >= floor, detail)
