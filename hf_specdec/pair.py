"""`load_pair()`: a target and its draft, placed on what there is; and the plan alone, from configs.

    plan_pair   configs → skeletons on the meta device → `placement.planner` → a plan
    load_pair   the same, then the target as planned, enabled with the draft as planned

Everything that can be wrong is found before a weight is loaded. What is loaded are ordinary transformers models.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_specdec import integration
from hf_specdec.config import normalise
from hf_specdec.host.draft_copy import facts_of_copies
from hf_specdec.host.placement import find_machine, lay_out, load_target
from hf_specdec.host.plannable import check_has_weights, check_plannable
from hf_specdec.host.quantized_sizes import QUANTIZATIONS, nearest, read_quantization, tell_device
from hf_specdec.host.sizes import Skeleton, read_config, read_dtype
from hf_specdec.placement.advice import PLENTY, changes_that_fit, what_keeps_the_draft
from hf_specdec.placement.machine import Key, Machine, make_machine, read_bytes
from hf_specdec.placement.plan import Plan
from hf_specdec.placement.planner import make_plan
from hf_specdec.placement.sizes import Workload
from hf_specdec.placement.table import facts, table
from hf_specdec.vocabulary import check_vocabularies

__all__ = ["Placement", "load_pair", "plan_pair"]

logger = logging.getLogger("hf_specdec")


@dataclass(frozen=True)
class Placement:
    """What `load_pair` did; ``print(placement)`` shows it.

    Attributes:
        plan: what lies where, in bytes, and what is left.
        target_footprint, draft_footprint: bytes by ``get_memory_footprint()`` after loading; None without a draft.
        handle: what `enable` returned; ``handle.remove()`` leaves the target as an ordinary model.
    """

    plan: Plan
    target_footprint: int
    draft_footprint: int | None
    handle: integration.Handle = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON data; bytes."""
        footprints = {"target_footprint": self.target_footprint, "draft_footprint": self.draft_footprint}
        return {**self.plan.to_dict(), **footprints}

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.markup import escape

        yield table(self.plan)
        for fact in facts(self.plan):
            yield f"[dim]{escape(fact)}[/]"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())


@dataclass(frozen=True)
class _Wish:
    """What is to be planned, as it was asked for."""

    target: str
    draft: str | None
    quantization: Any = None
    dtype: Any = "auto"
    draft_dtype: Any = "float16"
    draft_quantization: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False
    must_load: bool = False

    def skeletons(self, machine: Machine) -> tuple[Skeleton, Skeleton | None]:
        """Both models on the meta device, as they would be loaded on `machine`."""
        config = read_config(self.target, self.revision, self.trust_remote_code)
        check_plannable(config, "target", self.target)
        draft_config = None if self.draft is None else read_config(self.draft, self.draft_revision)
        if draft_config is not None:
            check_plannable(draft_config, "draft", str(self.draft))
            check_vocabularies(_vocab_size(config), _vocab_size(draft_config))
        gpus = [device.name for device in machine.devices if device.is_gpu]
        for each in (config, draft_config):
            tell_device(each, gpus, self.must_load)
        dtype = read_dtype(self.dtype, config, "target")
        chosen = read_quantization(self.quantization, dtype, must_load=self.must_load)
        draft = None
        if draft_config is not None:
            draft_dtype = read_dtype(self.draft_dtype, draft_config, "draft")
            drafted = read_quantization(self.draft_quantization, draft_dtype, must_load=self.must_load)
            draft = Skeleton(draft_config, draft_dtype, drafted, _short(self.draft))
        return Skeleton(config, dtype, chosen, _short(self.target), self.trust_remote_code), draft


def _vocab_size(config: Any) -> int:
    return int(config.get_text_config(decoder=True).vocab_size)


def _short(source: str | None) -> str:
    return Path(source or "").name if Path(source or "").is_dir() else str(source)


def plan_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    machine: Machine | None = None,
    workload: Workload | None = None,
    has_advice: bool = True,
    **wish: Any,
) -> Plan:
    """Where `target` and `draft` would go, from their configs alone: no weight is read.

    Args:
        target, draft: Hub ids or folders.
        machine: the devices; by default this machine's.
        workload: what the caches have to hold.
        has_advice: whether to look for what would fit, if nothing does.
        **wish: quantization, dtype, draft_dtype, draft_quantization, revision, draft_revision, trust_remote_code, as
            `load_pair` has them.

    Raises:
        TypeError: a target or draft that is no name.
        ValueError: a config that is not there or no decoder-only causal LM, an unknown name, other vocabularies.
    """
    _check_sources(target, draft)
    asked = _Wish(str(target), None if draft is None else str(draft), **wish)
    return _planned(asked, machine or find_machine(), workload or Workload(), has_advice)


def _planned(wish: _Wish, machine: Machine, workload: Workload, has_advice: bool = True) -> Plan:
    target, draft = wish.skeletons(machine)
    plan = _plan_of(target, draft, machine, workload)
    if not has_advice or (plan.fits and (draft is None or plan.draft_device is not None)):
        return plan

    def replan(
        *,
        quantization: str | None = None,
        draft_quantization: str | None = None,
        max_length: int | None = None,
        has_draft: bool = True,
        spill_to: str | None = None,
        spill_bytes: int = PLENTY,
    ) -> Plan | None:
        models, place, work = (target, draft if has_draft else None), machine, workload
        if spill_to is not None:
            if spill_to in machine or (spill_to == "cpu" and not machine.running):
                return None
            more = make_machine({spill_to: spill_bytes}).devices
            place = replace(machine, devices=tuple(sorted((*machine.devices, *more), key=lambda d: d.key == "disk")))
        if quantization or draft_quantization:
            changed = replace(
                wish,
                quantization=quantization or wish.quantization,
                draft_quantization=draft_quantization or wish.draft_quantization,
                must_load=False,
            )
            models = changed.skeletons(place)
        if max_length is not None:
            work = replace(workload, max_length=max_length)
        return _plan_of(models[0], models[1], place, work)

    if plan.fits:
        kept = what_keeps_the_draft(plan, replan)
        return plan if kept is None else plan.noted(kept)
    return replace(plan, changes=tuple(changes_that_fit(plan, replan)))


def _plan_of(target: Skeleton, draft: Skeleton | None, machine: Machine, workload: Workload) -> Plan:
    if not machine.running:
        raise ValueError("There is no device to run on. Name a GPU or the CPU, with its memory.")
    plan = make_plan(target.sizes, None if draft is None else draft.sizes, machine, workload, lay_out(target))
    if plan.draft is None or plan.draft.dtype != "float16" or isinstance(plan.draft_device, int):
        return plan
    return replace(plan, draft=replace(plan.draft, dtype="bfloat16"))  # of the same size, and fast on a CPU


def load_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    quantization: Any = None,
    dtype: Any = "auto",
    draft_dtype: Any = "float16",
    draft_quantization: str | None = None,
    max_batch: int = 1,
    max_length: int = 8192,
    max_memory: Mapping[Any, str | int | float] | None = None,
    offload_folder: str | Path | None = None,
    headroom: float | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    **speculative: Any,
) -> tuple[Any, Any, Placement]:
    """Load `target` and `draft` where they fit best on this machine, ready to speculate.

    Args:
        target: Hub id or folder of the model that verifies.
        draft: Hub id or folder of a small model with the same tokenizer; None: look-ups draft.
        quantization: of the target: None, "nf4", "fp4", "int8", keywords of `BitsAndBytesConfig` as a dict, or a
            quantization config of transformers.
        dtype: of the target's weights that are not quantized; "auto" is the checkpoint's.
        draft_dtype: of the draft; float16 becomes bfloat16 where there is no GPU.
        draft_quantization: of the draft: None, "nf4", "fp4" or "int8".
        max_batch: rows of a call; with `max_length` what the KV caches of both have room for.
        max_length: tokens of a row, prompt included.
        max_memory: what may be used by device, e.g. ``{0: "20GiB", "cpu": "60GiB"}``; by default all that is free.
        offload_folder: where weights may go that fit nowhere else.
        headroom: share of each device's memory that stays free; by default 6 % of a GPU, 10 % of the CPU's.
        revision, draft_revision: branch, tag or commit on the Hub.
        trust_remote_code: whether code in the target's checkpoint may run; a draft's never does.
        model_kwargs: further keywords of the target's ``from_pretrained``.
        **speculative: keys of `SpeculativeConfig`, e.g. ``num_speculative_tokens=5``.

    Returns:
        (target, tokenizer, placement). The target is an ordinary transformers model, enabled; where it is spread over
        devices it has ``hf_device_map`` and accelerate's hooks. The placement says what lies where; print it.

    Raises:
        MemoryError: it does not fit; with the numbers, and what would fit.
        TypeError: an argument of another type.
        ValueError: an unknown quantization, dtype or key, a device that does not exist, a checkpoint without config or
            weights or of another kind of model, vocabularies that differ.
        ImportError: bitsandbytes is needed and missing. All of these before any weight is loaded.
    """
    _check_sources(target, draft)
    length = _checked(speculative, draft_quantization)
    if max_memory is not None and not isinstance(max_memory, Mapping):
        raise TypeError(
            f"max_memory must be a dict by device, such as {{0: '20GiB', 'cpu': '60GiB'}}, got {max_memory!r}."
        )
    workload = Workload(max_batch, max_length, **({} if length is None else {"draft_length": length}))
    limits = None if max_memory is None else {key: read_bytes(amount) for key, amount in max_memory.items()}
    machine = find_machine(limits, offload_folder, headroom)
    wish = _Wish(
        str(target),
        None if draft is None else str(draft),
        quantization,
        dtype,
        draft_dtype,
        draft_quantization,
        revision,
        draft_revision,
        trust_remote_code,
        must_load=True,
    )
    plan = _planned(wish, machine, workload)
    check_has_weights(wish.target, "target", model_kwargs)
    if wish.draft is not None:
        check_has_weights(wish.draft, "draft")
    if not plan.fits:
        raise MemoryError(plan.shortage + _advice(plan))
    for note in plan.notes:
        is_refused = draft is not None and plan.draft_device is None
        logger.log(logging.WARNING if is_refused else logging.INFO, "%s", note)
    tokenizer = AutoTokenizer.from_pretrained(str(target), revision=revision, trust_remote_code=trust_remote_code)
    model = _load(wish, plan, offload_folder, model_kwargs or {})
    if model.generation_config.pad_token_id is None:  # else every call says that it takes the end-of-text token
        model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    placed = _draft_keywords(wish, plan)
    if placed and not _has_room_for_a_copy(plan):
        placed["draft_quantization"] = "none"
    handle = integration.enable(model, wish.draft if placed else None, **speculative, **placed)
    plan = plan.noted(*facts_of_copies(_bound_draft(model)))
    return model, tokenizer, Placement(plan, model.get_memory_footprint(), _footprint(model), handle)


def _check_sources(target: Any, draft: Any) -> None:
    """Raise TypeError for what is no Hub id or folder."""
    for what, source in (("target", target), ("draft", draft)):
        if not isinstance(source, (str, Path)) and not (what == "draft" and source is None):
            raise TypeError(
                f"{what} must be a Hub id or a folder, got {type(source).__name__}. For loaded models: "
                "hf_specdec.enable(target, draft)."
            )


def _checked(speculative: Mapping[str, Any], draft_quantization: str | None) -> int | None:
    """K, if `speculative` orders one.

    Raises:
        TypeError, ValueError: a wrong key or value, or one that would place the draft elsewhere.
    """
    if draft_quantization is not None and draft_quantization not in QUANTIZATIONS:
        hint, listing = nearest(draft_quantization, QUANTIZATIONS), ", ".join(map(repr, QUANTIZATIONS))
        raise ValueError(f"Unknown draft_quantization {draft_quantization!r}.{hint} Available: {listing}, or None.")
    if own := [key for key in ("model", "device") if key in speculative]:
        raise ValueError(f"load_pair names and places the draft itself, got {own[0]}=…. Pass draft=… and max_memory=….")
    flag = normalise(dict(speculative)) if speculative else {}
    length = flag.get("num_speculative_tokens") if isinstance(flag, dict) else None
    return length if isinstance(length, int) else None


def _load(wish: _Wish, plan: Plan, offload_folder: str | Path | None, keywords: Mapping[str, Any]) -> Any:
    dtype = read_dtype(wish.dtype, read_config(wish.target, wish.revision, wish.trust_remote_code), "target")
    return load_target(
        wish.target,
        plan.device_map,
        dtype=dtype,
        quantization=read_quantization(wish.quantization, dtype)[1],
        revision=wish.revision,
        offload_folder=offload_folder,
        trust_remote_code=wish.trust_remote_code,
        **keywords,
    )


def _draft_keywords(wish: _Wish, plan: Plan) -> dict[str, Any]:
    """How the flag names the draft that was planned; empty if the plan goes without."""
    if wish.draft is None or plan.draft is None or plan.draft_device is None:
        return {}
    keywords = {
        "revision": wish.draft_revision,
        "dtype": plan.draft.dtype,
        "device": _torch_device(plan.draft_device),
        "quantization": wish.draft_quantization,
    }
    return {key: value for key, value in keywords.items() if value is not None}


def _torch_device(key: Key) -> str:
    return f"cuda:{key}" if isinstance(key, int) else key


def _has_room_for_a_copy(plan: Plan) -> bool:
    """Whether what the plan leaves free has room for an 8-bit copy of a draft on the CPU, and as much again.

    `host.conversions` may make one; by then it knows of what is free, but not of what the plan keeps for caches.
    """
    if plan.draft is None or plan.draft_device != "cpu":
        return True
    copy_bytes = plan.draft.weights // 2
    return any(use.label == "cpu" and use.headroom - use.reserve >= 2 * copy_bytes for use in plan.devices)


def _bound_draft(model: Any) -> Any:
    from hf_specdec.host import binding

    drafts = [bound.draft for bound in binding.bindings_of(model) if bound.draft is not None]
    return drafts[-1] if drafts else None


def _footprint(model: Any) -> int | None:
    draft = _bound_draft(model)
    return None if draft is None else draft.get_memory_footprint()


def _advice(plan: Plan) -> str:
    if not plan.changes:
        return " No single change would make it fit: take a smaller model."
    return f" What would fit: {'; '.join(plan.changes)}."
