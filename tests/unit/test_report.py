import dataclasses
import json
import re
import subprocess
import sys

import pytest

from hf_specdec.report import SpeculationReport


def exactly(text):
    return f"^{re.escape(text)}$"


def full_report(**changes):
    values = {
        "method": "draft_model", "draft_lengths": [2, 2], "target_passes": 2, "steps": 3, "drafted": 6, "reached": 5,
        "accepted": 3, "emitted": 7, "cut": 1, "prefill_emitted": 2, "accepted_histogram": [1, 1, 1],
        "acceptance_by_position": [2 / 3, 0.5], "acceptance_rate": 0.6, "draft_utilization": 0.5,
        "mean_acceptance_length": 5 / 3, "draft_seconds": 0.1, "verify_seconds": 0.25, "prefill_seconds": 0.05,
        "other_seconds": 0.01, "decision": "Drafted 2 tokens per step.", "notes": ["The draft was loaded in float16."],
    }  # fmt: skip
    return SpeculationReport(**values | changes)


def test_fields_stand_as_documented():
    assert [field.name for field in dataclasses.fields(SpeculationReport)] == [
        "method", "draft_lengths", "target_passes", "steps", "drafted", "reached", "accepted", "emitted", "cut",
        "prefill_emitted", "accepted_histogram", "acceptance_by_position", "acceptance_rate", "draft_utilization",
        "mean_acceptance_length", "draft_seconds", "verify_seconds", "prefill_seconds", "other_seconds", "reason",
        "decision", "notes", "cost_coefficient", "predicted_speedup", "measured_speedup",
            "draft_quantization", "conversion_seconds",
    ]  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        full_report().steps = 4  # type: ignore[misc]


def test_report_prints_as_aligned_lines():
    assert str(full_report()).splitlines() == [
        "Speculative decoding (draft_model)",
        "  tokens        7 emitted = 2 prefill + 3 accepted + 3 from the target - 1 cut",
        "  target        2 passes, 1.67 tokens per pass and row (plain 1.00)",
        "  draft         6 drafted, 5 reached, 3 accepted: acceptance 0.60, utilization 0.50",
        "  by position   0.67 0.50",
        "  seconds       0.100 draft, 0.250 verify, 0.050 prefill, 0.010 other",
        "  decision      Drafted 2 tokens per step.",
        "  note          The draft was loaded in float16.",
    ]


def test_plain_report_says_that_plain_ran_and_why():
    report = SpeculationReport.plain("beam search is not supported")
    assert str(report) == "Plain decoding ran: beam search is not supported"
    assert (report.method, report.reason) == ("plain", "beam search is not supported")
    assert report.decision == "Plain decoding: beam search is not supported"
    assert (report.acceptance_rate, report.mean_acceptance_length, report.emitted) == (0.0, 1.0, 0)
    assert SpeculationReport.plain("why", method="draft_model").method == "draft_model"
    report.check()


def test_a_call_that_turned_plain_midway_shows_both():
    text = str(full_report(reason="draft logits were NaN"))
    assert text.startswith("Speculative decoding (draft_model)")
    assert "  plain ran     draft logits were NaN" in text


def test_to_dict_is_plain_json():
    report = full_report()
    assert SpeculationReport(**json.loads(json.dumps(report.to_dict()))) == report


def test_to_dict_shares_nothing_with_the_report():
    report = full_report()
    report.to_dict()["notes"].append("changed")
    assert report.notes == ["The draft was loaded in float16."]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"emitted": 8}, "Tokens are unaccounted for: emitted 8 must be prefill_emitted 2 + accepted 3 + steps 3 "
                         "- cut 1."),
        ({"reached": 2}, "Draft tokens are unaccounted for: accepted 3 <= reached 2 <= drafted 6 must hold."),
        ({"accepted_histogram": [1, 2]}, "accepted_histogram must hold 3 steps with 3 accepted tokens, got 3 with 2."),
    ],
)  # fmt: skip
def test_check_names_the_numbers_that_do_not_add_up(changes, text):
    full_report().check()
    with pytest.raises(ValueError, match=exactly(text)):
        full_report(**changes).check()


@pytest.mark.parametrize("module", ["report", "statistics"])
def test_counting_and_reporting_need_neither_torch_nor_transformers(module):
    code = (
        "import sys, types, importlib; package = types.ModuleType('hf_specdec'); package.__path__ = [sys.argv[1]]; "
        f"sys.modules['hf_specdec'] = package; importlib.import_module('hf_specdec.{module}'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    folder = __import__("hf_specdec").__path__[0]
    assert subprocess.run([sys.executable, "-c", code, folder], check=False).returncode == 0
