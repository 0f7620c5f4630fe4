"""Where the end of a text occurred before, and what followed it there: exact, in constant time per token.

For every n from `min_length` to `max_length` a table maps each n-gram to the position that last followed it; the
largest n also has a chain from each position to the one before. A look-up tries the largest n first. Where it is found,
its latest occurrences are followed backwards, so that the longest match is known beyond `max_length`, up to MAX_MATCH.

Why tables and not a suffix automaton: an automaton knows the longest match of any length, but not where that occurred
last (which is not O(1) per token to keep), and the end of another text is not looked up without walking through it. The
tables cost at most one dictionary entry (some 100 bytes) per token and n; a look-up compares at most MAX_CANDIDATES ·
MAX_MATCH tokens, and in a text of one repeated token, where every position is an occurrence, the first one suffices.

Idea: Saxena 2023, *Prompt Lookup Decoding*. Pure Python; knows nothing of tensors, models or rows.
"""

from array import array
from collections.abc import Iterable, Sequence

__all__ = ["MAX_CANDIDATES", "MAX_MATCH", "SEPARATOR", "SuffixIndex"]

SEPARATOR = -1
"""Ends a text where an index holds several: no match reaches across it, no continuation goes past it."""
MAX_MATCH = 64
"""A longer match is taken for one of this length."""
MAX_CANDIDATES = 16
"""Latest occurrences of the largest n-gram among which the longest match is looked for."""
MAX_TABLES = 8
_BITS = 32
_TOKEN = (1 << _BITS) - 1


class SuffixIndex:
    """The n-grams of a text that grows.

    Args:
        min_length: tokens that a match has at least, 1 or more.
        max_length: largest n-gram with a table; of more than MAX_TABLES lengths the smallest ones have one.

    Attributes:
        tokens: the text, ids below 2^32 - 1; to be changed by `extend` only.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(f"Expected 1 <= min_length <= max_length, got {min_length} and {max_length}.")
        self.tokens: list[int] = []
        lengths = range(min_length, min(max_length, min_length + MAX_TABLES - 1) + 1)
        # The key of an n-gram: its tokens side by side, behind a 1 that tells the lengths apart.
        self._tables = [(n, (1 << n * _BITS) - 1, 1 << n * _BITS) for n in reversed(lengths)]
        self._largest = lengths[-1]
        self._follower: dict[int, int] = {}
        self._before = array("q")
        self._window = 0
        self._match: tuple[int, int] | None = (0, 0)

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> "SuffixIndex":
        """Another index of the same text, to grow apart."""
        twin = SuffixIndex(self._tables[-1][0], self._largest)
        twin.tokens, twin._before = self.tokens[:], self._before[:]
        twin._follower = self._follower.copy()
        twin._window, twin._match = self._window, self._match
        return twin

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens`: one dictionary entry for each of them and n."""
        text, follower, tables, largest = self.tokens, self._follower, self._tables, self._largest
        mask_of_all = tables[0][1]
        for token in tokens:
            position, before = len(text), -1
            if token != SEPARATOR:  # an end is not worth finding
                for n, mask, mark in tables:
                    if n <= position:
                        key = self._window & mask | mark
                        if n == largest:
                            before = follower.get(key, -1)
                        follower[key] = position
            self._before.append(before)
            text.append(token)
            self._window = (self._window << _BITS | token & _TOKEN) & mask_of_all
            self._match = None

    def match(self) -> tuple[int, int]:
        """Where the text's own end occurred before: see `find`."""
        if self._match is None:
            self._match = self._find(self.tokens, self._window)
        return self._match

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Where the end of `text` occurs with something behind it.

        Returns:
            (tokens that match, at most MAX_MATCH; position in `tokens` of what follows them), of equally long matches
            the latest; (0, 0) if fewer than `min_length` tokens match.
        """
        window = 0
        for token in text[-self._largest :]:
            window = window << _BITS | token & _TOKEN
        return self._find(text, window)

    def _find(self, text: Sequence[int], window: int) -> tuple[int, int]:
        for n, mask, mark in self._tables:
            position = self._follower.get(window & mask | mark, -1) if n <= len(text) else -1
            if position >= 0:
                return self._longest_match(text, position) if n == self._largest else (n, position)
        return 0, 0

    def _longest_match(self, text: Sequence[int], position: int) -> tuple[int, int]:
        """Among `position` and those chained to it, the one with most tokens in common before it."""
        best, place = self._num_common(text, position), position
        for _ in range(MAX_CANDIDATES - 1):
            position = self._before[position]
            if position < 0 or best >= min(MAX_MATCH, len(text)):
                break
            # The token that would make it longer is looked at first.
            if best < position and self.tokens[position - 1 - best] == text[-1 - best]:
                length = self._num_common(text, position)
                if length > best:
                    best, place = length, position
        return best, place

    def _num_common(self, text: Sequence[int], position: int) -> int:
        most = min(position, len(text), MAX_MATCH)
        for length in range(most):
            token = self.tokens[position - 1 - length]
            if token != text[-1 - length] or token == SEPARATOR:
                return length
        return most

    def continuation(self, limit: int) -> list[int]:
        """What followed the match of the text's own end, at most `limit` tokens; none where there is no match."""
        length, position = self.match()
        return self.read(position, limit) if length else []

    def read(self, position: int, limit: int) -> list[int]:
        """The tokens from `position` on, at most `limit`, up to a separator. Where the text ends they go on with
        themselves, as they would if they were appended (abab… → abab…)."""
        period = len(self.tokens) - position
        tokens = [self.tokens[position + offset % period] for offset in range(limit)]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens
