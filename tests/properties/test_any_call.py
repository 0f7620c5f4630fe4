"""Any combination of options: greedy text, streamed columns and criteria calls are plain's, and ours ran."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests.comparison import assert_same_text, plain, speculate
from tests.zoo import VOCAB, pair, prompts


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


tokens = st.integers(3, VOCAB - 1)
options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 20)},
    optional={
        "eos_token_id": st.lists(tokens, min_size=1, max_size=3, unique=True),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "no_repeat_ngram_size": st.integers(2, 4),
        "min_new_tokens": st.integers(1, 6),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=2),
        "suppress_tokens": st.lists(tokens, min_size=1, max_size=3),
        "exponential_decay_length_penalty": st.just((2, 1.2)),
        "renormalize_logits": st.just(True),
        "prefill_chunk_size": st.integers(1, 5),
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


def observed(decode, call):
    """(text, what the streamer got, what the criterion was asked) of one way of decoding `call`."""
    streamer, given = Columns(), dict(call["options"])
    if "exponential_decay_length_penalty" in given and "eos_token_id" not in given:
        given.pop("exponential_decay_length_penalty")  # it has no end to hurry to
    if "min_new_tokens" in given:  # more than the maximum would only be warned about
        given["min_new_tokens"] = min(given["min_new_tokens"], given["max_new_tokens"])
    criterion = StopsAtIds(call["stops"]) if call["stops"] else None
    if criterion is not None:
        given["stopping_criteria"] = StoppingCriteriaList([criterion])
    text = decode(streamer=streamer, **prompts(call["lengths"]), **given)
    return text, (streamer.puts, streamer.ends), None if criterion is None else criterion.asked


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls)
def test_any_call_is_plains(call):
    models, reports = pair(call["name"]), []

    def ours(**given):
        text, report = speculate(models, call["draft_length"], **given)
        reports.append(report)
        return text

    expected = observed(lambda **given: plain(models[0], **given), call)
    actual = observed(ours, call)
    assert_same_text(actual[0], expected[0])
    assert actual[1:] == expected[1:]
    assert reports[0].reason is None
    reports[0].check()
