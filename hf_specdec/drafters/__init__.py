"""Drafters: whatever proposes tokens. One file, one class each."""

from hf_specdec.drafters.base import Draft, Drafter, DraftFailure, DraftRequest
from hf_specdec.drafters.model import ModelDrafter

__all__ = ["Draft", "DraftFailure", "DraftRequest", "Drafter", "ModelDrafter"]
