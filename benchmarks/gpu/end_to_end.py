"""Stages 6 to 9: whole texts, plain beside transformers' assisted decoding and ours, for targets of three sizes.

Acceptance is synthetic and hardly varies along a block or between texts: these tables are about cost.
"""

from typing import Any

from benchmarks.gpu import passes, predictions
from benchmarks.gpu.predictions import MICRO, Range
from benchmarks.gpu.races import Racer, keep, race
from benchmarks.gpu.run import Run
from hf_specdec.benchmark.arms import Assisted, Ours, Plain

__all__ = ["bf16", "large", "never_slower", "nf4"]

ASSISTED_LENGTH = 5
DRAFT_LENGTHS = (2, 4, "auto")
WIDE_BATCH = 4


def bf16(run: Run) -> None:
    """The 7B in bfloat16."""
    run.models.free("7b bf16", "0.5b", "small")
    _table(run, "7b bf16", ("0.5b", "small"))


def nf4(run: Run) -> None:
    """The 7B in nf4."""
    if not _has_nf4(run):
        return
    run.models.free("7b nf4", "0.5b", "small")
    _table(run, "7b nf4", ("0.5b", "small"))


def large(run: Run) -> None:
    """The 70B in nf4: pass times, then texts."""
    if not _has_nf4(run):
        return
    run.models.free("0.5b")
    run.note("Layers share the weights of four: caches may help them by a few per cent.")
    passes.report_passes(run, "70b nf4", run.models.target("70b nf4"), run.sizes.large_rows)
    _table(run, "70b nf4", ("0.5b",), modes=("greedy",), has_assisted=False)
    run.models.free()


def never_slower(run: Run) -> None:
    """A draft that knows nothing, at T = 1.5, and four rows at once: "auto" has to stay beside plain."""
    names = ["7b bf16", *(["7b nf4"] if run.models.why_no_nf4 is None else [])]
    for number, target in enumerate(names):
        run.models.free(target, "small")
        racers = _against_plain(run, target, "a random draft", "T = 1.5", run.models.draft("small", None), 1)
        draft = run.models.draft("small", run.sizes.acceptances[0])
        racers += _against_plain(run, target, f"batch {WIDE_BATCH}", "greedy", draft, WIDE_BATCH)
        race(run, racers, share=1 / (len(names) - number))
        keep(run, racers)


def _against_plain(run: Run, target: str, label: str, mode: str, draft: Any, rows: int) -> list[Racer]:
    model, plain = run.models.target(target), f"{target}, {label}, plain"
    racers = [Racer(plain, Plain("plain"), model, None, mode, rows)]
    for length in (4, "auto"):
        arm = Ours(f"K = {length}", {"num_speculative_tokens": length})
        floor = MICRO["never slower"] if length == "auto" else None
        racers.append(Racer(f"{target}, {label}, {arm.name}", arm, model, draft, mode, rows, None, plain, floor))
    return racers


def _has_nf4(run: Run) -> bool:
    if run.models.why_no_nf4 is not None:
        run.note(f"Left out: {run.models.why_no_nf4}")
    return run.models.why_no_nf4 is None


def _table(
    run: Run,
    target: str,
    drafts: tuple[str, ...],
    modes: tuple[str, ...] = ("greedy", "T = 1"),
    has_assisted: bool = True,
) -> None:
    """Race every draft, acceptance and mode of one target."""
    racers = []
    for mode in modes:
        racers += _without_draft(run, target, mode)
        for draft in drafts:
            for acceptance in run.sizes.acceptances:
                racers += _with_draft(run, target, mode, draft, acceptance, has_assisted)
    race(run, racers)
    keep(run, racers)


def _without_draft(run: Run, target: str, mode: str) -> list[Racer]:
    """Plain, and the loop with K = 0: what the loop itself costs."""
    model, plain = run.models.target(target), f"{target}, {mode}, plain"
    draft, acceptance = run.models.draft("small", run.sizes.acceptances[0]), run.sizes.acceptances[0]
    nothing = Ours("K = 0", {"num_speculative_tokens": 1, "draft_lengths": [0] * run.sizes.new_tokens})
    predicted = predictions.plain(target, run.host_factor)
    expected = predictions.ours(target, "small", acceptance, 0, run.host_factor)
    return [
        Racer(plain, Plain("plain"), model, None, mode, predicted=predicted),
        Racer(f"{target}, {mode}, K = 0", nothing, model, draft, mode, 1, expected, plain, _over(expected, predicted)),
    ]


def _with_draft(run: Run, target: str, mode: str, draft: str, acceptance: float, has_assisted: bool) -> list[Racer]:
    model, start = run.models.target(target), f"{target}, {mode}"
    about, plain = (target, draft, acceptance), predictions.plain(target, run.host_factor)
    racers = []
    if has_assisted:
        # transformers takes drafts with tables of the target's size only
        full = run.models.draft(draft, acceptance, has_full_vocab=True)
        arm = Assisted(f"assisted, K = {ASSISTED_LENGTH}", ASSISTED_LENGTH)
        expected = predictions.assisted(*about, ASSISTED_LENGTH, run.host_factor)
        racers.append((arm, full, expected))
    for length in DRAFT_LENGTHS:
        arm = Ours(f"K = {length}", {"num_speculative_tokens": length})
        fixed = length if isinstance(length, int) else None
        expected = predictions.ours(*about, fixed, run.host_factor)
        racers.append((arm, run.models.draft(draft, acceptance), expected))
    return [
        Racer(
            f"{start}, {draft} at {acceptance}, {arm.name}",
            arm,
            model,
            drafting,
            mode,
            predicted=expected,
            against=f"{start}, plain",
            predicted_ratio=_over(expected, plain),
        )
        for arm, drafting, expected in racers
    ]


def _over(expected: Range, plain: Range) -> Range:
    """A ratio to plain; errors of the host's speed cancel, so its bounds are no wider than a speed's."""
    return predictions.spread(expected.value / plain.value)
