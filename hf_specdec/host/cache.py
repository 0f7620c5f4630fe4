"""A key/value cache in which every row has its own length, so that rollback is an integer.

Rejected tokens differ from row to row. Instead of copying keys and values around, each layer keeps one buffer
``[batch, heads, capacity, head_dim]``; a pass over W tokens writes at slots ``length[row] .. length[row] + W - 1``;
commit or rollback sets ``length[row]``. Slots beyond a row's length hold stale keys: causality hides them (the query's
own slot is smaller) and the next pass overwrites them.

Prefill happens in transformers' own DynamicCache. `RaggedCache.take` moves its keys over, `give_back` moves them into
the same object again, so a caller's cache grows in place and stays an ordinary DynamicCache.

Sliding layers store slots from `base` on and drop what no live row can see any more when room runs out.
Leaves masks to `host.masks`, positions to `host.runner`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

__all__ = ["RaggedCache", "RowLengths", "unsupported_layer"]

# Room added when a buffer is full: at least this many slots, else half of what it holds (amortised O(1) copies a
# token).
MIN_GROWTH = 256

# Layers without keys of their own (shared or absent attention) pass through untouched; 5.17 has none.
_PASS_THROUGH: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


def unsupported_layer(cache: Cache) -> str | None:
    """Name of the first layer type of `cache` whose state cannot be rolled back per row, None if all can."""
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, *_PASS_THROUGH):
            return type(layer).__name__
    return None


class RowLengths:
    """How many slots of each row hold committed keys; shared by all layers of one cache.

    The host list is the truth (it follows the loop's one read per step); tensors are made from it once per device.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.set(lengths)

    def set(self, lengths: Sequence[int]) -> None:
        """Commit or roll back: `lengths` has one slot count per row."""
        self.host = list(lengths)
        self.longest = max(self.host)
        self.is_uniform = min(self.host) == self.longest
        self._on: dict[torch.device, Tensor] = {}
        self._slots: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> Tensor:
        """The lengths as an int64 tensor [batch] on `device`."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.host, dtype=torch.long, device=device)
        return self._on[device]

    def write_index(self, width: int, base: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and buffer indices [batch, width] at which a pass of `width` tokens writes."""
        key = (device, width, base)
        if key not in self._slots:
            rows = torch.arange(len(self.host), device=device)[:, None].expand(-1, width)
            slots = self.on(device)[:, None] + torch.arange(width, device=device) - base
            slots = slots.clamp(min=0)  # a row that has ended may stand before `base`; nobody reads what it gets
            self._slots[key] = rows, slots
        return self._slots[key]


class RaggedLayer(CacheLayerMixin):
    """One attention layer: buffers [batch, heads, capacity, head_dim], of which `lengths` says what counts."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, lengths: RowLengths, keys: Tensor, values: Tensor, base: int = 0) -> None:
        super().__init__()
        self.lengths, self.base = lengths, base
        self.device = keys.device
        room = keys.shape[-2] + MIN_GROWTH
        self.keys, self.values = _enlarged(keys, room), _enlarged(values, room)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the layer is made from filled buffers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write [batch, heads, width, head_dim] states at each row's length; return the buffers up to the longest
        row."""
        width = key_states.shape[-2]
        self.make_room(width)
        end = self.lengths.longest + width - self.base
        if self.lengths.is_uniform:
            self.keys[:, :, end - width : end] = key_states
            self.values[:, :, end - width : end] = value_states
        else:
            rows, slots = self.lengths.write_index(width, self.base, self.keys.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def make_room(self, width: int) -> None:
        """Make sure that a pass of `width` tokens fits; to be called before masks are sized."""
        needed, held = self.lengths.longest + width - self.base, self.keys.shape[-2]
        if needed > held:
            room = max(needed, held + max(MIN_GROWTH, held // 2))
            self.keys, self.values = _enlarged(self.keys, room), _enlarged(self.values, room)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots attended to, first slot) of the next pass."""
        return self.lengths.longest + query_length - self.base, self.base

    def get_seq_length(self) -> int:
        """Slots of the longest row."""
        return self.lengths.longest

    def get_max_length(self) -> int:
        """No maximum: -1, as DynamicLayer says it."""
        return -1

    def hand_back(self, layer: Any, width: int) -> None:
        """Move the first `width` slots of every row into `layer`, as plain decoding would have left it."""
        layer.keys = self.keys[:, :, :width].contiguous()
        layer.values = self.values[:, :, :width].contiguous()
        layer.is_initialized, layer.device = True, self.keys.device
        del self.keys, self.values  # frees the buffer before the next layer is copied


class RaggedSlidingLayer(RaggedLayer):
    """A sliding-window (or chunked) layer: bounded by the window and how far rows are apart, unless `keep_all`."""

    is_sliding = True

    def __init__(self, lengths: RowLengths, keys: Tensor, values: Tensor, base: int, window: int) -> None:
        super().__init__(lengths, keys, values, base)
        self.sliding_window = window
        self.live_rows: Sequence[int] | None = None  # None: every row

    def make_room(self, width: int) -> None:
        """First drop what no live row can see any more, then grow."""
        held = self.keys.shape[-2]
        if self.lengths.longest + width - self.base > held:
            rows = range(len(self.lengths.host)) if self.live_rows is None else self.live_rows
            shortest = min((self.lengths.host[row] for row in rows), default=self.lengths.longest)
            drop = shortest - self.sliding_window + 1 - self.base
            if drop > held // 4:  # less would not be worth a copy
                self.keys[:, :, : held - drop] = self.keys[:, :, drop:].clone()
                self.values[:, :, : held - drop] = self.values[:, :, drop:].clone()
                self.base += drop
        super().make_room(width)

    def hand_back(self, layer: Any, width: int) -> None:
        """As plain: the last `window - 1` slots, and how many were seen in all."""
        first = max(width - self.sliding_window + 1, 0) - self.base
        layer.keys = self.keys[:, :, max(first, 0) : width - self.base].contiguous()
        layer.values = self.values[:, :, max(first, 0) : width - self.base].contiguous()
        layer.cumulative_length = width
        layer.is_initialized, layer.device = True, self.keys.device
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(layer.device)
        del self.keys, self.values


class RaggedCache(Cache):
    """Per-row lengths over the layers of a prefilled DynamicCache.

    Args:
        source: the cache to take over; its layers are emptied until `give_back`.
        lengths: slots per row that count (at most what `source` holds).
    """

    #: whether some row's first slots are padding; set by whoever holds the padding mask
    is_padded = False

    def __init__(self, source: DynamicCache, lengths: Sequence[int]) -> None:
        self.source = source
        self.row_lengths = RowLengths(lengths)
        held = source.get_seq_length()
        super().__init__(layers=[self._taken(layer, held) for layer in source.layers])

    def _taken(self, layer, held: int):
        if type(layer) in _PASS_THROUGH or not layer.is_initialized:
            return layer
        keys, values = layer.keys, layer.values
        layer.keys = layer.values = None  # one layer's keys at a time exist twice
        if type(layer) is DynamicSlidingWindowLayer:
            base = held - keys.shape[-2]
            return RaggedSlidingLayer(self.row_lengths, keys, values, base, layer.sliding_window)
        return RaggedLayer(self.row_lengths, keys, values)

    def set_lengths(self, lengths: Sequence[int], live_rows: Sequence[int] | None = None) -> None:
        """Commit or roll back each row to `lengths` slots; rows not in `live_rows` no longer hold a window open."""
        self.row_lengths.set(lengths)
        for layer in self.layers:
            if isinstance(layer, RaggedSlidingLayer):
                layer.live_rows = live_rows

    def can_roll_back(self, length: int) -> bool:
        """Whether rows may be cut to `length` slots and written again: a sliding layer must still hold the window
        before it, and keys made in inference mode can only be changed there."""
        held = [layer for layer in self.layers if isinstance(layer, RaggedLayer)]
        if any(layer.keys.is_inference() for layer in held) and not torch.is_inference_mode_enabled():
            return False
        sliding = [layer for layer in held if isinstance(layer, RaggedSlidingLayer)]
        return all(layer.base <= max(0, length - layer.sliding_window + 1) for layer in sliding)

    def make_room(self, width: int) -> None:
        """Prepare passes over `width` slots past the longest row. Called before the forward, since masks are sized from
        `base`, and at lengths to which rows may be rolled back: only what they cannot see any more is dropped."""
        for layer in self.layers:
            if isinstance(layer, RaggedLayer):
                layer.make_room(width)

    def get_query_offset(self, layer_idx: int = 0):
        """First slot of the next pass: an int while rows are equally long and not padded, else an int64 tensor [batch].

        With an int, transformers reads the padding mask on the host in every pass, to see whether it can be skipped.
        """
        if self.row_lengths.is_uniform and not self.is_padded:
            return self.row_lengths.longest
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        device = layer.keys.device if isinstance(layer, RaggedLayer) else torch.device("cpu")
        return self.row_lengths.on(device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots of the longest row."""
        return self.row_lengths.longest

    def give_back(self, width: int) -> DynamicCache:
        """Return the source cache holding `width` slots of every row. This cache is empty afterwards."""
        for layer, original in zip(self.layers, self.source.layers, strict=True):
            if isinstance(layer, RaggedLayer):
                layer.hand_back(original, width)
        return self.source

    @property
    def nbytes(self) -> int:
        """Bytes held by the buffers."""
        held = [layer for layer in self.layers if isinstance(layer, RaggedLayer)]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in held)


def _enlarged(states: Tensor, room: int) -> Tensor:
    """`states` [batch, heads, slots, head_dim] in a buffer of `room` slots. The rest is zero: stale NaN would spread
    through softmax(…)·V even where the mask hides it."""
    *lead, slots, width = states.shape
    buffer = states.new_zeros((*lead, room, width))
    buffer[..., :slots, :] = states
    return buffer
