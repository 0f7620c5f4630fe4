"""Does the report say what the last call did, whoever asks and however the call ended?"""

import json
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, LogitsProcessor, StoppingCriteria, TextGenerationPipeline
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import SpeculationReport
from tests.integration.pairs import VOCAB, assert_as_plain, llama, noisy_copy, pair, prompts, speculates
from tests.integration.test_vocabularies import tokenizer

NEW = 16


@pytest.fixture
def enabled():
    """(target, draft, plain ids of two rows)."""
    target, draft = pair()
    plain = target.generate(**prompts(2), max_new_tokens=NEW)
    with hf_specdec.enable(target, draft):
        yield target, draft, plain


def test_none_before_the_first_call(enabled):
    target, draft, plain = enabled
    assert hf_specdec.report(target) is None
    target.generate(**prompts(2), max_new_tokens=NEW, speculative_config=False)
    assert hf_specdec.report(target) is None
    assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW)
    assert hf_specdec.report(draft) is None


def test_report_outlives_the_handle_and_the_next_call_replaces_it():
    target, draft = pair()
    with hf_specdec.enable(target, draft):
        target.generate(**prompts(2), max_new_tokens=NEW)
        first = speculates(target)
        target.generate(**prompts(1), max_new_tokens=4)
        assert speculates(target).emitted == 4
    assert first.emitted == 2 * NEW
    assert hf_specdec.report(target).emitted == 4


def test_outputs_carry_the_report_as_a_dictionary_entry_would(enabled):
    target, _, plain = enabled
    output = target.generate(**prompts(2), max_new_tokens=NEW, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.speculation == hf_specdec.report(target)
    output = target.generate(**prompts(2), max_new_tokens=NEW, return_dict_in_generate=True, use_cache=False)
    assert output.speculation.reason == "use_cache=False"
    output = target.generate(**prompts(2), max_new_tokens=NEW, return_dict_in_generate=True, speculative_config=False)
    assert not hasattr(output, "speculation")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_report_is_found_through_a_peft_model():
    target, draft = llama(), noisy_copy(llama())
    wrapped = get_peft_model(target, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)).eval()
    plain = wrapped.generate(**prompts(2), max_new_tokens=NEW)
    with hf_specdec.enable(wrapped, draft):
        assert wrapped.generate(**prompts(2), max_new_tokens=NEW).tolist() == plain.tolist()
        assert speculates(wrapped).emitted == 2 * NEW
        assert hf_specdec.report(wrapped) is hf_specdec.report(wrapped.get_base_model())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_report_is_found_through_a_compiled_wrapper(enabled):
    target, _, plain = enabled
    compiled = torch.compile(target, backend="eager")
    assert compiled.generate(**prompts(2), max_new_tokens=NEW).tolist() == plain.tolist()
    assert hf_specdec.report(compiled) is hf_specdec.report(target) is not None
    torch._dynamo.reset()


def test_report_is_found_through_a_pipeline(tmp_path):
    target, draft = pair()
    words = [f"w{i}" for i in range(VOCAB)]
    pipe = TextGenerationPipeline(model=target, tokenizer=tokenizer(words, tmp_path))
    settings = {"do_sample": False, "max_new_tokens": NEW, "return_full_text": False}
    plain = pipe("w3 w9 w17 w5", **settings)
    with hf_specdec.enable(pipe, draft, num_speculative_tokens=3):
        assert pipe("w3 w9 w17 w5", **settings) == plain
        assert speculates(pipe).emitted == NEW
        assert hf_specdec.report(pipe) is hf_specdec.report(target)
        assert pipe("w3 w9 w17 w5", **settings, speculative_config={"num_speculative_tokens": 2}) == plain
        assert max(speculates(pipe).draft_lengths) == 2


class AtLength(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= length for length in self.lengths])


@pytest.mark.parametrize("num_draft", [1, 4, 8])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("end", ["max length", "one token", "eos", "several eos", "criterion", "criterion with eos"])
def test_every_token_is_accounted_for_wherever_the_text_is_cut(num_draft, do_sample, end):
    target, draft = pair()
    inputs = prompts(3)
    free = target.generate(**inputs, max_new_tokens=NEW)[:, inputs["input_ids"].shape[1] :]
    eos = {"eos": int(free[0, 5]), "several eos": [int(free[0, 7]), int(free[1, 3]), int(free[2, 9])]}
    options = {"max_new_tokens": 1 if end == "one token" else NEW, "do_sample": do_sample}
    if "eos" in end:
        options["eos_token_id"] = eos.get(end, eos["eos"])
    if "criterion" in end:
        options["stopping_criteria"] = [AtLength([9, 14, 11])]
    with hf_specdec.enable(target, draft, num_speculative_tokens=num_draft):
        torch.manual_seed(5)
        output = target.generate(**inputs, **options)
    report = hf_specdec.report(target)
    assert report.reason is None
    report.check()
    assert report.prefill_emitted == 3
    assert sum(report.accepted_histogram) == report.steps
    assert report.target_passes == len(report.draft_lengths)
    width = output.shape[1] - inputs["input_ids"].shape[1]
    if end in ("max length", "one token"):
        assert report.emitted == 3 * width
    else:
        ends = options.get("eos_token_id", [])
        ends = [ends] if isinstance(ends, int) else ends
        assert report.emitted == sum(real_length(row, ends, end, limit) for row, limit in
                                     zip(output[:, -width:].tolist(), (3, 8, 5), strict=True))  # fmt: skip


def real_length(row, eos, end, limit):
    """New tokens of a row without its padding; rows of a batch without EOS go on to the last row's end."""
    ended = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
    return min(ended, limit, len(row)) if end == "criterion with eos" else ended


def test_reached_counts_what_the_walk_looked_at():
    target, draft = pair()
    with hf_specdec.enable(target, draft, num_speculative_tokens=4):
        target.generate(**prompts(1), max_new_tokens=60)
        report = speculates(target)
    full = [n for n, k in enumerate(report.accepted_histogram) if k]
    assert full[0] < 4 <= full[-1]  # both branches ran
    assert 0.2 < report.acceptance_rate < 0.8
    # Fifty-nine tokens in steps of four: all but the last few steps drafted four.
    assert report.reached <= sum(min(n + 1, 4) * count for n, count in enumerate(report.accepted_histogram))
    assert report.acceptance_rate == pytest.approx(report.accepted / report.reached)
    assert report.draft_utilization == pytest.approx(report.accepted / report.drafted)
    assert report.mean_acceptance_length == pytest.approx((report.emitted - report.prefill_emitted) / report.steps)
    assert report.acceptance_by_position[0] == pytest.approx(1 - report.accepted_histogram[0] / report.steps, abs=0.1)


def test_seconds_add_up_to_no_more_than_the_call():
    target, draft = pair()
    with hf_specdec.enable(target, draft):
        target.generate(**prompts(2), max_new_tokens=NEW)
    report = speculates(target)
    parts = (report.draft_seconds, report.verify_seconds, report.prefill_seconds, report.other_seconds)
    assert all(0 < part < 60 for part in parts)


def test_to_dict_is_json_and_text_is_readable(enabled):
    target, _, _ = enabled
    target.generate(**prompts(2), max_new_tokens=NEW)
    report = speculates(target)
    data = json.loads(json.dumps(report.to_dict()))
    assert SpeculationReport(**data) == report
    text = str(report)
    assert f"{report.emitted} emitted = 2 prefill + {report.accepted} accepted" in text
    assert f"{report.target_passes} passes" in text
    with pytest.raises(AttributeError):
        report.emitted = 3


class GenerateInside(LogitsProcessor):
    """Calls `generate` of the same model once, in the middle of a call."""

    position_wise = True

    def __init__(self, model, **options):
        self.model, self.options, self.is_done = model, options, False

    def __call__(self, input_ids, scores):
        if not self.is_done:
            self.is_done = True
            self.model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=6, **self.options)
        return scores


def test_nested_generates_of_one_call_are_summed(enabled):
    target, _, plain = enabled
    inside = GenerateInside(target)
    report = assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW, logits_processor=[inside])
    assert report.emitted == 2 * NEW + 6
    assert report.prefill_emitted == 3
    # A plain call inside counts for nothing and does not take the outer call's place.
    inside = GenerateInside(target, speculative_config=False)
    report = assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW, logits_processor=[inside])
    assert report.emitted == 2 * NEW


def twice(model, input_ids, generation_config=None, **kwargs):
    """A decoding method that is two calls of `generate`."""
    half = {"attention_mask": kwargs["attention_mask"], "max_new_tokens": NEW // 2, "custom_generate": None}
    first = model.generate(input_ids, **half)
    half["attention_mask"] = torch.cat([half["attention_mask"], torch.ones_like(first[:, -NEW // 2 :])], dim=1)
    return model.generate(first, **half)


def test_calls_inside_a_custom_decoding_method_are_summed(enabled):
    target, _, plain = enabled
    output = target.generate(**prompts(2), max_new_tokens=NEW, custom_generate=twice)
    assert output.tolist() == plain.tolist()
    assert speculates(target).emitted == 2 * NEW
    assert speculates(target).prefill_emitted == 4


def test_other_models_inside_a_call_keep_reports_of_their_own(enabled):
    target, _, plain = enabled
    other, its_draft = pair(3)
    with hf_specdec.enable(other, its_draft):
        inside = GenerateInside(other)
        report = assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW, logits_processor=[inside])
    assert report.emitted == 2 * NEW
    assert speculates(other).emitted == 6


def test_each_thread_sees_its_own_last_call(enabled):
    target, _, _ = enabled
    seen, start = {}, threading.Barrier(3)

    def work(tokens):
        start.wait()
        for _ in range(3):
            output = target.generate(**prompts(2), max_new_tokens=tokens)
            seen.setdefault(tokens, []).append((hf_specdec.report(target).emitted, output.shape[1]))

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in (5, 9, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {tokens: [(2 * tokens, 6 + tokens)] * 3 for tokens in (5, 9, 13)}
    # This thread has made no call: it sees the last of any thread (generate in a streamer's thread).
    assert hf_specdec.report(target).emitted in (10, 18, 26)
    target.generate(**prompts(1), max_new_tokens=3)
    assert hf_specdec.report(target).emitted == 3


class Broken(LlamaForCausalLM):
    """Gives NaN, or raises, from its `after`-th forward on."""

    after, fault, calls = 0, "nan", 0
    __module__ = LlamaForCausalLM.__module__  # breaks in mid-call: it passes for the family, which is not tried first

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.calls += 1
        if self.calls > self.after:
            if self.fault == "raise":
                raise MemoryError("the draft is out of memory")
            output.logits = torch.full_like(output.logits, torch.nan)
        return output


Broken.forward.__wrapped__ = LlamaForCausalLM.forward  # the signature that transformers asks for


def broken(model, fault, after):
    model.__class__ = Broken
    model.fault, model.after, model.calls = fault, after, 0
    return model


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize(
    ("fault", "said"), [("nan", "the draft gave NaN"), ("raise", "the draft failed (MemoryError: ")]
)
def test_a_failing_draft_never_fails_the_call(fault, said, do_sample, batch, after):
    target, draft = pair()
    inputs = prompts(batch)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with hf_specdec.enable(target, broken(draft, fault, after)):
        output = target.generate(**inputs, max_new_tokens=NEW, do_sample=do_sample)
        report = hf_specdec.report(target)
        assert report.reason is None
        assert [note for note in report.notes if said in note]
        report.check()
        assert report.draft_lengths[-1] == 0
        if not do_sample:
            assert output.tolist() == plain.tolist()
        # Dropped for the call only: a draft that has recovered drafts again.
        draft.after = 10**9
        assert_as_plain(target, plain, **inputs, max_new_tokens=NEW)


@pytest.mark.parametrize("after", [0, 3])
def test_nan_of_the_target_is_an_error_that_names_it_when_sampling(after):
    target, draft = pair()
    target = broken(target, "nan", 10**9)
    inputs = prompts(2)
    with hf_specdec.enable(target, draft):
        target.after, target.calls = after, 0
        with pytest.raises(RuntimeError, match=r"The target Broken gave NaN or only -inf scores in row \d, after its"):
            target.generate(**inputs, max_new_tokens=NEW, do_sample=True)
        target.after = 10**9
        target.generate(**inputs, max_new_tokens=NEW, do_sample=True)
        speculates(target)


def test_nan_of_the_target_is_taken_as_plain_takes_it_when_greedy():
    target, draft = pair()
    target = broken(target, "nan", 0)
    inputs = prompts(2)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with hf_specdec.enable(target, draft):
        assert target.generate(**inputs, max_new_tokens=NEW).tolist() == plain.tolist()


class Interrupt(BaseStreamer):
    """The reader goes away."""

    def __init__(self):
        self.left = 4

    def put(self, value):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def end(self):
        pass


def test_an_interrupted_call_leaves_the_last_report_of_a_finished_one(enabled):
    target, _, plain = enabled
    target.generate(**prompts(1), max_new_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**prompts(1), max_new_tokens=NEW, streamer=Interrupt())
    assert hf_specdec.report(target).emitted == 3
    assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW)
