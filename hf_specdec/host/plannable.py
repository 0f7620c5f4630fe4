"""Which checkpoints can be planned: decoder-only causal LMs with attention, by their configs.

Knows nothing of sizes. Written against transformers 5.17 to 5.24.
"""

__all__ = ["check_has_weights", "check_plannable"]

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

_COUNTS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def check_plannable(config: Any, what: str, source: str) -> None:
    """Raise unless `config` is that of a decoder-only causal LM with attention, of positive size.

    Args:
        config: a config of transformers.
        what: "target" or "draft", for the message.
        source: where the config comes from, for the message.

    Raises:
        ValueError: it is not.
    """
    kind, text = getattr(config, "model_type", ""), config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(what, source, kind, "an encoder-decoder", "Pairs are loaded as decoder-only causal LMs.")
    is_both = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if is_both and not getattr(config, "is_decoder", False):
        raise _refused(what, source, kind, "an encoder", "Pairs are loaded as decoder-only causal LMs.")
    if getattr(text, "num_attention_heads", None) is None:
        raise _refused(
            what, source, kind, "a recurrent model without attention heads", "Recurrent models are not planned."
        )
    for name in _COUNTS:
        value = getattr(text, name, 1)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, (int, float)) and each < 1:
                raise ValueError(f"The config of the {what} {source!r} has {name}={value}, which must be at least 1.")


def _refused(what: str, source: str, kind: str, is_one: str, remedy: str) -> ValueError:
    return ValueError(f"The {what} {source!r} ({kind}) is {is_one}. {remedy}")


def check_has_weights(source: str, what: str, keywords: Mapping[str, Any] | None = None) -> None:
    """Raise if `source` is a folder without weights; a Hub id is left to the download.

    Raises:
        ValueError: there is a config only.
    """
    folder = Path(source)
    if not folder.is_dir() or (keywords or {}).get("subfolder"):
        return
    if not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        raise ValueError(
            f"The {what} {source!r} has a config and no weights (*.safetensors). Pass a folder that save_pretrained "
            "made; specdec plan needs the config only."
        )
