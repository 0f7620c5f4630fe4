"""Suffix drafting: prompt lookup that also reads what earlier calls on the same target wrote.

Agents and editors ask for nearly the same text again and again. The outputs of finished calls are kept, each behind the
end of its prompt; where the end of the current text matches one of them for longer than it matches itself, the proposal
is read there.

Texts of one call influence only the speed of later calls, never their law: whatever is proposed is a point mass, kept
with probability p(x̃) and else replaced from p without it. Two things do follow them: when sampling, the draws of one
seed depend on what was proposed, so on earlier calls (with `deterministic=True` these are not looked at); and whoever
shares a process can tell by a call's speed that a text like it was written before (`forget` drops what was kept).

Source: Oliaro et al. 2024, *SuffixDecoding* (arXiv 2411.04975), with tables of n-grams for its suffix trees, and the
longest match for its scores.
"""

import threading
import weakref
from collections.abc import Sequence as Tokens
from typing import Any, final

from hf_specdec.drafters.base import DraftRequest
from hf_specdec.drafters.ngram import Found, NgramDrafter
from hf_specdec.registry import register_drafter
from hf_specdec.sequence import Sequence
from hf_specdec.suffix_index import SEPARATOR, SuffixIndex

__all__ = ["MAX_STORED_TOKENS", "SuffixDrafter", "TextStore", "forget"]

MAX_STORED_TOKENS = 1 << 17
"""Tokens kept for one target, at most some 40 MB of host memory; the oldest texts are dropped first."""
NUM_PROMPT_TOKENS = 32
"""Tokens of the prompt's end that stand before a kept output."""
MIN_LENGTH, MAX_LENGTH = 2, 4
"""n-grams of kept texts that are looked up."""


@final
class TextStore:
    """Finished texts of one target, for any number of threads.

    Two generations of at most half of `max_tokens` each: a text goes to the younger one; when that is full it becomes
    the elder, and the texts of the former elder are dropped.
    """

    def __init__(self, max_tokens: int = MAX_STORED_TOKENS) -> None:
        self._room = max_tokens // 2
        self._lock = threading.Lock()
        self._younger, self._elder = self._empty(), self._empty()

    def __len__(self) -> int:
        return len(self._younger) + len(self._elder)

    def add(self, text: Tokens[int]) -> None:
        """Keep `text`, of a very long one its end. All of it is kept, or none."""
        text = [*text[max(0, len(text) - self._room + 1) :], SEPARATOR]
        with self._lock:
            if len(self._younger) + len(text) > self._room:
                self._younger, self._elder = self._empty(), self._younger
            try:
                self._younger.extend(text)
            except BaseException:  # memory, or Ctrl-C: half a text would make every later look-up fail
                self._younger = self._empty()
                raise

    def find(self, text: Tokens[int]) -> Found:
        """The longest match of the end of `text`, of equally long ones the latest."""
        with self._lock:
            found = [Found(index, *index.find(text), source="suffix") for index in (self._younger, self._elder)]
        return max(found, key=lambda each: each.length)  # of equals max takes the first

    @staticmethod
    def _empty() -> SuffixIndex:
        return SuffixIndex(MIN_LENGTH, MAX_LENGTH)


_LOCK = threading.Lock()
_STORES: "weakref.WeakKeyDictionary[Any, TextStore]" = weakref.WeakKeyDictionary()


def store_of(target: Any) -> TextStore:
    """What is kept for `target`, as long as it lives."""
    with _LOCK:
        return _STORES.setdefault(target, TextStore())


def forget(target: Any) -> None:
    """Drop every text kept for `target`; calls that run go on with theirs."""
    with _LOCK:
        _STORES.pop(target, None)


@final
class SuffixDrafter(NgramDrafter):
    """Looks the row's own text up, and the outputs of earlier calls where they match longer."""

    def __init__(self, request: DraftRequest) -> None:
        super().__init__(request)
        self._store = None if request.config.deterministic else store_of(request.target)

    def _find(self, text: SuffixIndex) -> Found:
        own = super()._find(text)
        if self._store is None:
            return own
        kept = self._store.find(text.tokens)
        return kept if kept.length > max(own.length, self.request.config.prompt_lookup_min - 1) else own

    def close(self, sequence: Sequence) -> None:
        """Keep what this call wrote, also if it was broken off."""
        if self._store is None or not self._texts:
            return
        for row, new_tokens in enumerate(sequence.new_tokens):
            prompt = self._texts[row].tokens[: self._prompt_lengths[row]]
            if new_tokens:
                self._store.add(prompt[-NUM_PROMPT_TOKENS:] + new_tokens)


register_drafter("suffix", SuffixDrafter)
