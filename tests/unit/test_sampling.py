import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import sampling
from hf_specdec.sampling import draw, residual_probs, residual_weights, softmax_probs

ALMOST_ONE = 1.0 - 2.0**-53


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_before_the_softmax(dtype):
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    probs = softmax_probs(scores)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, torch.softmax(scores.float(), -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_scores_keep_their_dtype(dtype):
    assert softmax_probs(torch.zeros(2, 3, dtype=dtype)).dtype == dtype


def test_impossible_scores_have_probability_zero():
    assert softmax_probs(torch.tensor([0.0, -torch.inf, 0.0])).tolist() == [0.5, 0.0, 0.5]


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, ALMOST_ONE], dtype=torch.float64)
    assert draw(probs.expand(7, -1), uniforms).tolist() == [0, 0, 2, 2, 2, 3, 3]


def test_draw_keeps_leading_axes():
    probs = torch.rand(2, 3, 7)
    ids = draw(probs, torch.rand(2, 3, dtype=torch.float64))
    assert ids.shape == (2, 3)
    assert ids.dtype == torch.int64
    assert draw(probs[0, 0], torch.tensor(0.5)).shape == ()
    assert draw(probs[:0], torch.rand(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("vocab", [5, 1024, 1025, 5000])
def test_draw_takes_weights_that_do_not_sum_to_one(vocab):
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(40, vocab, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64)
    # A power of two scales every sum exactly.
    assert torch.equal(draw(weights, uniforms), draw(1024 * weights, uniforms))


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("vocab", [3, 700, 1500, 151_936])
def test_draw_never_returns_a_token_of_zero_probability(vocab, uniform):
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(50 if vocab < 2000 else 4, vocab, generator=generator)
    probs = torch.where(torch.rand(probs.shape, generator=generator) < 0.9, 0.0, probs)
    probs[:, vocab // 2] = 1e-30
    probs[0] = 0.0
    probs[0, vocab // 3] = 1e-45
    ids = draw(probs, torch.full(probs.shape[:1], uniform, dtype=torch.float64))
    assert (probs.gather(1, ids.unsqueeze(1)) > 0).all()
    assert ids[0] == vocab // 3


def test_draw_does_not_trust_the_cumulative_sum_to_be_monotone(monkeypatch):
    # Parallel scans on a GPU may raise the sum by a rounding at an id of weight 0.
    original = torch.Tensor.cumsum

    def rounded(self, *args, **kwargs):
        total = original(self, *args, **kwargs)
        return torch.where(self == 0, total * (1 + 1e-9), total)

    probs = torch.tensor([[0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", rounded)
    for uniform, expected in [(0.5, 2), (0.5 + 1e-10, 2), (ALMOST_ONE, 2), (0.4, 0)]:
        assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


def test_draw_returns_the_last_possible_token_when_the_uniform_rounds_to_one():
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    # A float32 uniform just below 1 times the total must not run over the end, nor an exact 1 from a careless caller.
    assert draw(probs, torch.tensor([1.0 - 2.0**-24])).tolist() == [1]
    assert draw(probs, torch.tensor([1.0])).tolist() == [1]


@pytest.mark.parametrize("vocab", [4, 3000])
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_draw_from_a_row_without_a_law_stays_inside_the_vocabulary(vocab, value):
    probs = torch.full((2, vocab), 1.0 / vocab)
    probs[0, vocab // 2 :] = value
    probs[0, 0] = value
    probs[1] = value
    for uniform in (0.0, 0.9, ALMOST_ONE):
        ids = draw(probs, torch.full((2,), uniform, dtype=torch.float64))
        assert ((ids >= 0) & (ids < vocab)).all()


def test_wide_vocabulary_gives_the_same_token_as_one_cumulative_sum():
    generator = torch.Generator().manual_seed(3)
    probs = torch.softmax(4 * torch.randn(64, 151_936, generator=generator), -1)
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    cumulative = probs.double().cumsum(-1)
    expected = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # Both sums are good to 1e-14; a breakpoint that close to one of 64 uniforms would be bad luck of order 1e-7.
    assert torch.equal(draw(probs, uniforms), expected)


@settings(deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.25, 1.0, 3.0]), min_size=1, max_size=12),
    uniform=st.floats(0, 1, exclude_max=True),
    block_width=st.integers(1, 4),
)
def test_two_level_search_agrees_with_one_level(weights, uniform, block_width):
    probs = torch.tensor([weights], dtype=torch.float64)
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    whole = draw(probs, uniforms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "BLOCK_WIDTH", block_width)
        by_blocks = draw(probs, uniforms)
    cumulative = probs.cumsum(-1)
    distance = (cumulative - uniform * cumulative[:, -1:]).abs().min()
    # Within rounding of a breakpoint either neighbour is right.
    if distance > 1e-14 * cumulative[0, -1]:
        assert torch.equal(whole, by_blocks)
    if any(weights):
        assert probs[0, whole[0]] > 0
        assert probs[0, by_blocks[0]] > 0


def test_draw_law_over_a_fine_grid_is_the_given_law():
    probs = torch.tensor([0.1, 0.0, 0.15, 0.05, 0.7], dtype=torch.float64)
    num = 100_000
    uniforms = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    counts = draw(probs.expand(num, -1), uniforms).bincount(minlength=5)
    # Every breakpoint misplaces at most one grid point.
    assert (counts - num * probs).abs().max() <= 1


def test_draw_accepts_probabilities_that_are_a_view():
    probs = torch.rand(3, 4, 6)
    uniforms = torch.rand(3, dtype=torch.float64)
    assert torch.equal(draw(probs[:, 2], uniforms), draw(probs[:, 2].clone(), uniforms))
    assert torch.equal(draw(probs[..., 1].T, torch.rand(4).double() * 0), torch.zeros(4, dtype=torch.long))


def test_residual_is_the_normalised_positive_part():
    residual = residual_probs(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1]))
    assert residual.tolist() == pytest.approx([0.75, 0.0, 0.25])


def test_residual_without_mass_is_the_target():
    target = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    residual = residual_probs(target, torch.tensor([[0.5, 0.5], [0.3, 0.8]]))
    assert torch.equal(residual, target)


def test_residual_scales_the_target_row_by_row():
    target = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    draft = torch.tensor([[0.2, 0.8], [0.2, 0.8]])
    weights = residual_weights(target, draft, torch.tensor([1.0, 0.25]))
    # The second row has no mass left: 0.125 is below both 0.2 and 0.8.
    assert weights.tolist() == [pytest.approx([0.3, 0.0]), [0.5, 0.5]]
