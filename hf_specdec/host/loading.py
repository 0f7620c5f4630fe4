"""Loading a draft by name, everything checked before any weights are read.

No remote code, safetensors only. A name *found in data* (generation_config.json, a request, a pipeline's dictionary) is
held to stricter rules (`sources`), and where it leads is logged once.

A draft is loaded once per process and shared by all targets that ask for the same; it goes when nobody holds it.

Knows nothing of drafting.
"""

__all__ = ["find_tokenizer", "load_draft"]

import contextlib
import difflib
import importlib.util
import inspect
import json
import logging
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

from hf_specdec.host.sources import IN_CODE, source_in_code, source_in_data

logger = logging.getLogger("hf_specdec")

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
QUANTIZATIONS = ("nf4", "fp4", "int8")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_loaded: weakref.WeakValueDictionary[tuple, PreTrainedModel] = weakref.WeakValueDictionary()
_tokenizers: weakref.WeakKeyDictionary[Any, PreTrainedTokenizerBase | None] = weakref.WeakKeyDictionary()
_announced: set[tuple[str, str]] = set()
_lock = threading.RLock()


def load_draft(
    model: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | int | torch.device | None = None,
    quantization: str | Mapping[str, Any] | None = None,
    target: PreTrainedModel,
    named_in_data: bool = False,
) -> PreTrainedModel:
    """The model called `model`, in eval mode, ready to draft for `target`.

    Args:
        model: a Hub id or a folder.
        revision: branch, tag or commit on the Hub.
        dtype: a torch dtype or its name; by default the one that the checkpoint was saved in.
        device: by default the device of the target's output head, where the drafted ids are compared.
        quantization: "nf4", "fp4", "int8", or keywords of `BitsAndBytesConfig`.
        target: the model that will verify; read, never changed.
        named_in_data: the name comes from a file or a request, not from the user's code.

    Raises:
        ValueError: the name, or one of the settings, cannot be used, and nothing has been loaded; or the files cannot.
        ImportError: `quantization` without bitsandbytes.
    """
    dtype = _read_dtype(dtype)
    device = _head_device(target) if device is None else _read_device(device)
    options = _read_quantization(quantization)
    source = source_in_data(model, target) if named_in_data else source_in_code(model)
    where = str(device), json.dumps(options, sort_keys=True, default=str), _stamp(source)
    asked = (source, revision, dtype, *where, named_in_data)  # what data may name is checked for its own sake
    with _lock:
        held = _held(asked, device)
        if held is not None:
            return held
        config = _read_config(source, revision, target, named_in_data)
        if named_in_data and (model, source) not in _announced:
            _announced.add((model, source))
            logger.warning("The draft %r is named in data, not in code; it is loaded from %s.", model, source)
        meant = (source, *_meant(config, revision, dtype), *where)
        draft = _held(meant, device)
        if draft is None:
            draft = _load(source, config, revision, dtype, device, options)
        _loaded[asked] = _loaded[meant] = draft
        return draft


def _stamp(source: str) -> tuple:
    """Changes when the files of a folder do: a draft that was trained on and saved again is another one."""
    if not Path(source).is_dir():
        return ()
    files = [file for pattern in ("*.json", "*.safetensors") for file in Path(source).glob(pattern)]
    return tuple(sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


def _held(key: tuple, device: torch.device) -> PreTrainedModel | None:
    """The draft that was loaded so before, if somebody still holds it and nobody has moved it since."""
    held = _loaded.get(key)
    if held is None or (held.device.type, held.device.index or 0) != (device.type, device.index or 0):
        return None
    return held


def _meant(config: PretrainedConfig | None, revision: str | None, dtype: str | torch.dtype) -> tuple[Any, Any]:
    """(commit, dtype) behind what was asked for: a branch and its newest commit are one draft, and so are "auto" and
    the dtype that the checkpoint was saved in."""
    commit, saved = getattr(config, "_commit_hash", None), getattr(config, "dtype", None)
    return commit or revision, saved if dtype == "auto" and isinstance(saved, torch.dtype) else dtype


def find_tokenizer(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved beside `model`'s weights, if it is on this machine; never downloads, never raises."""
    try:
        if model not in _tokenizers:
            _tokenizers[model] = _read_tokenizer(model)
        return _tokenizers[model]
    except TypeError:  # not weakly referable, hence not a torch module
        return None


def _read_tokenizer(model: Any) -> PreTrainedTokenizerBase | None:
    config = getattr(model, "config", None)
    name = getattr(model, "name_or_path", "") or getattr(config, "_name_or_path", "")
    if not isinstance(name, str) or not name:
        return None
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    revision = None if folder.is_dir() else getattr(config, "_commit_hash", None)
    with contextlib.suppress(Exception):
        return AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=True, trust_remote_code=False)
    return None


# --- settings -------------------------------------------------------------------------------------------------------


def _read_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    """`dtype` as ``from_pretrained`` wants it: "auto" or a torch dtype."""
    if dtype is None or dtype == "auto":
        return "auto"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"Unknown dtype {name!r} for the draft.{_nearest(name, DTYPES)} Available: {', '.join(DTYPES)}."
        )
    return getattr(torch, name)


def _read_device(device: str | int | torch.device) -> torch.device:
    """`device` as one that exists here, with its index."""
    try:
        read = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"Unknown device {device!r} for the draft. Write it as torch does: 'cpu', 'cuda', 'cuda:1'."
        ) from error
    if read.type == "meta":
        raise ValueError("device of the draft is 'meta', which holds no weights. Write 'cpu' or 'cuda'.")
    if read.type == "cuda":
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if read.index is None and count else read.index or 0
        if index >= count:
            raise ValueError(f"device of the draft is {device!r}, but {count} CUDA devices are visible. Write 'cpu'.")
        return torch.device("cuda", index)
    return read


def _read_quantization(quantization: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`quantization` as keywords of `BitsAndBytesConfig`."""
    if quantization is None:
        return None
    if isinstance(quantization, Mapping):
        options, known = dict(quantization), set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}
        for key in options:
            if key not in known | {"quant_method"}:
                listing = ", ".join(sorted(known))
                raise ValueError(f"Unknown key {key!r} in quantization.{_nearest(key, known)} Available: {listing}.")
    elif quantization in ("nf4", "fp4"):
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": quantization}
    elif quantization == "int8":
        options = {"load_in_8bit": True}
    else:
        raise ValueError(
            f"Unknown quantization {quantization!r}.{_nearest(quantization, QUANTIZATIONS)} "
            f"Available: {', '.join(QUANTIZATIONS)}, or a dict of BitsAndBytesConfig keywords."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            f"quantization={quantization!r} needs bitsandbytes, which is not installed: "
            "pip install 'hf_specdec[bitsandbytes]'."
        )
    return options


def _nearest(word: Any, words: Any) -> str:
    near = difflib.get_close_matches(str(word), list(words), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _head_device(target: PreTrainedModel) -> torch.device:
    """Where the target's logits appear: the device of its output head, or the CPU where that is offloaded to disk."""
    head = target.get_output_embeddings()
    device = head.weight.device if head is not None and hasattr(head, "weight") else target.device
    if device.type != "meta":
        return device
    # An offloaded head holds no weights between calls; the device map says where it lives.
    name = next((name for name, module in target.named_modules() if module is head), "")
    places = getattr(target, "hf_device_map", None) or {}
    for prefix in sorted(places, key=len, reverse=True):
        if prefix == "" or name == prefix or name.startswith(prefix + "."):
            place = places[prefix]
            return torch.device("cpu") if place in ("disk", "meta") else _read_device(place)
    return torch.device("cpu")


# --- loading --------------------------------------------------------------------------------------------------------


def _read_config(
    source: str, revision: str | None, target: PreTrainedModel, named_in_data: bool
) -> PretrainedConfig | None:
    """The draft's config, checked against the target's; None for an adapter, whose base model has it."""
    try:
        is_adapter = find_adapter_config_file(source, revision=revision) is not None
        config = None if is_adapter else AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:
        if isinstance(error, OSError) and not Path(source).is_dir():
            raise ValueError(
                f"Cannot find the draft {source!r}: it is no folder here, and the Hub has no such model or cannot be "
                "reached."
            ) from error
        raise _unreadable(source, error) from error
    if config is None:
        if named_in_data:  # an adapter's config names a base model, which could be anything anywhere
            raise ValueError(
                f"The draft {source!r} is named in data and is an adapter, whose base model could lie anywhere. "
                + IN_CODE
            )
        return None
    kernel = getattr(config, "_attn_implementation", None)
    if named_in_data and isinstance(kernel, str) and "/" in kernel:
        raise ValueError(
            f"The draft {source!r} is named in data and asks for code from {kernel!r}. Pass it in code instead."
        )
    if config.is_encoder_decoder and not target.config.is_encoder_decoder:
        raise ValueError(
            f"The draft {source!r} ({config.model_type}) is an encoder-decoder and the target "
            f"({target.config.model_type}) a decoder only. Use a decoder-only draft with the target's tokenizer."
        )
    return config


def _load(
    source: str,
    config: PretrainedConfig | None,
    revision: str | None,
    dtype: str | torch.dtype,
    device: torch.device,
    options: dict[str, Any] | None,
) -> PreTrainedModel:
    keywords: dict[str, Any] = {}
    if options is not None:
        options = dict(options)
        if options.get("load_in_4bit") and "bnb_4bit_compute_dtype" not in options:
            saved = getattr(config, "dtype", None) if dtype == "auto" else dtype
            options["bnb_4bit_compute_dtype"] = saved if isinstance(saved, torch.dtype) else torch.bfloat16
        keywords["quantization_config"] = BitsAndBytesConfig(**options)
    if options is not None or device.type != "cpu":
        keywords["device_map"] = {"": device}
    auto = AutoModelForSeq2SeqLM if config is not None and config.is_encoder_decoder else AutoModelForCausalLM
    try:
        loaded: Any = auto.from_pretrained(
            source,
            revision=revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **keywords,
        )
    except ImportError:  # says which package is missing
        raise
    except Exception as error:
        raise _unreadable(source, error) from error
    draft, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:  # transformers fills them with noise, which would draft in vain for ever
        raise ValueError(
            f"The checkpoint of the draft {source!r} lacks {len(missing)} of its weights, {missing[0]} among them. "
            "Download or save it again, or use another draft."
        )
    return draft.eval()


def _unreadable(source: str, error: Exception) -> ValueError:
    """One message for all that readers of damaged files raise: SafetensorError, KeyError, RuntimeError …"""
    if "trust_remote_code" in str(error):  # transformers' own advice does not lead anywhere here
        return ValueError(
            f"The draft {source!r} needs code of its own, and trust_remote_code is off for drafts. Load it yourself, "
            "then hf_specdec.enable(target, draft)."
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = ": ".join([type(error).__name__, *lines[:1]])[:250].rstrip(".:")
    return ValueError(
        f"Cannot load the draft {source!r}: {what}. If its files are damaged, download or save them again, or use "
        "another draft."
    )
