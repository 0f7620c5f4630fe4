"""Logits processors over a block: every position's scores as plain decoding computes them with that position's own
prefix.

Plain decoding calls the list once per token with ids [batch, length]. A block has W positions in each of B rows of
different lengths. Three ways to the same numbers, by what a processor looks at:

* *flat*: the scores alone (temperature, top-k …): one call on [B·W, vocab].
* *vectorised*: a tensor form of our own for those that everybody uses (repetition penalty, no-repeat-ngram, minimum
lengths).
* *exact calls*: one call per row and position on that very prefix, for the rest of the position-wise ones.

A processor is position-wise if it stands in a table here or says so (`position_wise = True`): called twice on the
same ids it answers the same. Others keep state or are not known: one row is then verified token by token
(`one_by_one`), several rows decode plainly.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_specdec.sequence import Sequence

__all__ = ["BlockProcessors", "processor_table", "why_not_in_batch", "why_not_position_wise"]


def _classes(*names: str) -> tuple[type, ...]:
    """Those of `names` that this transformers has."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


FLAT = _classes(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
EXACT_CALLS = _classes(
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
)
STATEFUL = _classes(
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WhisperNoSpeechDetection",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
)


def _prefix_lengths(sequence: Sequence, first: int, width: int) -> Tensor:
    """int64 [batch, width]: columns before each position of the block."""
    return sequence.lengths[:, None] + first + torch.arange(width, device=sequence.device)


def _repetition_penalty(processor, scores: Tensor, sequence: Sequence, first: int) -> Tensor:
    batch, width, vocab = scores.shape
    ignored = processor.prompt_ignore_length if getattr(processor, "prompt_ignore_length", None) is not None else 0
    ignored = ignored.to(scores.device)[:, None] if isinstance(ignored, Tensor) else ignored
    columns = torch.arange(sequence.ids.shape[1], device=scores.device)[None]
    committed = (columns >= ignored) & (columns < sequence.lengths[:, None])
    seen = torch.zeros((batch, vocab + 1), dtype=torch.bool, device=scores.device)
    ids = sequence.ids.clamp(max=vocab)  # ids past the head land in a spare column
    seen.scatter_(1, torch.where(committed, ids, vocab), True)
    seen = seen[:, None].expand(-1, width, -1)
    if first + width > 1:
        # Position w has also seen scratch tokens 0 … first + w - 1.
        order = torch.arange(first + width - 1, device=scores.device)
        columns = sequence.lengths[:, None] + order
        scratch = torch.where(columns >= ignored, ids.gather(1, columns), vocab)
        scratch = scratch[:, None].expand(-1, width, -1)
        reach = first + torch.arange(width, device=scores.device)[None, :, None]
        seen = seen.clone().scatter_(2, torch.where(order < reach, scratch, vocab), True)
    penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
    return torch.where(seen[..., :vocab], penalised, scores)


def _no_repeat_ngram(processor, scores: Tensor, sequence: Sequence, first: int) -> Tensor:
    size, (batch, width, vocab) = processor.ngram_size, scores.shape
    ends = _prefix_lengths(sequence, first, width)  # [batch, width]
    windows = (
        sequence.ids.unfold(1, size, 1) if sequence.ids.shape[1] >= size else sequence.ids.new_zeros((batch, 0, size))
    )
    starts = torch.arange(windows.shape[1], device=scores.device)
    match = starts[None, None] + size <= ends[..., None]  # whole window inside the prefix
    for offset in range(size - 1):  # over the n-gram's own positions, not over tokens
        suffix = sequence.ids.gather(1, (ends - (size - 1) + offset).clamp(min=0))
        match = match & (windows[:, None, :, offset] == suffix[..., None])
    banned = torch.zeros((batch, width, vocab + 1), dtype=torch.bool, device=scores.device)
    last = windows[:, None, :, -1].clamp(max=vocab).expand(-1, width, -1)
    banned.scatter_(2, torch.where(match, last, vocab), True)
    return scores.masked_fill(banned[..., :vocab], -float("inf"))


def _no_eos_before(minimum: int, processor, scores: Tensor, sequence: Sequence, first: int) -> Tensor:
    is_eos = torch.isin(torch.arange(scores.shape[-1], device=scores.device), processor.eos_token_id.to(scores.device))
    is_short = _prefix_lengths(sequence, first, scores.shape[1]) < minimum
    return scores.masked_fill(is_short[..., None] & is_eos, -float("inf"))


def _min_length(processor, scores: Tensor, sequence: Sequence, first: int) -> Tensor:
    return _no_eos_before(processor.min_length, processor, scores, sequence, first)


def _min_new_tokens(processor, scores: Tensor, sequence: Sequence, first: int) -> Tensor:
    minimum = processor.prompt_length_to_skip + processor.min_new_tokens
    return _no_eos_before(minimum, processor, scores, sequence, first)


VECTORISED: dict[type, Callable[..., Tensor]] = {
    logits_process.RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    logits_process.NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    logits_process.MinLengthLogitsProcessor: _min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
}


def processor_table() -> list[tuple[str, str]]:
    """(class name, how it runs in a block) for every processor that the tables know; the docs render it."""
    rows = [(cls.__name__, "one call for the whole block") for cls in FLAT]
    rows += [(cls.__name__, "vectorised over rows and positions") for cls in VECTORISED]
    rows += [(cls.__name__, "one exact call per row and position") for cls in EXACT_CALLS]
    rows += [(cls.__name__, "plain decoding: keeps state or couples rows") for cls in STATEFUL]
    return sorted(rows)


def why_not_in_batch(processors: LogitsProcessorList, batch: int) -> str | None:
    """The reason why a call of `batch` rows with `processors` decodes plainly, None if it does not.

    One row can be verified token by token with any processor (`one_by_one`) but those that are known to look elsewhere.
    """
    why = why_not_position_wise(processors)
    is_stateful = any(type(processor) in STATEFUL for processor in processors)
    return why if is_stateful or batch > 1 else None


def why_not_position_wise(processors: LogitsProcessorList) -> str | None:
    """The reason why a block cannot be scored with `processors`, None if it can."""
    for processor in processors:
        kind = type(processor)
        if kind in STATEFUL:
            return f"stateful logits processor {kind.__name__}"
        is_known = kind in FLAT or kind in VECTORISED or kind in EXACT_CALLS
        if not is_known and getattr(processor, "position_wise", False) is not True:
            return (
                f"logits processor {kind.__name__} is not known to be position-wise (position_wise = True declares it)"
            )
    return None


class BlockProcessors:
    """`processors` over blocks. The list and its members stay as they are.

    Args:
        processors: position-wise ones only, in plain's order.
        eos_ids: int64 [num_eos] or None; code of the caller's own is never asked what follows one of them.
    """

    def __init__(self, processors: LogitsProcessorList, eos_ids: Tensor | None = None) -> None:
        self.processors, self._eos_ids = list(processors), eos_ids
        self.raised: Exception | None = None  # a processor's last error, never to be taken for one of the draft
        kinds = [type(processor) for processor in self.processors]
        without_prefixes = (*FLAT, *VECTORISED)
        of_caller = [kind for kind in kinds if kind not in without_prefixes and kind not in EXACT_CALLS]
        #: whether code of the caller's own is asked: then the host must know which positions are real (another read);
        #: transformers' own processors answer for scratch that holds anything, and nobody looks at it
        self.needs_prefixes = bool(of_caller) or logits_process.PrefixConstrainedLogitsProcessor in kinds

    def __call__(self, scores: Tensor, sequence: Sequence, first: int = 0, real: Rows[int] | None = None) -> Tensor:
        """Processed scores.

        Args:
            scores: float32 [batch, width, vocab]; position w of row b follows `lengths[b] + first + w` ids.
            sequence: the text, drafted ids in its scratch.
            first: scratch tokens before position 0.
            real: positions per row that mean something (the rest may hold anything); None: all of rows that run.
        """
        width = scores.shape[1]
        if real is None:
            real = [0 if is_done else width for is_done in sequence.finished]
        if self.needs_prefixes:
            real = self._before_ends(sequence, first, real)
        try:
            return self._processed(scores, sequence, first, real)
        except Exception as error:
            self.raised = error
            raise

    def _processed(self, scores: Tensor, sequence: Sequence, first: int, real: Rows[int]) -> Tensor:
        for processor in self.processors:
            kind = type(processor)
            if kind in FLAT:
                flat = scores.reshape(-1, scores.shape[-1])
                scores = processor(sequence.ids[:1, :1].expand(flat.shape[0], 1), flat).view_as(scores)
            elif kind in VECTORISED:
                scores = VECTORISED[kind](processor, scores, sequence, first)
            else:
                scores = _exact_calls(processor, scores, sequence, first, real)
        return scores

    def _before_ends(self, sequence: Sequence, first: int, real: Rows[int]) -> list[int]:
        """`real`, cut where the scratch ends a row: plain asks neither behind an end-of-sequence id nor past the
        maximum length, and a grammar has no answer there."""
        if sequence.max_length is not None:
            room = [sequence.max_length - length - first for length in sequence.host_lengths]
            real = [max(0, min(pair)) for pair in zip(real, room, strict=True)]
        width = first + max(real) - 1
        if self._eos_ids is None or width < 1:
            return list(real)
        scratch = sequence.ids.gather(1, sequence.lengths[:, None] + torch.arange(width, device=sequence.device))
        is_eos = (scratch[..., None] == self._eos_ids.to(scratch.device)).any(dim=-1)
        before = (is_eos.cumsum(dim=1) == 0).sum(dim=1).tolist()  # scratch tokens before the first end
        return [min(count, max(0, n + 1 - first)) for count, n in zip(real, before, strict=True)]


def _exact_calls(processor, scores: Tensor, sequence: Sequence, first: int, real: Rows[int]) -> Tensor:
    """Call `processor` on every real prefix. Processors may hold tensors with one entry per row, so each call has
    all rows."""
    result = scores.clone()
    lengths = [length + first for length in sequence.host_lengths]
    is_level = len(set(lengths)) == 1
    for position in range(scores.shape[1]):
        rows = [row for row, count in enumerate(real) if position < count]
        if not rows:
            continue
        if is_level and len(rows) == len(lengths):
            ids = sequence.ids[:, : lengths[0] + position].contiguous()  # as plain's are: processors may view them
            result[:, position] = processor(ids, scores[:, position].clone())
            continue
        for row in rows:
            ids = sequence.ids[row : row + 1, : lengths[row] + position]
            result[row, position] = _one_row(processor, ids, scores[row : row + 1, position], row, len(lengths))
    return result


def _one_row(processor: Any, ids: Tensor, scores: Tensor, row: int, batch: int) -> Tensor:
    if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
        # The user's function must see this row under its own batch id and no other combination.
        allowed, beams = processor._prefix_allowed_tokens_fn, processor._num_beams
        single: Any = logits_process.PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row // beams, text), 1)
        return single(ids, scores.clone())[0]
    return processor(ids.repeat(batch, 1), scores.expand(batch, -1).clone())[row]
