"""Do look-ups propose what the row's own text, or an earlier call's, says, exactly as offered, and nothing else?"""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters import DraftRequest
from hf_specdec.drafters.ngram import NgramDrafter, TextMemory
from hf_specdec.drafters.suffix import NUM_PROMPT_TOKENS, SuffixDrafter, TextStore, forget, store_of
from hf_specdec.sequence import Sequence
from hf_specdec.suffix_index import SuffixIndex
from tests.host_reads import ForbidHostReads, HostReadError

VOCAB = 50


class Target:
    """Stands for a model: can be referred to weakly."""


def drafter(cls=NgramDrafter, target=None, eos=None, config=None, **request):
    """A drafter of one call; n-grams of two tokens or more, unless `config` says otherwise."""
    config = {"prompt_lookup_min": 2, **(config or {})}
    method = {NgramDrafter: "ngram", SuffixDrafter: "suffix"}[cls]
    request |= {"eos_ids": None if eos is None else torch.tensor(eos), "vocab_size": VOCAB}
    request |= {"config": SpeculativeConfig(method, **config), "target": target or Target()}
    return cls(DraftRequest(**request))


def text(*rows, max_length=None):
    """A sequence that still stands at its prompt."""
    return Sequence(torch.tensor(rows), max_length)


def commit(sequence, *rows):
    """Append tokens to every row, as a step does."""
    sequence.reserve(max(map(len, rows)))
    for row, tokens in enumerate(rows):
        length = sequence.host_lengths[row]
        sequence.ids[row, length : length + len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        sequence.new_tokens[row] += tokens
    sequence.set_lengths([a + len(b) for a, b in zip(sequence.host_lengths, rows, strict=True)])


def proposal(drafter, sequence, limit=4):
    """The rows' proposed tokens, once they are known to be a point mass as wide as the longest of them."""
    draft = drafter.propose(sequence, limit, torch.zeros(sequence.batch, limit, dtype=torch.float64))
    lengths = draft.lengths.tolist()
    assert draft.probs is None
    assert draft.is_broken is None
    assert draft.token_ids.shape == (sequence.batch, max(lengths))
    assert draft.token_ids.dtype == draft.lengths.dtype == torch.long
    return [row[:length] for row, length in zip(draft.token_ids.tolist(), lengths, strict=True)]


# ------------------------------------------------------------------------------------------------ what is proposed


def test_rows_propose_what_followed_their_own_last_tokens():
    sequence = text([5, 6, 7, 8, 9, 5, 6], [1, 2, 3, 4, 5, 6, 7], [9, 9, 1, 2, 3, 9, 9])
    assert proposal(drafter(), sequence) == [[7, 8, 9, 5], [], [1, 2, 3, 9]]


def test_nothing_is_proposed_where_no_row_has_a_match():
    assert proposal(drafter(), text([1, 2, 3], [4, 5, 6])) == [[], []]


def test_a_repetition_at_the_end_goes_on_with_itself():
    assert proposal(drafter(), text([3, 1, 2, 1, 2, 1]), 5) == [[2, 1, 2, 1, 2]]


@pytest.mark.parametrize("matched", [1, 2, 5])
def test_twice_as_many_tokens_as_matched_are_proposed_at_most(matched):
    part = [*range(matched)]
    sequence, ours = text([*part, *range(20, 40), *part]), drafter(config={"prompt_lookup_min": 1})
    assert proposal(ours, sequence, 30) == [[*range(20, 20 + 2 * matched)]]


def test_what_is_committed_is_looked_up_and_looks_up():
    sequence, ours = text([1, 2, 3, 4], [5, 6, 7, 8]), drafter()
    assert proposal(ours, sequence) == [[], []]
    commit(sequence, [1, 2], [9])
    assert proposal(ours, sequence) == [[3, 4, 1, 2], []]
    assert proposal(ours, sequence, 1) == [[3], []]
    commit(sequence, [9, 9, 8], [0, 8, 9])
    assert proposal(ours, sequence) == [[], [0, 8, 9, 0]]


def test_padding_is_no_text():
    ids, mask = [0, 0, 0, 0, 1, 2, 3, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert proposal(drafter(padding_mask=torch.tensor([mask])), text(ids)) == [[]]
    assert proposal(drafter(padding_mask=torch.ones(1, 9, dtype=torch.long)), text(ids)) == [[1, 2, 3, 0]]
    assert proposal(drafter(), text(ids)) == [[1, 2, 3, 0]]


def test_ids_behind_a_cache_are_text_without_their_padding():
    history, mask = [[0, 1, 2, 3], [0, 0, 0, 4]], [[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    ours = drafter(history_ids=torch.tensor(history), padding_mask=torch.tensor(mask))
    assert proposal(ours, text([1, 2], [4, 4])) == [[3, 1, 2, 3], [4, 4, 4, 4]]


def test_drafting_ends_after_a_token_that_ends_the_text():
    sequence = text([0, 1, 2, 3, 4, 5, 0, 1, 2])
    assert proposal(drafter(eos=[4, 9]), sequence) == [[3, 4]]
    assert proposal(drafter(eos=[3]), sequence) == [[3]]
    assert proposal(drafter(eos=[9]), sequence) == [[3, 4, 5, 0]]


def test_ids_that_the_target_cannot_choose_are_not_proposed():
    assert proposal(drafter(), text([1, 2, 3, VOCAB, 5, 1, 2])) == [[3]]
    assert proposal(drafter(), text([1, 2, VOCAB, 4, 5, 1, 2])) == [[]]


def test_rows_that_have_ended_propose_nothing_and_may_lose_their_last_tokens():
    sequence, ours = text([1, 2, 3, 1, 2], [1, 2, 3, 1, 2]), drafter()
    commit(sequence, [3, 1], [3, 1])
    assert proposal(ours, sequence, 2) == [[2, 3], [2, 3]]
    del sequence.new_tokens[0][-1]
    sequence.set_lengths([6, 7])
    sequence.set_finished([True, False])
    assert proposal(ours, sequence, 2) == [[], [2, 3]]
    assert [offer.length for offer in ours.offers(sequence, 2)] == [0, 2]


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 5), (3, 3), (4, 5), (5, 9)])
@pytest.mark.parametrize("matched", [1, 2, 3, 4])
def test_matches_of_fewer_tokens_than_the_config_asks_for_are_none(matched, least, most):
    part = [*range(matched)]
    ours = drafter(config={"prompt_lookup_min": least, "prompt_lookup_max": most})
    assert proposal(ours, text([49, *part, 48, 47, *part]), 1) == [[48] if matched >= least else []]


# ------------------------------------------------------------------------------------------------ offers

ROWS = st.lists(st.integers(0, 3), min_size=3, max_size=30)


@given(rows=st.lists(ROWS, min_size=1, max_size=3), limit=st.integers(1, 9), width=st.integers(1, 9))
def test_what_is_proposed_is_what_was_offered(rows, limit, width):
    rows = [row[-min(map(len, rows)) :] for row in rows]
    sequence, ours = text(*rows), drafter(eos=[3])
    offers = ours.offers(sequence, limit)
    assert offers == ours.offers(sequence, limit)
    proposed = proposal(ours, sequence, min(width, limit))
    assert [len(tokens) for tokens in proposed] == [min(offer.length, width) for offer in offers]
    assert all(offer.length <= limit for offer in offers)


@pytest.mark.parametrize(
    ("matched", "record"), [(1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (8, "5-8"), (9, "9+"), (40, "9+")]
)
def test_offers_name_the_record_of_the_matchs_length(matched, record):
    part = [*range(matched)]
    ours = drafter(config={"prompt_lookup_min": 1})
    [offer] = ours.offers(text([49, *part, 48, 47, *part]), 2)
    assert (offer.length, offer.record) == (2, f"ngram {record}")


def test_longer_matches_are_expected_to_be_right_more_often():
    priors = []
    for matched in (1, 2, 3, 5, 9):
        part = [*range(matched)]
        [offer] = drafter(config={"prompt_lookup_min": 1}).offers(text([49, *part, 48, 47, *part]), 1)
        priors.append(offer.prior)
    assert priors == sorted(set(priors))
    assert 0 < priors[0] < priors[-1] < 1


# ------------------------------------------------------------------------------------------------ what it costs


def test_the_device_is_read_once_per_call():
    sequence, ours = text([1, 2, 3, 1, 2]), drafter()
    with ForbidHostReads(), pytest.raises(HostReadError):
        ours.offers(sequence, 4)
    ours.offers(sequence, 4)
    with ForbidHostReads():
        for token in (3, 9, 1, 2):
            commit(sequence, [token])
            ours.offers(sequence, 4)
            ours.propose(sequence, 4, torch.zeros(1, 4))


def test_equal_prompts_are_indexed_once(monkeypatch):
    counts = []
    extend = SuffixIndex.extend

    def counted(index, tokens):
        tokens = list(tokens)
        counts.append(len(tokens))
        extend(index, tokens)

    monkeypatch.setattr(SuffixIndex, "extend", counted)
    sequence, ours = text([1, 2, 3, 1, 2], [1, 2, 3, 1, 2], [5, 6, 7, 8, 9]), drafter()
    assert proposal(ours, sequence, 2) == [[3, 1], [3, 1], []]
    assert sum(counts) == 10
    commit(sequence, [3, 9, 3], [4], [5])
    assert proposal(ours, sequence, 2) == [[], [], []]


# ------------------------------------------------------------------------------------------------ later turns


def test_the_text_is_kept_for_a_turn_on_the_same_cache():
    sequence, ours = text([1, 2], [3, 4]), drafter(history_ids=torch.tensor([[7], [8]]))
    proposal(ours, sequence)
    commit(sequence, [5, 6], [6])
    kept = ours.keep()
    assert isinstance(kept, TextMemory)
    assert kept.ids[0].tolist() == [7, 1, 2, 5, 6]
    assert kept.ids[1, :4].tolist() == [8, 3, 4, 6]


def test_a_turn_that_never_drafted_keeps_what_the_turn_before_kept():
    memory = TextMemory(torch.tensor([[1]]))
    assert drafter(resume=memory).keep() is memory


# ------------------------------------------------------------------------------------------------ suffix


def run(target, prompt, output, cls=SuffixDrafter, config=None):
    """One call that writes `output`, token by token; tokens that were proposed right, first of each proposal."""
    sequence, ours = text(prompt), drafter(cls, target, config=config)
    num_right = 0
    for token in output:
        num_right += proposal(ours, sequence, 1) == [[token]]
        commit(sequence, [token])
    ours.close(sequence)
    return num_right


PROMPT, OUTPUT = [10, 11, 12, 13], [20, 21, 22, 23, 24, 25]


def test_a_second_call_reads_what_the_first_wrote():
    target = Target()
    assert run(target, PROMPT, OUTPUT) == 0
    assert run(target, PROMPT, OUTPUT) == len(OUTPUT)
    # Another prompt, the same text from somewhere on.
    assert run(target, [30, 31, 32], [33, *OUTPUT]) == len(OUTPUT) - 2
    assert run(Target(), PROMPT, OUTPUT) == 0


def test_the_own_text_wins_where_it_matches_as_long():
    target = Target()
    run(target, [1], [2, 3, 40])
    assert proposal(drafter(SuffixDrafter, target), text([2, 3, 41, 9, 2, 3]), 2) == [[41, 9]]
    assert proposal(drafter(SuffixDrafter, target), text([2, 3, 41, 1, 2, 3]), 2) == [[40]]


def test_kept_texts_have_records_of_their_own():
    target, part = Target(), [*range(6)]
    run(target, [9], [*part, 30])
    [kept] = drafter(SuffixDrafter, target).offers(text(part), 5)
    assert (kept.length, kept.record) == (1, "suffix 5-8")
    [own] = drafter(SuffixDrafter, target).offers(text([*part, 31, *part]), 5)
    assert own.record == "ngram 5-8"


def test_kept_matches_are_no_shorter_than_asked_for():
    target = Target()
    run(target, [1], [2, 3, 40])
    assert proposal(drafter(SuffixDrafter, target), text([9, 2, 3])) == [[40]]
    assert proposal(drafter(SuffixDrafter, target, config={"prompt_lookup_min": 3}), text([9, 2, 3])) == [[]]


def test_deterministic_calls_neither_read_nor_write_what_is_kept():
    target, config = Target(), {"deterministic": True}
    run(target, PROMPT, OUTPUT, config=config)
    assert len(store_of(target)) == 0
    run(target, PROMPT, OUTPUT)
    assert run(target, PROMPT, OUTPUT, config=config) == 0


def test_of_the_prompt_only_the_end_is_kept():
    target = Target()
    run(target, [7, 8, *range(40)], [45, 46])
    assert store_of(target)._younger.tokens == [*range(40 - NUM_PROMPT_TOKENS, 40), 45, 46, -1]


def test_a_call_that_never_drafted_or_wrote_nothing_keeps_nothing():
    target, sequence = Target(), text([1, 2, 3])
    ours = drafter(SuffixDrafter, target)
    ours.close(sequence)
    ours.offers(sequence, 3)
    ours.close(sequence)
    assert len(store_of(target)) == 0


def test_what_was_offered_stays_when_another_call_ends_in_between():
    target, part = Target(), [1, 2, 3]
    sequence, ours = text(part), drafter(SuffixDrafter, target)
    assert [offer.length for offer in ours.offers(sequence, 4)] == [0]
    run(target, [9], [*part, 4, 5])
    assert proposal(ours, sequence) == [[]]
    commit(sequence, [4])
    assert proposal(ours, sequence) == [[5]]


def test_kept_texts_can_be_dropped_and_go_with_their_target():
    target = Target()
    run(target, PROMPT, OUTPUT)
    store = weakref.ref(store_of(target)._younger)
    assert store() is not None
    forget(target)
    forget(target)
    gc.collect()
    assert store() is None
    run(target, PROMPT, OUTPUT)
    store = weakref.ref(store_of(target)._younger)
    del target
    gc.collect()
    assert store() is None


def test_the_oldest_texts_are_dropped_and_never_more_tokens_kept_than_allowed():
    store = TextStore(max_tokens=40)
    for start in range(0, 400, 10):
        store.add([*range(start, start + 5)])
        assert len(store) <= 40
    assert store.find([390, 391]).read(9) == [392, 393, 394]
    assert store.find([380, 381]).length == 2
    assert store.find([0, 1]).length == 0


def test_of_a_very_long_text_the_end_is_kept():
    store = TextStore(max_tokens=40)
    store.add([*range(1000)])
    assert len(store) == 20
    assert store.find([998, 999]).length == 0  # nothing follows
    assert store.find([5, 6]).length == 0
    assert store.find([990, 991]).read(3) == [992, 993, 994]


def test_a_text_is_kept_whole_or_not_at_all():
    class Interrupted(Exception):
        pass

    def broken(tokens):
        yield from tokens
        raise Interrupted

    store = TextStore(max_tokens=60)
    store.add([1, 2, 3])
    younger = store._younger
    extend = younger.extend
    younger.extend = lambda tokens: extend(broken(tokens[:2]))
    with pytest.raises(Interrupted):
        store.add([4, 5, 6])
    store.add([4, 5, 7])
    assert store.find([4, 5]).read(5) == [7]
    assert store.find([1, 2]).length == 0


def test_calls_of_several_threads_share_what_is_kept():
    target, errors = Target(), []

    def work(start):
        try:
            for _ in range(20):
                run(target, [start, start + 1], [start + 2, start + 3, start, start + 1] * 3)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    tokens = store_of(target)._younger.tokens
    assert len(tokens) == 4 * 20 * 15
    texts = [tokens[start : start + 15] for start in range(0, len(tokens), 15)]
    assert all(kept[-1] == -1 and len({token // 10 for token in kept[:-1]}) == 1 for kept in texts)
