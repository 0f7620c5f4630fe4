"""Prompt lookup: what followed the row's last tokens where they occurred before is proposed again.

No model: the longest match of the text's end in prompt and output (`suffix_index`) says where to read on, and one of m
tokens is trusted for 2m more. A proposal is a point mass, q(x̃) = 1: a drafted token is kept with probability p(x̃), and
a rejection draws from norm(p without x̃).

Source: Saxena 2023, *Prompt Lookup Decoding* (github.com/apoorvumang/prompt-lookup-decoding). That proposals grow with
the match: Oliaro et al. 2024 (arXiv 2411.04975).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_specdec.drafters.base import Draft, Drafter, DraftRequest, Offer
from hf_specdec.registry import register_drafter
from hf_specdec.sequence import Sequence
from hf_specdec.suffix_index import SuffixIndex

__all__ = ["Found", "NgramDrafter", "TextMemory"]

LENGTH_FACTOR = 2
"""Tokens proposed at most per token that matched. One matching token says little, and most matches are that short."""
BUCKETS = ((1, "1", 0.25), (2, "2", 0.5), (4, "3-4", 0.7), (8, "5-8", 0.8), (1 << 30, "9+", 0.9))
"""(Longest match of the bucket, its name, how often the token after such a match was right: docs/log.md.)"""


@dataclass(frozen=True)
class TextMemory:
    """What is kept beside a returned cache.

    Attributes:
        ids: int64 [batch, slots], the text behind the cache.
    """

    ids: Tensor


@dataclass(frozen=True)
class Found:
    """Where a row's proposal is read.

    Attributes:
        index: the text that holds it.
        length: tokens that match before it; 0: there is none.
        position: where it begins in `index`.
        source: what records of its acceptance are called after.
    """

    index: SuffixIndex
    length: int
    position: int
    source: str = "ngram"

    def read(self, limit: int) -> list[int]:
        """What is worth proposing, at most `limit` tokens."""
        return self.index.read(self.position, min(limit, LENGTH_FACTOR * self.length)) if self.length else []

    def offer(self, length: int) -> Offer:
        """An offer of `length` tokens, in the record of matches about as long as this one."""
        name, prior = next((name, prior) for longest, name, prior in BUCKETS if self.length <= longest)
        return Offer(length, f"{self.source} {name}", prior)


class NgramDrafter(Drafter):
    """Looks the row's own text up. Rows without a match draft nothing."""

    is_free: ClassVar[bool] = True

    def __init__(self, request: DraftRequest) -> None:
        super().__init__(request)
        self._ends = frozenset(() if request.eos_ids is None else request.eos_ids.tolist())
        self._texts: list[SuffixIndex] = []
        self._prompt_lengths: list[int] = []
        self._found: dict[int, tuple[int, Found]] = {}
        self._sequence: Sequence | None = None

    def offers(self, sequence: Sequence, limit: int) -> list[Offer]:
        """See `Drafter.offers`: what followed the match, in a record for its length."""
        self._follow(sequence)
        rows = range(sequence.batch)
        return [self._look_up(row).offer(len(self._proposal(sequence, row, limit))) for row in rows]

    def propose(self, sequence: Sequence, draft_length: int, uniforms: Tensor) -> Draft:
        """See `Drafter.propose`: what was offered."""
        self._follow(sequence)
        rows = [self._proposal(sequence, row, draft_length) for row in range(sequence.batch)]
        width = max(map(len, rows))
        if width == 0:
            return Draft.nothing(sequence)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in rows], device=sequence.device)
        lengths = torch.tensor([len(tokens) for tokens in rows], device=sequence.device)
        return Draft(ids, None, lengths)

    def keep(self) -> Any:
        """The text, for a later turn on the same cache that hands in its new tokens only."""
        sequence, history = self._sequence, self.request.history_ids
        if sequence is None:  # never asked
            return self.request.resume
        ids = sequence.ids[:, : max(sequence.host_lengths)]
        return TextMemory(ids.clone() if history is None else torch.cat([history.to(ids.device), ids], dim=1))

    def _proposal(self, sequence: Sequence, row: int, limit: int) -> list[int]:
        """At most `limit` tokens, the last of them where a text ends; ids that the target cannot choose are none."""
        if sequence.finished[row]:
            return []
        tokens = self._look_up(row).read(limit)
        for position, token in enumerate(tokens):
            if not 0 <= token < self.request.vocab_size:
                return tokens[:position]
            if token in self._ends:
                return tokens[: position + 1]
        return tokens

    def _look_up(self, row: int) -> Found:
        """The row's match, looked for once per length of its text."""
        length = len(self._texts[row])
        if row not in self._found or self._found[row][0] != length:
            self._found[row] = length, self._find(self._texts[row])
        return self._found[row][1]

    def _find(self, text: SuffixIndex) -> Found:
        return Found(text, *text.match())

    def _follow(self, sequence: Sequence) -> None:
        """Add what was committed since the last time."""
        if self._sequence is not sequence:
            self._texts = self._start(sequence)
            self._prompt_lengths = [len(text) for text in self._texts]
            self._sequence = sequence
        for row in sequence.live_rows:  # a row that has ended may have given tokens back
            text = self._texts[row]
            text.extend(sequence.new_tokens[row][len(text) - self._prompt_lengths[row] :])

    def _start(self, sequence: Sequence) -> list[SuffixIndex]:
        """An index of each row's prompt, padding left out: one host read per call. Equal prompts are read once."""
        ids, mask = sequence.ids[:, : sequence.prompt_length], self.request.padding_mask
        if self.request.history_ids is not None:
            ids = torch.cat([self.request.history_ids.to(ids.device), ids], dim=1)
        if mask is not None:
            ids = ids.masked_fill(mask.to(ids.device) == 0, -1)
        config, known = self.request.config, dict[tuple[int, ...], SuffixIndex]()
        texts = []
        for row in ids.tolist():
            prompt = tuple(token for token in row if token >= 0)
            if prompt not in known:
                known[prompt] = SuffixIndex(config.prompt_lookup_min, config.prompt_lookup_max)
                known[prompt].extend(prompt)
                texts.append(known[prompt])
            else:
                texts.append(known[prompt].copy())
        return texts


register_drafter("ngram", NgramDrafter)
