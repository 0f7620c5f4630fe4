"""A PEFT-adapted target's own base model drafts: the same weights with the adapters off, no second model.

A draft forward costs as much as a target forward, so this pays only where adapters are what costs; it is exact in any
case.
"""

import dataclasses
from typing import Any, ClassVar, final

from hf_specdec.drafters.base import DraftRequest
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.host.adapters import adapters_off, in_turn, why_no_base
from hf_specdec.registry import register_drafter

__all__ = ["BaseModelDrafter"]


@final
class BaseModelDrafter(ModelDrafter):
    """Drafts with the target, adapters off; their state is as found after every forward, also after an exception."""

    needs_model: ClassVar[bool] = False
    changes_target: ClassVar[bool] = True

    def __init__(self, request: DraftRequest) -> None:
        super().__init__(dataclasses.replace(request, model=request.target), lambda: adapters_off(request.target))

    @classmethod
    def why_unfit(cls, target: Any) -> str | None:
        """A target without adapters, or with merged ones, has no other model to draft with."""
        with in_turn(target):  # another thread's call may have them off
            return why_no_base(target)


register_drafter("base", BaseModelDrafter)
