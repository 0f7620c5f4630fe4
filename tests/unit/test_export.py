"""Is the vLLM command what the flag, an estimate and a plan say, in keys that vLLM documents, and refused where it
would mean something else?"""

import json
import shlex

import pytest
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.config_keys import USED_KEYS
from hf_specdec.export import (
    DOCUMENTED_ARGUMENTS,
    DOCUMENTED_KEYS,
    DOCUMENTED_METHODS,
    PASSED,
    export_vllm,
    measured_length,
)

TARGET, DRAFT = "org/target", "org/draft"
PAIR = {"model": DRAFT, "num_speculative_tokens": 5}
GIB = 2**30


def rows(*speedups):
    return {"rows": [{"draft_length": length, "speedup": speedup} for length, speedup in enumerate(speedups)]}


ESTIMATE = {
    "setting": {"device": "an A10"},
    "kinds": [
        {"kind": "code", "draft": rows(1.0, 1.4, 1.8, 2.0), "lookup": rows(1.0, 1.0, 1.1, 1.1)},
        {"kind": "prose", "draft": rows(1.0, 1.3, 1.4, 1.2), "lookup": rows(1.0, 0.9, 0.8, 0.7)},
    ],
}


def device(label, memory=24, weights=9, layers=(0, 1)):
    return {"label": label, "memory": memory * GIB, "weights": weights * GIB, "layers": list(layers)}


def plan(*devices, **changes):
    return {
        "fits": True,
        "devices": list(devices),
        "target": {"name": TARGET, "quantization": None},
        "workload": {"max_length": 8192, "max_batch": 4},
        "draft_length": 6,
        **changes,
    }


def test_the_commands_keys_and_arguments_are_those_that_vllm_documents():
    """vllm/config/speculative.py at 002e77c1; docs/features/speculative_decoding/configuration.md at 9d0e0b83."""
    flags = [
        {**PAIR, "revision": "main", "quantization": "nf4", "rejection_sample_method": "block"},
        {**PAIR, "draft_tensor_parallel_size": 1, "draft_sample_method": "probabilistic"},
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "suffix"},
    ]
    for flag in flags:
        result = export_vllm(
            TARGET, flag, quantization="nf4", revision="main", plan=plan(device("cuda:0"), device("cuda:1"))
        )
        assert result.speculative_config.keys() <= DOCUMENTED_KEYS
        assert result.speculative_config["method"] in DOCUMENTED_METHODS
        assert {each for each in result.arguments if each.startswith("--")} <= DOCUMENTED_ARGUMENTS
        assert shlex.split(result.command) == result.arguments
        assert json.loads(result.arguments[-1]) == result.speculative_config
    assert PASSED.isdisjoint(USED_KEYS)


def test_a_draft_model():
    result = export_vllm(TARGET, PAIR)
    assert result.command == (
        "vllm serve org/target --speculative-config "
        '\'{"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 5}\''
    )
    assert len(result.notes) == 2
    quantized = export_vllm(TARGET, {**PAIR, "draft_quantization": "nf4", "revision": "v2"}).speculative_config
    assert (quantized["quantization"], quantized["revision"]) == ("bitsandbytes", "v2")


@pytest.mark.parametrize(
    ("flag", "least", "most"),
    [({}, 1, 4), ({"prompt_lookup_max": 3}, 1, 3), ({"prompt_lookup_min": 6}, 6, 6), ({"prompt_lookup_min": 2}, 2, 4)],
)
def test_prompt_lookup_says_both_lengths_of_its_ngrams(flag, least, most):
    config = export_vllm(TARGET, {"num_speculative_tokens": 4, **flag}).speculative_config
    assert config == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": most, "prompt_lookup_min": least,
    }  # fmt: skip


def test_length_is_the_fastest_over_all_kinds_by_measurement():
    assert measured_length(ESTIMATE, "draft_model") == (2, pytest.approx(2 / (1 / 1.8 + 1 / 1.4)))
    result = export_vllm(TARGET, {"model": DRAFT}, estimate=ESTIMATE)
    assert result.speculative_config["num_speculative_tokens"] == 2
    assert "2 tokens: fastest by measurement with transformers on an A10, 1.58x plain." in result.notes


def test_where_nothing_pays_the_command_has_no_speculation():
    result = export_vllm(TARGET, {}, estimate=ESTIMATE)
    assert result.command == "vllm serve org/target"
    assert result.notes == ["No speculation: measured on an A10, no draft length is faster than plain decoding."]


def test_an_order_beats_the_estimate():
    config = export_vllm(TARGET, {**PAIR, "num_speculative_tokens": 7}, estimate=ESTIMATE).speculative_config
    assert config["num_speculative_tokens"] == 7


def test_a_plans_gpus_are_the_tensor_parallel_size():
    unequal = plan(device("cuda:0"), device("cuda:1", memory=16), device("cpu", weights=0, layers=()))
    result = export_vllm(TARGET, {"model": DRAFT}, plan=unequal, num_heads=32)
    assert result.arguments[3:9] == ["--tensor-parallel-size", "2", "--max-model-len", "8192", "--max-num-seqs", "4"]
    assert result.speculative_config["num_speculative_tokens"] == 6
    assert any("unequal size" in note for note in result.notes)
    assert any("prediction" in note for note in result.notes)
    assert "--tensor-parallel-size" not in export_vllm(TARGET, PAIR, plan=plan(device("cuda:0"))).arguments
    assert "4" in export_vllm(TARGET, PAIR, plan={"gpus": ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]}).arguments


def test_a_plans_quantization_goes_over():
    planned = plan(device("cuda:0"), target={"name": "other/name", "quantization": "nf4"})
    result = export_vllm(TARGET, PAIR, plan=planned)
    assert result.arguments[result.arguments.index("--quantization") + 1] == "bitsandbytes"
    assert "The plan was made for other/name." in result.notes


def test_a_checkpoint_that_is_quantized_already_needs_no_argument():
    """vLLM reads the checkpoint's config."""
    planned = plan(device("cuda:0"), target={"name": TARGET, "quantization": "gptq", "is_pre_quantized": True})
    assert "--quantization" not in export_vllm(TARGET, PAIR, plan=planned).arguments


def test_heads_that_are_not_known_are_a_note():
    planned = plan(device("cuda:0"), device("cuda:1"))
    assert any("heads are not known" in note for note in export_vllm(TARGET, PAIR, plan=planned).notes)
    assert not any("heads" in note for note in export_vllm(TARGET, PAIR, plan=planned, num_heads=8).notes)


def test_an_estimate_of_look_ups_is_not_asked_for_suffixes():
    asked = export_vllm(TARGET, {"method": "suffix"}, estimate=ESTIMATE)
    assert asked.speculative_config == export_vllm(TARGET, {"method": "suffix"}).speculative_config


@pytest.mark.parametrize(
    ("flag", "options", "message"),
    [
        ({"model": DRAFT}, {}, 'num_speculative_tokens is "auto", which is measured here at every step'),
        ({"method": "draft_model", "num_speculative_tokens": 2}, {}, "needs the draft's Hub id or folder"),
        ({"method": "early_exit"}, {}, "it drafts with the target's first layers, and vLLM has no such method"),
        ({"method": "base"}, {}, "it drafts with the target's adapters off, and vLLM has no such method"),
        ({"method": "mine"}, {}, "registered here only"),
        ({**PAIR, "draft_vocab": 8000}, {}, "draft_vocab cannot be exported: vLLM's drafts propose from the draft's"),
        ({**PAIR, "draft_quantization": "int8"}, {}, "a copy that this package makes in memory"),
        ({**PAIR, "quantization": "int8"}, {}, "int8 of the draft cannot be exported: of plain weights vLLM makes nf4"),
        ({**PAIR, "quantization": {"load_in_4bit": True}}, {}, "fp4 of the draft cannot be exported"),
        (PAIR, {"quantization": "int8"}, "int8 of the target cannot be exported"),
        (PAIR, {"quantization": "hqq"}, "'hqq' of the target cannot be exported: only nf4 is made while loading"),
        (PAIR, {"plan": plan(fits=False)}, "The plan does not fit"),
        (PAIR, {"plan": plan(device("cuda:0"), device("cpu"))}, "keeps weights of the target on cpu"),
        (PAIR, {"plan": plan()}, "names no GPU"),
        (
            PAIR,
            {"plan": plan(*[device(f"cuda:{index}") for index in range(3)]), "num_heads": 32},
            "32 attention heads cannot be split over 3 GPUs",
        ),
        ({"model": DRAFT}, {"estimate": {"kinds": []}}, "The estimate has no speeds for draft_model"),
    ],
)
def test_what_vllm_cannot_be_told_is_refused_with_the_reason(flag, options, message):
    with pytest.raises(ValueError, match=message):
        export_vllm(TARGET, flag, **options)


def test_keys_without_a_counterpart_are_named():
    result = export_vllm(TARGET, {**PAIR, "device": "cuda:1", "deterministic": True, "dtype": "bfloat16"})
    assert sum("is left out" in note for note in result.notes) == 3
    assert set(result.speculative_config) == {"method", "model", "num_speculative_tokens"}


# --- the command line -----------------------------------------------------------------------------------------------


def run(*options):
    return CliRunner().invoke(app, ["export", "vllm", *map(str, options)])


def test_command_prints_one_line_and_its_notes_apart(tmp_path):
    for name, data in (("estimate.json", ESTIMATE), ("plan.json", plan(device("cuda:0"), device("cuda:1")))):
        (tmp_path / name).write_text(json.dumps(data if name == "estimate.json" else {"target": TARGET, "plan": data}))
    files = ("--estimate", tmp_path / "estimate.json", "--plan", tmp_path / "plan.json")
    done = run("--target", TARGET, "--draft", DRAFT, *files)
    assert done.exit_code == 0
    assert shlex.split(done.stdout)[:5] == ["vllm", "serve", TARGET, "--tensor-parallel-size", "2"]
    assert done.stdout.count("\n") == 1
    assert "fastest by measurement" in done.stderr
    as_json = json.loads(run("--target", TARGET, "--draft", DRAFT, *files, "--json").stdout)
    assert as_json["arguments"] == shlex.split(done.stdout)


def test_the_flag_saved_with_the_target_is_read_and_options_win(tmp_path):
    saved = {"speculative_config": {"model": "org/saved", "num_speculative_tokens": 3, "draft_sample_method": "greedy"}}
    (tmp_path / "generation_config.json").write_text(json.dumps(saved))
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 14}))
    arguments = shlex.split(run("--target", tmp_path, "--draft", DRAFT).stdout)
    assert json.loads(arguments[-1]) == {
        "method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3, "draft_sample_method": "greedy",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft", DRAFT), "vLLM takes one number"),
        (("--speculative-config", "{"), "is not JSON"),
        (("--speculative-config", "[]"), "must hold one JSON object"),
        (("--speculative-config", '{"synthetic_acceptance_length": 3}'), "is refused: synthetic acceptance"),
        (("--plan", "/nowhere/plan.json"), "No such file"),
    ],
)
def test_errors_are_one_line_and_exit_status_1(options, message):
    done = run("--target", TARGET, *options)
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
