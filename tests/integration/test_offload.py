"""Targets and drafts whose weights accelerate keeps elsewhere: the text is plain's, and speculation runs."""

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_specdec
from tests.integration.pairs import pair, prompts


def on_cpu(model, folder):
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def on_disk(model, folder):
    accelerate.disk_offload(model, str(folder / "weights"), execution_device=torch.device("cpu"))
    return model


def half_on_disk(model, folder):
    model.save_pretrained(folder / "model")
    places = {name: "cpu" for name, _ in model.model.named_children() if name != "layers"}
    device_map = {f"model.{name}": place for name, place in places.items()} | {"lm_head": "disk"}
    device_map |= {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(len(model.model.layers))}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=device_map, offload_folder=str(folder / "weights")
    )


@pytest.mark.filterwarnings("ignore")  # accelerate speaks about its own future
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}])
@pytest.mark.parametrize("place", [on_cpu, on_disk, half_on_disk])
def test_offloaded_target_and_draft_give_plains_text(place, options, tmp_path):
    target, draft = pair()
    call = {**prompts(3), **options, "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**call)
    (tmp_path / "target").mkdir()
    (tmp_path / "draft").mkdir()
    target, draft = place(target, tmp_path / "target"), place(draft, tmp_path / "draft")
    for proposes in (draft, target):
        with hf_specdec.enable(target, proposes, num_speculative_tokens=3):
            assert target.generate(**call).tolist() == plain.tolist()
        report = hf_specdec.report(target)
        assert report.reason is None
        assert report.accepted > 0


@pytest.mark.filterwarnings("ignore")  # accelerate speaks about its own future
@pytest.mark.parametrize("place", [on_cpu, on_disk])
def test_hook_calls_per_token_fall_by_the_mean_acceptance_length(place, tmp_path, monkeypatch):
    """Weights are fetched once per pass, whatever it scores."""
    target, draft = pair()
    target = place(target, tmp_path)
    fetches, fetch = [], accelerate.hooks.AlignDevicesHook.pre_forward

    def counted(hook, module, *args, **kwargs):
        fetches.append(hook.offload)
        return fetch(hook, module, *args, **kwargs)

    monkeypatch.setattr(accelerate.hooks.AlignDevicesHook, "pre_forward", counted)
    call = {**prompts(1), "max_new_tokens": 33, "do_sample": False}
    target.generate(**{**call, "max_new_tokens": 1})
    per_pass = sum(fetches)
    fetches.clear()
    target.generate(**call)
    plain = sum(fetches) - per_pass  # the prefill is the same in both
    fetches.clear()
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        target.generate(**call)
    speculative = sum(fetches) - per_pass
    report = hf_specdec.report(target)
    assert per_pass > 0
    assert plain == 32 * per_pass
    assert report.mean_acceptance_length > 1.2
    assert plain / speculative == pytest.approx(report.mean_acceptance_length)
