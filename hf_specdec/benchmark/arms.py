"""The ways of decoding that are compared: one small object each, in one list.

To add one (another drafter, a policy, another engine), write a class or use `Ours` with other keywords, and put it into
`arms_of`. `set_up` runs outside the timed part.
"""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import hf_specdec
from hf_specdec.benchmark.experiment import Experiment

__all__ = ["Arm", "Assisted", "Ours", "Plain", "arms_of"]


class Arm(ABC):
    """A way of decoding.

    Attributes:
        name: in the ledger and for ``--arms``.
        family: "plain", "assisted" or "ours": what it is compared with.
        max_batch: most rows that it takes; None: any number.
    """

    name: str
    family: ClassVar[str]
    max_batch: ClassVar[int | None] = None

    @abstractmethod
    def set_up(self, target: Any, draft: Any) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Around one call of ``target.generate()``: gives its additional keywords, and leaves both models as found."""

    def fits(self, batch: int) -> bool:
        """Whether `batch` rows can be decoded at once."""
        return self.max_batch is None or batch <= self.max_batch


@dataclass(frozen=True)
class Plain(Arm):
    """transformers as it is, without the plugin; decoded before and after the others."""

    name: str
    family: ClassVar[str] = "plain"

    @contextlib.contextmanager
    def set_up(self, target: Any, draft: Any) -> Iterator[dict[str, Any]]:
        """See `Arm.set_up`."""
        yield {}


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
    def set_up(self, target: Any, draft: Any) -> Iterator[dict[str, Any]]:
        """See `Arm.set_up`. Its settings are read from the draft's generation config, and some schedules write them."""
        found = draft.generation_config
        draft.generation_config = copy.deepcopy(found)
        if self.draft_length is not None:
            draft.generation_config.num_assistant_tokens = self.draft_length
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0
        try:
            yield {"assistant_model": draft}
        finally:
            draft.generation_config = found


@dataclass(frozen=True)
class Ours(Arm):
    """The plugin, enabled with `config` for one call."""

    name: str
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    family: ClassVar[str] = "ours"

    @contextlib.contextmanager
    def set_up(self, target: Any, draft: Any) -> Iterator[dict[str, Any]]:
        """See `Arm.set_up`."""
        with hf_specdec.enable(target, draft, **self.config):
            yield {}


def arms_of(experiment: Experiment) -> list[Arm]:
    """The arms of an experiment; the first and the last are plain, the order of the others is drawn per prompt."""
    return [
        Plain("plain-first"),
        Assisted("assisted-default"),
        *(Assisted(f"assisted-{length}", length) for length in experiment.assisted_draft_lengths),
        *(Ours(f"ours-{length}", {"num_speculative_tokens": length}) for length in experiment.draft_lengths),
        # Policies and other drafters go here, each with the keywords of its flag.
        Plain("plain-last"),
    ]
