"""Axis names of the tensors in this package, as code.

`batch` rows · `seq` token positions of a text · `draft` drafted positions (K) · `verify` = draft + 1 positions scored
by one target forward · `vocab` token ids of the target. Shapes in signatures use these names (jaxtyping).

Knows nothing of models or caches.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = [
    "BatchFlags",
    "BatchInts",
    "DraftIds",
    "DraftProbs",
    "DraftUniforms",
    "SeqIds",
    "TargetProbs",
    "VerifyIds",
    "VerifyUniforms",
]

SeqIds = Int[Tensor, "batch seq"]
DraftIds = Int[Tensor, "batch draft"]
VerifyIds = Int[Tensor, "batch verify"]
DraftProbs = Float[Tensor, "batch draft vocab"]
TargetProbs = Float[Tensor, "batch verify vocab"]
DraftUniforms = Float[Tensor, "batch draft"]
VerifyUniforms = Float[Tensor, "batch verify"]
BatchInts = Int[Tensor, " batch"]
BatchFlags = Bool[Tensor, " batch"]
