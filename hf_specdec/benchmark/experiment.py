"""An experiment: which pair, which prompts, which draft lengths; read from TOML, split into cells.

A cell is one kind of prompts in one mode at one batch size: the unit in which the ledger is written, resumed and
reported, because kinds of text differ too much for one number. Its digest covers everything that the answer depends on
but the code and the machine, so a cell whose question has changed is measured again.

Knows nothing of models.
"""

import dataclasses
import difflib
import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MODES", "Cell", "Experiment", "Prompt", "is_greedy", "keywords_of", "read_experiment"]

QUICK_GROUPS, QUICK_TOKENS = 2, 48
ENGINES = ("flashspec", "economize")
NUMBERS = {
    "batches": int,
    "draft_lengths": int,
    "ngram_lengths": int,
    "assisted_draft_lengths": int,
    "seeds": int,
    "temperatures": float,
}
DRAFT_QUANTIZATIONS, TARGET_QUANTIZATIONS = ("int8", "nf4"), ("nf4",)
TARGET_OFFLOADS = ("disk",)

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
}
"""Keywords of `generate()` by mode; "sampling" draws from the model's own distribution, uncut. Beside these,
`Experiment.temperatures` adds modes like "T=0.3"."""


def keywords_of(mode: str) -> dict[str, Any]:
    """Keywords of `generate()` for a mode of `MODES`, or "T=" and a temperature; 0 is greedy."""
    if mode in MODES:
        return MODES[mode]
    temperature = float(mode.removeprefix("T="))
    return {**MODES["sampling"], "temperature": temperature} if temperature else MODES["greedy"]


def is_greedy(mode: str) -> bool:
    """Whether the mode takes the likeliest token."""
    return not keywords_of(mode)["do_sample"]


@dataclass(frozen=True)
class Prompt:
    """One thing to ask. `kind` is code, copy (much of the prompt comes back) or prose."""

    name: str
    kind: str
    text: str


@dataclass(frozen=True)
class Cell:
    """One kind of prompts in one mode at one batch size."""

    kind: str
    mode: str
    batch: int

    @property
    def key(self) -> str:
        """Name of the cell in the ledger, and what ``--only`` is matched with."""
        return f"{self.kind}/{self.mode}/{self.batch}"


@dataclass(frozen=True)
class Experiment:
    """A question.

    Attributes:
        name: path of its file below ``experiments``, without suffix.
        target, draft: names of `hf_specdec.cli.models`, folders or Hub ids.
        prompts: all prompts that are used, in the order of their file.
        dtype: of target and draft.
        modes: names of `MODES`.
        temperatures: each is one more mode, "T=0.3"; 0 is greedy.
        batches: batch sizes; prompts go in groups of that many.
        draft_lengths: fixed K of ours.
        draft_quantization: "nf4", "int8": `draft_lengths` and `auto` once more with such a copy of the draft.
        ngram_lengths: fixed K of look-ups, without the draft.
        auto: the plugin with its defaults, which chooses K and drafter.
        auto_model: K is chosen, the drafter is always the draft model.
        assisted_draft_lengths: fixed K of transformers' assisted decoding.
        has_lookup: transformers' own prompt lookup.
        engines: other packages ("flashspec", "economize"), where installed, at each K that `draft_lengths` and
            `assisted_draft_lengths` both name.
        target_quantization: "nf4" loads the target in 4 bits, computing in `dtype`.
        target_offload: "disk" leaves the target's decoder layers on disk; accelerate reads them at every pass.
        has_random_draft: the draft's weights are noise: what does a draft cost that knows nothing?
        max_new_tokens: per row.
        seeds: each prompt is decoded with each.
        warm_up: runs of every arm, not recorded, before a cell.
        max_groups: most groups of prompts per cell; None: all.

    Raises:
        ValueError: an unknown name, a number out of range, or a kind with fewer prompts than a batch has rows.
    """

    name: str
    target: str
    draft: str
    prompts: tuple[Prompt, ...]
    dtype: str = "bfloat16"
    modes: tuple[str, ...] = ("greedy", "sampling")
    temperatures: tuple[float, ...] = ()
    batches: tuple[int, ...] = (1,)
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4)
    draft_quantization: tuple[str, ...] = ()
    ngram_lengths: tuple[int, ...] = ()
    auto: bool = True
    auto_model: bool = False
    assisted_draft_lengths: tuple[int, ...] = (3, 5)
    has_lookup: bool = False
    engines: tuple[str, ...] = ()
    target_quantization: str | None = None
    target_offload: str | None = None
    has_random_draft: bool = False
    max_new_tokens: int = 64
    seeds: tuple[int, ...] = (0,)
    warm_up: int = 1
    max_groups: int | None = None

    def __post_init__(self) -> None:
        self._check_names("mode", self.modes, tuple(MODES))
        self._check_names("draft_quantization", self.draft_quantization, DRAFT_QUANTIZATIONS)
        self._check_names("engine", self.engines, ENGINES)
        if self.target_quantization is not None:
            self._check_names("target_quantization", (self.target_quantization,), TARGET_QUANTIZATIONS)
        if self.target_offload is not None:
            self._check_names("target_offload", (self.target_offload,), TARGET_OFFLOADS)
        for key in (key for key in NUMBERS if key != "seeds"):
            self._check_numbers(key, 0 if key == "temperatures" else 1)
        if not self.modes and not self.temperatures:
            raise ValueError(f"{self.name} has no modes and no temperatures. Available modes: {', '.join(MODES)}.")
        if not self.prompts:
            raise ValueError(f"{self.name} has no prompts. Set prompts and prompts_per_kind.")
        for cell in self.cells():
            if not self.groups(cell):
                raise ValueError(
                    f"{self.name} has fewer {cell.kind} prompts than batch={cell.batch} has rows. "
                    "Raise prompts_per_kind or leave that batch size out."
                )

    def _check_names(self, what: str, names: tuple[Any, ...], known: tuple[str, ...]) -> None:
        for name in names:
            if name not in known:
                raise ValueError(f"Unknown {what} {name!r} in {self.name}. Available: {', '.join(known)}.")

    def _check_numbers(self, key: str, least: int) -> None:
        for value in getattr(self, key):
            if not least <= value < float("inf"):
                raise ValueError(f"{key} in {self.name} must be numbers of at least {least}, got {value!r}.")

    def cells(self) -> list[Cell]:
        """All cells, kinds innermost, so that an early stop leaves every kind of the first mode."""
        kinds = dict.fromkeys(prompt.kind for prompt in self.prompts)
        modes = dict.fromkeys((*self.modes, *(f"T={temperature:g}" for temperature in self.temperatures)))
        return [Cell(kind, mode, batch) for batch in self.batches for mode in modes for kind in kinds]

    def groups(self, cell: Cell) -> list[tuple[Prompt, ...]]:
        """The cell's prompts in groups of `cell.batch`; an incomplete last group is left out."""
        prompts = [prompt for prompt in self.prompts if prompt.kind == cell.kind]
        starts = range(0, len(prompts) - cell.batch + 1, cell.batch)
        return [tuple(prompts[start : start + cell.batch]) for start in starts][: self.max_groups]

    def quick(self) -> "Experiment":
        """A short form, for work on the code: two prompts per cell, 48 new tokens, batch 1, every other fixed K, drafts
        in the bits they come in, no sweep of temperatures beside the modes."""
        return dataclasses.replace(
            self,
            draft_lengths=self.draft_lengths[::2],
            ngram_lengths=self.ngram_lengths[:1],
            assisted_draft_lengths=self.assisted_draft_lengths[:1],
            draft_quantization=(),
            max_groups=QUICK_GROUPS,
            max_new_tokens=min(QUICK_TOKENS, self.max_new_tokens),
            batches=(1,),
            temperatures=() if self.modes else self.temperatures,
        )

    def to_dict(self) -> dict[str, Any]:
        """The question as plain JSON data; prompts by name."""
        data = dataclasses.asdict(self)
        data["prompts"] = [prompt.name for prompt in self.prompts]
        return json.loads(json.dumps(data))

    def digest(self, cell: Cell, arm_names: list[str]) -> str:
        """Fingerprint of one cell's question: equal means that a recorded answer still answers it."""
        asked = {
            "target": self.target,
            "draft": self.draft,
            "dtype": self.dtype,
            "cell": cell.key,
            "arms": arm_names,
            "prompts": [[prompt.text for prompt in group] for group in self.groups(cell)],
            "max_new_tokens": self.max_new_tokens,
            "seeds": self.seeds,
            "warm_up": self.warm_up,
        }
        if self.target_quantization is not None:  # absent from older questions, which it must not change
            asked["target_quantization"] = self.target_quantization
        if self.target_offload is not None:
            asked["target_offload"] = self.target_offload
        if self.has_random_draft:
            asked["has_random_draft"] = True
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def read_experiment(path: Path) -> Experiment:
    """The experiment in the TOML file at `path`.

    Its keys are the fields of `Experiment`; ``prompts`` names a TOML file of prompts, relative to this one, and
    ``prompts_per_kind`` says how many of each kind are used, from the front.

    Raises:
        OSError: no such file.
        ValueError: unknown, missing or wrong keys.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    fields = {field.name: field for field in dataclasses.fields(Experiment)}
    known = {*fields, "prompts_per_kind"} - {"name", "max_groups"}
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Unknown key {key!r} in {path.name}.{hint} Available: {', '.join(sorted(known))}.")
    for key in ("target", "draft", "prompts", "prompts_per_kind"):
        if key not in data:
            raise ValueError(f"{path.name} must say {key}.")
    prompts = _chosen(path.parent / data.pop("prompts"), data.pop("prompts_per_kind"))
    values: dict[str, Any] = {}
    for key, value in data.items():
        value = tuple(value) if isinstance(value, list) else value
        expected = type(fields[key].default) if isinstance(fields[key].default, (tuple, int, str)) else str
        if type(value) is not expected:
            wanted = "a list" if expected is tuple else f"of type {expected.__name__}"
            raise ValueError(f"{key} in {path.name} must be {wanted}, got {data[key]!r}.")
        values[key] = tuple(_element(path, key, each) for each in value) if isinstance(value, tuple) else value
    return Experiment(name=_name(path), prompts=prompts, **values)


def _element(path: Path, key: str, value: Any) -> Any:
    """One entry of the list at `key`; TOML's 1 is a temperature of 1.0."""
    wanted = NUMBERS.get(key, str)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        kind = {int: "whole numbers", float: "numbers", str: "names"}[wanted]
        raise ValueError(f"{key} in {path.name} must be a list of {kind}, got {value!r} in it.")
    return value


def _name(path: Path) -> str:
    parts = path.resolve().with_suffix("").parts
    above = max((index for index, part in enumerate(parts) if part == "experiments"), default=len(parts) - 2)
    return "/".join(parts[above + 1 :])


def _chosen(path: Path, per_kind: dict[str, int]) -> tuple[Prompt, ...]:
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["prompt"]
    prompts = [Prompt(entry["name"], entry["kind"], entry["text"].strip()) for entry in entries]
    chosen: list[Prompt] = []
    for kind, count in per_kind.items():
        found = [prompt for prompt in prompts if prompt.kind == kind]
        if len(found) < count:
            raise ValueError(
                f"{path.name} has {len(found)} prompts of kind {kind!r}, prompts_per_kind asks for {count}."
            )
        chosen += found[:count]
    return tuple(chosen)
