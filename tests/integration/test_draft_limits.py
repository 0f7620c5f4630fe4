"""Does a call go on, with plain's text, where its draft cannot: at the end of its context, out of memory, or broken?"""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.drafters import Draft, Drafter
from hf_specdec.host.draft_model import DraftModel
from hf_specdec.host.runner import cache_keyword
from hf_specdec.registry import DRAFTERS
from tests.integration.pairs import VOCAB, assert_as_plain, noisy_copy, pair, prompts, speculates

NEW = 40
ENDED = "Drafting ended where the draft's context did."


def gpt2(positions=128, seed=0):
    """A tiny GPT-2: learned positions, none beyond `positions`."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=positions,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def short_sighted(target, positions, noise=0.05):
    """`target` with noise and only its first `positions` positions."""
    noisy, draft = noisy_copy(target, noise), gpt2(positions)
    weights = noisy.state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:positions]
    draft.load_state_dict(weights)
    return draft


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_draft", [1, 4])
def test_drafting_ends_at_the_drafts_last_position_and_the_text_goes_on(num_draft, batch):
    target = gpt2()
    inputs = prompts(batch)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with hf_specdec.enable(target, short_sighted(target, 16), num_speculative_tokens=num_draft):
        report = assert_as_plain(target, plain, **inputs, max_new_tokens=NEW)
        assert report.accepted > 0
        assert report.notes == [ENDED]
        ends = report.draft_lengths.index(0)
        assert set(report.draft_lengths[ends:]) == {0}
        assert report.draft_lengths[:ends]
        # Drafted up to the limit, rows' padding taken off, and not one token further.
        assert report.drafted <= 16 * batch * num_draft
        torch.manual_seed(1)
        target.generate(**inputs, max_new_tokens=NEW, do_sample=True)
        assert speculates(target).notes == [ENDED]


def test_prompt_longer_than_the_drafts_context_is_decoded_without_it():
    target = gpt2()
    inputs = prompts(2, length=20)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with hf_specdec.enable(target, short_sighted(target, 16), num_speculative_tokens=4):
        assert target.generate(**inputs, max_new_tokens=NEW).tolist() == plain.tolist()
        report = hf_specdec.report(target)
        assert report.drafted == 0
        assert report.notes == [ENDED]
        # The next call has a text that fits.
        short = prompts(2)
        plain = target.generate(**short, max_new_tokens=4, speculative_config=False)
        assert assert_as_plain(target, plain, **short, max_new_tokens=4).notes == []


def test_target_at_its_own_last_position_ends_as_plain():
    target = gpt2(positions=32)
    inputs = prompts(2, length=12)
    plain = target.generate(**inputs, max_new_tokens=20)
    with hf_specdec.enable(target, noisy_copy(target, 0.05)):
        assert_as_plain(target, plain, **inputs, max_new_tokens=20)


class Recorder(BaseStreamer):
    """What was streamed."""

    def __init__(self):
        self.puts, self.num_ends = [], 0

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.num_ends += 1


def failing_at(draft, call, error):
    """Make forward number `call` of `draft`, and every later one, raise `error`."""
    calls = []

    def hook(module, args):
        calls.append(1)
        if len(calls) >= call:
            raise error

    return draft.register_forward_pre_hook(hook)


@pytest.mark.parametrize("call", [1, 2, 6, 17])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), RuntimeError("shape mismatch")]
)
def test_nothing_is_lost_or_repeated_when_the_draft_raises(error, call):
    target, draft = pair()
    inputs = prompts(1)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        hook, streamer = failing_at(draft, call, error), Recorder()
        options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True}
        output = target.generate(**inputs, streamer=streamer, **options)
        report = hf_specdec.report(target)
        assert output.sequences.tolist() == plain.tolist()
        assert streamer.puts == [plain[0, :6].tolist(), *([token] for token in plain[0, 6:].tolist())]
        assert streamer.num_ends == 1
        assert len(output.scores) == NEW
        [note] = report.notes
        assert note.startswith(f"Decoded plainly from the point where the draft failed ({type(error).__name__}: ")
        assert str(error) in note
        report.check()
        assert report.emitted == NEW
        assert report.draft_lengths[-1] == 0
        hook.remove()
        assert assert_as_plain(target, plain, **inputs, max_new_tokens=NEW).notes == []


def test_keys_returned_after_a_failure_serve_the_next_turn():
    target, draft = pair()
    inputs = prompts(1)
    plain = target.generate(**inputs, max_new_tokens=2 * NEW)
    with hf_specdec.enable(target, draft):
        hook = failing_at(draft, 9, RuntimeError("broken"))
        output = target.generate(**inputs, max_new_tokens=NEW, return_dict_in_generate=True)
        hook.remove()
        ids = output.sequences
        keyword = cache_keyword(target)
        assert output[keyword].get_seq_length() == ids.shape[1] - 1
        again = target.generate(ids, max_new_tokens=NEW, **{keyword: output[keyword]})
        assert again.tolist() == plain.tolist()
        speculates(target)


class Faulty(LogitsProcessor):
    """The caller's own, and broken."""

    position_wise = True

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 10:
            raise torch.OutOfMemoryError("in the processor")
        return scores


def test_an_error_of_the_callers_processor_is_not_taken_for_the_drafts():
    target, draft = pair()
    with hf_specdec.enable(target, draft):
        with pytest.raises(torch.OutOfMemoryError, match="in the processor"):
            target.generate(**prompts(1), max_new_tokens=NEW, logits_processor=[Faulty()])
        target.generate(**prompts(1), max_new_tokens=NEW)
        speculates(target)


def test_draft_that_runs_out_of_memory_between_forwards_is_dropped(monkeypatch):
    """Its probabilities need memory too, not its forwards alone."""
    target, draft = pair()

    def full(*_):
        raise torch.OutOfMemoryError("no room for probabilities")

    monkeypatch.setattr(DraftModel, "next_scores", full)
    with hf_specdec.enable(target, draft):
        output = target.generate(**prompts(1), max_new_tokens=6, do_sample=True)
    report = hf_specdec.report(target)
    assert output.shape[1] == prompts(1)["input_ids"].shape[1] + 6
    assert any("no room for probabilities" in note for note in report.notes)


class RaisingDrafter(Drafter):
    """A third party's, with a bug in its second step."""

    steps = 0

    def propose(self, sequence, draft_length, uniforms):
        RaisingDrafter.steps += 1
        if RaisingDrafter.steps % 2 == 0:
            raise ValueError("a bug of the drafter's own")
        ids = sequence.ids.new_full((sequence.batch, draft_length), 7)
        return Draft(ids, None, torch.full_like(sequence.lengths, draft_length))


def test_drafter_that_raises_leaves_a_call_that_goes_on_plainly(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "raising", RaisingDrafter)
    target, _ = pair()
    call = {**prompts(3), "max_new_tokens": 16, "do_sample": False}
    plain = target.generate(**call)
    with hf_specdec.enable(target, method="raising", num_speculative_tokens=4):
        for _ in range(2):  # the next call speculates again
            RaisingDrafter.steps = 0
            assert target.generate(**call).tolist() == plain.tolist()
            report = hf_specdec.report(target)
            assert report.reason is None
            assert report.drafted > 0
            assert "a bug of the drafter's own" in report.notes[0]
