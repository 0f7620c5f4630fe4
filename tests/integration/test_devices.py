"""Does no tensor meet one of another device, wherever target, draft and the caller's ids lie?

Without accelerators: `tests.places` gives tensors devices that are not there. `tests/gpu` asks real ones.
"""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_specdec
from tests.integration.pairs import VOCAB, llama, noisy_copy, prompts, speculates
from tests.places import CPU, Places, put, spread

FIRST, SECOND, THIRD = (torch.device("xpu", index) for index in range(3))
NEW = 16

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are calling .generate"),  # ids may lie elsewhere, and often do
    pytest.mark.filterwarnings("ignore:User provided device_type"),
]

SPLIT = {
    "": FIRST,
    "model.embed_tokens": FIRST,
    "model.rotary_emb": FIRST,
    "model.layers.0": FIRST,
    "model.layers.1": SECOND,
    "model.norm": SECOND,
    "lm_head": SECOND,
}


def whole(model, place):
    return spread(model, {"": place, "model.embed_tokens": place, "lm_head": place})


class Bias(LogitsProcessor):
    """Holds a tensor where the ids lie, as plain decoding's scores do."""

    position_wise = True

    def __init__(self, place):
        generator = torch.Generator().manual_seed(0)
        self.bias = put(torch.rand((1, VOCAB), generator=generator), place)

    def __call__(self, input_ids, scores):
        assert input_ids.device == scores.device == self.bias.device
        return scores + self.bias


class Never(StoppingCriteria):
    """Compares with a tensor of its own."""

    def __init__(self, place):
        self.ids = put(torch.tensor([VOCAB + 1]), place)

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1:] == self.ids).any(dim=1)


def options(place, **more):
    return {
        **prompts(3, 8),
        "max_new_tokens": NEW,
        "eos_token_id": [7, 11],
        "pad_token_id": 0,
        "logits_processor": LogitsProcessorList([Bias(place)]),
        "stopping_criteria": StoppingCriteriaList([Never(place)]),
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 3,
        **more,
    }


def placed(inputs, place):
    return {name: put(value, place) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


@pytest.fixture
def plain():
    """The text of the whole target on one device."""
    return llama().generate(**options(CPU)).tolist()


@pytest.mark.parametrize("ids_at", [CPU, FIRST, SECOND], ids=str)
@pytest.mark.parametrize("draft_at", [CPU, FIRST, SECOND, THIRD], ids=str)
def test_target_over_two_devices_and_the_draft_anywhere(ids_at, draft_at, plain):
    target, draft = spread(llama(), SPLIT), whole(noisy_copy(llama()), draft_at)
    with Places() as places, hf_specdec.enable(target, draft, num_speculative_tokens=3):
        ids = target.generate(**placed(options(ids_at), ids_at))
        assert ids.device == ids_at
    assert ids.tolist() == plain
    report = speculates(target)
    assert report.accepted > 0
    assert report.notes == []
    assert places.met[FIRST] > 0
    assert places.met[SECOND] > 0
    assert places.met[draft_at] > 0


@pytest.mark.parametrize("flag", [{}, {"method": "ngram"}, {"method": "early_exit"}, {"method": "suffix"}], ids=str)
def test_sampling_with_scores_and_a_cache_to_keep(flag):
    target, draft = spread(llama(), SPLIT), whole(noisy_copy(llama()), THIRD)
    with Places(), hf_specdec.enable(target, draft, num_speculative_tokens=3):
        more = {"do_sample": True, "top_k": 0, "return_dict_in_generate": True, "output_scores": True}
        output = target.generate(
            **placed(options(FIRST, **more), FIRST), output_hidden_states=True, speculative_config=flag
        )
        assert output.sequences.device == FIRST
        assert {scores.device for scores in output.scores} == {FIRST}
        cache = output["cache" if "cache" in output else "past_key_values"]
        assert [layer.keys.device for layer in cache.layers] == [FIRST, SECOND]
    report = hf_specdec.report(target)
    assert report.reason is None
    assert not [note for note in report.notes if "the draft failed" in note]


def test_the_mode_hears_of_a_tensor_on_the_wrong_device():
    broken = {**SPLIT}
    del broken["model.layers.1"]
    target = spread(llama(), broken)
    for tensor in target.model.layers[1].parameters():
        put(tensor, SECOND)
    with Places(), pytest.raises(RuntimeError, match="met tensors on"):
        target.generate(**placed(prompts(1), FIRST), max_new_tokens=4)
