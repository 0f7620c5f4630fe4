"""Drafters: whatever proposes tokens. One file, one class each."""

from hf_specdec.drafters.base import Draft, Drafter, DraftFailure, DraftPlan, DraftRequest, Offer

__all__ = ["Draft", "DraftFailure", "DraftPlan", "DraftRequest", "Drafter", "Offer"]
