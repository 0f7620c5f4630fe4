"""Does an estimate follow from what was measured, by hand-computed numbers, and does it say so on real calls?"""

import json
import subprocess
import sys
import time

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.cli.estimate import PROMPTS
from hf_specdec.config import SpeculativeConfig
from hf_specdec.costs import StepCosts
from hf_specdec.estimate import KindEstimate, Prediction, looked_up, predict, run_estimate
from hf_specdec.estimate.measuring import _turns
from hf_specdec.estimate.result import verdict_on
from hf_specdec.host.knowledge import knowledge_of
from tests.integration.pairs import VOCAB, llama, pair

TEXTS = {"code": [[5, 3, 9, 12], [7, 7, 2, 30, 11, 4]], "prose": [[22, 8, 4]]}


def ids(texts=TEXTS):
    return {kind: [torch.tensor(text) for text in several] for kind, several in texts.items()}


def estimated(target, draft, **options):
    return run_estimate(target, draft, ids(), **{"max_new_tokens": 32, **options})


def machine(draft=0.25, passes=((1, 1.0), (17, 1.8))):
    costs = StepCosts()
    for rows, seconds in passes:
        costs.verify.add(rows, seconds)
    if draft is not None:
        costs.draft.add(1, draft)
    return costs


# --- arithmetic -----------------------------------------------------------------------------------------------------


def test_speed_is_expected_tokens_over_pass_and_drafting():
    """a = 1/2 at every position: 1, 1.5, 1.75, 1.875, … tokens; a pass of K + 1 rows takes 1 + K/20 s."""
    prediction = predict(machine(), [[0.5**i for i in range(1, 17)]] * 1000)
    assert prediction.acceptance_rate == pytest.approx(0.5)
    assert prediction.acceptance_by_position == pytest.approx([0.5] * 16)
    for row, tokens in zip(prediction.rows, (1.0, 1.5, 1.75, 1.875), strict=False):
        seconds = 1 + row.draft_length * (0.05 + 0.25)
        assert row.expected_tokens == pytest.approx(tokens)
        assert row.step_seconds == pytest.approx(seconds)
        assert row.tokens_per_second == pytest.approx(tokens / seconds)
        assert row.speedup == pytest.approx(tokens / seconds)
    assert prediction.best.draft_length == prediction.auto_length == 1
    assert [row.draft_length for row in prediction.rows] == list(range(17))


def test_rows_of_a_batch_share_the_pass():
    costs = machine(passes=((4, 2.0), (8, 3.0)))
    row = predict(costs, [[1.0]] * 4, batch=4).rows[1]
    assert row.expected_tokens == pytest.approx(2.0)
    assert row.step_seconds == pytest.approx(3.25)
    assert row.tokens_per_second == pytest.approx(8 / 3.25)
    assert row.speedup == pytest.approx((8 / 3.25) / (4 / 2.0))


def test_acceptance_differs_by_position():
    prediction = predict(machine(), [[1.0, 0.5]] * 1000)
    assert prediction.acceptance_rate == pytest.approx(0.75)
    assert prediction.acceptance_by_position == [1.0, 0.5]
    assert [row.expected_tokens for row in prediction.rows[:3]] == pytest.approx([1.0, 2.0, 2.5], abs=2e-3)


def test_without_a_draft_only_plain_is_predicted():
    (row,) = predict(machine(draft=None), []).rows
    assert (row.draft_length, row.expected_tokens, row.speedup) == (0, 1.0, 1.0)


def test_look_up_is_replayed_step_by_step():
    """Prompt 1 2 3 4, the prefill gives 1. [2 3] are proposed for a match of one, right, 4 comes from the pass; then a
    match of four proposes on, cut before the last token: 1 2 right, 3 wrong."""
    config = SpeculativeConfig(method="ngram")
    costs = machine(draft=None)
    prediction = looked_up([([1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 9, 9])], costs, config)
    assert prediction.acceptance_by_position[:2] == [1.0, 1.0]
    assert prediction.acceptance_rate == pytest.approx(4 / 5)
    assert prediction.share_drafting == pytest.approx(2 / 3)
    row = prediction.rows[2]
    assert row.expected_tokens == pytest.approx(7 / 3)
    assert row.step_seconds == pytest.approx((1.1 + 1.1 + 1.0) / 3)
    assert row.speedup == pytest.approx(7 / 3.2)
    assert prediction.rows[0].speedup == 1.0
    assert looked_up([([1, 2], [3, 4, 5])], costs, config).share_drafting == 0.0
    assert looked_up([([1, 2], [3, 4, 5])], None, config).rows == []
    assert looked_up([([1, 2], [3])], costs, config).rows == []  # the prefill gave all of it


def kind(name, rate, costs=None, lookup=None):
    nothing = Prediction([], 0.0, [])
    survivals = [[rate**i for i in range(1, 17)]] * 1000
    return KindEstimate(name, 100, predict(costs or machine(), survivals), lookup or nothing)


def test_verdict_is_a_plain_sentence():
    yes = verdict_on([kind("prose", 0.5), kind("code", 0.8)], 0.25)
    assert yes == "Yes: expect 1.6x at K = 3 on code; 1.2x at K = 1 on prose."
    assert verdict_on([kind("prose", 0.1), kind("code", 0.8)], 0.25) == (
        "Yes: expect 1.6x at K = 3 on code; on prose no K pays."
    )
    dear = machine(draft=0.8)
    assert verdict_on([kind("code", 0.4, dear)], 0.8) == (
        "No: a draft token costs 0.80 of a target pass and 40% are kept; no K pays."
    )
    assert "10% to 40% are kept" in verdict_on([kind("code", 0.4, dear), kind("prose", 0.1, dear)], 0.8)
    assert verdict_on([kind("code", 0.32)], 0.25).endswith("no K gains more than 2%.")
    assert verdict_on([], None).startswith("Nothing can be said")


def test_verdict_names_look_up_where_it_pays():
    config = SpeculativeConfig(method="ngram")
    # Three steps for 15 tokens after the first: 2, 8 and 2 proposed, all right, in 1.1 + 1.4 + 1.1 s.
    found = looked_up([([1, 2, 3, 4], [1, 2, 3, 4] * 4)], machine(draft=None), config)
    told = verdict_on([kind("copy", 0.1, lookup=found)], 0.25)
    assert told.startswith("No: ")
    assert told.endswith(" Look-up alone (method='ngram', no draft): 4.2x on copy.")
    alone = KindEstimate("copy", 16, None, found)
    assert verdict_on([alone], None) == "Yes: expect 4.2x at K = 5 on copy."
    never = looked_up([([1, 2], [3, 4, 5])], machine(draft=None), config)
    assert verdict_on([KindEstimate("prose", 3, None, never)], None) == (
        "No: at most 0% of the steps find something to propose and 0% of it is kept; no K pays."
    )


# --- on tiny pairs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.8}])
def test_estimate_of_a_pair_has_every_part(options):
    target, draft = pair()
    result = estimated(target, draft, options=options)
    assert [each.kind for each in result.kinds] == ["code", "prose"]
    for each in result.kinds:
        rows = each.draft.rows
        assert [row.draft_length for row in rows] == list(range(17))
        assert (rows[0].speedup, rows[0].expected_tokens) == (1.0, 1.0)
        tokens = [row.expected_tokens for row in rows]
        assert tokens == sorted(tokens)
        assert all(row.step_seconds > 0 for row in rows)
        assert 0.2 < each.draft.acceptance_rate < 0.8
        assert each.lookup.rows[0].speedup == 1.0
    assert result.kinds[0].num_tokens == 64
    costs = result.costs
    assert set(costs["pass_seconds_by_rows"]) <= {"1", "2", "3", "5", "9", "17"}
    assert costs["cost_coefficient"] == pytest.approx(
        costs["draft_token_seconds"] / costs["pass_seconds_by_rows"]["1"], rel=1e-6
    )
    assert costs["target_prefill_seconds"] > 0
    assert costs["draft_prefill_seconds"] > 0
    assert result.setting["options"] == options
    assert json.loads(json.dumps(result.to_dict()))["kinds"][0]["draft"]["auto_length"] in range(17)


def test_the_copy_that_calls_would_draft_with_is_measured(monkeypatch):
    from hf_specdec.host import conversions

    monkeypatch.setattr(conversions, "MIN_WEIGHTS", 0)
    monkeypatch.setattr(conversions, "_timings", lambda draft: [conversions._Timing("int8", 1.0, 0.3, 0.1)])
    found = estimated(*pair(0, hidden_size=64))
    assert found.setting["flag"]["draft_quantization"] == "int8"
    assert found.costs["draft_token_seconds"] > 0
    assert any(note.startswith("Draft converted to int8") for note in found.notes)
    assert {kind.kind for kind in found.kinds} == set(TEXTS)


def test_draft_that_is_the_target_is_always_kept():
    target = llama()
    result = estimated(target, target)
    for each in result.kinds:
        assert each.draft.acceptance_rate == 1.0
        assert [row.expected_tokens for row in each.draft.rows] == pytest.approx(range(1, 18))


def test_random_draft_gives_no():
    result = estimated(llama(), llama(seed=5))
    assert result.verdict.startswith("No: a draft token costs ")
    assert all(each.draft.best.draft_length == 0 for each in result.kinds)


def test_rows_of_a_batch_are_the_prompts_of_a_kind_in_turn():
    target, draft = pair()
    result = estimated(target, draft, batch=3)
    assert result.setting["batch"] == 3
    assert set(result.costs["pass_seconds_by_rows"]) <= {"3", "6", "9", "15", "27", "51"}
    assert result.kinds[0].num_tokens == 3 * 32
    assert result.kinds[0].lookup.rows == []
    assert result.kinds[0].draft.rows[0].speedup == 1.0


def test_without_a_draft_look_ups_are_estimated():
    result = estimated(llama(), None)
    assert result.setting["flag"]["method"] == "ngram"
    assert all(each.draft is None and each.asked is each.lookup for each in result.kinds)
    assert result.costs["draft_token_seconds"] is None
    assert result.verdict[:4] in ("Yes:", "No: ")


def test_kinds_take_turns_so_that_an_early_stop_leaves_something_of_each():
    turns = _turns({"code": ids()["code"], "prose": ids()["prose"]}, 1)
    assert [[kind for kind, _ in turn] for turn in turns] == [["code", "prose"], ["code"]]
    (turn,) = _turns(ids(), 3)
    assert [row.tolist() for row in turn[0][1]] == [TEXTS["code"][0], TEXTS["code"][1], TEXTS["code"][0]]


@pytest.mark.parametrize("has_draft", [True, False])
def test_time_that_is_spent_is_said(has_draft):
    target, draft = pair()
    started = time.perf_counter()
    result = estimated(target, draft if has_draft else None, budget_seconds=0.02, max_new_tokens=2000)
    assert time.perf_counter() - started < 20
    assert "prose: nothing (the seconds were spent)" in result.not_measured
    assert result.seconds < 10


def test_pair_that_decodes_plainly_says_why():
    target, draft = pair()
    target.generation_config.use_cache = False
    result = estimated(target, draft)
    assert result.verdict.startswith("No: calls decode plainly: ")
    assert "use_cache=False" in result.verdict
    assert result.kinds == []


def test_switched_off_plugin_is_said(monkeypatch):
    monkeypatch.setenv("HF_SPECDEC", "0")
    assert "HF_SPECDEC=0" in estimated(*pair()).verdict


def test_estimate_leaves_nothing_behind():
    target, draft = pair()
    known = knowledge_of(target, draft, "draft_model", 1, 4)
    before, config = dict(vars(known)), target.generation_config.to_dict()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    estimated(target, draft, options={"do_sample": True})
    assert torch.equal(torch.rand(3), expected)
    assert all(vars(known)[name] is value for name, value in before.items())
    assert known.costs.verify.is_empty
    assert known.records == {}
    assert target.generation_config.to_dict() == config


def test_what_cannot_be_estimated_is_refused():
    target, draft = pair()
    with pytest.raises(ValueError, match="at least one prompt of each kind"):
        run_estimate(target, draft, {})
    with pytest.raises(ValueError, match="at least one prompt of each kind"):
        run_estimate(target, draft, {"code": [torch.tensor([], dtype=torch.long)]})
    with pytest.raises(ValueError, match=r"Unknown method 'n-gram'\. Did you mean 'ngram'\?"):
        estimated(target, draft, method="n-gram")
    with pytest.raises(
        ValueError, match=r"method='draft_model' needs a draft\. Name one, or estimate method='ngram'\."
    ):
        estimated(target, None, method="draft_model")
    with pytest.raises(ValueError, match=r"method='suffix' proposes depends on more than .* Estimate method='ngram'"):
        estimated(target, None, method="suffix")


def test_drafters_are_known_before_anything_else_is_imported():
    code = "import hf_specdec.estimate; from hf_specdec.registry import DRAFTERS; print(*sorted(DRAFTERS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"auto", "base", "draft_model", "ngram", "suffix"} <= set(done.stdout.split())


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Target's and draft's folders, with a tokenizer whose words are w0, w1, …, and a foreign draft's."""
    home = tmp_path_factory.mktemp("pair")
    target, draft = pair()
    for name, model, letter in (("target", target, "w"), ("draft", draft, "w"), ("foreign", llama(), "v")):
        inner = Tokenizer(WordLevel({f"{letter}{i}": i for i in range(VOCAB)}, unk_token=f"{letter}0"))
        inner.pre_tokenizer = WhitespaceSplit()
        model.save_pretrained(home / name)
        unknown = f"{letter}0"
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=unknown, pad_token=unknown).save_pretrained(
            home / name
        )
    (home / "mine.txt").write_text("w5 w3 w9\n\nw7 w7 w2\n")
    (home / "kinds.toml").write_text(
        '[[prompt]]\nname = "a"\nkind = "code"\ntext = "w5 w3"\n[[prompt]]\nkind = "prose"\ntext = "w8 w4 w4"\n'
    )
    return home


def specdec_estimate(folders, *options, draft="draft"):
    arguments = ["--target", str(folders / "target"), "--max-new-tokens", "24", "--seconds", "20"]
    arguments += [] if draft is None else ["--draft", str(folders / draft)]
    return CliRunner().invoke(app, ["estimate", *arguments, *options])


def test_command_prints_one_json_object(folders):
    done = specdec_estimate(folders, "--prompts", str(folders / "mine.txt"), "--temperature", "0.7", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["setting"]["num_prompts"] == {"mine": 2}
    assert data["setting"]["options"] == {"do_sample": True, "temperature": 0.7}
    assert [row["draft_length"] for row in data["kinds"][0]["draft"]["rows"]] == list(range(17))
    assert data["verdict"]


def test_command_shows_a_table_and_a_sentence(folders):
    done = specdec_estimate(folders, "--prompts", str(folders / "kinds.toml"))
    assert done.exit_code == 0, done.output
    for words in ("code", "prose", "tokens per pass", "÷ plain", "1.00x", "look-up", "settles at", "float32 on cpu"):
        assert words in done.stdout, done.stdout
    assert "Yes: expect" in done.stdout or "No: a draft token costs" in done.stdout


def test_command_without_a_draft_estimates_look_ups(folders):
    done = specdec_estimate(folders, "--prompts", str(folders / "mine.txt"), draft=None)
    assert done.exit_code == 0, done.output
    assert "look-up" in done.stdout


def test_plot_is_an_svg(folders, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.svg"
    done = specdec_estimate(folders, "--prompts", str(folders / "kinds.toml"), "--plot", str(path))
    assert done.exit_code == 0, done.output
    assert "<svg" in path.read_text()


def test_plot_without_matplotlib_is_refused_before_anything_is_loaded(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["estimate", "--target", str(tmp_path / "nowhere"), "--plot", "speed.svg"])
    assert done.exit_code == 1
    assert "--plot needs matplotlib: pip install 'hf_specdec[report]'." in " ".join(done.output.split())


def test_errors_are_one_message(folders, tmp_path):
    done = specdec_estimate(folders, "--target", str(tmp_path / "nowhere"))
    assert done.exit_code == 1
    assert "Error:" in done.output
    done = specdec_estimate(folders, draft="foreign")
    assert done.exit_code == 1
    assert "disagree on token 0" in " ".join(done.output.split())
    for name, text, words in (
        ("empty.txt", "\n", "holds no prompts"),
        ("kindless.toml", '[[prompt]]\ntext = "w1"\n', "Prompt 1 in kindless.toml must say kind"),
        ("one.toml", '[prompt]\ntext = "w1"\n', "Double its brackets"),
    ):
        (tmp_path / name).write_text(text)
        done = specdec_estimate(folders, "--prompts", str(tmp_path / name))
        assert done.exit_code == 1
        assert words in " ".join(done.output.split())


def test_built_in_prompts_are_of_the_three_kinds():
    assert list(PROMPTS) == ["code", "copy", "prose"]
    assert all(1 <= len(texts) <= 2 for texts in PROMPTS.values())
