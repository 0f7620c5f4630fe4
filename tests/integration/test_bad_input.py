"""Is every user's error one clear message, raised before either model has run?"""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, T5Config, T5ForConditionalGeneration, pipeline

import hf_specdec
from tests.integration.pairs import VOCAB, llama, noisy_copy, prompts, speculates
from tests.integration.texts import TEXT_VOCAB, save, text_pair, tokenizer

NEW = 8


class Watched:
    """Two models and the number of their forwards."""

    def __init__(self, target, draft):
        self.target, self.draft, self.forwards = target, draft, 0
        for model in (target, draft):
            model.register_forward_pre_hook(self._count)

    def _count(self, *_):
        self.forwards += 1


@pytest.fixture
def models():
    """A pair that counts, and the proof that what was refused has run nothing and left nothing."""
    target = llama()
    watched = Watched(target, noisy_copy(target))
    before = dict(vars(target.generation_config))
    yield watched
    assert watched.forwards == 0, "a model ran before the error"
    assert vars(target.generation_config) == before
    with hf_specdec.enable(target, watched.draft):
        target.generate(**prompts(), max_new_tokens=NEW)
        speculates(target)


def t5():
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config).eval()


def one_line(error):
    """The message, which has to be a short paragraph of whole sentences."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith("."), text
    assert len(text) < 500
    return text


# --- the flag -------------------------------------------------------------------------------------------------------

WRONG = [
    # impossible lengths
    (
        {"num_speculative_tokens": 0},
        ValueError,
        'num_speculative_tokens must be at least 1 or "auto", got 0. To decode',
    ),
    ({"num_speculative_tokens": -3}, ValueError, 'num_speculative_tokens must be at least 1 or "auto", got -3. To dec'),
    ({"num_speculative_tokens": 1.5}, TypeError, "num_speculative_tokens must be an integer of at least 1 or"),
    ({"num_speculative_tokens": True}, TypeError, "num_speculative_tokens must be an integer of at least 1 or"),
    ({"num_speculative_tokens": "4"}, TypeError, "num_speculative_tokens must be an integer of at least 1 or"),
    ({"num_speculative_tokens": [4]}, TypeError, "num_speculative_tokens must be an integer of at least 1 or"),
    # wrong types
    ({"method": 3}, TypeError, "method must be a non-empty string, got 3 (int). Leave it out for the default."),
    ({"method": ""}, TypeError, "method must be a non-empty string, got '' (str)."),
    ({"model": 3}, TypeError, "model must be a Hub id or a folder, got 3 (int). A loaded draft goes to"),
    ({"model": ""}, TypeError, "model must be a Hub id or a folder, got '' (str)."),
    ({"revision": 1}, TypeError, "revision must be a non-empty string, got 1 (int)."),
    ({"dtype": 16}, TypeError, 'dtype must be "auto" or the name of a torch dtype such as "bfloat16", got 16 (int).'),
    ({"dtype": "float17"}, ValueError, 'dtype must be "auto" or the name of a torch dtype such as "bfloat16", got'),
    ({"device": -1}, ValueError, 'device must be a torch device such as "cpu" or "cuda:0", or the index of an acceler'),
    ({"device": "gpu"}, ValueError, 'device must be a torch device such as "cpu" or "cuda:0", or the index of an'),
    ({"device": 1.0}, TypeError, 'device must be a torch device such as "cpu" or "cuda:0", or the index of an accel'),
    ({"quantization": 4}, TypeError, "quantization must be the name of a quantization method or a dict, got 4 (int)."),
    ({"rejection_sample_method": 1}, TypeError, "rejection_sample_method must be a non-empty string, got 1 (int)."),
    # unknown names
    ({"num_speculative_token": 3}, ValueError, "Unknown speculative_config key 'num_speculative_token'. Did you mean"),
    ({"K": 3}, ValueError, "Unknown speculative_config key 'K'. Available: "),
    ({3: 3}, ValueError, "Unknown speculative_config key 3. Available: "),
    ({"method": "n-gram"}, ValueError, "Unknown method 'n-gram'."),
    ({"method": "org/model"}, ValueError, 'To name a draft model, pass {"model": "org/model"}.'),
    (
        {"rejection_sample_method": "blocks"},
        ValueError,
        "Unknown rejection_sample_method 'blocks'. Did you mean 'block'",
    ),
    # lossy rules
    ({"posterior_threshold": 0.1}, ValueError, "is refused: typical acceptance keeps draft tokens that the target"),
    ({"rejection_sample_method": "synthetic"}, ValueError, "is refused: synthetic acceptance keeps draft tokens"),
]
AT_THE_CALL_ONLY = [
    (3, TypeError, 'To draft 3 tokens in every step, pass {"num_speculative_tokens": 3}.'),
    (0, TypeError, "To decode without drafting, pass speculative_config=False."),
    (-1, TypeError, "To decode without drafting, pass speculative_config=False."),
    (1.5, TypeError, "speculative_config must be True, False, None, a method name, a dict or a SpeculativeConfig, got"),
    ([("method", "base")], TypeError, "speculative_config must be True, False, None, a method name, a dict or a Spec"),
    ("", TypeError, "method must be a non-empty string, got '' (str)."),
    ("none", ValueError, "Unknown method 'none'."),
]


@pytest.mark.parametrize(("flag", "kind", "message"), [*WRONG, *AT_THE_CALL_ONLY])
def test_wrong_flag_at_the_call(models, flag, kind, message):
    with hf_specdec.register(), pytest.raises(kind) as caught:
        models.target.generate(**prompts(), speculative_config=flag, assistant_model=models.draft)
    assert message in one_line(caught)
    assert caught.value.__notes__ == ["speculative_config was read from: the call's keyword"]


@pytest.mark.parametrize(("flag", "kind", "message"), WRONG)
def test_wrong_flag_in_a_config_and_as_a_dataclass(models, flag, kind, message):
    with hf_specdec.register():
        config = GenerationConfig(max_new_tokens=NEW, speculative_config=flag)
        with pytest.raises(kind) as caught:
            models.target.generate(**prompts(), generation_config=config, assistant_model=models.draft)
        assert message in one_line(caught)
    if all(isinstance(key, str) for key in flag):
        with pytest.raises(kind) as caught:
            hf_specdec.SpeculativeConfig.from_dict(flag)
        assert message in one_line(caught)


@pytest.mark.parametrize(
    ("flag", "kind", "message"), [case for case in WRONG if all(isinstance(k, str) for k in case[0])]
)
def test_wrong_key_of_enable(models, flag, kind, message):
    for draft in (models.draft, None):
        with pytest.raises(kind) as caught:
            hf_specdec.enable(models.target, draft, **flag)
        assert message in one_line(caught)


@pytest.mark.parametrize("flag", [{"num_speculative_tokens": 0}, "n-gram", 3])
def test_wrong_flag_through_a_pipeline(models, flag):
    pipe = pipeline("text-generation", models.target, tokenizer=tokenizer())
    with hf_specdec.register(), pytest.raises((TypeError, ValueError)) as caught:
        pipe("hi", speculative_config=flag)
    one_line(caught)


def test_a_loaded_model_inside_the_flag(models):
    for flag in (models.draft, {"model": models.draft}):
        with (
            hf_specdec.register(),
            pytest.raises(TypeError, match="A loaded draft goes to hf_specdec.enable") as caught,
        ):
            models.target.generate(**prompts(), speculative_config=flag)
        one_line(caught)


# --- targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [None, 3, "org/model", torch.nn.Linear(2, 2), SimpleNamespace(), AutoModelForCausalLM],
    ids=["None", "int", "str", "Linear", "object", "class"],
)
def test_enable_on_what_is_no_model(models, target):
    with pytest.raises(
        TypeError, match=r"enable\(\) expects a (loaded )?transformers model that can generate, got"
    ) as caught:
        hf_specdec.enable(target, models.draft)
    one_line(caught)


def test_enable_on_the_body_of_a_model(models):
    # LlamaModel has no head: nothing to generate with.
    with pytest.raises(TypeError, match=r"enable\(\) expects .* that can generate, got LlamaModel") as caught:
        hf_specdec.enable(models.target.model, models.draft)
    one_line(caught)


# --- drafts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [3, 1.5, b"org/model", [], {}, object(), torch.nn.Linear(2, 2), AutoModelForCausalLM])
def test_draft_of_the_wrong_type(models, draft):
    message = "The draft must be a Hub id, a folder or a loaded PreTrainedModel, got "
    with pytest.raises(TypeError, match=message) as caught:
        hf_specdec.enable(models.target, draft)
    one_line(caught)
    with hf_specdec.register(), pytest.raises(TypeError, match=message) as caught:
        models.target.generate(**prompts(), assistant_model=draft, speculative_config=True)
    one_line(caught)


def test_encoder_decoder_draft_for_a_decoder(models, tmp_path):
    draft = t5()
    draft.register_forward_pre_hook(models._count)
    message = r"encoder-decoder.*decoder[- ]only.* Use a decoder-only draft"
    with pytest.raises(ValueError, match=message) as caught:
        hf_specdec.enable(models.target, draft)
    one_line(caught)
    with hf_specdec.register(), pytest.raises(ValueError, match=message) as caught:
        models.target.generate(**prompts(), assistant_model=draft, speculative_config=True)
    one_line(caught)
    draft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder-decoder and the target .* Use a decoder-only draft") as caught:
        hf_specdec.enable(models.target, tmp_path)
    one_line(caught)


def test_vocabularies_that_padding_does_not_explain(models):
    draft = llama(vocab_size=3000)
    draft.register_forward_pre_hook(models._count)
    message = "The target has 40 token rows and the draft 3,000; padding explains a difference of at most 1,024"
    with pytest.raises(ValueError, match=message) as caught:
        hf_specdec.enable(models.target, draft)
    assert "use a draft with the same tokenizer" in one_line(caught)
    with hf_specdec.register(), pytest.raises(ValueError, match=message):
        models.target.generate(**prompts(), assistant_model=draft, speculative_config=True)


def test_tokenizers_that_disagree(tmp_path):
    target, draft = text_pair()
    save(target, tmp_path / "target")
    save(draft, tmp_path / "draft")
    path = tmp_path / "draft" / "tokenizer.json"
    written = json.loads(path.read_text())
    vocab = written["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    path.write_text(json.dumps(written))
    models = Watched(*(AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("target", "draft")))
    message = f"Target and draft disagree on token {tokenizer()('A')['input_ids'][0]}: 'A' and 'B'"
    for source in (models.draft, tmp_path / "draft"):
        with pytest.raises(ValueError, match=message) as caught:
            hf_specdec.enable(models.target, source)
        assert "use a draft with the same tokenizer, or speculative_config=False." in one_line(caught)
    with hf_specdec.register(), pytest.raises(ValueError, match=message):
        models.target.generate(**prompts(vocab_size=TEXT_VOCAB), assistant_model=models.draft, speculative_config=True)
    assert models.forwards == 0


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere/at/all", "a/b/c", r"C:\nowhere"])
def test_a_path_that_does_not_exist(models, name):
    with pytest.raises(
        ValueError, match="The draft's folder .* does not exist. Give an existing folder or a Hub id"
    ) as caught:
        hf_specdec.enable(models.target, name)
    one_line(caught)
    with hf_specdec.register(), pytest.raises(ValueError, match="is named in data") as caught:
        models.target.generate(**prompts(), speculative_config={"model": name})
    one_line(caught)


def test_a_hub_id_that_is_not_there(models, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/has-this-model", "nosuchmodel"):
        with pytest.raises(ValueError, match=f"Cannot find the draft '{name}': it is no folder here") as caught:
            hf_specdec.enable(models.target, name)
        one_line(caught)


def test_folders_that_hold_no_draft(models, tmp_path):
    empty, unsafe, file = tmp_path / "empty", tmp_path / "unsafe", tmp_path / "file.gguf"
    empty.mkdir()
    unsafe.mkdir()
    (unsafe / "config.json").write_text("{}")
    (unsafe / "pytorch_model.bin").write_text("")
    file.write_text("")
    cases = [
        (empty, "holds no config.json. Give a folder written by save_pretrained"),
        (unsafe, r"holds no \*.safetensors file; other formats may run code and are not loaded. Save the model again"),
        (file, "is a file. Give the folder that holds it, with its config.json"),
    ]
    for path, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            hf_specdec.enable(models.target, path)
        one_line(caught)


def test_settings_of_a_draft_that_cannot_be(models, tmp_path):
    models.draft.save_pretrained(tmp_path)
    cases = [
        ({"dtype": "int8"}, "Unknown dtype 'int8' for the draft."),
        ({"quantization": "nf5"}, "Unknown quantization 'nf5'. Did you mean 'nf4'?"),
        ({"quantization": {"load_in_5bit": True}}, "Unknown key 'load_in_5bit' in quantization. Did you mean 'load_in"),
        ({"device": "meta"}, "device of the draft is 'meta', which holds no weights"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            hf_specdec.enable(models.target, tmp_path, **options)
        one_line(caught)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="but 0 CUDA devices are visible. Write 'cpu'") as caught:
            hf_specdec.enable(models.target, tmp_path, device="cuda:7")
        one_line(caught)


# --- what plain refuses is refused in the same words -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"temperature": -1.0, "do_sample": True},
        {"num_return_sequences": 2},
        {"no_such_option": 1},
        {"stop_strings": ["x"]},
        {"streamer": object(), "num_beams": 2},
    ],
    ids=lambda options: "+".join(options),
)
def test_what_generate_refuses_is_refused_in_the_same_words(models, options):
    def refusal():
        with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
            models.target.generate(**{**prompts(), "max_new_tokens": NEW, **options})
        return type(caught.value), str(caught.value)

    plain = refusal()
    with hf_specdec.enable(models.target, models.draft):
        assert refusal() == plain
