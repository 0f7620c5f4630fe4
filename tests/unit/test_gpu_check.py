"""Does the GPU check widen exactly, notice what is wrong, and run from end to end without a GPU?"""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import gpu_check
from benchmarks.gpu import attention, clock, correctness, nets, nf4, passes, predictions, races, report, widening
from benchmarks.gpu.models import FULL, TINY, Models
from benchmarks.gpu.nets import Shape, base_net, bisect, cut_vocabulary, noise_for, overlap, texts, with_noise
from benchmarks.gpu.run import Run, Stage, run_stages
from benchmarks.gpu.stages import STAGES, chosen
from benchmarks.gpu.widening import Widening, head_order, widen
from hf_specdec.audit.observer import CONTROLS
from hf_specdec.benchmark.arms import Ours
from hf_specdec.registry import VERIFIERS
from hf_specdec.verification import BlockVerifier

CPU = torch.device("cpu")
SHAPE = Shape(24, 4, 2, 8, 40, 2, vocab=50, num_tokens=50)
TIED = Shape(24, 4, 2, 8, 40, 2, vocab=50, num_tokens=50, is_tied=True)
TOLERANCE = 1e-12  # float64 sums of at most a few thousand terms of order 1
ORDER_ONE = 1e-2
WIDENINGS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 8), (16, 4), (6, 3)]

pytestmark = [
    # bitsandbytes and accelerate speak of what they may do later
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class ExactNorm(nn.Module):
    """RMSNorm in the input's own precision; transformers' works in float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)


def exact(net):
    """`net` with norms in its own precision."""
    net.model.norm = ExactNorm(net.model.norm)
    for layer in net.model.layers:
        for name in nets.NORMS:
            setattr(layer, name, ExactNorm(getattr(layer, name)))
    return net


def logits(net, ids):
    with torch.no_grad():
        return net(input_ids=ids, use_cache=False).logits


def error_of(widened, shape=SHAPE):
    """Relative error of float64 scores, `widened` given what it is made of."""
    base = base_net(shape, 0, CPU)
    ids = texts(2, 20, shape.num_tokens, 1, CPU)
    expected = logits(exact(widen(base, Widening(), torch.float64)), ids)
    found = logits(exact(widen(base, widened, torch.float64)), ids)
    return float((found - expected).abs().max() / expected.abs().max())


# ---------------------------------------------------------------------------------------------------------- widening


@pytest.mark.parametrize("identity_layers", [0, 3])
@pytest.mark.parametrize(("copies", "kv_copies"), WIDENINGS)
def test_widening_leaves_the_function_alone(copies, kv_copies, identity_layers):
    assert error_of(Widening(copies, kv_copies, identity_layers)) <= TOLERANCE


def test_tied_embedding_and_head_stay_one_matrix():
    assert error_of(Widening(4, 2, 1), TIED) <= TOLERANCE
    net = widen(base_net(TIED, 0, CPU), Widening(4, 2))
    assert net.lm_head.weight is net.model.embed_tokens.weight


@pytest.mark.parametrize(("copies", "kv_copies"), [(2, 1), (4, 2), (8, 4)])
def test_plainly_tiled_heads_are_caught(copies, kv_copies, monkeypatch):
    monkeypatch.setattr(widening, "head_order", lambda heads, kv_heads, copies, kv_copies: [*range(heads)] * copies)
    assert error_of(Widening(copies, kv_copies)) > ORDER_ONE


def test_heads_that_share_keys_stand_side_by_side():
    assert head_order(4, 2, 4, 2) == [0, 1, 0, 1, 2, 3, 2, 3] * 2
    assert head_order(4, 2, 2, 2) == [0, 1, 2, 3] * 2
    assert head_order(7, 1, 2, 2) == [*range(7)] * 2


def test_division_left_out_is_caught(monkeypatch):
    tiled = widening._tiled_linears

    def without_division(layer, config, widened, dtype):
        weights = tiled(layer, config, widened, dtype)
        return weights | {"self_attn.o_proj": weights["self_attn.o_proj"] * widened.copies}

    monkeypatch.setattr(widening, "_tiled_linears", without_division)
    assert error_of(Widening(2, 2)) > ORDER_ONE


def test_identity_layers_hold_weights_of_their_own_and_add_exactly_nothing():
    net = widen(base_net(SHAPE, 0, CPU), Widening(2, 2, 2), torch.bfloat16)
    layers = net.model.layers
    assert len(layers) == net.config.num_hidden_layers == 4
    for layer in layers[2:]:
        assert all(float(layer.get_submodule(name).weight.abs().min()) > 0 for name in nets.LINEARS)
    pointers = {weight.data_ptr() for weight in net.parameters()}
    assert len(pointers) == len(list(net.parameters()))
    ids = texts(1, 9, 50, 1, CPU)
    shorter = widen(base_net(SHAPE, 0, CPU), Widening(2, 2), torch.bfloat16)
    assert torch.equal(logits(net, ids), logits(shorter, ids))


def test_shared_identity_layers_use_the_real_ones_weights():
    net = widen(base_net(SHAPE, 0, CPU), Widening(2, 2, 3, is_shared=True))
    layers = net.model.layers
    for index in (2, 3, 4):
        assert layers[index].mlp.up_proj.weight.data_ptr() == layers[index % 2].mlp.up_proj.weight.data_ptr()
        assert float(layers[index].input_layernorm.weight.abs().max()) == 0
    assert passes.weight_bytes(net) == sum(w.nbytes for layer in layers for w in layer.parameters()) + 50 * 48 * 4


def test_kv_copies_have_to_divide_copies():
    with pytest.raises(ValueError, match="kv_copies must divide copies, got 3 and 4"):
        Widening(4, 3)


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "kv_heads", "mlp", "layers"),
    [
        ("7b", 3584, 56, 8, 18944, 28),
        ("0.5b", 896, 14, 2, 4736, 24),
        ("small", 448, 7, 1, 2368, 4),
        ("70b", 7168, 112, 16, 37888, 74),
    ],
)
def test_full_sizes_are_those_that_were_predicted_for(name, hidden, heads, kv_heads, mlp, layers):
    config = FULL.widenings[name].config(FULL.base.config())
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (hidden, mlp, 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert config.num_hidden_layers == layers
    assert next(cost.layers for key, cost in predictions.COSTS.items() if key.split()[0] == name) == layers


def test_missing_tensor_is_named():
    with pytest.raises(ValueError, match=r"got none for model\.embed_tokens\.weight"):
        nets.assemble(SHAPE.config(), {})


@pytest.mark.parametrize("copies", [2, 8])
def test_nf4_commutes_with_tiling_and_keeps_its_own_grid(copies):
    pytest.importorskip("bitsandbytes")
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    once = nf4.on_grid(weight)
    assert torch.equal(nf4.on_grid(once), once)
    assert torch.equal(nf4.on_grid(weight.repeat(copies, copies) / copies), once.repeat(copies, copies) / copies)


# -------------------------------------------------------------------------------------------------------------- nets


def test_net_depends_on_its_seed_only():
    first, again, other = (base_net(SHAPE, seed, CPU) for seed in (0, 0, 1))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_noise_found_by_bisection_gives_the_acceptance_asked_for():
    net, ids = base_net(TINY.base, 0, CPU), texts(2, 32, 304, 1, CPU)
    noise = noise_for(net, 2)
    assert len(noise) == 7 * TINY.base.layers
    assert overlap(net, net, ids) == pytest.approx((1.0, 1.0), abs=1e-5)
    epsilon = bisect(lambda level: overlap(net, with_noise(net, noise, level), ids)[0], 0.0, 0.6, 0.7)
    assert overlap(net, with_noise(net, noise, epsilon), ids)[0] == pytest.approx(0.7, abs=0.01)


def test_cut_vocabulary_shares_its_weights():
    net = base_net(TINY.base, 0, CPU)
    cut = cut_vocabulary(net, 304)
    assert cut.config.vocab_size == 304
    ids = texts(1, 9, 304, 1, CPU)
    assert torch.equal(logits(cut, ids), logits(net, ids)[..., :304])
    assert cut.model.embed_tokens.weight.data_ptr() == net.model.embed_tokens.weight.data_ptr()
    assert float(logits(net, ids)[..., 304:].abs().max()) == 0  # padding rows


def test_packed_queries_are_the_same_attention():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 3, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 9, 8, generator=generator)
    mask = (torch.arange(9) <= torch.arange(6, 9)[:, None])[None, None]
    found = attention.packed(query, key, value, mask.repeat(1, 1, 3, 1))
    torch.testing.assert_close(found, attention.repeated(query, key, value, mask))


def test_pass_without_cache_is_the_models_own():
    net, ids = base_net(SHAPE, 0, CPU), texts(1, 5, 50, 1, CPU)
    with torch.no_grad():
        torch.testing.assert_close(passes.bare_pass(net, ids)(), logits(net, ids))


def test_cached_pass_finds_the_same_cache_every_time():
    net = base_net(SHAPE, 0, CPU)
    case, found = passes.CachedPass(net, 6, 3).case(), []
    with torch.no_grad():
        for _ in range(3):
            case.prepare()
            found.append(case.work().logits)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# ------------------------------------------------------------------------------------------------------- predictions


def test_predictions_are_those_of_the_design_page():
    assert predictions.plain("7b bf16").value == pytest.approx(143, abs=1)
    assert predictions.ours("7b bf16", "0.5b", 0.8, 4).value == pytest.approx(105, abs=1)
    assert predictions.ours("7b bf16", "small", 0.8, 4).value == pytest.approx(280, abs=2)
    assert predictions.ours("7b nf4", "0.5b", 0.8, 4).value == pytest.approx(93, abs=1)
    assert predictions.ours("70b nf4", "0.5b", 0.8, 4).value == pytest.approx(62, abs=1)
    assert predictions.assisted("7b bf16", "0.5b", 0.8, 5).value == pytest.approx(76, abs=1)
    # The best K is 0 where no draft pays.
    assert predictions.ours("7b bf16", "0.5b", 0.6, None).value == predictions.ours("7b bf16", "0.5b", 0.6, 0).value


def test_slow_host_slows_eager_passes_only():
    assert predictions.eager_ms("7b bf16", 1, 2.2).value == pytest.approx(15.4)
    assert predictions.eager_ms("7b bf16", 1, 0.1).value == predictions.graph_ms("7b bf16").value
    assert predictions.graph_ms("7b nf4", 7).value == 5.5


# ------------------------------------------------------------------------------------------------------------ runner


def run_of(**more):
    return Run(CPU, True, TINY, SimpleNamespace(free=lambda: None), float("inf"), **more)


def fails(run):
    run.check("a question", False, "no")


def breaks(run):
    raise RuntimeError("out of order\nand more")


def passes_one(run):
    run.check("a question", True)
    run.value("a number", 2.0, "ms", predictions.spread(2.0), [1.0, 2.0, 3.0])


def test_failure_of_a_stage_costs_no_other_and_every_stage_is_written(tmp_path):
    path, seen = tmp_path / "folder" / "out.json", []
    stages = [Stage(0, "breaks", breaks, 1, 1), Stage(1, "passes", passes_one, 1, 1)]

    def tell(text):
        seen.append(len(json.loads(path.read_text())["stages"]) if path.exists() else 0)

    records = run_stages(run_of(), stages, {"check": "x"}, path, tell)
    assert [record.status for record in records] == ["error", "done"]
    assert records[0].reason == "RuntimeError: out of order"
    assert seen == [0, 0, 1, 1]
    data = json.loads(path.read_text())
    assert data["check"] == "x"
    assert data["stages"][1]["values"][0]["raw"] == [1.0, 2.0, 3.0]
    assert "/" not in json.dumps(data["stages"])


@pytest.mark.parametrize(
    ("work", "is_correctness", "is_passed"),
    [(passes_one, True, True), (fails, False, False), (breaks, True, False), (breaks, False, True)],
)
def test_correctness_alone_decides(work, is_correctness, is_passed):
    [record] = run_stages(run_of(), [Stage(0, "", work, 1, 1, is_correctness)], {}, None, lambda text: None)
    assert record.is_passed == is_passed


def test_stage_is_skipped_when_time_is_short_or_the_device_is_not_there():
    stages = [Stage(0, "", passes_one, 1, 1), Stage(1, "", passes_one, 1, 1, needs_cuda=True)]
    run = run_of()
    run.deadline = 0.0
    records = run_stages(run, stages, {}, None, lambda text: None)
    assert [record.status for record in records] == ["skipped", "skipped"]
    assert records[0].reason == "0 s left, at least 0 s needed"
    assert records[1].reason == "needs a CUDA device"
    assert all(record.is_passed for record in records)


def test_predictions_are_dropped_where_they_do_not_apply():
    for has_predictions in (True, False):
        run = run_of(has_predictions=has_predictions)
        passes_one(run)
        assert (run.record.values[0].predicted is not None) == has_predictions


@pytest.mark.parametrize(
    ("text", "numbers"), [("all", [stage.number for stage in STAGES]), ("4", [4]), ("5-7,0", [0, 5, 6, 7])]
)
def test_stages_are_chosen_by_number(text, numbers):
    assert [stage.number for stage in chosen(text)] == numbers


@pytest.mark.parametrize("text", ["", "x", "99", "3-1", "2-x"])
def test_unknown_stages_are_refused(text):
    with pytest.raises(ValueError, match='must be "all" or numbers of 0 to 10'):
        chosen(text)


def test_cpu_needs_tiny(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu"])
    assert "--device cpu needs --tiny" in capsys.readouterr().err


def test_clock_takes_every_case_in_every_round():
    seen = {"a": 0, "b": 0}

    def count(name):
        seen[name] += 1

    timings = clock.measure({name: clock.Case(lambda name=name: count(name)) for name in seen}, CPU)
    assert seen == {"a": 6, "b": 6}  # one untimed
    assert all(len(timing.seconds) == 5 and timing.median > 0 for timing in timings.values())


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (8.23e-7, "8.23e-07"), (0.0435, "0.0435"), (143.2, "143")])
def test_numbers_have_three_digits(value, text):
    assert report.significant(value) == text


# ------------------------------------------------------------------------------------------------ faults it must see


def test_text_that_parts_from_plain_fails_with_its_place():
    run = run_of()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    fine = SimpleNamespace(reason=None, acceptance_rate=0.5)
    correctness._check_same(run, "same", ids, ids.clone(), fine)
    other = ids.clone()
    other[1, 2] = 7
    correctness._check_same(run, "other", ids, other, fine)
    correctness._check_same(run, "plainly", ids, ids, SimpleNamespace(reason="no draft"))
    assert [check.is_passed for check in run.record.checks] == [True, False, False]
    assert "first difference in row 1, column 2" in run.record.checks[1].detail
    assert run.record.checks[2].detail == "decoded plainly: no draft"


def test_wrong_rule_fails_the_sampled_law(monkeypatch):
    class AlwaysAccept(BlockVerifier.__bases__[0]):
        def __call__(self, *given):
            return CONTROLS["always accept"](BlockVerifier())(*given)

    monkeypatch.setitem(VERIFIERS, "block", AlwaysAccept)
    run = run_of()
    correctness.sampled_law(run)
    verdicts = {check.name: check.is_passed for check in run.record.checks}
    assert verdicts["sampled law, rule standard"]
    assert not verdicts["sampled law, rule block"]


def test_fallback_fails_a_race_with_a_fixed_draft_length():
    for length, num_checks in ((4, 1), ("auto", 0)):
        run = run_of()
        arm = Ours("ours", {"num_speculative_tokens": length})
        racer = races.Racer("ours", arm, None, None, "greedy", tokens_per_second=[1.0])
        racer.report = SimpleNamespace(reason="no draft", draft_lengths=[], decision="", notes=[])
        for name in ("acceptance_rate", "mean_acceptance_length", "draft_seconds", "verify_seconds", "other_seconds"):
            setattr(racer.report, name, 0.0)
        races.keep(run, [racer])
        assert [check.is_passed for check in run.record.checks] == [False] * num_checks


# ------------------------------------------------------------------------------------------------------- all of it


@pytest.mark.slow
def test_every_stage_runs_tiny_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "gpu_check.json"
    assert gpu_check.main(["--device", "cpu", "--tiny", "--json", str(path)]) == 0
    stages = json.loads(path.read_text())["stages"]
    assert [stage["number"] for stage in stages] == [stage.number for stage in STAGES]
    assert {stage["status"] for stage in stages} == {"done"}, [stage["reason"] for stage in stages]
    by_number = {stage["number"]: stage for stage in stages}
    for number in (2, 3, 4, 6, 9, 10):
        assert by_number[number]["checks"]
    assert {value["unit"] for value in by_number[6]["values"]} == {"tokens/s", "× plain"}
    facts = by_number[6]["facts"]["racers"]
    assert any(0 < each.get("acceptance_rate", 0) < 1 for each in facts.values())
    assert set(facts["7b bf16, greedy, K = 0"]["draft_lengths"]) == {0}
    shown = capsys.readouterr().out
    assert "correctness checks passed" in shown
    assert "FAILED" not in shown
    assert Models(TINY, CPU).why_no_nf4 is not None or by_number[7]["values"]
