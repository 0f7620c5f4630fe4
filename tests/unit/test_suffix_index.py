"""Does the index find what a search through the whole text finds, at a cost that does not grow with the text?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.suffix_index import MAX_CANDIDATES, MAX_MATCH, SEPARATOR, SuffixIndex

RANGES = ((1, 1), (1, 3), (2, 2), (2, 5), (3, 4))
# Few ids, so that texts repeat themselves; one that needs all the bits a key has for it.
IDS = st.sampled_from([0, 1, 2, 2**32 - 2])
TEXTS = st.lists(IDS, max_size=36)


def built(tokens, least=2, most=5):
    index = SuffixIndex(least, most)
    index.extend(tokens)
    return index


def common(text, position, query):
    """Tokens before `position` in `text` that are also the end of `query`."""
    length = 0
    while length < min(position, len(query), MAX_MATCH) and text[position - 1 - length] == query[-1 - length]:
        length += 1
    return length


def searched(text, query, least, most):
    """(length, position) by looking everywhere in `text`; of the longest n-gram only its latest occurrences."""
    for n in range(most, least - 1, -1):
        positions = [p for p in range(n, len(text)) if text[p] != SEPARATOR and common(text, p, query) >= n]
        if positions and n == most:
            return max((common(text, p, query), p) for p in positions[-MAX_CANDIDATES:])
        if positions:
            return n, positions[-1]
    return 0, 0


@pytest.mark.parametrize(("least", "most"), RANGES)
@given(text=TEXTS)
def test_match_is_what_a_search_through_the_text_finds(text, least, most):
    index = SuffixIndex(least, most)
    for length in range(len(text) + 1):
        assert index.match() == searched(text[:length], text[:length], least, most)
        index.extend(text[length : length + 1])


@pytest.mark.parametrize(("least", "most"), RANGES)
@given(texts=st.lists(TEXTS, max_size=4), query=TEXTS)
def test_the_end_of_another_text_is_found_inside_one_of_several(texts, query, least, most):
    joined = [token for text in texts for token in (*text, SEPARATOR)]
    index = built(joined, least, most)
    length, position = index.find(query)
    assert (length, position) == searched(joined, query, least, most)
    if length:
        followers = index.read(position, 100)
        assert SEPARATOR not in joined[position - length : position]
        assert joined[position:][: len(followers) + 1] == [*followers, SEPARATOR]


@given(text=st.lists(IDS, max_size=MAX_CANDIDATES + 2))
def test_no_longer_match_exists_where_every_occurrence_is_looked_at(text):
    length, position = built(text, 1, 4).match()
    assert length == max((common(text, p, text) for p in range(1, len(text))), default=0)
    assert position < len(text) or not text


@given(text=TEXTS, cuts=st.lists(st.integers(0, 36), max_size=5))
def test_pieces_give_the_index_of_the_whole(text, cuts):
    index, start = SuffixIndex(2, 4), 0
    for cut in [*sorted(cuts), len(text)]:
        index.extend(text[start:cut])
        start = max(start, cut)
        assert index.match() == index.match()
    assert index.tokens == text
    assert index.match() == built(text, 2, 4).match()


@given(text=TEXTS, more=TEXTS, other=TEXTS)
def test_a_copy_grows_apart(text, more, other):
    index = built(text)
    twin = index.copy()
    index.extend(more)
    twin.extend(other)
    for each, whole in ((index, text + more), (twin, text + other)):
        assert each.tokens == whole
        assert each.match() == built(whole).match()


@pytest.mark.parametrize(
    ("text", "continuation"),
    [
        ([1, 2, 1, 2], [1, 2, 1, 2, 1, 2, 1]),
        ([7, 7, 7], [7] * 7),
        ([5, 1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1, 2, 3, 4]),
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_continuation_goes_on_with_its_own_tokens_where_the_text_ends(text, continuation):
    assert built(text).continuation(7) == continuation
    assert built(text).continuation(2) == continuation[:2]


@given(text=TEXTS, limit=st.integers(0, 40))
def test_continuation_is_what_appending_it_token_by_token_reads(text, limit):
    index = built(text)
    length, position = index.match()
    read = list(text)
    while length and len(read) < len(text) + limit:
        read.append(read[position + len(read) - len(text)])
    assert index.continuation(limit) == read[len(text) :]
    assert index.tokens == text


def test_of_equally_long_matches_the_latest_is_taken():
    assert built([1, 2, 3, 9, 1, 2, 4, 9, 1, 2]).continuation(1) == [4]


def test_a_longer_match_beats_a_later_one_beyond_the_largest_n_gram():
    text = [*range(10, 20), 5, 1, 18, 19, 6, *range(10, 20)]
    assert built(text, 2, 2).match() == (10, 10)


def test_matches_are_followed_no_further_than_a_bound():
    text = [*range(1000), *range(1000)]
    assert built(text).match() == (MAX_MATCH, 1000)


def test_many_lengths_take_no_more_tables_than_a_few():
    text = [*range(50), *range(50)]
    index = built(text, 2, 1000)
    assert index.match() == (50, 50)
    assert len(index._follower) <= 8 * len(text)


@pytest.mark.parametrize(("least", "most"), [(0, 3), (3, 2), (-1, -1)])
def test_an_empty_range_is_refused(least, most):
    with pytest.raises(ValueError, match=f"^Expected 1 <= min_length <= max_length, got {least} and {most}.$"):
        SuffixIndex(least, most)


class Counted(dict):
    """A dictionary that counts what is asked of it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def get(self, key, default=None):
        self.count += 1
        return super().get(key, default)

    def __setitem__(self, key, value):
        self.count += 1
        super().__setitem__(key, value)


class Watched(list):
    """A list that counts the items looked at."""

    count = 0

    def __getitem__(self, key):
        type(self).count += 1
        return super().__getitem__(key)


WORST = {
    "one token": lambda n: [3] * n,
    "two tokens": lambda n: [1, 2] * (n // 2),
    "long runs apart": lambda n: ([1] * 70 + [2] + [1] * 60 + [3]) * (n // 132),
    "nothing twice": lambda n: list(range(n)),
}


@pytest.mark.parametrize("name", WORST)
def test_cost_per_token_does_not_grow_with_the_text(name):
    counts = []
    for length in (1000, 8000):
        index = SuffixIndex(2, 5)
        index._follower = Counted()
        for token in WORST[name](length):
            index.extend([token])
            index.match()
        counts.append(index._follower.count / len(index))
    # Four n-grams written, one chained, four looked for.
    assert max(counts) <= 9
    assert counts[1] <= counts[0] * 1.01


@pytest.mark.parametrize("name", WORST)
def test_a_look_up_compares_a_bounded_number_of_tokens(name):
    index = built(WORST[name](4000))
    index.tokens = Watched(index.tokens)
    index._match, Watched.count = None, 0
    index.match()
    assert Watched.count <= 2 * MAX_CANDIDATES * MAX_MATCH + 1
