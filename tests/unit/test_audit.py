"""Does the audit pass a faultless pair whatever the seed, and fail a rigged one, whatever is rigged?"""

import json
from dataclasses import replace

import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, LogitsProcessorList, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.audit import Divergence, run_audit
from hf_specdec.audit.greedy import EXACT_BOUND, noise_bound
from hf_specdec.audit.gtest import LawCounts, chi_square_at, g_test
from hf_specdec.audit.observer import CONTROLS
from hf_specdec.audit.sampled import FALSE_ALARM_RATE, NUM_TESTS, REJECT_BELOW
from hf_specdec.cli import app
from hf_specdec.drafters.base import Draft, Drafter
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.host.oracle import call_processors, later_probs
from hf_specdec.registry import DRAFTERS, VERIFIERS
from hf_specdec.verification import BlockVerifier, Verifier
from tests.integration.pairs import VOCAB, llama, noisy_copy, pair

FALSE_FAIL_RATE = 20 * FALSE_ALARM_RATE  # of the twenty seeds; they are fixed
PROMPTS = [[5, 3, 9, 12], [7, 7, 2, 30, 11, 4], [22]]
NAMES = ["speculates", "greedy text", "sampled law", "negative control", "draft law", "vocabulary", "zero residual",
         "seeded replay"]  # fmt: skip
SIZES = {"max_new_tokens": 16, "num_samples": 768, "num_speculative_tokens": 3}
RIGGED = "rigged by the tests"


def audited(target, draft, prompts=PROMPTS, **options):
    return run_audit(target, draft, [torch.tensor(prompt) for prompt in prompts], **{**SIZES, **options})


def failed(result):
    return [check.name for check in result.checks if not check.is_passed]


# --- the true pair --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target's folder, draft's folder), with a tokenizer whose words are w0, w1, …"""
    home = tmp_path_factory.mktemp("pair")
    words = {f"w{i}": i for i in range(VOCAB)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    for name, model in zip(("target", "draft"), pair(), strict=True):
        model.save_pretrained(home / name)
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w0").save_pretrained(home / name)
    (home / "prompts.txt").write_text("\n".join(" ".join(f"w{i}" for i in prompt) for prompt in PROMPTS) + "\n\n")
    return home


def specdec_audit(folders, *options):
    arguments = ["--target", str(folders / "target"), "--draft", str(folders / "draft"), "--max-new-tokens", "16"]
    arguments += ["--prompts", str(folders / "prompts.txt"), "--num-speculative-tokens", "3", "--samples", "768"]
    return CliRunner().invoke(app, ["audit", *arguments, *options])


@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 20), marks=pytest.mark.slow)], ids=str)
def test_true_pair_exits_0_whatever_the_seed(folders, seed):
    for each in [seed] if isinstance(seed, int) else seed:
        done = specdec_audit(folders, "--seed", str(each), "--json")
        assert done.exit_code == 0, (each, done.output)
        data = json.loads(done.stdout)
        assert data["is_passed"]
        assert [check["name"] for check in data["checks"]] == NAMES
        assert data["divergences"] == []
        assert data["setting"]["seed"] == each
        assert 0.2 < data["checks"][0]["facts"]["acceptance_rate"] < 0.8


@pytest.mark.parametrize("rule", [pytest.param("standard", marks=pytest.mark.slow), "block"])
@pytest.mark.parametrize("control", CONTROLS)
def test_both_rules_pass_and_every_control_is_caught(rule, control):
    result = audited(*pair(), rejection_sample_method=rule, control=control, num_samples=1024)
    assert failed(result) == []
    assert result.check("negative control").facts["control"] == control


@pytest.mark.slow
def test_audit_leaves_nothing_behind():
    target, draft = pair()
    verifiers, config = dict(VERIFIERS), target.generation_config.to_dict()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    audited(target, draft, num_samples=64)
    assert torch.equal(torch.rand(3), expected)
    assert expected.shape == (3,)
    assert dict(VERIFIERS) == verifiers
    assert target.generation_config.to_dict() == config
    assert "_get_logits_processor" not in vars(target)


@pytest.mark.slow
def test_pair_with_other_vocabulary_sizes_and_an_end_of_text_passes():
    target, draft = llama(vocab_size=48), llama(vocab_size=44)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            whole = dict(target.named_parameters())[name]
            weight.copy_(whole[: len(weight)])
    target.generation_config.eos_token_id = [4, 9]
    result = audited(target, noisy_copy(draft), num_samples=1536)
    assert failed(result) == []
    assert result.check("vocabulary").facts["shared_size"] == 44


@pytest.mark.slow
def test_bfloat16_pair_passes_and_margins_are_within_rounding():
    target, draft = pair()
    result = audited(target.to(torch.bfloat16), draft.to(torch.bfloat16), max_new_tokens=48)
    assert failed(result) == []
    assert all(divergence.is_near_tie for divergence in result.divergences)


# --- rigged pairs ---------------------------------------------------------------------------------------------------


class GreedyDrafter(ModelDrafter):
    """Takes q's best token and says that it was drawn from q."""

    def propose(self, sequence, draft_length, uniforms):
        return super().propose(sequence, draft_length, torch.zeros_like(uniforms))


class SharperDrafter(ModelDrafter):
    """Reports q before a temperature under which it drew."""

    def propose(self, sequence, draft_length, uniforms):
        draft = super().propose(sequence, draft_length, uniforms)
        if draft.probs is None:
            return draft
        flat = draft.probs.sqrt()
        return replace(draft, probs=flat / flat.sum(dim=-1, keepdim=True))


class ForeignDrafter(ModelDrafter):
    """Draws ids that the draft does not have."""

    def propose(self, sequence, draft_length, uniforms):
        draft = super().propose(sequence, draft_length, uniforms)
        return replace(draft, token_ids=draft.token_ids.clone().fill_(self.request.vocab_size - 1))


class Forgetful(Drafter):
    """Draws from a generator of its own, whatever the seed is."""

    generator = torch.Generator()

    def propose(self, sequence, draft_length, uniforms):
        ids = torch.randint(0, VOCAB, (sequence.batch, draft_length), generator=self.generator)
        return Draft(ids, None, torch.full_like(sequence.lengths, draft_length))


class RefusesAlmostOne(Verifier):
    """Right but at the largest coin."""

    def __call__(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms):
        return BlockVerifier()(target_probs, draft_probs, draft_ids, draft_lengths, (uniforms * 1.2).clamp(max=1.0))


@pytest.fixture
def rigged():
    """Registers a drafter or a verifier under the name `RIGGED`."""
    yield lambda table, cls: table.__setitem__(RIGGED, cls)
    DRAFTERS.pop(RIGGED, None)
    VERIFIERS.pop(RIGGED, None)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [GreedyDrafter, SharperDrafter])
def test_drafter_whose_q_is_not_what_it_drew_from_exits_1(drafter, folders, rigged):
    rigged(DRAFTERS, drafter)
    done = specdec_audit(folders, "--method", RIGGED, "--json")
    assert done.exit_code == 1
    wrong = {check["name"] for check in json.loads(done.stdout)["checks"] if not check["is_passed"]}
    assert {"sampled law", "draft law"} <= wrong


@pytest.mark.parametrize("name", CONTROLS)
def test_wrong_verifier_exits_1(name, folders, rigged):
    class Wrong(Verifier):
        def __call__(self, *arguments):
            return CONTROLS[name](BlockVerifier())(*arguments)

    rigged(VERIFIERS, Wrong)
    done = specdec_audit(folders, "--rejection-sample-method", RIGGED)
    assert done.exit_code == 1
    assert "FAILED" in done.stdout
    assert "sampled law" in done.stdout


@pytest.mark.slow
def test_verifier_that_refuses_a_token_with_p_equal_q_fails_the_zero_residual_probe(rigged):
    rigged(VERIFIERS, RefusesAlmostOne)
    assert "zero residual" in failed(audited(*pair(), rejection_sample_method=RIGGED))


@pytest.mark.slow
def test_drafter_of_foreign_ids_fails_the_vocabulary_probe(rigged):
    rigged(DRAFTERS, ForeignDrafter)
    draft = llama(vocab_size=VOCAB - 4)
    assert "vocabulary" in failed(audited(llama(), draft, method=RIGGED))


@pytest.mark.slow
def test_drafter_with_randomness_of_its_own_fails_the_replay(rigged):
    rigged(DRAFTERS, Forgetful)
    result = audited(llama(), None, method=RIGGED)
    assert "seeded replay" in failed(result)
    assert result.check("sampled law").is_passed  # the law is right, whatever a drafter proposes
    assert result.check("draft law").facts == {}


class WidthMatters(LlamaForCausalLM):
    """A block of several tokens gives other scores than one token: what a wrong mask does."""

    __module__ = LlamaForCausalLM.__module__  # passes for the family, which is not tried before it is trusted

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if 1 < input_ids.shape[1] <= 4:
            output.logits = output.logits.roll(1, dims=-1)
        return output


WidthMatters.forward.__wrapped__ = LlamaForCausalLM.forward  # the signature that transformers asks for


def test_target_whose_scores_depend_on_the_block_fails_and_the_divergence_is_shown():
    target, draft = pair()
    target.__class__ = WidthMatters
    result = audited(target, draft, prompts=[PROMPTS[1], PROMPTS[1][::-1]])
    assert {"greedy text", "sampled law"} <= set(failed(result))
    first = result.divergences[0]
    assert first.batch == 1
    assert first.row == 0
    assert first.plain_logit > first.speculative_logit
    assert str(first.plain_id) in str(first)
    assert f"position {first.position}" in str(first)


def test_draft_that_is_the_target_gives_no_power():
    target = llama()
    result = audited(target, target)
    assert failed(result) == ["negative control"]
    assert result.check("negative control").summary.startswith("No power: ")
    assert "The draft hardly differs from the target" in result.check("negative control").summary


def test_too_small_a_sample_says_how_many_are_needed():
    result = audited(*pair(), num_samples=96)
    assert failed(result) == ["negative control"]
    assert "Try --samples " in result.check("negative control").summary


def test_pair_that_does_not_speculate_fails(rigged):
    result = audited(*pair(), prompts=[[5, 6]], max_new_tokens=4, num_samples=16)
    assert result.checks[0].is_passed
    target, draft = pair()
    target.generation_config.use_cache = False
    result = audited(target, draft)
    assert [check.name for check in result.checks] == ["speculates"]
    assert "use_cache=False" in result.checks[0].summary
    assert not result.is_passed


def test_bad_input_has_one_clear_message(folders, tmp_path):
    with pytest.raises(ValueError, match="at least one prompt"):
        run_audit(*pair(), [])
    with pytest.raises(ValueError, match=r"Unknown control 'none'\. Available: resample from p, always accept"):
        run_audit(*pair(), [torch.tensor([1])], control="none")
    (tmp_path / "empty.txt").write_text("\n")
    done = specdec_audit(folders, "--prompts", str(tmp_path / "empty.txt"))
    assert done.exit_code == 1
    assert "holds no prompts" in done.output


# --- the parts ------------------------------------------------------------------------------------------------------


def test_noise_bound_is_a_tie_in_float32_and_a_few_units_below():
    assert noise_bound(torch.float32, False, 30.0) == noise_bound(torch.float64, False, 30.0) == EXACT_BOUND
    assert noise_bound(torch.bfloat16, False, 16.0) == 4 * 16 * 2**-7
    assert noise_bound(torch.float16, False, 16.0) == 4 * 16 * 2**-10
    assert noise_bound(torch.float16, True, 16.0) == noise_bound(torch.float32, True, 16.0) == 4 * 16 * 2**-7


def test_a_wide_gap_is_no_tie_even_where_plains_own_margin_is_narrow():
    tie = Divergence(1, 0, 3, 5, 6, 2.0, 1.99, 0.01, 0.1)
    assert tie.is_near_tie
    assert not replace(tie, speculative_logit=-4.0).is_near_tie
    assert not replace(tie, margin=0.2).is_near_tie
    assert not replace(tie, speculative_logit=float("nan")).is_near_tie


def test_thresholds_share_the_stated_rate():
    assert pytest.approx(FALSE_ALARM_RATE) == NUM_TESTS * REJECT_BELOW


@pytest.mark.parametrize("cells", [2, 7, 40])
def test_g_test_agrees_with_scipy(cells):
    generator = torch.Generator().manual_seed(cells)
    expected = torch.rand(cells, generator=generator, dtype=torch.float64) * 500 + 100
    observed = torch.multinomial(expected, int(expected.sum()), replacement=True, generator=generator)
    observed = torch.bincount(observed, minlength=cells).double()
    expected *= observed.sum() / expected.sum()
    statistic, freedom, p = g_test(observed, expected)
    known = stats.power_divergence(observed, expected, lambda_="log-likelihood")
    assert freedom == cells - 1
    assert statistic == pytest.approx(known.statistic, rel=0.01)  # Williams' correction
    assert p == pytest.approx(known.pvalue, rel=0.05)
    assert chi_square_at(1e-7, freedom) == pytest.approx(stats.chi2.isf(1e-7, freedom))


def test_rare_cells_are_pooled_and_one_cell_proves_nothing():
    expected = torch.tensor([1000.0, 30.0, 20.0, 6.0, 0.0], dtype=torch.float64)
    assert g_test(expected, expected)[1] == 2
    observed = torch.tensor([1000.0, 30.0, 20.0, 0.0, 6.0], dtype=torch.float64)
    assert g_test(observed, expected)[2] > 0.99
    assert g_test(expected[2:4], expected[2:4]) == (0.0, 0, 1.0)
    assert g_test(torch.full((9,), 20.0).double(), torch.full((9,), 20.0).double())[1] == 3


def random_laws(n, seed):
    generator = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn((n, 30), generator=generator)).softmax(dim=-1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]


def test_p_values_of_right_laws_are_not_too_small_and_of_wrong_ones_are():
    lowest = []
    for seed in range(200):
        counts, (probs, drawn) = LawCounts(), random_laws(600, seed)
        counts.add(probs, drawn, probs.roll(1, dims=1))
        lowest.append([p for _, _, p in counts.tests().values()])
    assert len(lowest[0]) == 3
    below = (torch.tensor(lowest) < 0.05).double().mean(dim=0)
    assert below.max() < 0.11  # 200 draws of a rate of 0.05: 0.11 is four standard deviations above
    counts, (probs, drawn) = LawCounts(), random_laws(600, 0)
    counts.add((probs + 0.3 * probs.roll(1, dims=1)) / 1.3, drawn, probs)
    assert min(p for _, _, p in counts.tests().values()) < REJECT_BELOW


@pytest.mark.parametrize(
    "options",
    [
        {"forced_eos_token_id": 5},
        pytest.param({"min_new_tokens": 4, "eos_token_id": 5}, marks=pytest.mark.slow),
        pytest.param({"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 5}, marks=pytest.mark.slow),
    ],
    ids=lambda options: next(iter(options)),
)
def test_true_pair_passes_with_processors_that_look_at_the_length(options):
    """The law was once computed for a text of one new token, whose forced end stood elsewhere."""
    target, draft = pair()
    for name, value in options.items():
        setattr(target.generation_config, name, value)
    assert failed(audited(target, draft)) == []


def test_oracle_gives_the_processed_law_of_every_prefix():
    target = llama()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 3, 3, 20, 1]])
    options = {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3, "pad_token_id": 0}
    with hf_specdec.register():
        processors = call_processors(target, ids[:1, :2], {**options, "max_new_tokens": 4})
        probs = later_probs(target, ids, 4, processors)
        for column in range(3, 6):
            prefix = ids[:, :column]
            inputs = {"input_ids": prefix, "attention_mask": torch.ones_like(prefix), "max_new_tokens": 1}
            flags = {"return_dict_in_generate": True, "output_scores": True}
            scores = target.generate(**inputs, **options, **flags).scores[0]
            assert torch.allclose(probs[:, column - 3], scores.softmax(dim=-1), atol=1e-5)
    as_draft = later_probs(target, ids, 4, LogitsProcessorList(), VOCAB + 3)
    assert as_draft.shape[2] == VOCAB + 3
    assert as_draft[..., VOCAB:].sum() == 0
