"""The text ends where plain ends it, whatever ends it; criteria and streamers see what they see in plain decoding."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from tests.comparison import assert_parity, assert_same_text, assert_speculated, new_tokens, plain, speculate
from tests.zoo import VOCAB, pair, prompts

LENGTHS = (11, 5, 8)
START = max(LENGTHS)
PROMPT, ONE = prompts(LENGTHS), prompts((9,))
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer():
    """One token per letter, and pairs of letters: a text can be cut into tokens in several ways."""
    pieces = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces += [a + b for a, b in zip(pieces, pieces[7:], strict=False)]
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<s>", "<unk>", *pieces][:VOCAB])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def free():
    """Plain text that nothing ends, [3, new tokens]."""
    return plain(pair("Llama")[0], **PROMPT, max_new_tokens=NEW_TOKENS)[:, START:]


# ---------------------------------------------------------------------------------------------------- stop strings
@pytest.mark.parametrize("draft_length", [1, 4, 8])
@pytest.mark.parametrize("draft", ["noisy", "right"])
def test_stop_string_over_two_tokens_ends_the_text_at_every_place_of_a_block(llama, tokenizer, draft, draft_length):
    models_ = llama if draft == "noisy" else (llama[0], llama[0])
    text = plain(llama[0], **ONE, max_new_tokens=NEW_TOKENS)[0, 9:]
    for place in range(1, 11):
        stop = tokenizer.decode(text[place : place + 2])
        options = {"stop_strings": stop, "tokenizer": tokenizer}
        output, _ = assert_parity(
            models_, draft_length, accepts=False, rejects=False, **ONE, **options, max_new_tokens=NEW_TOKENS
        )
        assert output.shape[1] <= 9 + place + 2
        assert stop in tokenizer.decode(output[0, 9:])


@pytest.mark.parametrize("eos", [None, 2], ids=["no eos", "eos"])
@pytest.mark.parametrize("draft_length", [1, 4, 8])
def test_stop_strings_end_the_rows_of_a_batch_where_plain_ends_them(llama, tokenizer, free, draft_length, eos):
    stops = [tokenizer.decode(free[row, place : place + 3]) for row, place in ((0, 3), (1, 11), (2, 7))]
    stops = [stops[0][1:], stops[1][:-1], stops[2]]  # from within a token, to within a token
    options = {"stop_strings": stops, "tokenizer": tokenizer, "eos_token_id": eos}
    text, _ = assert_parity(llama, draft_length, **PROMPT, **options, max_new_tokens=NEW_TOKENS)
    assert text.shape[1] < START + NEW_TOKENS
    if eos is None:  # a stopped row keeps its real continuation until the last one stops
        assert_same_text(text, torch.cat([PROMPT["input_ids"], free], dim=1)[:, : text.shape[1]])
    else:
        assert len({len(new_tokens(text, START, row)) for row in range(3)}) > 1


def test_one_row_without_its_stop_string_keeps_the_batch_going(llama, tokenizer, free):
    options = {"stop_strings": [tokenizer.decode(free[0, 2:5])], "tokenizer": tokenizer}
    text, _ = assert_parity(llama, **PROMPT, **options, max_new_tokens=NEW_TOKENS)
    assert text.shape[1] == START + NEW_TOKENS


def test_stop_string_and_eos_in_one_block_end_at_whichever_is_first(llama, tokenizer):
    target = llama[0]
    text = plain(target, **ONE, max_new_tokens=NEW_TOKENS)[0, 9:]
    for first, second in itertools.permutations((2, 3, 5), 2):
        options = {"stop_strings": [tokenizer.decode(text[first : first + 1])], "tokenizer": tokenizer}
        assert_parity(
            (target, target),
            8,
            accepts=False,
            rejects=False,
            **ONE,
            **options,
            eos_token_id=text[second].item(),
            max_new_tokens=NEW_TOKENS,
        )


# -------------------------------------------------------------------------------------------------- custom criteria
class Recording(StoppingCriteria):
    """Asks `rule(ids, scores)` and remembers what it was called with."""

    def __init__(self, rule):
        self.rule, self.calls = rule, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.clone(), None if scores is None else [score.clone() for score in scores]))
        return self.rule(input_ids, scores)


def _none(ids):
    return torch.zeros(ids.shape[0], dtype=torch.bool)


def _rules(free, tokenizer):
    """Rule name → (rule, options of generate() it needs)."""
    last, words = free[:, 6], [tokenizer.decode(free[row, 4 + row : 7 + row]) for row in range(3)]

    def by_text(ids, _):
        return torch.tensor([any(word in tokenizer.decode(row) for word in words) for row in ids])

    def by_scores(ids, scores):
        first, second = scores[-1].topk(2, dim=-1).values.unbind(dim=-1)
        return (first - second > 0.8) & (len(scores) > 4)

    return {
        "last token": (lambda ids, _: torch.isin(ids[:, -1], last) & (ids.shape[1] > START + 3), {}),
        "length": (lambda ids, _: _none(ids) | (ids.shape[1] >= START + 7), {}),
        "length as one bool": (lambda ids, _: ids.shape[1] >= START + 7, {}),
        "text": (by_text, {}),
        "scores": (by_scores, {"return_dict_in_generate": True, "output_scores": True}),
        "never": (lambda ids, _: _none(ids), {}),
    }


RULES = ("last token", "length", "length as one bool", "text", "scores", "never")


@pytest.mark.parametrize("draft_length", [1, 4, 8])
@pytest.mark.parametrize("eos", [None, 2], ids=["no eos", "eos"])
@pytest.mark.parametrize("prompt", [ONE, PROMPT], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", RULES)
def test_criterion_is_called_as_plain_calls_it(llama, tokenizer, free, name, prompt, eos, draft_length):
    start = prompt["input_ids"].shape[1]
    if start != START:
        free = plain(llama[0], **prompt, max_new_tokens=NEW_TOKENS)[:, start:].expand(3, -1)
    rule, options = _rules(free, tokenizer)[name]
    expected, actual = Recording(rule), Recording(rule)
    options = options | {"eos_token_id": eos, "max_new_tokens": NEW_TOKENS}
    plain_output = plain(llama[0], **prompt, **options, stopping_criteria=StoppingCriteriaList([expected]))
    output, report = speculate(
        llama, draft_length, **prompt, **options, stopping_criteria=StoppingCriteriaList([actual])
    )
    if options.get("return_dict_in_generate"):
        plain_output, output = plain_output.sequences, output.sequences
    assert_same_text(output, plain_output)
    assert_speculated(report, accepts=False, rejects=False)
    assert (output.shape[1] < start + NEW_TOKENS) == (name != "never"), "this rule ends nothing"
    assert [ids.shape for ids, _ in actual.calls] == [ids.shape for ids, _ in expected.calls]
    for (ids, scores), (plain_ids, plain_scores) in zip(actual.calls, expected.calls, strict=True):
        assert ids.tolist() == plain_ids.tolist()
        assert (scores is None) == (plain_scores is None)
        for score, plain_score in zip(scores or [], plain_scores or [], strict=True):
            is_open = torch.ones(len(ids), dtype=torch.bool)
            if eos is not None:  # a finished row's entries mean nothing
                is_open = ids[:, -1] != 0
            # Blocks of K + 1 queries round differently from single ones: a few float32 ulps of logits around 10.
            torch.testing.assert_close(score[is_open], plain_score[is_open], rtol=1e-4, atol=1e-4)


def test_rows_that_were_ahead_give_back_what_a_criterion_cuts(llama, free):
    def rule(ids, _):
        return torch.full((3,), ids.shape[1] >= START + 5)

    criteria = StoppingCriteriaList([Recording(rule)])
    text, report = assert_parity(
        llama, 8, accepts=False, rejects=False, **PROMPT, stopping_criteria=criteria, max_new_tokens=NEW_TOKENS
    )
    assert text.shape[1] == START + 5
    assert report.emitted == 3 * 5


@pytest.mark.parametrize("draft_length", [1, 4])
def test_several_criteria_eos_and_stop_strings_together(llama, tokenizer, free, draft_length):
    def rule(ids, _):
        return (ids[:, -1] == free[1, 9]) & (ids.shape[1] > START + 4)

    options = {
        "stop_strings": [tokenizer.decode(free[0, 12:14])],
        "tokenizer": tokenizer,
        "eos_token_id": free[2, 15].item(),
        "stopping_criteria": StoppingCriteriaList([Recording(rule)]),
    }
    assert_parity(llama, draft_length, accepts=False, **PROMPT, **options, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("draft_length", [1, 4, 8])
@pytest.mark.parametrize("seconds", [0.0, 5.0, 9.0])
def test_time_criterion_is_at_most_one_step_late(llama, monkeypatch, seconds, draft_length):
    clock = itertools.count()
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: float(next(clock)))
    full = plain(llama[0], **ONE, max_new_tokens=NEW_TOKENS)
    timed = plain(llama[0], **ONE, max_new_tokens=NEW_TOKENS, max_time=seconds)
    text, report = speculate(llama, draft_length, **ONE, max_new_tokens=NEW_TOKENS, max_time=seconds)
    assert_speculated(report, accepts=False, rejects=False)
    assert_same_text(text, full[:, : text.shape[1]])
    # One look at the clock per step, each of at most K + 1 tokens, where plain looks once per token.
    looks = timed.shape[1] - 9
    assert looks <= text.shape[1] - 9 <= min(NEW_TOKENS, looks * (draft_length + 1))
    assert report.target_passes <= looks


# -------------------------------------------------------------------------------------------------------- streamers
class RecordingStreamer(BaseStreamer):
    """Everything that was put, and how often the stream ended."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert self.ends == 0
        self.puts.append(value.clone())

    def end(self):
        self.ends += 1


def _stream_cases(free, tokenizer):
    return {
        "nothing ends it": {},
        "eos": {"eos_token_id": free[0, 6].item()},
        "stop string": {"stop_strings": [tokenizer.decode(free[0, 5:7])], "tokenizer": tokenizer},
        "criterion": {
            "stopping_criteria": StoppingCriteriaList([Recording(lambda ids, _: _none(ids) | (ids.shape[1] >= 18))])
        },
        "one token": {"max_new_tokens": 1},
    }


@pytest.mark.parametrize("draft_length", [1, 4, 8])
@pytest.mark.parametrize("prompt", [ONE, PROMPT], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", ["nothing ends it", "eos", "stop string", "criterion", "one token"])
def test_streamer_gets_exactly_plains_puts(llama, tokenizer, name, prompt, draft_length):
    start = prompt["input_ids"].shape[1]
    free = plain(llama[0], **prompt, max_new_tokens=NEW_TOKENS)[:, start:]
    options = {"max_new_tokens": NEW_TOKENS} | _stream_cases(free, tokenizer)[name]
    expected, actual = RecordingStreamer(), RecordingStreamer()
    plain(llama[0], **prompt, **options, streamer=expected)
    _, report = speculate(llama, draft_length, **prompt, **options, streamer=actual)
    assert_speculated(report, accepts=False, rejects=False)
    assert [put.tolist() for put in actual.puts] == [put.tolist() for put in expected.puts]
    assert all(put.shape == plain_put.shape for put, plain_put in zip(actual.puts, expected.puts, strict=True))
    assert all(put.device.type == "cpu" and put.dtype == torch.long for put in actual.puts)
    assert actual.ends == expected.ends == 1


def test_text_streamers_give_plains_text(llama, tokenizer, capsys):
    text = plain(llama[0], **ONE, max_new_tokens=NEW_TOKENS)[0, 9:]
    plain(llama[0], **ONE, max_new_tokens=NEW_TOKENS, streamer=TextStreamer(tokenizer, skip_prompt=True))
    expected = capsys.readouterr().out
    speculate(llama, **ONE, max_new_tokens=NEW_TOKENS, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == expected
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    speculate(llama, **ONE, max_new_tokens=NEW_TOKENS, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(text)


# ------------------------------------------------------------------------------------------------------- exceptions
class Cancelled(Exception):
    """What a server raises to end a call."""


class RaisingStreamer(RecordingStreamer):
    def __init__(self, at, error):
        super().__init__()
        self.at, self.error = at, error

    def put(self, value):
        if len(self.puts) == self.at:
            raise self.error
        super().put(value)


class RaisingProcessor(LogitsProcessor):
    position_wise = True

    def __init__(self, length, error):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise self.error
        return scores


def _raising(who, error):
    def rule(ids, _):
        if ids.shape[1] >= START + 6:
            raise error
        return _none(ids)

    return {
        "streamer": {"streamer": RaisingStreamer(5, error)},
        "criterion": {"stopping_criteria": StoppingCriteriaList([Recording(rule)]), "streamer": RecordingStreamer()},
        "processor": {
            "logits_processor": LogitsProcessorList([RaisingProcessor(START + 6, error)]),
            "streamer": RecordingStreamer(),
        },
    }[who]


@pytest.mark.parametrize("error", [Cancelled("stop"), RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("who", ["streamer", "criterion", "processor"])
def test_exception_passes_through_unchanged_and_the_stream_is_not_ended(llama, who, error):
    target, draft = llama
    options = _raising(who, error)
    with hf_specdec.enable(target, draft, num_speculative_tokens=4):
        with pytest.raises(type(error)) as raised:
            target.generate(**PROMPT, do_sample=False, max_new_tokens=NEW_TOKENS, **options)
        assert raised.value is error
        assert options["streamer"].ends == 0
        text = target.generate(**PROMPT, do_sample=False, max_new_tokens=NEW_TOKENS)
        report = hf_specdec.report(target)
    assert_speculated(report)
    assert report.notes == []
    assert_same_text(text, plain(target, **PROMPT, max_new_tokens=NEW_TOKENS))


@pytest.mark.parametrize("who", ["streamer", "criterion"])
def test_stream_before_an_exception_is_plains(llama, who):
    streams = []
    for call, model in ((plain, llama[0]), (speculate, llama)):
        options = _raising(who, Cancelled())
        streams.append(options["streamer"])
        with pytest.raises(Cancelled):
            call(model, **PROMPT, max_new_tokens=NEW_TOKENS, **options)
    assert [put.tolist() for put in streams[1].puts] == [put.tolist() for put in streams[0].puts]


def test_nothing_past_the_end_is_counted(llama, free):
    eos = free[0, 6].item()
    text, report = assert_parity(llama, 8, accepts=False, **PROMPT, eos_token_id=eos, max_new_tokens=NEW_TOKENS)
    assert report.emitted == sum(len(new_tokens(text, START, row)) for row in range(3))
