"""Does one call load a pair as planned, enabled and otherwise ordinary, and is what is wrong said before that?"""

import importlib.util
import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

import hf_specdec
from hf_specdec import integration
from hf_specdec.config import SpeculativeConfig
from hf_specdec.host import quantized_sizes
from hf_specdec.host.draft_copy import own_copy
from hf_specdec.pair import _check_sources
from tests.integration.pairs import VOCAB, llama, prompts

pytestmark = [
    # accelerate and bitsandbytes speak of what they may do later
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SMALL = {"max_length": 64, "max_batch": 3, "num_speculative_tokens": 3}
EXACT = {**SMALL, "dtype": "float32", "draft_dtype": "float32"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a target of 16 layers, the last 14 of little weight, a draft of the first two, and a tokenizer
    beside the target."""
    folder = tmp_path_factory.mktemp("pair")
    target = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=16)
    with torch.no_grad():
        for layer in target.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
    target.save_pretrained(folder / "target")
    target.model.layers = target.model.layers[:2]
    target.config.num_hidden_layers = 2
    target.save_pretrained(folder / "draft")
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(folder / "target")
    return folder


@pytest.fixture
def load():
    """`load_pair`, undone after the test."""
    handles = []

    def loading(*models, **options):
        loaded = hf_specdec.load_pair(*models, **options)
        handles.append(loaded[2].handle)
        return loaded

    yield loading
    for handle in handles:
        handle.remove()


@pytest.fixture
def nothing_loads(monkeypatch):
    """Fails the test as soon as weights are asked for."""

    def loaded(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)


def texts(target):
    """(plain, speculative) greedy ids, and the second's report."""
    call = {**prompts(3), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**call, speculative_config=False)
    ids = target.generate(**call)
    return plain.tolist(), ids.tolist(), hf_specdec.report(target)


def is_as_plain(target):
    plain, speculative, report = texts(target)
    assert speculative == plain
    assert report.reason is None
    assert 0 < report.accepted < report.drafted
    return True


def test_pair_arrives_enabled_and_ordinary(home, load, tmp_path):
    target, tokenizer, placement = load(home / "target", home / "draft", **EXACT)
    assert placement.plan.device_map == {"": "cpu"}
    assert tokenizer.convert_ids_to_tokens(3) == "w3"
    assert is_as_plain(target)
    target.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, target.lm_head.weight)
    assert again.generation_config.speculative_config["num_speculative_tokens"] == 3
    placement.handle.remove()
    assert not hasattr(target.generation_config, "speculative_config")


def test_placement_shows_what_lies_where_and_is_json(home, load):
    target, _, placement = load(str(home / "target"), draft=str(home / "draft"), **EXACT)
    text = str(placement)
    for words in ("device", "target layers", "KV cache", "draft", "headroom", "cpu", "16 (0-15), head", "3 rows of 64"):
        assert words in text
    data = json.loads(json.dumps(placement.to_dict()))
    assert data["fits"]
    assert data["device_map"] == {"": "cpu"}
    assert data["target_footprint"] == data["target"]["weights"] == target.get_memory_footprint()
    assert data["draft_footprint"] == data["draft"]["weights"]
    assert data["devices"][0]["draft_weights"] == data["draft"]["weights"]


def test_draft_is_bfloat16_where_no_gpu_makes_float16_fast(home, load):
    _, _, placement = load(home / "target", home / "draft", **SMALL)
    assert placement.plan.draft.dtype == "bfloat16"
    assert placement.draft_footprint == placement.plan.draft.weights


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(
    ("quantization", "draft_quantization"),
    [
        ("nf4", None),
        ("nf4", "nf4"),
        ("fp4", None),
        (BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), None),
    ],
    ids=["nf4", "nf4-nf4", "fp4", "int8"],
)
def test_quantized_target_gives_its_own_plain_text(home, load, quantization, draft_quantization):
    target, _, placement = load(
        home / "target",
        home / "draft",
        quantization=quantization,
        draft_quantization=draft_quantization,
        **{**EXACT, "draft_dtype": "bfloat16"},
    )
    assert target.config.quantization_config is not None
    assert placement.target_footprint == pytest.approx(placement.plan.target.weights, rel=0.03)
    assert placement.draft_footprint == pytest.approx(placement.plan.draft.weights, rel=0.03)
    assert is_as_plain(target)


def test_target_is_spread_over_cpu_and_disk_by_accelerates_hooks(home, load, tmp_path):
    options = {**EXACT, "max_batch": 1}
    whole = load(home / "target", **options)[2].plan.devices[0]
    limit = int((whole.needed - 0.4 * whole.weights) / 0.9)
    target, _, placement = load(
        home / "target", home / "draft", max_memory={"cpu": limit}, offload_folder=tmp_path / "weights", **options
    )
    places = set(target.hf_device_map.values())
    assert places == {"cpu", "disk"}
    assert dict(target.hf_device_map) == placement.plan.device_map
    assert any(weight.is_meta for weight in target.parameters())
    assert placement.plan.num_offloaded > 0
    assert "layers are offloaded" in str(placement)
    assert is_as_plain(target)


def test_without_a_draft_look_ups_draft(home, load):
    target, _, placement = load(home / "target", max_length=64)
    assert placement.draft_footprint is None
    assert placement.plan.draft is None
    plain, speculative, report = texts(target)
    assert speculative == plain or report.reason is None


def test_one_draft_serves_two_targets(home, load):
    first = load(home / "target", home / "draft", **EXACT)[0]
    second = load(home / "target", home / "draft", **EXACT)[0]
    from hf_specdec.host.binding import bindings_of

    assert bindings_of(first)[-1].draft is bindings_of(second)[-1].draft


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_larger_draft_than_the_quantized_target_is_a_line(home, load):
    placement = load(home / "target", home / "target", quantization="nf4", **EXACT)[2]
    assert "is larger than the target" in str(placement)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_draft_that_would_push_the_target_off_is_left_out_with_a_warning(home, load, tmp_path, caplog):
    options = {**EXACT, "max_batch": 1}
    whole = load(home / "target", **options)[2].plan.devices[0]
    target, _, placement = load(
        home / "target",
        home / "target",
        draft_quantization="nf4",
        max_memory={"cpu": int(whole.needed * 1.1 / 0.9)},
        offload_folder=tmp_path,
        **{**options, "num_speculative_tokens": "auto"},
    )
    assert placement.plan.draft_device is None
    assert placement.plan.device_map == {"": "cpu"}
    assert placement.draft_footprint is None
    assert "No draft: it would push" in caplog.text
    plain, speculative, _ = texts(target)
    assert speculative == plain


def test_a_copy_of_the_draft_that_was_made_is_told(home, load, monkeypatch):
    eight = SpeculativeConfig(draft_quantization="int8")
    monkeypatch.setattr(integration, "settle", lambda target, draft, config: own_copy(draft, eight, target))
    placement = load(home / "target", home / "draft", **EXACT)[2]
    assert any("int8" in note for note in placement.plan.notes)
    assert "int8" in str(placement)


def test_no_copy_of_the_draft_where_the_plan_has_no_room_for_it(home, load):
    target, _, placement = load(home / "target", home / "draft", **EXACT)
    assert "draft_quantization" not in target.generation_config.speculative_config
    tight = int((placement.plan.devices[0].needed + placement.plan.draft.weights / 2) / 0.9)
    target = load(home / "target", home / "draft", max_memory={"cpu": tight}, **EXACT)[0]
    assert target.generation_config.speculative_config["draft_quantization"] == "none"


# --- errors ---------------------------------------------------------------------------------------------------------


def test_not_enough_memory_is_told_in_numbers_with_what_would_fit(home, nothing_loads):
    with pytest.raises(MemoryError) as caught:
        hf_specdec.load_pair(
            home / "target", home / "draft", max_memory={"cpu": 50_000_000}, **{**EXACT, "max_length": 4096}
        )
    text = str(caught.value)
    assert text.startswith("Not enough memory for target (max_batch=3, max_length=4096): target 0.00")
    assert "usable: cpu" in text
    assert "too much." in text
    assert "What would fit: " in text
    assert " instead of 4096" in text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantization": "nf5"}, ValueError, "Unknown quantization 'nf5'. Did you mean 'nf4'"),
        (
            {"draft_quantization": "nf5"},
            ValueError,
            "Unknown draft_quantization 'nf5'. Did you mean 'nf4'? Available: 'nf4', 'fp4', 'int8'",
        ),
        ({"max_memory": {5: "1GiB"}}, ValueError, "max_memory names device 5, which does not exist: "),
        ({"max_memory": {"cpu": "lots"}}, ValueError, "Cannot read 'lots' as an amount of memory"),
        ({"dtype": "float17"}, ValueError, "Unknown dtype 'float17' for the target. Did you mean 'float1"),
        ({"draft_dtype": "half"}, ValueError, "Unknown dtype 'half' for the draft."),
        ({"max_length": 0}, ValueError, "max_length must be at least 1, got 0"),
        ({"max_length": "512"}, TypeError, "max_"),
        ({"max_length": 512.5}, TypeError, "max_"),
        ({"max_batch": True}, TypeError, "max_batch must be an integer of at least 1, got True"),
        ({"max_memory": "24GB"}, TypeError, "max_"),
        ({"max_memory": {"cpu": -5}}, ValueError, "-5 is no amount of memory"),
        ({"quantization": "NF4"}, ValueError, "Unknown quantization 'NF4'. Did you mean 'nf4'?"),
        ({"quantization": {"load_in_4bits": True}}, ValueError, "Did you mean 'load_in_4bit'?"),
        ({"quantization": {"bnb_4bit_quant_type": "nf4"}}, ValueError, "needs load_in_4bit=True or"),
        ({"num_speculative_tokens": 0}, ValueError, "num_speculative_tokens must be at least 1"),
        ({"num_speculative_token": 3}, ValueError, "Did you mean"),
        ({"device": "cpu"}, ValueError, "load_pair names and places the draft itself, got device="),
    ],
)
def test_what_is_wrong_is_said_before_weights_are_loaded(home, nothing_loads, options, error, message):
    with pytest.raises(error) as caught:
        hf_specdec.load_pair(home / "target", home / "draft", **{"max_length": 64, **options})
    assert message in str(caught.value)


def test_missing_bitsandbytes_is_said_before_weights_are_loaded(home, nothing_loads, monkeypatch):
    monkeypatch.setattr(quantized_sizes.importlib.util, "find_spec", lambda name: None)
    for options in ({"quantization": "nf4"}, {"draft_quantization": "nf4"}):
        with pytest.raises(ImportError, match="needs bitsandbytes, which is not installed"):
            hf_specdec.load_pair(home / "target", home / "draft", max_length=64, **options)


def test_checkpoint_without_config_is_said_before_weights_are_loaded(home, nothing_loads, tmp_path):
    for pair in ((tmp_path, home / "draft"), (home / "target", tmp_path)):
        with pytest.raises(ValueError, match=r"has no config.json, so it is no checkpoint"):
            hf_specdec.load_pair(*pair)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_what_is_no_name_is_refused_at_once(home, nothing_loads, which):
    pair = {"target": home / "target", "draft": home / "draft", which: 5}
    with pytest.raises(TypeError):
        hf_specdec.load_pair(**pair)
    with pytest.raises(TypeError, match=f"^{which} must be a Hub id or a folder, got int"):
        _check_sources(**pair)  # what users see, whose arguments nobody checks before


@pytest.mark.parametrize("which", ["target", "draft"])
def test_folder_without_weights_is_said_before_weights_are_loaded(home, nothing_loads, tmp_path, which):
    (tmp_path / "config.json").write_bytes((home / which / "config.json").read_bytes())
    pair = {"target": home / "target", "draft": home / "draft", which: tmp_path}
    with pytest.raises(ValueError, match=rf"The {which} '.*' has a config and no weights"):
        hf_specdec.load_pair(**pair, max_length=64)


def test_draft_without_room_is_left_out_with_a_warning(home, load, caplog):
    options = {**EXACT, "max_batch": 1, "num_speculative_tokens": "auto"}
    whole = load(home / "target", **options)[2].plan.devices[0]
    _, _, placement = load(
        home / "target",
        home / "draft",
        max_memory={"cpu": float(int(whole.needed * 1.001 / 0.9))},
        **options,
    )
    assert placement.plan.draft_device is None
    assert "No draft: there is no room for it beside the target" in caplog.text
