"""Does the flag travel with the checkpoint, harmlessly without the plugin and safely where data names a draft?"""

import json
import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec.host import drafts
from tests.integration.pairs import assert_as_plain, llama, noisy_copy, pair, prompts, speculates

NEW = 12


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """(folder, plain ids): an enabled target saved by save_pretrained, its draft in the subfolder "draft"."""
    target, draft = pair()
    plain = target.generate(**prompts(), max_new_tokens=NEW)
    folder = tmp_path / "checkpoint"
    draft.save_pretrained(folder / "draft")
    monkeypatch.chdir(folder)
    with hf_specdec.enable(target, "draft", num_speculative_tokens=3):
        target.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    return folder, plain


def write_flag(folder, flag):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "speculative_config": flag}))


def load(folder):
    return LlamaForCausalLM.from_pretrained(folder).eval()


def test_generation_config_json_holds_the_flag(checkpoint):
    folder, _ = checkpoint
    saved = json.loads((folder / "generation_config.json").read_text())
    assert saved["speculative_config"] == {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}
    assert not saved.get("_from_model_config")
    assert "speculative_config" not in json.loads((folder / "config.json").read_text())


def test_registered_plugin_honours_a_relative_draft_folder(checkpoint, caplog):
    folder, plain = checkpoint
    target = load(folder)
    with hf_specdec.register(), caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
        assert max(speculates(target).draft_lengths) == 3
    # Where it was loaded from is said once.
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert texts == [f"The draft 'draft' is named in data, not in code; it is loaded from {folder / 'draft'}."]


def test_checkpoint_generates_plainly_where_the_plugin_is_absent(checkpoint, tmp_path):
    folder, plain = checkpoint
    code = (
        "import json, sys, torch, warnings\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = torch.tensor(json.loads(sys.argv[2]))\n"
        "output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=int(sys.argv[3]))\n"
        "model.save_pretrained(sys.argv[4])\n"
        "assert not any(name.startswith('hf_specdec') for name in sys.modules)\n"
        "print('IDS', json.dumps(output.tolist()))\n"
    )
    ids = prompts()["input_ids"].tolist()
    again = tmp_path / "again"
    command = [sys.executable, "-c", code, str(folder), json.dumps(ids), str(NEW), str(again)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    line = next(line for line in done.stdout.splitlines() if line.startswith("IDS "))
    assert json.loads(line[4:]) == plain.tolist()
    saved = json.loads((again / "generation_config.json").read_text())
    assert saved["speculative_config"]["model"] == "draft"  # the flag survives a stay without the plugin


def test_checkpoint_generates_plainly_without_register(checkpoint):
    folder, plain = checkpoint
    target = load(folder)
    assert target.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()
    assert hf_specdec.report(target) is None


def test_config_drafts_false_forbids_drafts_named_in_data(checkpoint, caplog):
    folder, plain = checkpoint
    target = load(folder)
    with hf_specdec.register(config_drafts=False), caplog.at_level(logging.WARNING, logger="hf_specdec"):
        assert target.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()
        reason = hf_specdec.report(target).reason
    assert reason == "no draft: register(config_drafts=False) forbids loading 'draft'"
    assert caplog.text.count(reason) == 1
    # The strictest of several registrations holds.
    with hf_specdec.register(), hf_specdec.register(config_drafts=False):
        target.generate(**prompts(), max_new_tokens=NEW, speculative_config={"model": "draft"})
        assert hf_specdec.report(target).reason == reason


def test_config_drafts_false_leaves_drafts_given_in_code(checkpoint):
    folder, plain = checkpoint
    target = load(folder)
    with hf_specdec.register(config_drafts=False), hf_specdec.enable(target, str(folder / "draft")):
        assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
    with hf_specdec.register(config_drafts=False):
        draft = load(folder / "draft")
        assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW, assistant_model=draft)


def refused(folder, plain, flag, match):
    """A refused draft in the model's config means plain decoding with a reason; at the call it is an error."""
    write_flag(folder, flag)
    target = load(folder)
    with hf_specdec.register():
        assert target.generate(**prompts(), max_new_tokens=NEW).tolist() == plain.tolist()
        reason = hf_specdec.report(target).reason
        assert reason.startswith("no draft: ")
        with pytest.raises(ValueError, match=match):
            raise ValueError(reason)
        with pytest.raises(ValueError, match=match):
            target.generate(**prompts(), max_new_tokens=NEW, speculative_config=flag)


@pytest.mark.parametrize("name", ["../outside", "draft/../../outside", "{outside}", "~/outside"])
def test_paths_out_of_the_checkpoint_are_refused(checkpoint, tmp_path, name):
    folder, plain = checkpoint
    llama().save_pretrained(tmp_path / "outside")
    name = name.format(outside=tmp_path / "outside")
    refused(folder, plain, {"model": name}, "is named in data and points outside the target's checkpoint folder")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_links_out_of_the_checkpoint_are_refused(checkpoint, tmp_path):
    folder, plain = checkpoint
    llama().save_pretrained(tmp_path / "outside")
    (folder / "linked").symlink_to(tmp_path / "outside")
    refused(folder, plain, {"model": "linked"}, "leads outside of it by a symbolic link")


class Marker:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_weights_are_refused_unread(checkpoint, tmp_path):
    folder, plain = checkpoint
    mark = tmp_path / "unpickled"
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_text((folder / "draft" / "config.json").read_text())
    torch.save({"weight": Marker(str(mark))}, folder / "pickled" / "pytorch_model.bin")
    refused(folder, plain, {"model": "pickled"}, r"holds no \*\.safetensors file; other formats may run code")
    assert not mark.exists()


def test_code_beside_a_draft_named_in_data_is_not_run(checkpoint, tmp_path):
    folder, plain = checkpoint
    mark = tmp_path / "run"
    config = json.loads((folder / "draft" / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "draft" / "config.json").write_text(json.dumps(config))
    (folder / "draft" / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    target = load(folder)
    with hf_specdec.register():
        assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
    assert not mark.exists()


def test_missing_draft_is_plain_with_a_reason(checkpoint, caplog):
    folder, plain = checkpoint
    refused(folder, plain, {"model": "absent"}, "holds no such folder; nor is it a Hub id")
    target = load(folder)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hf_specdec"), hf_specdec.register():
        for _ in range(2):
            target.generate(**prompts(), max_new_tokens=NEW)
    assert caplog.text.count("decodes plainly, without speculation: no draft") == 1


# --- drafts that cannot be read -------------------------------------------------------------------------------------


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def empty_weights(folder):
    (folder / "model.safetensors").write_bytes(b"")


def index_without_files(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


def weights_of_other_sizes(folder):
    change_config(folder, hidden_size=48)


def config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")


def config_that_is_a_list(folder):
    (folder / "config.json").write_text("[]")


def config_of_an_unknown_kind(folder):
    change_config(folder, model_type="nothing-of-the-kind")


def another_vocabulary(folder):
    llama(vocab_size=3000).save_pretrained(folder)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES = (
    cut_weights,
    empty_weights,
    index_without_files,
    weights_of_other_sizes,
    config_that_is_no_json,
    config_that_is_a_list,
    config_of_an_unknown_kind,
)


@pytest.mark.parametrize("damage", [*DAMAGES, another_vocabulary], ids=lambda damage: damage.__name__)
def test_a_damaged_draft_is_plain_with_a_reason_in_data_and_one_error_at_the_call(checkpoint, damage):
    """SafetensorError, KeyError, RuntimeError … of a damaged file once ended calls that only data had given a draft."""
    folder, plain = checkpoint
    damage(folder / "draft")
    message = f"^(no draft: )?Cannot load the draft '{folder / 'draft'}': .*If its files are damaged"
    if damage is another_vocabulary:
        message = "^(no draft: )?The target has 40 token rows and the draft 3,000"
    refused(folder, plain, {"model": "draft"}, message)
    with pytest.raises(ValueError, match=message) as caught:
        hf_specdec.enable(load(folder), str(folder / "draft"))
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 500


def test_a_draft_that_failed_is_not_looked_for_at_every_call(checkpoint, monkeypatch):
    folder, plain = checkpoint
    cut_weights(folder / "draft")
    loads, load_draft = [], drafts.load_draft

    def counted(model, **options):
        loads.append(model)
        return load_draft(model, **options)

    monkeypatch.setattr(drafts, "load_draft", counted)
    target, call = load(folder), {**prompts(), "max_new_tokens": NEW}
    with hf_specdec.register():
        for _ in range(3):
            assert target.generate(**call).tolist() == plain.tolist()
            assert hf_specdec.report(target).reason.startswith("no draft: Cannot load")
        assert loads == ["draft"]
        # Whoever names it at the call has perhaps mended it …
        for _ in range(2):
            with pytest.raises(ValueError, match="Cannot load"):
                target.generate(**call, speculative_config={"model": "draft"})
        assert loads == ["draft"] * 3
        noisy_copy(target).save_pretrained(folder / "draft")
        assert_as_plain(target, plain, **call, speculative_config={"model": "draft"})
        # … and then it serves every call; a model that is loaded anew asks for itself.
        assert_as_plain(target, plain, **call)
        assert loads == ["draft"] * 4
        assert_as_plain(load(folder), plain, **call)
        assert loads == ["draft"] * 5


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_pickled_copy_of_an_enabled_model_has_the_flag_and_no_draft():
    target, draft = pair()
    call = {**prompts(2), "max_new_tokens": NEW}
    plain = target.generate(**call)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        written = pickle.dumps(target)
        twin = pickle.loads(written)
        assert len(written) < 1.5 * len(pickle.dumps(draft)), "the draft is in it"
        assert twin.generation_config.speculative_config == target.generation_config.speculative_config
        assert twin.generate(**call).tolist() == plain.tolist()
        assert hf_specdec.report(twin).reason.startswith("no draft")
        assert_as_plain(target, plain, **call)
        # The copy takes a draft of its own like any model.
        with hf_specdec.enable(twin, draft):
            assert_as_plain(twin, plain, **call)
    assert pickle.loads(written).generate(**call).tolist() == plain.tolist()  # with nothing registered


def test_flag_of_a_config_made_from_the_model_config_is_not_lost(tmp_path):
    target, draft = pair()
    assert target.generation_config._from_model_config
    found = dict(vars(target.generation_config))
    with hf_specdec.enable(target, draft):
        target.save_pretrained(tmp_path)
    assert vars(target.generation_config) == found
    assert load(tmp_path).generation_config.speculative_config == {"method": "draft_model"}


def test_enabling_makes_no_config_unsavable(tmp_path):
    target, draft = pair()
    target.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    # A published config that strict validation refuses: temperature without do_sample. Unmodified, it is savable.
    path.write_text(json.dumps({"temperature": 0.6, "pad_token_id": 0}))
    target = load(tmp_path)
    try:
        target.save_pretrained(tmp_path / "plain")
    except ValueError:  # transformers up to 5.17 never saves such a config, with or without the flag
        pytest.skip("this transformers refuses the config itself")
    with hf_specdec.enable(target, draft):
        target.save_pretrained(tmp_path / "enabled")
        with hf_specdec.enable(target, draft, num_speculative_tokens=7):
            target.save_pretrained(tmp_path / "again")
    target.save_pretrained(tmp_path / "after")
    flags = {name: load(tmp_path / name).generation_config for name in ("plain", "enabled", "again", "after")}
    assert {name: getattr(config, "speculative_config", None) for name, config in flags.items()} == {
        "plain": None,
        "enabled": {"method": "draft_model"},
        "again": {"method": "draft_model", "num_speculative_tokens": 7},
        "after": None,
    }
    assert all(config.temperature == 0.6 for config in flags.values())
    again = load(tmp_path / "again")  # read back, it is savable as well, with and without the plugin
    again.save_pretrained(tmp_path / "twice")
    with hf_specdec.register():
        again.save_pretrained(tmp_path / "twice")


def test_a_config_that_the_user_made_invalid_is_still_refused(tmp_path):
    target, draft = pair()
    with hf_specdec.enable(target, draft):
        target.generation_config.temperature = 0.6  # without do_sample
        with pytest.raises(ValueError, match="temperature"):
            target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="temperature"):
        target.save_pretrained(tmp_path)


def test_a_class_attribute_never_reaches_a_saved_config(tmp_path):
    with hf_specdec.register():
        config = GenerationConfig(max_new_tokens=3)
        assert config.speculative_config is None
        config.save_pretrained(tmp_path)
        assert config == GenerationConfig(max_new_tokens=3)
    assert "speculative_config" not in (tmp_path / "generation_config.json").read_text()


def test_draft_named_in_code_is_loaded_at_once_as_it_was_saved(tmp_path):
    target = llama()
    noisy_copy(target).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = []
    with hf_specdec.enable(target, str(tmp_path)):
        loaded.append(hf_specdec.host.binding.bindings_of(target)[-1].draft)
    assert loaded[0].dtype == torch.bfloat16
    assert loaded[0].device == target.lm_head.weight.device
    assert not loaded[0].training
