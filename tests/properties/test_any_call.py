"""Any combination of options: greedy text, scores, streamed columns and criteria calls are plain's, and ours ran. So in
the turns of any chat on one cache."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.host.runner import cache_keyword
from tests.comparison import assert_same_text, first_layers_draft, plain, speculate
from tests.zoo import PAD, VOCAB, pair, prompts


class Columns(BaseStreamer):
    """What a streamer is given."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


class StopsAtIds(StoppingCriteria):
    """A row ends when its last id is one of `ids`; remembers what it was asked."""

    def __init__(self, ids):
        self.ids, self.asked = torch.tensor(ids), []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.tolist())
        return torch.isin(input_ids[:, -1], self.ids)


def allowed_in_row(row, ids):
    """For `prefix_allowed_tokens_fn`: depends on the row, the length and the last token."""
    return [token for token in range(3, VOCAB) if (token + row + len(ids) + int(ids[-1])) % 4]


tokens = st.integers(3, VOCAB - 1)
processors = {
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "encoder_repetition_penalty": st.just(1.5),
    "no_repeat_ngram_size": st.integers(2, 4),
    "encoder_no_repeat_ngram_size": st.integers(1, 3),
    "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=2),
    "sequence_bias": st.just([[[5], 1.0], [[7, 9], -4.0], [[11, 3], 4.0]]),
    "suppress_tokens": st.lists(tokens, min_size=1, max_size=3),
    "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=3),
    "forced_eos_token_id": tokens,
    "prefix_allowed_tokens_fn": st.just(allowed_in_row),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
}
options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 20)},
    optional=processors
    | {
        "eos_token_id": st.lists(tokens, min_size=1, max_size=3, unique=True),
        "min_new_tokens": st.integers(1, 6),
        "min_length": st.integers(1, 16),
        "exponential_decay_length_penalty": st.just((2, 1.2)),
        "prefill_chunk_size": st.integers(1, 5),
        "return_dict_in_generate": st.just(True),
    },
)
calls = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["Llama", "Mistral", "Gemma3", "GPT-2"]),
        "draft_length": st.integers(1, 7),
        "lengths": st.lists(st.integers(2, 12), min_size=1, max_size=3).map(tuple),
        "options": options,
        "stops": st.none() | st.lists(tokens, min_size=1, max_size=4),
    }
)


def possible(options):
    """Without what `generate()` refuses: a forced token that is suppressed."""
    if options.get("forced_eos_token_id") in options.get("suppress_tokens", ()):
        return {name: value for name, value in options.items() if name != "suppress_tokens"}
    return dict(options)


def observed(decode, call):
    """(text, scores if any, what the streamer got, what the criterion was asked) of one way of decoding `call`."""
    streamer, given = Columns(), possible(call["options"])
    if "exponential_decay_length_penalty" in given and "eos_token_id" not in given:
        given.pop("exponential_decay_length_penalty")  # it has no end to hurry to
    if "min_new_tokens" in given:  # more than the maximum would only be warned about
        given["min_new_tokens"] = min(given["min_new_tokens"], given["max_new_tokens"])
    if "min_length" in given:
        given["min_length"] = min(given["min_length"], max(call["lengths"]) + given["max_new_tokens"])
    criterion = StopsAtIds(call["stops"]) if call["stops"] else None
    if criterion is not None:
        given["stopping_criteria"] = StoppingCriteriaList([criterion])
    is_output = given.get("return_dict_in_generate", False)
    output = decode(streamer=streamer, **prompts(call["lengths"]), **given, output_scores=is_output)
    text, scores = (output.sequences, output.scores) if is_output else (output, ())
    return text, scores, (streamer.puts, streamer.ends), None if criterion is None else criterion.asked


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls)
def test_any_call_is_plains(call):
    check_call(call, speculate)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls)
def test_any_call_whose_first_layers_draft_is_plains(call):
    check_call(call, first_layers_draft)


def check_call(call, decode):
    """`call`, by `decode` (pair, draft length, options), is plain's in all that can be seen of it."""
    models, reports = pair(call["name"]), []

    def ours(**given):
        text, report = decode(models, call["draft_length"], **given)
        reports.append(report)
        return text

    expected = observed(lambda **given: plain(models[0], **given), call)
    actual = observed(ours, call)
    assert_same_text(actual[0], expected[0])
    assert actual[2:] == expected[2:]
    assert len(actual[1]) == len(expected[1])
    new = expected[0][:, max(call["lengths"]) :]
    for column, pair_of_scores in enumerate(zip(actual[1], expected[1], strict=True)):
        is_open = new[:, column] != PAD  # a finished row's entries mean nothing
        # Blocks of K + 1 queries round differently from single ones.
        torch.testing.assert_close(*(scores[is_open] for scores in pair_of_scores), rtol=1e-4, atol=1e-4)
    assert reports[0].reason is None
    reports[0].check()


chats = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["Llama", "Mistral", "Gemma3", "GPT-2"]),
        "draft_length": st.integers(1, 7),
        "lengths": st.lists(st.integers(2, 12), min_size=1, max_size=3).map(tuple),
        "gives_whole_text": st.booleans(),
        "turns": st.lists(
            st.fixed_dictionaries({"max_new_tokens": st.integers(1, 12)}, optional=processors), min_size=2, max_size=3
        ),
    }
)


def chatted(decode, call):
    """The text of every turn of a chat on one cache."""
    model = pair(call["name"])[0]
    cache, held, texts = DynamicCache(config=model.config), 0, []
    ids, mask = prompts(call["lengths"]).values()
    for turn, options_of_turn in enumerate(call["turns"]):
        shown = ids if call["gives_whole_text"] else ids[:, held:]
        given_to_turn = {**possible(options_of_turn), cache_keyword(model): cache}
        text = decode(input_ids=shown, attention_mask=mask, **given_to_turn)
        texts.append(text)
        ids = torch.cat([ids[:, : ids.shape[1] - shown.shape[1]], text], dim=1)
        held = cache.get_seq_length()
        said = (torch.arange(4).expand(len(ids), -1) + 7 * turn + ids[:, -1:]) % (VOCAB - 3) + 3
        ids = torch.cat([ids, said], dim=1)
        mask = torch.cat([mask, torch.ones((len(ids), ids.shape[1] - mask.shape[1]), dtype=torch.long)], dim=1)
    return texts, held


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(chats)
def test_any_chat_on_one_cache_is_plains(call):
    check_chat(call, speculate)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(chats)
def test_any_chat_whose_first_layers_draft_is_plains(call):
    check_chat(call, first_layers_draft)


def check_chat(call, decode):
    """Every turn of a chat, by `decode`, is plain's."""
    models, reports = pair(call["name"]), []

    def ours(**given):
        text, report = decode(models, call["draft_length"], **given)
        reports.append(report)
        return text

    expected, plain_held = chatted(lambda **given: plain(models[0], **given), call)
    actual, held = chatted(ours, call)
    for text, plain_text in zip(actual, expected, strict=True):
        assert_same_text(text, plain_text)
    assert held == plain_held
    for report in reports:
        assert report.reason is None
        report.check()
