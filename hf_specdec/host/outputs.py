"""`return_dict_in_generate`: one entry per new token, although tokens come in blocks and rows run apart.

Scores, raw logits and hidden states of a block position belong to the column that they predicted. A row's entries
after its end are zeros (plain fills them with what its padded continuation gives; nobody can use that).
"""

from collections.abc import Sequence as Rows
from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

__all__ = ["OutputRecorder"]


class OutputRecorder:
    """Collects what the caller asked to see.

    Args:
        generation_config: the call's; its ``output_*`` and ``return_dict_in_generate`` decide what is kept.
    """

    def __init__(self, generation_config: Any) -> None:
        wants = bool(generation_config.return_dict_in_generate)
        self.returns_dict = wants
        self._scores: list[Tensor] | None = [] if wants and generation_config.output_scores else None
        self._logits: list[Tensor] | None = [] if wants and generation_config.output_logits else None
        self._hidden: list[tuple[Tensor, ...]] | None = [] if wants and generation_config.output_hidden_states else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is collected."""
        return self._scores is None and self._logits is None and self._hidden is None

    @property
    def wants_hidden_states(self) -> bool:
        """Whether forwards must return hidden states."""
        return self._hidden is not None

    def add_prefill(self, scores: Tensor, logits: Tensor, hidden_states: Any) -> None:
        """The first new column: `scores` and `logits` [batch, vocab], hidden states of the prefill as they are."""
        if self._scores is not None:
            self._scores.append(scores)
        if self._logits is not None:
            self._logits.append(logits)
        if self._hidden is not None:
            self._hidden.append(hidden_states)

    def add_block(
        self, scores: Tensor, logits: Tensor, hidden_states: Any, columns: Rows[int], counts: Rows[int]
    ) -> None:
        """A verified block.

        Args:
            scores, logits: float32 [batch, verify, vocab].
            hidden_states: per layer [batch, verify, hidden], or None.
            columns: per row, the new column (0 = first new token) that position 0 predicted.
            counts: per row, positions that were kept.
        """
        if self._scores is not None:
            _place(self._scores, scores, columns, counts)
        if self._logits is not None:
            _place(self._logits, logits, columns, counts)
        if self._hidden is not None:
            for row, (column, count) in enumerate(zip(columns, counts, strict=True)):
                for position in range(count):
                    while len(self._hidden) <= column + position:
                        self._hidden.append(
                            tuple(layer.new_zeros((layer.shape[0], 1, layer.shape[2])) for layer in hidden_states)
                        )
                    for kept, layer in zip(self._hidden[column + position], hidden_states, strict=True):
                        kept[row, 0] = layer[row, position]

    def scores_until(self, count: int) -> tuple[Tensor, ...] | None:
        """Scores of the first `count` new columns, as plain passes them to criteria."""
        return None if self._scores is None else tuple(self._scores[:count])

    def output(self, sequences: Tensor, count: int, cache: Any) -> Any:
        """What `generate()` returns: ids, or the dictionary with `count` entries per kind."""
        if not self.returns_dict:
            return sequences
        fields: dict[str, Any] = {
            "sequences": sequences,
            "scores": self.scores_until(count),
            "logits": None if self._logits is None else tuple(self._logits[:count]),
            "hidden_states": None if self._hidden is None else tuple(self._hidden[:count]),
        }
        names = GenerateDecoderOnlyOutput.__dataclass_fields__
        fields["cache" if "cache" in names else "past_key_values"] = cache
        return GenerateDecoderOnlyOutput(**fields)


def _place(entries: list[Tensor], block: Tensor, columns: Rows[int], counts: Rows[int]) -> None:
    for row, (column, count) in enumerate(zip(columns, counts, strict=True)):
        for position in range(count):
            while len(entries) <= column + position:
                entries.append(block.new_zeros((block.shape[0], block.shape[2])))
            entries[column + position][row] = block[row, position]
