"""Lossless speculative sampling inside transformers' `generate()`, by one flag.

Importing this package changes nothing in transformers; `enable()` and `register()` do, and their handles undo it.
What needs torch or transformers is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_specdec.config import SpeculativeConfig
from hf_specdec.registry import register_drafter, register_verifier
from hf_specdec.report import SpeculationReport

if TYPE_CHECKING:
    from hf_specdec.candidates import SpeculativeCandidateGenerator
    from hf_specdec.integration import Handle, enable, register
    from hf_specdec.pair import load_pair
    from hf_specdec.token_counts import count_tokens

__all__ = [
    "Handle",
    "SpeculationReport",
    "SpeculativeCandidateGenerator",
    "SpeculativeConfig",
    "count_tokens",
    "enable",
    "load_pair",
    "register",
    "register_drafter",
    "register_verifier",
    "report",
]

__version__ = "0.1.0"

_LAZY = {
    "Handle": "hf_specdec.integration",
    "SpeculativeCandidateGenerator": "hf_specdec.candidates",
    "count_tokens": "hf_specdec.token_counts",
    "enable": "hf_specdec.integration",
    "load_pair": "hf_specdec.pair",
    "register": "hf_specdec.integration",
}


def report(model: Any) -> SpeculationReport | None:
    """What the last finished `generate()` with the flag did on `model`, None before the first.

    Args:
        model: the target, or a PEFT model, compiled model or pipeline around it.

    Returns:
        The report of this thread's last call, else of any thread's; nested generates of one call are summed.
    """
    return importlib.import_module("hf_specdec.integration").report(model)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
