"""Does a target speculate whatever quantized it? Nothing here depends on the quantizer.

What is not installed is skipped. Each target is compared with itself without the flag.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_specdec
from tests.integration.pairs import VOCAB, llama, noisy_copy, prompts, speculates

NEW = 24
HIDDEN = 64

# These libraries speak of torch's future and of their own.
pytestmark = [pytest.mark.filterwarnings("ignore")]


def small_llama():
    return llama(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    small_llama().save_pretrained(path)
    return path


def loaded(folder, config):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    ).eval()


def assert_speculates(target, draft):
    """Greedy text is the same target's plain text, in a padded batch; sampling speculates too."""
    inputs = prompts(3, 8)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        assert target.generate(**inputs, max_new_tokens=NEW).tolist() == plain.tolist()
        assert speculates(target).accepted > 0
        target.generate(**inputs, max_new_tokens=NEW, do_sample=True)
        assert speculates(target).accepted > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_torchao_weights_only(folder, bits):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from transformers import TorchAoConfig

    # Int4WeightOnlyConfig packs for CUDA kernels; on a CPU 4 bits are Intx.
    config = Int8WeightOnlyConfig() if bits == 8 else IntxWeightOnlyConfig(weight_dtype=torch.int4)
    target = loaded(folder, TorchAoConfig(config))
    assert type(target.model.layers[0].self_attn.q_proj.weight).__module__.startswith("torchao")
    assert_speculates(target, noisy_copy(small_llama()))


def test_hqq_layers():
    """By hqq's own call: transformers 5.24 names HqqConfig as not available yet."""
    pytest.importorskip("hqq", reason="hqq is not installed")
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from hqq.models.hf.base import AutoHQQHFModel

    target = small_llama()
    AutoHQQHFModel.quantize_model(
        target, quant_config=BaseQuantizeConfig(nbits=4, group_size=32), compute_dtype=torch.float32, device="cpu"
    )
    assert isinstance(target.model.layers[0].self_attn.q_proj, HQQLinear)
    assert_speculates(target, noisy_copy(small_llama()))


@pytest.mark.parametrize("four_bit_type", ["nf4", "fp4"])
@pytest.mark.parametrize("is_draft_quantized", [False, True])
def test_bitsandbytes_4_bit(folder, four_bit_type, is_draft_quantized):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=four_bit_type, bnb_4bit_compute_dtype=torch.float32
    )
    target = loaded(folder, config)
    draft = loaded(folder, copy.deepcopy(config)) if is_draft_quantized else noisy_copy(small_llama())
    assert_speculates(target, draft)


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """The target's weights in blocks of Q8_0."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    model, path = small_llama(), tmp_path_factory.mktemp("gguf") / "target.gguf"
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(VOCAB)
    writer.add_token_list([f"token{token}" for token in range(VOCAB)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        data, kind = weight.float().numpy(), gguf.GGMLQuantizationType.F32
        if weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("is_packed", [False, True])
def test_gguf(gguf_file, is_packed):
    from transformers import GgufConfig

    def from_file(dequantize):
        return AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            quantization_config=GgufConfig(dequantize=dequantize),
            dtype=torch.float32,
        ).eval()

    target = from_file(not is_packed)
    if is_packed and type(target.model.layers[0].self_attn.q_proj) is torch.nn.Linear:
        pytest.skip("no kernel for packed GGUF weights here: transformers has unpacked them")
    assert_speculates(target, noisy_copy(from_file(True)))
