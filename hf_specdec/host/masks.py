"""Attention masks for rows of different lengths: one wrap around transformers' own mask functions.

transformers builds masks by index arithmetic: `mask_function(batch, head, query_slot, key_slot)`. When a cache reports
one query offset per row (a 1-D tensor) instead of an integer, the wrap adds the row's offset to the query index and
calls the original. Everything else (sliding windows, chunks, padding, dtype, block masks) stays transformers' work,
because slot distance is position distance within a row. With an integer offset the original is called untouched.
"""

import functools
from collections.abc import Callable

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

__all__ = ["RAGGED_IMPLEMENTATIONS", "install_masks", "uninstall_masks"]

RAGGED_IMPLEMENTATIONS = ("eager", "flex_attention", "sdpa")


def _shifted(mask_function: Callable, offsets: Tensor) -> Callable:
    """`mask_function` seen from queries that start at `offsets[batch]`."""

    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return mask_function(batch_idx, head_idx, q_idx + offsets[batch_idx], kv_idx)

    return inner_mask


def _per_row_offsets(original: Callable) -> Callable:
    @functools.wraps(original)
    def mask_with_row_offsets(*args, **kwargs):
        offsets = kwargs.get("q_offset", 0)
        if not isinstance(offsets, Tensor) or offsets.ndim != 1:
            return original(*args, **kwargs)
        # A skipped mask would be taken for a prefill (q > 1) or for "sees everything" (q = 1): rows need theirs
        # written out.
        kwargs.update(
            q_offset=0,
            mask_function=_shifted(kwargs.get("mask_function", causal_mask_function), offsets),
            allow_is_causal_skip=False,
        )
        return original(*args, **kwargs)

    return mask_with_row_offsets


def install_masks() -> dict[str, Callable]:
    """Wrap the registered mask functions; returns the originals for `uninstall_masks`."""
    mapping = type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
    originals = {name: mapping[name] for name in RAGGED_IMPLEMENTATIONS if name in mapping}
    for name, original in originals.items():
        mapping[name] = _per_row_offsets(original)
    return originals


def uninstall_masks(originals: dict[str, Callable]) -> None:
    """Put the very objects that `install_masks` found back."""
    type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping.update(originals)
