"""Are unequal padded vocabularies of one tokenizer exact, either way round, and are different tokenizers refused?"""

import json

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoTokenizer, LogitsProcessor, PreTrainedTokenizerFast

import hf_specdec
from hf_specdec import sampling
from hf_specdec.drafters.model import ModelDrafter
from tests.integration.pairs import assert_as_plain, llama, pair, prompts, speculates

REAL = 60
LARGE, SMALL = 72, 64
FALSE_FAIL_RATE = 1e-6  # of the whole file's sampled tests
NUM_LAWS = 8


def resized(model, vocab_size):
    """`model` over another number of rows: the first `REAL` as they are, the others new."""
    other = llama(seed=11, vocab_size=vocab_size)
    with torch.no_grad():
        weights = dict(model.named_parameters())
        for name, weight in other.named_parameters():
            if weight.shape == weights[name].shape:
                weight.copy_(weights[name])
            else:
                weight[:REAL] = weights[name][:REAL]
    return other


def pair_of_sizes(target_size, draft_size, seed=0):
    """(target, noisy draft) that share the first `REAL` ids; the target uses its padding rows too."""
    target, draft = pair(seed, noise=0.14, vocab_size=max(target_size, draft_size))
    sized = [model if model.config.vocab_size == size else resized(model, size)
             for model, size in ((target, target_size), (draft, draft_size))]  # fmt: skip
    return sized[0], sized[1]


SIZES = [(LARGE, SMALL), (SMALL, LARGE)]


@pytest.mark.parametrize(("target_size", "draft_size"), SIZES)
def test_greedy_text_is_plains(target_size, draft_size):
    inputs = prompts(3, 8, vocab_size=REAL)
    rates = []
    for seed in range(2):
        target, draft = pair_of_sizes(target_size, draft_size, seed)
        plain = target.generate(**inputs, max_new_tokens=40)
        with hf_specdec.enable(target, draft, method="draft_model"):
            rates.append(assert_as_plain(target, plain, **inputs, max_new_tokens=40).acceptance_rate)
    assert 0.2 < sum(rates) / len(rates) < 0.8


def sampled_counts(target, prompt, **options):
    """[4, vocab] how often each token came up at each of four new positions, over many rows."""
    batch, repeats, vocab = 2000, 3, target.config.vocab_size
    ids = prompt.expand(batch, -1)
    counts = torch.zeros((4, vocab), dtype=torch.long)
    for _ in range(repeats):
        output = target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=True, **options
        )
        counts += torch.stack([torch.bincount(output[:, column], minlength=vocab) for column in range(-4, 0)])
    return counts


@torch.no_grad()
def exact_law(target, prompt, depth, temperature):
    """Law of new token number `depth` (from 0) in float64, summed over everything before it."""
    texts, weights = prompt, torch.ones(1, dtype=torch.float64)
    for _ in range(depth):
        probs = (target(texts).logits[:, -1].double() / temperature).softmax(-1)
        vocab = probs.shape[-1]
        texts = torch.cat([texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(texts))[:, None]], dim=1)
        weights = (weights[:, None] * probs).flatten()
        kept = weights > 0
        texts, weights = texts[kept], weights[kept]
    probs = (target(texts).logits[:, -1].double() / temperature).softmax(-1)
    return (weights[:, None] * probs).sum(0)


@pytest.mark.parametrize(("target_size", "draft_size"), SIZES)
@pytest.mark.parametrize("rule", ["block", "standard"])
def test_sampled_tokens_follow_the_targets_law(target_size, draft_size, rule):
    target, draft = pair_of_sizes(target_size, draft_size)
    prompt = prompts(1, 4, vocab_size=REAL)["input_ids"]
    temperature = 2.0  # padding rows get mass, so that target-only ids are drawn as well
    torch.manual_seed(17)
    with hf_specdec.enable(target, draft, num_speculative_tokens=2, rejection_sample_method=rule):
        counts = sampled_counts(target, prompt, temperature=temperature, top_k=0)
        report = speculates(target)
    assert 0.2 < report.acceptance_rate < 0.8
    if target_size > draft_size:
        assert counts[:, SMALL:].sum() > 50  # ids that the draft cannot propose
    for position in (1, 2):  # 0 comes from the prefill
        pvalue = chi_square(counts[position], exact_law(target, prompt, position, temperature))
        assert pvalue > FALSE_FAIL_RATE / NUM_LAWS, position


def chi_square(counts, law):
    """The p-value of `counts` under `law`; cells that expect fewer than five are one cell."""
    expected, observed = law * counts.sum(), counts.double()
    large = expected >= 5
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    observed = torch.cat([observed[large], observed[~large].sum()[None]])
    if expected[-1] < 5:  # too few even together: part of the largest cell
        top = int(expected.argmax())
        for cells in (expected, observed):
            cells[top] += cells[-1]
        expected, observed = expected[:-1], observed[:-1]
    return chisquare(observed.numpy(), (expected * observed.sum() / expected.sum()).numpy()).pvalue


def test_a_row_with_an_id_that_the_draft_cannot_embed_drafts_nothing_more():
    target, draft = pair_of_sizes(LARGE, SMALL)
    inputs = prompts(2, 8, vocab_size=REAL)
    inputs["input_ids"][1, 4] = SMALL + 3
    plain = target.generate(**inputs, max_new_tokens=20)
    with hf_specdec.enable(target, draft, method="draft_model"):
        report = assert_as_plain(target, plain, **inputs, max_new_tokens=20)
        both = report.drafted
        alone = target.generate(input_ids=inputs["input_ids"][:1], max_new_tokens=20)
        assert alone[0].tolist() == plain[0].tolist()
        # Row 1 ran one token a step and row 0 drafted all there was to draft.
        assert hf_specdec.report(target).drafted == both
        target.generate(
            input_ids=inputs["input_ids"][1:], attention_mask=inputs["attention_mask"][1:], max_new_tokens=20
        )
        report = hf_specdec.report(target)
        assert (report.reason, report.drafted, report.accepted) == (None, 0, 0)
        assert report.steps == 19


def test_a_row_that_emits_such_an_id_drafts_nothing_after_it():
    target, draft = pair_of_sizes(LARGE, SMALL)
    inputs = prompts(1, 6, vocab_size=REAL)
    with torch.no_grad():  # greedy text runs into an id that only the target has
        target.lm_head.weight[SMALL + 1] = (
            target.lm_head.weight[int(target.generate(**inputs, max_new_tokens=6, pad_token_id=0)[0, -1])] * 1.01
        )
    plain = target.generate(**inputs, max_new_tokens=30)
    first = next(i for i, token in enumerate(plain[0, 6:].tolist()) if token >= SMALL)
    with hf_specdec.enable(target, draft, method="draft_model"):
        report = assert_as_plain(target, plain, **inputs, max_new_tokens=30)
    assert first < 29
    assert report.steps >= 29 - first  # after it every token is a step of its own


def test_sizes_further_apart_than_padding_are_refused():
    target, draft = llama(vocab_size=40), llama(vocab_size=40 + 1025)
    with pytest.raises(ValueError, match=r"The target has 40 token rows and the draft 1,065; padding explains"):
        hf_specdec.enable(target, draft)
    with hf_specdec.register(), pytest.raises(ValueError, match="padding explains a difference of at most 1,024"):
        target.generate(**prompts(), assistant_model=draft, speculative_config=True, max_new_tokens=4)


def tokenizer(words, folder):
    """A word-level tokenizer saved into `folder`."""
    data = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": words[0]},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "raw.json").write_text(json.dumps(data))
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "raw.json"), unk_token=words[0]).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def with_tokenizer(model, words, folder):
    model.save_pretrained(folder)
    tokenizer(words, folder)
    return type(model).from_pretrained(folder).eval()


def test_different_tokenizers_are_refused_with_the_first_differing_id(tmp_path):
    words = [f"w{i}" for i in range(REAL)]
    swapped = [*words[:17], words[23], *words[18:23], words[17], *words[24:]]
    target, draft = pair_of_sizes(SMALL, LARGE)
    target = with_tokenizer(target, words, tmp_path / "target")
    unlike = with_tokenizer(draft, swapped, tmp_path / "unlike")
    with pytest.raises(ValueError, match=r"Target and draft disagree on token 17: 'w17' and 'w23'\. .* same tokenizer"):
        hf_specdec.enable(target, unlike)
    with hf_specdec.register(), pytest.raises(ValueError, match="disagree on token 17"):
        target.generate(**prompts(), assistant_model=unlike, speculative_config=True, max_new_tokens=4)
    like = with_tokenizer(draft, words[:50], tmp_path / "like")  # fewer added tokens are no difference
    plain = target.generate(**prompts(), max_new_tokens=12)
    with hf_specdec.enable(target, like):
        assert_as_plain(target, plain, **prompts(), max_new_tokens=12)


class Floor(LogitsProcessor):
    """Lifts −inf, so that ids which the draft does not have can be drawn from q."""

    position_wise = True

    def __call__(self, input_ids, scores):
        return scores.clamp(min=-2.0, max=2.0)


def test_drafted_token_is_the_one_drawn_where_a_processor_lifts_target_only_ids(monkeypatch):
    """It was once clamped to the last shared id after the draw: another law than q."""
    target, draft = pair_of_sizes(LARGE, SMALL)
    drafts, propose = [], ModelDrafter.propose

    def watched(self, sequence, draft_length, uniforms):
        drafts.append((propose(self, sequence, draft_length, uniforms), uniforms))
        return drafts[-1][0]

    monkeypatch.setattr(ModelDrafter, "propose", watched)
    with hf_specdec.enable(target, draft, method="draft_model"):
        target.generate(
            **prompts(8, 8, vocab_size=REAL), max_new_tokens=24, do_sample=True, top_k=0, logits_processor=[Floor()]
        )
    assert hf_specdec.report(target).reason is None
    assert any((made.token_ids >= SMALL).any() for made, _ in drafts)
    for made, uniforms in drafts:
        assert torch.equal(made.token_ids, sampling.draw(made.probs, uniforms))
