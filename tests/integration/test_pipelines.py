"""Does a text-generation pipeline speculate wherever the flag stands, and do others fall back with the reason?"""

import copy
import logging

import pytest
import torch
from transformers import (
    GenerationConfig,
    Speech2TextConfig,
    Speech2TextFeatureExtractor,
    Speech2TextForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

import hf_specdec
from tests.integration.pairs import noisy_copy, speculates
from tests.integration.texts import save, text_pair, tokenizer

GREEDY = {"do_sample": False, "max_new_tokens": 24}
PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Names of the saved target and draft."""
    folder = tmp_path_factory.mktemp("pipelines")
    return [save(model, folder / name) for model, name in zip(text_pair(), ("target", "draft"), strict=True)]


@pytest.fixture
def pipe(folders):
    return pipeline("text-generation", folders[0])


@pytest.fixture
def draft():
    return text_pair()[1]


def new_text(pipe, *args, **options):
    """(prompt → generated text), and the report of a call that has to have speculated."""
    out = pipe(*args, **options)
    return out, speculates(pipe.model)


def test_flag_in_the_models_generation_config(pipe, draft):
    plain = pipe(PROMPT, **GREEDY)
    with hf_specdec.enable(pipe, draft, num_speculative_tokens=3):  # a pipeline is unwrapped
        out, report = new_text(pipe, PROMPT, **GREEDY)
        assert out == plain
        assert report.accepted > 0
        assert max(report.draft_lengths) == 3
        assert hf_specdec.report(pipe) == report


def test_flag_in_the_pipelines_own_generation_config(folders, draft):
    with hf_specdec.register():
        config = GenerationConfig(**GREEDY, speculative_config={"model": folders[1], "num_speculative_tokens": 2})
        pipe = pipeline("text-generation", folders[0], generation_config=config)
        plain = pipe(PROMPT, generation_config=GenerationConfig(**GREEDY))
        # A folder elsewhere that data names is not loaded; the model's own draft is.
        with pytest.raises(ValueError, match="is named in data and points outside the target's checkpoint folder"):
            pipe(PROMPT)
        config.speculative_config = {"num_speculative_tokens": 2}
        pipe = pipeline("text-generation", folders[0], generation_config=config)
        with hf_specdec.enable(pipe.model, draft):
            out, report = new_text(pipe, PROMPT)
            assert out == plain
            assert max(report.draft_lengths) == 2


def test_a_copy_of_the_models_config_keeps_the_draft(pipe, folders):
    # Servers and scripts hand a copy of model.generation_config over; it names a draft that is bound already.
    plain = pipe(PROMPT, **GREEDY)
    for source in (folders[1], text_pair()[1]):
        with hf_specdec.enable(pipe.model, source, num_speculative_tokens=3):
            config = copy.deepcopy(pipe.model.generation_config)
            config.update(**GREEDY)
            out, report = new_text(pipe, PROMPT, generation_config=config)
            assert out == plain
            assert max(report.draft_lengths) == 3
            config.speculative_config["num_speculative_tokens"] = 5
            out, report = new_text(pipe, PROMPT, generation_config=config)
            assert out == plain
            assert max(report.draft_lengths) == 5


def test_flag_as_an_argument_of_pipeline(folders):
    flag = {"num_speculative_tokens": 2}
    with hf_specdec.register():
        pipe = pipeline("text-generation", folders[0], speculative_config=flag)
        plain = pipe(PROMPT, **GREEDY, speculative_config=False)
        with hf_specdec.enable(pipe.model, text_pair()[1]):
            out, report = new_text(pipe, PROMPT, **GREEDY)
    assert out == plain
    assert max(report.draft_lengths) == 2


def test_flag_per_call(pipe, draft):
    plain = pipe(PROMPT, **GREEDY)
    with hf_specdec.enable(pipe.model, draft, num_speculative_tokens=3):
        assert pipe(PROMPT, **GREEDY, speculative_config=False) == plain
        assert hf_specdec.report(pipe.model) is None
        out, report = new_text(pipe, PROMPT, **GREEDY, speculative_config={"num_speculative_tokens": 5})
        assert out == plain
        assert max(report.draft_lengths) == 5


def test_assistant_model_of_the_pipeline_is_the_draft(folders, draft):
    plain = pipeline("text-generation", folders[0])(PROMPT, **GREEDY)
    for assistant in (folders[1], draft):
        pipe = pipeline("text-generation", folders[0], assistant_model=assistant)
        with hf_specdec.register():
            out, report = new_text(pipe, PROMPT, **GREEDY, speculative_config=True)
            assert out == plain
            assert report.accepted > 0
            # … in a batch too, which transformers' own assisted decoding refuses.
            batch = [PROMPT, "hi", "A longer prompt than the others"]
            out, report = new_text(pipe, batch, batch_size=3, **GREEDY, speculative_config=True)
        assert out[0] == plain


def test_assistant_model_per_call(pipe, draft):
    plain = pipe(PROMPT, **GREEDY)
    with hf_specdec.register():
        out, _ = new_text(pipe, PROMPT, **GREEDY, assistant_model=draft, speculative_config=True)
    assert out == plain


def test_chat_messages_over_two_turns(pipe, draft):
    def turns():
        messages = CHAT
        for question in ("and then?", "why?"):
            messages = pipe(messages, **GREEDY)[0]["generated_text"]
            assert messages[-1]["role"] == "assistant"
            messages = [*messages, {"role": "user", "content": question}]
        return messages

    plain = turns()
    with hf_specdec.enable(pipe.model, draft):
        assert turns() == plain
        speculates(pipe.model)


def test_batches_of_prompts_and_of_chats(pipe, draft):
    prompts = [PROMPT, "hi", "A longer prompt than the others", "x"]
    chats = [CHAT, [{"role": "user", "content": "tell me a story"}]]
    plain = pipe(prompts, batch_size=4, **GREEDY), pipe(chats, batch_size=2, **GREEDY)
    with hf_specdec.enable(pipe.model, draft):
        out, report = new_text(pipe, prompts, batch_size=4, **GREEDY)
        assert out == plain[0]
        assert report.prefill_emitted == 4
        assert new_text(pipe, chats, batch_size=2, **GREEDY)[0] == plain[1]


def test_stop_sequence(pipe, draft):
    full = pipe(PROMPT, **GREEDY, return_full_text=False)[0]["generated_text"]
    stop = full[9:11]
    plain = pipe(PROMPT, **GREEDY, stop_sequence=stop)
    assert len(plain[0]["generated_text"]) < len(PROMPT) + len(full)
    with hf_specdec.enable(pipe.model, draft):
        out, report = new_text(pipe, PROMPT, **GREEDY, stop_sequence=stop)
    assert out == plain
    assert report.emitted == len(plain[0]["generated_text"]) - len(PROMPT)  # a token per character


def test_new_text_only(pipe, draft):
    plain = pipe(PROMPT, **GREEDY, return_full_text=False)
    with hf_specdec.enable(pipe.model, draft):
        out, _ = new_text(pipe, PROMPT, **GREEDY, return_full_text=False)
    assert out == plain
    assert not out[0]["generated_text"].startswith(PROMPT)


def test_scores_come_with_the_text(pipe, draft):
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    plain = pipe(PROMPT, **options)
    with hf_specdec.enable(pipe.model, draft):
        out, _ = new_text(pipe, PROMPT, **options)
    assert out[0]["generated_text"] == plain[0]["generated_text"]
    assert torch.allclose(torch.as_tensor(out[0]["scores"]), torch.as_tensor(plain[0]["scores"]), atol=1e-4)


def test_default_settings_sample_reproducibly_with_the_pipelines_warpers(pipe, draft, monkeypatch):
    # The default of this pipeline is to sample, at temperature 0.7, 256 tokens.
    seen = []
    target = type(pipe.model)
    original = target._get_logits_processor

    def watched(self, *args, **kwargs):
        processors = original(self, *args, **kwargs)
        seen.append([(type(processor).__name__, settings(processor)) for processor in processors])
        return processors

    def settings(processor):
        return {name: value for name, value in vars(processor).items() if isinstance(value, (int, float, str))}

    monkeypatch.setattr(target, "_get_logits_processor", watched)

    def drawn(seed, **options):
        torch.manual_seed(seed)
        return pipe(PROMPT, **options)[0]["generated_text"]

    plain = drawn(3)
    with hf_specdec.enable(pipe.model, draft, num_speculative_tokens=4):
        one, report = drawn(3), speculates(pipe.model)
        assert 0.1 < report.acceptance_rate < 0.95
        assert report.emitted == 256
        short = {"max_new_tokens": 40}
        assert one.startswith(again := drawn(3, **short))
        assert drawn(3, **short) == again
        assert drawn(4, **short) != again
    assert len(one) > len(PROMPT)
    assert len(plain) > len(PROMPT)
    assert any(name == "TemperatureLogitsWarper" and values["temperature"] == 0.7 for name, values in seen[0])
    assert all(processors == seen[0] for processors in seen)  # the same law is asked for


def test_several_sequences_per_prompt(pipe, draft):
    with hf_specdec.enable(pipe.model, draft):
        torch.manual_seed(0)
        out, report = new_text(pipe, PROMPT, num_return_sequences=3, max_new_tokens=16)
    assert len({one["generated_text"] for one in out}) == 3
    assert report.prefill_emitted == 3


def test_empty_prompt(pipe, draft):
    plain = pipe("", **GREEDY)
    with hf_specdec.enable(pipe.model, draft):
        assert new_text(pipe, "", **GREEDY)[0] == plain


def test_a_pipeline_around_a_loaded_model(draft):
    target, _ = text_pair()
    pipe = pipeline("text-generation", target, tokenizer=tokenizer())
    plain = pipe(PROMPT, **GREEDY)
    with hf_specdec.enable(target, draft):
        assert new_text(pipe, PROMPT, **GREEDY)[0] == plain


# --- other pipelines -------------------------------------------------------------------------------------------------


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def test_an_encoder_decoder_falls_back_with_the_reason(caplog):
    # 5.24 has no text-to-text pipeline any more; such a target comes from generate().
    target = t5()
    inputs = tokenizer()(PROMPT, return_tensors="pt", return_token_type_ids=False)
    plain = target.generate(**inputs, max_new_tokens=8)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"), hf_specdec.enable(target, noisy_copy(target)):
        assert target.generate(**inputs, max_new_tokens=8).tolist() == plain.tolist()
    assert hf_specdec.report(target).reason == "encoder-decoder target"
    assert caplog.text.count("decodes plainly, without speculation: encoder-decoder target") == 1


@pytest.fixture
def listener():
    """A speech-recognition pipeline around a tiny encoder-decoder."""
    torch.manual_seed(0)
    config = Speech2TextConfig(
        vocab_size=100, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, input_feat_per_channel=8, num_conv_layers=1,
        conv_channels=16, conv_kernel_sizes=(3,), max_source_positions=128, max_target_positions=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip
    model = Speech2TextForConditionalGeneration(config).eval()
    extractor = Speech2TextFeatureExtractor(feature_size=8, num_mel_bins=8)
    return pipeline("automatic-speech-recognition", model=model, tokenizer=tokenizer(), feature_extractor=extractor)


@pytest.mark.parametrize(
    ("choice", "reason"), [({}, "beam search"), ({"num_beams": 1}, "encoder-decoder target")]
)  # five beams are this pipeline's default
def test_speech_recognition_falls_back_with_the_reason(listener, choice, reason):
    sound = torch.randn(16000, generator=torch.Generator().manual_seed(0)).numpy()
    options = {"generate_kwargs": {"max_new_tokens": 8, **choice}}
    plain = listener(sound.copy(), **options)
    with hf_specdec.enable(listener.model, noisy_copy(listener.model)):
        assert listener(sound.copy(), **options) == plain
        assert hf_specdec.report(listener).reason == reason


def test_pipelines_that_do_not_generate_are_left_alone(folders):
    pipe = pipeline("feature-extraction", folders[0])
    plain = pipe("hi")
    with hf_specdec.register():
        assert pipe("hi") == plain
