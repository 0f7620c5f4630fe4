"""Every position's scores are what plain decoding computes with that position's own prefix and row.

Twice: whole calls, greedy and float32, for each processor that an option of `generate()` reaches; and
`BlockProcessors` on a ragged block against the list called as plain calls it, for each class in the package's table.
"""

import contextlib
import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig
from transformers.generation import logits_process

import hf_specdec
from hf_specdec.host.processors import BlockProcessors, processor_table, why_not_position_wise
from hf_specdec.sequence import Sequence
from tests.comparison import assert_parity, assert_same_text, plain, speculate
from tests.zoo import VOCAB, pair, prompts

LENGTHS = (11, 5, 8)
PROMPT = prompts(LENGTHS)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def free():
    """Plain text without any processor [3, new tokens]."""
    return plain(pair("Llama")[0], **PROMPT, max_new_tokens=NEW_TOKENS)[:, max(LENGTHS) :]


def even_ids_and_own_row(batch_id, ids):
    """Depends on the row and on the last token."""
    return [token for token in range(3, VOCAB) if (token + batch_id + int(ids[-1])) % 3 != 0]


def _options(free):
    """Option name → options of generate() that change the text of `free`."""
    often = [row.mode().values.item() for row in free]
    pairs = [row[4:6].tolist() for row in free]
    eos = free[0, 4].item()
    unseen = [token for token in range(3, VOCAB) if token not in free][:2]
    return {
        "repetition_penalty": {"repetition_penalty": 1.7},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.5},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[often[0]], pairs[1], pairs[2]]},
        "sequence_bias": {"sequence_bias": [[[often[1]], -6.0], [pairs[0], -8.0], [pairs[2], 3.0]]},
        "suppress_tokens": {"suppress_tokens": often},
        "begin_suppress_tokens": {"begin_suppress_tokens": free[:, 0].tolist()},
        "forced_eos_token_id": {"forced_eos_token_id": unseen[0], "eos_token_id": unseen},
        "min_length": {"min_length": max(LENGTHS) + 9, "eos_token_id": eos},
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": eos},
        "exponential_decay_length_penalty": {
            "exponential_decay_length_penalty": (6, 1.4),
            "eos_token_id": unseen,
        },
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": even_ids_and_own_row},
        "renormalize_logits": {"renormalize_logits": True},
        "remove_invalid_values": {"remove_invalid_values": True},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0, context_width=1)},
        "watermarking_config with selfhash": {
            "watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)
        },
    }


NAMES = tuple(_options(torch.zeros((3, NEW_TOKENS), dtype=torch.long)))
WITHOUT_EFFECT = ("renormalize_logits", "remove_invalid_values")


@pytest.mark.parametrize("draft_length", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_processor_by_option_gives_plains_text(llama, free, name, draft_length):
    options = _options(free)[name]
    text, _ = assert_parity(llama, draft_length, **PROMPT, **options, max_new_tokens=NEW_TOKENS)
    if name not in WITHOUT_EFFECT:
        bare = {key: value for key, value in options.items() if key == "eos_token_id"}
        without = plain(llama[0], **PROMPT, **bare, max_new_tokens=NEW_TOKENS)
        assert without.tolist() != text.tolist(), "the option changes nothing here: the test proves nothing"


COMBINED = (
    ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    ("sequence_bias", "suppress_tokens", "min_new_tokens", "renormalize_logits"),
    ("prefix_allowed_tokens_fn", "repetition_penalty", "forced_eos_token_id"),
    ("watermarking_config", "encoder_no_repeat_ngram_size", "begin_suppress_tokens"),
    ("exponential_decay_length_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "min_length"),
    ("remove_invalid_values", "repetition_penalty", "min_length", "bad_words_ids", "prefix_allowed_tokens_fn"),
)


@pytest.mark.parametrize("draft_length", [2, 8])
@pytest.mark.parametrize("names", COMBINED, ids="+".join)
def test_processors_together_give_plains_text(llama, free, names, draft_length):
    options = {}
    for name in names:
        options |= _options(free)[name]
    assert_parity(llama, draft_length, **PROMPT, **options, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size", "prefix_allowed_tokens_fn"])
def test_processors_and_sliding_layers_together_give_plains_text(gemma, name):
    text = plain(gemma[0], **PROMPT, max_new_tokens=NEW_TOKENS)[:, max(LENGTHS) :]
    assert_parity(gemma, 4, **PROMPT, **_options(text)[name], max_new_tokens=NEW_TOKENS)


def test_forced_bos_is_the_first_token_after_a_prompt_of_one(llama):
    ids = torch.tensor([[7], [9]])
    text, _ = assert_parity(
        llama, input_ids=ids, attention_mask=torch.ones_like(ids), forced_bos_token_id=23, max_new_tokens=16
    )
    assert text[:, 1].tolist() == [23, 23]


@pytest.mark.parametrize("draft_length", [1, 4])
def test_top_k_of_one_makes_sampling_greedy_with_every_processor(llama, free, draft_length):
    options = _options(free)["repetition_penalty"] | _options(free)["no_repeat_ngram_size"]
    options |= {"do_sample": True, "top_k": 1, "temperature": 0.7}
    assert_parity(llama, draft_length, **PROMPT, **options, max_new_tokens=NEW_TOKENS)


def test_draft_that_only_proposes_forbidden_tokens_still_ends_with_none_of_them(llama):
    def only_even(_, ids):
        return list(range(4, VOCAB, 2))

    text, _ = assert_parity(llama, **PROMPT, prefix_allowed_tokens_fn=only_even, max_new_tokens=NEW_TOKENS)
    assert (text[:, max(LENGTHS) :] % 2 == 0).all()


# ------------------------------------------------------------------------------------------- the user's own processors
class FavourSum(LogitsProcessor):
    """Depends on the whole prefix: favours the sum of its ids."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids.sum(dim=-1, keepdim=True) + torch.arange(4)) % (VOCAB - 3) + 3
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 3.0))


class DeclaredFavourSum(FavourSum):
    """The same, and says that it is position-wise."""

    position_wise = True


def test_processor_that_is_not_known_to_be_position_wise_never_changes_the_text(llama):
    expected = plain(llama[0], **PROMPT, logits_processor=LogitsProcessorList([FavourSum()]), max_new_tokens=NEW_TOKENS)
    text, report = speculate(
        llama, **PROMPT, logits_processor=LogitsProcessorList([FavourSum()]), max_new_tokens=NEW_TOKENS
    )
    assert_same_text(text, expected)
    assert "FavourSum is not known to be position-wise" in report.reason


@pytest.mark.parametrize("draft_length", [1, 4])
def test_processor_that_declares_itself_position_wise_speculates(llama, free, draft_length):
    text, _ = assert_parity(
        llama,
        draft_length,
        **PROMPT,
        logits_processor=LogitsProcessorList([DeclaredFavourSum()]),
        repetition_penalty=1.3,
        max_new_tokens=NEW_TOKENS,
    )
    assert text[:, max(LENGTHS) :].tolist() != free.tolist()


def test_declaration_must_be_true_itself():
    processor = FavourSum()
    processor.position_wise = "yes"
    assert "FavourSum" in why_not_position_wise(LogitsProcessorList([processor]))


def test_users_list_is_unchanged_afterwards(llama):
    members = [DeclaredFavourSum(), logits_process.RepetitionPenaltyLogitsProcessor(1.4)]
    processors = LogitsProcessorList(members)
    before = [copy.deepcopy(vars(member)) for member in members]
    speculate(llama, **PROMPT, logits_processor=processors, min_new_tokens=4, eos_token_id=5, max_new_tokens=12)
    assert list(processors) == members
    assert [vars(member) for member in members] == before


def test_stateful_processor_is_plain_with_the_reason(llama):
    options = {"guidance_scale": 1.5}
    expected = plain(llama[0], **PROMPT, **options, max_new_tokens=8)
    text, report = speculate(llama, **PROMPT, **options, max_new_tokens=8)
    assert_same_text(text, expected)
    assert report.reason == "stateful logits processor UnbatchedClassifierFreeGuidanceLogitsProcessor"


# ------------------------------------------------------------------------------------------------ block by position
EOS = torch.tensor([7, 9])
MAKERS = {
    "TemperatureLogitsWarper": lambda ids: logits_process.TemperatureLogitsWarper(0.6),
    "TopKLogitsWarper": lambda ids: logits_process.TopKLogitsWarper(5),
    "TopPLogitsWarper": lambda ids: logits_process.TopPLogitsWarper(0.7),
    "TopHLogitsWarper": lambda ids: logits_process.TopHLogitsWarper(0.4),
    "MinPLogitsWarper": lambda ids: logits_process.MinPLogitsWarper(0.1),
    "TypicalLogitsWarper": lambda ids: logits_process.TypicalLogitsWarper(0.6),
    "EpsilonLogitsWarper": lambda ids: logits_process.EpsilonLogitsWarper(0.02),
    "EtaLogitsWarper": lambda ids: logits_process.EtaLogitsWarper(0.02),
    "SuppressTokensLogitsProcessor": lambda ids: logits_process.SuppressTokensLogitsProcessor([4, 8, 15]),
    "InfNanRemoveLogitsProcessor": lambda ids: logits_process.InfNanRemoveLogitsProcessor(),
    "LogitNormalization": lambda ids: logits_process.LogitNormalization(),
    "RepetitionPenaltyLogitsProcessor": lambda ids: logits_process.RepetitionPenaltyLogitsProcessor(1.5),
    "NoRepeatNGramLogitsProcessor": lambda ids: logits_process.NoRepeatNGramLogitsProcessor(2),
    "MinLengthLogitsProcessor": lambda ids: logits_process.MinLengthLogitsProcessor(9, EOS),
    "MinNewTokensLengthLogitsProcessor": lambda ids: logits_process.MinNewTokensLengthLogitsProcessor(4, 5, EOS),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda ids: logits_process.EncoderRepetitionPenaltyLogitsProcessor(
        1.5, ids[:, :4]
    ),
    "EncoderNoRepeatNGramLogitsProcessor": lambda ids: logits_process.EncoderNoRepeatNGramLogitsProcessor(
        2, ids[:, :4]
    ),
    "SequenceBiasLogitsProcessor": lambda ids: logits_process.SequenceBiasLogitsProcessor(
        [[[4], 2.0], [[3, 5], -4.0], [[5, 4, 3], 6.0]]
    ),
    "NoBadWordsLogitsProcessor": lambda ids: logits_process.NoBadWordsLogitsProcessor([[4], [3, 5], [5, 3]], EOS),
    "PrefixConstrainedLogitsProcessor": lambda ids: logits_process.PrefixConstrainedLogitsProcessor(
        lambda batch_id, text: [(int(text.sum()) + batch_id + k) % 12 for k in (0, 2, 5)], 1
    ),
    "ForcedBOSTokenLogitsProcessor": lambda ids: logits_process.ForcedBOSTokenLogitsProcessor(1),
    "ForcedEOSTokenLogitsProcessor": lambda ids: logits_process.ForcedEOSTokenLogitsProcessor(9, EOS),
    "ExponentialDecayLengthPenalty": lambda ids: logits_process.ExponentialDecayLengthPenalty((2, 1.3), EOS, 4),
    "SuppressTokensAtBeginLogitsProcessor": lambda ids: logits_process.SuppressTokensAtBeginLogitsProcessor([3, 4], 7),
    "WatermarkLogitsProcessor": lambda ids: logits_process.WatermarkLogitsProcessor(VOCAB, "cpu", bias=3.0),
}
MORE_MAKERS = {
    "RepetitionPenalty past a prompt": lambda ids: logits_process.RepetitionPenaltyLogitsProcessor(1.5, 4),
    "NoRepeatNGram of one": lambda ids: logits_process.NoRepeatNGramLogitsProcessor(1),
    "NoRepeatNGram of three": lambda ids: logits_process.NoRepeatNGramLogitsProcessor(3),
    "NoRepeatNGram longer than the text": lambda ids: logits_process.NoRepeatNGramLogitsProcessor(9),
    "TopK and TopP of two kept": lambda ids: logits_process.TopPLogitsWarper(0.1, min_tokens_to_keep=2),
    "Watermark selfhash": lambda ids: logits_process.WatermarkLogitsProcessor(
        VOCAB, "cpu", bias=3.0, seeding_scheme="selfhash", context_width=2
    ),
    "Temperature, TopK, RepetitionPenalty": lambda ids: [
        logits_process.RepetitionPenaltyLogitsProcessor(1.5),
        logits_process.TemperatureLogitsWarper(0.7),
        logits_process.TopKLogitsWarper(6),
    ],
}
with contextlib.suppress(ValueError):  # 5.17 takes one number for all rows
    logits_process.RepetitionPenaltyLogitsProcessor(0.7, torch.tensor([1]))
    MORE_MAKERS["RepetitionPenalty past each row's prompt"] = lambda ids: (
        logits_process.RepetitionPenaltyLogitsProcessor(0.7, torch.tensor([1, 3, 2]))
    )


MORE_MAKERS["all kinds"] = lambda ids: [
    logits_process.NoBadWordsLogitsProcessor([[4], [3, 5]], EOS),
    logits_process.RepetitionPenaltyLogitsProcessor(1.5),
    logits_process.NoRepeatNGramLogitsProcessor(2),
    DeclaredFavourSum(),
    logits_process.TopPLogitsWarper(0.9),
]
EVERY_MAKER = MAKERS | MORE_MAKERS
RAGGED, LEVEL = (4, 8, 6), (6, 6, 6)


def _block(lengths, width, seed=0):
    """A text whose rows have `lengths`, with drafted ids in the scratch, and scores for `width` positions."""
    generator = torch.Generator().manual_seed(seed)
    sequence = Sequence(torch.randint(3, 6, (len(lengths), min(lengths)), generator=generator), None)
    sequence.ids[:] = torch.randint(3, 6, sequence.ids.shape, generator=generator)  # few ids: n-grams recur
    sequence.set_lengths(lengths)
    scores = 2 * torch.randn((len(lengths), width, VOCAB), generator=generator)
    return sequence, scores


def _by_position(processors, sequence, scores, first):
    """As plain: the whole batch at one length, of which the row that has this length is read."""
    expected = scores.clone()
    for row, length in enumerate(sequence.host_lengths):
        for position in range(scores.shape[1]):
            ids = sequence.ids[:, : length + first + position]
            expected[row, position] = processors(ids, scores[:, position].clone())[row]
    return expected


@pytest.mark.parametrize("name", MAKERS)
def test_processors_that_everybody_uses_are_called_at_most_once_a_block(name, monkeypatch):
    """No Python loop over tokens: vectorised ones are not called at all, those of the scores alone once."""
    how, calls = dict(processor_table())[name], []
    kind = getattr(logits_process, name)
    right = kind.__call__

    def counted(self, ids, scores):
        calls.append(scores.shape[0])
        return right(self, ids, scores)

    monkeypatch.setattr(kind, "__call__", counted)
    sequence, scores = _block(RAGGED, 4)
    BlockProcessors(LogitsProcessorList([MAKERS[name](sequence.ids)]))(scores, sequence)
    expected = {"one call for the whole block": [12], "vectorised over rows and positions": []}
    if how in expected:
        assert calls == expected[how]
    else:
        assert len(calls) == 12


def test_those_that_everybody_uses_are_vectorised_or_of_the_scores_alone():
    table = dict(processor_table())
    names = ("Temperature", "TopK", "TopP", "MinP", "RepetitionPenalty", "NoRepeatNGram", "MinNewTokensLength")
    for name in names:
        kinds = [
            how
            for cls, how in table.items()
            if cls.removesuffix("LogitsWarper").removesuffix("LogitsProcessor") == name
        ]
        assert kinds == ["one call for the whole block"] or kinds == ["vectorised over rows and positions"], name


def test_every_position_wise_class_of_the_table_is_made_here():
    assert set(MAKERS) == {name for name, how in processor_table() if not how.startswith("plain decoding")}


@pytest.mark.parametrize(("first", "width"), [(0, 1), (0, 4), (1, 1), (3, 1)])
@pytest.mark.parametrize("lengths", [RAGGED, LEVEL], ids=["ragged", "level"])
@pytest.mark.parametrize("name", EVERY_MAKER)
def test_block_equals_calls_position_by_position(name, lengths, first, width):
    for seed in range(3):
        sequence, scores = _block(lengths, width, seed)
        if name == "InfNanRemoveLogitsProcessor":
            scores[0, 0, 3:6] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        made = EVERY_MAKER[name](sequence.ids)
        processors = LogitsProcessorList(made if isinstance(made, list) else [made])
        assert why_not_position_wise(processors) is None
        before = scores.clone()
        actual = BlockProcessors(processors)(scores, sequence, first)
        assert torch.equal(scores.nan_to_num(1e9), before.nan_to_num(1e9)), "the logits themselves were changed"
        torch.testing.assert_close(actual, _by_position(processors, sequence, scores, first), rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY_MAKER)
def test_positions_without_meaning_may_hold_anything(name):
    sequence, scores = _block(RAGGED, 4)
    sequence.set_finished([False, True, False])
    made = EVERY_MAKER[name](sequence.ids)
    processors = LogitsProcessorList(made if isinstance(made, list) else [made])
    actual = BlockProcessors(processors)(scores, sequence, 0, [2, 0, 4])
    expected = _by_position(processors, sequence, scores, 0)
    torch.testing.assert_close(actual[0, :2], expected[0, :2], rtol=0, atol=0)
    torch.testing.assert_close(actual[2], expected[2], rtol=0, atol=0)


def test_only_code_of_the_callers_own_needs_the_host_to_know_prefixes():
    flat = LogitsProcessorList(
        [logits_process.TopKLogitsWarper(5), logits_process.RepetitionPenaltyLogitsProcessor(1.2)]
    )
    exact = LogitsProcessorList([logits_process.ForcedBOSTokenLogitsProcessor(1)])
    asked = LogitsProcessorList([logits_process.PrefixConstrainedLogitsProcessor(lambda _, ids: [1], 1)])
    assert not BlockProcessors(flat).needs_prefixes
    assert not BlockProcessors(exact).needs_prefixes
    assert BlockProcessors(asked).needs_prefixes


@pytest.mark.parametrize("do_sample", [False, True])
def test_prefix_function_is_asked_neither_behind_an_end_nor_past_the_maximum_length(do_sample):
    """A trie or grammar has no answer there; plain decoding of one row never asks."""
    target, draft = pair("Llama")
    ends, length = list(range(3, VOCAB, 5)), 30

    def allowed(_, ids):
        assert not set(ids[9:].tolist()) & set(ends), "asked behind an end"
        assert len(ids) < length, "asked past the maximum length"
        return list(range(3, VOCAB))

    options = {"max_length": length, "eos_token_id": ends, "pad_token_id": 0, "prefix_allowed_tokens_fn": allowed}
    with hf_specdec.enable(target, draft, num_speculative_tokens=4):
        for seed in range(16):
            torch.manual_seed(seed)
            ids = torch.randint(3, VOCAB, (1, 9))
            target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=do_sample, **options)
            assert hf_specdec.report(target).reason is None


def test_repetition_penalty_ignores_new_tokens_too_where_it_is_told_to():
    """`prompt_ignore_length` may reach past the prompt; drafted tokens there were once counted."""
    target, draft = pair("Llama")
    penalty = logits_process.RepetitionPenaltyLogitsProcessor(1.8, prompt_ignore_length=max(LENGTHS) + 12)
    options = {"max_new_tokens": NEW_TOKENS, "logits_processor": LogitsProcessorList([penalty])}
    expected = plain(target, **PROMPT, **options)
    with hf_specdec.enable(target, draft):
        output = target.generate(**PROMPT, **options, do_sample=False)
    assert output.tolist() == expected.tolist()


class Viewing(LogitsProcessor):
    """Takes its arguments for contiguous, as plain's are."""

    position_wise = True

    def __call__(self, input_ids, scores):
        assert input_ids.view(-1).numel()
        assert scores.view(-1).numel()
        return scores


def test_processors_get_contiguous_tensors():
    target, draft = pair("Llama")
    options = {"max_new_tokens": NEW_TOKENS, "logits_processor": LogitsProcessorList([Viewing()])}
    with hf_specdec.enable(target, draft):
        target.generate(**PROMPT, **options, do_sample=False)
        assert hf_specdec.report(target).accepted > 0
