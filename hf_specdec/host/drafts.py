"""Finds the draft of a call, and says why there is none."""

from typing import Any, NamedTuple

from transformers import PreTrainedModel

from hf_specdec.config import Resolution, SpeculativeConfig
from hf_specdec.drafters import Drafter
from hf_specdec.drafters.base_model import BaseModelDrafter  # noqa: F401  (registers "base")
from hf_specdec.drafters.composite import CompositeDrafter  # noqa: F401  (registers "auto", "draft_model" and "ngram")
from hf_specdec.drafters.early_exit import EarlyExitDrafter  # noqa: F401  (registers "early_exit")
from hf_specdec.drafters.suffix import SuffixDrafter  # noqa: F401  (registers "ngram" and "suffix")
from hf_specdec.host import binding
from hf_specdec.host.conversions import settle
from hf_specdec.host.draft_copy import own_copy
from hf_specdec.host.draft_model import output_vocab_size
from hf_specdec.host.loading import find_tokenizer, load_draft
from hf_specdec.host.reasons import NO_DRAFT
from hf_specdec.registry import DRAFTERS, lookup
from hf_specdec.vocabulary import check_vocabularies

__all__ = ["MODEL_PLACE", "check_pair", "find_draft"]

#: the lowest place of the flag, as `config.Resolution.named_in` calls it
MODEL_PLACE = "model.generation_config"
AUTO, MODEL = "auto", "draft_model"


def check_pair(target: Any, draft: Any) -> None:
    """Raise unless `draft` can draft for `target`, token for token.

    Raises:
        TypeError: `draft` is not a loaded model.
        ValueError: an encoder-decoder draft for a decoder-only target, or vocabularies that differ.
    """
    if not isinstance(draft, PreTrainedModel):
        raise TypeError(
            f"The draft must be a Hub id, a folder or a loaded PreTrainedModel, got {type(draft).__name__}."
        )
    if draft.config.is_encoder_decoder and not target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(draft).__name__} is an encoder-decoder model and {type(target).__name__} a decoder-only one: its "
            "tokens depend on an encoder input that the target does not have. Use a decoder-only draft with the same "
            "tokenizer."
        )
    if draft is not target:
        tokenizers = find_tokenizer(target), find_tokenizer(draft)
        check_vocabularies(output_vocab_size(target), output_vocab_size(draft), *tokenizers)


class Found(NamedTuple):
    """Who drafts in a call."""

    method: str
    """The drafter's name; "auto" only where more than one may serve a row."""
    draft: Any
    """The draft model, or None."""
    why_plain: str | None
    """Why nobody drafts, or None."""


def find_draft(target: Any, resolution: Resolution, assistant: Any, may_load: bool) -> Found:
    """Who drafts in a call with the flag on.

    Args:
        target: the model that generates.
        resolution: what the flag says, all places together; its config is not None.
        assistant: the call's `assistant_model`, which wins.
        may_load: whether a draft that is named in data may be loaded.

    Raises:
        ValueError: a draft or a setting that does not fit, or a draft named at the call that cannot be loaded.
    """
    config = resolution.config
    assert config is not None
    drafter: type[Drafter] = lookup("method", DRAFTERS, config.method)
    drafter.check(target, config)
    why = drafter.why_unfit(target)
    if why is not None or not drafter.needs_model:
        return Found(config.method, None, why)
    draft, is_auto = assistant, config.method == AUTO
    bound = binding.bindings_of(target)
    if resolution.inherits_draft and bound:
        draft = bound[-1].draft if draft is None else draft
        is_auto = is_auto or (bound[-1].is_auto and config.method == MODEL)
    if draft is None and config.model is not None:
        draft, why = _load_named(target, config, resolution.named_in, may_load)
    if draft is None:
        is_alone = config.method == AUTO and why is None
        return Found("ngram", None, None) if is_alone else Found(config.method, None, why or NO_DRAFT)
    check_pair(target, draft)
    draft, why = _own_copy(target, draft, resolution)
    method = config.method
    if is_auto:
        method = AUTO if config.num_speculative_tokens == "auto" else MODEL
    return Found(method, draft, why)


def _own_copy(target: Any, draft: Any, resolution: Resolution) -> tuple[Any, str | None]:
    config, bound = resolution.config, binding.bindings_of(target)
    assert config is not None
    # What `enable` was given is the user's code, although it stands in the model's config too.
    is_in_code = bool(bound) and bound[-1].flag.get("draft_vocab") == config.draft_vocab
    try:
        return own_copy(draft, config, target, is_in_code), None
    except (ImportError, OSError, ValueError) as error:
        if resolution.copy_named_in != MODEL_PLACE or bound:  # whoever names it in code wants to know
            raise
        return None, f"{NO_DRAFT}: {error}"


def _load_named(target: Any, config: SpeculativeConfig, named_in: str | None, may_load: bool) -> tuple[Any, str | None]:
    assert config.model is not None
    if not may_load:
        return None, f"{NO_DRAFT}: register(config_drafts=False) forbids loading {config.model!r}"
    drafts, failures = binding.loaded_drafts(target), binding.failed_drafts(target)
    key = repr((config.model, config.revision, config.dtype, config.device, config.quantization))
    is_of_model = named_in == MODEL_PLACE
    if key in drafts:
        return drafts[key], None
    if is_of_model and key in failures:  # looked for once per model, not at every call
        return None, f"{NO_DRAFT}: {failures[key]}"
    try:
        draft = load_draft(
            config.model,
            revision=config.revision,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            target=target,
            named_in_data=True,
        )
        check_pair(target, draft)
    except Exception as error:
        if not is_of_model:  # whoever names it at the call wants to know
            raise
        failures[key] = str(error)
        return None, f"{NO_DRAFT}: {error}"
    settle(target, draft, config)
    drafts[key] = draft
    return draft, None
