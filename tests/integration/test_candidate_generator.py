"""Can transformers' own assisted decoding use our drafters, and is it then still exact?"""

import pytest
import torch

import hf_specdec
from hf_specdec import SpeculativeCandidateGenerator, sampling
from hf_specdec.drafters import Draft, Drafter
from hf_specdec.registry import DRAFTERS
from tests.integration.pairs import VOCAB, llama, pair, prompts

NEW = 24


def assisted(target, draft, make, **options):
    """transformers' assisted decoding of `target` with the generator that `make` builds from the call's options."""
    generators = []

    def candidate_generator(generation_config, input_ids, logits_processor, **kwargs):
        generators.append(
            make(
                logits_processor=logits_processor,
                do_sample=bool(generation_config.do_sample),
                max_length=generation_config.max_length,
            )
        )
        return generators[-1]

    target._get_candidate_generator = candidate_generator
    try:
        return target.generate(assistant_model=draft, **options), generators
    finally:
        del target._get_candidate_generator


def ours(target, draft, **config):
    return lambda **options: SpeculativeCandidateGenerator(target, draft, **options, **config)


@pytest.mark.parametrize("num_draft", [1, 4, 7])
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}], ids=["bare", "penalties"]
)
def test_greedy_text_is_plains(num_draft, options, as_found):
    target, draft = pair()
    inputs = {**prompts(), "max_new_tokens": NEW, **options}
    plain = target.generate(**inputs)
    output, generators = assisted(target, draft, ours(target, draft, num_speculative_tokens=num_draft), **inputs)
    assert output.tolist() == plain.tolist()
    assert len(generators) == 1
    assert as_found()  # it needs no registration


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_look_ups_need_no_draft_and_follow_the_text(method):
    target, draft = pair()
    inputs = {**prompts(), "max_new_tokens": 3 * NEW}
    plain = target.generate(**inputs)
    make, lengths = ours(target, None, method=method, num_speculative_tokens=5), []

    def watched(**options):
        generator = make(**options)
        get_candidates = generator.get_candidates

        def counted(input_ids, **kwargs):
            ids, log_probs = get_candidates(input_ids, **kwargs)
            lengths.append(ids.shape[1] - input_ids.shape[1])
            return ids, log_probs

        generator.get_candidates = counted
        return generator

    output, _ = assisted(target, draft, watched, **inputs)
    assert output.tolist() == plain.tolist()
    assert max(lengths) == 5
    assert len(lengths) < 3 * NEW - 15  # with nothing to look up, every token takes a pass


def test_eos_ends_drafting_and_text():
    target, draft = pair()
    free = target.generate(**prompts(), max_new_tokens=NEW)
    eos = int(free[0, 12])
    inputs = {**prompts(), "max_new_tokens": NEW, "eos_token_id": eos}
    plain = target.generate(**inputs)
    output, _ = assisted(target, draft, ours(target, draft, eos_token_id=eos), **inputs)
    assert output.tolist() == plain.tolist()
    assert plain.shape[1] < free.shape[1]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_k": 8}], ids=["bare", "warped"])
def test_log_probs_are_of_the_very_law_that_tokens_are_drawn_from(options):
    target, draft = pair()
    ids = prompts(1, 6)["input_ids"]
    processors = target._get_logits_processor(
        target._prepare_generation_config(None, do_sample=True, **options)[0], input_ids_seq_length=6
    )
    tokens = set()
    with torch.no_grad():
        generator = SpeculativeCandidateGenerator(
            target, draft, do_sample=True, logits_processor=processors, num_speculative_tokens=3
        )
        for seed in range(60):
            torch.manual_seed(seed)
            candidates, log_probs = generator.get_candidates(ids)
            torch.manual_seed(seed)
            uniforms = torch.rand((1, 3), dtype=torch.float64)
            assert log_probs.shape == (1, 3, VOCAB)
            expected = [sampling.draw(log_probs[:, i].exp(), uniforms[:, i]).item() for i in range(3)]
            assert candidates[0, 6:].tolist() == expected
            tokens |= set(expected)
    assert len(tokens) > 5


def test_sampling_runs_inside_transformers_loop():
    target, draft = pair()
    torch.manual_seed(0)
    inputs = {**prompts(), "max_new_tokens": NEW, "do_sample": True, "top_k": 10}
    output, _ = assisted(target, draft, ours(target, draft), **inputs)
    assert output.shape == (1, 6 + NEW)


@torch.no_grad()
def test_state_follows_the_text_after_rejections():
    target, draft = pair()
    text = target.generate(**prompts(1, 6), max_new_tokens=50)
    kept, length, matches = SpeculativeCandidateGenerator(target, draft, num_speculative_tokens=4), 6, set()
    while length < 50:
        fresh = SpeculativeCandidateGenerator(target, draft, num_speculative_tokens=4)
        expected, _ = fresh.get_candidates(text[:, :length])
        candidates, _ = kept.get_candidates(text[:, :length])
        assert candidates.tolist() == expected.tolist()
        same = (candidates[0, length:] == text[0, length : length + 4]).long().cumprod(0).sum().item()
        matches.add(same)
        length += same + 1
    assert {0, 4} <= matches


@torch.no_grad()
def test_nothing_is_drafted_past_the_maximum_length():
    target, draft = pair()
    ids = prompts(1, 6)["input_ids"]
    generator = SpeculativeCandidateGenerator(target, draft, max_length=9, num_speculative_tokens=5)
    assert generator.get_candidates(ids)[0].shape == (1, 8)  # the last one is the target's
    assert generator.get_candidates(torch.cat([ids, ids[:, :2]], dim=1))[0].shape == (1, 8)


class RepeatLast(Drafter):
    """A third party's drafter: the last token again, a point mass."""

    def propose(self, sequence, draft_length, uniforms):
        ids = sequence.tail(1).expand(-1, draft_length).clone()
        return Draft(ids, None, torch.full((sequence.batch,), draft_length))


@pytest.fixture
def repeat_last():
    hf_specdec.register_drafter("repeat_last", RepeatLast)
    yield
    del DRAFTERS["repeat_last"]


@torch.no_grad()
def test_a_third_partys_drafter_is_a_point_mass_for_transformers(repeat_last):
    target = llama()
    ids = prompts(1, 6)["input_ids"]
    generator = SpeculativeCandidateGenerator(target, method="repeat_last", do_sample=True, num_speculative_tokens=3)
    candidates, log_probs = generator.get_candidates(ids)
    assert candidates[0, 6:].tolist() == [int(ids[0, -1])] * 3
    assert log_probs.exp().sum(-1).tolist() == [[1.0, 1.0, 1.0]]
    assert log_probs[0, :, ids[0, -1]].tolist() == [0.0, 0.0, 0.0]


def test_wrong_drafts_keys_and_batches_are_errors():
    target, draft = pair()
    with pytest.raises(ValueError, match="Did you mean 'num_speculative_tokens'"):
        SpeculativeCandidateGenerator(target, draft, num_speculative_token=3)
    with pytest.raises(
        TypeError, match="The draft must be a Hub id, a folder or a loaded PreTrainedModel, got NoneType"
    ):
        SpeculativeCandidateGenerator(target, method="draft_model")
    with pytest.raises(ValueError, match="padding explains"):
        SpeculativeCandidateGenerator(target, llama(vocab_size=2000))
    with pytest.raises(ValueError, match="takes one row at a time, got 2"):
        SpeculativeCandidateGenerator(target, draft).get_candidates(prompts(2)["input_ids"])
