"""Lossless speculative sampling inside transformers' `generate()`, by one flag.

Importing this package changes nothing in transformers; `enable()` and `register()` do, and their handles undo it.
"""

from hf_specdec.config import SpeculativeConfig
from hf_specdec.integration import Handle, enable, register, report
from hf_specdec.registry import register_drafter, register_verifier
from hf_specdec.report import SpeculationReport

__all__ = [
    "Handle",
    "SpeculationReport",
    "SpeculativeConfig",
    "enable",
    "register",
    "register_drafter",
    "register_verifier",
    "report",
]

__version__ = "0.1.0"
