"""This machine's devices, accelerate's layout of a model on them, and loading a target as planned.

Two habits of accelerate's layout are met. It keeps room for the largest layer on the first device even if nothing is
offloaded: without offload that room is added to what it may use. It counts a cache as lying with its layer's weights:
`placement.planner` reserves the caches of offloaded layers where these run.

Written against accelerate 1.x and transformers 5.17 to 5.24.
"""

__all__ = ["find_machine", "lay_out", "load_target"]

import contextlib
import copy
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes, get_balanced_memory
from accelerate.utils.modeling import get_max_layer_size
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec.host.memory import available_memory
from hf_specdec.host.sizes import Skeleton
from hf_specdec.placement.machine import Key, Machine, make_machine, read_bytes

_LOUD_LOGGERS = ("accelerate.utils.modeling", "accelerate.big_modeling")


def find_machine(
    max_memory: Mapping[Any, str | int] | None = None,
    offload_folder: str | Path | None = None,
    headroom: float | None = None,
) -> Machine:
    """The devices that may be used here.

    Args:
        max_memory: by device (0, "cuda:0", "cpu", "disk"), as accelerate takes it; only these are used. By default all
            GPUs and the CPU with what is free.
        offload_folder: where weights may be offloaded to; without it nothing goes to disk.
        headroom: share of each device's memory that stays free.

    Raises:
        ValueError: a device that does not exist, an amount that cannot be read, disk without a folder.
    """
    free: dict[Key, int] = {}
    names: dict[Key, str] = {}
    for index in range(torch.cuda.device_count()):
        unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        free[index] = torch.cuda.mem_get_info(index)[0] + unused
        names[index] = torch.cuda.get_device_name(index)
    free["cpu"] = available_memory()
    if offload_folder is not None:
        existing = next(
            each
            for each in (Path(offload_folder).absolute(), *Path(offload_folder).absolute().parents)
            if each.exists()
        )
        free["disk"] = shutil.disk_usage(existing).free
    if max_memory is None:
        return make_machine(free, names, headroom=headroom)
    memory = {_key(key, free): read_bytes(amount) for key, amount in max_memory.items()}
    if "disk" in free and "disk" not in memory:
        memory["disk"] = free["disk"]
    return make_machine(memory, names, headroom=headroom)


def _key(key: Any, free: Mapping[Key, int]) -> Key:
    """`key` of max_memory as a device that exists here."""
    read = key
    if isinstance(key, str) and key.startswith("cuda:") and key[5:].isdigit():
        read = int(key[5:])
    if read == "disk" and "disk" not in free:
        raise ValueError("max_memory names 'disk', but there is no folder for the weights. Pass offload_folder='…'.")
    if read not in free:
        count = torch.cuda.device_count()
        raise ValueError(
            f"max_memory names device {key!r}, which does not exist: {count} CUDA devices are visible. Available: "
            f"{', '.join(map(repr, free))}."
        )
    return read


def lay_out(skeleton: Skeleton) -> Callable[..., dict[str, Key] | None]:
    """A `placement.planner.LayOut` of the skeleton's modules, which remembers its answers."""
    known: dict[tuple, dict[str, Key] | None] = {}

    def laid_out(
        budgets: Mapping[Key, int], cache_bytes: Sequence[int], *, is_balanced: bool, may_spill: bool
    ) -> dict[str, Key] | None:
        asked = (tuple(budgets.items()), tuple(cache_bytes), is_balanced, may_spill)
        if asked not in known:
            known[asked] = _laid_out(skeleton, budgets, cache_bytes, is_balanced, may_spill)
        return known[asked]

    return laid_out


def _laid_out(
    skeleton: Skeleton, budgets: Mapping[Key, int], cache_bytes: Sequence[int], is_balanced: bool, may_spill: bool
) -> dict[str, Key] | None:
    with skeleton.holding(cache_bytes) as model, _quiet():
        memory: dict[int | str, Any] = {key: budget for key, budget in budgets.items() if key != "disk"}
        if is_balanced:
            memory = dict(get_balanced_memory(model, memory, skeleton.no_split) or memory)
        if not may_spill:
            memory = {key: budget for key, budget in memory.items() if isinstance(key, int)}
            first = next(iter(memory))
            memory[first] += _largest_layer(model, skeleton.no_split)
        if "disk" in budgets and may_spill:
            memory["disk"] = budgets["disk"]
        # Buffers stand for caches here, which the planner puts where they will be.
        found = infer_auto_device_map(
            model, max_memory=memory, no_split_module_classes=skeleton.no_split, offload_buffers=True
        )
    device_map: dict[str, Any] = {str(name): place for name, place in found.items()}
    is_complete = "disk" not in device_map.values() or "disk" in memory  # accelerate always has a disk
    return device_map if is_complete else None


def _largest_layer(model: Any, no_split: list[str]) -> int:
    children = [*model.named_parameters(recurse=False), *model.named_children()]
    return int(get_max_layer_size(children, compute_module_sizes(model), no_split)[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of GPUs that are not here: plans are made for other machines too."""

    def is_news(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    loggers = [logging.getLogger(name) for name in _LOUD_LOGGERS]
    for logger in loggers:
        logger.addFilter(is_news)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_news)


def load_target(
    source: str,
    device_map: Mapping[str, Key],
    *,
    dtype: torch.dtype,
    quantization: Any,
    revision: str | None,
    offload_folder: str | Path | None,
    trust_remote_code: bool,
    **keywords: Any,
) -> PreTrainedModel:
    """The model at `source`, in eval mode, on the devices of `device_map`.

    Args:
        source: a folder or a Hub id.
        device_map: as planned.
        dtype: of what is not quantized.
        quantization: a config of transformers, or None.
        revision: branch, tag or commit on the Hub.
        offload_folder: for what goes to disk.
        trust_remote_code: whether code that the checkpoint brings may run.
        **keywords: further ones of ``from_pretrained``.
    """
    if quantization is not None:
        keywords["quantization_config"] = _with_offload(quantization, device_map)
    if "disk" in device_map.values():
        keywords["offload_folder"] = str(offload_folder)
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            dtype=dtype,
            device_map=dict(device_map),
            trust_remote_code=trust_remote_code,
            **keywords,
        )
    return model.eval()


def _with_offload(config: Any, device_map: Mapping[str, Key]) -> Any:
    """bitsandbytes' config, told that some modules are offloaded (and hence not quantized); others as they are."""
    places = set(device_map.values())
    if places == {"cpu"} or not places & {"cpu", "disk"} or not hasattr(config, "llm_int8_enable_fp32_cpu_offload"):
        return config
    config = copy.deepcopy(config)
    config.llm_int8_enable_fp32_cpu_offload = True
    return config
