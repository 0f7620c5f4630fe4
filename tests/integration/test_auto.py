"""What `num_speculative_tokens="auto"` and `method="auto"`, the defaults, do in real calls."""

import copy
import dataclasses
import gc
import json
import random
import weakref

import pytest
import torch

import hf_specdec
from hf_specdec.acceptance import AcceptanceRecord
from hf_specdec.auto_length import MeasuredLength
from hf_specdec.drafters import Draft, Drafter
from hf_specdec.drafters.composite import CompositeDrafter
from hf_specdec.host import knowledge
from hf_specdec.host.reasons import NOT_WORTH_IT
from hf_specdec.host.runner import cache_keyword
from hf_specdec.registry import DRAFTERS
from tests.integration.pairs import VOCAB, llama, noisy_copy, pair, prompts

pytestmark = pytest.mark.usefixtures("measured")
NEW = 40


def repetitive(batch: int) -> dict:
    """Prompts in which n-grams come back."""
    torch.manual_seed(3)
    ids = torch.randint(2, VOCAB, (batch, 6)).repeat(1, 3)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def sampled(target, seed=7, batch=3, **options):
    torch.manual_seed(seed)
    output = target.generate(**repetitive(batch), max_new_tokens=NEW, do_sample=True, **options)
    return output.tolist(), hf_specdec.report(target)


def deep_pair():
    """A target of eight layers and its first layer as a draft: c is about 1/8, whatever the machine."""
    target = llama(num_hidden_layers=8)
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.2
            layer.mlp.down_proj.weight *= 0.2
    draft = copy.deepcopy(target)
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    return target, draft


@pytest.mark.parametrize("batch", [1, 3])
def test_default_is_auto_and_greedy_text_is_plains(batch):
    target, draft = deep_pair()
    plain, accepted = target.generate(**repetitive(batch), max_new_tokens=NEW), 0
    with hf_specdec.enable(target, draft):
        for _ in range(3):
            assert target.generate(**repetitive(batch), max_new_tokens=NEW).tolist() == plain.tolist()
            report = hf_specdec.report(target)
            accepted += report.accepted
    assert (report.method, report.reason) == ("auto", None)
    assert accepted > 0
    assert report.predicted_speedup is not None
    assert report.measured_speedup is not None
    assert f"measured {report.measured_speedup:.2f}x" in report.decision


@pytest.fixture
def noisy_machine(monkeypatch):
    """Times of a machine on which drafting pays, with much noise: K varies from step to step."""
    rng, learn = random.Random(0), MeasuredLength.learn

    def on_this_machine(self, state, plan, outcome):
        draft, verify = 0.1 * plan.length * rng.lognormvariate(0, 0.5), rng.lognormvariate(0, 0.5)
        learn(self, state, plan, dataclasses.replace(outcome, draft_seconds=draft, verify_seconds=verify))

    monkeypatch.setattr(MeasuredLength, "learn", on_this_machine)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", ["auto", "draft_model", "ngram"])
def test_schedule_of_the_report_replays_the_call_bit_for_bit(method, batch, noisy_machine):
    target, draft = deep_pair()
    chosen = set()
    with hf_specdec.enable(target, draft if method != "ngram" else None, method=method):
        for seed in range(3):  # also with what earlier calls taught
            first, report = sampled(target, seed, batch)
            assert report.reason is None
            schedule = json.loads(json.dumps(report.draft_lengths))
            replayed, again = sampled(target, seed, batch, speculative_config={"draft_lengths": schedule})
            assert replayed == first
            assert again.draft_lengths == report.draft_lengths
            assert again.accepted_histogram == report.accepted_histogram
            chosen |= set(report.draft_lengths)
    assert len(chosen) > 2


def test_both_drafters_serve_rows_of_one_call():
    """So that the replay above has something to show."""
    target, draft = deep_pair()
    served = set()
    original = CompositeDrafter.prepare

    def watched(self, sequence, plan):
        served.update(part for part, length in zip(plan.parts, plan.lengths, strict=True) if length)
        original(self, sequence, plan)

    CompositeDrafter.prepare = watched
    try:
        with hf_specdec.enable(target, draft):
            for seed in range(4):
                sampled(target, seed, speculative_config={"draft_lengths": [4] * NEW})
    finally:
        CompositeDrafter.prepare = original
    assert served == {0, 1}


def test_deterministic_takes_lengths_from_shapes_and_repeats_itself(monkeypatch):
    target, draft = deep_pair()
    with hf_specdec.enable(target, draft, deterministic=True):
        first, report = sampled(target)
        assert set(report.draft_lengths) - {0}
        monkeypatch.setattr(MeasuredLength, "choose", lambda self, state, sources: pytest.fail("asked the clock"))
        assert sampled(target)[0] == first
        assert hf_specdec.report(target).draft_lengths == report.draft_lengths


def test_true_with_nothing_below_looks_up():
    target, _ = pair()
    plain = target.generate(**repetitive(2), max_new_tokens=NEW)
    with hf_specdec.register():
        output = target.generate(**repetitive(2), max_new_tokens=NEW, speculative_config=True)
        report = hf_specdec.report(target)
    assert output.tolist() == plain.tolist()
    assert (report.method, report.reason) == ("ngram", None)


def test_an_integer_is_an_order_to_the_model_where_there_is_one():
    target, draft = pair()
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        _, report = sampled(target)
    assert report.method == "draft_model"
    assert set(report.draft_lengths[:-3]) == {3}
    with hf_specdec.enable(target, num_speculative_tokens=3):
        _, report = sampled(target)
    assert report.method == "ngram"
    assert max(report.draft_lengths) == 3


def test_a_copy_of_an_enabled_model_has_no_draft_and_does_not_look_up():
    target, draft = pair()
    with hf_specdec.enable(target, draft):
        twin = copy.deepcopy(target)
        twin.generate(**prompts(1), max_new_tokens=8)
        assert hf_specdec.report(twin).reason == "no draft"


def teach(target, draft, *, cost, acceptance, batch=1, length=18, method="draft_model"):
    """Make the plugin believe that it measured a draft."""
    known = knowledge.knowledge_of(target, draft, method, batch, length)
    for _ in range(8):
        known.costs.verify.add(batch, 1.0)
        known.costs.verify.add(2 * batch, 1.0)
        known.costs.draft.add(1, cost)
        known.costs.read.add(length * batch, cost)
    for _ in range(40):
        record = known.records.setdefault("draft", AcceptanceRecord(acceptance))
        record.update([[acceptance]] * batch)
    return known


def test_a_call_in_which_nothing_pays_is_handed_to_plain_decoding(monkeypatch):
    target, draft = pair()
    plain = target.generate(**repetitive(1), max_new_tokens=NEW)
    with hf_specdec.enable(target, draft, method="draft_model"):
        teach(target, draft, cost=3.0, acceptance=0.1)
        monkeypatch.setattr("hf_specdec.host.generate.run_call", lambda *args: pytest.fail("the loop ran"))
        assert target.generate(**repetitive(1), max_new_tokens=NEW).tolist() == plain.tolist()
        report = hf_specdec.report(target)
    assert report.reason == NOT_WORTH_IT
    assert report.decision.startswith("a draft token costs 3.00 of a target pass and ")


def test_what_was_measured_survives_remove_and_goes_with_the_models():
    target, draft = deep_pair()
    with hf_specdec.enable(target, draft):
        sampled(target, batch=1)
    before = knowledge.knowledge_of(target, draft, "auto", 1, 18)
    assert not before.costs.verify.is_empty
    with hf_specdec.enable(target, draft):
        sampled(target, batch=1)
    assert knowledge.knowledge_of(target, draft, "auto", 1, 18) is before
    gone = weakref.ref(target), weakref.ref(draft), weakref.ref(before)
    del target, draft, before
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]


def test_batches_lengths_and_drafts_are_kept_apart():
    target, draft = pair()
    other = noisy_copy(target, seed=9)
    keys = [(draft, 1, 20), (draft, 2, 20), (draft, 1, 400), (other, 1, 20)]
    known = [knowledge.knowledge_of(target, model, "auto", batch, length) for model, batch, length in keys]
    assert len({id(one) for one in known}) == 4
    assert knowledge.knowledge_of(target, draft, "auto", 1, 31) is known[0]


def test_a_new_length_starts_from_the_nearest_known():
    target, draft = pair()
    known = knowledge.knowledge_of(target, draft, "auto", 1, 20)
    known.costs.verify.add(1, 0.5)
    longer = knowledge.knowledge_of(target, draft, "auto", 1, 300)
    assert longer.costs.verify.seconds(1) == 0.5
    longer.costs.verify.add(4, 1.0)
    assert known.costs.verify.num_observations(4) == 0


def test_bytes_of_a_pass_leave_embeddings_out_and_count_tied_heads():
    free, tied = llama(), llama(tie_word_embeddings=True)
    table = free.get_input_embeddings().weight
    whole = sum(parameter.numel() * 4 for parameter in free.parameters())
    assert knowledge.pass_bytes(free) == whole - table.numel() * 4
    assert knowledge.pass_bytes(tied) == sum(parameter.numel() * 4 for parameter in tied.parameters())
    assert knowledge.cost_coefficient(free, free) == 1.0


def test_offloaded_weights_make_a_pass_dear():
    target, draft = pair()
    near = knowledge.cost_coefficient(target, draft)
    target.model.layers.to("meta")
    assert knowledge.cost_coefficient(target, draft) < near / 4


class Repeats(Drafter):
    """A third party's: the last token again and again."""

    def propose(self, sequence, draft_length, uniforms):
        return Draft(sequence.tail(1).repeat(1, draft_length), None, torch.full_like(sequence.lengths, draft_length))


def test_calls_of_third_parties_drafters_are_measured_too(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "third", Repeats)
    target = llama()
    with hf_specdec.enable(target, method="third"):
        _, report = sampled(target, batch=2)
    assert report.reason is None
    assert report.cost_coefficient is not None


class Unwilling(Repeats):
    """A third party's, with a bug before anything is drafted."""

    def offers(self, sequence, limit):
        raise KeyError("no offer")


def test_drafter_that_raises_before_a_step_leaves_a_call_that_goes_on_plainly(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "unwilling", Unwilling)
    target = llama()
    plain = target.generate(**repetitive(2), max_new_tokens=NEW)
    with hf_specdec.enable(target, method="unwilling"):
        assert target.generate(**repetitive(2), max_new_tokens=NEW).tolist() == plain.tolist()
        report = hf_specdec.report(target)
    assert report.drafted == 0
    assert "KeyError: 'no offer'" in report.notes[0]


@pytest.mark.parametrize("method", ["auto", "draft_model"])
def test_a_turn_without_drafts_leaves_its_text_beside_the_cache(method):
    """The next turn hands in new tokens only; what the cache holds before them is known all the same."""
    target, draft = pair()
    torch.manual_seed(0)
    first, more = torch.randint(2, VOCAB, (1, 8)), torch.randint(2, VOCAB, (1, 3))
    with hf_specdec.enable(target, draft, method=method):
        for lengths in ([0] * 30, [2] * 30):
            flag = {"draft_lengths": lengths}
            one = target.generate(first, max_new_tokens=10, return_dict_in_generate=True, speculative_config=flag)
            keyword = cache_keyword(target)
            cache, ids = one[keyword], torch.cat([one.sequences, more], dim=1)
            for _ in range(2):
                two = target.generate(
                    ids[:, cache.get_seq_length() :],
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=8,
                    speculative_config=flag,
                    **{keyword: cache},
                )
                assert not any("does not know" in note for note in hf_specdec.report(target).notes)
                ids = torch.cat([ids, two[:, -8:], more], dim=1)
