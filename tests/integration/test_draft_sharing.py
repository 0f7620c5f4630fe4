"""Is a draft that several targets name loaded once, as its keys say, and gone with the last of them?"""

import ctypes
import gc
import json
import sys
import weakref

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec.host import loading
from tests.integration.pairs import pair, prompts, speculates

NEW = 8

pytestmark = [
    # bitsandbytes speaks of what it may do later
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def home(tmp_path):
    """A target's folder whose generation config names the draft in it."""
    target, draft = pair(hidden_size=64)
    target.save_pretrained(tmp_path)
    draft.to(torch.bfloat16).save_pretrained(tmp_path / "draft")
    path = tmp_path / "generation_config.json"
    data = json.loads(path.read_text())
    data.pop("_from_model_config", None)  # transformers drops what does not come from there
    path.write_text(json.dumps(data | {"speculative_config": {"model": "draft", "num_speculative_tokens": 2}}))
    return tmp_path


@pytest.fixture
def loads(monkeypatch):
    """The drafts that were read from files, as weak references."""
    made, load = [], loading._load

    def watched(*args):
        draft = load(*args)
        made.append(weakref.ref(draft))
        return draft

    monkeypatch.setattr(loading, "_load", watched)
    return made


def target_of(home):
    return AutoModelForCausalLM.from_pretrained(home).eval()


def generate(target, **options):
    target.generate(**prompts(), max_new_tokens=NEW, **options)
    return speculates(target)


def test_targets_that_name_one_draft_in_data_and_in_code_share_it(home, loads):
    first, second, third = (target_of(home) for _ in range(3))
    with hf_specdec.register():
        generate(first)
        generate(second)
        with hf_specdec.enable(third, home / "draft", num_speculative_tokens=2):
            generate(third)
    assert len(loads) == 1


def test_draft_goes_with_the_last_target_that_named_it(home, loads):
    targets = [target_of(home), target_of(home)]
    with hf_specdec.register():
        for target in targets:
            generate(target)
    del target
    targets.pop()
    gc.collect()
    assert loads[0]() is not None
    targets.pop()
    gc.collect()
    assert loads[0]() is None


def test_draft_goes_with_the_last_handle_while_the_target_lives(home, loads):
    target = target_of(home)
    handles = [hf_specdec.enable(target, home / "draft", num_speculative_tokens=2) for _ in range(2)]
    generate(target)
    handles.pop().remove()
    gc.collect()
    assert loads[0]() is not None
    handles.pop().remove()
    gc.collect()
    assert len(loads) == 1
    assert loads[0]() is None


@pytest.mark.parametrize(
    ("flag", "dtype", "is_quantized"),
    [
        ({"dtype": "float32"}, torch.float32, False),
        ({"dtype": "bfloat16", "device": "cpu"}, torch.bfloat16, False),
        ({"quantization": "nf4"}, torch.bfloat16, True),
        ({"quantization": "int8", "dtype": "float32"}, torch.float32, True),
        ({"quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}}, torch.bfloat16, True),
    ],
)
def test_keys_are_of_the_draft_and_never_of_the_target(home, loads, flag, dtype, is_quantized):
    if is_quantized:
        pytest.importorskip("bitsandbytes")
    target = target_of(home)
    plain = target.generate(**prompts(2), max_new_tokens=NEW)
    with hf_specdec.register():
        flag = {"model": "draft", "num_speculative_tokens": 2, **flag}
        assert target.generate(**prompts(2), max_new_tokens=NEW, speculative_config=flag).tolist() == plain.tolist()
        speculates(target)
    draft = loads[0]()
    assert draft.dtype == dtype
    assert bool(getattr(draft, "is_quantized", False)) == is_quantized
    assert (target.dtype, getattr(target, "is_quantized", False)) == (torch.float32, False)


def test_settings_apart_are_drafts_apart(home, loads):
    target = target_of(home)
    with hf_specdec.register():
        for dtype in ("float32", "bfloat16", "float32"):
            generate(target, speculative_config={"model": "draft", "num_speculative_tokens": 2, "dtype": dtype})
    assert len(loads) == 2


def test_memory_of_a_draft_comes_back(home, tmp_path):
    config = LlamaConfig(
        vocab_size=40, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "large")
    target, process = target_of(home), psutil.Process()
    size = 4 * sum(weight.numel() for weight in LlamaForCausalLM(config).parameters())

    def in_use():
        """Bytes of this process, without what its allocator keeps for later."""
        gc.collect()
        if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
            ctypes.CDLL(None).malloc_trim(0)
        return process.memory_info().rss

    def used_by_a_call():
        """(bytes while the draft is held, bytes after it went)."""
        # Another dtype than the file's: weights are then memory of this process, and no pages of the file.
        with hf_specdec.enable(target, tmp_path / "large", dtype="float32", num_speculative_tokens=2):
            generate(target)
            held = in_use()
        return held, in_use()

    used_by_a_call()
    first, _ = used_by_a_call()
    for _ in range(3):
        held, after = used_by_a_call()
        assert held - first < 0.3 * size  # one that stayed would stand beside the next
        assert held - after > 0.3 * size  # threads that read files give some of it back later
