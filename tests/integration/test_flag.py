"""Does the flag mean the same wherever it stands, and does the highest place win?"""

import copy
import json
import logging

import pytest
import torch
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration
from transformers.utils import logging as transformers_logging

import hf_specdec
from hf_specdec.drafters import Draft, Drafter
from hf_specdec.registry import DRAFTERS
from tests.integration.pairs import assert_as_plain, llama, noisy_copy, pair, prompts, speculates

NEW = 12


@pytest.fixture
def enabled():
    """(target, draft, plain ids) with the draft bound and K = 3."""
    target, draft = pair()
    plain = target.generate(**prompts(), max_new_tokens=NEW)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        yield target, draft, plain


@pytest.fixture
def registered():
    """(target, draft, plain ids), nothing bound."""
    target, draft = pair()
    plain = target.generate(**prompts(), max_new_tokens=NEW)
    with hf_specdec.register():
        yield target, draft, plain


def longest_draft(model):
    return max(speculates(model).draft_lengths)


def call_config(flag, **options):
    config = GenerationConfig(max_new_tokens=NEW, **options)
    config.speculative_config = flag
    return config


def test_call_keyword_beats_call_config_beats_model_config(enabled):
    target, _, plain = enabled
    inputs = prompts()
    assert_as_plain(target, plain, **inputs, max_new_tokens=NEW)
    assert longest_draft(target) == 3
    config = call_config({"num_speculative_tokens": 2})
    assert_as_plain(target, plain, **inputs, generation_config=config)
    assert longest_draft(target) == 2
    assert_as_plain(target, plain, **inputs, generation_config=config, speculative_config={"num_speculative_tokens": 5})
    assert longest_draft(target) == 5
    assert config.speculative_config == {"num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("keyword", "in_call_config"),
    [(None, None), (None, True), (True, None), ({}, {}), ({"num_speculative_tokens": None}, None)],
)
def test_none_means_not_given_at_every_place(enabled, keyword, in_call_config):
    target, _, plain = enabled
    config = call_config(in_call_config)
    assert_as_plain(target, plain, **prompts(), generation_config=config, speculative_config=keyword)
    assert longest_draft(target) == 3


def test_model_config_none_is_not_given_either(registered):
    target, _, plain = registered
    target.generation_config.speculative_config = None
    assert target.generate(**prompts(), max_new_tokens=NEW, speculative_config=None).tolist() == plain.tolist()
    assert hf_specdec.report(target) is None


@pytest.mark.parametrize("place", ["keyword", "call config", "model config"])
def test_false_is_off_at_every_place(enabled, place):
    target, _, plain = enabled
    options = {"max_new_tokens": NEW}
    if place == "keyword":
        options["speculative_config"] = False
    elif place == "call config":
        options = {"generation_config": call_config(False)}
    else:
        target.generation_config.speculative_config = False
    assert target.generate(**prompts(), **options).tolist() == plain.tolist()
    assert hf_specdec.report(target) is None
    if place == "model config":  # and a higher place switches on again
        assert_as_plain(target, plain, **prompts(), **options, speculative_config=True)


def test_false_below_gives_nothing_to_what_stands_above(registered):
    target, draft, plain = registered
    target.generation_config.speculative_config = {"num_speculative_tokens": 2}
    options = {"generation_config": call_config(False), "assistant_model": draft}
    assert_as_plain(target, plain, **prompts(), **options, speculative_config=True)
    assert longest_draft(target) == 4  # the default, not the 2 below the False


def test_true_with_nothing_below_looks_up_in_the_text_itself(registered):
    target, _, plain = registered
    for option in ({"speculative_config": True}, {"generation_config": call_config(True)}):
        assert target.generate(**prompts(), max_new_tokens=NEW, **option).tolist() == plain.tolist()
        report = hf_specdec.report(target)
        assert (report.method, report.reason) == ("ngram", None)


def test_true_takes_the_calls_assistant_model(registered):
    target, draft, plain = registered
    report = assert_as_plain(
        target, plain, **prompts(), max_new_tokens=NEW, assistant_model=draft, speculative_config=True
    )
    assert report.method == "auto"
    # … for a batch too, which transformers' own assisted decoding refuses.
    inputs = prompts(3)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    assert_as_plain(target, plain, **inputs, max_new_tokens=NEW, assistant_model=draft, speculative_config=True)


def test_true_in_the_model_config_takes_what_enable_bound(enabled):
    target, _, plain = enabled
    target.generation_config.speculative_config = True
    assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)


def test_another_assistant_model_replaces_the_draft_for_one_call(enabled):
    target, draft, plain = enabled
    calls = []
    draft.register_forward_hook(lambda *_: calls.append("bound"))
    other = noisy_copy(target, seed=9)
    other.register_forward_hook(lambda *_: calls.append("other"))
    assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW, assistant_model=other)
    assert set(calls) == {"other"}
    calls.clear()
    assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
    assert set(calls) == {"bound"}


def test_assistant_model_without_the_flag_is_transformers_own_business(registered, monkeypatch):
    target, draft, plain = registered
    assert_called = []
    original = type(target)._assisted_decoding
    monkeypatch.setattr(
        type(target), "_assisted_decoding", lambda *a, **k: assert_called.append(1) or original(*a, **k)
    )
    output = target.generate(**prompts(), max_new_tokens=NEW, assistant_model=draft)
    assert output.tolist() == plain.tolist()
    assert assert_called == [1]
    assert hf_specdec.report(target) is None


def test_flag_off_leaves_assistant_model_to_transformers_on_an_enabled_target(enabled):
    target, draft, _ = enabled
    with pytest.raises(ValueError, match="batch"):  # transformers' own words: it takes one row only
        target.generate(**prompts(2), max_new_tokens=NEW, assistant_model=draft, speculative_config=False)


def test_the_drafts_own_inner_calls_are_never_ours(registered):
    target, draft, plain = registered
    with hf_specdec.enable(draft, target):  # the draft is itself an enabled model
        output = target.generate(**prompts(), max_new_tokens=NEW, assistant_model=draft)
        assert hf_specdec.report(draft) is None
    assert output.tolist() == plain.tolist()
    config = call_config(True)
    config.is_assistant, config.assistant_confidence_threshold = True, 0.0
    with hf_specdec.enable(target, draft):
        target.generate(**prompts(), generation_config=config)
    assert hf_specdec.report(target) is None


def test_naming_a_method_drops_the_inherited_draft(enabled):
    target, _, plain = enabled
    for flag in ("draft_model", {"method": "draft_model"}):
        output = target.generate(**prompts(), max_new_tokens=NEW, speculative_config=flag)
        assert output.tolist() == plain.tolist()
        assert hf_specdec.report(target).reason == "no draft"


def test_naming_a_model_drops_the_inherited_draft(enabled, tmp_path):
    target, draft, plain = enabled
    calls = []
    draft.register_forward_hook(lambda *_: calls.append(1))
    target.save_pretrained(tmp_path)
    noisy_copy(target, seed=4).save_pretrained(tmp_path / "other")
    target.name_or_path = str(tmp_path)
    assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW, speculative_config={"model": "other"})
    assert not calls
    assert longest_draft(target) == 3  # the rest of the dict below is kept


def test_dicts_are_merged_key_by_key(enabled):
    target, _, _ = enabled
    seen = []

    class Watched(DRAFTERS["draft_model"]):
        def __init__(self, request):
            super().__init__(request)
            seen.append(request.config)

    DRAFTERS["draft_model"], original = Watched, DRAFTERS["draft_model"]
    try:
        config = call_config({"rejection_sample_method": "standard"})
        target.generate(**prompts(), generation_config=config, speculative_config={"num_speculative_tokens": 2})
    finally:
        DRAFTERS["draft_model"] = original
    assert (seen[0].num_speculative_tokens, seen[0].rejection_sample_method) == (2, "standard")


class Repeat(Drafter):
    """Proposes each row's last token again."""

    def propose(self, sequence, draft_length, uniforms):
        ids = sequence.tail(1).expand(-1, draft_length).clone()
        for position in range(draft_length):
            sequence.write(position, ids[:, position])
        lengths = torch.full((sequence.batch,), draft_length)
        return Draft(ids, None, lengths)


def test_a_string_names_a_method_of_a_third_party(registered):
    hf_specdec.register_drafter("repeat", Repeat)
    try:
        target, _, plain = registered
        report = assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW, speculative_config="repeat")
        assert report.method == "repeat"
        torch.manual_seed(0)
        target.generate(**prompts(2), max_new_tokens=NEW, do_sample=True, speculative_config="repeat")
        assert speculates(target).steps > 0
    finally:
        del DRAFTERS["repeat"]


def test_dataclass_is_taken_at_every_place_and_config_stays_plain_json(registered, tmp_path):
    target, draft, plain = registered
    flag = hf_specdec.SpeculativeConfig(num_speculative_tokens=2)
    options = {"max_new_tokens": NEW, "assistant_model": draft}
    assert_as_plain(target, plain, **prompts(), **options, speculative_config=flag)
    assert longest_draft(target) == 2
    config = GenerationConfig(max_new_tokens=NEW, speculative_config=flag)
    assert_as_plain(target, plain, **prompts(), generation_config=config, assistant_model=draft)
    assert longest_draft(target) == 2
    assert config.speculative_config == {"num_speculative_tokens": 2}  # plain data on the way in
    target.generation_config.speculative_config = flag
    assert_as_plain(target, plain, **prompts(), **options)
    target.generation_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())["speculative_config"]
    assert saved == {"num_speculative_tokens": 2}


def test_enable_stores_json_only(tmp_path):
    target, draft = pair()
    with hf_specdec.enable(target, draft, dtype=torch.float32, num_speculative_tokens=2):
        text = target.generation_config.to_json_string()
        assert json.loads(text)["speculative_config"] == {
            "method": "draft_model",
            "dtype": "float32",
            "num_speculative_tokens": 2,
        }


@pytest.mark.parametrize(
    ("flag", "error", "match"),
    [
        ("n-gram", ValueError, r"Unknown method 'n-gram'.* Available: .*draft_model"),
        ({"num_speculative_token": 3}, ValueError, "Did you mean 'num_speculative_tokens'"),
        ({"num_speculative_tokens": 0}, ValueError, r"at least 1 or .auto., got 0\. To decode without drafting, pass"),
        (3, TypeError, "speculative_config must be True, False, None, a method name, a dict"),
        ({"posterior_threshold": 0.1}, ValueError, "is refused: typical acceptance"),
        ({"rejection_sample_method": "blocks"}, ValueError, "Did you mean 'block'"),
    ],
)
@pytest.mark.parametrize("place", ["the call's keyword", "the call's generation_config", "model.generation_config"])
def test_wrong_flags_say_what_where_and_what_to_do(registered, flag, error, match, place):
    target, _, plain = registered
    options = {"max_new_tokens": NEW}
    if place == "the call's keyword":
        options["speculative_config"] = flag
    elif place == "the call's generation_config":
        options = {"generation_config": call_config(flag)}
    else:
        target.generation_config.speculative_config = flag
    with pytest.raises(error, match=match) as caught:
        target.generate(**prompts(), **options)
    assert f"speculative_config was read from: {place}" in caught.value.__notes__
    target.generation_config.speculative_config = None
    assert target.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()


def test_a_model_in_the_flag_is_an_error_that_says_where_models_go(registered):
    target, draft, _ = registered
    for flag in (draft, {"model": draft}):
        with pytest.raises(TypeError, match=r"A loaded draft goes to hf_specdec\.enable\(target, draft\)"):
            target.generate(**prompts(), speculative_config=flag)


def test_unfit_drafts_are_errors_of_the_call(registered):
    target, _, _ = registered
    with pytest.raises(TypeError, match="The draft must be a Hub id, a folder or a loaded PreTrainedModel, got str"):
        target.generate(**prompts(), assistant_model="small", speculative_config=True)
    small = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match=r"encoder-decoder model and LlamaForCausalLM a decoder-only one"):
        target.generate(**prompts(), assistant_model=T5ForConditionalGeneration(small), speculative_config=True)


SET_ASIDE = [
    ("prompt_lookup_num_tokens", 3),
    ("assistant_early_exit", 1),
    ("use_mtp", True),
    ("speculation_type", "dflash"),
]


@pytest.mark.parametrize(("name", "value"), SET_ASIDE)
@pytest.mark.parametrize("place", ["keyword", "call config", "model config"])
def test_transformers_own_speculation_is_set_aside_with_one_warning(enabled, name, value, place, caplog):
    target, _, plain = enabled
    if not hasattr(GenerationConfig(), name):
        pytest.skip(f"this transformers has no {name}")
    options = {"max_new_tokens": NEW}
    if place == "keyword":
        options[name] = value
    elif place == "call config":
        options = {"generation_config": GenerationConfig(max_new_tokens=NEW, **{name: value})}
    else:
        setattr(target.generation_config, name, value)
    with caplog.at_level(logging.WARNING):
        assert_as_plain(target, plain, **prompts(), **options)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"{name} set aside: speculative_config is on for this call."]
    if place == "call config":
        assert getattr(options["generation_config"], name) == value


def test_set_aside_options_of_a_config_do_not_reach_transformers_warnings(enabled, caplog):
    target, _, plain = enabled
    config = GenerationConfig(max_new_tokens=NEW, prompt_lookup_num_tokens=3)
    transformers_logging.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="transformers"):
        assert_as_plain(target, plain, **prompts(), generation_config=config)
    assert "deprecated" not in caplog.text
    assert config.prompt_lookup_num_tokens == 3  # the user's own


def test_prompt_lookup_without_the_flag_is_left_alone(registered):
    target, _, plain = registered
    assert target.generate(**prompts(), max_new_tokens=NEW, prompt_lookup_num_tokens=3).tolist() == plain.tolist()
    assert hf_specdec.report(target) is None


def test_a_deep_copy_of_an_enabled_model_decodes_plainly(enabled, caplog):
    target, _, plain = enabled
    twin = copy.deepcopy(target)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            assert twin.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()
    assert hf_specdec.report(twin).reason == "no draft"
    assert caplog.text.count("no draft") == 1
    assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)


def test_a_replaced_generation_config_keeps_the_flag(enabled):
    target, _, plain = enabled
    found = target.generation_config
    target.generation_config = GenerationConfig(pad_token_id=0)
    assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
    assert longest_draft(target) == 3
    target.generation_config = found


def test_positional_arguments_of_generate(enabled):
    target, _, plain = enabled
    ids = prompts()["input_ids"]
    assert_as_plain(target, plain, inputs=ids, max_new_tokens=NEW)
    output = target.generate(ids, GenerationConfig(max_new_tokens=NEW))
    assert output.tolist() == plain.tolist()
    speculates(target)
    output = target.generate(ids, call_config(False), None)
    assert output.tolist() == plain.tolist()


@pytest.mark.parametrize("flag", [True, False])
def test_wrong_arguments_are_errors_as_in_plain(enabled, flag):
    target, _, _ = enabled
    ids = prompts()["input_ids"]
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        target.generate(ids, inputs=ids, speculative_config=flag)
    with pytest.raises(TypeError, match="positional arguments"):
        target.generate(ids, *[None] * 20, speculative_config=flag)
    with pytest.raises(ValueError, match="not_an_option"):
        target.generate(ids, not_an_option=3, speculative_config=flag)


def test_keyword_is_not_an_option_without_the_plugin():
    with pytest.raises(ValueError, match="speculative_config"):
        llama().generate(**prompts(), max_new_tokens=2, speculative_config=True)


def test_the_drafts_own_settings_do_not_leak_in(enabled):
    target, draft, plain = enabled
    settings = {
        "do_sample": True,
        "temperature": 9.0,
        "repetition_penalty": 5.0,
        "suppress_tokens": list(range(2, 30)),
        "forced_eos_token_id": 3,
        "max_length": 7,
        "num_beams": 3,
        "eos_token_id": 5,
        "speculative_config": {"num_speculative_tokens": 9},
    }
    before = assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
    for name, value in settings.items():
        setattr(draft.generation_config, name, value)
    after = assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
    assert (after.draft_lengths, after.accepted) == (before.draft_lengths, before.accepted)


def test_enable_flag_takes_a_path_and_keywords(tmp_path):
    target, draft = pair()
    plain = target.generate(**prompts(), max_new_tokens=NEW)
    draft.save_pretrained(tmp_path)
    for named in (tmp_path, str(tmp_path)):
        with hf_specdec.enable(target, named, num_speculative_tokens=2):
            assert target.generation_config.speculative_config["model"] == str(tmp_path)
            assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
    with hf_specdec.enable(target, model=str(tmp_path)):
        assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)


def test_enable_without_a_draft_looks_up_until_a_call_brings_one():
    target = llama()
    plain = target.generate(**prompts(), max_new_tokens=NEW)
    with hf_specdec.enable(target, num_speculative_tokens=2):
        assert target.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()
        assert hf_specdec.report(target).method == "ngram"
        draft = noisy_copy(target)
        assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW, assistant_model=draft)
        assert longest_draft(target) == 2
