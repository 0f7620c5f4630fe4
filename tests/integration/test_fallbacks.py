"""Is every reason for plain decoding reached, said once, and is the text then plain's own?"""

import functools
import logging

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import distributed
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    QuantizedCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_specdec
from hf_specdec.host import families
from hf_specdec.host.binding import unwrap
from hf_specdec.host.reasons import mode_reason, why_plain
from hf_specdec.host.runner import cache_keyword
from tests.integration.pairs import VOCAB, assert_as_plain, llama, noisy_copy, pair, prompts, speculates

NEW = 10


def falls_back(caplog, target, draft, reason, batch=2, inputs=None, flag=None, **options):
    """Two flagged calls give plain's text (under plain's seed), name `reason` in the report, and warn once."""
    options = {**(prompts(batch) if inputs is None else inputs), "max_new_tokens": NEW, **options}

    def run():
        torch.manual_seed(7)
        output = target.generate(**{name: value() if callable(value) else value for name, value in options.items()})
        return getattr(output, "sequences", output).tolist()

    plain = run()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hf_specdec"), hf_specdec.enable(target, draft, **(flag or {})):
        for _ in range(2):
            assert run() == plain
            report = hf_specdec.report(target)
            assert report.reason == reason
            assert (report.steps, report.drafted) == (0, 0)
            assert report.decision == f"Plain decoding: {reason}"
            assert str(report).startswith(f"Plain decoding ran: {reason}")
    warnings = [record.getMessage() for record in caplog.records if record.name == "hf_specdec"]
    assert warnings == [f"{type(unwrap(target)).__name__} decodes plainly, without speculation: {reason}."]
    return report


class AsItIs:
    """A value that `falls_back` hands over uncalled."""

    def __init__(self, value):
        self.value = value

    def __call__(self):
        return self.value


# --- what the call asks for -----------------------------------------------------------------------------------------


def test_beam_search(caplog):
    falls_back(caplog, *pair(), "beam search", num_beams=2)


def test_beam_sampling(caplog):
    falls_back(caplog, *pair(), "beam search", num_beams=2, do_sample=True)


def append_five(model, input_ids, **kwargs):
    return torch.cat([input_ids, torch.full((len(input_ids), 1), 5)], dim=1)


def test_custom_generate(caplog):
    falls_back(caplog, *pair(), "custom_generate", custom_generate=AsItIs(append_five))


@pytest.mark.parametrize("name", ["constraints", "force_words_ids", "dola_layers", "penalty_alpha"])
def test_modes_that_moved_to_the_hub(name):
    # Their loops are downloaded; the reason is asked for directly.
    assert mode_reason(llama(), {name: 1}.get) == f"decoding mode of {name}"


def test_use_cache_false(caplog):
    falls_back(caplog, *pair(), "use_cache=False", use_cache=False)


def test_output_attentions(caplog):
    target, draft = pair(attn_implementation="eager")
    falls_back(caplog, target, draft, "output_attentions", output_attentions=True, return_dict_in_generate=True)


def test_inputs_embeds(caplog):
    target, draft = pair()
    inputs = prompts(2)
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    inputs = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    falls_back(caplog, target, draft, "model input inputs_embeds", inputs=inputs)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_synced_gpus(caplog, one_rank):
    falls_back(caplog, *pair(), "synced_gpus (ranks must run the same number of forwards)", synced_gpus=True)


def test_tensor_parallel_draft(caplog):
    target, draft = pair()
    target._tp_size = draft._tp_size = 2
    reason = "tensor parallel draft (rank 0 drafts alone, so the draft has to be whole there)"
    falls_back(caplog, target, draft, reason)
    target._tp_size = None
    falls_back(caplog, target, draft, "the draft is split over ranks, and the target is not")


def test_pipeline_parallel(caplog):
    target, draft = pair()
    target._pp_stage = object()
    falls_back(caplog, target, draft, "pipeline parallel (a rank holds some of the layers only)")


def test_no_draft(caplog):
    falls_back(caplog, llama(), None, "no draft", flag={"method": "draft_model"})


# --- logits processors ----------------------------------------------------------------------------------------------


def test_classifier_free_guidance(caplog):
    reason = "stateful logits processor UnbatchedClassifierFreeGuidanceLogitsProcessor"
    falls_back(caplog, *pair(), reason, batch=1, guidance_scale=1.5)


def test_synthid_watermark(caplog):
    config = transformers.SynthIDTextWatermarkingConfig(keys=[3, 5, 7, 11], ngram_len=3)
    reason = "stateful logits processor SynthIDTextWatermarkLogitsProcessor"
    falls_back(caplog, *pair(), reason, do_sample=True, watermarking_config=AsItIs(config))


class EveryOther(LogitsProcessor):
    """Keeps state: every second call forbids the best token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls % 2:
            return scores
        return scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)


def test_unknown_processor(caplog):
    reason = "logits processor EveryOther is not known to be position-wise (position_wise = True declares it)"
    falls_back(caplog, *pair(), reason, logits_processor=lambda: [EveryOther()])


class ForbidSeven(LogitsProcessor):
    position_wise = True

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 7] = -torch.inf
        return scores


def test_processor_that_declares_itself_position_wise_speculates():
    target, draft = pair()
    options = {**prompts(3), "max_new_tokens": NEW, "logits_processor": [ForbidSeven()]}
    plain = target.generate(**options)
    with hf_specdec.enable(target, draft):
        assert_as_plain(target, plain, **options)


def test_processor_with_state_speculates_in_one_row():
    target, draft = pair()
    options = {**prompts(1), "max_new_tokens": NEW}
    plain = target.generate(**options, logits_processor=[EveryOther()])
    with hf_specdec.enable(target, draft):
        assert_as_plain(target, plain, **options, logits_processor=[EveryOther()])


# --- caches and attention -------------------------------------------------------------------------------------------


def test_static_cache(caplog):
    falls_back(caplog, *pair(), "StaticCache has one length for all rows", cache_implementation="static")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloading needs an accelerator")
def test_offloaded_cache(caplog):
    target, draft = (model.cuda() for model in pair())
    inputs = {name: value.cuda() for name, value in prompts(2).items()}
    falls_back(caplog, target, draft, "offloaded cache", inputs=inputs, cache_implementation="offloaded")


def test_quantized_cache(caplog):
    pytest.importorskip("optimum.quanto")
    falls_back(caplog, *pair(), "QuantizedCache has one length for all rows", cache_implementation="quantized")


def test_caches_that_this_machine_cannot_run_have_their_reasons():
    target = llama()
    offloaded = DynamicCache(config=target.config)
    offloaded.offloading = True
    quantized = QuantizedCache.__new__(QuantizedCache)
    for cache, reason in ((offloaded, "offloaded cache"), (quantized, "QuantizedCache has one length for all rows")):
        inputs = {"use_cache": True, cache_keyword(target): cache}
        assert (
            why_plain(
                target,
                target.generation_config,
                LogitsProcessorList(),
                False,
                inputs,
                torch.ones((1, 4), dtype=torch.long),
            )
            == reason
        )


class OwnCache(DynamicCache):
    """A user's subclass, of which nothing is known."""


def test_unknown_cache_class(caplog):
    target, draft = pair()
    keyword = cache_keyword(target)
    reason = "OwnCache has one length for all rows"
    falls_back(caplog, target, draft, reason, **{keyword: lambda: OwnCache(config=target.config)})


def test_attention_without_masks_for_ragged_rows(caplog):
    AttentionInterface.register("of_my_own", sdpa_attention_forward)
    AttentionMaskInterface.register("of_my_own", sdpa_mask)
    try:
        target, draft = pair()
        target.set_attn_implementation("of_my_own")
        reason = "attention implementation of_my_own has no masks for rows of different lengths"
        falls_back(caplog, target, draft, reason)
    finally:
        del AttentionInterface._global_mapping["of_my_own"]
        del AttentionMaskInterface._global_mapping["of_my_own"]


# --- targets --------------------------------------------------------------------------------------------------------

TINY = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
IDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def mamba():
    torch.manual_seed(0)
    return transformers.MambaForCausalLM(transformers.MambaConfig(**TINY, **IDS, state_size=4)).eval()


def jamba():
    torch.manual_seed(0)
    config = transformers.JambaConfig(
        **TINY,
        **IDS,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
    )
    return transformers.JambaForCausalLM(config).eval()


def lfm2():
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        **TINY,
        **IDS,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
    )
    return transformers.Lfm2ForCausalLM(config).eval()


def gpt_neo():
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
        **IDS,
    )
    return transformers.GPTNeoForCausalLM(config).eval()


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def xlnet():
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=2, n_head=2, d_inner=16, pad_token_id=0)
    return transformers.XLNetLMHeadModel(config).eval()


TARGETS = {
    "recurrent": (mamba, "recurrent state of MambaForCausalLM"),
    "hybrid": (jamba, "recurrent state of JambaForCausalLM"),
    "encoder-decoder": (t5, "encoder-decoder target"),
    "convolution": (lfm2, "cache layer LinearAttentionLayer cannot be rolled back per row"),
    "local slots": (
        gpt_neo,
        "GPTNeoForCausalLM cannot have rows of different lengths: its local layers cut their window by slot inside the "
        "attention module",
    ),
    "own cache": (xlnet, "XLNetLMHeadModel brings a cache of its own"),
}


@pytest.mark.parametrize("with_own_kind", [True, False], ids=["draft of its kind", "attention draft"])
@pytest.mark.parametrize("kind", TARGETS)
def test_target_of_another_kind(kind, with_own_kind, caplog):
    make, reason = TARGETS[kind]
    target = make()
    draft = noisy_copy(target) if with_own_kind else llama()
    inputs = prompts(1)
    falls_back(caplog, target, draft, reason, inputs=inputs)


DRAFTS = {
    "recurrent": (mamba, "the draft MambaForCausalLM has recurrent state"),
    "convolution": (lfm2, "the draft's cache layer LinearAttentionLayer cannot be rolled back per row"),
    "local slots": (
        gpt_neo,
        "draft: GPTNeoForCausalLM cannot have rows of different lengths: its local layers cut their window by slot "
        "inside the attention module",
    ),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_draft_of_another_kind(kind, caplog):
    make, reason = DRAFTS[kind]
    falls_back(caplog, llama(), make(), reason)


class OwnLoop(LlamaForCausalLM):
    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)


def as_class(cls, model_type="llama"):
    """The tiny Llama as a `cls`, its config naming `model_type`."""
    model = llama()
    model.__class__ = cls
    model.config.model_type = model_type
    return model


def test_model_with_a_decoding_loop_of_its_own(caplog):
    falls_back(caplog, as_class(OwnLoop), llama(), "OwnLoop has a decoding loop of its own")


class PositionsFromLongestRow(LlamaForCausalLM):
    """Remote code that ignores position_ids and counts from the cache: one length for all rows."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = 0 if cache is None else cache.get_seq_length()
        position_ids = torch.arange(past, past + input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class TwoAtMost(LlamaForCausalLM):
    """Cannot run a block of three."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids=None, **kwargs):
        if input_ids.shape[1] == 3:
            raise RuntimeError("two tokens at most")
        return super().forward(input_ids=input_ids, **kwargs)


class Odd(LlamaForCausalLM):
    """Right, and of a family that no suite covers."""

    passes = 0

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        Odd.passes += 1
        return super().forward(*args, **kwargs)


def test_family_that_fails_its_check_says_by_how_much(caplog):
    target = as_class(PositionsFromLongestRow, "of_nobody")
    with hf_specdec.register():
        reason = families.why_not_ragged(target)
    assert reason.startswith("PositionsFromLongestRow failed the per-row length check: logits differ by ")
    falls_back(caplog, target, llama(), reason)


def test_family_that_cannot_run_its_check_says_why(caplog):
    reason = "TwoAtMost failed the per-row length check: RuntimeError: two tokens at most"
    falls_back(caplog, as_class(TwoAtMost, "of_nobody"), llama(), reason)


def test_draft_that_fails_its_check_is_named(caplog):
    reason = "draft: TwoAtMost failed the per-row length check: RuntimeError: two tokens at most"
    falls_back(caplog, llama(), as_class(TwoAtMost, "of_nobody"), reason)


def test_family_that_passes_its_check_speculates_and_is_checked_once():
    target = as_class(Odd, "of_nobody")
    inputs = prompts(3)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with hf_specdec.enable(target, noisy_copy(llama())):
        passes = []
        for _ in range(2):
            Odd.passes = 0
            report = assert_as_plain(target, plain, **inputs, max_new_tokens=NEW)
            passes.append(Odd.passes - report.target_passes)
    assert passes[0] - passes[1] in range(1, 5)  # at most four passes, the first time


# --- adapters -------------------------------------------------------------------------------------------------------

peft_asks = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted(**adapters):
    """The tiny Llama with one LoRA adapter per keyword, of that rank."""
    names = list(adapters)
    lora = [LoraConfig(target_modules=["q_proj"], r=rank, init_lora_weights=False) for rank in adapters.values()]
    model = get_peft_model(llama(), lora[0], adapter_name=names[0])
    for name, config in zip(names[1:], lora[1:], strict=True):
        model.add_adapter(name, config)
    return model.eval()


@peft_asks
@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
def test_prompt_learning_adapter(caplog):
    torch.manual_seed(0)
    target = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    falls_back(caplog, target, llama(), "prompt-learning adapter (its virtual tokens are not in the text)")


@peft_asks
def test_adapters_by_row(caplog):
    target = adapted(first=2, second=4)
    names = ["first", "second"]
    falls_back(caplog, target, llama(), "adapter_names (rows of different adapters)", adapter_names=AsItIs(names))


@peft_asks
def test_base_without_adapters(caplog):
    reason = "no draft: method 'base' drafts with the adapters off, and the target has none"
    falls_back(caplog, llama(), None, reason, flag={"method": "base"})


@peft_asks
def test_base_with_merged_adapters(caplog):
    target = adapted(only=2)
    target.merge_adapter()
    falls_back(
        caplog, target, None, "no draft: method 'base' cannot switch merged adapters off", flag={"method": "base"}
    )


@peft_asks
def test_base_with_adapters_off(caplog):
    target = adapted(only=2)
    target.base_model.disable_adapter_layers()
    falls_back(caplog, target, None, "no draft: the target's adapters are off already", flag={"method": "base"})


# --- what is no reason ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 3, "do_sample": True},
        {"stopping_criteria": [lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 12)]},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        {"output_scores": True, "output_logits": True, "output_hidden_states": True, "return_dict_in_generate": True},
        {"prefill_chunk_size": 3},
        {"max_time": 60.0},
        {"renormalize_logits": True, "remove_invalid_values": True, "bad_words_ids": [[5], [6, 7]]},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fallback_is_no_way_out(options, attention):
    target, draft = pair(attn_implementation=attention)
    with hf_specdec.enable(target, draft):
        target.generate(**prompts(3), max_new_tokens=NEW, **options)
        speculates(target)


def test_warnings_are_per_model_and_reason(caplog):
    first, second = pair(0), pair(1)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for target, draft in (first, second, first):
            with hf_specdec.enable(target, draft):
                for options in ({"use_cache": False}, {"num_beams": 2}, {"use_cache": False}):
                    target.generate(**prompts(), max_new_tokens=2, **options)
    assert caplog.text.count("use_cache=False") == caplog.text.count("beam search") == 2
