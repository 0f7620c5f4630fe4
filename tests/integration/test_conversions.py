"""Does `draft_quantization="auto"` change to a copy of the draft where that pays, stay with it, and go back?

When a copy has earned its making is `test_conversion`'s to ask; here the answer is given.
"""

import gc
import json
import weakref

import pytest
import torch

import hf_specdec
from hf_specdec.host import conversions, draft_copy
from tests.integration.pairs import llama, noisy_copy, pair, prompts

CALLS = 3


def timing(converted, quantization="int8"):
    """Layers that take a second as they are."""
    return conversions._Timing(quantization, 1.0, converted, making=0.1)


@pytest.fixture
def converts(monkeypatch):
    """Drafts of any size may be converted, and int8 pays as soon as there is evidence."""
    monkeypatch.setattr(conversions, "MIN_WEIGHTS", 0)
    monkeypatch.setattr(conversions, "has_evidence", lambda knowledge, batch: True)
    monkeypatch.setattr(conversions, "best_conversion", lambda knowledge, batch, prices: next(iter(prices)))
    monkeypatch.setattr(conversions, "_timings", lambda draft: [timing(0.8)])
    monkeypatch.setattr(conversions, "is_worse", lambda copied, knowledge, batch: False)


def quantizations(target, inputs, flag=None, **options):
    """What the draft of each of some calls was converted to."""
    made = []
    for _ in range(CALLS):
        target.generate(**inputs, max_new_tokens=12, speculative_config=flag, **options)
        made.append(hf_specdec.report(target).draft_quantization)
    return made


def wide_pair():
    return pair(0, hidden_size=64)


@pytest.mark.parametrize("method", ["auto", "draft_model"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_copy_takes_over_after_the_first_call_and_text_stays_plains(converts, method, batch):
    target, draft = wide_pair()
    inputs = prompts(batch, 8)
    plain = target.generate(**inputs, max_new_tokens=30)
    with hf_specdec.enable(target, draft, method=method):
        made = []
        for _ in range(CALLS):
            assert target.generate(**inputs, max_new_tokens=30).tolist() == plain.tolist()
            report = hf_specdec.report(target)
            made.append(report.draft_quantization)
    assert made == [None, "int8", "int8"]
    assert report.notes[0].startswith("Draft converted to int8 in ")
    assert json.loads(json.dumps(report.to_dict()))["draft_quantization"] == "int8"


@pytest.mark.parametrize(
    "flag",
    [
        {"draft_quantization": "none"},
        {"num_speculative_tokens": 3},
        {"deterministic": True},
        {"draft_vocab": 24},
    ],
    ids=str,
)
def test_nothing_is_converted_where_it_is_not_asked(converts, flag):
    target, draft = wide_pair()
    with hf_specdec.enable(target, draft, **flag):
        assert quantizations(target, prompts(1, 8)) == [None] * CALLS


def test_what_is_named_is_what_is_used(converts):
    target, draft = wide_pair()
    with hf_specdec.enable(target, draft):
        assert quantizations(target, prompts(1, 8), {"draft_quantization": "int8"}) == ["int8"] * CALLS


@pytest.mark.parametrize("settings", [{"is_small": True}, {"is_target": True}, {"is_converted": True}], ids=str)
def test_drafts_that_cannot_gain_stay(monkeypatch, request, settings):
    target, draft = wide_pair()
    if not settings.get("is_small"):
        request.getfixturevalue("converts")
    draft = target if settings.get("is_target") else draft
    if settings.get("is_converted"):
        draft.hf_quantizer = object()
    with hf_specdec.enable(target, draft):
        assert quantizations(target, prompts(1, 8)) == [None] * CALLS


def test_a_schedule_of_lengths_decides_nothing_and_replays_what_is_in_use(converts):
    target, draft = wide_pair()
    inputs = prompts(2, 8)

    def sampled(flag=None):
        torch.manual_seed(5)
        text = target.generate(**inputs, max_new_tokens=20, do_sample=True, speculative_config=flag).tolist()
        return text, hf_specdec.report(target)

    with hf_specdec.enable(target, draft):
        as_it_is, first = sampled()
        assert quantizations(target, inputs, {"draft_lengths": first.draft_lengths}) == [None] * CALLS
        assert sampled({"draft_lengths": first.draft_lengths})[0] == as_it_is
        converted, report = sampled()
        assert report.draft_quantization == "int8"
        assert sampled({"draft_lengths": report.draft_lengths})[0] == converted
        named = {"draft_lengths": first.draft_lengths, "draft_quantization": "none"}
        assert sampled(named)[0] == as_it_is


def test_a_copy_that_turns_out_slower_is_given_up_for_good(converts, monkeypatch):
    target, draft = wide_pair()
    with hf_specdec.enable(target, draft):
        target.generate(**prompts(1, 8), max_new_tokens=12)
        target.generate(**prompts(1, 8), max_new_tokens=12)
        (copied,) = [each.model for each in draft_copy._COPIES[draft].values()]
        watch = weakref.ref(copied)
        del copied
        monkeypatch.setattr(conversions, "is_worse", lambda copied, knowledge, batch: True)
        assert quantizations(target, prompts(1, 8)) == [None] * CALLS
    gc.collect()
    assert watch() is None


def test_no_copy_is_made_where_memory_is_short(converts, monkeypatch):
    monkeypatch.setattr(conversions, "available_memory", lambda: 1000)
    target, draft = wide_pair()
    with hf_specdec.enable(target, draft):
        assert quantizations(target, prompts(1, 8)) == [None] * CALLS


def test_choices_go_with_their_models(converts):
    target, draft = wide_pair()
    with hf_specdec.enable(target, draft):
        quantizations(target, prompts(1, 8))
    watches = [weakref.ref(target), weakref.ref(draft)]
    del target, draft
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


def test_new_weights_are_judged_anew(converts):
    target, draft = wide_pair()
    with hf_specdec.enable(target, draft):
        assert quantizations(target, prompts(1, 8))[-1] == "int8"
        draft.load_state_dict(noisy_copy(draft, seed=4).state_dict())
        target.generate(**prompts(1, 8), max_new_tokens=12)
        copied = conversions._CHOICES[target][draft]
    assert not copied.is_settled


@pytest.mark.parametrize(
    ("timings", "made"),
    [
        ([timing(0.3)], "int8"),
        ([timing(0.9)], None),
        ([timing(1.5)], None),
        ([timing(0.5), timing(0.3, "nf4")], "nf4"),
        ([timing(0.32), timing(0.3, "nf4")], "int8"),  # 8 bits keep more tokens
        ([timing(0.9), timing(0.3, "nf4")], "nf4"),
    ],
    ids=str,
)
def test_a_copy_that_is_sure_to_be_faster_is_made_with_the_binding(monkeypatch, timings, made):
    if made == "nf4":
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(conversions, "MIN_WEIGHTS", 0)
    monkeypatch.setattr(conversions, "_timings", lambda draft: timings)
    target, draft = wide_pair()
    plain = target.generate(**prompts(2, 8), max_new_tokens=12)
    with hf_specdec.enable(target, draft):
        assert target.generate(**prompts(2, 8), max_new_tokens=12).tolist() == plain.tolist()
        report = hf_specdec.report(target)
        assert report.draft_quantization == made
        assert quantizations(target, prompts(2, 8), {"num_speculative_tokens": 2}) == [None] * CALLS
        assert quantizations(target, prompts(2, 8), {"draft_quantization": "none"}) == [None] * CALLS
    assert report.conversion_seconds == 0.0  # it was there


def test_a_draft_named_in_data_is_converted_when_it_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(conversions, "MIN_WEIGHTS", 0)
    monkeypatch.setattr(conversions, "_timings", lambda draft: [timing(0.3)])
    target, draft = wide_pair()
    target.save_pretrained(tmp_path)
    draft.save_pretrained(tmp_path / "draft")
    target = type(target).from_pretrained(tmp_path).eval()
    with hf_specdec.register():
        assert quantizations(target, prompts(1, 8), {"model": "draft"}) == ["int8"] * CALLS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prices_come_from_the_drafts_own_layers(monkeypatch, dtype):
    monkeypatch.setattr(conversions, "SAMPLE_WEIGHTS", 1)
    timings = conversions._measured(llama(hidden_size=64).to(dtype))
    assert timings[0].quantization == "int8"
    for found in timings:
        assert min(found.as_it_is, found.converted, found.making) > 0
        saved = found.as_it_is - found.converted
        assert found.price(10.0).pass_share == pytest.approx(1 - saved / 10.0)
        assert found.price(10.0).seconds == found.making


def test_a_share_is_never_nothing():
    """Noise may make the layers seem to take more than the whole pass."""
    assert timing(0.1).price(0.5).pass_share == 0.05


def test_layers_of_gpt2_have_prices_too():
    from tests.zoo import pair as family

    _, draft = family("GPT-2")
    assert conversions._measured(draft)[0].making > 0
