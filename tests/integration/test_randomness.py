"""Does one seed give one text, can draft lengths be replayed, and do rows and threads leave each other alone?"""

import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MistralConfig, MistralForCausalLM

import hf_specdec
from hf_specdec.coins import Coins
from hf_specdec.drafters import DraftFailure
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.registry import DRAFTERS
from tests.integration.pairs import VOCAB, llama, noisy_copy, pair, prompts, speculates

NEW = 24


def drawn(target, seed=5, batch=2, **options):
    """(new ids, report) of one sampled call."""
    torch.manual_seed(seed)
    inputs = prompts(batch)
    output = target.generate(**inputs, max_new_tokens=NEW, do_sample=True, **options)
    return output[:, inputs["input_ids"].shape[1] :].tolist(), hf_specdec.report(target)


@pytest.fixture
def enabled():
    target, draft = pair()
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        yield target


# --- one seed, one text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["block", "standard"])
@pytest.mark.parametrize("num_draft", [1, 3, 8])
def test_same_seed_and_call_give_the_same_tokens(enabled, num_draft, rule):
    flag = {"num_speculative_tokens": num_draft, "rejection_sample_method": rule}
    first, report = drawn(enabled, speculative_config=flag)
    speculates(enabled)
    assert report.accepted > 0
    assert drawn(enabled, speculative_config=flag)[0] == first
    assert drawn(enabled, seed=6, speculative_config=flag)[0] != first


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_deterministic_is_accepted_with_any_length(enabled, is_deterministic):
    for length in (3, "auto"):
        flag = {"num_speculative_tokens": length, "deterministic": is_deterministic}
        if is_deterministic or length != "auto":
            assert drawn(enabled, speculative_config=flag)[0] == drawn(enabled, speculative_config=flag)[0]


def test_plain_and_speculative_draws_differ_for_one_seed(enabled):
    assert drawn(enabled)[0] != drawn(enabled, speculative_config=False)[0]


# --- schedules ------------------------------------------------------------------------------------------------------


def test_schedule_is_followed_and_then_num_speculative_tokens_holds(enabled):
    flag = {"draft_lengths": [2, 0, 5, 0, 0, 1], "num_speculative_tokens": 3}
    _, report = drawn(enabled, speculative_config=flag)
    speculates(enabled)
    assert report.draft_lengths[:6] == [2, 0, 5, 0, 0, 1]
    assert set(report.draft_lengths[6:]) <= {3, 2, 1, 0}  # shorter only at the end
    assert report.draft_lengths[6] == 3


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("schedule", [[4] * 9, [0, 3, 0, 0, 0, 6, 1], [0] * 40, [40, 2], []])
def test_recorded_lengths_replay_a_call_bit_for_bit(enabled, schedule, batch):
    tokens, report = drawn(enabled, batch=batch, speculative_config={"draft_lengths": schedule})
    # Under any other K: the schedule covers every step.
    flag = {"draft_lengths": report.draft_lengths, "num_speculative_tokens": 7}
    again, replayed = drawn(enabled, batch=batch, speculative_config=flag)
    assert again == tokens
    counts = ("draft_lengths", "accepted_histogram", "acceptance_by_position", "emitted")
    assert [getattr(replayed, name) for name in counts] == [getattr(report, name) for name in counts]


def test_replay_outlives_a_draft_that_failed(enabled):
    class Failing(ModelDrafter):
        def propose(self, sequence, draft_length, uniforms):
            if max(sequence.host_lengths) > 14:
                raise DraftFailure("broken")
            return super().propose(sequence, draft_length, uniforms)

    hf_specdec.register_drafter("draft_model", Failing)
    try:
        tokens, report = drawn(enabled)
    finally:
        hf_specdec.register_drafter("draft_model", ModelDrafter)
    assert DRAFTERS["draft_model"] is ModelDrafter
    assert 0 in report.draft_lengths
    assert report.draft_lengths[0] == 3
    assert drawn(enabled, speculative_config={"draft_lengths": report.draft_lengths})[0] == tokens


@pytest.mark.parametrize("schedule", [[0, 0, 0, 4], [3, 0, 0, 0, 0, 5, 0, 2], [1, 0] * 9])
@pytest.mark.parametrize("draft_kind", ["full attention", "sliding"])
def test_drafter_catches_up_after_steps_without_a_draft(schedule, draft_kind):
    target, draft = pair()
    if draft_kind == "sliding":
        torch.manual_seed(1)
        target = MistralForCausalLM(
            MistralConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                sliding_window=5,
                initializer_range=0.2,
                bos_token_id=1,
                eos_token_id=None,
                pad_token_id=0,
            )
        ).eval()
        draft = noisy_copy(target, 0.05)
    inputs = prompts(3)
    plain = target.generate(**inputs, max_new_tokens=40)
    # With itself as the draft every token is accepted, unless the draft has lost track of the text.
    for drafted_by, least in ((draft, 0.0), (target, 1.0)):
        with hf_specdec.enable(target, drafted_by, method="draft_model", draft_lengths=schedule):
            assert target.generate(**inputs, max_new_tokens=40).tolist() == plain.tolist()
            report = speculates(target)
        assert report.draft_lengths[: len(schedule)] == schedule
        assert report.acceptance_rate >= least


def test_ids_that_the_draft_cannot_embed_are_seen_after_steps_without_a_draft():
    torch.manual_seed(2)
    target, draft = llama(vocab_size=72), llama(seed=1, vocab_size=64)
    with torch.no_grad():
        target.lm_head.weight[64:] *= 3  # ids that only the target has come up often
    inputs = prompts(1, vocab_size=60)
    torch.manual_seed(0)
    with hf_specdec.enable(target, draft, method="draft_model", draft_lengths=[0] * 12):
        output = target.generate(**inputs, max_new_tokens=40, do_sample=True)
    first = next(i for i, token in enumerate(output[0, 6:].tolist()) if token >= 64)
    assert first < 10, "the text holds no such id early enough"
    assert hf_specdec.report(target).drafted == 0


def test_coins_of_a_step_do_not_depend_on_what_other_steps_draft():
    def coins(lengths):
        torch.manual_seed(3)
        made = Coins(2, torch.device("cpu"))
        return [made.next(length) for length in lengths]

    fixed, mixed = coins([5] * 40), coins([5, 0, 40, 1] * 10)
    for step in range(0, 40, 4):
        assert all(map(torch.equal, fixed[step], mixed[step]))
        assert torch.equal(fixed[step + 1][1][:, -1:], mixed[step + 1][1])  # the final draw's, whatever was drafted
        assert torch.equal(fixed[step + 2][0], mixed[step + 2][0][:, :5])


def test_coins_are_all_different_and_in_range():
    made = Coins(3, torch.device("cpu"))
    coins = torch.cat([torch.cat(made.next(length), dim=1).flatten() for length in (40, 3, 0, 70) * 10])
    assert len(coins) == 3 * 10 * (81 + 7 + 1 + 141) == len(coins.unique())
    assert 0 <= coins.min() < 0.01 < 0.99 < coins.max() < 1


# --- rows -----------------------------------------------------------------------------------------------------------


def test_returned_sequences_are_independent_when_sampling_and_identical_when_greedy(enabled):
    rows, _ = drawn(enabled, batch=1, num_return_sequences=8)
    speculates(enabled)
    assert len({tuple(row) for row in rows}) == 8
    assert len({row[0] for row in rows}) > 1
    options = {"max_new_tokens": NEW, "num_return_sequences": 3, "num_beams": 1}
    with pytest.raises(ValueError, match="num_return_sequences"):  # plain's own refusal stands
        enabled.generate(**prompts(1), do_sample=False, **options)
    repeated = {name: value.repeat(3, 1) for name, value in prompts(1).items()}
    rows = enabled.generate(**repeated, max_new_tokens=NEW).tolist()
    speculates(enabled)
    assert rows[0] == rows[1] == rows[2]


# --- threads --------------------------------------------------------------------------------------------------------


def in_threads(*works, rounds=3):
    """What each of `works`, running at the same time, gave in its rounds."""
    results, errors, start = [[] for _ in works], [], threading.Barrier(len(works))

    def run(index, work):
        try:
            start.wait()
            for _ in range(rounds):
                results[index].append(work())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


def greedy(target, batch, **options):
    def work():
        tokens = target.generate(**prompts(batch), max_new_tokens=NEW, **options).tolist()
        report = hf_specdec.report(target)
        assert report.reason is None
        report.check()
        return tokens

    return work


def test_two_threads_on_two_models_do_not_disturb_each_other():
    (first, first_draft), (second, second_draft) = pair(0), pair(7)
    plain = [model.generate(**prompts(2), max_new_tokens=NEW).tolist() for model in (first, second)]
    with hf_specdec.enable(first, first_draft), hf_specdec.enable(second, second_draft):
        results = in_threads(greedy(first, 2), greedy(second, 2))
    assert results == [[plain[0]] * 3, [plain[1]] * 3]


def test_one_model_in_three_threads_gives_every_call_its_own_text():
    target, draft = pair()
    plain = [target.generate(**prompts(batch), max_new_tokens=NEW).tolist() for batch in (1, 2, 4)]
    with hf_specdec.enable(target, draft):
        results = in_threads(*(greedy(target, batch) for batch in (1, 2, 4)))
    assert results == [[tokens] * 3 for tokens in plain]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_calls_that_switch_adapters_off_take_turns_on_one_model():
    target = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)).eval()
    plain = [target.generate(**prompts(batch), max_new_tokens=NEW).tolist() for batch in (1, 2)]
    with hf_specdec.enable(target, method="base"):
        results = in_threads(*(greedy(target, batch) for batch in (1, 2)))
    assert results == [[tokens] * 3 for tokens in plain]


def test_greedy_call_leaves_the_generator_alone(enabled):
    before = torch.get_rng_state()
    enabled.generate(**prompts(2), max_new_tokens=NEW, do_sample=False)
    assert hf_specdec.report(enabled).accepted > 0
    assert torch.equal(torch.get_rng_state(), before)
