"""How large a model is, part by part: what it holds, what a pass reads, what its cache and a pass need.

All in bytes. Knows nothing of devices; `host.sizes` fills these in from a config.
"""

__all__ = ["CACHE_GROWTH", "ModelSizes", "Piece", "Workload", "touched"]

import math
from dataclasses import dataclass, field

CACHE_GROWTH = 1.5
"""A full cache buffer grows by half of what it holds (`host.cache`)."""
MIN_GROWTH = 256
"""… or by this many slots."""
MOST_TOKENS = 1 << 40
"""Of all rows together; more would be bytes that no tensor can have."""
PROB_COPIES = 4
"""Float32 rows of a verify pass beside its logits: upcast, processed, probabilities, residual."""

MLP_WIDTHS = 4
"""Intermediate activations of a row that live at once, in a dense MLP or in each of its experts."""
ROUTED_STATES = 4
"""Hidden states of a row that live at once for each of its experts, when their results are added up."""
OTHER_STATES = 7
"""Hidden states of a row that live beside these, or at once in attention. All three by measured peaks of prefills of
llama, gpt2, gemma2 and four kinds of experts under transformers 5.24 (`tests/unit/test_pass_bytes.py`)."""


@dataclass(frozen=True)
class Workload:
    """What has to fit, and what is assumed of it.

    Attributes:
        max_batch: rows of a call.
        max_length: tokens of a row, prompt included.
        draft_length: K that the verify pass's rows are reserved for.
        acceptance_rate: share of drafted tokens that is assumed to be kept.
    """

    max_batch: int = 1
    max_length: int = 8192
    draft_length: int = 16
    acceptance_rate: float = 0.7

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_length", "draft_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer of at least 1, got {value!r}.")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.max_batch * (self.max_length + self.draft_length) > MOST_TOKENS:
            raise ValueError(
                f"max_batch={self.max_batch} rows of max_length={self.max_length} are more than {MOST_TOKENS:.2g} "
                "tokens, which no machine has room for."
            )
        if not 0 <= self.acceptance_rate <= 1:
            raise ValueError(f"acceptance_rate must be between 0 and 1, got {self.acceptance_rate}.")

    @property
    def rows(self) -> int:
        """Of a verify pass."""
        return self.max_batch * (self.draft_length + 1)


@dataclass(frozen=True)
class Piece:
    """A module with tensors of its own.

    Attributes:
        name: as in the model.
        weight_bytes: of its parameters and buffers as loaded; tied ones at their first owner only.
        state_bytes: of the quantizer's constants beside them.
        plain_bytes: of the same without quantization.
        read_bytes: of them, what a pass reads; little of an embedding that is not tied to the head.
        products: multiplications per row.
        share: of them that one row uses: chosen ÷ all experts, else 1.
        is_quantized: whether its weights are.
        layer: index of its decoder layer, None outside them.
    """

    name: str
    weight_bytes: int
    state_bytes: int = 0
    plain_bytes: int = 0
    read_bytes: int = 0
    products: int = 0
    share: float = 1.0
    is_quantized: bool = False
    layer: int | None = None

    @property
    def held_bytes(self) -> int:
        """As loaded, constants included."""
        return self.weight_bytes + self.state_bytes


def touched(share: float, rows: int) -> float:
    """Expected share of a layer's experts that a pass over `rows` rows reads, where each row goes through `share`."""
    return 1.0 if share >= 1 else 1 - (1 - share) ** rows


@dataclass(frozen=True)
class ModelSizes:
    """A model, as a planner sees it.

    Attributes:
        name: for people.
        pieces: its modules.
        slot_bytes: by layer, keys and values of one token.
        windows: by layer, tokens that it can look back on, None for all.
        head: name of the module whose output are the logits.
        hidden_size, intermediate_size, vocab_size: widths of activations, the second of the widest dense MLP.
        element_bytes: of an activation.
        largest_quantized: elements of the largest quantized weight, which kernels for many rows write out in full.
        dtype, quantization: for people.
        spills_plain: whether modules that are offloaded stay unquantized.
        expert_fan, expert_size: experts that a row goes through at once, and their intermediate width, or 0.
        is_pre_quantized: whether the checkpoint holds the weights quantized.
        max_positions: tokens that the model was made for, None if it does not say.
        eager_heads: heads whose score matrices are written out in full; 0 where attention is fused.
    """

    name: str
    pieces: tuple[Piece, ...]
    slot_bytes: tuple[int, ...]
    windows: tuple[int | None, ...]
    head: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    element_bytes: int
    largest_quantized: int = 0
    dtype: str = ""
    quantization: str | None = None
    spills_plain: bool = False
    expert_fan: int = 0
    expert_size: int = 0
    eager_heads: int = 0
    is_pre_quantized: bool = False
    max_positions: int | None = None
    num_layers: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", len(self.slot_bytes))

    @property
    def weight_bytes(self) -> int:
        """What ``get_memory_footprint()`` will say after loading."""
        return sum(piece.weight_bytes for piece in self.pieces)

    @property
    def held_bytes(self) -> int:
        """The same with the quantizer's constants, which that function leaves out."""
        return sum(piece.held_bytes for piece in self.pieces)

    def cache_bytes(self, workload: Workload) -> tuple[int, ...]:
        """By layer, the most that keys and values take for this workload."""
        return tuple(
            size * workload.max_batch * _slots(workload, window)
            for size, window in zip(self.slot_bytes, self.windows, strict=True)
        )

    def cache_read_bytes(self, workload: Workload, layer: int) -> float:
        """What a pass reads of that layer's cache, half full."""
        window = self.windows[layer]
        seen = min(workload.max_length / 2, window or workload.max_length)
        return self.slot_bytes[layer] * workload.max_batch * seen

    def pass_bytes(self, workload: Workload, is_draft: bool = False) -> int:
        """What a pass needs beside weights and cache: the larger of prefill and verify pass, and one weight written out
        in full."""
        e, tokens = self.element_bytes, workload.max_batch * workload.max_length
        routed = max(MLP_WIDTHS * self.expert_size + self.hidden_size, ROUTED_STATES * self.hidden_size)
        wide = max(MLP_WIDTHS * self.intermediate_size, self.expert_fan * routed) + OTHER_STATES * self.hidden_size
        if is_draft:  # keeps the K rows of q that its tokens were drawn from
            rows, copies = workload.max_batch, 2 + workload.draft_length
        else:
            rows, copies = workload.rows, PROB_COPIES
        seen = self._score_bytes * workload.max_length  # of one row against the whole text
        verify = rows * (self.vocab_size * (e + 4 * copies) + wide * e + seen)
        prefill = tokens * (wide * e + seen) + workload.max_batch * self.vocab_size * (e + 4)
        return max(verify, prefill) + self.largest_quantized * e

    @property
    def _score_bytes(self) -> int:
        """Of one row's scores for one token that it looks back on, masks included; 0 where attention is fused."""
        e = self.element_bytes
        upcast = 4 if e < 4 else 0
        masks = len(set(self.windows)) * e
        return self.eager_heads * (e + 4 + upcast) + masks if self.eager_heads else 0


def _slots(workload: Workload, window: int | None) -> int:
    """Slots of a row's buffer at most."""
    length = workload.max_length + workload.draft_length + 1
    if window is not None:
        length = min(length, window + workload.draft_length + 1)
    return max(math.ceil(length * CACHE_GROWTH), length + MIN_GROWTH)
