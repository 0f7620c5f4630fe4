"""The ways of decoding that are compared: one small object each, in one list.

To add one (another drafter, a policy, another engine), write a class or use `Ours` with other keywords, and put it into
`arms_of`. `set_up` runs outside the timed part. Other engines are in `engines`.
"""

import contextlib
import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import hf_specdec
from hf_specdec.benchmark.experiment import Cell, Experiment

__all__ = ["LOOKUP_TOKENS", "Arm", "Assisted", "Decode", "Lookup", "Ours", "Plain", "arms_of"]

Decode = Callable[..., Any]
"""Takes the keywords of `generate()`, gives the prompts' and the new ids, [batch, seq]."""
LOOKUP_TOKENS = 10  # what transformers' documentation of prompt lookup proposes


class Arm(ABC):
    """A way of decoding.

    Attributes:
        name: in the ledger and for ``--arms``.
        family: "plain", "assisted", "lookup", "ours" or an engine's name: what it is compared with.
        max_batch: most rows that it takes; None: any number.
    """

    name: str
    family: ClassVar[str]
    max_batch: ClassVar[int | None] = None

    @abstractmethod
    def set_up(self, target: Any, draft: Any) -> contextlib.AbstractContextManager[Decode]:
        """Around one call: gives what decodes, and leaves both models as found."""

    def fits(self, cell: Cell) -> bool:
        """Whether it can answer `cell`."""
        return self.max_batch is None or cell.batch <= self.max_batch


@dataclass(frozen=True)
class Plain(Arm):
    """transformers as it is, without the plugin; decoded before and after the others."""

    name: str
    family: ClassVar[str] = "plain"

    @contextlib.contextmanager
    def set_up(self, target: Any, draft: Any) -> Iterator[Decode]:
        """See `Arm.set_up`."""
        yield target.generate


@dataclass(frozen=True)
class Assisted(Arm):
    """transformers' own assisted decoding with the same draft.

    Attributes:
        draft_length: fixed K, drafted whatever the draft's confidence; None: its default, which stops drafting where
            the draft is not confident.
    """

    name: str
    draft_length: int | None = None
    family: ClassVar[str] = "assisted"
    max_batch: ClassVar[int | None] = 1

    @contextlib.contextmanager
    def set_up(self, target: Any, draft: Any) -> Iterator[Decode]:
        """See `Arm.set_up`. Its settings are read from the draft's generation config, and some schedules write them."""
        found = draft.generation_config
        draft.generation_config = copy.deepcopy(found)
        if self.draft_length is not None:
            draft.generation_config.num_assistant_tokens = self.draft_length
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0
        try:
            yield functools.partial(target.generate, assistant_model=draft)
        finally:
            draft.generation_config = found


@dataclass(frozen=True)
class Lookup(Arm):
    """transformers' own prompt lookup: drafts what followed the text's last tokens before."""

    name: str
    family: ClassVar[str] = "lookup"
    max_batch: ClassVar[int | None] = 1

    @contextlib.contextmanager
    def set_up(self, target: Any, draft: Any) -> Iterator[Decode]:
        """See `Arm.set_up`."""
        yield functools.partial(target.generate, prompt_lookup_num_tokens=LOOKUP_TOKENS)


@dataclass(frozen=True)
class Ours(Arm):
    """The plugin, enabled with `config` for one call."""

    name: str
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    family: ClassVar[str] = "ours"

    @contextlib.contextmanager
    def set_up(self, target: Any, draft: Any) -> Iterator[Decode]:
        """See `Arm.set_up`."""
        drafts = () if self.config.get("method") == "ngram" else (draft,)
        with hf_specdec.enable(target, *drafts, **self.config):
            yield target.generate


def arms_of(experiment: Experiment, tell: Callable[[str], None] = lambda text: None) -> list[Arm]:
    """The arms of an experiment; the first and the last are plain, the order of the others is drawn per prompt.

    Args:
        experiment: the question.
        tell: gets one line per engine that is left out because it is not installed.
    """
    return [
        Plain("plain-first"),
        Assisted("assisted-default"),
        *(Assisted(f"assisted-{length}", length) for length in experiment.assisted_draft_lengths),
        *([Lookup("assisted-lookup")] if experiment.has_lookup else []),
        *_engines(experiment, tell),
        *_ours(experiment),
        Plain("plain-last"),
    ]


def _ours(experiment: Experiment) -> Iterator[Arm]:
    """Every draft length of every drafter, then the choices. Policies and other drafters go here."""
    drafts = {"": {}} | {f"-{name}": {"draft_quantization": name} for name in experiment.draft_quantization}
    for suffix, config in drafts.items():
        for length in experiment.draft_lengths:
            yield Ours(f"ours{suffix}-{length}", {**config, "num_speculative_tokens": length})
    for length in experiment.ngram_lengths:
        yield Ours(f"ngram-{length}", {"method": "ngram", "num_speculative_tokens": length})
    if experiment.auto:
        for suffix, config in drafts.items():
            yield Ours(f"ours-auto{suffix}", config)
    if experiment.auto_model:
        yield Ours("ours-auto-model", {"method": "draft_model"})


def _engines(experiment: Experiment, tell: Callable[[str], None]) -> Iterator[Arm]:
    from hf_specdec.benchmark.engines import ENGINES, is_installed

    for name in experiment.engines:
        if not is_installed(name):
            tell(f"{name} is not installed and is left out: pip install --no-deps {name}")
            continue
        for length in experiment.assisted_draft_lengths:
            if length in experiment.draft_lengths:
                yield ENGINES[name](f"{name}-{length}", length)
