"""Is everything as it was found once the last handle is gone, and inert for whoever did not ask?"""

import copy
import gc
import logging
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.host.generate import TESTED_RANGE
from tests.integration.pairs import assert_as_plain, llama, noisy_copy, pair, prompts, speculates


def configs(model):
    """Everything that a call or a save reads of a model's configs, hidden fields included."""
    return copy.deepcopy((model.config.to_dict(), vars(model.generation_config)))


def test_importing_the_package_changes_nothing_in_transformers():
    code = (
        "from transformers import GenerationConfig, GenerationMixin\n"
        "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks\n"
        "def found(): return [GenerationMixin.__dict__['generate'], GenerationMixin.__dict__['_sample'],\n"
        "    dict(vars(GenerationConfig)), dict(type(masks)._global_mapping)]\n"
        "before = found()\n"
        "import hf_specdec\n"
        "assert found() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registered_wraps_are_there_while_a_handle_lives(as_found):
    with hf_specdec.register():
        assert not as_found()
    assert as_found()


def test_register_is_counted(as_found):
    handles = [hf_specdec.register() for _ in range(3)]
    wrapped = GenerationMixin.__dict__["generate"]
    for handle in (handles[1], handles[0]):
        handle.remove()
        handle.remove()  # the second time is harmless and does not count
        assert GenerationMixin.__dict__["generate"] is wrapped
    handles[2].remove()
    assert as_found()


def test_register_is_thread_safe(as_found):
    start, failures = threading.Barrier(8), []

    def work():
        start.wait()
        try:
            for _ in range(200):
                with hf_specdec.register():
                    assert hasattr(GenerationMixin.__dict__["generate"], "__wrapped__")
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert as_found()


def test_both_models_configs_are_as_found_after_remove(as_found):
    target, draft = pair()
    target.generation_config.temperature = 0.7
    before = configs(target), configs(draft)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        assert target.generation_config.speculative_config == {"method": "draft_model", "num_speculative_tokens": 3}
        target.generate(**prompts(), max_new_tokens=8, do_sample=True, top_k=5)
        assert configs(draft) == before[1]
    assert (configs(target), configs(draft)) == before
    assert as_found()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_newest_handle_wins_and_any_order_of_removal_is_clean(order, as_found):
    target = llama()
    drafts = [noisy_copy(target, seed=seed) for seed in range(3)]
    before = configs(target)
    handles = [hf_specdec.enable(target, draft, num_speculative_tokens=k + 1) for k, draft in enumerate(drafts)]
    live = [0, 1, 2]
    for index in order:
        target.generate(**prompts(), max_new_tokens=12)
        assert max(speculates(target).draft_lengths) == max(live) + 1
        handles[index].remove()
        handles[index].remove()
        live.remove(index)
    assert configs(target) == before
    assert as_found()
    target.generate(**prompts(), max_new_tokens=2)  # plain again


def test_exception_inside_the_with_block_undoes(as_found):
    target, draft = pair()
    before = configs(target)
    with pytest.raises(KeyError), hf_specdec.enable(target, draft):
        raise KeyError
    assert configs(target) == before
    assert as_found()


class Explode(LogitsProcessor):
    position_wise = True

    def __init__(self, after):
        self.after = after

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.after:
            raise KeyError("from the user's processor")
        return scores


def test_exception_inside_generate_leaves_the_next_call_right(as_found):
    target, draft = pair()
    inputs = prompts(2)
    plain = target.generate(**inputs, max_new_tokens=10)
    with hf_specdec.enable(target, draft):
        with pytest.raises(KeyError, match="from the user's processor"):
            target.generate(**inputs, max_new_tokens=10, logits_processor=[Explode(9)])
        assert_as_plain(target, plain, **inputs, max_new_tokens=10)
        assert target.generate(**inputs, max_new_tokens=10, speculative_config=False).tolist() == plain.tolist()
    assert as_found()


def test_a_target_may_draft_for_itself():
    target = llama()
    plain = target.generate(**prompts(2), max_new_tokens=12)
    with hf_specdec.enable(target, target, num_speculative_tokens=3):
        report = assert_as_plain(target, plain, **prompts(2), max_new_tokens=12)
    assert report.acceptance_rate == 1.0


@pytest.mark.parametrize("is_removed", [True, False], ids=["handle removed", "handle outstanding"])
@pytest.mark.parametrize("draft_is_target", [True, False], ids=["own draft", "another draft"])
def test_deleting_the_target_frees_target_and_draft(is_removed, draft_is_target, as_found):
    target = llama()
    draft = target if draft_is_target else noisy_copy(target)
    alive = weakref.ref(target), weakref.ref(draft)
    handle = hf_specdec.enable(target, draft)
    output = target.generate(**prompts(2), max_new_tokens=6, return_dict_in_generate=True)
    target.generate(**prompts(), max_new_tokens=6)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    again = torch.cat([output.sequences, torch.full((2, 1), 5)], dim=1)
    keyword = "cache" if "cache" in output else "past_key_values"
    mask = torch.cat([prompts(2)["attention_mask"], torch.ones(2, 7, dtype=torch.long)], dim=1)
    target.generate(input_ids=again, attention_mask=mask, max_new_tokens=4, **{keyword: cache})
    if is_removed:
        handle.remove()
    del target, draft
    gc.collect()
    assert [model() for model in alive] == [None, None]
    assert cache.get_seq_length() > 0  # the caller's cache holds neither
    assert as_found()
    handle.remove()


def compiled_frames(with_plugin):
    """(frames compiled, outputs) of a plain model, compiled whole, over several lengths and a cache."""
    torch._dynamo.reset()
    model, counter = llama(num_hidden_layers=1), CompileCounter()
    handle = hf_specdec.register() if with_plugin else None
    try:
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        with torch.no_grad():
            outputs = [
                compiled(input_ids=prompts(2, length)["input_ids"], use_cache=False).logits for length in (5, 6, 9)
            ]
            masked = prompts(2, 7)
            outputs.append(compiled(**masked, use_cache=False).logits)
    finally:
        if handle is not None:
            handle.remove()
    torch._dynamo.reset()
    return counter.frame_count, outputs


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_plain_model_compiled_whole_neither_breaks_nor_recompiles():
    without, expected = compiled_frames(with_plugin=False)
    frames, outputs = compiled_frames(with_plugin=True)
    assert frames == without > 0
    for output, reference in zip(outputs, expected, strict=True):
        assert torch.equal(output, reference)


def test_calls_without_the_flag_are_untouched_while_registered():
    target, draft = pair()
    other = noisy_copy(target, seed=5)
    inputs = prompts(2)
    plain = target.generate(**inputs, max_new_tokens=8), other.generate(**inputs, max_new_tokens=8)
    with hf_specdec.register(), hf_specdec.enable(target, draft):
        assert other.generate(**inputs, max_new_tokens=8).tolist() == plain[1].tolist()
        assert hf_specdec.report(other) is None
        torch.manual_seed(0)
        sampled = other.generate(**inputs, max_new_tokens=8, do_sample=True)
    torch.manual_seed(0)
    assert other.generate(**inputs, max_new_tokens=8, do_sample=True).tolist() == sampled.tolist()


def test_environment_variable_makes_a_living_handle_inert(monkeypatch):
    target, draft = pair()
    plain = target.generate(**prompts(), max_new_tokens=8)
    with hf_specdec.enable(target, draft):
        monkeypatch.setenv("HF_SPECDEC", "0")
        assert target.generate(**prompts(), max_new_tokens=8).tolist() == plain.tolist()
        assert target.generate(**prompts(), max_new_tokens=8, speculative_config=True).tolist() == plain.tolist()
        assert hf_specdec.report(target) is None
        monkeypatch.delenv("HF_SPECDEC")
        assert_as_plain(target, plain, **prompts(), max_new_tokens=8)


def test_environment_variable_makes_new_handles_inert(monkeypatch, as_found):
    monkeypatch.setenv("HF_SPECDEC", "0")
    target, draft = pair()
    before = configs(target)
    plain = target.generate(**prompts(), max_new_tokens=8)
    with hf_specdec.register(), hf_specdec.enable(target, draft):
        assert target.generate(**prompts(), max_new_tokens=8).tolist() == plain.tolist()
        assert hf_specdec.report(target) is None
    assert configs(target) == before
    assert as_found()


def without_streamer(
    self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, **inputs
):
    raise NotImplementedError


@pytest.mark.parametrize("change", ["parameter", "method", "registry"])
def test_unexpected_transformers_keeps_the_plugin_inert_with_one_warning(change, monkeypatch, caplog, as_found):
    if change == "parameter":
        monkeypatch.setattr(GenerationMixin, "_sample", without_streamer)
        problem = "GenerationMixin._sample takes no streamer"
    elif change == "method":
        monkeypatch.delattr(GenerationMixin, "_prefill")
        problem = "GenerationMixin._prefill is missing"
    else:
        monkeypatch.setattr(type(transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS), "_global_mapping", ())
        problem = "the attention-mask registry looks different"
    monkeypatch.setattr(hf_specdec.integration, "_PROBLEMS_NAMED", set(), raising=False)
    generate = GenerationMixin.__dict__["generate"]
    target, draft = pair()
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        with hf_specdec.register(), hf_specdec.enable(target, draft):
            assert GenerationMixin.__dict__["generate"] is generate
            assert not hasattr(GenerationConfig, "speculative_config")
        hf_specdec.register().remove()
    texts = [record.getMessage() for record in caplog.records if record.name == "hf_specdec"]
    version = transformers.__version__
    assert texts == [f"hf_specdec stays inert: {problem} in transformers {version}; tested with {TESTED_RANGE}."]
    monkeypatch.undo()
    assert as_found()


class Gate(BaseStreamer):
    """Holds a call after its fourth put until the test lets it go on."""

    def __init__(self):
        self.num_put, self.reached, self.go_on = 0, threading.Event(), threading.Event()

    def put(self, value):
        self.num_put += 1
        if self.num_put == 4:
            self.reached.set()
            assert self.go_on.wait(30)

    def end(self):
        pass


def test_removing_the_last_handle_during_a_call_does_not_change_its_text(as_found):
    # A reader that leaves its `with` block early removes the masks' wraps under a call that still runs in its thread.
    target, draft = pair()
    inputs = prompts(3)
    plain = target.generate(**inputs, max_new_tokens=24)
    gate, outputs = Gate(), []
    handle = hf_specdec.enable(target, draft)
    thread = threading.Thread(
        target=lambda: outputs.append(target.generate(**inputs, max_new_tokens=24, streamer=gate))
    )
    thread.start()
    assert gate.reached.wait(30)
    handle.remove()
    gate.go_on.set()
    thread.join()
    assert outputs[0].tolist() == plain.tolist()
    assert as_found()


def test_a_moved_model_is_followed():
    target, draft = pair()
    with hf_specdec.enable(target, draft):
        target.to(torch.float64)  # dtype and device are read at each call; the draft stays in float32
        plain = target.generate(**prompts(2), max_new_tokens=10, speculative_config=False)
        assert_as_plain(target, plain, **prompts(2), max_new_tokens=10)


def test_enable_refuses_what_is_no_model_before_it_changes_anything(as_found):
    target, draft = pair()
    before = configs(target)
    with pytest.raises(TypeError, match=r"enable\(\) expects a transformers model that can generate, got int\."):
        hf_specdec.enable(3, draft)
    with pytest.raises(TypeError, match="The draft must be a Hub id, a folder or a loaded PreTrainedModel, got int"):
        hf_specdec.enable(target, 3)
    with pytest.raises(ValueError, match="Unknown speculative_config key 'num_tokens'"):
        hf_specdec.enable(target, draft, num_tokens=3)
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be at least 1 or .auto., got 0"):
        hf_specdec.enable(target, draft, num_speculative_tokens=0)
    assert configs(target) == before
    assert as_found()


def test_models_that_draft_for_one_another_are_freed(as_found):
    one, two = pair()
    hf_specdec.enable(one, two)
    hf_specdec.enable(two, one)
    watched = [weakref.ref(one), weakref.ref(two)]
    del one, two
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
    assert as_found()


def test_flag_is_understood_while_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setenv("HF_SPECDEC", "0")
    target, _ = pair()
    plain = target.generate(**prompts(), max_new_tokens=8)
    with hf_specdec.register():
        out = target.generate(**prompts(), max_new_tokens=8, speculative_config={"num_speculative_tokens": 2})
    assert out.tolist() == plain.tolist()


def test_removed_handle_leaves_no_finalizer():
    target, draft = pair()
    before = len(weakref.finalize._registry)
    for _ in range(3):
        hf_specdec.enable(target, draft).remove()
    assert len(weakref.finalize._registry) == before
