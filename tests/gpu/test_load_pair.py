"""On a real CUDA device: is a pair loaded as it was planned, and within what was reserved?"""

import importlib.util

import pytest
import torch
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec.cli.models import fetch
from hf_specdec.placement.machine import GIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore"),  # accelerate and bitsandbytes speak of their future
]


@pytest.fixture
def load():
    handles = []

    def loading(**options):
        target = fetch("qwen2.5-coder-1.5b")
        loaded = hf_specdec.load_pair(target, fetch("qwen2.5-coder-0.5b"), num_speculative_tokens=4, **options)
        handles.append(loaded[2].handle)
        return loaded

    yield loading
    for handle in handles:
        handle.remove()


def speaks(target, tokenizer: AutoTokenizer, num_tokens: int):
    """Reads half the room and writes a little; the report of it."""
    ids = tokenizer("def quicksort(items):\n" * num_tokens, return_tensors="pt")["input_ids"][:, : num_tokens // 2]
    target.generate(ids.to(target.device), max_new_tokens=32, do_sample=False)
    return hf_specdec.report(target)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_what_is_used_stays_within_what_was_reserved(load, quantization):
    if quantization and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    target, tokenizer, placement = load(quantization=quantization, max_length=4096, max_memory={0: 12 * GIB})
    report = speaks(target, tokenizer, 4096)
    device = placement.plan.devices[0]
    assert placement.plan.device_map == {"": 0}
    assert report.reason is None
    assert torch.cuda.max_memory_allocated(0) - before <= device.needed + device.reserve
    assert placement.target_footprint == pytest.approx(placement.plan.target.weights, rel=0.03)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_layers_spill_to_the_cpu_as_planned(load, quantization):
    if quantization and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    room = {None: 3 * GIB, "nf4": int(1.8 * GIB)}[quantization]
    target, tokenizer, placement = load(
        quantization=quantization, max_length=1024, max_memory={0: room, "cpu": 16 * GIB}
    )
    assert dict(getattr(target, "hf_device_map", {"": 0})) == placement.plan.device_map
    assert quantization or placement.plan.num_offloaded > 0
    assert speaks(target, tokenizer, 1024).reason is None
