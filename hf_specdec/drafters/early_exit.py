"""The target's own first E layers draft, with its final norm and output head: no second model, no second cache.

    q(· | text) = softmax(head(norm(layer_E(… layer_1(embeddings)))))

Drafting reads nothing first: the target holds the keys of the first layers for all of the text, and those of drafted
tokens are written past its end into the same cache, where the verify pass writes them again. It pays for targets whose
early layers were trained to speak (layer dropout and an early-exit loss); on others few tokens are kept.

Source: Elhoushi et al. 2024, *LayerSkip* (arXiv 2404.16710), section 4.3.
"""

from typing import Any, ClassVar, cast, final

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Drafter, DraftRequest
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.host.draft_model import DraftModel
from hf_specdec.host.early_exit import ExitModel, exit_cost, exit_layer, why_no_exit, why_not_alone
from hf_specdec.registry import register_drafter

__all__ = ["EarlyExitDrafter"]


@final
class EarlyExitDrafter(ModelDrafter):
    """Drafts with the target's first `early_exit_layer` layers."""

    needs_model: ClassVar[bool] = False
    is_on_target_keys: ClassVar[bool] = True

    def __init__(self, request: DraftRequest) -> None:
        Drafter.__init__(self, request)
        number = exit_layer(request.target, request.config.early_exit_layer)
        self.model = cast(DraftModel, ExitModel(request, number))

    @classmethod
    def why_unfit(cls, target: Any) -> str | None:
        """See `Drafter.why_unfit`: a target without a list of layers, or with one layer."""
        return why_no_exit(target)

    @classmethod
    def check(cls, target: Any, config: SpeculativeConfig) -> None:
        """See `Drafter.check`: a layer that the target does not have."""
        if config.early_exit_layer is not None and why_no_exit(target) is None and not target.config.is_encoder_decoder:
            exit_layer(target, config.early_exit_layer)

    @classmethod
    def why_wrong(cls, target: Any, config: SpeculativeConfig) -> str | None:
        """See `Drafter.why_wrong`: layers that do not run without the others."""
        return why_not_alone(target, exit_layer(target, config.early_exit_layer))

    @classmethod
    def cost(cls, target: Any, config: SpeculativeConfig) -> float:
        """See `Drafter.cost`: by bytes."""
        return exit_cost(target, exit_layer(target, config.early_exit_layer))

    @classmethod
    def variant(cls, target: Any, config: SpeculativeConfig) -> str:
        """See `Drafter.variant`: each depth has its own costs and acceptance."""
        return f"layer {exit_layer(target, config.early_exit_layer)}"


register_drafter("early_exit", EarlyExitDrafter)
