"""Does a name lead to the draft it means, to nothing else, and with a clear message where it cannot?"""

import gc
import json
import logging
import os
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from hf_specdec.host import loading
from hf_specdec.host.loading import find_tokenizer, load_draft


def tiny(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A target's checkpoint folder with a draft in `home/draft`, and another draft beside it in `outside`."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny().save_pretrained(tmp_path / "home")
    tiny(torch.bfloat16).save_pretrained(tmp_path / "home" / "draft")
    shutil.copytree(tmp_path / "home" / "draft", tmp_path / "outside")
    return tmp_path / "home"


@pytest.fixture
def target(home):
    return LlamaForCausalLM.from_pretrained(home)


def test_draft_keeps_its_saved_dtype_and_is_in_eval_mode(home, target):
    draft = load_draft(str(home / "draft"), target=target)
    assert draft.dtype == torch.bfloat16
    assert draft.device == target.device
    assert not draft.training


@pytest.mark.parametrize("dtype", ["float32", torch.float32])
def test_dtype_is_taken_by_name_or_as_torch_writes_it(home, target, dtype):
    assert load_draft(str(home / "draft"), dtype=dtype, target=target).dtype == torch.float32


def test_same_draft_is_loaded_once_and_shared_between_targets(home, target):
    other = LlamaForCausalLM.from_pretrained(home)
    first = load_draft(str(home / "draft"), target=target)
    assert load_draft(str(home / "draft"), target=other) is first
    assert load_draft(str(home / "draft"), dtype="float32", target=other) is not first


def test_one_draft_is_one_however_it_is_asked_for(home, target):
    """In code or in data, by its saved dtype or without a word."""
    first = load_draft(str(home / "draft"), target=target)
    assert load_draft(str(home / "draft"), dtype="bfloat16", target=target) is first
    assert load_draft("draft", target=target, named_in_data=True) is first
    assert load_draft("draft", target=target, named_in_data=True) is first


def test_a_draft_that_was_saved_again_is_loaded_anew(home, target):
    first = load_draft(str(home / "draft"), target=target)
    other = tiny(torch.bfloat16)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    other.save_pretrained(home / "draft")
    second = load_draft(str(home / "draft"), target=target)
    assert second is not first
    assert torch.equal(second.lm_head.weight, other.lm_head.weight)


def test_a_draft_that_was_moved_is_loaded_anew_and_not_moved_back(home, target):
    first = load_draft(str(home / "draft"), target=target)
    first.to("meta")
    second = load_draft(str(home / "draft"), target=target)
    assert second is not first
    assert second.device == target.device


def test_revision_goes_to_the_hub_and_a_branch_is_its_commit(target, monkeypatch):
    asked = []

    def config_of(name, revision=None, **options):
        asked.append(revision)
        config = tiny().config
        config._commit_hash = {"main": "c1", "v1": "c1", "v2": "c2"}[revision]
        config.dtype = torch.float32
        return config

    def model_of(name, revision=None, **options):
        asked.append(revision)
        return tiny(), {"missing_keys": set()}

    monkeypatch.setattr(loading, "find_adapter_config_file", lambda *args, **kwargs: None)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", config_of)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", model_of)
    drafts = {name: load_draft("org/name", revision=name, target=target) for name in ("v1", "main", "v2")}
    assert asked == ["v1", "v1", "main", "v2", "v2"]
    assert drafts["v1"] is drafts["main"]
    assert drafts["v1"] is not drafts["v2"]


def test_draft_is_released_when_nobody_holds_it(home, target):
    watch = weakref.ref(load_draft(str(home / "draft"), target=target))
    gc.collect()
    assert watch() is None


def test_a_checkpoint_that_lacks_weights_is_no_draft(home, target):
    """transformers would fill them with noise and say so in a log only."""
    path = home / "draft" / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of its weights, model\.layers\.0\.mlp\.up_proj\.weight among them"):
        load_draft(str(home / "draft"), target=target)


def test_tied_weights_are_saved_once_and_not_missed(home, target):
    draft = tiny()
    draft.config.tie_word_embeddings = True
    draft.tie_weights()
    draft.save_pretrained(home / "tied")
    assert load_draft(str(home / "tied"), target=target).config.tie_word_embeddings


def test_loading_leaves_the_target_as_it_was(home, target):
    before = target.config.to_dict(), target.generation_config.to_dict()
    load_draft(str(home / "draft"), target=target)
    assert (target.config.to_dict(), target.generation_config.to_dict()) == before


@pytest.mark.parametrize("quantization", ["nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}])
def test_quantized_draft_computes_in_its_saved_dtype(home, target, quantization):
    pytest.importorskip("bitsandbytes")
    draft = load_draft(str(home / "draft"), quantization=quantization, target=target)
    assert draft.is_quantized
    assert draft.config.quantization_config.bnb_4bit_quant_type == "nf4"
    assert draft.config.quantization_config.bnb_4bit_compute_dtype == torch.bfloat16


def test_device_of_an_offloaded_head_comes_from_the_device_map(target, monkeypatch):
    target.lm_head.to("meta")
    assert loading._head_device(target) == torch.device("cpu")
    target.hf_device_map = {"model": "disk", "lm_head": "cpu"}
    assert loading._head_device(target) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    target.hf_device_map = {"": "cuda:0", "lm_head": "cuda:1"}
    assert loading._head_device(target) == torch.device("cuda:1")


# --- one clear message each, before any weights are read ----------------------------------------------------------


@pytest.fixture
def no_weights(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(loading.AutoModelForSeq2SeqLM, "from_pretrained", refuse)


@pytest.mark.usefixtures("no_weights")
class TestErrors:
    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere-at-all"])
    def test_folder_that_does_not_exist(self, target, name):
        with pytest.raises(ValueError, match=r"does not exist\. Give an existing folder or a Hub id"):
            load_draft(name, target=target)

    def test_hub_id_that_cannot_be_found(self, target, monkeypatch):
        def offline(*args, **kwargs):
            raise OSError("cannot connect")

        monkeypatch.setattr(loading, "find_adapter_config_file", lambda *args, **kwargs: None)
        monkeypatch.setattr(loading.AutoConfig, "from_pretrained", offline)
        with pytest.raises(ValueError, match="the Hub has no such model or cannot be reached"):
            load_draft("nobody/nothing", target=target)

    def test_file_instead_of_its_folder(self, home, target):
        with pytest.raises(ValueError, match="is a file. Give the folder that holds it"):
            load_draft(str(home / "config.json"), target=target)

    def test_folder_without_config(self, home, target):
        (home / "draft" / "config.json").unlink()
        with pytest.raises(ValueError, match=r"holds no config\.json"):
            load_draft(str(home / "draft"), target=target)

    def test_pickled_weights_are_not_loaded(self, home, target):
        (home / "draft" / "model.safetensors").unlink()
        torch.save({}, home / "draft" / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"holds no \*\.safetensors file"):
            load_draft(str(home / "draft"), target=target)

    def test_encoder_decoder_draft_for_a_decoder(self, tmp_path, target):
        config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
        with pytest.raises(ValueError, match=r"\(t5\) is an encoder-decoder and the target \(llama\) a decoder only"):
            load_draft(str(tmp_path / "t5"), target=target)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"dtype": "bfloat"}, "Unknown dtype 'bfloat' for the draft. Did you mean 'bfloat16'"),
            ({"dtype": torch.int8}, "Unknown dtype 'int8' for the draft"),
            ({"device": "gpu"}, "Unknown device 'gpu' for the draft. Write it as torch does"),
            ({"device": "meta"}, "holds no weights"),
            ({"device": "cuda:99"}, r"'cuda:99', but \d+ CUDA devices are visible"),
            ({"quantization": "nf8"}, "Unknown quantization 'nf8'. Did you mean 'nf4'"),
            ({"quantization": {"load_in_4bits": True}}, "Did you mean 'load_in_4bit'"),
        ],
    )
    def test_setting_that_means_nothing(self, home, target, settings, message):
        with pytest.raises(ValueError, match=message):
            load_draft(str(home / "draft"), target=target, **settings)

    def test_quantization_without_bitsandbytes(self, home, target, monkeypatch):
        monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"needs bitsandbytes, which is not installed"):
            load_draft(str(home / "draft"), quantization="nf4", target=target)


# --- names found in data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["draft", "./draft", "draft/"])
def test_data_may_name_a_folder_inside_the_checkpoint_and_it_is_logged_once(home, target, caplog, name):
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        draft = load_draft(name, target=target, named_in_data=True)
        assert load_draft(name, target=target, named_in_data=True) is draft
    (record,) = [record for record in caplog.records if record.name == "hf_specdec"]
    assert str(home / "draft") in record.getMessage()


def test_data_means_the_checkpoint_folder_and_not_the_working_directory(home, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the target's checkpoint folder holds no such folder"):
        load_draft("outside", target=target, named_in_data=True)
    (tmp_path / "org").mkdir()
    (tmp_path / "outside").rename(tmp_path / "org" / "model")
    with pytest.raises(ValueError, match="in the working directory hides the Hub's"):
        load_draft("org/model", target=target, named_in_data=True)


@pytest.mark.usefixtures("no_weights")
class TestEscapes:
    @pytest.mark.parametrize("name", ["../outside", "draft/../../outside", "~/draft", "..\\outside"])
    def test_path_that_leaves_the_checkpoint(self, target, name):
        with pytest.raises(ValueError, match="points outside the target's checkpoint folder"):
            load_draft(name, target=target, named_in_data=True)

    def test_absolute_path_even_into_the_checkpoint(self, home, target):
        with pytest.raises(ValueError, match=r"pass the draft in code"):
            load_draft(str(home / "draft"), target=target, named_in_data=True)

    def test_link_to_a_folder_outside(self, home, target):
        (home / "link").symlink_to(home.parent / "outside")
        with pytest.raises(ValueError, match="outside of it by a symbolic link"):
            load_draft("link", target=target, named_in_data=True)

    def test_link_to_weights_outside(self, home, target):
        weights = home / "draft" / "model.safetensors"
        weights.unlink()
        weights.symlink_to(home.parent / "outside" / "model.safetensors")
        with pytest.raises(ValueError, match="outside of it by a symbolic link"):
            load_draft("draft", target=target, named_in_data=True)

    def test_adapter_whose_base_could_be_anything(self, home, target):
        (home / "draft" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/anything"}))
        with pytest.raises(ValueError, match="is an adapter, whose base model could lie anywhere"):
            load_draft("draft", target=target, named_in_data=True)

    def test_config_that_asks_for_somebodys_kernel(self, home, target):
        path = home / "draft" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "nobody/kernel"}))
        with pytest.raises(ValueError, match="asks for code from 'nobody/kernel'"):
            load_draft("draft", target=target, named_in_data=True)

    def test_config_with_remote_code(self, home, target):
        path = home / "draft" / "config.json"
        config = json.loads(path.read_text()) | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
        path.write_text(json.dumps(config))
        (home / "draft" / "mine.py").write_text("raise SystemExit('remote code ran')")
        with pytest.raises(ValueError, match="needs code of its own, and trust_remote_code is off for drafts"):
            load_draft("draft", target=target, named_in_data=True)

    def test_target_without_a_folder_has_no_inside(self, home, monkeypatch):
        monkeypatch.chdir(home)
        with pytest.raises(ValueError, match="the target's checkpoint folder holds no such folder"):
            load_draft("draft", target=tiny(), named_in_data=True)


def test_snapshot_of_the_hub_cache_may_link_to_its_own_blobs(home, tmp_path):
    repository = tmp_path / "models--org--name"
    shutil.move(home, repository / "snapshots" / "abc")
    (repository / "blobs").mkdir()
    snapshot = repository / "snapshots" / "abc"
    weights = snapshot / "draft" / "model.safetensors"
    weights.rename(repository / "blobs" / "1")
    weights.symlink_to(os.path.relpath(repository / "blobs" / "1", weights.parent))
    target = LlamaForCausalLM.from_pretrained(snapshot)
    assert load_draft("draft", target=target, named_in_data=True).dtype == torch.bfloat16


# --- tokenizers ---------------------------------------------------------------------------------------------------


def test_tokenizer_is_found_beside_the_weights_once_and_held_weakly(home):
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(home)
    model = LlamaForCausalLM.from_pretrained(home)
    tokenizer = find_tokenizer(model)
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(1) == "a"
    assert find_tokenizer(model) is tokenizer
    count = len(loading._tokenizers)
    del model
    gc.collect()
    assert len(loading._tokenizers) == count - 1


def test_model_without_tokenizer_files_has_none(target):
    assert find_tokenizer(target) is None


@pytest.mark.parametrize("name", ["", "nobody/nothing", "/nowhere"])
def test_tokenizer_that_is_not_here_is_none_and_nothing_is_raised(name):
    model = tiny()
    model.config._name_or_path = model.name_or_path = name
    assert find_tokenizer(model) is None
    assert find_tokenizer(object()) is None
