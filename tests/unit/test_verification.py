import pytest
import torch
from torch.nn import functional

from hf_specdec.registry import VERIFIERS
from hf_specdec.sampling import residual_probs
from hf_specdec.verification import (
    BlockVerifier,
    StandardVerifier,
    Verifier,
    _keep_probs,
    _prefix_probs,
    _probs_at_ids,
    verify_block,
    verify_greedy,
    verify_standard,
)
from tests.host_reads import ForbidHostReads

RULES = pytest.mark.parametrize("verify", [verify_standard, verify_block], ids=["standard", "block"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
ALMOST_ONE = 1.0 - 2.0**-53


def random_case(seed: int, batch: int = 64, width: int = 4, vocab: int = 7, dtype=torch.float32):
    """Probabilities, ids, lengths and uniforms of one step, all at random."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, width + 1, vocab, generator=generator, dtype=dtype).softmax(-1)
    draft = torch.randn(batch, width, vocab, generator=generator, dtype=dtype).softmax(-1)
    ids = torch.randint(vocab, (batch, width), generator=generator)
    lengths = torch.randint(width + 1, (batch,), generator=generator)
    uniforms = torch.rand(batch, width + 1, generator=generator, dtype=torch.float64)
    return target, draft, ids, lengths, uniforms


def one_row(target, draft, ids, coins, dtype=torch.float64):
    """One row from plain lists; the final coin is 0.5."""
    uniforms = torch.tensor([[*coins, 0.5]], dtype=torch.float64)
    draft_probs = None if draft is None else torch.tensor([draft], dtype=dtype)
    return torch.tensor([target], dtype=dtype), draft_probs, torch.tensor([ids]), torch.tensor([len(ids)]), uniforms


def looped_standard(target, draft, ids, lengths, uniforms) -> list[int]:
    """Algorithm 2 of Chen et al. 2023, token by token."""
    accepted = []
    for row, length in enumerate(lengths.tolist()):
        position = 0
        while position < length:
            x = ids[row, position]
            if not float(uniforms[row, position]) * float(draft[row, position, x]) < float(target[row, position, x]):
                break
            position += 1
        accepted.append(position)
    return accepted


def looped_block(target, draft, ids, lengths, uniforms) -> list[int]:
    """Algorithm 2 of Sun et al. 2024, token by token."""
    accepted = []
    for row, length in enumerate(lengths.tolist()):
        kept, prefix = 0, 1.0
        for i in range(1, length + 1):
            x = ids[row, i - 1]
            prefix = min(prefix * float(target[row, i - 1, x]) / float(draft[row, i - 1, x]), 1.0)
            keep = prefix
            if i < length:
                excess = float((prefix * target[row, i] - draft[row, i]).clamp(min=0).sum())
                keep = excess / (excess + 1 - prefix)
            if float(uniforms[row, i - 1]) < keep:
                kept = i
        accepted.append(kept)
    return accepted


@DTYPES
@pytest.mark.parametrize(
    ("verify", "looped"), [(verify_standard, looped_standard), (verify_block, looped_block)], ids=["standard", "block"]
)
def test_tensor_rule_equals_the_loop_of_the_paper(verify, looped, dtype):
    for seed in range(5):
        case = random_case(seed, dtype=dtype)
        assert verify(*case).num_accepted.tolist() == looped(*case)


@RULES
def test_point_mass_equals_one_hot_draft_probs(verify):
    target, _, ids, lengths, uniforms = random_case(1, dtype=torch.float64)
    one_hot = functional.one_hot(ids, 7).double()
    for short, full in zip(
        verify(target, None, ids, lengths, uniforms), verify(target, one_hot, ids, lengths, uniforms), strict=True
    ):
        assert torch.equal(short, full)


@RULES
def test_greedy_verification_equals_the_rule_between_point_masses(verify):
    generator = torch.Generator().manual_seed(2)
    target_ids = torch.randint(2, (64, 5), generator=generator)
    _, _, _, lengths, uniforms = random_case(2)
    ids = torch.randint(2, (64, 4), generator=generator)
    expected = verify(functional.one_hot(target_ids, 3).float(), None, ids, lengths, uniforms)
    for one, other in zip(verify_greedy(target_ids, ids, lengths), expected, strict=True):
        assert torch.equal(one, other)


@RULES
def test_a_batch_equals_its_rows(verify):
    case = random_case(3)
    whole = verify(*case)
    for row in range(len(case[0])):
        for one, other in zip(verify(*(part[row : row + 1] for part in case)), whole, strict=True):
            assert torch.equal(one, other[row : row + 1])


@RULES
def test_padding_beyond_a_row_has_no_influence(verify):
    target, draft, ids, lengths, uniforms = random_case(4)
    expected = verify(target, draft, ids, lengths, uniforms)
    is_padding = torch.arange(4) >= lengths.unsqueeze(1)
    ids = torch.where(is_padding, 0, ids)
    draft = torch.where(is_padding.unsqueeze(-1), torch.nan, draft)
    target = torch.where((torch.arange(5) > lengths.unsqueeze(1)).unsqueeze(-1), torch.nan, target)
    for one, other in zip(verify(target, draft, ids, lengths, uniforms), expected, strict=True):
        assert torch.equal(one, other)


@RULES
@DTYPES
def test_equal_probabilities_accept_everything(verify, dtype):
    target, _, ids, _, uniforms = random_case(5, dtype=dtype)
    uniforms[:32, :4] = ALMOST_ONE
    verdict = verify(target, target[:, :4].clone(), ids, torch.full((64,), 4), uniforms)
    assert verdict.num_accepted.tolist() == [4] * 64
    assert (verdict.accept_probs == 1).all()


def test_rejected_token_comes_from_residual():
    case = one_row([[0.1, 0.6, 0.3], [0.0, 0.0, 1.0]], [[0.8, 0.1, 0.1]], [0], [0.9])
    residual = residual_probs(torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.8, 0.1, 0.1]))
    assert residual.tolist() == pytest.approx([0, 5 / 7, 2 / 7])
    for uniform, expected in [(0.0, 1), (5 / 7 - 1e-9, 1), (5 / 7 + 1e-9, 2), (ALMOST_ONE, 2)]:
        case[-1][0, -1] = uniform
        verdict = verify_standard(*case)
        assert verdict.num_accepted.tolist() == [0]
        assert verdict.next_ids.tolist() == [expected]


@RULES
def test_bonus_token_comes_from_the_target_after_the_draft(verify):
    case = one_row([[0.9, 0.1], [0.25, 0.75]], [[0.9, 0.1]], [0], [0.5])
    for uniform, expected in [(0.0, 0), (0.2499, 0), (0.2501, 1)]:
        case[-1][0, -1] = uniform
        verdict = verify(*case)
        assert verdict.num_accepted.tolist() == [1]
        assert verdict.next_ids.tolist() == [expected]


@RULES
@pytest.mark.parametrize("width", [0, 3])
def test_row_without_a_draft_draws_from_the_target(verify, width):
    target, draft, ids, lengths, uniforms = random_case(6, width=width, dtype=torch.float64)
    lengths = torch.zeros_like(lengths)
    cumulative = target[:, 0].cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms[:, -1:].contiguous(), right=True).squeeze(1)
    for draft_probs in (draft, None):
        verdict = verify(target, draft_probs, ids, lengths, uniforms)
        assert verdict.num_accepted.tolist() == [0] * 64
        assert torch.equal(verdict.next_ids, expected)
        assert verdict.accept_probs.shape == (64, width)
        assert not verdict.accept_probs.any()
    assert verify_greedy(ids.new_zeros(64, width + 1), ids, lengths).next_ids.tolist() == [0] * 64


@RULES
@pytest.mark.parametrize("coin", [0.0, 0.5])
@pytest.mark.parametrize("draft_prob", [1.0, 0.5, 1e-320, 0.0])
def test_impossible_token_is_rejected_by_every_coin(verify, coin, draft_prob):
    target = [[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]
    case = one_row(target, [[draft_prob, 1 - draft_prob], [0.5, 0.5]], [0, 0], [coin, coin])
    verdict = verify(*case)
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.next_ids.tolist() == [1]
    assert verdict.accept_probs[0, 0] == 0


@RULES
def test_token_whose_draft_probability_underflowed_is_accepted(verify):
    # The token was drawn, then q was stored as 0: any positive p exceeds u * 0.
    case = one_row([[0.3, 0.7], [0.4, 0.6], [0.5, 0.5]], [[0.0, 1.0], [0.4, 0.6]], [0, 1], [ALMOST_ONE, ALMOST_ONE])
    verdict = verify(*case)
    assert verdict.num_accepted.tolist() == [2]
    assert verdict.accept_probs.tolist() == [[1.0, 1.0]]


@RULES
@DTYPES
def test_tiny_probabilities_do_not_break_the_ratio(verify, dtype):
    tiny = float(torch.finfo(dtype).tiny)
    case = one_row([[tiny, 1.0], [1.0, 0.0]], [[4 * tiny, 1.0]], [0], [0.2499], dtype)
    assert verify(*case).num_accepted.tolist() == [1]
    assert verify(*case).accept_probs.tolist() == [[0.25]]
    case[-1][0, 0] = 0.25
    assert verify(*case).num_accepted.tolist() == [0]


def test_residual_without_mass_falls_back_to_the_target():
    # p <= q everywhere by rounding, and a coin that rejects all the same.
    case = one_row([[0.25, 0.75], [1.0, 0.0]], [[0.25 + 1e-9, 0.75]], [0], [ALMOST_ONE])
    for uniform, expected in [(0.2, 0), (0.3, 1)]:
        case[-1][0, -1] = uniform
        verdict = verify_standard(*case)
        assert verdict.num_accepted.tolist() == [0]
        assert verdict.next_ids.tolist() == [expected]


@RULES
def test_accept_probs_are_the_capped_ratios_within_the_row(verify):
    target, draft, ids, lengths, uniforms = random_case(7)
    ratio = (target[:, :4] / draft).double().gather(2, ids.unsqueeze(-1)).squeeze(-1).clamp(max=1)
    expected = torch.where(torch.arange(4) < lengths.unsqueeze(1), ratio, 0.0)
    # The expectation divides in float32.
    torch.testing.assert_close(verify(target, draft, ids, lengths, uniforms).accept_probs, expected, atol=1e-6, rtol=0)


@RULES
@pytest.mark.parametrize("where", ["target", "draft", "both"])
def test_nan_neither_crashes_nor_leaves_the_vocabulary_nor_spreads(verify, where):
    target, draft, ids, lengths, uniforms = random_case(8)
    clean = verify(target, draft, ids, lengths, uniforms)
    if where != "draft":
        target[::2] = torch.nan
    if where != "target":
        draft[::2, 1:] = torch.nan
    verdict = verify(target, draft, ids, lengths, uniforms)
    assert ((verdict.num_accepted >= 0) & (verdict.num_accepted <= lengths)).all()
    assert ((verdict.next_ids >= 0) & (verdict.next_ids < 7)).all()
    assert verdict.accept_probs.isfinite().all()
    for one, other in zip(verdict, clean, strict=True):
        assert torch.equal(one[1::2], other[1::2])


@RULES
def test_ids_stay_inside_when_all_mass_is_gone(verify):
    target, draft, ids, lengths, uniforms = random_case(9)
    verdict = verify(torch.zeros_like(target), torch.zeros_like(draft), ids, lengths, uniforms)
    assert verdict.num_accepted.tolist() == [0] * 64
    assert ((verdict.next_ids >= 0) & (verdict.next_ids < 7)).all()


def test_block_rule_can_keep_a_token_that_the_standard_rule_rejects():
    # Token 1 is over-drafted (r = 0.5) and token 2 makes up for it (r = 2): the block as a whole is as likely in p.
    case = one_row([[0.4, 0.6], [0.8, 0.2], [1.0, 0.0]], [[0.8, 0.2], [0.4, 0.6]], [0, 0], [0.9, 0.9])
    assert verify_standard(*case).num_accepted.tolist() == [0]
    assert verify_block(*case).num_accepted.tolist() == [2]


def test_block_rule_has_no_nan_where_nothing_is_left_of_the_residual():
    target, _, ids, _, _ = random_case(12)
    draft = target[:, :4].clone()
    target_at, draft_at = _probs_at_ids(target, draft, ids)
    prefix_probs = _prefix_probs(target_at, draft_at)
    keep_probs = _keep_probs(target, draft, target_at, prefix_probs, torch.full((64,), 4))
    assert (prefix_probs == 1).all()
    assert (keep_probs == 1).all()


def test_block_rule_draws_from_the_scaled_residual():
    # p_1 = 0.5 keeps prefix 1 with a / (a + 1 - p_1), a = max(0.4 - 0.2, 0) + max(0.1 - 0.8, 0) = 0.2, so 2 / 7.
    case = one_row([[0.4, 0.6], [0.8, 0.2], [1.0, 0.0]], [[0.8, 0.2], [0.2, 0.8]], [0, 1], [2 / 7 - 1e-9, 0.9])
    verdict = verify_block(*case)
    assert verdict.num_accepted.tolist() == [1]
    assert verdict.next_ids.tolist() == [0]
    case[-1][0, 0] = 2 / 7 + 1e-9
    assert verify_block(*case).num_accepted.tolist() == [0]


def test_float32_and_float64_probabilities_decide_alike():
    target, draft, ids, lengths, uniforms = random_case(10)
    for verify in (verify_standard, verify_block):
        narrow = verify(target, draft, ids, lengths, uniforms)
        wide = verify(target.double(), draft.double(), ids, lengths, uniforms)
        # Thresholds differ by 1e-7; none of these few hundred coins of this seed lies that close.
        assert torch.equal(narrow.num_accepted, wide.num_accepted)
        assert torch.equal(narrow.next_ids, wide.next_ids)


@RULES
@pytest.mark.parametrize("width", [0, 4])
def test_verification_reads_nothing_on_the_host(verify, width):
    target, draft, ids, lengths, uniforms = random_case(11, width=width, vocab=1500)
    with ForbidHostReads():
        verify(target, draft, ids, lengths, uniforms)
        verify(target, None, ids, lengths, uniforms)
        verify_greedy(target.argmax(-1), ids, lengths)


def test_rules_are_registered_by_name():
    assert VERIFIERS["standard"] is StandardVerifier
    assert VERIFIERS["block"] is BlockVerifier


def test_verifier_is_an_interface():
    with pytest.raises(TypeError, match="abstract"):
        Verifier()  # pyright: ignore[reportAbstractUsage]
