"""Drafters: whatever proposes tokens. One file, one class each."""

from hf_specdec.drafters.base import Draft, Drafter, DraftFailure, DraftRequest

__all__ = ["Draft", "DraftFailure", "DraftRequest", "Drafter"]
