"""Measures a pair by short calls of `generate()` on a schedule of draft lengths: what is measured is what runs.

The calls themselves learn what passes, drafts and prompts take and how much is kept, as they do under "auto"; here they
learn it into a book of their own. When the seconds are spent no further call begins, and what is missing is said.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from hf_specdec.acceptance import AcceptanceRecord
from hf_specdec.config import SpeculativeConfig
from hf_specdec.costs import StepCosts
from hf_specdec.estimate.prediction import looked_up, predict
from hf_specdec.estimate.result import Estimate, KindEstimate, verdict_on
from hf_specdec.host import binding
from hf_specdec.host.conversions import draft_in_use
from hf_specdec.host.draft_copy import copy_quantization, own_copy
from hf_specdec.host.knowledge import knowledge_of
from hf_specdec.integration import enable, report
from hf_specdec.registry import DRAFTERS, lookup
from hf_specdec.speed_model import PairKnowledge

__all__ = ["run_estimate"]

TIMED = (4, 0, 1, 8, 2, 16, 4, 0, 2, 1, 4, 0, 2, 4, 1, 0)
"""K of the steps of measuring calls, over and over. What says most comes first, should time be short; long drafts take
most of it and are timed a few times only: acceptance is learnt from short ones."""
FEW = 30
"""Drafted tokens on which an acceptance rests that is said to be uncertain."""
WARM_UP = (0, 2, 0, 4)
WARM_UP_PROMPT = 16


def run_estimate(
    target: Any,
    draft: Any,
    prompts: Mapping[str, Sequence[Tensor]],
    *,
    budget_seconds: float = 60.0,
    batch: int = 1,
    max_new_tokens: int = 64,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
    **config: Any,
) -> Estimate:
    """Measure a pair and predict.

    Args:
        target: a loaded model, as `enable` takes it.
        draft: its draft: a name, a folder or a model; None for methods without one.
        prompts: by kind of text, int64 [seq] each.
        budget_seconds: when they are spent no further call begins and the running one ends; loading does not count.
        batch: rows of every call; a kind's prompts take turns in them.
        max_new_tokens: of every call.
        options: further keywords of `generate()`, such as do_sample and temperature.
        seed: of the draws.
        progress: told what runs.
        **config: further keys of the flag; `method` is what is asked about.

    Raises:
        ValueError: no prompts, a method that cannot be estimated or lacks its draft, a draft that does not fit.
    """
    if not prompts or not all(len(texts) and all(len(text) for text in texts) for texts in prompts.values()):
        raise ValueError("An estimate needs at least one prompt of each kind, each of at least one token.")
    target = binding.unwrap(target)
    config = {**config, "method": _method(config.pop("method", "auto"), draft, target)}
    flag = SpeculativeConfig(**config)
    with torch.random.fork_rng(), enable(target, draft, **config):
        bindings = binding.bindings_of(target)
        bound = bindings[-1].draft if bindings else None
        if flag.draft_quantization == "auto":  # what `enable` settled on is measured, and stays
            scheduled = dataclasses.replace(flag, draft_lengths=[0])
            in_use = copy_quantization(draft_in_use(target, bound, scheduled, flag.method, batch, 1))
            flag = dataclasses.replace(flag, draft_quantization=in_use or "none")
        bound = None if bound is None else own_copy(bound, flag, target, is_in_code=True)
        torch.manual_seed(seed)
        meter = _Meter(target, bound, flag, batch, {**(options or {}), "max_new_tokens": max_new_tokens})
        why_plain = meter.measure(prompts, budget_seconds, progress)
    return meter.estimate(
        prompts, why_plain, {"seed": seed, "options": dict(options or {}), "budget_seconds": budget_seconds}
    )


def _method(method: str, draft: Any, target: Any) -> str:
    """The one drafter that is measured."""
    if method == "auto":
        return "ngram" if draft is None else "draft_model"
    drafter = lookup("method", DRAFTERS, method)
    if drafter.is_free and method != "ngram":
        raise ValueError(
            f"What method={method!r} proposes depends on more than the call's own text. Estimate method='ngram', which "
            "reads that only."
        )
    if drafter.needs_model and draft is None:
        raise ValueError(f"method={method!r} needs a draft. Name one, or estimate method='ngram'.")
    why = drafter.why_unfit(target)
    if why is not None:
        raise ValueError(f"method={method!r} does not fit {type(target).__name__}: {why}.")
    return method


class _Tape(AcceptanceRecord):
    """Keeps what every step said, the first like the last."""

    def __init__(self, prior: float) -> None:
        super().__init__(prior)
        self.survivals: list[Sequence[float]] = []

    def update(self, rows: Sequence[Sequence[float]]) -> None:
        """See `AcceptanceRecord.update`."""
        self.survivals += rows
        super().update(rows)


@dataclass
class _Heard:
    """What the calls on one kind of text gave."""

    tape: _Tape
    texts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    num_calls: int = 0
    prefill_seconds: float = 0.0


@final
class _Meter:
    """Runs calls and keeps what they cost and what came of them."""

    def __init__(self, target: Any, draft: Any, flag: SpeculativeConfig, batch: int, options: dict[str, Any]) -> None:
        self._target, self._draft, self._flag, self._batch, self._options = target, draft, flag, batch, options
        self._drafter = lookup("method", DRAFTERS, flag.method)
        self._costs, self._heard = StepCosts(), dict[str, _Heard]()
        self._prefills: list[tuple[int, float]] = []
        self._notes: dict[str, None] = {}
        self._seconds, self._is_cut, self._place = 0.0, False, 0  # in TIMED, across calls

    def measure(
        self, prompts: Mapping[str, Sequence[Tensor]], budget_seconds: float, progress: Callable[[str], None]
    ) -> str | None:
        """Calls on all kinds in turn until all are done or the time is spent; why calls decode plainly, if they do."""
        started, num_tokens = time.perf_counter(), self._options["max_new_tokens"]
        turns = _turns(prompts, self._batch)
        progress("warming up")
        short = [row[:WARM_UP_PROMPT] for row in turns[0][0][1]]
        why_plain = self._call(short, WARM_UP, len(WARM_UP) + sum(WARM_UP), budget_seconds / 10, _Heard(self._tape()))
        self._costs, self._prefills, self._place = StepCosts(), [], 0
        for turn in [] if why_plain else turns:
            for number, (kind, ids) in enumerate(turn):
                left = budget_seconds - (time.perf_counter() - started)
                share = left / (len(turn) - number)
                heard = self._heard.setdefault(kind, _Heard(self._tape()))
                if share < heard.prefill_seconds * 2 or left <= 0:  # reading would take most of it
                    self._is_cut = True
                    continue
                progress(f"{kind}, prompt {heard.num_calls * self._batch + 1}")
                schedule = [0] + [TIMED[(self._place + step) % len(TIMED)] for step in range(num_tokens)]
                self._call(ids, schedule, num_tokens, share, heard)
                heard.num_calls += 1
        self._seconds = time.perf_counter() - started
        return why_plain

    def _tape(self) -> _Tape:
        return _Tape(self._drafter.prior)

    def _call(
        self, rows: list[Tensor], schedule: Sequence[int], max_new_tokens: int, max_time: float, heard: _Heard
    ) -> str | None:
        """One call of `generate()`; why it was plain, or None."""
        ids, mask = _padded(rows, self._target)
        keywords = {**self._options, "max_new_tokens": max_new_tokens, "max_time": max_time}
        flag = {"draft_lengths": list(schedule), "num_speculative_tokens": "auto", "deterministic": False}
        flag["draft_quantization"] = self._flag.draft_quantization
        name = f"{self._flag.method} {self._drafter.variant(self._target, self._flag)}".strip()  # as calls have it
        known = knowledge_of(self._target, self._draft, name, *ids.shape)
        with _lent(known, PairKnowledge(self._costs, {self._drafter.record: heard.tape})):
            output = self._target.generate(input_ids=ids, attention_mask=mask, speculative_config=flag, **keywords)
        told = report(self._target)
        if told is None or told.reason is not None:
            return "HF_SPECDEC=0 switches the plugin off" if told is None else told.reason
        self._place += max(0, len(told.draft_lengths) - 1)
        self._notes |= dict.fromkeys(told.notes)
        self._prefills.append((ids.numel(), told.prefill_seconds))
        heard.prefill_seconds = told.prefill_seconds
        for row, new in zip(rows, output[:, ids.shape[1] :].tolist(), strict=True):
            heard.texts.append((row.tolist(), _until_end(new, self._target.generation_config.eos_token_id)))
        return None

    def estimate(
        self, prompts: Mapping[str, Sequence[Tensor]], why_plain: str | None, setting: dict[str, Any]
    ) -> Estimate:
        """What follows from all that was measured."""
        is_timed = self._costs.verify.num_observations(self._batch) > 0
        has_draft = not self._drafter.is_free
        kinds = []
        for kind, heard in self._heard.items() if is_timed else ():
            has_drafted = bool(heard.tape.survivals) and not self._costs.draft.is_empty
            if not heard.num_calls or (has_draft and not has_drafted):
                continue
            draft = predict(self._costs, heard.tape.survivals, self._batch) if has_draft else None
            found = looked_up(heard.texts, self._costs if self._batch == 1 else None, self._flag)
            kinds.append(KindEstimate(kind, sum(len(new) for _, new in heard.texts), draft, found))
        costs = self._told_costs() if is_timed else {}
        verdict = f"No: calls decode plainly: {why_plain}." if why_plain else None
        return Estimate(
            verdict=verdict or verdict_on(kinds, costs.get("cost_coefficient")),
            setting={**self._setting(prompts), **setting},
            costs=costs,
            kinds=kinds,
            not_measured=[] if why_plain else self._not_measured(prompts, [kind.kind for kind in kinds]),
            notes=list(self._notes),
            seconds=self._seconds,
        )

    def _setting(self, prompts: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
        return {
            "target": type(self._target).__name__,
            "draft": None if self._draft is None else type(self._draft).__name__,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "device": str(self._target.device),
            "flag": self._flag.to_dict(),
            "batch": self._batch,
            "max_new_tokens": self._options["max_new_tokens"],
            "num_prompts": {kind: len(texts) for kind, texts in prompts.items()},
        }

    def _told_costs(self) -> dict[str, Any]:
        costs, batch = self._costs, self._batch
        counts = sorted({batch * (length + 1) for length in TIMED})
        passes = {str(rows): costs.verify.seconds(rows) for rows in counts if costs.verify.num_observations(rows)}
        draft_token = None if costs.draft.is_empty else costs.draft.seconds(1)
        tokens, seconds = sorted(self._prefills)[len(self._prefills) // 2]
        return {
            "pass_seconds_by_rows": passes,
            "draft_token_seconds": draft_token,
            "cost_coefficient": None if draft_token is None else draft_token / costs.verify.seconds(batch),
            "prefill_tokens": tokens,
            "target_prefill_seconds": seconds,
            "draft_prefill_seconds": None if costs.read.is_empty else costs.read.seconds(tokens),
        }

    def _not_measured(self, prompts: Mapping[str, Sequence[Tensor]], kinds: list[str]) -> list[str]:
        why = " (the seconds were spent)" if self._is_cut else ""
        missing = [f"{kind}: nothing{why}" for kind in prompts if kind not in kinds]
        num_calls = {kind: -(-len(texts) // self._batch) for kind, texts in prompts.items()}
        missing += [
            f"{kind}: {heard.num_calls} of {num_calls[kind]} calls{why}"
            for kind, heard in self._heard.items()
            if kind in kinds and heard.num_calls < num_calls[kind]
        ]
        for kind, heard in self._heard.items():
            drafted = sum(map(len, heard.tape.survivals))
            if kind in kinds and drafted < FEW and not self._drafter.is_free:
                missing.append(f"{kind}: acceptance only roughly, on {drafted} drafted tokens")
        rows = [self._batch * (length + 1) for length in sorted(set(TIMED))]
        unseen = [str(count) for count in rows if not self._costs.verify.num_observations(count)]
        if unseen and kinds:
            missing.append(
                f"passes of {', '.join(unseen)} rows: their seconds are taken from the nearest measured ones"
            )
        reads = not (self._drafter.is_free or self._drafter.is_on_target_keys)
        if self._costs.read.is_empty and reads and kinds:
            missing.append("the draft's prefill")
        return missing


@contextlib.contextmanager
def _lent(known: PairKnowledge, other: PairKnowledge) -> Iterator[None]:
    """`known` with what stands in `other`, and as it was afterwards: an estimate neither uses nor changes what calls
    remember."""
    found = dict(vars(known))
    vars(known).update(vars(other))
    try:
        yield
    finally:
        vars(known).update(found)


def _turns(prompts: Mapping[str, Sequence[Tensor]], batch: int) -> list[list[tuple[str, list[Tensor]]]]:
    """(kind, rows) of each call: in a turn one of every kind, so that an early stop leaves something of each."""
    most = max(-(-len(texts) // batch) for texts in prompts.values())
    return [
        [
            (kind, [texts[(turn * batch + row) % len(texts)] for row in range(batch)])
            for kind, texts in prompts.items()
            if turn * batch < len(texts)
        ]
        for turn in range(most)
    ]


def _padded(rows: list[Tensor], target: Any) -> tuple[Tensor, Tensor]:
    """(ids, mask) [batch, seq], padded on the left, on the target's device."""
    pad = target.generation_config.pad_token_id
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), 0 if pad is None else int(pad), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = row.cpu(), 1
    return ids.to(target.device), mask.to(target.device)


def _until_end(ids: list[int], eos: int | list[int] | None) -> list[int]:
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))]
