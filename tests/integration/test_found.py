"""Faults that a hostile but fair user found; each case says what it shows. All are mended."""

import copy

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MoshiConfig,
    MoshiForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLTextConfig,
    RoFormerConfig,
    RoFormerForCausalLM,
    SiglipVisionConfig,
)

import hf_specdec
from hf_specdec.host.runner import cache_keyword

VOCAB = 48
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def redrawn(model):
    """Weights at which attention decides the next token."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                spread = 1.0 if "embed" in name or "wte" in name or "wpe" in name else 1.3 / weight.shape[-1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model.float().eval()


def noisy(model, noise=0.04):
    """A draft that often agrees."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() >= 2:
                weight.add_(torch.randn(weight.shape, generator=generator) * noise * weight.std())
    return draft


def ragged(rows=3):
    """Rows of 13, 9 and 3 tokens, padded on the left; or 11 in one row."""
    generator = torch.Generator().manual_seed(5)
    if rows == 1:
        return {"input_ids": torch.randint(2, VOCAB, (1, 11), generator=generator)}
    ids = torch.randint(2, VOCAB, (3, 13), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 10)):
        ids[row, :padding] = mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_plain_text(target, draft, new=40, draft_length=4, **inputs):
    """Greedy float32 text is plain's; returns the report."""
    options = {"do_sample": False, "max_new_tokens": new, **inputs}
    expected = target.generate(**options)
    with hf_specdec.enable(target, draft, num_speculative_tokens=draft_length):
        actual = target.generate(**options)
        report = hf_specdec.report(target)
    assert actual.tolist() == expected.tolist(), (report.reason, report.notes)
    return report


def llama(**changes):
    """A tiny Llama."""
    torch.manual_seed(0)
    return redrawn(LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})))


def test_llama4_attention_temperature_counts_slots():
    """Llama4 (attn_temperature_tuning, on in Scout at floor_scale 8192) takes the slot of the longest row for every
    row: ragged rows get a wrong scale near multiples of floor_scale. The per-row length check only reaches slot 11."""
    options = {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 8, "no_rope_layers": [0] * 4}
    torch.manual_seed(0)
    config = Llama4TextConfig(**SHAPE, **options, floor_scale=16, attn_scale=3.0, attn_temperature_tuning=True)
    target = redrawn(Llama4ForCausalLM(config))
    assert_plain_text(target, noisy(target, 0.1), new=100, **ragged())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["moshi", "llama", "llama-chunk"])
def test_window_in_the_config_and_a_full_mask_in_the_model(kind, rows):
    """DynamicCache makes sliding layers from `config.sliding_window` (or `attention_chunk_size`) whatever mask the
    model builds. Moshi (window 3000), and any Llama-like config.json with such a key, then see the last window in plain
    decoding and all kept keys in a verify pass."""
    if kind == "moshi":
        shape = {key: value for key, value in SHAPE.items() if key != "intermediate_size"}
        torch.manual_seed(0)
        target = redrawn(MoshiForCausalLM(MoshiConfig(**shape, ffn_dim=48, head_dim=8, sliding_window=8)))
    else:
        target = llama(**{"sliding_window" if kind == "llama" else "attention_chunk_size": 8})
    assert_plain_text(target, noisy(target), **ragged(rows))


class SlotCounting(LlamaForCausalLM):
    """A user's own subclass: scores depend on the cache's length."""

    def forward(self, input_ids=None, cache=None, **kwargs):
        """Adds 3 to one logit per slot."""
        past = cache.get_seq_length() if cache is not None else 0
        output = super().forward(input_ids=input_ids, cache=cache, **kwargs)
        slots = (torch.arange(input_ids.shape[1]) + past)[-output.logits.shape[1] :, None]
        output.logits = output.logits + 3.0 * (torch.arange(VOCAB)[None] == (slots * 7) % VOCAB)
        return output


def test_subclass_of_a_trusted_family_is_tried():
    """A subclass written by the user keeps model_type "llama" and is no remote code, so it is never tried."""
    plain = llama()
    target = SlotCounting(plain.config).eval()
    target.load_state_dict(plain.state_dict())
    target.generation_config = copy.deepcopy(plain.generation_config)
    assert_plain_text(target, noisy(plain), new=20, **ragged())


def test_verdict_does_not_outlive_the_weights():
    """With weights as initialised nothing depends on positions to 1e-3 and the check passes; after training (here:
    load_state_dict) the same object is trusted, and its text is wrong. RoFormer is one that the check refuses."""
    shape = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    torch.manual_seed(0)
    target = RoFormerForCausalLM(RoFormerConfig(**shape, embedding_size=32, is_decoder=True)).eval()
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    trained = redrawn(copy.deepcopy(target))
    draft = copy.deepcopy(target)
    with hf_specdec.enable(target, draft):
        target.generate(**ragged(), max_new_tokens=4, do_sample=False)
    target.load_state_dict(trained.state_dict())
    draft.load_state_dict(noisy(trained).state_dict())
    assert_plain_text(target, draft, **ragged())


@pytest.mark.parametrize("is_headless", [True, False])
def test_draft_without_a_head(is_headless):
    """`AutoModel.from_pretrained` in place of AutoModelForCausalLM is a common slip: refuse it or go on."""
    from transformers import LlamaForSequenceClassification

    target = llama()
    draft = noisy(target).model if is_headless else LlamaForSequenceClassification(target.config).eval()
    try:
        handle = hf_specdec.enable(target, draft)
    except (TypeError, ValueError):
        return
    with handle:
        target.generate(**ragged(), max_new_tokens=5, do_sample=False)


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


def llava():
    """Its text model is a Llama."""
    vision = CLIPVisionConfig(**VISION)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=LlamaConfig(**SHAPE), vision_config=vision, image_token_index=VOCAB - 1)
    )


def gemma3():
    """Sliding and full layers, and masks that look at token types."""
    kinds = ["sliding_attention", "full_attention"] * 2
    text = Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=8, layer_types=kinds)
    special = {"image_token_index": VOCAB - 1, "boi_token_index": VOCAB - 2, "eoi_token_index": VOCAB - 3}
    vision = SiglipVisionConfig(**VISION)
    special |= {"tie_word_embeddings": False}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **special)
    return Gemma3ForConditionalGeneration(config)


def qwen2_vl():
    """Positions of three axes."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = Qwen2VLTextConfig(**SHAPE, rope_parameters=rope).to_dict()
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
    special = {"image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2}
    special |= {"vision_start_token_id": VOCAB - 3, "vision_end_token_id": VOCAB - 4}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [llava, gemma3, qwen2_vl], ids=lambda make: make.__name__)
def test_text_only_call_of_a_multimodal_class_speculates(make, rows):
    """Gemma3, Mistral3, Qwen-VL, Llava …: `mm_encoder_outputs={}` in a text-only call was taken for an input."""
    torch.manual_seed(0)
    target = redrawn(make())
    inputs = ragged(rows)
    inputs["input_ids"] = inputs["input_ids"].clamp(max=VOCAB - 5)
    special = [VOCAB - 1 - i for i in range(4)]
    report = assert_plain_text(target, noisy(target, 0.1), suppress_tokens=special, **inputs)
    assert report.reason is None, report.reason
    assert 0 < report.accepted < report.reached


def test_call_with_an_image_decodes_plainly():
    """Beside the one above: where the encoder gave something, the loop does not carry it on."""
    torch.manual_seed(0)
    target = redrawn(llava())
    ids = torch.tensor([[2, *[VOCAB - 1] * 4, 3, 4]])
    report = assert_plain_text(target, noisy(target), pixel_values=torch.ones(1, 3, 28, 28), input_ids=ids)
    assert report.reason in ("model input mm_encoder_outputs", "model input pixel_values"), report.reason


def test_cache_from_inference_mode_used_outside_it():
    """Turn one inside torch.inference_mode, turn two outside: plain works; the draft fails and drafts nothing."""
    target = llama()
    cache = DynamicCache(config=target.config)
    with hf_specdec.enable(target, noisy(target)):
        with torch.inference_mode():
            first = target.generate(**ragged(1), max_new_tokens=10, do_sample=False, **{cache_keyword(target): cache})
        more = torch.cat([first, first[:, :2]], dim=1)
        target.generate(more, max_new_tokens=10, do_sample=False, **{cache_keyword(target): cache})
        report = hf_specdec.report(target)
    assert not report.notes, report.notes
    assert report.drafted > 0


def test_draft_at_the_end_of_learned_positions_is_not_called_broken():
    """Text is right, but the note says that the draft failed (IndexError) where its context ended for one row."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "eos_token_id": None}
    target = redrawn(GPT2LMHeadModel(GPT2Config(**shape, tie_word_embeddings=False)))
    report = assert_plain_text(target, noisy(target), new=19, draft_length=64, **ragged())
    assert not any("failed" in note for note in report.notes), report.notes
