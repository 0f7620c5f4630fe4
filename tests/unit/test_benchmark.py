"""Does the benchmark measure what it says, resume, keep raw numbers, and derive the right ones from them?"""

import copy
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec.benchmark.arms import Assisted, Lookup, Ours, Plain, arms_of
from hf_specdec.benchmark.engines import ENGINES, is_installed
from hf_specdec.benchmark.environment import PeakMemory, describe, device_name, model_facts
from hf_specdec.benchmark.experiment import MODES, Cell, Experiment, Prompt, is_greedy, keywords_of, read_experiment
from hf_specdec.benchmark.ledger import Ledger, read_results
from hf_specdec.benchmark.running import Models, encoder, offload_layers, randomise, run_experiment
from hf_specdec.benchmark.summary import (
    auto_arms,
    best_arm,
    best_fixed_arm,
    draft_of,
    drafting,
    drift,
    identical,
    outside_share,
    peak_bytes,
    predictions,
    relative,
    share_within,
    speed,
    speedup,
)
from hf_specdec.cli import app
from tests.zoo import VOCAB, pair

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "benchmarks" / "experiments").rglob("*.toml"))

PROMPTS = (
    Prompt("first", "code", "w3 w4 w5 w6"),
    Prompt("second", "code", "w7 w8 w9"),
    Prompt("third", "prose", "w4 w9 w12 w20 w7"),
    Prompt("fourth", "prose", "w10 w11"),
)
EXPERIMENT = Experiment(
    "draft_model/tiny", "target", "draft", PROMPTS, draft_lengths=(2,), assisted_draft_lengths=(3,), max_new_tokens=8
)
SHORT = dataclasses.replace(
    EXPERIMENT, assisted_draft_lengths=(), modes=("greedy",), max_new_tokens=4, warm_up=0, auto=False
)


def encode(texts):
    rows = [[int(word[1:]) for word in text.split()] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.fixture
def tiny(llama):
    return Models(*llama, encode, {"target": {}, "draft": {}})


def test_a_random_draft_knows_nothing_and_has_its_own_question(tiny):
    draft = copy.deepcopy(tiny.draft)  # others use it too
    before = {name: weight.clone() for name, weight in draft.named_parameters()}
    randomise(draft)
    for name, weight in draft.named_parameters():
        assert torch.equal(weight, before[name]) == (weight.ndim == 1)
        if weight.ndim > 1:
            assert weight.std().item() == pytest.approx(before[name].std().item(), rel=0.2)
    asked = dataclasses.replace(EXPERIMENT, has_random_draft=True)
    cell = EXPERIMENT.cells()[0]
    assert asked.digest(cell, []) != EXPERIMENT.digest(cell, [])


def test_offloaded_layers_are_read_at_every_pass(tiny, tmp_path):
    ids, target = torch.tensor([[3, 4, 5]]), copy.deepcopy(tiny.target)  # others use it too
    offload_layers(target, str(tmp_path))
    assert all(weight.device.type == "meta" for weight in target.model.layers.parameters())
    torch.testing.assert_close(target(ids).logits, tiny.target(ids).logits)
    asked = dataclasses.replace(EXPERIMENT, target_offload="disk")
    assert asked.digest(EXPERIMENT.cells()[0], []) != EXPERIMENT.digest(EXPERIMENT.cells()[0], [])


@pytest.fixture
def ledger(tmp_path):
    return Ledger.of(tmp_path, "cpu", EXPERIMENT.name)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The ledger of a whole run."""
    ledger = Ledger.of(tmp_path_factory.mktemp("results"), "cpu", EXPERIMENT.name)
    run(Models(*pair("Llama"), encode, {"target": {}, "draft": {}}), ledger, EXPERIMENT)
    return ledger


def run(tiny, ledger, experiment=SHORT, **options):
    told = []
    run_experiment(experiment, arms_of(experiment), tiny, ledger, tell=told.append, **options)
    return told


# ------------------------------------------------------------------------------------------------------- the run


def test_every_arm_decodes_every_prompt_and_records_what_it_took(measured):
    assert set(measured.data["cells"]) == {"code/greedy/1", "prose/greedy/1", "code/sampling/1", "prose/sampling/1"}
    for record in measured.records():
        assert record["tokens"] == [8]
        assert record["seconds"] > 0
        assert record["peak_bytes"] > 2**20
        assert ("report" in record) == (record["family"] == "ours")
    ours = [record["report"] for record in measured.records() if record["arm"] == "ours-2"]
    assert len(ours) == 8
    assert all(report["reason"] is None and report["draft_passes"] > 0 for report in ours)
    assert all(report["emitted"] == 8 and sum(report["accepted_histogram"]) == report["steps"] for report in ours)
    for report in ours:
        by_length = report["steps_by_draft_length"]
        assert sum(by_length.values()) == report["target_passes"]
        assert sum(int(length) * count for length, count in by_length.items()) == report["draft_passes"]
    auto = [record["report"] for record in measured.records() if record["arm"] == "ours-auto"]
    assert len(auto) == 8
    assert all({"predicted_speedup", "measured_speedup", "cost_coefficient", "decision"} <= r.keys() for r in auto)


def test_plain_goes_first_and_last_and_the_order_of_the_others_varies(tiny, ledger):
    many = tuple(Prompt(f"p{i}", "code", f"w{3 + i} w9") for i in range(6))
    experiment = dataclasses.replace(SHORT, prompts=many, draft_lengths=(1, 2), max_new_tokens=1)
    run(tiny, ledger, experiment)
    orders: dict[str, list[str]] = {}
    for record in ledger.records():
        orders.setdefault(record["prompt"], []).append(record["arm"])
    assert all((order[0], order[-1]) == ("plain-first", "plain-last") for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) > 1


def test_greedy_texts_are_compared_with_plain(measured):
    greedy = [record for record in measured.records() if record["mode"] == "greedy"]
    assert identical(greedy, "ours-2") == (4, 4)  # float32: equal to plain, token by token
    assert identical(greedy, "plain-last") == (4, 4)


def test_models_are_left_as_found(tiny, ledger):
    tiny.target.generation_config.temperature = 0.3
    configs = [model.generation_config for model in (tiny.target, tiny.draft)]
    texts = [config.to_json_string() for config in configs]
    run(tiny, ledger, dataclasses.replace(SHORT, assisted_draft_lengths=(3,), prompts=PROMPTS[:1]))
    assert [model.generation_config for model in (tiny.target, tiny.draft)] == configs
    assert [config.to_json_string() for config in configs] == texts
    tiny.target.generation_config.temperature = None


def test_checkpoint_settings_do_not_change_what_a_mode_means(tiny, ledger):
    run(tiny, ledger, chooses=lambda cell: cell.key == "code/greedy/1")
    tiny.target.generation_config.repetition_penalty = 5.0
    plain = tiny.target.generate(**encode(["w3 w4 w5 w6"]), max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    again = Ledger(ledger.path.with_name("again.json"))
    run(tiny, again, chooses=lambda cell: cell.key == "code/greedy/1")
    tiny.target.generation_config.repetition_penalty = None
    other = tiny.target.generate(**encode(["w3 w4 w5 w6"]), max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    assert plain != other
    passes = [
        [r["report"]["accepted_histogram"] for r in x.records() if r["family"] == "ours"] for x in (ledger, again)
    ]
    assert passes[0] == passes[1]


def test_a_measured_cell_is_skipped_and_a_changed_question_is_not(tiny, ledger):
    one = dataclasses.replace(SHORT, prompts=PROMPTS[:1], draft_lengths=())
    run(tiny, ledger, one)
    before = ledger.path.read_text()
    assert all("already" in line for line in run(tiny, Ledger(ledger.path), one))
    assert ledger.path.read_text() == before
    longer = dataclasses.replace(one, max_new_tokens=5)
    assert not any("already" in line for line in run(tiny, Ledger(ledger.path), longer))
    assert any("warming up" in line for line in run(tiny, Ledger(ledger.path), longer, is_rerun=True))


def test_an_interrupted_run_keeps_the_cells_that_are_done(tiny, ledger):
    def stop(text):
        if text.startswith("prose/greedy/1: warming up"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(SHORT, arms_of(SHORT), tiny, ledger, tell=stop)
    assert set(Ledger(ledger.path).data["cells"]) == {"code/greedy/1"}


def test_batches_take_whole_groups_and_leave_out_arms_of_one_row(tiny, ledger):
    run(tiny, ledger, dataclasses.replace(SHORT, batches=(2,)))
    records = ledger.records()
    assert {record["prompt"] for record in records} == {"first+second", "third+fourth"}
    assert {record["family"] for record in records} == {"plain", "ours"}
    assert all(record["tokens"] == [4, 4] for record in records)


def test_tokens_after_the_end_of_text_are_not_counted(tiny, ledger):
    plain = tiny.target.generate(**encode(["w3 w4 w5 w6"]), max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    tiny.target.generation_config.eos_token_id = plain[4]
    try:
        experiment = dataclasses.replace(SHORT, max_new_tokens=12)
        run(tiny, ledger, experiment, chooses=lambda cell: cell.key == "code/greedy/1")
    finally:
        tiny.target.generation_config.eos_token_id = None
    counts = {tuple(r["tokens"]) for r in ledger.records() if r["prompt"] == "first"}
    assert counts == {(plain.index(plain[4]) + 1,)}


def test_assisted_arm_sets_the_draft_length_and_restores_the_config(llama):
    target, draft = llama
    found = draft.generation_config
    with Assisted("assisted-3", 3).set_up(target, draft) as decode:
        assert decode.keywords == {"assistant_model": draft}
        assert draft.generation_config.num_assistant_tokens == 3
        assert draft.generation_config.assistant_confidence_threshold == 0
    assert draft.generation_config is found
    with Assisted("assisted-default").set_up(target, draft):
        assert draft.generation_config.num_assistant_tokens == found.num_assistant_tokens
    assert found.num_assistant_tokens is None


def test_arms_stand_in_one_list():
    names = [arm.name for arm in arms_of(dataclasses.replace(EXPERIMENT, draft_lengths=(1, 4)))]
    assert names == ["plain-first", "assisted-default", "assisted-3", "ours-1", "ours-4", "ours-auto", "plain-last"]
    eight = Cell("code", "greedy", 8)
    assert not any(arm.fits(eight) for arm in (Assisted("a"), Lookup("l"), *(E("e", 3) for E in ENGINES.values())))
    assert all(arm.fits(eight) for arm in (Plain("p"), Ours("o")))


def test_arms_of_every_key():
    everything = dataclasses.replace(
        EXPERIMENT, draft_quantization=("nf4",), ngram_lengths=(4,), has_lookup=True, auto_model=True
    )
    configs = {arm.name: arm.config for arm in arms_of(everything) if isinstance(arm, Ours)}
    assert configs == {
        "ours-2": {"num_speculative_tokens": 2},
        "ours-nf4-2": {"draft_quantization": "nf4", "num_speculative_tokens": 2},
        "ngram-4": {"method": "ngram", "num_speculative_tokens": 4},
        "ours-auto": {},
        "ours-auto-nf4": {"draft_quantization": "nf4"},
        "ours-auto-model": {"method": "draft_model"},
    }
    assert "assisted-lookup" in [arm.name for arm in arms_of(everything)]


def test_lookups_and_copies_of_the_draft_decode_what_plain_does(tiny, ledger):
    experiment = dataclasses.replace(
        SHORT,
        draft_quantization=("int8",),
        ngram_lengths=(4,),
        has_lookup=True,
        auto=True,
        auto_model=True,
        max_new_tokens=12,
    )
    run(tiny, ledger, experiment, chooses=lambda cell: cell.kind == "code")
    records = ledger.records()
    names = {"ours-int8-2", "ngram-4", "ours-auto", "ours-auto-int8", "ours-auto-model", "assisted-lookup"}
    assert names <= {record["arm"] for record in records}
    assert all(identical(records, name) == (2, 2) for name in names)
    assert {record["family"] for record in records if record["arm"] == "assisted-lookup"} == {"lookup"}
    lookups = [record["report"] for record in records if record["arm"] == "ngram-4"]
    assert all(report["reason"] is None for report in lookups)


def test_engine_that_is_not_installed_is_left_out_with_a_line(monkeypatch):
    monkeypatch.setattr("hf_specdec.benchmark.engines.is_installed", lambda name: name == "economize")
    told = []
    experiment = dataclasses.replace(
        EXPERIMENT, draft_lengths=(2, 3), assisted_draft_lengths=(3, 5), engines=("flashspec", "economize")
    )
    arms = [arm for arm in arms_of(experiment, told.append) if arm.family in ENGINES]
    assert [arm.name for arm in arms] == ["economize-3"]
    assert told == ["flashspec is not installed and is left out: pip install --no-deps flashspec"]
    assert arms[0].fits(Cell("code", "greedy", 1))
    assert not arms[0].fits(Cell("code", "sampling", 1))


@pytest.mark.parametrize("name", ENGINES)
def test_engine_decodes_what_plain_does(name, tiny, ledger):
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    experiment = dataclasses.replace(
        SHORT, draft_lengths=(3,), assisted_draft_lengths=(3,), engines=(name,), max_new_tokens=12
    )
    run(tiny, ledger, experiment, chooses=lambda cell: cell.kind == "code")
    assert identical(ledger.records(), f"{name}-3") == (2, 2)


def test_no_cell_is_begun_that_would_end_after_the_deadline(tiny, ledger, monkeypatch):
    clock = iter([0.0, 100.0, 100.0, 100.0])  # the first cell takes 100 seconds; at its end and after it 100
    monkeypatch.setattr("hf_specdec.benchmark.running.time.monotonic", lambda: next(clock))
    told = run(tiny, ledger, ends_at=160.0)
    assert list(ledger.data["cells"]) == ["code/greedy/1"]
    assert told[-1] == "prose/greedy/1: not begun, 1.0 minutes are left and the last took 1.7"


def test_cell_that_fits_before_the_deadline_is_begun(tiny, ledger, monkeypatch):
    clock = iter([0.0, 80.0, 80.0, 160.0])
    monkeypatch.setattr("hf_specdec.benchmark.running.time.monotonic", lambda: next(clock))
    run(tiny, ledger, ends_at=160.0)
    assert list(ledger.data["cells"]) == ["code/greedy/1", "prose/greedy/1"]


# --------------------------------------------------------------------------------------------------- the question


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiments_of_the_repository_can_be_read(path):
    experiment = read_experiment(path)
    assert experiment.name == path.relative_to(ROOT / "benchmarks" / "experiments").with_suffix("").as_posix()
    assert len(experiment.prompts) >= 9
    quick = experiment.quick()
    assert {len(quick.groups(cell)) for cell in quick.cells()} == {2}
    assert {cell.batch for cell in quick.cells()} == {1}
    assert quick.max_new_tokens == min(48, experiment.max_new_tokens)
    assert len(arms_of(quick)) <= 13


def test_repository_has_eight_prompts_of_each_kind():
    import tomllib

    prompts = tomllib.loads((ROOT / "benchmarks" / "prompts.toml").read_text(encoding="utf-8"))["prompt"]
    kinds = [prompt["kind"] for prompt in prompts]
    assert {kind: kinds.count(kind) >= 8 for kind in kinds} == {"code": True, "copy": True, "prose": True}
    assert len({prompt["name"] for prompt in prompts}) == len(prompts)


def written(folder, **changes):
    prompts = "\n".join(f'[[prompt]]\nname = "{p.name}"\nkind = "{p.kind}"\ntext = "{p.text}"' for p in PROMPTS)
    (folder / "prompts.toml").write_text(prompts)
    values = {"target": "a", "draft": "b", "prompts": "prompts.toml"} | changes
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    path = folder / "experiments" / "draft_model" / "tiny.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "prompts.toml").write_text(prompts)
    path.write_text("\n".join([*lines, "prompts_per_kind = { code = 2, prose = 2 }"]))
    return path


def test_experiment_is_named_after_its_path(tmp_path):
    experiment = read_experiment(written(tmp_path, draft_lengths=[1, 8]))
    assert experiment.name == "draft_model/tiny"
    assert experiment.draft_lengths == (1, 8)
    assert experiment.prompts == PROMPTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_lenghts": [1]}, "Unknown key 'draft_lenghts' in tiny.toml. Did you mean 'draft_lengths'?"),
        ({"draft": None}, "tiny.toml must say draft."),
        ({"batches": 1}, "batches in tiny.toml must be a list, got 1."),
        ({"modes": ["warm"]}, "Unknown mode 'warm' in draft_model/tiny. Available: greedy, sampling."),
        ({"batches": [3]}, "draft_model/tiny has fewer code prompts than batch=3 has rows."),
        ({"modes": []}, "draft_model/tiny has no modes and no temperatures. Available modes: greedy, sampling."),
        ({"temperatures": [-1]}, "temperatures in draft_model/tiny must be numbers of at least 0, got -1.0."),
        ({"ngram_lengths": [0]}, "ngram_lengths in draft_model/tiny must be numbers of at least 1, got 0."),
        ({"draft_lengths": ["2"]}, "draft_lengths in tiny.toml must be a list of whole numbers, got '2' in it."),
        (
            {"draft_quantization": ["fp3"]},
            "Unknown draft_quantization 'fp3' in draft_model/tiny. Available: int8, nf4.",
        ),
        ({"target_quantization": "int8"}, "Unknown target_quantization 'int8' in draft_model/tiny. Available: nf4."),
        ({"engines": ["other"]}, "Unknown engine 'other' in draft_model/tiny. Available: flashspec, economize."),
        ({"auto": 1}, "auto in tiny.toml must be of type bool, got 1."),
    ],
)
def test_wrong_experiment_says_what_to_do(tmp_path, changes, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_experiment(written(tmp_path, **changes))
    assert message in str(error.value)


def test_too_many_prompts_asked_for(tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text().replace("code = 2", "code = 5"))
    with pytest.raises(ValueError, match="has 2 prompts of kind 'code', prompts_per_kind asks for 5"):
        read_experiment(path)


def test_digest_follows_the_question_of_its_cell():
    cell, arms = Cell("code", "greedy", 1), ["plain-first", "ours-2"]
    digest = EXPERIMENT.digest(cell, arms)
    assert digest == EXPERIMENT.digest(cell, arms)
    other_prose = dataclasses.replace(EXPERIMENT, prompts=(*PROMPTS[:2], Prompt("third", "prose", "w5")))
    assert other_prose.digest(cell, arms) == digest
    changed = [
        EXPERIMENT.digest(cell, ["plain-first"]),
        EXPERIMENT.digest(Cell("code", "sampling", 1), arms),
        dataclasses.replace(EXPERIMENT, seeds=(1,)).digest(cell, arms),
        dataclasses.replace(EXPERIMENT, prompts=(Prompt("first", "code", "w5"), *PROMPTS[1:])).digest(cell, arms),
    ]
    assert len({digest, *changed}) == 5


def test_new_keys_leave_the_digest_of_older_questions_as_it_was():
    question = Experiment("draft_model/tiny", "target", "draft", PROMPTS, max_new_tokens=8)
    cell = Cell("code", "greedy", 1)
    assert question.digest(cell, ["plain-first", "ours-2"]) == "dd6cf680aa7ac322"
    in_four_bits = dataclasses.replace(question, target_quantization="nf4")
    assert in_four_bits.digest(cell, ["plain-first", "ours-2"]) != "dd6cf680aa7ac322"


def test_temperatures_are_modes():
    sweep = dataclasses.replace(EXPERIMENT, modes=(), temperatures=(0.0, 0.3, 1.5), batches=(1, 2))
    assert list(dict.fromkeys(cell.mode for cell in sweep.cells())) == ["T=0", "T=0.3", "T=1.5"]
    assert keywords_of("T=0") == MODES["greedy"]
    assert keywords_of("T=1") == MODES["sampling"]
    assert keywords_of("T=0.3")["temperature"] == 0.3
    assert [is_greedy(mode) for mode in ("greedy", "sampling", "T=0", "T=0.3")] == [True, False, True, False]
    assert {cell.mode for cell in sweep.quick().cells()} == {"T=0", "T=0.3", "T=1.5"}
    both = dataclasses.replace(sweep, modes=("greedy",))
    assert {cell.mode for cell in both.quick().cells()} == {"greedy"}


def test_sampling_mode_draws_from_the_whole_distribution():
    assert MODES["sampling"] == {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


# ----------------------------------------------------------------------------------------------------- the numbers


def record(arm, prompt, seconds, tokens=10, kind="code", **more):
    family = arm.partition("-")[0]
    return {
        "kind": kind,
        "mode": "greedy",
        "batch": 1,
        "prompt": prompt,
        "arm": arm,
        "family": family,
        "seconds": seconds,
        "tokens": [tokens],
        "peak_bytes": 100,
        "differs_at": [None],
    } | more


def report(histogram, rates, reached, **seconds):
    steps = sum(histogram)
    accepted = sum(n * rows for n, rows in enumerate(histogram))
    parts = {f"{name}_seconds": seconds.get(name, 0.0) for name in ("draft", "verify", "prefill", "other")}
    counts = {"steps": steps, "accepted": accepted, "reached": reached, "cut": 0, "target_passes": steps}
    more = {"accepted_histogram": histogram, "acceptance_by_position": rates, "draft_passes": 2 * steps, "reason": None}
    return {**counts, **more, **parts}


def test_speed_is_pooled_not_a_mean_of_ratios():
    assert speed([record("ours-2", "a", 1.0, 10), record("ours-2", "b", 3.0, 10)]) == 5.0


def test_speedup_pools_both_plain_runs_and_covers_the_truth():
    records = []
    for index in range(10):
        seconds = 1.0 + 0.1 * index
        records += [record("plain-first", f"p{index}", seconds), record("plain-last", f"p{index}", seconds)]
        records.append(record("ours-2", f"p{index}", seconds / (1.5 + 0.02 * (index % 3))))
    ratio = speedup(records, "ours-2")
    assert ratio.num_prompts == 10
    assert 1.5 <= ratio.low <= ratio.value <= ratio.high <= 1.54
    assert ratio == speedup(records, "ours-2")
    assert str(ratio) == f"{ratio.value:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"
    assert speedup(records, "plain").value == 1.0


def test_interval_is_wider_when_prompts_differ():
    def records(spread):
        rows = []
        for index in range(8):
            rows += [record("plain-first", f"p{index}", 1.0)]
            rows += [record("ours-2", f"p{index}", 0.5 + spread * (index % 2))]
        return rows

    narrow, wide = (speedup(records(spread), "ours-2") for spread in (0.01, 0.3))
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)


def test_bootstrap_draws_within_kinds():
    # Two kinds without any spread inside: drawing prompts across kinds would give an interval, within them none.
    rows = []
    for kind, seconds in (("code", 0.5), ("prose", 1.0)):
        for index in range(4):
            rows += [record("plain-first", f"p{index}", 1.0, kind=kind)]
            rows += [record("ours-2", f"p{index}", seconds, kind=kind)]
    ratio = speedup(rows, "ours-2")
    assert ratio.num_prompts == 8
    assert ratio.low == pytest.approx(ratio.value) == pytest.approx(ratio.high)


def test_two_prompts_give_no_interval():
    rows = [record(arm, prompt, 1.0) for arm in ("plain-first", "ours-2") for prompt in "ab"]
    assert (speedup(rows, "ours-2").low, str(speedup(rows, "ours-2"))) == (None, "1.00×")


def test_arm_that_shares_no_prompt_with_plain_is_an_error():
    with pytest.raises(ValueError, match="decoded both plainly and by 'ours-2'"):
        speedup([record("ours-2", "a", 1.0), record("plain-first", "b", 1.0)], "ours-2")


def test_acceptance_is_pooled_over_counts():
    # 1st call: walks accepted 0, 1, 2 of 2, once each; 2nd: 0 of 2, three times, so position 2 was never reached.
    first = report([1, 1, 1], [2 / 3, 1 / 2], 5, draft=1.0, verify=3.0, prefill=0.5, other=0.5)
    second = report([3, 0, 0], [0.0, 0.0], 3, draft=1.0, verify=3.0)
    rows = [record("ours-2", "a", 1.0, report=first), record("ours-2", "b", 1.0, report=second)]
    found = drafting(rows, "ours-2")
    assert found.by_position == [2 / 6, 1 / 2]
    assert found.mean_acceptance_length == (3 + 6) / 6
    assert found.acceptance_rate == 3 / 8
    assert found.cost_coefficient == pytest.approx((2 / 12) / (6 / 6))
    assert found.shares == pytest.approx({"draft": 2 / 9, "verify": 6 / 9, "prefill": 0.5 / 9, "other": 0.5 / 9})
    assert drafting(rows, "plain") is None


def test_position_that_was_never_reached_has_no_rate():
    assert drafting([record("ours-2", "a", 1.0, report=report([3], [0.0, 0.0], 3))], "ours-2").by_position == [
        0.0,
        None,
    ]


def test_best_arm_drift_identity_and_memory():
    rows = [record("plain-first", "a", 1.0), record("plain-last", "a", 2.0), record("ours-1", "a", 0.9)]
    rows += [record("ours-2", "a", 0.5, peak_bytes=300, differs_at=[4])]
    assert best_arm(rows, "ours") == "ours-2"
    assert best_arm(rows, "assisted") is None
    assert drift(rows) == 0.5
    assert identical(rows, "ours-2") == (0, 1)
    assert identical(rows, "ours-1") == (1, 1)
    assert peak_bytes(rows, "ours-2") == 300


def test_auto_is_compared_with_fixed_lengths_of_its_own_draft():
    seconds = {"ours-2": 0.9, "ours-nf4-2": 0.5, "ngram-4": 0.8, "ours-auto": 1.0, "ours-auto-nf4": 0.4}
    rows = [record(arm, "a", each) | {"family": "ours"} for arm, each in seconds.items()]
    assert auto_arms(rows) == ["ours-auto", "ours-auto-nf4"]
    assert [draft_of(arm) for arm in seconds] == ["", "nf4", "", "", "nf4"]
    assert (best_fixed_arm(rows), best_fixed_arm(rows, ""), best_fixed_arm(rows, "nf4")) == (
        "ours-nf4-2",
        "ngram-4",
        "ours-nf4-2",
    )
    assert best_fixed_arm([], "") is None
    assert relative(rows, "ours-auto", "ngram-4") == pytest.approx(0.8)


def test_prediction_is_held_against_plain_on_the_same_prompt_without_the_prefill():
    told = {"predicted_speedup": 2.2, "prefill_seconds": 0.5, "draft_seconds": 1.0, "verify_seconds": 2.9}
    told["other_seconds"] = 0.1
    rows = []
    for prompt, seconds in (("a", 4.5), ("b", 2.5)):
        rows += [record(arm, prompt, seconds, 11) for arm in ("plain-first", "plain-last")]
        rows.append(record("ours-auto", prompt, 2.5, 11, report=told))
    found = predictions(rows, "ours-auto")
    assert [(each.prompt, each.measured) for each in found] == [("a", 2.0), ("b", 1.0)]
    assert [each.ratio for each in found] == pytest.approx([1.1, 2.2])
    assert share_within(found, 0.11) == pytest.approx((0.5, 1.2))
    assert outside_share(rows, "ours-auto") == pytest.approx(0.025)
    assert predictions([record("ours-2", "a", 1.0, report={}), record("plain-first", "a", 1.0)], "ours-2") == []
    with pytest.raises(ValueError, match="No prediction was made"):
        share_within([], 0.1)


def test_mean_draft_length_is_over_steps_and_unknown_in_older_ledgers():
    first = report([1], [1.0], 1) | {"steps_by_draft_length": {"0": 3, "4": 1}}
    rows = [record("ours-auto", "a", 1.0, report=first)]
    assert drafting(rows, "ours-auto").mean_draft_length == 1.0
    assert drafting([record("ours-2", "a", 1.0, report=report([1], [1.0], 1))], "ours-2").mean_draft_length is None


# ------------------------------------------------------------------------------------------------- ledger and machine


def test_ledger_has_one_record_per_line_and_reads_back(measured):
    text = measured.path.read_text()
    assert len([line for line in text.splitlines() if '"seconds"' in line]) == len(measured.records()) == 4 * 2 * 6
    results = measured.path.parents[2]
    (read,) = read_results(results)["cpu"].values()
    assert read.data == measured.data == json.loads(text)
    assert list(read_results(results)["cpu"]) == ["draft_model/tiny"]


def test_device_is_named_by_kind_not_by_host(monkeypatch):
    monkeypatch.setattr(
        "hf_specdec.benchmark.environment._cpu_flags", lambda: {"sse2", "avx2", "avx512f", "avx512_bf16"}
    )
    name = device_name(torch.device("cpu"))
    assert name.startswith("cpu-")
    assert name.endswith("core-avx512bf16")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 (80GB)")
    assert device_name(torch.device("cuda", 0)) == "cuda-nvidia-h200-80gb"


def test_environment_names_versions_and_no_host():
    facts = describe(torch.device("cpu"))
    assert {"hf_specdec", "torch", "transformers"} <= facts["packages"].keys()
    assert os.uname().nodename not in json.dumps(facts)
    assert str(Path.home()) not in json.dumps(facts)


def test_peak_memory_sees_what_was_allocated_and_freed():
    memory = PeakMemory(torch.device("cpu"))
    torch.ones(2**28, dtype=torch.uint8)  # freed at once
    assert memory.bytes() > 2**28


def test_a_folder_is_known_by_the_digest_of_its_weights(tmp_path, llama):
    llama[0].save_pretrained(tmp_path)
    revision = model_facts(llama[0], str(tmp_path))["revision"]
    assert revision.startswith("sha256:")
    llama[1].save_pretrained(tmp_path)
    assert model_facts(llama[1], str(tmp_path))["revision"] != revision


def words():
    vocab = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2} | {f"w{index}": index for index in range(3, VOCAB)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="[PAD]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]")


def test_encoder_pads_on_the_left_and_uses_the_chat_template():
    tokenizer = words()
    inputs = encoder(tokenizer, torch.device("cpu"))(["w5", "w6 w7"])
    assert inputs["input_ids"].tolist() == [[0, 5], [6, 7]]
    assert inputs["attention_mask"].tolist() == [[0, 1], [1, 1]]
    tokenizer.chat_template = "{% for message in messages %}w3 {{ message['content'] }} w4{% endfor %}"
    assert encoder(tokenizer, torch.device("cpu"))(["w5"])["input_ids"].tolist() == [[3, 5, 4]]


# ----------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def saved(tmp_path):
    for name, model in zip(("target", "draft"), pair("Llama"), strict=True):
        model.save_pretrained(tmp_path / name)
        words().save_pretrained(tmp_path / name)
    roles = {name: str(tmp_path / name) for name in ("target", "draft")}
    return written(tmp_path, **roles, dtype="float32", draft_lengths=[2], assisted_draft_lengths=[3], max_new_tokens=8)


def test_command_measures_one_cell_and_names_the_file(saved, tmp_path):
    options = ["benchmark", str(saved), "--out", str(tmp_path / "results"), "--only", "code/greedy/*"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    (device,) = read_results(tmp_path / "results")
    ledger = read_results(tmp_path / "results")[device]["draft_model/tiny"]
    assert list(ledger.data["cells"]) == ["code/greedy/1"]
    assert identical(ledger.records(), "ours-2") == (2, 2)
    assert ledger.data["cells"]["code/greedy/1"]["models"]["target"]["revision"].startswith("sha256:")
    assert "ours-2" in done.output
    assert str(ledger.path) in done.output.replace("\n", "")


def test_a_part_of_the_question_does_not_touch_the_ledger(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["benchmark", str(saved), "--arms", "ours-?", "--only", "code/greedy/1"])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "benchmarks").exists()
    (by_name,) = read_results(tmp_path / "build" / "benchmarks").values()
    assert {r["arm"] for r in by_name["draft_model/tiny"].records()} == {"plain-first", "ours-2", "plain-last"}


def test_command_begins_nothing_after_its_deadline(saved, tmp_path):
    options = ["benchmark", str(saved), "--out", str(tmp_path / "results"), "--deadline", "0"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert "code/greedy/1: not begun, 0.0 minutes are left" in " ".join(done.output.split())
    assert not (tmp_path / "results").exists()


def test_target_in_four_bits_is_loaded_that_way(saved, tmp_path):
    pytest.importorskip("bitsandbytes")
    saved.write_text('target_quantization = "nf4"\n' + saved.read_text())
    options = ["benchmark", str(saved), "--out", str(tmp_path / "results"), "--only", "code/greedy/*"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    (by_name,) = read_results(tmp_path / "results").values()
    (cell,) = by_name["draft_model/tiny"].data["cells"].values()
    assert cell["models"]["target"]["weight_bytes"] < cell["models"]["draft"]["weight_bytes"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.toml"], "nowhere.toml"),
        (["{saved}", "--only", "poems/*"], "No cell matches poems/*. Available: code/"),
    ],
)
def test_command_says_what_is_wrong(saved, options, message):
    done = CliRunner().invoke(app, ["benchmark", *(option.format(saved=saved) for option in options)])
    assert done.exit_code == 1
    assert message in done.output.replace("\n", " ")


def test_report_without_results_says_so(tmp_path):
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path)])
    assert done.exit_code == 1
    assert "holds no results yet" in " ".join(done.output.split())
