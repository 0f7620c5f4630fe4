import json
import re

import pytest

from hf_specdec import count_tokens
from hf_specdec.token_counts import MAX_FILE_BYTES, read_token_counts, short_list


def exactly(text):
    return f"^{re.escape(text)}$"


def tokenizer(texts, add_special_tokens):
    assert add_special_tokens is False
    return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_tokens_are_counted_and_written_the_most_frequent_first(tmp_path):
    path = tmp_path / "counts.json"
    assert list(count_tokens(tokenizer, ["bab", "ca"], path).items()) == [(97, 2), (98, 2), (99, 1)]
    assert list(json.loads(path.read_text()).items()) == [("97", 2), ("98", 2), ("99", 1)]
    assert read_token_counts(path) == [97, 98, 99]


def test_many_texts_are_counted_in_batches():
    assert count_tokens(tokenizer, ("ab" for _ in range(1000))) == {97: 1000, 98: 1000}


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("one text", TypeError, "texts must be several strings, got one. Pass [text]."),
        ([], ValueError, "texts hold no token. Pass texts of the kind that the target will write."),
    ],
)
def test_what_cannot_be_counted_is_refused(texts, error, message):
    with pytest.raises(error, match=exactly(message)):
        count_tokens(tokenizer, texts)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('{"7": 3, "2": 9, "5": 3, "4": 0}', [2, 5, 7]),
        ("12\n3\n12\n\n40\n", [12, 3, 40]),
    ],
)
def test_counts_are_read_in_both_forms(tmp_path, text, ids):
    (tmp_path / "counts").write_text(text)
    assert read_token_counts(tmp_path / "counts") == ids


@pytest.mark.parametrize(
    "text", ["", "{}", "[1, 2]", '{"a": 1}', '{"1": null}', '{"1": ', "1 two", "-1", '{"-1": 2}', "[" * 99_999]
)
def test_a_file_of_another_form_is_refused(tmp_path, text):
    (tmp_path / "counts.json").write_text(text)
    expected = (
        "The token counts 'counts.json' cannot be read. Expected JSON {\"id\": count, …} as hf_specdec.count_tokens "
        "writes it, or text with one id per line."
    )
    with pytest.raises(ValueError, match=exactly(expected)):
        read_token_counts(tmp_path / "counts.json")


def test_a_huge_file_is_refused_unread(tmp_path):
    with (tmp_path / "counts.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="take more than 64 MiB"):
        read_token_counts(tmp_path / "counts.json")


def test_without_counts_the_lowest_ids_are_kept():
    assert short_list(10, 3, [], []) == [0, 1, 2]
    assert short_list(10, 30, [], []) == list(range(10))


def test_counts_alone_are_kept_whole():
    assert short_list(10, None, [7, 2], []) == [2, 7]


def test_counts_are_cut_to_the_size_or_filled_up_with_the_lowest_ids():
    assert short_list(10, 2, [7, 2, 5], []) == [2, 7]
    assert short_list(10, 4, [7, 0], []) == [0, 1, 2, 7]


def test_ids_that_are_always_kept_come_on_top():
    assert short_list(10, 2, [], [9, 1, 12]) == [0, 1, 9]


def test_an_id_that_the_head_does_not_have_is_refused():
    expected = "draft_vocab holds the id 1,000, and the draft has 1,000 ids. Count with the tokenizer of this pair."
    with pytest.raises(ValueError, match=exactly(expected)):
        short_list(1000, None, [3, 1000], [])
