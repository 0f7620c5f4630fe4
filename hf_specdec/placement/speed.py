"""Tokens per second of a layout, from bytes and bandwidths.

    seconds(M rows) = Σ devices max(bytes / bandwidth + 2·weights·M / arithmetic, layers × launch)
                      + offloaded bytes / link + (devices - 1) × hop
    tokens/s(K)     = batch · (1 − α^(K+1)) / (1 − α) / (seconds(batch·(K+1)) + K · draft seconds(batch))

It chooses between layouts and says what to expect; draft lengths are chosen by measurement. α is assumed.
Staircases of kernels and communication between GPUs are left out.

Source of the second line: Leviathan et al. 2023, theorem 3.8.
"""

__all__ = ["LONGEST", "Layout", "PassTime", "Speeds", "pass_bytes_by_device", "predict"]

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hf_specdec.placement.machine import Key, Machine
from hf_specdec.placement.sizes import ModelSizes, Piece, Workload, touched

LONGEST = 32
"""Largest K that is looked at, where verify passes have room for it."""
LAUNCH_SECONDS = 0.26e-3
"""Of a layer, eager, on a GPU: its kernels are launched one by one. Qwen3-0.6B on an RTX 3090 and an 8B on an H100."""
QUANTIZED_LAUNCH_SECONDS = 0.40e-3
CPU_LAUNCH_SECONDS = 0.14e-3
HOP_SECONDS = 50e-6
"""Of handing activations to another GPU, the wait for them included."""


@dataclass(frozen=True)
class Layout:
    """One model on a machine.

    Attributes:
        sizes: the model.
        places: device of each of its pieces, by name.
        main: where offloaded pieces run.
    """

    sizes: ModelSizes
    places: Mapping[str, Key]
    main: Key

    def is_spilled(self, piece: Piece) -> bool:
        """Whether the piece has to be copied to `main` in every pass."""
        place = self.places[piece.name]
        return not isinstance(place, int) and place != self.main

    def runs_on(self, piece: Piece) -> Key:
        """Where the piece's products are made, and where its cache lies."""
        return self.main if self.is_spilled(piece) else self.places[piece.name]

    def held_bytes(self, piece: Piece) -> int:
        """What the piece takes where it lies: some quantizers leave spilled modules as they are."""
        return piece.plain_bytes if self.sizes.spills_plain and self.is_spilled(piece) else piece.held_bytes

    def read_bytes(self, piece: Piece) -> int:
        """What a pass may read of the piece's weights: all of what hooks copy, else what rows need."""
        return self.held_bytes(piece) if self.is_spilled(piece) else piece.read_bytes

    def layer_devices(self) -> dict[int, Key]:
        """Where each layer runs, hence where its cache lies."""
        devices: dict[int, Key] = {}
        for piece in self.sizes.pieces:
            if piece.layer is not None:
                devices.setdefault(piece.layer, self.runs_on(piece))
        return devices

    @property
    def num_running(self) -> int:
        """Devices on which layers run."""
        return len(set(self.layer_devices().values()))

    @property
    def spilled_bytes(self) -> int:
        """Copied in every pass."""
        return sum(self.held_bytes(piece) for piece in self.sizes.pieces if self.is_spilled(piece))

    @property
    def spilled_layers(self) -> int:
        """Layers of which some part is copied in every pass."""
        return len({p.layer for p in self.sizes.pieces if p.layer is not None and self.is_spilled(p)})


@dataclass(frozen=True)
class Speeds:
    """Predicted tokens per second of all rows together: plain, and with the best K >= 1.

    Attributes:
        draft_length: that K; 0 if plain is faster.
    """

    plain: float
    speculative: float | None = None
    draft_length: int = 0


def pass_bytes_by_device(layout: Layout, workload: Workload, rows: int = 1) -> dict[Key, float]:
    """Weights and half-full caches that a pass reads, by the device on which they lie."""
    read: dict[Key, float] = defaultdict(float)
    for piece in layout.sizes.pieces:
        share = 1.0 if layout.is_spilled(piece) else touched(piece.share, rows)
        read[layout.places[piece.name]] += layout.read_bytes(piece) * share
    for layer, key in layout.layer_devices().items():
        read[key] += layout.sizes.cache_read_bytes(workload, layer)
    return dict(read)


class PassTime:
    """Seconds of a pass of `layout` by its rows; what does not depend on them is added up once."""

    def __init__(self, layout: Layout, machine: Machine, workload: Workload) -> None:
        self._copying = 0.0
        self._fixed: dict[Key, float] = defaultdict(float)
        self._per_row: dict[Key, float] = defaultdict(float)
        self._experts: dict[tuple[Key, float], float] = defaultdict(float)
        layers: dict[Key, set[int]] = defaultdict(set)
        for piece in layout.sizes.pieces:
            key, is_spilled = layout.runs_on(piece), layout.is_spilled(piece)
            seconds = layout.read_bytes(piece) / machine[key].read_rate(piece.is_quantized and not is_spilled)
            if is_spilled:
                self._copying += _copy_seconds(layout, piece, machine)
            if is_spilled or piece.share >= 1:
                self._fixed[key] += seconds
            else:
                self._experts[key, piece.share] += seconds
            if piece.products:
                self._per_row[key] += 2 * piece.products * piece.share / machine[key].arithmetic
            if piece.layer is not None:
                layers[key].add(piece.layer)
        for layer, key in layout.layer_devices().items():
            self._fixed[key] += layout.sizes.cache_read_bytes(workload, layer) / machine[key].read_rate()
        slow = QUANTIZED_LAUNCH_SECONDS if layout.sizes.quantization else LAUNCH_SECONDS
        self._launches = {
            key: len(some) * (slow if isinstance(key, int) else CPU_LAUNCH_SECONDS) for key, some in layers.items()
        }

    def seconds(self, rows: int) -> float:
        """Of a pass over `rows` rows in all."""
        work = {key: seconds + rows * self._per_row[key] for key, seconds in self._fixed.items()}
        for (key, share), seconds in self._experts.items():
            work[key] = work.get(key, 0.0) + seconds * touched(share, rows)
        hops = HOP_SECONDS * (len(self._launches) - 1)
        return self._copying + hops + sum(max(seconds, self._launches.get(key, 0.0)) for key, seconds in work.items())


def _copy_seconds(layout: Layout, piece: Piece, machine: Machine) -> float:
    num_bytes, place = layout.held_bytes(piece), layout.places[piece.name]
    to_gpu = num_bytes / machine.link if isinstance(layout.main, int) else 0.0
    return to_gpu + (num_bytes / machine[place].bandwidth if place == "disk" else 0.0)


def predict(target: Layout, draft: Layout | None, machine: Machine, workload: Workload) -> Speeds:
    """Speeds of plain decoding and of the best fixed K."""
    batch, alpha = workload.max_batch, workload.acceptance_rate
    passes = PassTime(target, machine, workload)
    plain = batch / passes.seconds(batch)
    if draft is None:
        return Speeds(plain)
    drafting = PassTime(draft, machine, workload).seconds(batch)
    best, tokens = (0.0, 0), 1.0
    for length in range(1, min(LONGEST, workload.draft_length) + 1):
        tokens += alpha**length
        rate = batch * tokens / (passes.seconds(batch * (length + 1)) + length * drafting)
        best = max(best, (rate, length))
    return Speeds(plain, best[0], best[1] if best[0] > plain else 0)
