"""Is an 8-bit target, whose scores depend on the block, spoken of honestly, and are bitsandbytes' logs kept down?"""

import importlib.metadata
import logging

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_specdec
from hf_specdec.host import quantized
from hf_specdec.host.quantized import inexact_fact, int8_threshold, slow_rows_fact, why_inexact
from tests.integration.pairs import llama, noisy_copy, prompts, speculates

NEW = 10
LOADING_LINE = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
LOUD = "bitsandbytes.autograd._functions"

pytestmark = [
    # accelerate and bitsandbytes speak of what they may do later
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    llama().save_pretrained(path)
    return path


def eight_bit(folder, threshold):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"}, dtype="float32")


def generate(target, **options):
    return target.generate(**prompts(2), max_new_tokens=NEW, **options)


@pytest.fixture
def outliers(folder):
    """(target that treats outliers, draft)."""
    return eight_bit(folder, 6.0), noisy_copy(llama())


def test_it_speculates_says_so_and_warns_once_per_model(outliers, caplog):
    target, draft = outliers
    with caplog.at_level(logging.WARNING, logger="hf_specdec"), hf_specdec.enable(target, draft):
        for _ in range(2):
            generate(target)
            [note] = speculates(target).notes
            assert LOADING_LINE in note
            assert "llm_int8_threshold=6" in note
        generate(target, do_sample=True)
        speculates(target)
    assert [r.getMessage() for r in caplog.records if r.name == "hf_specdec"] == [note]
    assert target.config.quantization_config.llm_int8_threshold == 6.0  # printed, never set


def test_on_inexact_plain_decodes_plainly_with_the_reason(outliers, caplog):
    target, draft = outliers
    plain = generate(target)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"), hf_specdec.enable(target, draft, on_inexact="plain"):
        for _ in range(2):
            assert generate(target).tolist() == plain.tolist()
            report = hf_specdec.report(target)
            assert report.reason == 'LLM.int8() with llm_int8_threshold=6 (on_inexact="plain")'
            assert report.drafted == 0
        # The call may decide otherwise.
        generate(target, speculative_config={"on_inexact": "speculate"})
        speculates(target)
    plainly = [r.getMessage() for r in caplog.records if "decodes plainly, without speculation" in r.getMessage()]
    assert len(plainly) == 1


@pytest.mark.parametrize("on_inexact", ["speculate", "plain"])
def test_threshold_of_zero_speculates_without_a_word(folder, on_inexact, caplog):
    target = eight_bit(folder, 0.0)
    plain = generate(target)
    handle = hf_specdec.enable(target, noisy_copy(llama()), on_inexact=on_inexact)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"), handle:
        assert generate(target).tolist() == plain.tolist()
        assert speculates(target).notes == []
    assert not [r for r in caplog.records if r.name == "hf_specdec"]


@pytest.mark.parametrize("which", ["target", "draft"])
def test_message_of_every_8bit_product_is_muted_during_our_calls_only(folder, which, caplog):
    quantized_model = eight_bit(folder, 0.0)
    pair = (quantized_model, llama()) if which == "target" else (llama(), quantized_model)
    with caplog.at_level(logging.WARNING, logger=LOUD), hf_specdec.enable(*pair):
        quantized_model.generate(**prompts(1), max_new_tokens=2, speculative_config=False)
        assert "inputs will be cast" in caplog.text
        caplog.clear()
        generate(pair[0])
        speculates(pair[0])
        assert "inputs will be cast" not in caplog.text
    assert logging.getLogger(LOUD).filters == []


def test_other_messages_of_bitsandbytes_come_through(outliers, caplog):
    with quantized.quiet_int8(outliers[0]):
        logging.getLogger(LOUD).warning("something else")
        logging.getLogger(LOUD).warning("MatMul8bitLt: inputs will be cast from %s", torch.float32)
    assert [record.getMessage() for record in caplog.records] == ["something else"]


class Quantized:
    """As much of a model as is looked at."""

    def __init__(self, config):
        self.config = type("Config", (), {"quantization_config": config})()


EIGHT_BIT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def test_config_may_be_a_dictionary_and_the_default_threshold_is_six():
    assert int8_threshold(Quantized(EIGHT_BIT)) == 6.0
    assert int8_threshold(Quantized(EIGHT_BIT | {"llm_int8_threshold": 0.0})) == 0.0
    four_bit = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_threshold": 6.0}
    assert why_inexact(Quantized(four_bit)) is None
    assert inexact_fact(llama()) is None


@pytest.mark.parametrize(
    ("version", "is_slow"), [("0.49.2", True), ("0.50.0", False), ("0.50.2", False), ("1.0", False)]
)
def test_old_bitsandbytes_is_named_as_slow(version, is_slow, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    fact = slow_rows_fact(llama(), Quantized(EIGHT_BIT))
    assert (fact is not None) == is_slow
    if is_slow:
        assert fact == (
            "bitsandbytes 0.49.2 is slow at more than one row, and a verify pass has K + 1: "
            "pip install 'bitsandbytes>=0.50'."
        )
    assert slow_rows_fact(llama(), None) is None


def test_old_bitsandbytes_stands_in_the_notes(folder, monkeypatch):
    target = eight_bit(folder, 0.0)
    installed = importlib.metadata.version
    monkeypatch.setattr(
        quantized.importlib.metadata, "version", lambda name: "0.45.5" if name == "bitsandbytes" else installed(name)
    )
    with hf_specdec.enable(target, noisy_copy(llama())):
        generate(target)
        assert any(note.startswith("bitsandbytes 0.45.5 is slow") for note in speculates(target).notes)
