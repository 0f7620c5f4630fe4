"""Do streamers get what plain decoding gives them: one token per put, one end, and their own exceptions back?"""

import asyncio
import threading

import pytest
import torch
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from tests.integration.pairs import speculates
from tests.integration.texts import text_pair, tokenizer

NEW = 40


class Recording(BaseStreamer):
    """Every put, on a streamer that raises at put number `raises_at`."""

    def __init__(self, raises_at=None, error=None):
        self.puts, self.ends, self.raises_at, self.error = [], 0, raises_at, error

    def put(self, value):
        assert self.ends == 0
        if len(self.puts) == self.raises_at:
            raise self.error
        self.puts.append(value.clone())

    def end(self):
        self.ends += 1


@pytest.fixture
def target():
    """The same weights, enabled, K = 4; no call yet."""
    target, draft = text_pair()
    with hf_specdec.enable(target, draft, num_speculative_tokens=4):
        yield target


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.fixture(scope="module")
def inputs(words):
    return words("Once upon a time", return_tensors="pt")


@pytest.fixture(scope="module")
def plain(inputs):
    """New ids of the plain greedy call."""
    return text_pair()[0].generate(**inputs, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :].tolist()


def eos_in_mid_block(plain):
    """An id of the plain text to declare the end, and the number of new tokens until its first place."""
    eos = plain[10]
    return eos, plain.index(eos) + 1


@pytest.mark.parametrize("sampling", [False, True])
def test_one_put_per_token_of_shape_1_and_one_end(target, inputs, plain, sampling):
    streamer = Recording()
    torch.manual_seed(0)
    ids = target.generate(**inputs, max_new_tokens=NEW, do_sample=sampling, streamer=streamer)
    assert speculates(target).accepted > 0
    prompt, *tokens = streamer.puts
    assert prompt.tolist() == inputs["input_ids"].tolist()
    assert [tuple(token.shape) for token in tokens] == [(1,)] * NEW
    assert {(token.dtype, token.device.type) for token in tokens} == {(torch.int64, "cpu")}
    assert [int(token) for token in tokens] == ids[0, inputs["input_ids"].shape[1] :].tolist()
    assert streamer.ends == 1
    if not sampling:
        assert [int(token) for token in tokens] == plain


def test_puts_are_the_very_puts_of_plain(target, inputs):
    expected, actual = Recording(), Recording()
    target.generate(**inputs, max_new_tokens=NEW, streamer=expected, speculative_config=False)
    target.generate(**inputs, max_new_tokens=NEW, streamer=actual)
    assert [(p.shape, p.dtype, p.tolist()) for p in actual.puts] == [
        (p.shape, p.dtype, p.tolist()) for p in expected.puts
    ]


def test_nothing_is_streamed_after_an_end_in_mid_block(target, inputs, plain):
    eos, length = eos_in_mid_block(plain)
    streamer = Recording()
    target.generate(**inputs, max_new_tokens=NEW, eos_token_id=eos, streamer=streamer)
    assert [int(token) for token in streamer.puts[1:]] == plain[:length]
    assert streamer.ends == 1


@pytest.mark.parametrize("skips_prompt", [False, True])
def test_text_streamer_prints_plains_text(target, inputs, words, capsys, skips_prompt):
    options = {**inputs, "max_new_tokens": NEW}
    target.generate(**options, streamer=TextStreamer(words, skip_prompt=skips_prompt), speculative_config=False)
    expected = capsys.readouterr().out
    target.generate(**options, streamer=TextStreamer(words, skip_prompt=skips_prompt))
    assert capsys.readouterr().out == expected
    speculates(target)


def in_thread(target, **options):
    thread = threading.Thread(target=target.generate, kwargs=options)
    thread.start()
    return thread


def test_text_iterator_streamer_from_another_thread(target, inputs, words, plain):
    assert hf_specdec.report(target) is None
    streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=30)
    thread = in_thread(target, **inputs, max_new_tokens=NEW, streamer=streamer)
    text = "".join(streamer)
    thread.join(30)
    assert text == words.decode(plain)
    report = speculates(target)  # this thread made no call: it sees the other's
    assert report.emitted == NEW
    assert report.accepted > 0


def test_async_text_iterator_streamer(target, inputs, words, plain):
    async def read():
        streamer = AsyncTextIteratorStreamer(words, skip_prompt=True, timeout=30)
        thread = in_thread(target, **inputs, max_new_tokens=NEW, streamer=streamer)
        text = "".join([piece async for piece in streamer])
        thread.join(30)
        return text

    assert asyncio.run(read()) == words.decode(plain)
    assert speculates(target).emitted == NEW


def served(words, loop, queue):
    """The streamer of `transformers serve`, whose put takes ids of one dimension only."""
    utils = pytest.importorskip("transformers.cli.serving.utils")
    return utils.DirectStreamer(words._tokenizer, loop, queue), utils._GenerationCancelled


def test_the_servers_streamer(target, inputs, words, plain):
    async def read():
        queue = asyncio.Queue()
        streamer, _ = served(words, asyncio.get_running_loop(), queue)
        thread = in_thread(target, **inputs, max_new_tokens=NEW, streamer=streamer)
        pieces = []
        while (piece := await asyncio.wait_for(queue.get(), 30)) is not None:
            pieces.append(piece)
        thread.join(30)
        return pieces, streamer.total_tokens, queue.qsize()

    pieces, num_tokens, left = asyncio.run(read())
    assert "".join(pieces) == words.decode(plain, skip_special_tokens=True)
    assert (num_tokens, left) == (NEW, 0)  # each token counted once, one end


def test_cancelling_the_servers_streamer_ends_the_call_at_the_next_token(target, inputs, words, plain):
    async def read():
        queue = asyncio.Queue()
        streamer, cancelled = served(words, asyncio.get_running_loop(), queue)
        errors = []

        def run():
            try:
                target.generate(**inputs, max_new_tokens=1900, streamer=streamer)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        await asyncio.wait_for(queue.get(), 30)
        streamer.cancel()
        await asyncio.to_thread(thread.join, 30)
        return errors, cancelled, streamer.total_tokens

    (error,), cancelled, num_tokens = asyncio.run(read())
    assert type(error) is cancelled
    assert num_tokens < 1900
    assert hf_specdec.report(target) is None  # a call that raised leaves no report
    assert target.generate(**inputs, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :].tolist() == plain
    assert speculates(target).notes == []  # not taken for a failure of the draft


class Unusual(BaseException):
    """Not even an Exception."""


@pytest.mark.parametrize("raises_at", [0, 1, 2, 7])
@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, StopIteration, KeyboardInterrupt, Unusual])
def test_an_exception_passes_through_unchanged_and_the_next_call_works(target, inputs, plain, raises_at, kind):
    error = kind("mine")
    streamer = Recording(raises_at, error)
    with pytest.raises(kind) as caught:
        target.generate(**inputs, max_new_tokens=NEW, streamer=streamer)
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert streamer.ends == 0
    assert [int(token) for token in streamer.puts[1:]] == plain[: max(0, raises_at - 1)]
    after = Recording()
    ids = target.generate(**inputs, max_new_tokens=NEW, streamer=after)
    assert ids[0, inputs["input_ids"].shape[1] :].tolist() == plain
    assert after.ends == 1
    assert speculates(target).notes == []


def test_an_exception_at_the_end_passes_through_too(target, inputs):
    class EndRaises(Recording):
        def end(self):
            super().end()
            raise ValueError("mine")

    streamer = EndRaises()
    with pytest.raises(ValueError, match="mine"):
        target.generate(**inputs, max_new_tokens=NEW, streamer=streamer)
    assert streamer.ends == 1


def test_several_rows_are_refused_by_text_streamers_as_in_plain(target, words):
    batch = words(["a", "b"], return_tensors="pt")
    for flag in (False, None):
        with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
            target.generate(**batch, max_new_tokens=4, streamer=TextStreamer(words), speculative_config=flag)


def test_a_streamer_of_several_rows_gets_one_column_per_put(target, words):
    # TextStreamer refuses such a batch, a streamer of one's own does not.
    batch = words(["Once upon", "hi there"], return_tensors="pt", padding=True)
    expected, actual = Recording(), Recording()
    target.generate(**batch, max_new_tokens=NEW, streamer=expected, speculative_config=False)
    target.generate(**batch, max_new_tokens=NEW, streamer=actual)
    assert [put.tolist() for put in actual.puts] == [put.tolist() for put in expected.puts]
    assert tuple(actual.puts[1].shape) == (2,)
    speculates(target)


def test_two_threads_on_two_models_stream_their_own_text(inputs, words):
    texts = {}

    def read(name, model, expected):
        streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=30)
        thread = in_thread(model, **inputs, max_new_tokens=NEW, streamer=streamer)
        texts[name] = ("".join(streamer), expected)
        thread.join(30)

    readers = []
    for seed in (7, 11):
        target, draft = text_pair(seed)
        ids = target.generate(**inputs, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :]
        hf_specdec.enable(target, draft)
        readers.append(threading.Thread(target=read, args=(seed, target, words.decode(ids))))
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert len(texts) == 2
    assert all(text == expected for text, expected in texts.values())
