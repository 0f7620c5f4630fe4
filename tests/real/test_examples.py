"""Do the examples run as they stand, on the real small pair, and say what they promise?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.real]

ROOT = Path(__file__).parents[2]


def run(*arguments):
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart_decodes_both_ways():
    out = run("examples/quickstart.py")
    assert "plain:" in out
    assert "speculative:" in out
    assert "tokens per pass and row" in out


def test_pipeline_chat_speculates_in_both_turns():
    assert run("examples/pipeline_chat.py").count("tokens per target pass") == 2


def test_batch_equals_plain():
    assert "equal to plain: True" in run("examples/batch.py")


def test_fetch_models_prints_a_folder_that_holds_a_checkpoint():
    name, folder = run("examples/fetch_models.py", "smol-draft").strip().split("\t")
    assert name == "smol-draft"
    assert (Path(folder) / "config.json").is_file()


def test_command_line_compares_on_the_real_pair():
    out = run(
        "-c", "from hf_specdec.cli import app; app()", "generate", "--target", "smollm2-135m", "--draft", "smol-draft",
        "--prompt", "Name a colour.", "--max-new-tokens", "16", "--compare", "--rounds", "1",
    )  # fmt: skip
    for words in ("plain", "speculative", "tokens/s", "mean acceptance length", "acceptance by position"):
        assert words in out
