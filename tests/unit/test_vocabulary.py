import gc
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import vocabulary
from hf_specdec.vocabulary import Disagreement, VocabularyMap, check_vocabularies, compare_vocabularies

INF = float("inf")


def exactly(text):
    return f"^{re.escape(text)}$"


class Tokenizer:
    def __init__(self, vocab):
        self.vocab, self.num_reads = vocab, 0

    def __len__(self):
        return len(self.vocab)

    def get_vocab(self):
        self.num_reads += 1
        return self.vocab


def words(num_tokens, **changes):
    return {text: index for index, text in enumerate(changes.get(f"w{i}", f"w{i}") for i in range(num_tokens))}


# --- logits and ids ---------------------------------------------------------------------------------------------------


def test_target_only_ids_have_no_probability_in_the_draft():
    logits = VocabularyMap(target_size=5, draft_size=3).to_target_logits(torch.tensor([[1.0, 2.0, 3.0]]))
    assert logits.tolist() == [[1.0, 2.0, 3.0, -INF, -INF]]
    assert torch.softmax(logits, -1)[0, 3:].tolist() == [0.0, 0.0]


def test_draft_only_ids_are_dropped_before_drawing():
    logits = VocabularyMap(target_size=2, draft_size=4).to_target_logits(torch.tensor([[1.0, 2.0, 99.0, 98.0]]))
    assert logits.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("sizes", [(4, 4), (6, 4), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_come_back_in_float32(sizes, dtype):
    logits = VocabularyMap(*sizes).to_target_logits(torch.randn(2, 3, sizes[1]).to(dtype))
    assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (2, 3, sizes[0]))


def test_wider_logits_stay_as_wide():
    assert VocabularyMap(6, 4).to_target_logits(torch.zeros(1, 4, dtype=torch.float64)).dtype == torch.float64


def test_equal_sizes_copy_nothing():
    logits = torch.randn(2, 4)
    assert VocabularyMap(4, 4).to_target_logits(logits) is logits


def test_logits_of_another_width_are_refused():
    with pytest.raises(
        ValueError,
        match=exactly(
            "Expected draft logits over 4 tokens, got 5. Build the VocabularyMap from the sizes of the output heads."
        ),
    ):
        VocabularyMap(6, 4).to_target_logits(torch.zeros(1, 5))


def test_ids_beyond_the_drafts_rows_cannot_be_embedded():
    vocabulary_map = VocabularyMap(target_size=6, draft_size=4)
    assert vocabulary_map.shared_size == 4
    assert vocabulary_map.is_embeddable(torch.tensor([[0, 3], [4, 5]])).tolist() == [[True, True], [False, False]]


# --- a short list -----------------------------------------------------------------------------------------------------


def test_a_cut_head_has_no_probability_outside_its_ids():
    short = VocabularyMap(6, 5, torch.tensor([1, 4]))
    assert (short.head_size, short.shared_size) == (2, 5)
    logits = short.to_target_logits(torch.tensor([[[2.0, 3.0]], [[5.0, 7.0]]]))
    assert logits.tolist() == [[[-INF, 2.0, -INF, -INF, 3.0, -INF]], [[-INF, 5.0, -INF, -INF, 7.0, -INF]]]


def test_kept_ids_that_the_target_does_not_have_are_dropped_before_drawing():
    short = VocabularyMap(4, 6, torch.tensor([1, 3, 4, 5]))
    assert short.short_ids.tolist() == [1, 3]
    logits = torch.tensor([[1.0, 2.0, 98.0, 99.0]])
    assert short.to_short_logits(logits).tolist() == [[1.0, 2.0]]
    assert short.to_target_logits(logits).tolist() == [[-INF, 1.0, -INF, 2.0]]


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_logits_of_a_cut_head_are_widened(dtype, wide):
    short = VocabularyMap(6, 5, torch.tensor([1, 4]))
    assert short.to_short_logits(torch.zeros(1, 2, dtype=dtype)).dtype == wide
    assert short.to_target_logits(torch.zeros(1, 2, dtype=dtype)).dtype == wide


def test_logits_of_another_width_than_the_cut_heads_are_refused():
    short = VocabularyMap(6, 5, torch.tensor([1, 4]))
    for convert in (short.to_short_logits, short.to_target_logits):
        with pytest.raises(ValueError, match=r"^Expected draft logits over 2 tokens, got 5\."):
            convert(torch.zeros(1, 5))


def test_ids_outside_the_short_list_are_embedded_as_before():
    assert VocabularyMap(6, 4, torch.tensor([1])).is_embeddable(torch.tensor([0, 3, 4])).tolist() == [True, True, False]


# --- comparison -------------------------------------------------------------------------------------------------------


def test_equal_vocabularies_agree():
    assert compare_vocabularies(words(50), words(50), 50) is None


def test_the_first_id_with_two_texts_is_named():
    found = compare_vocabularies(words(50), words(50, w30="x", w12="Ġder"), 50)
    assert found == Disagreement(12, "w12", "Ġder")


def test_ids_beyond_the_shared_range_are_not_compared():
    assert compare_vocabularies(words(50), words(50, w40="x"), 40) is None


def test_a_text_on_one_side_only_is_no_difference():
    assert compare_vocabularies(words(50) | {"<image>": 52}, words(50), 64) is None
    assert compare_vocabularies(words(50), words(50) | {"<image>": 52, "<audio>": 53}, 64) is None
    assert compare_vocabularies(words(50) | {"<image>": 52}, words(50) | {"<audio>": 53}, 64) is None


def test_a_text_with_two_ids_is_a_difference():
    found = compare_vocabularies(words(50) | {"<image>": 52}, words(50) | {"<image>": 55}, 64)
    assert found == Disagreement(52, "<image>", None)
    assert str(found).startswith("Target and draft disagree on token 52: '<image>' and no token. ")


def test_a_text_that_moved_beyond_the_shared_range_is_a_difference_at_its_shared_id():
    assert compare_vocabularies({"a": 0, "b": 1}, {"a": 0, "b": 9}, 4) == Disagreement(1, "b", None)
    assert compare_vocabularies({"a": 0, "b": 8}, {"a": 0, "b": 9}, 4) is None


def test_a_second_text_for_an_id_both_sides_read_alike_is_no_difference():
    assert compare_vocabularies({"a": 0, "b": 1, "alias": 1}, {"a": 0, "b": 1}, 2) is None


def reference(target, draft, shared_size):
    """Id by id, then text by text."""
    first = []
    for index in range(shared_size):
        here = {text for text, other in target.items() if other == index}
        there = {text for text, other in draft.items() if other == index}
        if here and there and here != there:
            first.append(index)
    first += [min(target[text], draft[text]) for text in target.keys() & draft.keys() if target[text] != draft[text]]
    return min((index for index in first if index < shared_size), default=None)


texts_of_ids = st.dictionaries(st.integers(0, 7), st.sampled_from("abcdefghij"), max_size=8)


@given(texts_of_ids, texts_of_ids, st.integers(1, 8))
def test_comparison_agrees_with_reading_every_id(target, draft, shared_size):
    target, draft = ({text: index for index, text in side.items()} for side in (target, draft))
    found = compare_vocabularies(target, draft, shared_size)
    assert (None if found is None else found.token_id) == reference(target, draft, shared_size)


# --- the check --------------------------------------------------------------------------------------------------------


def test_padded_sizes_of_one_tokenizer_are_accepted():
    tokenizer = Tokenizer(words(30))
    assert check_vocabularies(152_064, 151_936, tokenizer, tokenizer) == VocabularyMap(152_064, 151_936)
    assert tokenizer.num_reads == 0
    assert check_vocabularies(151_936, 152_064).shared_size == 151_936


def test_sizes_further_apart_than_padding_are_refused():
    check_vocabularies(32_000, 33_024)
    with pytest.raises(
        ValueError,
        match=exactly(
            "The target has 32,000 token rows and the draft 152,064; padding explains a difference of at most 1,024. "
            "Accept/resample compares probabilities token by token: use a draft with the same tokenizer, "
            "or speculative_config=False."
        ),
    ):
        check_vocabularies(32_000, 152_064)


def test_disagreeing_tokenizers_are_refused_with_the_first_token():
    vocab = words(2000)
    target = {**vocab, "Ġthe": vocab["w1234"]}
    draft = {**vocab, "Ġder": vocab["w1234"]}
    del target["w1234"], draft["w1234"]
    with pytest.raises(
        ValueError,
        match=exactly(
            "Target and draft disagree on token 1234: 'Ġthe' and 'Ġder'. Accept/resample compares probabilities "
            "token by token: use a draft with the same tokenizer, or speculative_config=False."
        ),
    ):
        check_vocabularies(2048, 2000, Tokenizer(target), Tokenizer(draft))


def test_a_pair_is_compared_once_until_a_token_is_added():
    target, draft = Tokenizer(words(40)), Tokenizer(words(40))
    for _ in range(3):
        check_vocabularies(64, 64, target, draft)
    assert target.num_reads == 1
    draft.vocab = words(41, w3="<new>")
    with pytest.raises(ValueError, match=r"^Target and draft disagree on token 3: 'w3' and '<new>'"):
        check_vocabularies(64, 64, target, draft)
    assert target.num_reads == 2


def test_a_refused_pair_is_refused_again_without_a_second_comparison():
    target, draft = Tokenizer(words(40)), Tokenizer(words(40, w3="x"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Target and draft disagree on token 3: 'w3' and 'x'"):
            check_vocabularies(40, 40, target, draft)
    assert target.num_reads == 1


def test_the_cache_keeps_no_tokenizer_alive():
    gc.collect()
    before = len(vocabulary._compared)
    target, draft = Tokenizer(words(4)), Tokenizer(words(4))
    check_vocabularies(4, 4, target, draft)
    assert len(vocabulary._compared) == before + 1
    del target, draft
    gc.collect()
    assert len(vocabulary._compared) == before


def test_tokenizers_without_weak_references_are_compared_each_time():
    class Slotted(Tokenizer):
        __hash__ = None

    target, draft = Slotted(words(4)), Slotted(words(4))
    check_vocabularies(4, 4, target, draft)
    check_vocabularies(4, 4, target, draft)
    assert target.num_reads == 2


def test_a_vocabulary_of_this_size_is_compared_in_a_blink(benchmark):
    target, draft = words(150_000), words(150_000, w149999="x")
    assert benchmark(compare_vocabularies, target, draft, 150_000) == Disagreement(149_999, "w149999", "x")
