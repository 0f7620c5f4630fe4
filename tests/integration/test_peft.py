"""PEFT: do flag and report follow a PeftModel, and does its own base model draft for it, adapters left as found?"""

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.host.adapters import adapters_off
from tests.integration.pairs import VOCAB, assert_as_plain, llama, noisy_copy, prompts, speculates

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning"),
]
NEW = 24


def lora(rank=4, seed=0, **options):
    torch.manual_seed(seed)
    return LoraConfig(target_modules=["q_proj", "v_proj"], r=rank, lora_alpha=rank, init_lora_weights=False, **options)


@pytest.fixture
def adapted():
    """A LoRA model that differs from its base on some tokens, not on all."""
    model = get_peft_model(llama(), lora()).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight *= 0.3
    return model


def switches(model):
    """All that PEFT keeps of which adapters are on."""
    layers = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    weights = {name: weight.requires_grad for name, weight in model.named_parameters()}
    actives = [tuple(getattr(layer, "active_adapters", ())) for layer in layers]
    return [layer._disable_adapters for layer in layers], actives, weights, model.training


# --- the flag -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("through", ["peft", "inner"])
def test_flag_and_report_follow_a_peft_model(adapted, batch, through):
    inner = adapted.get_base_model()
    plain = adapted.generate(**prompts(batch), max_new_tokens=NEW)
    base_text = noisy_copy(llama(), 0.0).generate(**prompts(batch), max_new_tokens=NEW)
    assert plain.tolist() != base_text.tolist()
    with hf_specdec.enable(adapted if through == "peft" else inner, noisy_copy(llama()), num_speculative_tokens=3):
        for model in (adapted, inner):
            report = assert_as_plain(model, plain, **prompts(batch), max_new_tokens=NEW)
            assert 0 < report.accepted < report.drafted
            assert hf_specdec.report(adapted) == hf_specdec.report(inner) == report
        off = adapted.generate(**prompts(batch), max_new_tokens=NEW, speculative_config=False)
        assert off.tolist() == plain.tolist()
    assert (
        inner.generation_config.speculative_config is None
        if hasattr(type(inner.generation_config), "speculative_config")
        else "speculative_config" not in vars(inner.generation_config)
    )


def test_flag_and_assistant_model_per_call(adapted):
    plain = adapted.generate(**prompts(), max_new_tokens=NEW)
    draft = noisy_copy(llama())
    with hf_specdec.register():
        options = {"assistant_model": draft, "speculative_config": {"num_speculative_tokens": 2}}
        report = assert_as_plain(adapted, plain, **prompts(), max_new_tokens=NEW, **options)
    assert max(report.draft_lengths) == 2


def test_a_peft_model_may_be_the_draft(adapted):
    target = noisy_copy(llama(), seed=3)
    plain = target.generate(**prompts(2), max_new_tokens=NEW)
    with hf_specdec.enable(target, adapted):
        before = switches(adapted)
        assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW)
        assert switches(adapted) == before


def test_a_saved_adapter_that_is_loaded_again_follows(adapted, tmp_path):
    plain = adapted.generate(**prompts(2), max_new_tokens=NEW)
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(llama(), tmp_path).eval()
    with hf_specdec.enable(again, method="base"):
        assert_as_plain(again, plain, **prompts(2), max_new_tokens=NEW)


# --- the base model drafts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_base_drafts_with_the_adapters_off(adapted, batch):
    inputs = {**prompts(batch), "max_new_tokens": NEW}
    plain = adapted.generate(**inputs)
    seen = []
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    before = switches(adapted)
    with hf_specdec.enable(adapted, method="base", num_speculative_tokens=3):
        # Not on the adapter layer itself: hooks there are how adapter_names works.
        adapted.get_base_model().lm_head.register_forward_pre_hook(lambda *_: seen.append(layer._disable_adapters))
        report = assert_as_plain(adapted, plain, **inputs)
    assert report.method == "base"
    assert 0.2 < report.acceptance_rate < 1
    assert {True, False} == set(seen)
    assert seen.count(False) == report.target_passes + 1  # the target's passes and its prefill, adapters on
    assert switches(adapted) == before


def test_base_drafts_for_sampling_with_the_same_draws_for_one_seed(adapted):
    def drawn(seed):
        torch.manual_seed(seed)
        return adapted.generate(**prompts(2), max_new_tokens=NEW, do_sample=True).tolist()

    with hf_specdec.enable(adapted, method="base"):
        first = drawn(1)
        assert 0.2 < speculates(adapted).acceptance_rate < 1
        assert drawn(1) == first
        assert drawn(2) != first


def test_base_per_call_and_in_the_config(adapted):
    plain = adapted.generate(**prompts(), max_new_tokens=NEW)
    with hf_specdec.register():
        assert_as_plain(adapted, plain, **prompts(), max_new_tokens=NEW, speculative_config="base")
        adapted.get_base_model().generation_config.speculative_config = {"method": "base"}
        assert_as_plain(adapted, plain, **prompts(), max_new_tokens=NEW)


def test_base_follows_the_active_adapter(adapted):
    adapted.add_adapter("other", lora(seed=5))
    texts = {}
    for name in ("default", "other"):
        adapted.set_adapter(name)
        plain = adapted.generate(**prompts(), max_new_tokens=NEW)
        before = switches(adapted)
        with hf_specdec.enable(adapted, method="base"):
            assert_as_plain(adapted, plain, **prompts(), max_new_tokens=NEW)
        assert switches(adapted) == before
        texts[name] = plain.tolist()
    assert texts["default"] != texts["other"]


def test_adapters_put_into_a_model_without_a_peft_model_around_it():
    target = inject_adapter_in_model(lora(), llama())  # as target.add_adapter() does
    plain = target.generate(**prompts(2), max_new_tokens=NEW)
    with hf_specdec.enable(target, method="base"):
        report = assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW)
    assert 0 < report.acceptance_rate < 1


def test_a_saved_module_is_off_too():
    # `modules_to_save` replaces a module; the base model has the original one.
    model = get_peft_model(llama(), lora(modules_to_save=["lm_head"])).eval()
    base = model.get_base_model()
    ids = prompts()["input_ids"]
    with torch.no_grad():
        base.lm_head.modules_to_save["default"].weight.mul_(-1)
        with adapters_off(base):
            logits = base(ids).logits
        assert torch.allclose(logits, llama()(ids).logits, atol=1e-5)
        assert not torch.allclose(base(ids).logits, logits, atol=1e-2)


def test_adapters_partly_off_are_left_partly_off(adapted):
    layer = adapted.get_base_model().model.layers[1].self_attn.q_proj
    layer._disable_adapters = True
    plain, before = adapted.generate(**prompts(), max_new_tokens=NEW), switches(adapted)
    with hf_specdec.enable(adapted, method="base"):
        assert_as_plain(adapted, plain, **prompts(), max_new_tokens=NEW)
    assert switches(adapted) == before


def test_inside_disable_adapter_a_draft_still_drafts_and_base_says_why_not(adapted):
    draft = noisy_copy(llama())
    with adapted.disable_adapter():
        plain = adapted.generate(**prompts(), max_new_tokens=NEW)
        assert plain.tolist() == llama().generate(**prompts(), max_new_tokens=NEW).tolist()
        with hf_specdec.enable(adapted, draft):
            assert_as_plain(adapted, plain, **prompts(), max_new_tokens=NEW)
        with hf_specdec.enable(adapted, method="base"):
            assert adapted.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()
            assert hf_specdec.report(adapted).reason == "no draft: the target's adapters are off already"


def test_a_chat_on_one_cache_goes_on_with_the_base(adapted):
    from tests.parity.test_caches import cache_of, cache_option

    def turns():
        ids, cache, texts = prompts()["input_ids"], None, []
        for _ in range(3):
            option = {} if cache is None else cache_option(adapted.get_base_model(), cache)
            out = adapted.generate(input_ids=ids, max_new_tokens=8, return_dict_in_generate=True, **option)
            cache = cache_of(out)
            ids = torch.cat([out.sequences, torch.tensor([[5, 6, 7]])], dim=1)
            texts.append(out.sequences.tolist())
        return texts

    plain = turns()
    with hf_specdec.enable(adapted, method="base"):
        assert turns() == plain
        speculates(adapted)


# --- exceptions -----------------------------------------------------------------------------------------------------


class Raises(BaseStreamer):
    """Raises after some tokens."""

    def __init__(self, error):
        self.left, self.error = 6, error

    def put(self, value):
        self.left -= 1
        if not self.left:
            raise self.error

    def end(self):
        raise AssertionError("ended")


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt("mine")])
def test_adapters_are_as_found_after_an_exception_of_the_callers(adapted, error):
    plain, before = adapted.generate(**prompts(), max_new_tokens=NEW), switches(adapted)
    with hf_specdec.enable(adapted, method="base"):
        with pytest.raises(type(error), match="mine"):
            adapted.generate(**prompts(), max_new_tokens=NEW, streamer=Raises(error))
        assert switches(adapted) == before
        assert_as_plain(adapted, plain, **prompts(), max_new_tokens=NEW)
    assert switches(adapted) == before


@pytest.mark.parametrize("fails_at", [0, 3])
@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt("mine")])
def test_adapters_are_as_found_after_an_exception_in_a_draft_forward(adapted, error, fails_at):
    base = adapted.get_base_model()
    layer = base.model.layers[0].self_attn.q_proj
    plain, before, passes = adapted.generate(**prompts(), max_new_tokens=NEW), switches(adapted), []

    def fail(*_):
        if layer._disable_adapters:
            passes.append(1)
            if len(passes) > fails_at:
                raise error

    hook = base.model.layers[1].mlp.register_forward_pre_hook(fail)
    with hf_specdec.enable(adapted, method="base"):
        if isinstance(error, RuntimeError):  # the draft's failure: the call goes on without it
            assert adapted.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()
            assert any("no memory" in note for note in hf_specdec.report(adapted).notes)
        else:
            with pytest.raises(KeyboardInterrupt, match="mine"):
                adapted.generate(**prompts(), max_new_tokens=NEW)
        assert switches(adapted) == before
        hook.remove()
        assert_as_plain(adapted, plain, **prompts(), max_new_tokens=NEW)
    assert switches(adapted) == before


# --- what decodes plainly -------------------------------------------------------------------------------------------


# PEFT's prefix tuning knows the cache by the keyword of older transformers; plain decoding has the same warning.
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set:FutureWarning")
@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
@pytest.mark.parametrize("flag", [{}, {"method": "base"}])
def test_prompt_learning_decodes_plainly_with_the_reason(kind, flag):
    torch.manual_seed(0)
    target = get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    plain = target.generate(**prompts(), max_new_tokens=NEW)
    draft = None if flag else noisy_copy(llama())
    with hf_specdec.enable(target, draft, **flag):
        assert target.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()
    reason = hf_specdec.report(target).reason
    if flag:
        assert reason == "no draft: method 'base' drafts with the adapters off, and the target has none"
    else:
        assert reason == "prompt-learning adapter (its virtual tokens are not in the text)"


@pytest.mark.parametrize("flag", [{}, {"method": "base"}])
def test_rows_of_different_adapters_decode_plainly_and_the_next_call_speculates(adapted, flag):
    adapted.add_adapter("other", lora(seed=5))
    options = {**prompts(3), "max_new_tokens": NEW}
    names = ["default", "__base__", "other"]
    plain, plain_one = adapted.generate(**options, adapter_names=names), adapted.generate(**options)
    before = switches(adapted)
    with hf_specdec.enable(adapted, None if flag else noisy_copy(llama()), **flag):
        assert adapted.generate(**options, adapter_names=names).tolist() == plain.tolist()
        assert hf_specdec.report(adapted).reason == "adapter_names (rows of different adapters)"
        assert switches(adapted) == before
        assert_as_plain(adapted, plain_one, **options)


def test_streaming_from_an_adapted_model(adapted):
    from tests.integration.texts import TEXT_VOCAB, text_pair, tokenizer

    assert TEXT_VOCAB > VOCAB
    words = tokenizer()
    model = get_peft_model(text_pair()[0], lora()).eval()
    inputs = words("hi there", return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=NEW)
    with hf_specdec.enable(model, method="base"):
        streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=30)
        model.generate(**inputs, max_new_tokens=NEW, streamer=streamer)
        assert "".join(streamer) == words.decode(plain[0, inputs["input_ids"].shape[1] :])
        speculates(model)
