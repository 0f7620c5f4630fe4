"""Is the plugin's own copy what the flag asks for, made once, and is the user's draft left alone?"""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.host import draft_copy, reasons
from hf_specdec.host.draft_copy import copy_facts, kept_ids, original, own_copy
from hf_specdec.host.knowledge import pass_bytes
from hf_specdec.host.reasons import why_draft_unfit
from tests.integration.pairs import VOCAB, llama

KEPT = [0, 1, 2, 3, 4, 5, 6, 7]
IDS = torch.tensor([[3, 9, 4, 7, 30]])

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def draft(dtype=torch.float32, bias=False, **changes):
    model = llama(hidden_size=64, **changes).to(dtype)
    if bias:
        model.lm_head.bias = nn.Parameter(torch.randn(VOCAB, dtype=dtype))
    return model


def made(model, target=None, **flag):
    return own_copy(model, SpeculativeConfig(**flag), model if target is None else target, is_in_code=True)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def state(model):
    return {name: (value.clone(), value.data_ptr(), value.dtype) for name, value in model.state_dict().items()}


QUANTIZATIONS = pytest.mark.parametrize("quantization", ["int8", "nf4"])
TIED = pytest.mark.parametrize("is_tied", [True, False])


def needs(quantization):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")


# --- the short list ---------------------------------------------------------------------------------------------------


@TIED
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cut_head_gives_the_drafts_logits_of_the_kept_ids(is_tied, bias, dtype):
    model = draft(dtype, bias, tie_word_embeddings=is_tied)
    cut = made(model, draft_vocab=8)
    assert kept_ids(cut).tolist() == KEPT
    assert cut.lm_head.weight.shape == (8, 64)
    assert cut.get_input_embeddings().weight.shape == (VOCAB, 64)
    assert logits(cut).dtype == dtype
    # Matrices of other sizes are summed in another order.
    torch.testing.assert_close(logits(cut), logits(model)[..., KEPT], rtol=0.02, atol=1e-4)


def test_short_list_holds_the_ends_of_texts_of_draft_and_target():
    model, target = draft(), draft()
    model.generation_config.eos_token_id = [30, 31]
    model.config.eos_token_id = 32
    target.generation_config.eos_token_id = 33
    assert kept_ids(made(model, target, draft_vocab=2)).tolist() == [0, 1, 30, 31, 32, 33]


def test_short_list_holds_the_tokenizers_special_tokens(monkeypatch):
    tokenizer = type("Tokenizer", (), {"all_special_ids": [20, 21]})()
    monkeypatch.setattr(draft_copy, "find_tokenizer", lambda model: tokenizer)
    assert kept_ids(made(draft(), draft_vocab=2)).tolist() == [0, 1, 20, 21]


def test_counts_say_which_ids_are_frequent(tmp_path):
    (tmp_path / "counts.json").write_text('{"17": 5, "9": 7, "3": 1}')
    path = str(tmp_path / "counts.json")
    assert kept_ids(made(draft(), draft_vocab=path)).tolist() == [3, 9, 17]
    assert kept_ids(made(draft(), draft_vocab={"counts": path, "size": 2})).tolist() == [9, 17]


def test_a_list_of_all_ids_is_no_copy():
    model = draft()
    assert made(model, draft_vocab=VOCAB) is model
    assert made(model, draft_vocab=VOCAB + 5) is model


def test_without_the_keys_there_is_no_copy():
    model = draft()
    assert made(model) is model
    assert (kept_ids(model), original(model), copy_facts(model)) == (None, model, ())


# --- fewer bits -------------------------------------------------------------------------------------------------------


@QUANTIZATIONS
@TIED
def test_converted_copy_computes_nearly_what_the_draft_does(quantization, is_tied):
    needs(quantization)
    model = draft(torch.bfloat16, tie_word_embeddings=is_tied)
    got, expected = logits(made(model, draft_quantization=quantization)).float(), logits(model).float()
    assert float((got - expected).norm() / expected.norm()) < {"int8": 0.1, "nf4": 0.4}[quantization]


@QUANTIZATIONS
def test_both_keys_make_one_copy(quantization):
    needs(quantization)
    model = draft(tie_word_embeddings=True)
    both = made(model, draft_quantization=quantization, draft_vocab=8)
    assert kept_ids(both).tolist() == KEPT
    whole = logits(made(model, draft_quantization=quantization))[..., KEPT]
    torch.testing.assert_close(logits(both), whole, rtol=0.01, atol=0.01)
    [fact, *_] = copy_facts(both)
    assert fact.startswith(f"Draft converted to {quantization} and cut to 8 of 40 ids in 0.")


def test_four_bit_copy_keeps_its_head_and_its_dtype():
    pytest.importorskip("bitsandbytes")
    copied = made(draft(torch.bfloat16), draft_quantization="nf4")
    assert type(copied.lm_head) is nn.Linear
    assert type(copied.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert logits(copied).dtype == torch.bfloat16
    assert copied.config.quantization_config.bnb_4bit_compute_dtype == torch.bfloat16


def test_eight_bit_copy_computes_in_float32_and_keeps_its_embedding():
    model = draft(torch.bfloat16)
    copied = made(model, draft_quantization="int8")
    assert logits(copied).dtype == torch.float32
    embedding = copied.get_input_embeddings().weight
    assert (embedding.dtype, embedding.data_ptr()) == (torch.bfloat16, model.get_input_embeddings().weight.data_ptr())
    assert copied.model.norm.weight.dtype == torch.float32
    assert not any(isinstance(module, nn.Linear) for module in copied.modules())


@QUANTIZATIONS
def test_layers_with_transposed_weights_are_converted(quantization):
    needs(quantization)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=64, n_layer=1, n_head=2)).eval()
    got, expected = logits(made(model, draft_quantization=quantization)), logits(model)
    assert float((got - expected).norm() / expected.norm()) < 0.2


@QUANTIZATIONS
def test_a_pass_of_the_copy_reads_fewer_bytes(quantization):
    needs(quantization)
    model = draft()
    whole = pass_bytes(model)
    assert pass_bytes(made(model, draft_quantization=quantization)) < whole / 2
    assert pass_bytes(made(model, draft_vocab=8)) == whole - (VOCAB - 8) * 64 * 4


# --- the user's draft -------------------------------------------------------------------------------------------------


@QUANTIZATIONS
@TIED
def test_the_draft_is_left_as_it_was(quantization, is_tied):
    needs(quantization)
    model = draft(torch.bfloat16, tie_word_embeddings=is_tied)
    before, modules = state(model), dict(model.named_modules())
    configs = model.config.to_dict(), model.generation_config.to_dict()
    copied = made(model, draft_quantization=quantization, draft_vocab=8)
    logits(copied)
    assert dict(model.named_modules()) == modules
    assert (model.config.to_dict(), model.generation_config.to_dict()) == configs
    after = state(model)
    assert before.keys() == after.keys()
    for name, (value, pointer, dtype) in before.items():
        assert torch.equal(value, after[name][0]), name
        assert (pointer, dtype) == after[name][1:], name
    assert not {id(weight) for weight in model.parameters()} & {id(weight) for weight in copied.parameters()}
    model.to(torch.float64)
    assert copied.get_input_embeddings().weight.dtype == torch.bfloat16
    assert logits(model).dtype == torch.float64


def test_the_copy_is_in_eval_mode_and_needs_no_gradients():
    model = draft().train()
    copied = made(model, draft_vocab=8)
    assert model.training
    assert not any(module.training for module in copied.modules())
    assert not any(weight.requires_grad for weight in copied.parameters())


def test_a_copy_made_in_inference_mode_works_outside():
    model = draft()
    with torch.inference_mode():
        copied = made(model, draft_quantization="int8", draft_vocab=8)
    assert not any(weight.is_inference() for weight in copied.parameters())
    logits(copied)
    assert made(model, draft_quantization="int8", draft_vocab=8) is copied


# --- once, and no longer than the draft -------------------------------------------------------------------------------


def test_it_is_made_once_per_settings_and_shared_between_targets():
    model, first, second = draft(), draft(), draft()
    copied = made(model, first, draft_vocab=8)
    assert made(model, second, draft_vocab=8) is copied
    assert made(model, first, draft_vocab=9) is not copied
    assert made(model, first, draft_vocab=8) is copied
    assert original(copied) is model


def test_it_is_made_anew_when_the_weights_changed_or_moved():
    model = draft()
    copied = made(model, draft_vocab=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    again = made(model, draft_vocab=8)
    assert again is not copied
    torch.testing.assert_close(logits(again), logits(model)[..., KEPT])
    model.to(torch.float64)
    assert made(model, draft_vocab=8).dtype == torch.float64


def test_counts_are_read_once(tmp_path):
    path = tmp_path / "counts.txt"
    path.write_text("5\n6\n")
    model = draft()
    copied = made(model, draft_vocab=str(path))
    path.unlink()
    assert made(model, draft_vocab=str(path)) is copied


@pytest.mark.parametrize("flag", [{"draft_quantization": "int8"}, {"draft_vocab": 8}, {"draft_vocab": VOCAB}])
def test_it_goes_with_the_draft(flag):
    model = draft()
    target = draft()
    watches = weakref.ref(model), weakref.ref(made(model, target, **flag))
    del model
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


def test_threads_that_ask_at_once_get_one_copy():
    model, copies, barrier = draft(), [], threading.Barrier(4)

    def ask():
        barrier.wait()
        copies.append(made(model, draft_quantization="int8"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(copies) == 4
    assert len({id(each) for each in copies}) == 1


def test_a_copy_of_an_unknown_class_is_judged_by_its_draft(monkeypatch):
    """Rounding inputs to 8 bits, which depends on what else is in the forward, is no fault of the model's masks."""
    model, asked = draft(), []
    copied = made(model, draft_quantization="int8")
    monkeypatch.setattr(reasons, "why_not_ragged", lambda each: asked.append(each))
    assert why_draft_unfit(copied) is None
    assert asked == [model]


# --- errors -----------------------------------------------------------------------------------------------------------


def error_of(model, **flag):
    with pytest.raises(ValueError, match=".") as caught:
        made(model, **flag)
    return str(caught.value)


def test_a_missing_file_of_counts_is_named():
    assert error_of(draft(), draft_vocab="nowhere.json") == (
        "draft_vocab names the token counts 'nowhere.json', and there is no such file. Make it with "
        "hf_specdec.count_tokens(tokenizer, texts, path), or pass the number of ids."
    )


def test_a_head_that_is_no_linear_layer_is_named():
    class Head(nn.Linear):
        pass

    model = draft()
    model.lm_head.__class__ = Head
    assert error_of(model, draft_vocab=8) == (
        "draft_vocab cuts a plain linear output head, and LlamaForCausalLM has Head. Leave draft_vocab out."
    )


def test_a_draft_whose_weights_are_elsewhere_is_named():
    assert error_of(draft().to("meta"), draft_quantization="int8") == (
        "The draft LlamaForCausalLM is offloaded. Leave draft_quantization out, or load the draft without device_map."
    )


def test_a_quantized_draft_is_not_quantized_again():
    model = draft()
    model.is_quantized = True
    assert error_of(model, draft_quantization="int8") == (
        "The draft LlamaForCausalLM is quantized already. Leave draft_quantization out."
    )


def test_a_draft_with_its_weights_elsewhere_than_in_linear_layers_is_named():
    class Fused(nn.Linear):
        pass

    model = copy.deepcopy(draft())
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fused
    assert error_of(model, draft_quantization="int8").startswith(
        "Most weights of the draft LlamaForCausalLM are not in linear layers"
    )
