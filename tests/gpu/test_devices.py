"""On real CUDA devices: target split by accelerate, draft beside it or elsewhere, the caller's ids anywhere."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import hf_specdec
from tests.integration.pairs import VOCAB, assert_as_plain, llama, noisy_copy, pair, prompts, speculates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore"),  # accelerate and bitsandbytes speak of their future
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")

NEW = 20


class Bias(LogitsProcessor):
    position_wise = True

    def __init__(self, device):
        self.bias = torch.rand((1, VOCAB), generator=torch.Generator().manual_seed(0)).to(device)

    def __call__(self, input_ids, scores):
        return scores + self.bias


def call(device):
    ends = torch.tensor([VOCAB + 1], device=device)
    return {
        **{name: value.to(device) for name, value in prompts(3, 8).items()},
        "max_new_tokens": NEW,
        "eos_token_id": 7,
        "pad_token_id": 0,
        "logits_processor": LogitsProcessorList([Bias(device)]),
        "stopping_criteria": StoppingCriteriaList([lambda ids, scores: (ids[:, -1:] == ends).any(dim=1)]),
    }


def split(folder, first, second, **options):
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first}
    places |= {"model.layers.1": second, "model.norm": second, "lm_head": second}
    llama().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, **options).eval()


@pytest.mark.parametrize("draft_at", ["cpu", "cuda:0"])
def test_target_on_a_gpu_with_the_draft_there_or_on_the_cpu(draft_at):
    target, draft = pair()
    target, draft = target.to("cuda:0"), draft.to(draft_at)
    plain = target.generate(**call("cuda:0"))
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        assert_as_plain(target, plain, **call("cuda:0"))


@pytest.mark.parametrize("second", ["cpu", "disk"])
@pytest.mark.parametrize("draft_at", ["cpu", "cuda:0"])
def test_target_spilled_from_a_gpu(tmp_path, second, draft_at):
    target = split(tmp_path, 0, second, offload_folder=str(tmp_path / "offload"))
    plain = target.generate(**call("cuda:0"))
    with hf_specdec.enable(target, noisy_copy(llama()).to(draft_at), num_speculative_tokens=3):
        assert_as_plain(target, plain, **call("cuda:0"))


@two_devices
@pytest.mark.parametrize("ids_at", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("draft_at", ["cpu", "cuda:0", "cuda:1"])
def test_target_over_two_gpus(tmp_path, draft_at, ids_at):
    target = split(tmp_path, 0, 1)
    plain = target.generate(**call(ids_at))
    with hf_specdec.enable(target, noisy_copy(llama()).to(draft_at), num_speculative_tokens=3):
        ids = target.generate(**call(ids_at))
        assert ids.tolist() == plain.tolist()
        assert str(ids.device) == ids_at
        speculates(target)
        target.generate(**call(ids_at), do_sample=True)
        speculates(target)


@pytest.mark.parametrize("draft_quantization", ["none", "nf4"])
def test_nf4_target_on_a_gpu(tmp_path, draft_quantization):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    llama(hidden_size=64).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map={"": 0})
    draft = noisy_copy(llama(hidden_size=64)).to("cuda:0")
    with hf_specdec.enable(target, draft, num_speculative_tokens=3, draft_quantization=draft_quantization):
        target.generate(**call("cuda:0"))
        assert speculates(target).accepted > 0
