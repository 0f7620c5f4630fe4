"""Does ``specdec plan`` answer by its exit status, its tables and its JSON, from configs alone?"""

import json

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_specdec.cli import app


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Configs without weights: a target of 5.8 GiB in bfloat16, a draft of 0.1."""
    home = tmp_path_factory.mktemp("configs")
    shared = {"vocab_size": 32000, "dtype": "bfloat16"}
    LlamaConfig(
        **shared,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    ).save_pretrained(home / "target")
    LlamaConfig(
        **shared, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8
    ).save_pretrained(home / "draft")
    return home


def planned(folders, *options, draft: str | None = "draft"):
    arguments = ["plan", str(folders / "target"), "--max-length", "2048", *options]
    if draft:
        arguments += ["--draft", str(folders / draft)]
    return CliRunner().invoke(app, arguments)


def test_what_fits_ends_with_0_and_shows_where_and_how_fast(folders):
    done = planned(folders, "--gpu", "RTX 4090", "--cpu", "16GiB")
    assert done.exit_code == 0, done.output
    for words in (
        "cuda:0 RTX 4090, 24.00 GiB",
        "16 (0-15), head",
        "read on cuda:0: a target pass",
        "predicted plain: ",
        "predicted speculative: ",
        "if 70% of the drafted tokens are kept",
        "It fits.",
    ):
        assert words in done.output
    assert "assumed: name a card" not in done.output


def test_what_does_not_fit_ends_with_1_and_says_what_would(folders):
    done = planned(folders, "--gpu", "5GiB")
    assert done.exit_code == 1, done.output
    text = " ".join(done.output.split())
    for words in (
        "It does not fit. Not enough memory for target",
        "would fit: the target in int8",
        "would fit: the target in nf4",
        "layers to the CPU",
    ):
        assert words in text


def test_json_holds_the_plan_and_nothing_else_is_printed(folders):
    done = planned(
        folders, "--gpu", "4GiB", "--cpu", "16GiB", "--bandwidth", "0=400GB/s", "--bandwidth", "cpu=40", "--json"
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)["plan"]
    assert data["fits"]
    assert [device["label"] for device in data["devices"]] == ["cuda:0", "cpu"]
    assert set(data["device_map"].values()) == {0, "cpu"}
    assert data["devices"][0]["cache"] > 0 == data["devices"][1]["cache"]
    assert not data["is_speed_assumed"]
    assert data["workload"]["max_length"] == 2048


def test_an_amount_of_memory_is_no_card(folders):
    done = planned(folders, "--gpu", "80GB", "--gpu", "4090", "--json")
    gpus = json.loads(done.stdout)["plan"]["devices"]
    assert [(gpu["name"], gpu["memory"]) for gpu in gpus] == [("", 80 * 10**9), ("RTX 4090", 24 * 2**30)]


def test_headroom_batch_and_precision_count(folders):
    options = ("--gpu", "7GiB")
    assert planned(folders, *options).exit_code == 0
    assert planned(folders, *options, "--headroom", "0.3").exit_code == 1
    assert planned(folders, *options, "--max-batch", "32").exit_code == 1
    assert planned(folders, *options, "--dtype", "float32").exit_code == 1
    assert planned(folders, "--gpu", "3GiB", "--quantization", "nf4", draft=None).exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "RTX"), "is neither an amount of memory (24GiB) nor a known card: T4"),
        (("--gpu", "RTX 4090 Laptop"), "is neither an amount of memory (24GiB) nor a known card: T4"),
        (("--gpu", "GTX 1080"), "is neither an amount of memory (24GiB) nor a known card: T4"),
        (("--cpu", "lots"), "Cannot read 'lots' as an amount of memory"),
        (("--cpu", "8GiB", "--bandwidth", "1=9GB/s"), "--bandwidth names '1', which is no device of this plan"),
        (("--cpu", "8GiB", "--bandwidth", "fast"), "Cannot read 'fast' as a bandwidth"),
        (("--gpu", "24"), "24GiB"),
        (("--cpu", "24"), "'24' would be 24 bytes. Write an amount of memory with its unit: 24GiB."),
        (("--gpu", "1e400GiB"), "24GiB"),
        (("--cpu", "8GiB", "--bandwidth", "cpu=1e308TB/s"), "Cannot read '1e308TB/s' as a bandwidth"),
        (("--cpu", "8GiB", "--max-batch", "99999999999999999"), "which no machine has room for"),
        (("--cpu", "8GiB", "--quantization", "nf5"), "Unknown quantization 'nf5'. Did you mean 'nf4'"),
    ],
)
def test_what_cannot_be_planned_ends_with_2_and_one_message(folders, options, message):
    done = planned(folders, *options)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_folder_without_config_is_named(tmp_path):
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "--cpu", "8GiB"])
    assert done.exit_code == 2
    assert "has no config.json" in " ".join(done.output.split())


def test_without_devices_it_is_about_this_machine(folders):
    done = planned(folders, "--json")
    assert "cpu" in [device["label"] for device in json.loads(done.stdout)["plan"]["devices"]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "(mamba) is a recurrent model without attention heads."),
        ({"model_type": "mamba2"}, "Recurrent models are not planned."),
        ({"model_type": "rwkv"}, "Recurrent models are not planned."),
        ({"model_type": "xlstm"}, "Recurrent models are not planned."),
        ({"model_type": "bert"}, "(bert) is an encoder. Pairs are loaded as decoder-only causal LMs."),
        ({"model_type": "bart"}, "(bart) is an encoder-decoder. Pairs are loaded as decoder-only causal LMs."),
        ({"model_type": "t5"}, "(t5) is an encoder-decoder."),
        ({"model_type": "qwen2", "num_hidden_layers": 0}, "has num_hidden_layers=0, which must be at least 1."),
    ],
)
@pytest.mark.parametrize("which", ["target", "draft"])
def test_what_is_no_decoder_with_attention_is_refused_in_one_line(folders, tmp_path, config, message, which):
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = {"target": str(folders / "target"), "draft": str(folders / "draft"), which: str(tmp_path)}
    done = CliRunner().invoke(app, ["plan", pair["target"], "--draft", pair["draft"], "--cpu", "8GiB"])
    assert done.exit_code == 2
    text = " ".join(done.output.split())
    assert text.startswith("Error: The ")
    assert f"{which} '{tmp_path.parent}" in text
    assert message in text


def test_draft_with_another_vocabulary_is_refused(folders, tmp_path):
    LlamaConfig(vocab_size=34000, num_hidden_layers=1).save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["plan", str(folders / "target"), "--draft", str(tmp_path), "--cpu", "8GiB"])
    assert done.exit_code == 2
    assert "padding explains a difference of at most 1,024" in " ".join(done.output.split())


def test_what_nobody_foresaw_is_one_line(folders, monkeypatch):
    def raises(*args, **kwargs):
        raise AttributeError("first line\nsecond line")

    monkeypatch.setattr("hf_specdec.pair.plan_pair", raises)
    done = planned(folders, "--cpu", "8GiB")
    assert done.exit_code == 2
    assert done.output.strip() == "Error: This cannot be planned: AttributeError: first line"
