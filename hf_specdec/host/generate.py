"""The way in: wraps of `GenerationMixin.generate` and `GenerationMixin._sample`.

The wrap of `generate` reads the flag. Without it the original runs, untouched. With it, the call's draft is found,
options of transformers' own assisted decoding are set aside, and a `Request` is put into a context variable; the
original `generate()` prepares everything and calls `_sample`, whose wrap takes the request and runs `host.call`.
"""

import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import transformers
from transformers import GenerationConfig, GenerationMixin

from hf_specdec.config import DRAFT_KEYS, Resolution, SpeculativeConfig, normalise, resolve
from hf_specdec.host import binding, masks
from hf_specdec.host.call import Request, choose_copy, decide_aside, run_call
from hf_specdec.host.drafts import MODEL_PLACE, find_draft
from hf_specdec.host.quantized import why_inexact
from hf_specdec.host.ranks import ranks_of, why_split
from hf_specdec.host.reasons import NOT_WORTH_IT, is_sampled, logger, mode_reason, warn_once, why_draft_unfit, why_plain
from hf_specdec.registry import DRAFTERS, lookup
from hf_specdec.statistics import SpeculationCounters

__all__ = ["TESTED_RANGE", "Hooks", "is_disabled", "unexpected_hooks"]

TESTED_RANGE = "5.17 to 5.24"
FLAG = "speculative_config"
# transformers' own ways of speculating: ours replaces them for a flagged call.
SET_ASIDE = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")

_REQUEST: contextvars.ContextVar[Request | None] = contextvars.ContextVar("hf_specdec_request", default=None)


def is_disabled() -> bool:
    """Whether ``HF_SPECDEC=0`` makes everything inert."""
    return os.environ.get("HF_SPECDEC", "").strip().lower() in ("0", "false", "off")


def unexpected_hooks() -> str | None:
    """What in this transformers does not look as the wraps need it, or None."""
    needed = {
        "_sample": (
            "input_ids",
            "logits_processor",
            "stopping_criteria",
            "generation_config",
            "synced_gpus",
            "streamer",
        ),
        "_prefill": ("input_ids", "generation_config", "model_kwargs"),
        "generate": ("generation_config", "assistant_model", "streamer"),
    }
    for name, parameters in needed.items():
        method = getattr(GenerationMixin, name, None)
        if method is None:
            return f"GenerationMixin.{name} is missing"
        missing = [p for p in parameters if p not in inspect.signature(method).parameters]
        if missing:
            return f"GenerationMixin.{name} takes no {missing[0]}"
    if not hasattr(transformers.cache_utils.Cache, "get_query_offset"):
        return "Cache.get_query_offset is missing"
    if not isinstance(getattr(masks.ALL_MASK_ATTENTION_FUNCTIONS, "_global_mapping", None), dict):
        return "the attention-mask registry looks different"
    return None


class _FlagOption:
    """The flag as an option of GenerationConfig: legal as a keyword, in JSON only where set, and plain data always."""

    def __get__(self, config: GenerationConfig | None, owner: type | None = None) -> Any:
        return None if config is None else vars(config).get(FLAG)

    def __set__(self, config: GenerationConfig, value: Any) -> None:
        vars(config)[FLAG] = normalise(value) if isinstance(value, SpeculativeConfig) else value

    def __delete__(self, config: GenerationConfig) -> None:
        vars(config).pop(FLAG, None)


class Hooks:
    """The two wraps and the mask registration; `install` and `uninstall` are each other's inverse."""

    def __init__(self) -> None:
        self._originals: dict[str, Callable] = {}
        self._masks: dict[str, Callable] = {}
        self._num_running = 0
        self.config_drafts = True
        self.lock = threading.RLock()

    def install(self) -> None:
        """Wrap. Call once until `uninstall`."""
        self._originals = {name: GenerationMixin.__dict__[name] for name in ("generate", "_sample")}
        wraps = {
            "generate": _wrap_generate(self._originals["generate"], self),
            "_sample": _wrap_sample(self._originals["_sample"]),
        }
        for name, wrap in wraps.items():
            setattr(GenerationMixin, name, wrap)
        GenerationConfig.speculative_config = _FlagOption()  # pyright: ignore[reportAttributeAccessIssue]
        self._masks = self._masks or masks.install_masks()

    def uninstall(self) -> None:
        """Put back the very objects that were found; the masks once no call needs them any more."""
        for name, original in self._originals.items():
            setattr(GenerationMixin, name, original)
        delattr(GenerationConfig, FLAG)
        self._originals = {}
        self._free_masks()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the masks wrapped for a call, which may outlive the last handle (in a streamer's thread)."""
        with self.lock:
            self._num_running += 1
            self._masks = self._masks or masks.install_masks()
        try:
            yield
        finally:
            with self.lock:
                self._num_running -= 1
                self._free_masks()

    def _free_masks(self) -> None:
        if not self._originals and not self._num_running:
            masks.uninstall_masks(self._masks)
            self._masks = {}


def _wrap_generate(original: Callable, hooks: Hooks) -> Callable:
    parameters = inspect.signature(original).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        keyword = kwargs.pop(FLAG, None)
        if len(args) > len(positional) or not kwargs.keys().isdisjoint(positional[: len(args)]):
            return original(self, *args, **kwargs)  # raises, in Python's own words
        kwargs.update(zip(positional, args, strict=False))
        config = kwargs.get("generation_config")
        if is_disabled() or getattr(config, "is_assistant", None) or kwargs.get("is_assistant"):
            return original(self, **kwargs)
        places = _places(self, keyword, config)
        if all(value is None for _, value in places):
            return _without_request(original, self, kwargs)
        resolution = resolve(places)
        if resolution.config is None:
            return _without_request(original, self, kwargs)
        with hooks.running():
            return _flagged_call(original, self, kwargs, resolution, hooks)

    return generate


def _places(model: Any, keyword: Any, config: GenerationConfig | None) -> list[tuple[str, Any]]:
    """Where the flag may stand, highest first."""
    of_model = getattr(model.generation_config, FLAG, None)
    if of_model is None and (bound := binding.bindings_of(model)):
        of_model = bound[-1].flag  # the user has put another generation config in place since `enable`
    return [
        ("the call's keyword", keyword),
        ("the call's generation_config", _without_same_draft(getattr(config, FLAG, None), of_model)),
        (MODEL_PLACE, of_model),
    ]


def _without_same_draft(flag: Any, below: Any) -> Any:
    """`flag` as a layer over `below`; a copy of the model's own config (servers pass one) describes no new draft."""
    if not (isinstance(flag, Mapping) and isinstance(below, Mapping)):
        return flag
    if any(flag.get(key) != below.get(key) for key in DRAFT_KEYS):
        return flag
    return {key: value for key, value in flag.items() if key not in DRAFT_KEYS}


def _without_request(original: Callable, model: Any, kwargs: dict[str, Any]) -> Any:
    if _REQUEST.get() is None:
        return original(model, **kwargs)
    token = _REQUEST.set(None)  # a plain call inside a flagged one
    try:
        return original(model, **kwargs)
    finally:
        _REQUEST.reset(token)


def _flagged_call(original: Callable, model: Any, kwargs: dict[str, Any], resolution: Any, hooks: Hooks) -> Any:
    started = time.perf_counter()
    assistant = kwargs.pop("assistant_model", None)
    kwargs.pop("assistant_tokenizer", None)
    ranks = ranks_of(model)
    with ranks.guard():
        if assistant is None:
            resolution = _with_early_exit(model, kwargs, resolution)
        found = find_draft(model, resolution, assistant, hooks.config_drafts)
        missing = ranks.first_text(found.why_plain)
    outer = _REQUEST.get()
    counters = SpeculationCounters(found.method)
    request = Request(model, resolution.config, found.draft, found.method, counters, missing, ranks=ranks)
    _set_aside(model, kwargs)
    options = _option_lookup(model, kwargs)
    token = _REQUEST.set(request)
    # The others wait in `_sample`: what keeps this rank from getting there has to be told.
    guard = ranks.guard() if is_sampled(model, options) else contextlib.nullcontext()
    try:
        with guard:
            output = original(model, **kwargs)
    finally:
        _REQUEST.reset(token)
    if not request.is_taken and request.num_nested == 0:
        request.fall_back(missing or mode_reason(model, options))
    request.counters.finish(time.perf_counter() - started)
    if request.counters.reason is not None:
        warn_once(model, request.counters.reason)
    report = request.counters.report()
    if outer is not None and outer.model is model:
        outer.counters.merge(request.counters)
        outer.num_nested += 1
    else:
        binding.record_report(model, report)
    if hasattr(output, "sequences"):
        output.speculation = report
    return output


def _option_lookup(model: Any, kwargs: dict[str, Any]) -> Callable[[str], Any]:
    places = [kwargs.get("generation_config"), model.generation_config]
    keywords = {name: value for name, value in kwargs.items() if value is not None}

    def option(name: str) -> Any:
        if name in keywords:
            return keywords[name]
        return next((v for p in places if (v := getattr(p, name, None)) is not None), None)

    return option


def _with_early_exit(model: Any, kwargs: dict[str, Any], resolution: Resolution) -> Resolution:
    """Where the flag names no draft, transformers' own option for drafting with the first layers does."""
    layer, config = _option_lookup(model, kwargs)("assistant_early_exit"), resolution.config
    is_off = "assistant_early_exit" in kwargs and kwargs["assistant_early_exit"] is None
    is_bound = resolution.inherits_draft and binding.bindings_of(model)
    if is_off or layer is None or config is None or is_bound or not {"method", "model"}.isdisjoint(config.given):
        return resolution
    kwargs["assistant_early_exit"] = None  # taken, not set aside
    try:
        config = dataclasses.replace(config, method="early_exit", early_exit_layer=layer)
    except (TypeError, ValueError) as error:
        error.add_note("early_exit_layer was read from: assistant_early_exit")
        raise
    return dataclasses.replace(resolution, config=config, is_bare_true=False)


def _set_aside(model: Any, kwargs: dict[str, Any]) -> None:
    """Switch transformers' own speculation off for this call."""
    option, names = _option_lookup(model, kwargs), []
    for name in SET_ASIDE:
        is_off = name in kwargs and kwargs[name] is None
        if not is_off and option(name) not in (None, False):
            names.append(name)
    config = kwargs.get("generation_config")
    if names and config is not None and not any(getattr(model.generation_config, name, None) for name in names):
        config = kwargs["generation_config"] = copy.copy(config)  # transformers warns of keywords beside a config
        for name in names:
            kwargs.pop(name, None)
            setattr(config, name, None)
    else:
        kwargs.update(dict.fromkeys(names))  # a keyword beats every config, None included
    if names:
        logger.warning("%s set aside: speculative_config is on for this call.", ", ".join(names))


def _runs_target(method: str) -> bool:
    drafter = lookup("method", DRAFTERS, method)
    return drafter.changes_target or drafter.is_on_target_keys


def _wrap_sample(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **inputs,
    ):
        def plain():
            return original(
                self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **inputs
            )

        request = _REQUEST.get()
        if request is None or request.model is not self or request.is_taken or generation_config.is_assistant:
            return plain()
        request.is_taken = True
        why = request.why_plain or why_plain(self, generation_config, logits_processor, synced_gpus, inputs, input_ids)
        why = why or why_split(self, request.draft, _runs_target(request.method))
        if why is None and request.config.on_inexact == "plain":
            why = why_inexact(self)
        if why is None and request.draft is not None:  # last: the target's own reasons say more
            why = why_draft_unfit(request.draft)
        if why is None:
            why = lookup("method", DRAFTERS, request.method).why_wrong(self, request.config)
        if why is None:
            choose_copy(request, input_ids)
        if why is None and (decision := decide_aside(request, input_ids, generation_config)) is not None:
            why, request.counters.decision = NOT_WORTH_IT, decision
        why = request.ranks.first_text(why)  # what one of them cannot, none may begin
        if why is not None:
            request.ranks.leave()
            request.fall_back(why)
            return plain()
        return run_call(request, input_ids, logits_processor, stopping_criteria, generation_config, streamer, inputs)

    return _sample
