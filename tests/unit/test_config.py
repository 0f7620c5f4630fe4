import copy
import dataclasses
import json
import logging
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import config_keys, registry
from hf_specdec.config import DRAFT_KEYS, Resolution, SpeculativeConfig, normalise, resolve

OWN_METHODS = "auto, base, draft_model, early_exit, ngram, suffix."
DRAFT_VOCAB = 'draft_vocab must be a number of ids, a file of token counts, or {"size": number, "counts": file}'
CALL, CALL_CONFIG, MODEL_CONFIG = "call keyword", "generation_config", "model.generation_config"


def exactly(text):
    return f"^{re.escape(text)}$"


def resolved(call=None, call_config=None, model_config=None):
    return resolve([(CALL, call), (CALL_CONFIG, call_config), (MODEL_CONFIG, model_config)])


# --- values -----------------------------------------------------------------------------------------------------------


def test_defaults_choose_drafter_and_length_and_verify_blocks():
    config = SpeculativeConfig()
    assert (config.method, config.num_speculative_tokens) == ("auto", "auto")
    assert config.rejection_sample_method == "block"
    assert config.to_dict() == {"method": "auto"}


def test_auto_is_four_where_nothing_can_be_measured():
    assert SpeculativeConfig(num_speculative_tokens="auto").draft_length == 4
    assert SpeculativeConfig(num_speculative_tokens=7).draft_length == 7


def test_config_survives_json_copy_and_pickle():
    config = SpeculativeConfig(
        model="small", revision="main", num_speculative_tokens=8, rejection_sample_method="standard",
        quantization={"quant_method": "bitsandbytes", "load_in_4bit": True}, dtype="bfloat16", device="cuda:1",
    )  # fmt: skip
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert normalise(twin) == normalise(config)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (500, 500),
        ("counts.json", "counts.json"),
        (Path("a") / "counts.txt", "a/counts.txt"),
        ({"counts": Path("counts.json"), "size": 500}, {"size": 500, "counts": "counts.json"}),
    ],
)
def test_a_short_list_becomes_plain_data(value, plain):
    assert normalise({"draft_vocab": value}) == {"draft_vocab": plain}
    config = SpeculativeConfig(draft_vocab=plain, draft_quantization="nf4")
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpeculativeConfig().model = "other"  # type: ignore[misc]


def test_config_does_not_share_the_callers_quantization_dict():
    quantization = {"load_in_4bit": True}
    config = SpeculativeConfig(quantization=quantization)
    quantization["load_in_4bit"] = False
    assert config.quantization == {"load_in_4bit": True}


def test_torch_objects_and_paths_become_plain_text():
    plain = normalise({"dtype": torch.bfloat16, "device": torch.device("cuda", 1), "model": Path("drafts") / "small"})
    assert plain == {"dtype": "bfloat16", "device": "cuda:1", "model": "drafts/small"}
    assert normalise({"dtype": "torch.float16", "device": 0}) == {"dtype": "float16", "device": 0}
    assert normalise({"dtype": "auto"}) == {"dtype": "auto"}


def test_every_field_has_a_rule_for_its_value():
    assert tuple(config_keys.USED_KEYS) == tuple(field.name for field in dataclasses.fields(SpeculativeConfig))
    assert set(DRAFT_KEYS) < set(config_keys.USED_KEYS)


@pytest.mark.parametrize("number", [0, -1])
def test_num_speculative_tokens_below_one_says_how_to_decode_without_drafting(number):
    with pytest.raises(
        ValueError,
        match=exactly(
            f'num_speculative_tokens must be at least 1 or "auto", got {number}. '
            "To decode without drafting, pass speculative_config=False."
        ),
    ):
        SpeculativeConfig(num_speculative_tokens=number)


@pytest.mark.parametrize(("value", "shown"), [(True, "True (bool)"), ("four", "'four' (str)"), (2.0, "2.0 (float)")])
def test_num_speculative_tokens_of_another_type_is_refused(value, shown):
    with pytest.raises(
        TypeError, match=exactly(f'num_speculative_tokens must be an integer of at least 1 or "auto", got {shown}.')
    ):
        normalise({"num_speculative_tokens": value})


@pytest.mark.parametrize(
    ("key", "value", "error", "text"),
    [
        ("method", 3, TypeError, "method must be a non-empty string, got 3 (int). Leave it out for the default."),
        ("revision", "", TypeError, "revision must be a non-empty string, got '' (str). Leave it out for the default."),
        ("dtype", "bfloat", ValueError, 'dtype must be "auto" or the name of a torch dtype such as "bfloat16", got '
                                        "'bfloat' (str)."),
        ("dtype", 16, TypeError, 'dtype must be "auto" or the name of a torch dtype such as "bfloat16", got 16 (int).'),
        ("device", "cudo", ValueError, 'device must be a torch device such as "cpu" or "cuda:0", or the index of an '
                                       "accelerator, got 'cudo'."),
        ("device", -1, ValueError, 'device must be a torch device such as "cpu" or "cuda:0", or the index of an '
                                   "accelerator, got -1."),
        ("draft_quantization", "nf5", ValueError, "Unknown draft_quantization 'nf5'. Did you mean 'nf4'? Available: "
                                                  "auto, int8, nf4, none."),
        ("draft_vocab", 0, ValueError, "draft_vocab must be at least 1, got 0. To draft all ids, leave it out."),
        ("draft_vocab", True, TypeError, "draft_vocab must be an integer of at least 1, got True (bool)."),
        ("draft_vocab", 0.5, TypeError, DRAFT_VOCAB + ", got 0.5 (float)."),
        ("draft_vocab", "", TypeError, DRAFT_VOCAB + ", got '' (str)."),
        ("draft_vocab", {"n": 5}, ValueError, DRAFT_VOCAB + ", got the key 'n' in it."),
        ("draft_vocab", {"size": 5}, TypeError, DRAFT_VOCAB + ", got None (NoneType) as counts."),
        ("draft_vocab", {"counts": "c"}, TypeError, "draft_vocab['size'] must be an integer of at least 1, got None "
                                                    "(NoneType)."),
        ("device", True, TypeError, 'device must be a torch device such as "cpu" or "cuda:0", or the index of an '
                                    "accelerator, got True (bool)."),
        ("draft_lengths", 4, TypeError, "draft_lengths must be a list of integers of at least 0, one per step, got 4 "
                                        "(int). For the same number in every step, pass num_speculative_tokens."),
        ("draft_lengths", [3, "2"], TypeError, "draft_lengths must be a list of integers of at least 0, one per step, "
                                               "got '2' (str) in it."),
        ("draft_lengths", (3, -1), ValueError, "draft_lengths must be a list of integers of at least 0, one per step, "
                                               "got -1 in it."),
        ("deterministic", 1, TypeError, "deterministic must be True or False, got 1 (int)."),
        ("on_inexact", "plainly", ValueError, "Unknown on_inexact 'plainly'. Did you mean 'plain'? Available: plain, "
                                              "speculate."),
        ("prompt_lookup_min", "2", TypeError, "prompt_lookup_min must be an integer of at least 1, got '2' (str)."),
        ("prompt_lookup_max", True, TypeError, "prompt_lookup_max must be an integer of at least 1, got True (bool)."),
        ("prompt_lookup_max", 0, ValueError, "prompt_lookup_max must be at least 1, got 0: it counts the tokens of an "
                                             "n-gram."),
        ("early_exit_layer", 0, ValueError, "early_exit_layer must be at least 1, got 0: it counts the target's layers "
                                            "that draft."),
        ("early_exit_layer", True, TypeError, "early_exit_layer must be an integer of at least 1, got True (bool)."),
        ("early_exit_layer", "2", TypeError, "early_exit_layer must be an integer of at least 1, got '2' (str)."),
        ("quantization", 4, TypeError, "quantization must be the name of a quantization method or a dict, got 4 (int). "
                                       "Of a quantization config object, pass its to_dict()."),
        ("quantization", {"dtype": torch.float16}, TypeError, "quantization must hold plain JSON values only: Object "
                                                              "of type dtype is not JSON serializable."),
    ],
)  # fmt: skip
def test_wrong_values_say_what_was_expected_and_what_came(key, value, error, text):
    with pytest.raises(error, match=exactly(text)):
        normalise({key: value})


def test_lookup_range_that_is_empty_is_refused_wherever_it_comes_together():
    text = exactly(
        "prompt_lookup_min must be at most prompt_lookup_max, got 4 and 3. Lower the one or raise the other; given "
        "alone, the other follows."
    )
    with pytest.raises(ValueError, match=text):
        normalise({"prompt_lookup_min": 4, "prompt_lookup_max": 3})
    with pytest.raises(ValueError, match=text):
        SpeculativeConfig("ngram", prompt_lookup_min=4, prompt_lookup_max=3)
    with pytest.raises(ValueError, match=text):
        resolved(call={"prompt_lookup_max": 3}, model_config={"method": "ngram", "prompt_lookup_min": 4})


@pytest.mark.parametrize(
    ("given", "both"),
    [
        ({}, (1, 4)),
        ({"prompt_lookup_min": 9}, (9, 9)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 3}, (1, 3)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 3}, (3, 3)),
    ],
)
def test_the_end_of_the_lookup_range_that_is_not_given_follows_the_other(given, both):
    config = SpeculativeConfig("ngram", **given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == both
    assert SpeculativeConfig.from_dict(config.to_dict()) == config


def test_a_loaded_draft_in_the_flag_is_refused_with_the_places_for_it():
    remedy = "hf_specdec.enable(target, draft), or to generate(assistant_model=draft, speculative_config=True)."
    draft = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(5)])
    with pytest.raises(
        TypeError,
        match=exactly(
            f"model must be a Hub id or a folder, got an object of type Sequential. A loaded draft goes to {remedy}"
        ),
    ):
        normalise({"model": draft})
    draft.generate = lambda: None
    with pytest.raises(TypeError) as caught:
        normalise(draft)
    assert str(caught.value).endswith(f"got an object of type Sequential. A loaded draft goes to {remedy}")


# --- names ------------------------------------------------------------------------------------------------------------


def test_own_names_are_valid_before_their_modules_register(monkeypatch):
    monkeypatch.setattr(config_keys, "DRAFTERS", {})
    monkeypatch.setattr(config_keys, "VERIFIERS", {})
    for rule in ("block", "standard"):
        assert SpeculativeConfig("draft_model", rejection_sample_method=rule).rejection_sample_method == rule
    with pytest.raises(
        ValueError, match=exactly("Unknown method 'draftmodel'. Did you mean 'draft_model'? Available: " + OWN_METHODS)
    ):
        normalise("draftmodel")
    with pytest.raises(
        ValueError,
        match=exactly("Unknown rejection_sample_method 'blok'. Did you mean 'block'? Available: block, standard."),
    ):
        normalise({"rejection_sample_method": "blok"})


def test_registered_names_are_valid(monkeypatch):
    monkeypatch.setitem(registry.DRAFTERS, "ours", object)
    monkeypatch.setitem(registry.VERIFIERS, "theirs", object)
    assert normalise({"method": "ours", "rejection_sample_method": "theirs"})["method"] == "ours"


@pytest.mark.parametrize("method", ["medusa", "eagle3", "mtp", "mlp_speculator"])
def test_methods_that_only_vllm_has_are_unknown(method, monkeypatch):
    monkeypatch.setattr(config_keys, "DRAFTERS", {})
    with pytest.raises(ValueError, match=rf"^Unknown method '{method}'\..* Available: {OWN_METHODS}$"):
        normalise({"method": method})


def test_a_hub_id_given_as_method_is_told_where_it_belongs():
    with pytest.raises(ValueError, match=r'To name a draft model, pass \{"model": "org/small"\}\.$'):
        normalise("org/small")


def test_unknown_key_names_the_nearest_and_the_list():
    with pytest.raises(
        ValueError,
        match=exactly(
            "Unknown speculative_config key 'num_speculative_token'. Did you mean 'num_speculative_tokens'? Available: "
            "deterministic, device, draft_lengths, draft_quantization, draft_vocab, dtype, early_exit_layer, method, "
            "model, num_speculative_tokens, on_inexact, prompt_lookup_max, prompt_lookup_min, quantization, "
            "rejection_sample_method, revision."
        ),
    ):
        normalise({"num_speculative_token": 4})
    with pytest.raises(ValueError, match=r"^Unknown speculative_config key 7\. Available: deterministic, "):
        normalise({7: 4})


# --- vLLM's keys ------------------------------------------------------------------------------------------------------

# The fields of vllm/config/speculative.py, newest first, then those of older releases.
VLLM_FIELDS = """
enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size quantization
moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab
prompt_lookup_max prompt_lookup_min parallel_drafting target_model_config target_parallel_config
num_speculative_tokens_per_batch_size draft_model_config draft_parallel_config suffix_decoding_max_tree_depth
suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config
rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
draft_sample_method dspark_draft_topk
disable_by_batch_size speculative_token_tree acceptance_method posterior_threshold posterior_alpha disable_mqa_scorer
disable_logprobs disable_log_stats enable_chunked_prefill synthetic_acceptance_rate
"""


@pytest.mark.parametrize("key", VLLM_FIELDS.split())
def test_every_key_of_vllm_is_known(key):
    assert normalise({key: None}) == {}
    known = [key in table for table in (config_keys.USED_KEYS, config_keys._NO_MEANING, config_keys._LOSSY_KEYS)]
    assert sum(known) == 1


def test_a_key_without_meaning_is_left_out_and_named_once(caplog, monkeypatch):
    monkeypatch.setattr(config_keys, "_named_keys", set())
    with caplog.at_level(logging.WARNING, "hf_specdec"):
        for _ in range(3):
            assert normalise({"method": "draft_model", "disable_by_batch_size": 8}) == {"method": "draft_model"}
    assert [record.getMessage() for record in caplog.records] == [
        "speculative_config key 'disable_by_batch_size' has no meaning here and is ignored: there is no request "
        "scheduler inside generate()."
    ]


@pytest.mark.parametrize(
    ("data", "start"),
    [
        ({"posterior_threshold": 0.09}, "posterior_threshold=0.09 is refused: typical acceptance keeps draft tokens"),
        ({"posterior_alpha": 0.3}, "posterior_alpha=0.3 is refused: typical acceptance keeps draft tokens"),
        ({"synthetic_acceptance_rates": [0.5]}, "synthetic_acceptance_rates=[0.5] is refused: synthetic acceptance"),
        ({"synthetic_acceptance_length": 2}, "synthetic_acceptance_length=2 is refused: synthetic acceptance"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method='synthetic' is refused: synthetic accept"),
        ({"acceptance_method": "typical_acceptance_sampler"}, "acceptance_method='typical_acceptance_sampler' is refu"),
        ({"acceptance_method": "lenient"}, "acceptance_method='lenient' is refused: only 'rejection_sampler'"),
        ({"draft_sample_method": "top1"}, "draft_sample_method='top1' is refused: only 'greedy' and 'probabilistic'"),
    ],
)
def test_keys_that_would_lose_the_law_are_refused(data, start):
    with pytest.raises(ValueError, match=f"^{re.escape(start)}.*Leave it out: every rule here is lossless\\.$"):
        normalise(data)


def test_a_lossy_rule_is_refused_by_the_dataclass_too():
    with pytest.raises(ValueError, match=r"^rejection_sample_method='synthetic' is refused"):
        SpeculativeConfig(rejection_sample_method="synthetic")


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_lawful_ways_to_draw_drafts_are_accepted(method):
    assert normalise({"draft_sample_method": method}) == {}


# --- the flag ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, True, False])
def test_switches_pass_as_they_are(value):
    assert normalise(value) is value


def test_text_is_a_method_and_a_dataclass_is_what_was_given_to_it():
    assert normalise("draft_model") == {"method": "draft_model"}
    assert normalise(SpeculativeConfig()) == {}
    assert normalise(SpeculativeConfig(num_speculative_tokens=4)) == {"num_speculative_tokens": 4}
    assert normalise(SpeculativeConfig("draft_model", None, dtype=None)) == {"method": "draft_model"}


@pytest.mark.parametrize(
    ("value", "end"),
    [
        (6, 'got 6 (int). To draft 6 tokens in every step, pass {"num_speculative_tokens": 6}.'),
        (0, "got 0 (int). To decode without drafting, pass speculative_config=False."),
        ([4], 'got [4] (list). For example {"model": "small-model", "num_speculative_tokens": 4}.'),
    ],
)
def test_other_types_are_refused_with_what_to_do(value, end):
    with pytest.raises(
        TypeError,
        match=exactly(
            f"speculative_config must be True, False, None, a method name, a dict or a SpeculativeConfig, {end}"
        ),
    ):
        normalise(value)


# --- places -----------------------------------------------------------------------------------------------------------


def test_nothing_given_is_off():
    assert resolved() == Resolution(config=None)
    assert resolve([]) == Resolution(config=None)


def test_false_is_off_whatever_stands_below():
    assert resolved(False, {"model": "a"}, {"model": "b"}).config is None
    assert resolved(None, False, {"model": "b"}).config is None
    assert resolved(False, {"no such key": 1}).config is None


def test_true_is_on_with_what_the_next_place_down_gives():
    resolution = resolved(True, None, {"model": "small", "num_speculative_tokens": 2})
    assert resolution.config == SpeculativeConfig(model="small", num_speculative_tokens=2)
    assert (resolution.inherits_draft, resolution.is_bare_true) == (True, False)
    assert resolution.named_in == MODEL_CONFIG


@pytest.mark.parametrize(
    "places", [(True, None, None), (None, True, True), (True, False, {"model": "small"}), (True, None, False)]
)
def test_true_with_nothing_below_is_bare(places):
    assert resolved(*places) == Resolution(SpeculativeConfig(), is_bare_true=True)


def test_dicts_merge_key_by_key():
    resolution = resolved(
        {"num_speculative_tokens": 8},
        {"rejection_sample_method": "standard", "num_speculative_tokens": 2},
        {"model": "small", "dtype": "float16"},
    )
    assert resolution.config == SpeculativeConfig(
        model="small", num_speculative_tokens=8, rejection_sample_method="standard", dtype="float16"
    )
    assert resolution.inherits_draft


@pytest.mark.parametrize("value", [{"model": "new"}, {"method": "draft_model", "model": "new"}])
def test_naming_a_model_drops_the_draft_from_below(value):
    below = {"model": "old", "revision": "r", "quantization": "bnb", "dtype": "float16", "device": 0}
    below |= {"draft_quantization": "nf4", "draft_vocab": 100}
    resolution = resolved(value, None, below | {"num_speculative_tokens": 3})
    method = value.get("method", "auto")
    assert resolution.config == SpeculativeConfig(method, model="new", num_speculative_tokens=3)
    assert not resolution.inherits_draft
    assert (resolution.named_in, resolution.copy_named_in) == (CALL, None)


def test_the_place_that_asks_for_a_copy_of_the_draft_is_known():
    below = {"model": "old", "draft_vocab": "counts.json"}
    assert resolved(None, None, below).copy_named_in == MODEL_CONFIG
    assert resolved({"num_speculative_tokens": 3}, None, below).copy_named_in == MODEL_CONFIG
    assert resolved({"draft_quantization": "int8"}, None, below).copy_named_in == CALL


@pytest.mark.parametrize("value", ["draft_model", {"method": "draft_model"}, SpeculativeConfig("draft_model")])
def test_naming_the_same_method_drops_the_draft_too(value):
    resolution = resolved(value, None, {"method": "draft_model", "model": "old"})
    assert resolution == Resolution(SpeculativeConfig("draft_model"), inherits_draft=False)


def test_the_lowest_place_keeps_the_draft_bound_there():
    resolution = resolved(None, None, {"method": "draft_model", "num_speculative_tokens": 2})
    assert resolution.inherits_draft
    assert resolution.named_in is None


def test_none_for_a_key_is_not_given():
    resolution = resolved({"model": None, "num_speculative_tokens": None}, None, {"model": "small"})
    assert resolution.config == SpeculativeConfig(model="small")
    assert resolution.inherits_draft


def test_a_dataclass_field_left_at_its_default_leaves_what_is_below():
    resolution = resolved(
        SpeculativeConfig(num_speculative_tokens=4), None, {"model": "s", "num_speculative_tokens": 9}
    )
    assert resolution.config == SpeculativeConfig(model="s", num_speculative_tokens=4)
    assert resolution.inherits_draft


def test_an_error_says_which_place_it_came_from():
    with pytest.raises(ValueError, match=r"^Unknown speculative_config key 'modl'") as caught:
        resolved(True, None, {"modl": "small"})
    assert caught.value.__notes__ == ["speculative_config was read from: model.generation_config"]


dicts = st.fixed_dictionaries(
    {},
    optional={
        "method": st.just("draft_model"),
        "model": st.sampled_from(["a", "b"]),
        "dtype": st.sampled_from(["float16", "bfloat16"]),
        "num_speculative_tokens": st.integers(1, 9) | st.just("auto"),
        "draft_lengths": st.lists(st.integers(0, 9), max_size=3),
        "deterministic": st.booleans(),
        "on_inexact": st.sampled_from(["speculate", "plain"]),
        "rejection_sample_method": st.sampled_from(["block", "standard"]),
    },
)
flags = st.one_of(st.none(), st.booleans(), dicts)


def reference(values):
    """The flag's rules, read aloud: the value of the highest place, over what the rest resolves to."""
    if not values:
        return None
    highest, below = values[0], reference(values[1:])
    if highest is None:
        return below
    if highest is False:
        return False
    highest, below = highest if isinstance(highest, dict) else {}, below or {}
    if "method" in highest or "model" in highest:
        below = {key: value for key, value in below.items() if key not in DRAFT_KEYS}
    return {**below, **highest}


@given(st.tuples(flags, flags, flags))
def test_resolve_follows_the_rules_for_any_three_places(values):
    expected = reference(values)
    resolution = resolved(*values)
    if not isinstance(expected, dict):
        assert resolution == Resolution(config=None)
        return
    assert resolution.config == SpeculativeConfig.from_dict(expected)
    assert resolution.is_bare_true == (not expected)
    assert (resolution.named_in is not None) == ("model" in expected)
    cut = values.index(False) if any(value is False for value in values) else 3
    above = [value for value in values[: min(cut, 2)] if isinstance(value, dict)]
    assert resolution.inherits_draft == (not any("method" in value or "model" in value for value in above))


@given(flags)
def test_normalise_is_idempotent_and_json_safe(value):
    plain = normalise(value)
    assert normalise(plain) == plain
    assert json.loads(json.dumps(plain)) == plain
