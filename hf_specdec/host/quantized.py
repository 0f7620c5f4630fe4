"""What bitsandbytes quantization means for speculation: scores that depend on the block, slow kernels, loud logs.

LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339) multiplies columns that hold an outlier, in *any* row of a forward,
in higher precision for *all* rows. With `llm_int8_threshold` above 0 a position's scores therefore depend on what else
is in the forward: on the block here, on the batch in plain decoding. With 0 rows are independent.

Reads the model's config only; does not import bitsandbytes.
"""

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import Version

__all__ = ["inexact_fact", "int8_threshold", "quiet_int8", "slow_rows_fact", "why_inexact"]

LOADING_LINE = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
# The first release with kernels for a few rows; older ones have them for one row only, and fall far back at two.
FAST_ROWS = Version("0.50")
_LOUD_LOGGER = "bitsandbytes.autograd._functions"
_LOUD_START = "MatMul8bitLt: inputs will be cast"


def _setting(model: Any, name: str) -> Any:
    """`name` of the model's quantization config, an object or a dict; None if there is none."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def int8_threshold(model: Any) -> float:
    """The outlier threshold of an LLM.int8() model; 0.0 for every other."""
    if not _setting(model, "load_in_8bit"):
        return 0.0
    threshold = _setting(model, "llm_int8_threshold")
    return 6.0 if threshold is None else float(threshold)  # bitsandbytes' and transformers' default


def inexact_fact(model: Any) -> str | None:
    """What a user should know of a target whose scores depend on the block, or None."""
    threshold = int8_threshold(model)
    if threshold <= 0:
        return None
    return (
        f"{type(model).__name__} is quantized by LLM.int8() with llm_int8_threshold={threshold:g}: a token's scores "
        "depend on what else is in the forward, here on the block, in plain decoding on the batch. For scores that do "
        f'not, load it with {LOADING_LINE}; on_inexact="plain" decodes plainly.'
    )


def why_inexact(model: Any) -> str | None:
    """The reason for plain decoding where the flag asks not to speculate on scores that depend on the block."""
    threshold = int8_threshold(model)
    return f'LLM.int8() with llm_int8_threshold={threshold:g} (on_inexact="plain")' if threshold > 0 else None


def slow_rows_fact(*models: Any) -> str | None:
    """That the installed bitsandbytes is slow at several rows, if one of `models` runs on it; else None."""
    if not any(_setting(model, "quant_method") == "bitsandbytes" for model in models):
        return None
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        return None
    if Version(version) >= FAST_ROWS:
        return None
    return (
        f"bitsandbytes {version} is slow at more than one row, and a verify pass has K + 1: "
        f"pip install 'bitsandbytes>={FAST_ROWS}'."
    )


@contextlib.contextmanager
def quiet_int8(*models: Any) -> Iterator[None]:
    """Without bitsandbytes' warning of every 8-bit product in every forward, if one of `models` is quantized so."""
    if not any(_setting(model, "load_in_8bit") for model in models):
        yield
        return

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_LOUD_START)

    logger = logging.getLogger(_LOUD_LOGGER)
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
