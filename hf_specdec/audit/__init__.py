"""The audit: what losslessness looks like on a user's own pair and prompts, measured, with a control that must fail."""

from hf_specdec.audit.checks import AuditResult, Check, Divergence
from hf_specdec.audit.running import run_audit

__all__ = ["AuditResult", "Check", "Divergence", "run_audit"]
