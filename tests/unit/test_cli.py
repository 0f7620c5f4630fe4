"""Does the command line start quickly, show what it measured, and say plainly what went wrong?"""

import io
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.cli.demo import PROMPTS, PairName
from hf_specdec.cli.display import show_result
from hf_specdec.cli.models import PAIRS
from hf_specdec.cli.runs import Result, Run, Settings, fail

ROOT = Path(__file__).parents[2]


@dataclass
class Report:
    """The fields of a report that are shown."""

    steps: int = 20
    mean_acceptance_length: float = 1.5
    acceptance_rate: float = 0.4
    draft_utilization: float = 0.3
    acceptance_by_position: list = field(default_factory=lambda: [0.4, 0.25])
    draft_seconds: float = 0.1
    verify_seconds: float = 0.5
    prefill_seconds: float = 0.2
    other_seconds: float = 0.01
    reason: str | None = None
    decision: str = "Drafting 2 tokens a step."
    notes: list = field(default_factory=lambda: ["A note [with brackets]."])

    def to_dict(self):
        return self.__dict__


def shown(result):
    console = Console(width=120, file=io.StringIO())
    show_result(console, result)
    return console.file.getvalue()


def test_commands_import_torch_only_when_they_run():
    # Under a stand-in for the package itself, so that only the command line's own imports count.
    code = (
        "import sys, types; package = types.ModuleType('hf_specdec'); package.__path__ = ['hf_specdec']; "
        "sys.modules['hf_specdec'] = package; import hf_specdec.cli; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_comparison_shows_both_speeds_and_where_drafts_were_accepted():
    text = shown(Result("p", [Run("t", 30, 1.0)], Report(), [Run("t", 20, 1.0)]))
    for words in ("20.0", "30.0", "1.50x", "1: 0.40  2: 0.25", "1.50 tokens per target pass", "[with brackets]"):
        assert words in text


def test_fallback_shows_its_reason():
    text = shown(
        Result("p", [Run("t", 30, 1.0)], Report(steps=0, reason="no draft", decision="Plain decoding: no draft"))
    )
    assert "plain, because" in text
    assert text.count("no draft") == 1
    assert "mean acceptance length" not in text


def test_result_is_json_with_medians():
    runs = [Run("a", 10, 1.0), Run("b", 10, 2.0), Run("c", 10, 10.0)]
    data = json.loads(json.dumps(Result("p", runs, Report(), [Run("d", 10, 4.0)]).to_dict()))
    assert data["text"] == "c"
    assert data["speculative"]["tokens_per_second"] == 5.0
    assert data["speedup"] == 2.0
    assert data["report"]["acceptance_by_position"] == [0.4, 0.25]


@pytest.mark.parametrize(("temperature", "keywords"), [(0.0, {"do_sample": False}), (0.5, {"do_sample": True})])
def test_temperature_zero_is_greedy(temperature, keywords):
    assert keywords.items() <= Settings(temperature).keywords().items()


def test_pairs_offered_are_the_pairs_known():
    assert {name.value for name in PairName} == set(PAIRS)
    assert [prompt.title for prompt in PROMPTS] == ["Chat", "Code", "Editing"]


def test_error_is_one_message_without_traceback(capsys):
    error = fail(ValueError("Unknown method 'x' [see]."))
    assert isinstance(error, typer.Exit)
    assert error.exit_code == 1
    assert "Unknown method 'x' [see]." in capsys.readouterr().err


def test_missing_option_is_named():
    done = CliRunner().invoke(app, ["generate", "--target", "a"])
    assert done.exit_code == 2


def test_target_that_does_not_exist_ends_with_status_1(tmp_path):
    options = ["--target", str(tmp_path / "nowhere"), "--draft", "b", "--prompt", "c"]
    done = CliRunner().invoke(app, ["generate", *options])
    assert done.exit_code == 1
    assert "Error:" in done.output
