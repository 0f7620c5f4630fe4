"""Runs an experiment: all arms on the same prompts, in one process, in an order drawn for each prompt.

Machines drift (clocks, neighbours), so every arm sees every prompt within minutes of the others, plain decoding goes
first and last, and each run starts with the same seed. A record holds raw seconds and counts; nothing is averaged here.
Seconds are those of the whole call of `generate()`, prefill included, as a user waits for them; only what makes a copy
of the draft in fewer bits, once per process, is counted apart (`report.conversion_seconds`), like loading.
"""

import collections
import contextlib
import copy
import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from transformers import GenerationConfig

import hf_specdec
from hf_specdec.benchmark.arms import Arm
from hf_specdec.benchmark.environment import PeakMemory, describe
from hf_specdec.benchmark.experiment import Cell, Experiment, Prompt, keywords_of
from hf_specdec.benchmark.ledger import Ledger

__all__ = ["Models", "encoder", "offload_layers", "randomise", "run_experiment"]

WARM_UP_TOKENS = 8
_DROPPED = ("draft_lengths", "method")  # of a report: the arm says it, or its histogram is kept


@dataclass(frozen=True)
class Models:
    """What is measured.

    Attributes:
        target, draft: loaded models, in eval mode, on their devices.
        encode: prompts to the tensors that `generate()` takes, left-padded.
        facts: revisions and sizes of both, for the ledger.
    """

    target: Any
    draft: Any
    encode: Callable[[list[str]], Any]
    facts: dict[str, Any]


def encoder(tokenizer: Any, device: torch.device) -> Callable[[list[str]], Any]:
    """Prompts to left-padded tensors, inside the chat template where the tokenizer has one."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    has_template = getattr(tokenizer, "chat_template", None) is not None

    def encode(texts: list[str]) -> Any:
        if has_template:
            chats = [[{"role": "user", "content": text}] for text in texts]
            texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not has_template)
        return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}

    return encode


def offload_layers(model: Any, folder: str) -> None:
    """Leave the decoder layers of `model` in `folder`: accelerate reads each from there whenever it runs."""
    layers = max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)
    for index, layer in enumerate(layers):
        accelerate.disk_offload(layer, str(Path(folder) / str(index)), execution_device=model.device)


@torch.no_grad()
def randomise(draft: Any) -> None:
    """Replace every matrix of `draft` by noise of the same size; seeded."""
    generator = torch.Generator(draft.device).manual_seed(0)
    for weight in draft.parameters():
        if weight.ndim > 1:
            scale = float(weight.float().std())
            weight.copy_(torch.empty_like(weight).normal_(0.0, scale, generator=generator))


def run_experiment(
    experiment: Experiment,
    arms: list[Arm],
    models: Models,
    ledger: Ledger,
    *,
    chooses: Callable[[Cell], bool] = lambda cell: True,
    is_rerun: bool = False,
    ends_at: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure every chosen cell that the ledger does not hold yet, and write each as it is done.

    Args:
        experiment: the question.
        arms: in order; see `arms_of`.
        models: what is measured; left as found.
        ledger: where answers go.
        chooses: which cells.
        is_rerun: measure cells that the ledger holds too.
        ends_at: on the clock of `time.monotonic`: no cell is begun that would end later if it took as long as the last
            one; None: no limit.
        tell: gets one line at each start of a cell or prompt.
    """
    last_seconds = 0.0
    for cell in filter(chooses, experiment.cells()):
        fitting = [arm for arm in arms if arm.fits(cell)]
        digest = experiment.digest(cell, [arm.name for arm in fitting])
        if ledger.holds(cell.key, digest) and not is_rerun:
            tell(f"{cell.key}: in the ledger already")
            continue
        started = time.monotonic()
        if ends_at is not None and started + last_seconds > ends_at:
            left = max(0.0, ends_at - started)
            tell(f"{cell.key}: not begun, {left / 60:.1f} minutes are left and the last took {last_seconds / 60:.1f}")
            continue
        facts = {"digest": digest, "cell": {"kind": cell.kind, "mode": cell.mode, "batch": cell.batch}}
        facts |= {"environment": describe(models.target.device), "models": models.facts}
        with _neutral(models.target), _without_collections():
            records = list(_measured(experiment, cell, fitting, models, tell))
        ledger.put(experiment.to_dict(), cell.key, {**facts, "records": records})
        last_seconds = time.monotonic() - started


@contextlib.contextmanager
def _neutral(target: Any) -> Iterator[None]:
    """A target whose generation config holds special tokens only, and a quiet transformers.

    A checkpoint's own penalties and temperature would make "greedy" and "sampling" mean something else for each pair.
    """
    found, verbosity = target.generation_config, transformers.logging.get_verbosity()
    special = {name: getattr(found, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    target.generation_config = GenerationConfig(**special)
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        target.generation_config = found
        transformers.logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps the garbage collector off what is loaded already: a full collection takes tenths of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measured(
    experiment: Experiment, cell: Cell, arms: list[Arm], models: Models, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    groups = experiment.groups(cell)
    keywords = {**keywords_of(cell.mode), "max_new_tokens": experiment.max_new_tokens}
    warm_up = {**keywords, "max_new_tokens": min(WARM_UP_TOKENS, experiment.max_new_tokens)}
    tell(f"{cell.key}: warming up")
    for _ in range(experiment.warm_up):
        for arm in arms:
            _timed(arm, models, _encoded(models, groups[0]), warm_up, seed=0)
    for number, group in enumerate(groups, 1):
        inputs = _encoded(models, group)
        name = "+".join(prompt.name for prompt in group)
        for seed in experiment.seeds:
            tell(f"{cell.key}: {name}, {number} of {len(groups)}")
            plain: list[list[int]] | None = None
            for position, arm in enumerate(_shuffled(arms, f"{cell.key} {name} {seed}")):
                rows, facts = _timed(arm, models, inputs, keywords, seed)
                plain = rows if plain is None and arm.family == "plain" else plain
                order = {"prompt": name, "seed": seed, "arm": arm.name, "family": arm.family, "position": position}
                yield {**order, **facts, "tokens": [len(row) for row in rows], "differs_at": _differences(rows, plain)}


def _encoded(models: Models, group: tuple[Prompt, ...]) -> Any:
    return models.encode([prompt.text for prompt in group])


def _shuffled(arms: list[Arm], key: str) -> list[Arm]:
    """Plain arms at both ends, the others in an order that `key` decides."""
    plain = [arm for arm in arms if arm.family == "plain"]
    others = [arm for arm in arms if arm.family != "plain"]
    random.Random(key).shuffle(others)
    return [*plain[:1], *others, *plain[1:]]


def _timed(
    arm: Arm, models: Models, inputs: Any, keywords: dict[str, Any], seed: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """The new ids of each row up to its end of text, and the record's part that one run gives."""
    target = models.target
    with arm.set_up(target, models.draft) as decode:
        torch.manual_seed(seed)
        memory = PeakMemory(target.device)
        _synchronize(target.device)
        started = time.perf_counter()
        output = decode(**inputs, **keywords)
        _synchronize(target.device)
        seconds = time.perf_counter() - started
        report = hf_specdec.report(target) if arm.family == "ours" else None
    if report is not None:  # what is loading, not decoding; the report has it
        seconds -= report.conversion_seconds
    facts: dict[str, Any] = {"seconds": round(seconds, 6), "peak_bytes": memory.bytes()}
    if report is not None:
        facts["report"] = {name: _short(value) for name, value in report.to_dict().items() if name not in _DROPPED}
        facts["report"]["draft_passes"] = sum(report.draft_lengths)
        counts = sorted(collections.Counter(report.draft_lengths).items())
        facts["report"]["steps_by_draft_length"] = {str(length): count for length, count in counts}
    prompt_length = inputs["input_ids"].shape[1]
    return [_until_end(row, target.generation_config.eos_token_id) for row in output[:, prompt_length:].tolist()], facts


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _short(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _until_end(ids: list[int], eos: int | list[int] | None) -> list[int]:
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    length = next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))
    return ids[:length]


def _differences(rows: list[list[int]], plain: list[list[int]] | None) -> list[int | None] | None:
    """Per row the first new token at which it is not plain's, None where it is plain's to the end."""
    if plain is None:
        return None
    return [_first_difference(row, other) for row, other in zip(rows, plain, strict=True)]


def _first_difference(row: list[int], other: list[int]) -> int | None:
    if row == other:
        return None
    pairs = enumerate(zip(row, other, strict=False))
    return next((index for index, (mine, its) in pairs if mine != its), min(len(row), len(other)))
