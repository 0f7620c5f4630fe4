"""A mode under which every read of a tensor's values by the host is an error, so that CPU tests guard CUDA graphs."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READING_OPERATORS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
_INDEXING_OPERATORS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_MASK_DTYPES = (torch.bool, torch.uint8)
# These copy values out without passing the dispatcher.
_READING_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class HostReadError(AssertionError):
    """A tensor operation needed values on the host, or had a shape that depends on values."""


class _ForbidReadingMethods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READING_METHODS:
            raise HostReadError(f"Tensor.{func.__name__} reads values on the host.")
        return func(*args, **(kwargs or {}))


class ForbidHostReads(TorchDispatchMode):
    """Raise `HostReadError` on .item(), bool(tensor), .tolist(), nonzero, unique, boolean masks and their like.

    Use as ``with ForbidHostReads(): step(...)``. Building the inputs belongs before the block.
    """

    def __init__(self):
        super().__init__()
        self._methods = _ForbidReadingMethods()

    def __enter__(self):
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *exc_info):
        result = super().__exit__(*exc_info)
        self._methods.__exit__(*exc_info)
        return result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _READING_OPERATORS:
            raise HostReadError(f"{func} reads values on the host, or its shape depends on them.")
        if name in _INDEXING_OPERATORS and any(_is_mask(index) for index in args[1]):
            raise HostReadError(f"{func} with a boolean mask: its shape depends on values.")
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            raise HostReadError(f"{func} without output_size reads the total on the host.")
        return func(*args, **(kwargs or {}))


def _is_mask(index) -> bool:
    return index is not None and index.dtype in _MASK_DTYPES
