import pytest
import torch

from hf_specdec.sampling import draw, residual_probs, softmax_probs
from hf_specdec.steps import commit, draft_lengths_after_eos, pack
from tests.host_reads import ForbidHostReads, HostReadError

EOS = torch.tensor([9])
PAD = -7


def run_commit(
    texts,
    draft,
    num_accepted,
    next_ids,
    eos: torch.Tensor | None = EOS,
    capacity=8,
    max_lengths: int | list[int] = 8,
    finished=None,
):
    """Commit to a buffer that holds `texts`; returns the verdict and the buffer."""
    ids = torch.full((len(texts), capacity), PAD)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    is_finished = torch.tensor(finished or [False] * len(texts))
    verdict = torch.tensor(draft, dtype=torch.long), torch.tensor(num_accepted), torch.tensor(next_ids)
    committed = commit(ids, lengths, is_finished, *verdict, eos, torch.tensor(max_lengths))
    return committed, ids


def test_rows_emit_their_accepted_tokens_and_the_next_one():
    committed, ids = run_commit([[1], [1, 2], [1]], [[3, 4]] * 3, [0, 1, 2], [5, 6, 7])
    assert committed.num_emitted.tolist() == [1, 2, 3]
    assert committed.is_finished.tolist() == [False] * 3
    assert [block[:n] for block, n in zip(committed.block_ids.tolist(), [1, 2, 3], strict=True)] == [
        [5],
        [3, 6],
        [3, 4, 7],
    ]
    assert ids.tolist() == [
        [1, 5, PAD, PAD, PAD, PAD, PAD, PAD],
        [1, 2, 3, 6, PAD, PAD, PAD, PAD],
        [1, 3, 4, 7, PAD, PAD, PAD, PAD],
    ]


def test_row_ends_after_the_first_eos_that_it_emits():
    draft = [[9, 4], [3, 9], [9, 9], [3, 4], [3, 9]]
    committed, ids = run_commit([[1]] * 5, draft, [2, 2, 2, 2, 1], [5, 5, 9, 9, 5])
    assert committed.num_emitted.tolist() == [1, 2, 1, 3, 2]
    assert committed.is_finished.tolist() == [True, True, True, True, False]
    assert ids[:, 1:4].tolist() == [[9, PAD, PAD], [3, 9, PAD], [9, PAD, PAD], [3, 4, 9], [3, 5, PAD]]


def test_any_of_several_eos_ids_ends_a_row():
    committed, _ = run_commit([[1]] * 2, [[3, 4]] * 2, [2, 2], [5, 5], eos=torch.tensor([9, 4, 8]))
    assert committed.num_emitted.tolist() == [2, 2]
    assert committed.is_finished.tolist() == [True, True]


def test_many_eos_ids_need_no_host_read():
    with ForbidHostReads():
        draft_lengths_after_eos(torch.tensor([[1, 2]]), torch.tensor([2]), torch.arange(500))


def test_without_eos_no_token_ends_a_row():
    committed, _ = run_commit([[1]], [[9, 9]], [2], [9], eos=None)
    assert committed.num_emitted.tolist() == [3]
    assert committed.is_finished.tolist() == [False]


@pytest.mark.parametrize(("limit", "emitted"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3)])
def test_row_is_cut_and_finished_at_its_length_limit(limit, emitted):
    for max_lengths in (limit, [limit]):
        committed, ids = run_commit([[1]], [[3, 4]], [2], [5], max_lengths=max_lengths)
        assert committed.num_emitted.tolist() == [emitted]
        assert committed.is_finished.tolist() == [limit <= 4]
        assert ids[0, 1:].tolist() == [3, 4, 5][:emitted] + [PAD] * (7 - emitted)


def test_eos_beyond_the_length_limit_does_not_count():
    committed, ids = run_commit([[1, 1], [1]], [[3, 9]] * 2, [2, 2], [5, 5], max_lengths=[3, 3])
    assert committed.num_emitted.tolist() == [1, 2]
    assert committed.is_finished.tolist() == [True, True]
    assert ids[0, :4].tolist() == [1, 1, 3, PAD]


def test_finished_row_takes_nothing_and_keeps_its_text():
    committed, ids = run_commit([[1, 2], [1, 2]], [[3, 4]] * 2, [2, 1], [5, 9], finished=[True, False])
    assert committed.num_emitted.tolist() == [0, 2]
    assert committed.is_finished.tolist() == [True, True]
    assert ids[0].tolist() == [1, 2] + [PAD] * 6


@pytest.mark.parametrize("length", [5, 6, 7, 8])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_block_that_reaches_over_the_capacity_damages_nothing(length, accepted):
    text = list(range(10, 10 + length))
    committed, ids = run_commit([text], [[3, 4, 5]], [accepted], [6])
    expected = (text + [3, 4, 5][:accepted] + [6])[:8]
    assert ids[0].tolist() == expected + [PAD] * (8 - len(expected))
    assert committed.num_emitted.tolist() == [len(expected) - length]
    assert committed.is_finished.tolist() == [len(expected) == 8]


def test_step_without_a_draft_emits_one_token():
    committed, ids = run_commit([[1], [1]], [[], []], [0, 0], [5, 9], capacity=3, max_lengths=3)
    assert committed.num_emitted.tolist() == [1, 1]
    assert committed.is_finished.tolist() == [False, True]
    assert ids.tolist() == [[1, 5, PAD], [1, 9, PAD]]


def test_lengths_are_left_to_the_caller():
    ids, lengths = torch.zeros(1, 6, dtype=torch.long), torch.tensor([2])
    is_finished = torch.tensor([False])
    commit(ids, lengths, is_finished, torch.tensor([[3]]), torch.tensor([1]), torch.tensor([9]), EOS, torch.tensor(6))
    assert lengths.tolist() == [2]
    assert is_finished.tolist() == [False]


def test_drafting_ends_after_a_drafted_eos():
    ids = torch.tensor([[9, 1, 2], [1, 9, 9], [1, 2, 9], [1, 2, 3], [1, 9, 2], [9, 1, 2]])
    lengths = torch.tensor([3, 3, 3, 3, 1, 0])
    assert draft_lengths_after_eos(ids, lengths, EOS).tolist() == [1, 2, 3, 3, 1, 0]
    assert draft_lengths_after_eos(ids, lengths, None).tolist() == lengths.tolist()
    assert draft_lengths_after_eos(ids[:, :0], lengths * 0, EOS).tolist() == [0] * 6


def test_pack_puts_columns_side_by_side():
    packed = pack(torch.tensor([1, 2]), torch.tensor([[3, 4], [5, 6]]), torch.tensor([True, False]))
    assert packed.dtype == torch.int64
    assert packed.tolist() == [[1, 3, 4, 1], [2, 5, 6, 0]]


@pytest.mark.parametrize("vocab", [20, 1500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampling_and_commit_read_nothing_on_the_host(vocab, dtype):
    scores = torch.randn(3, 4, vocab).to(dtype)
    uniforms = torch.rand(3, 4, dtype=torch.float64)
    ids, lengths = torch.zeros(3, 9, dtype=torch.long), torch.tensor([1, 5, 6])
    is_finished, num_accepted = torch.tensor([False, True, False]), torch.tensor([1, 2, 3])
    max_lengths = torch.tensor(9)
    with ForbidHostReads():
        probs = softmax_probs(scores)
        drafted = draw(probs, uniforms)
        residual_probs(probs, probs.roll(1, -1))
        draft_lengths = draft_lengths_after_eos(drafted[:, :3], num_accepted, EOS)
        committed = commit(ids, lengths, is_finished, drafted[:, :3], num_accepted, drafted[:, 3], EOS, max_lengths)
        pack(draft_lengths, committed.num_emitted, committed.block_ids, committed.is_finished)


READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "mask assignment": lambda x: x.__setitem__(x > 1, x[:1]),
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x),
}


@pytest.mark.parametrize("name", READS)
def test_the_guard_sees_a_host_read(name):
    x = torch.tensor([1, 2, 3])
    READS[name](x)
    with pytest.raises(HostReadError), ForbidHostReads():
        READS[name](x)
    READS[name](x)
