"""Are the sizes told from a config those of the loaded model: weights, caches, what a pass reads?"""

import importlib.util
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GptOssConfig, LlamaConfig, MixtralConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_specdec.host import quantized_sizes, sizes
from hf_specdec.host.quantized_sizes import read_quantization, tell_device
from hf_specdec.host.sizes import Skeleton, read_config, read_dtype
from hf_specdec.placement.sizes import Workload
from tests.zoo import FAMILIES

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
TOLERANCE = 0.03  # the part's bar for real models; here it is met exactly, bar constants that are no parameters
WIDE = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    dtype="bfloat16",
)


def skeleton(config, quantization=None, dtype="auto"):
    read = read_dtype(dtype, config, "target")
    return Skeleton(config, read, read_quantization(quantization, read), "it")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_cache_bytes_are_those_of_the_cache_that_the_model_fills(family):
    model = family.build()
    told = skeleton(model.config, dtype="float32").sizes
    tokens = 6  # within every window
    out = model(torch.arange(2, 2 + tokens)[None], use_cache=True)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert [size * tokens for size in told.slot_bytes] == held
    windows = {window for window in told.windows if window is not None}
    assert windows == ({family.window} if family.window and family.reason is None else set())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_config_alone_gives_the_same_caches_where_a_model_cannot_run_on_meta(family):
    config = CONFIG_MAPPING[family.model_type](**family.options)
    assert sizes._from_config(config, 4) == sizes._cached(family.build().to("meta"), config, 2)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_weights_in_full_precision_are_the_loaded_ones(family):
    model = family.build()
    assert skeleton(model.config, dtype="float32").sizes.weight_bytes == model.get_memory_footprint()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "nf4", "fp4", "int8"])
def test_quantized_weights_are_the_loaded_ones(quantization, is_tied, tmp_path):
    if quantization:
        pytest.importorskip("bitsandbytes")
    config = LlamaConfig(**{**WIDE.to_dict(), "tie_word_embeddings": is_tied})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    told = skeleton(read_config(str(tmp_path)), quantization).sizes
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        quantization_config=read_quantization(quantization, torch.bfloat16)[1],
    )
    assert told.weight_bytes == pytest.approx(loaded.get_memory_footprint(), rel=1e-3)
    assert sum(piece.plain_bytes for piece in told.pieces) == pytest.approx(
        skeleton(config).sizes.weight_bytes, rel=1e-3
    )


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes")
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt"])
def test_bitsandbytes_rule_is_the_quantizers(quantization, model_type, monkeypatch):
    family = next(family for family in FAMILIES if family.model_type == model_type)
    config = CONFIG_MAPPING[model_type](**family.options)
    asked = skeleton(config, quantization).sizes
    monkeypatch.setattr(quantized_sizes.importlib.util, "find_spec", lambda name: None)
    dtype = read_dtype("auto", config, "target")
    ruled = Skeleton(config, dtype, read_quantization(quantization, dtype, must_load=False), "it").sizes
    assert ruled == asked
    assert any(piece.is_quantized for piece in ruled.pieces)


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes")
def test_constants_of_four_bit_blocks_are_those_beside_the_loaded_weights(tmp_path):
    AutoModelForCausalLM.from_config(WIDE, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for is_nested in (False, True):
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=is_nested)
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=config
        )
        states: list[Any] = [s for w in loaded.parameters() if (s := getattr(w, "quant_state", None)) is not None]
        held = sum(s.absmax.nbytes for s in states)
        held += sum(s.state2.absmax.nbytes + s.state2.code.nbytes for s in states if s.nested)
        told = skeleton(WIDE, config).sizes
        assert told.held_bytes - told.weight_bytes == held


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes")
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_checkpoint_that_is_quantized_already_needs_no_quantization_to_be_named(quantization, tmp_path):
    AutoModelForCausalLM.from_config(WIDE, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    config = read_quantization(quantization, torch.bfloat16)[1]
    made = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=config
    )
    made.save_pretrained(tmp_path / "quantized")
    told = skeleton(read_config(str(tmp_path / "quantized"))).sizes
    assert told.quantization == quantization
    assert told.is_pre_quantized
    assert told.weight_bytes == pytest.approx(made.get_memory_footprint(), rel=1e-3)


def test_output_head_embeddings_and_norms_stay_as_they_are():
    told = skeleton(WIDE, "nf4" if HAS_BITSANDBYTES else None)
    plain = {piece.name: piece for piece in told.sizes.pieces if not piece.is_quantized}
    assert {"lm_head", "model.embed_tokens", "model.norm"} <= set(plain)
    assert plain["lm_head"].weight_bytes == 512 * 128 * 2


def test_tied_weights_are_counted_once_and_read_as_the_head():
    tied = skeleton(LlamaConfig(**{**WIDE.to_dict(), "tie_word_embeddings": True})).sizes
    untied = skeleton(WIDE).sizes
    table = 512 * 128 * 2
    assert untied.weight_bytes - tied.weight_bytes == table
    by_name = {piece.name: piece for piece in tied.pieces}
    assert by_name["model.embed_tokens"].read_bytes == table
    assert "lm_head" not in by_name
    assert tied.head == "model.embed_tokens"
    assert {piece.name: piece for piece in untied.pieces}["model.embed_tokens"].read_bytes == 0


def test_a_token_reads_its_own_experts_only():
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    pieces = skeleton(config).sizes.pieces
    assert {piece.share for piece in pieces if ".experts" in piece.name} == {0.25}
    assert {piece.share for piece in pieces if ".experts" not in piece.name} == {1.0}


def test_cache_of_a_layer_in_the_skeleton_goes_again():
    made = skeleton(WIDE)
    with made.holding([10, 20, 30]) as model:
        assert sum(buffer.nbytes for name, buffer in model.named_buffers() if "cache" in name) == 60
    assert not [name for name, _ in made.model.named_buffers() if "cache" in name]


def test_sliding_layers_need_their_window_only():
    family = next(family for family in FAMILIES if family.name == "Gemma3")
    told = skeleton(CONFIG_MAPPING[family.model_type](**family.options)).sizes
    sliding, full = told.cache_bytes(Workload(max_length=100_000))
    assert sliding < full / 100
    assert full == told.slot_bytes[1] * math.ceil(1.5 * (100_000 + 17))


def test_verify_rows_and_their_float32_logits_are_part_of_a_pass():
    told = skeleton(WIDE).sizes
    few, many = (told.pass_bytes(Workload(max_batch=64, max_length=16, draft_length=k)) for k in (4, 32))
    assert many - few >= 64 * 28 * 512 * 4


# --- what the user wrote --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            "nf5",
            "Unknown quantization 'nf5'. Did you mean 'nf4'? Available: nf4, fp4, int8, a dict of",
        ),
        ("awesome", "Unknown quantization 'awesome'. Available: nf4"),
    ],
)
def test_unknown_quantization_is_named_with_the_nearest(quantization, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        read_quantization(quantization, torch.bfloat16)


def test_missing_bitsandbytes_is_named(monkeypatch):
    monkeypatch.setattr(quantized_sizes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"quantization='nf4' needs bitsandbytes, which is not installed: pip"):
        read_quantization("nf4", torch.bfloat16)


def test_folder_without_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json, so it is no checkpoint"):
        read_config(str(tmp_path))


def test_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="Cannot read the config of"):
        read_config(str(tmp_path))


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="Unknown dtype 'flaot16' for the target. Did you mean 'float16'"):
        read_dtype("flaot16", WIDE, "target")


@pytest.mark.parametrize(
    ("gpus", "is_dequantized"), [([], True), (["RTX 4090"], False), ([""], False), (["NVIDIA A100-SXM4-80GB"], True)]
)
def test_fp8_checkpoint_is_sized_as_on_the_device_that_is_planned_for(gpus, is_dequantized):
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tell_device(config, gpus, is_here=False)
    sizes = Skeleton(config, torch.bfloat16).sizes
    linears = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    tables = 2 * 2 * 256 * 256
    assert sizes.weight_bytes == pytest.approx((2 if is_dequantized else 1) * linears + tables, rel=0.01)


@pytest.mark.parametrize(("gpus", "bits"), [([], 16), (["H100"], 4)])
def test_mxfp4_experts_are_sized_as_on_the_device_that_is_planned_for(gpus, bits):
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=8,
    )  # fmt: skip
    config.quantization_config = {"quant_method": "mxfp4"}
    tell_device(config, gpus, is_here=False)
    sizes = Skeleton(config, torch.bfloat16).sizes
    experts = sum(piece.weight_bytes for piece in sizes.pieces if piece.name.endswith(".experts"))
    assert experts == pytest.approx(2 * 8 * 3 * 64 * 64 * bits / 8 + 2 * 8 * 3 * 64 * 2, rel=0.01)
