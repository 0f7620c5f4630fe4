"""Which ids a text needs: token counts from a user's own texts, their file, and the short list made from them.

A draft that only ever proposes the n most frequent ids reads n rows of its output head instead of all of them. Ids of
byte-pair vocabularies are numbered in the order of their merges, roughly their frequency in the tokenizer's own corpus:
without counts the lowest ids stand for the most frequent ones.

A file of counts is JSON, ``{"id": count, …}``, or text with one id per line, the most frequent first.

Knows nothing of models; a tokenizer is anything that turns a text into ids.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["count_tokens", "read_token_counts", "short_list"]

MAX_FILE_BYTES = 64 * 2**20
_BATCH = 256
_EXPECTED = 'JSON {"id": count, …} as hf_specdec.count_tokens writes it, or text with one id per line'


def count_tokens(tokenizer: Any, texts: Iterable[str], path: str | Path | None = None) -> dict[int, int]:
    """How often each id comes up in `texts`, the most frequent first.

    Args:
        tokenizer: the target's; called with a list of texts and ``add_special_tokens=False``.
        texts: of the kind that the target will write: its own answers, or code and documents like them.
        path: where to write the counts as JSON for ``draft_vocab``; None writes nothing.

    Raises:
        TypeError: `texts` is one string.
        ValueError: `texts` holds no token.
    """
    if isinstance(texts, str):
        raise TypeError("texts must be several strings, got one. Pass [text].")
    counts: Counter[int] = Counter()
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            _count(tokenizer, batch, counts)
            batch = []
    _count(tokenizer, batch, counts)
    if not counts:
        raise ValueError("texts hold no token. Pass texts of the kind that the target will write.")
    ordered = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    if path is not None:
        Path(path).write_text(json.dumps({str(token_id): count for token_id, count in ordered.items()}))
    return ordered


def _count(tokenizer: Any, texts: list[str], counts: Counter[int]) -> None:
    if texts:
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            counts.update(ids)


def read_token_counts(path: str | Path) -> list[int]:
    """The ids of a file of counts, the most frequent first; ids with a count of 0 are left out.

    Raises:
        ValueError: the file is too large or not in one of the two forms.
    """
    path = Path(path)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"The token counts {path.name!r} take more than 64 MiB. Expected {_EXPECTED}.")
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        ids = _ids_of_json(json.loads(text)) if text.lstrip().startswith(("{", "[")) else _ids_of_lines(text)
    except (TypeError, ValueError, RecursionError):
        ids = []
    if not ids or min(ids) < 0:
        raise ValueError(f"The token counts {path.name!r} cannot be read. Expected {_EXPECTED}.")
    return list(dict.fromkeys(ids))


def _ids_of_json(data: Any) -> list[int]:
    if not isinstance(data, Mapping):
        raise TypeError
    counts = [(int(token_id), float(count)) for token_id, count in data.items()]
    return [token_id for token_id, count in sorted(counts, key=lambda item: (-item[1], item[0])) if count > 0]


def _ids_of_lines(text: str) -> list[int]:
    return [int(line) for line in text.split()]


def short_list(num_ids: int, size: int | None, frequent: Iterable[int], always: Iterable[int]) -> list[int]:
    """The ids that a draft proposes, ascending.

    Args:
        num_ids: rows of the draft's output head.
        size: how many ids; `frequent` is cut to it, or filled up with the lowest ids. None: just `frequent`.
        frequent: ids, the most frequent first; none stands for the order of the ids themselves.
        always: ids that are in the list whatever their frequency (ends of texts, special tokens), besides `size`.

    Raises:
        ValueError: an id that the head does not have.
    """
    ids = list(frequent)
    if ids and max(ids) >= num_ids:
        raise ValueError(
            f"draft_vocab holds the id {max(ids):,}, and the draft has {num_ids:,} ids. "
            "Count with the tokenizer of this pair."
        )
    if size is not None:
        chosen = dict.fromkeys(ids[:size])
        lowest = iter(range(num_ids))
        while len(chosen) < min(size, num_ids):
            chosen.setdefault(next(lowest))
        ids = list(chosen)
    return sorted({*ids, *(token_id for token_id in always if 0 <= token_id < num_ids)})
