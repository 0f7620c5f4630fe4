"""Other packages that decode speculatively, as arms: the same loaded models, the same fixed K, greedy, one row.

They are not dependencies; an experiment's ``engines`` names them, and one that is not installed is left out with a
line. Written for flashspec 0.3.1 and economize 0.3.2.
"""

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_specdec.benchmark.arms import Arm, Decode
from hf_specdec.benchmark.experiment import Cell, is_greedy

__all__ = ["ENGINES", "Economize", "Engine", "FlashSpec", "is_installed"]


def is_installed(name: str) -> bool:
    """Whether the package `name` can be imported."""
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True)
class Engine(Arm):
    """Another package's loop, drafting `draft_length` tokens in every step."""

    name: str
    draft_length: int
    max_batch: ClassVar[int | None] = 1

    def fits(self, cell: Cell) -> bool:
        """See `Arm.fits`: one row, greedy."""
        return super().fits(cell) and is_greedy(cell.mode)


class FlashSpec(Engine):
    """flashspec's `SpeculativeEngine` with one drafter and one arm, uncompiled."""

    family: ClassVar[str] = "flashspec"

    @contextlib.contextmanager
    def set_up(self, target: Any, draft: Any) -> Iterator[Decode]:
        """See `Arm.set_up`."""
        import flashspec  # pyright: ignore[reportMissingImports]
        from flashspec.engine import ArmSpec, HuggingFaceDrafter, TargetModel  # pyright: ignore[reportMissingImports]

        device = target.device
        config = flashspec.FlashSpecConfig(
            device=str(device),
            dtype=str(target.dtype).removeprefix("torch."),
            compile=False,
            sampling=flashspec.SamplingConfig(temperature=0.0),
            bandit=flashspec.BanditConfig(n_arms=1),
        )
        drafter = HuggingFaceDrafter("draft", device, draft.dtype, model=draft)
        verifier = TargetModel("target", device, target.dtype, model=target)
        engine = flashspec.SpeculativeEngine(config, [drafter], verifier, arms=[ArmSpec(0, self.draft_length)])

        def decode(input_ids: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
            result = engine.generate(input_ids, max_new_tokens=max_new_tokens, eos_token_ids=_ends(target))
            return torch.cat([input_ids, result.output_ids[:, : result.n_tokens_generated]], dim=1)

        with _without_deprecations():
            yield decode


class Economize(Engine):
    """economize's `decode()` with a draft model; its cycle is K drafted tokens and the target's own."""

    family: ClassVar[str] = "economize"

    @contextlib.contextmanager
    def set_up(self, target: Any, draft: Any) -> Iterator[Decode]:
        """See `Arm.set_up`. The decoder is put together here, so that the draft that is loaded already is used."""
        from economize.arch import adapter_for  # pyright: ignore[reportMissingImports]
        from economize.decoding import CycleDecoder, DecodeConfig  # pyright: ignore[reportMissingImports]
        from economize.runtime import LayerRunner  # pyright: ignore[reportMissingImports]
        from economize.techniques.draft_model import DraftModelDrafter  # pyright: ignore[reportMissingImports]

        drafter = DraftModelDrafter(LayerRunner(adapter_for(draft)), target.get_output_embeddings().weight.shape[0])
        decoder = CycleDecoder(
            LayerRunner(adapter_for(target)), drafter, DecodeConfig(cycle_length=self.draft_length + 1)
        )

        @torch.no_grad()
        def decode(input_ids: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
            result = decoder.decode(input_ids[0], max_new_tokens, stop=_ends(target) or None)
            return torch.cat([input_ids, result.tokens[None].to(input_ids)], dim=1)

        with _without_deprecations():
            yield decode


ENGINES: dict[str, type[Engine]] = {"flashspec": FlashSpec, "economize": Economize}


def _ends(target: Any) -> list[int]:
    eos = target.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    """Engines may call transformers by names that it has deprecated; they say so once per call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
