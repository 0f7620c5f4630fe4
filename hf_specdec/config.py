"""The flag `speculative_config` as frozen, validated, JSON-safe data: its keys, where it may stand, and what wins.

The flag is None (not given), False (off), True (on with what the next place down gives), a method name, a dict, or a
`SpeculativeConfig`. It may stand at the call, in the call's generation config and in the model's; a dict is merged key
by key over the place below, and whoever names `method` or `model` describes a new draft, so the old one is dropped.

Keys are those of vLLM's SpeculativeConfig wherever it has one, so one dict serves both. Each of its keys is used, or
named once in the log as having no meaning here, or refused because it would change the target's distribution
(`config_keys`).

Knows nothing of models, tokenizers or transformers.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_specdec.config_keys import check_lookup, clean_value, shown, validated

__all__ = ["DRAFT_KEYS", "Resolution", "SpeculativeConfig", "normalise", "resolve"]

AUTO_DRAFT_LENGTH = 4  # where one number is wanted and nothing can be measured
DRAFT_KEYS = (
    "method",
    "model",
    "revision",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "early_exit_layer",
    "quantization",
    "dtype",
    "device",
    "draft_quantization",
    "draft_vocab",
)
"""Keys that describe the draft: naming `method` or `model` in a higher place drops all of them from below."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """One resolved flag. Fields are validated and turned into plain JSON values on construction.

    Attributes:
        method: name of a registered drafter. "auto": with a draft model and `num_speculative_tokens="auto"`, each row
            is served by a look-up in its own text ("ngram") where that pays and by the model where not; with an
            integer, by the model; without a model, by the look-up.
        model: the draft: a Hub id or a folder. None: the model bound by `enable`, or `assistant_model`.
        revision: branch, tag or commit of `model` on the Hub.
        num_speculative_tokens: tokens drafted in every step (K, at least 1), shorter only at limits. "auto": chosen
            before each step from what target and draft were measured to cost and how much was kept; 0, plain decoding,
            where nothing pays.
        draft_lengths: K of the call's first steps, one per step, 0 drafts nothing; then `num_speculative_tokens`
            holds. A report's `draft_lengths`, given with its call and seed, replays that call bit for bit.
        deterministic: under "auto", K comes from a table by batch size instead of measured times, so that one seed
            gives one text. An integer K always does.
        rejection_sample_method: name of a registered verifier; "block" accepts at least as many as "standard".
        on_inexact: for a target whose scores depend on what else is in a forward (`llm_int8_threshold` above 0):
            "speculate" and say so, or "plain".
        prompt_lookup_min: of "ngram" and "suffix": least tokens of the n-gram that is looked up. Where only this or
            only `prompt_lookup_max` is given, the other follows.
        prompt_lookup_max: of "ngram" and "suffix": most tokens of the n-gram that is looked up; of its occurrences the
            one that matches furthest back is taken.
        early_exit_layer: of "early_exit": the target's first layers that draft, fewer than it has. None: a quarter.
        quantization: of the draft: a method's name or a quantization config as a dict.
        dtype: of the draft: "auto" or the name of a torch dtype.
        device: of the draft: a torch device as a string, or the index of an accelerator.
        draft_quantization: draft with the plugin's own copy of the draft, its linear layers converted in memory:
            "int8" (torch's kernels for CPUs) or "nf4" (bitsandbytes; pays on CUDA and on CPUs with AVX512-BF16);
            "none": never. "auto": where K is chosen from measurement, a draft on the CPU is converted once what a copy
            would have saved so far is what making it takes; what is in use stands in `report.draft_quantization`, and
            a call that is replayed in another process has to name it.
        draft_vocab: draft only the most frequent ids, by a copy whose output head has no other rows: a number n (the n
            lowest ids), a file of token counts (see `hf_specdec.count_tokens`), or `{"size": n, "counts": file}`.
            Special tokens are always among them.

    Raises:
        TypeError, ValueError: a field has the wrong type, an unknown name, or asks for a lossy rule.
    """

    method: str = "auto"
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int | Literal["auto"] = "auto"
    draft_lengths: list[int] | None = None
    deterministic: bool = False
    rejection_sample_method: str = "block"
    on_inexact: Literal["speculate", "plain"] = "speculate"
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4
    early_exit_layer: int | None = None
    quantization: str | dict[str, Any] | None = None
    dtype: str | None = None
    device: str | int | None = None
    draft_quantization: str = "auto"
    draft_vocab: int | str | dict[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "SpeculativeConfig":
        """Keeps the names of the fields given: one left at its default neither overrides nor drops what is below."""
        self = super().__new__(cls)
        named = {**dict(zip(_FIELD_NAMES, args, strict=False)), **kwargs}
        object.__setattr__(self, "_given", frozenset(name for name, value in named.items() if value is not None))
        return self

    def __post_init__(self) -> None:
        for name in _FIELD_NAMES:
            value = getattr(self, name)
            value = _DEFAULTS[name] if value is None else value
            object.__setattr__(self, name, None if value is None else clean_value(name, value))
        self._settle_lookup()

    def _settle_lookup(self) -> None:
        """The end of the range of n that was not given follows the one that was."""
        given: frozenset[str] = vars(self)["_given"]
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if "prompt_lookup_min" not in given:
            object.__setattr__(self, "prompt_lookup_min", min(least, most))
        elif "prompt_lookup_max" not in given:
            object.__setattr__(self, "prompt_lookup_max", max(least, most))
        check_lookup(self.prompt_lookup_min, self.prompt_lookup_max)

    @property
    def given(self) -> frozenset[str]:
        """The fields that were given."""
        return vars(self)["_given"]

    @property
    def draft_length(self) -> int:
        """Tokens to draft in one step (K)."""
        return AUTO_DRAFT_LENGTH if self.num_speculative_tokens == "auto" else int(self.num_speculative_tokens)

    def to_dict(self) -> dict[str, Any]:
        """`method` and every field that differs from its default, as plain JSON data."""
        values = {name: getattr(self, name) for name in _FIELD_NAMES}
        kept = {name: value for name, value in values.items() if name == "method" or value != _DEFAULTS[name]}
        return json.loads(json.dumps(kept))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SpeculativeConfig":
        """The config that a dict in `normalise`'s sense describes; keys not given take their defaults."""
        return cls(**validated(data))


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}
_FIELD_NAMES = tuple(_DEFAULTS)


@dataclass(frozen=True)
class Resolution:
    """What all places together say.

    Attributes:
        config: the config to decode with; None is off.
        inherits_draft: no place above the lowest named `method` or `model`, so that a draft object bound to the model
            by `enable` may be used.
        is_bare_true: on, and no place says anything more: the draft has to come from elsewhere.
        named_in: the place that named `config.model`; None when no place did.
        copy_named_in: the highest place that named `draft_quantization` or `draft_vocab`; None when no place did.
    """

    config: SpeculativeConfig | None
    inherits_draft: bool = True
    is_bare_true: bool = False
    named_in: str | None = None
    copy_named_in: str | None = None


def normalise(value: Any) -> bool | dict[str, Any] | None:
    """The flag's value as plain data: None, True, False, or a validated dict that holds only the keys given.

    A key whose value is None counts as not given. Keys of vLLM's without meaning here are named once and left out.

    Args:
        value: what stands at a place: None, bool, method name, mapping or `SpeculativeConfig`.

    Raises:
        TypeError: another type, for the flag or for one of its keys.
        ValueError: an unknown key or name, a value out of range, or a key that would make the text lossy.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, SpeculativeConfig):
        given: frozenset[str] = vars(value)["_given"]
        return validated({name: getattr(value, name) for name in _FIELD_NAMES if name in given})
    if isinstance(value, str):
        return validated({"method": value})
    if isinstance(value, Mapping):
        return validated(value)
    raise TypeError(
        "speculative_config must be True, False, None, a method name, a dict or a SpeculativeConfig, "
        f"got {shown(value)}. {_flag_hint(value)}"
    )


def resolve(places: Sequence[tuple[str, Any]]) -> Resolution:
    """Merges what all places say.

    Args:
        places: (name, value) from highest to lowest priority. All places, a place that gives nothing as None: the
            last one is where `enable` writes, and what it names does not drop the draft bound there.

    Raises:
        TypeError, ValueError: as `normalise`, with a note that names the place. Below a False nothing is looked at.
    """
    layers: list[tuple[str, dict[str, Any], bool]] = []
    for index, (place, value) in enumerate(places):
        plain = _normalised_at(place, value)
        if plain is False:
            break
        if plain is not None:
            layers.append((place, {} if plain is True else plain, index == len(places) - 1))
    if not layers:
        return Resolution(config=None)
    merged: dict[str, Any] = {}
    inherits_draft, named_in, copy_named_in = True, None, None
    for place, layer, is_lowest in reversed(layers):
        if "method" in layer or "model" in layer:
            merged = {key: value for key, value in merged.items() if key not in DRAFT_KEYS}
            inherits_draft = inherits_draft and is_lowest
            named_in, copy_named_in = (place if "model" in layer else None), None
        if "draft_quantization" in layer or "draft_vocab" in layer:
            copy_named_in = place
        merged.update(layer)
    return Resolution(SpeculativeConfig(**merged), inherits_draft, not merged, named_in, copy_named_in)


def _normalised_at(place: str, value: Any) -> bool | dict[str, Any] | None:
    try:
        return normalise(value)
    except (TypeError, ValueError) as error:
        error.add_note(f"speculative_config was read from: {place}")
        raise


def _flag_hint(value: Any) -> str:
    if isinstance(value, int):
        if value >= 1:
            return f'To draft {value} tokens in every step, pass {{"num_speculative_tokens": {value}}}.'
        return "To decode without drafting, pass speculative_config=False."
    if callable(getattr(value, "generate", None)):
        return (
            "A loaded draft goes to hf_specdec.enable(target, draft), or to "
            "generate(assistant_model=draft, speculative_config=True)."
        )
    return 'For example {"model": "small-model", "num_speculative_tokens": 4}.'
