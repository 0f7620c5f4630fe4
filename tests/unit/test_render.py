"""Do the documents say what the code and the ledger say, and does the check notice when they do not?"""

import ast
import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import bars, render, tables
from hf_specdec.benchmark.figures import digest_in, draw, results_digest
from hf_specdec.benchmark.ledger import Ledger, read_results
from hf_specdec.config import SpeculativeConfig
from hf_specdec.host import reasons

ROOT = Path(__file__).parents[2]


def record(arm, prompt, seconds, report=None, **more):
    facts = {"prompt": prompt, "seed": 0, "arm": arm, "family": arm.partition("-")[0], "position": 0}
    facts |= {"seconds": seconds, "peak_bytes": 2**30, "tokens": [12], "differs_at": [None], **more}
    return facts | ({"report": report} if report else {})


REPORT = {
    "steps": 6,
    "accepted": 5,
    "reached": 9,
    "cut": 0,
    "target_passes": 6,
    "draft_passes": 12,
    "accepted_histogram": [3, 1, 2],
    "acceptance_by_position": [3 / 6, 2 / 3],
    "draft_seconds": 0.6,
    "verify_seconds": 1.2,
    "prefill_seconds": 0.1,
    "other_seconds": 0.1,
    "reason": None,
}


@pytest.fixture
def results(tmp_path):
    """A ledger of two kinds, greedy and sampling, three prompts each: assisted at 1.25, ours at 2 times plain."""
    ledger = Ledger.of(tmp_path / "results", "cpu-2core-avx2", "draft_model/tiny")
    environment = {
        "device": "cpu-2core-avx2",
        "threads": 2,
        "packages": {"torch": "2.13.0"},
        "commit": "0123456789abcdef",
    }
    environment |= {"has_uncommitted_changes": False, "date": "2030-01-02T03:04:05+00:00"}
    asked = {"target": "big", "draft": "small", "dtype": "bfloat16", "max_new_tokens": 12, "seeds": [0]}
    for mode in ("greedy", "sampling"):
        for kind in ("code", "prose"):
            records = []
            for prompt in "abc":
                records += [record("plain-first", prompt, 2.0), record("plain-last", prompt, 2.0)]
                records += [record("assisted-3", prompt, 1.6), record("ours-2", prompt, 1.0, REPORT)]
            cell = {"kind": kind, "mode": mode, "batch": 1}
            ledger.put(asked, f"{kind}/{mode}/1", {"cell": cell, "environment": environment, "records": records})
    return tmp_path / "results"


# ----------------------------------------------------------------------------------------------- what is rendered now


def test_documents_of_the_repository_have_every_marker_once():
    for document, marker, _ in render.SECTIONS:
        text = (ROOT / document).read_text(encoding="utf-8")
        assert render.replaced(text, marker, "new").count(f"<!-- {marker} -->\nnew\n<!-- /{marker} -->") == 1


def test_configuration_names_every_key_with_default_and_meaning():
    lines = render.configuration().splitlines()
    assert lines[0] == "| key | default | meaning |"
    assert any(
        line.startswith('| `num_speculative_tokens` | `"auto"` | tokens drafted in every step') for line in lines
    )
    assert any(line.startswith('| `method` | `"auto"` |') for line in lines)
    assert len(lines) == 2 + len(dataclasses.fields(SpeculativeConfig))


def test_models_tested_are_the_zoo():
    from tests.zoo import FAMILIES

    text = render.models_tested()
    assert len(text.splitlines()) == 2 + len(FAMILIES)
    assert "| Llama | `llama` |" in text


def test_processors_are_those_of_the_tables():
    text = render.processors()
    assert "| `TemperatureLogitsWarper` | one call for the whole block |" in text


def test_file_tree_has_one_line_per_module():
    text = render.file_tree()
    for path in (ROOT / "hf_specdec").rglob("*.py"):
        assert re.search(rf"^ +{re.escape(path.name)} +\S", text, re.MULTILINE), path
    assert "decoding.py" in text
    assert "The decoding loop: draft, verify, commit, roll back" in text
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*/*.py")}
    assert folders <= render.FOLDERS.keys(), "say in render.FOLDERS what a new folder of tests is for"


@pytest.mark.parametrize(
    ("docstring", "summary"),
    [
        ("One thing. Another thing.", "One thing"),
        ("Runs `generate()`, wrapped\nover lines.\n\nMore.", "Runs generate(), wrapped over lines"),
        ("Sizes of arXiv 2.3 things.", "Sizes of arXiv 2.3 things"),
    ],
)
def test_summary_is_the_first_sentence(tmp_path, docstring, summary):
    path = tmp_path / "module.py"
    path.write_text(f'"""{docstring}"""\n')
    assert render.summary_of(path) == summary


# ------------------------------------------------------------------------------------------------------- the results


def test_overview_shows_kinds_apart_and_together_with_intervals(results):
    text = tables.overview(results)
    assert "**cpu-2core-avx2**" in text
    for kind in ("code (3)", "prose (3)", "all (6)"):
        cells = "6.0 | 1.25× (1.25–1.25) [K=3] | — | **2.00× (2.00–2.00)** [K=2] | 12.0 |"
        row = f"| tiny | bfloat16, 1 | greedy | {kind} | {cells}"
        assert row in text
    assert text.count("| tiny |") == 6


def test_all_arms_shows_what_a_reader_needs_to_judge(results):
    text = tables.all_arms(results)
    assert "big drafted by small, bfloat16, 12 new tokens, seeds 0; 2 threads; torch 2.13.0; commit 0123456789" in text
    row = next(line for line in text.splitlines() if line.startswith("| ours-2 |"))
    for words in ("2.00×", "1.83", "0.50 0.67", "0.25", "30.0% / 60.0% / 5.0% / 5.0%", "1.00 GiB", "3 of 3"):
        assert words in row
    assert "ran at 1.00× its speed before them" in text


def test_pairs_state_the_bound_that_their_measured_acceptance_and_cost_give(results):
    alpha, cost = 5 / 9, 0.25
    bound = max((1 - alpha ** (k + 1)) / ((1 - alpha) * (1 + cost * k)) for k in range(20))
    assert f"bounds the gain at {bound:.2f}×; measured 2.00× (2.00–2.00)." in tables.pairs(results)


def test_fallback_of_an_arm_is_shown(results):
    (ledger,) = read_results(results)["cpu-2core-avx2"].values()
    for cell in ledger.data["cells"].values():
        for each in cell["records"]:
            if "report" in each:
                each["report"] = {**REPORT, "reason": "no draft"}
    ledger.path.write_text(json.dumps(ledger.data))
    assert "ours-2 (plainly: no draft)" in tables.all_arms(results)


AUTO = REPORT | {
    "steps_by_draft_length": {"0": 1, "2": 5},
    "predicted_speedup": 2.5,
    "measured_speedup": 2.4,
    "cost_coefficient": 0.2,
}
ARMS = {"plain-first": 2.1, "plain-last": 2.1, "assisted-3": 1.6, "assisted-lookup": 1.8, "flashspec-3": 1.3}
OURS = {"ours-2": 1.1, "ours-3": 1.2, "ours-nf4-2": 1.0, "ngram-4": 1.5, "ours-auto": 1.1, "ours-auto-nf4": 0.9}
FAMILIES = {"ngram-4": "ours", "assisted-lookup": "lookup"}


@pytest.fixture
def newer(tmp_path):
    """A ledger of the pair that the targets are about, with every kind of arm, and one of temperatures and batches."""
    environment = {"device": "cpu", "threads": 2, "packages": {}, "commit": None, "has_uncommitted_changes": False}
    environment |= {"date": "2030-01-02T03:04:05+00:00"}
    asked = {"target": "big", "draft": "small", "dtype": "bfloat16", "max_new_tokens": 12, "seeds": [0]}

    def cell(kind, mode, batch, arms):
        records = []
        for prompt in "abcd":
            for arm, seconds in arms.items():
                made = AUTO if "auto" in arm else REPORT if arm in OURS else None
                more = {"family": FAMILIES.get(arm, arm.partition("-")[0])}
                records.append(record(arm, prompt, seconds, made, **more))
        return {"cell": {"kind": kind, "mode": mode, "batch": batch}, "environment": environment, "records": records}

    ledger = Ledger.of(tmp_path / "newer", "cpu", "draft_model/qwen2.5-coder")
    for mode in ("greedy", "sampling"):
        for kind in ("code", "prose"):
            ledger.put(asked, f"{kind}/{mode}/1", cell(kind, mode, 1, ARMS | OURS))
        fast = {"plain-first": 2.1, "plain-last": 2.1, "ours-2": 1.5, "ours-auto": 2.2}
        ledger.put(asked, f"code/{mode}/4", cell("code", mode, 4, fast))
    sweep = Ledger.of(tmp_path / "newer", "cpu", "draft_model/sweep")
    asked = {**asked, "target_quantization": "nf4"}
    for mode, seconds in {"T=0": 1.0, "T=0.3": 1.2, "T=1": 2.1}.items():
        arms = {"plain-first": 2.1, "plain-last": 2.1, "ours-2": seconds + 0.2, "ours-auto": seconds}
        sweep.put(asked, f"code/{mode}/1", cell("code", mode, 1, arms))
    return tmp_path / "newer"


def row_of(text, *parts):
    (found,) = [line for line in text.splitlines() if all(part in line for part in parts)]
    return [each.strip() for each in found.strip("|").split("|")]


def test_overview_shows_what_was_chosen_beside_what_was_best(newer):
    row = row_of(tables.overview(newer), "| qwen2.5-coder | bfloat16, 1 | greedy | code (4)")
    assert row[5:8] == ["1.31× (1.31–1.31) [K=3]", "**1.91× (1.91–1.91)** [K=1.7]", "2.10× (2.10–2.10) [nf4 K=2]"]


def test_all_arms_tells_a_quantized_target_and_the_chosen_lengths(newer):
    text = tables.all_arms(newer)
    assert "bfloat16 (target nf4)" in text
    assert {row[3].strip() for row in (line.split("|") for line in text.splitlines()) if "ours-auto " in row[1:2]} <= {
        "1.7"
    }
    assert "4 of 4" in row_of(text.partition("#### T=0, code")[2].partition("####")[0], "| ours-2 |")[-1]


def test_bars_stand_beside_what_was_measured(newer):
    text = bars.bars(newer)
    fixed = row_of(text, "greedy, code, batch 1, best: K=2", "| ours-auto |")
    assert fixed[3:] == [bars.BARS["fixed"].what, "1.00", "≥ 0.93", "≥ 0.97", "aim"]
    four_bit = row_of(text, "greedy, code, batch 1, best: nf4 K=2", "| ours-auto-nf4 |")
    assert four_bit[4] == "1.11"
    slow = row_of(text, "greedy, code, batch 4 |", "auto ÷ plain")
    assert slow[4:] == ["0.95", "≥ 1.10", "≥ 1.30", "missed by 13%"]
    assisted = row_of(text, "batch 1, 4 cells", "| ours-auto |")
    assert assisted[4:] == ["1.45", "≥ 1.25", "≥ 1.60", "must"]
    engine = row_of(text, "ours ÷ flashspec", "greedy, code")
    assert (engine[2], engine[4], engine[7]) == ("ours-3", "1.08", "must")
    # (2.1 - 0.1) ÷ (1.1 - 0.1) = 2 was measured after the prefill, 2.5 predicted.
    assert row_of(text, "greedy, code, batch 1", "largest", "| ours-auto |")[4] == "25.0%"
    assert row_of(text, "greedy, code, batch 1", "within 10", "| ours-auto |")[4] == "0.0%"
    assert row_of(text, "greedy, code, batch 1", "outside", "| ours-auto |")[4:] == [
        "5.3%",
        "≤ 3.0%",
        "≤ 1.5%",
        "missed by 75%",
    ]


def test_ledgers_without_auto_have_no_bars(results):
    assert "No ledger" in bars.bars(results)


def test_without_results_no_number_is_shown(tmp_path):
    for section in (tables.overview, tables.pairs, tables.all_arms):
        assert section(tmp_path) == tables.NOT_YET
    assert tables.plot(tmp_path, tmp_path / "docs" / "figures") == ""
    assert tables.more_figures(tmp_path, tmp_path / "docs" / "figures") == ""
    assert tables.stale_figures(tmp_path, tmp_path) == []


def test_figure_is_the_same_for_the_same_results_and_stale_for_others(results, tmp_path):
    pytest.importorskip("matplotlib")
    figures = tmp_path / "docs" / "figures"
    assert tables.stale_figures(results, figures) == ["the figure of cpu-2core-avx2 is stale: run specdec report"]
    by_name = read_results(results)["cpu-2core-avx2"]
    path, steps = draw("cpu-2core-avx2", by_name, figures)
    first = path.read_bytes(), steps.read_bytes()
    assert tuple(each.read_bytes() for each in draw("cpu-2core-avx2", by_name, figures)) == first
    assert digest_in(path) == results_digest(by_name)
    assert tables.stale_figures(results, figures) == []
    assert "](docs/figures/cpu-2core-avx2.svg)" in tables.plot(results, figures)
    (ledger,) = by_name.values()
    ledger.path.write_text(ledger.path.read_text() + "\n")
    assert tables.stale_figures(results, figures) != []


def test_figures_show_every_drafter_predictions_parts_and_where_auto_stands_aside(newer, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # texts as texts
    sweep = read_results(newer)["cpu"]["draft_model/sweep"]
    for each in sweep.data["cells"]["code/T=1/1"]["records"]:
        if each["arm"] == "ours-auto":
            each["report"] = {**AUTO, "steps_by_draft_length": {"0": 5, "1": 1}}
    sweep.path.write_text(json.dumps(sweep.data))
    figures = tmp_path / "docs" / "figures"
    paths = draw("cpu", read_results(newer)["cpu"], figures)
    assert [path.name for path in paths] == ["cpu.svg", "cpu-steps.svg", "cpu-sweeps.svg"]
    speeds, steps, sweeps = (path.read_text() for path in paths)
    for words in ("4-bit draft, best K", "look-up, best K", ">auto<", "auto, 4-bit draft", "best<", "lookup<"):
        assert words in speeds
    assert all(words in steps for words in (">predicted<", "within 10 %", "ms per token", ">verify<", "ours-auto-nf4"))
    assert all(words in sweeps for words in (">temperature<", "auto stands aside", "code, K = 2", "accepted ÷ reached"))
    assert tables.more_figures(newer, figures).count("](figures/cpu-") == 2
    assert tables.stale_figures(newer, figures) == []


# ----------------------------------------------------------------------------------------------------------- markers


def test_only_what_is_between_the_markers_changes():
    text = "before\n<!-- a:b -->\nold\n<!-- /a:b -->\nafter\n"
    assert render.replaced(text, "a:b", "new\n") == "before\n<!-- a:b -->\nnew\n<!-- /a:b -->\nafter\n"
    assert render.replaced(render.replaced(text, "a:b", "new"), "a:b", "old") == text


@pytest.mark.parametrize("text", ["", "<!-- a -->", "<!-- /a --><!-- a -->", "<!-- a --><!-- a --><!-- /a -->"])
def test_missing_or_doubled_marker_is_an_error(text):
    with pytest.raises(ValueError, match="exactly once"):
        render.replaced(text, "a", "new")


def test_check_names_the_document_that_has_drifted(tmp_path, monkeypatch, capsys):
    document = tmp_path / "README.md"
    document.write_text("<!-- a -->\nold\n<!-- /a -->\n")
    sections = (("README.md", "a", lambda: "new"),)
    monkeypatch.setattr(render, "ROOT", tmp_path)
    render_sections = render.rendered
    monkeypatch.setattr(render, "rendered", lambda: render_sections(sections, tmp_path))
    monkeypatch.setattr(tables, "stale_figures", list)
    monkeypatch.setattr(sys, "argv", ["render.py", "--check"])
    assert render.main() == 1
    assert "README.md has drifted" in capsys.readouterr().err
    assert "old" in document.read_text()
    monkeypatch.setattr(sys, "argv", ["render.py"])
    assert render.main() == 0
    monkeypatch.setattr(sys, "argv", ["render.py", "--check"])
    assert render.main() == 0
    assert document.read_text() == "<!-- a -->\nnew\n<!-- /a -->\n"


# --------------------------------------------------------------------------------------------------- reasons, links

#: functions of hf_specdec/host that give reasons for plain decoding, beside those called `why_…`
GIVE_NOTES = ("why_slow",)  # speculates all the same
GIVE_REASONS = ("mode_reason", "_try", "find_draft", "_load_named")


def texts(node):
    """The string constants that an expression may give; what an f-string fills in is "…"."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Name):
        constant = getattr(reasons, node.id, None)
        return [constant] if isinstance(constant, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values]
        return ["".join(part if isinstance(part, str) else (texts(part) or ["…"])[0] for part in parts)]
    branches = {ast.IfExp: ("body", "orelse"), ast.BoolOp: ("values",), ast.Tuple: ("elts",)}.get(type(node), ())
    inner = [getattr(node, name) for name in branches]
    return [text for part in inner for each in (part if isinstance(part, list) else [part]) for text in texts(each)]


def reasons_in_the_code():
    found = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    for path in (ROOT / "hf_specdec" / "host").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_one = isinstance(function, ast.FunctionDef) and (
                function.name.lstrip("_").startswith("why_") or function.name in GIVE_REASONS
            )
            is_one = is_one and function.name not in GIVE_NOTES
            for node in ast.walk(function) if is_one else ():
                if isinstance(node, ast.Return) and node.value is not None:
                    found |= set(texts(node.value))
    return found


def test_every_reason_for_plain_decoding_is_documented_and_no_other():
    text = (ROOT / "docs" / "fallbacks.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(.+?)` \| ", text, re.MULTILINE))
    assert documented == reasons_in_the_code()


@pytest.mark.parametrize("document", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_links_inside_the_repository_lead_somewhere(document):
    path = ROOT / document
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link
