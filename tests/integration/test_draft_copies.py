"""Does a call that drafts with the plugin's own copy of the draft give plain's text, and say what it made?"""

import gc
import json
import re
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, RepetitionPenaltyLogitsProcessor

import hf_specdec
from hf_specdec.host.draft_copy import kept_ids, own_copy
from tests import zoo
from tests.integration.pairs import VOCAB, assert_as_plain, llama, noisy_copy, pair, prompts, speculates

SHORT = 24
FLAGS = {
    "short list": {"draft_vocab": SHORT},
    "int8": {"draft_quantization": "int8"},
    "nf4": {"draft_quantization": "nf4"},
    "int8, short list": {"draft_quantization": "int8", "draft_vocab": SHORT},
    "nf4, short list": {"draft_quantization": "nf4", "draft_vocab": SHORT},
}
COPIES = pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)

pytestmark = [
    # bitsandbytes speaks of what it may do later
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def needs(flag):
    if flag.get("draft_quantization") == "nf4":
        pytest.importorskip("bitsandbytes")


def made_pair(**changes):
    return pair(0, hidden_size=64, **changes)


@COPIES
@pytest.mark.parametrize("is_tied", [True, False])
def test_greedy_text_is_plains_in_a_padded_batch(flag, is_tied):
    needs(flag)
    target, draft = made_pair(tie_word_embeddings=is_tied)
    inputs = prompts(3, 8)
    plain = target.generate(**inputs, max_new_tokens=40)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3, **flag):
        assert assert_as_plain(target, plain, **inputs, max_new_tokens=40).accepted > 0


@COPIES
def test_greedy_text_is_plains_with_processors(flag):
    needs(flag)
    target, draft = made_pair()
    inputs = prompts(2, 8)
    options = {"max_new_tokens": 30, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    plain = target.generate(**inputs, **options)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3, **flag):
        assert_as_plain(target, plain, **inputs, **options)


def test_tokens_outside_the_short_list_come_from_the_target():
    target, draft = made_pair(tie_word_embeddings=True)
    inputs = prompts(3, 8)
    plain = target.generate(**inputs, max_new_tokens=30)
    text = set(plain[:, 8:].flatten().tolist())
    with hf_specdec.enable(target, draft, num_speculative_tokens=3, draft_vocab=4):
        report = assert_as_plain(target, plain, **inputs, max_new_tokens=30)
    assert len([token for token in text if token >= 4]) > 3
    assert report.drafted > 0


@pytest.mark.parametrize("target_size", [VOCAB + 6, VOCAB - 6])
def test_short_lists_work_between_padded_vocabularies(target_size):
    target, inputs = llama(hidden_size=64, vocab_size=target_size), prompts(3, 8, vocab_size=VOCAB - 6)
    draft = noisy_copy(llama(hidden_size=64, vocab_size=VOCAB))
    plain = target.generate(**inputs, max_new_tokens=20)
    with hf_specdec.enable(target, draft, draft_vocab=VOCAB - 3, num_speculative_tokens=2):
        assert_as_plain(target, plain, **inputs, max_new_tokens=20)
        target.generate(**inputs, max_new_tokens=20, do_sample=True, top_k=0)
        speculates(target)


def test_a_short_list_that_is_certain_of_nothing_else_is_drawn_from(monkeypatch):
    """Without processors only the short list is drawn from; q is that very law, and 0 elsewhere."""
    from hf_specdec import sampling
    from hf_specdec.drafters.model import ModelDrafter

    drafts, propose = [], ModelDrafter.propose

    def watched(self, sequence, draft_length, uniforms):
        drafts.append((propose(self, sequence, draft_length, uniforms), uniforms))
        return drafts[-1][0]

    monkeypatch.setattr(ModelDrafter, "propose", watched)
    target, draft = made_pair()
    with hf_specdec.enable(target, draft, draft_vocab=SHORT, num_speculative_tokens=3, method="draft_model"):
        target.generate(**prompts(4, 8), max_new_tokens=20, do_sample=True, top_k=0)
        speculates(target)
        kept = kept_ids(own_copy(draft, hf_specdec.SpeculativeConfig(draft_vocab=SHORT), target))
    is_kept = torch.zeros(VOCAB, dtype=torch.bool)
    is_kept[kept] = True
    assert drafts
    for made, uniforms in drafts:
        assert is_kept[made.token_ids].all()
        assert (made.probs[..., ~is_kept] == 0).all()
        torch.testing.assert_close(made.probs.sum(-1), torch.ones(made.probs.shape[:2]))
        assert torch.equal(made.token_ids, sampling.draw(made.probs, uniforms))


class Lift(LogitsProcessor):
    """Lifts −inf, so that q is positive on every id."""

    position_wise = True

    def __call__(self, input_ids, scores):
        return scores.clamp(min=-2.0, max=2.0)


def test_processors_see_scores_of_all_ids():
    target, draft = made_pair()
    with hf_specdec.enable(target, draft, draft_vocab=4, num_speculative_tokens=3):
        processors = [Lift(), RepetitionPenaltyLogitsProcessor(1.2)]
        target.generate(**prompts(4, 8), max_new_tokens=20, do_sample=True, top_k=0, logits_processor=processors)
        assert speculates(target).accepted > 0


# Experts in one tensor, and Falcon's own subclass of a linear layer.
NOT_CONVERTED = {"Falcon", "Falcon-ALiBi", "GPT-OSS", "Mixtral", "Qwen2-MoE", "Qwen3-MoE"}


@pytest.mark.slow
@pytest.mark.parametrize("flag", [{"draft_vocab": 32}, {"draft_quantization": "int8"}], ids=str)
@pytest.mark.parametrize("name", [each.name for each in zoo.FAMILIES if each.reason is None])
def test_drafts_of_every_family_can_be_copied(name, flag):
    target, draft = zoo.pair(name)
    if name in NOT_CONVERTED and "draft_quantization" in flag:
        with pytest.raises(ValueError, match="are not in linear layers"):
            hf_specdec.enable(target, draft, **flag)
        return
    inputs = zoo.prompts((8, 6, 7))
    plain = target.generate(**inputs, max_new_tokens=20)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3, **flag):
        report = assert_as_plain(target, plain, **inputs, max_new_tokens=20)
    assert report.accepted > 0
    assert not [note for note in report.notes if "Decoded plainly" in note]


# --- what the user sees -----------------------------------------------------------------------------------------------


def test_what_was_made_stands_in_every_report_and_is_made_once():
    target, draft = made_pair()
    with hf_specdec.enable(target, draft, draft_quantization="int8", num_speculative_tokens=2):
        notes = []
        for _ in range(2):
            target.generate(**prompts(), max_new_tokens=8)
            notes.append(speculates(target).notes)
    assert notes[0] == notes[1]
    assert re.match(r"^Draft converted to int8 in \d+\.\d s, \d+\.\d MiB\.$", notes[0][0])


def test_the_call_may_ask_for_a_copy_or_for_none():
    target, draft = made_pair()
    with hf_specdec.enable(target, draft, draft_vocab=SHORT, num_speculative_tokens=2):
        target.generate(**prompts(), max_new_tokens=8, speculative_config={"draft_vocab": 30})
        assert speculates(target).notes[0].startswith("Draft cut to 30 of 40 ids")
    with hf_specdec.register():
        flag = {"draft_quantization": "int8", "num_speculative_tokens": 2}
        target.generate(**prompts(), max_new_tokens=8, assistant_model=draft, speculative_config=flag)
        assert speculates(target).notes[0].startswith("Draft converted to int8")


def test_a_named_draft_is_converted_too(tmp_path):
    target, draft = made_pair()
    target.save_pretrained(tmp_path)
    draft.save_pretrained(tmp_path / "draft")
    target = type(target).from_pretrained(tmp_path).eval()
    plain = target.generate(**prompts(), max_new_tokens=12)
    flag = {"model": "draft", "draft_quantization": "int8", "num_speculative_tokens": 2}
    with hf_specdec.register():
        options = {**prompts(), "max_new_tokens": 12}
        for _ in range(2):
            assert target.generate(**options, speculative_config=flag).tolist() == plain.tolist()
            assert speculates(target).notes[0].startswith("Draft converted to int8")
    with hf_specdec.enable(target, str(tmp_path / "draft"), draft_vocab=SHORT, num_speculative_tokens=2):
        assert_as_plain(target, plain, **prompts(), max_new_tokens=12)


def test_a_quantized_draft_can_have_a_short_list(tmp_path):
    pytest.importorskip("bitsandbytes")
    target, draft = made_pair()
    draft.save_pretrained(tmp_path)
    plain = target.generate(**prompts(2, 8), max_new_tokens=20)
    flag = {"quantization": "nf4", "draft_vocab": SHORT, "num_speculative_tokens": 2}
    with hf_specdec.enable(target, tmp_path, **flag):
        assert assert_as_plain(target, plain, **prompts(2, 8), max_new_tokens=20).accepted > 0
    with pytest.raises(ValueError, match="is quantized already"):
        hf_specdec.enable(target, tmp_path, quantization="nf4", draft_quantization="int8")


def test_the_target_may_be_its_own_draft():
    target = llama(hidden_size=64)
    plain = target.generate(**prompts(2, 8), max_new_tokens=30)
    with hf_specdec.enable(target, target, draft_quantization="int8", num_speculative_tokens=3):
        assert assert_as_plain(target, plain, **prompts(2, 8), max_new_tokens=30).acceptance_rate > 0.8


def test_keys_kept_beside_a_cache_serve_the_next_turn():
    target, draft = made_pair()
    inputs = prompts(1, 8)
    with hf_specdec.enable(target, draft, draft_quantization="int8", num_speculative_tokens=3, method="draft_model"):
        first = target.generate(**inputs, max_new_tokens=10, return_dict_in_generate=True)
        cache, text = first.past_key_values, first.sequences
        memory = hf_specdec.host.binding.draft_memories[cache]
        assert memory.model() is own_copy(draft, hf_specdec.SpeculativeConfig(draft_quantization="int8"), target)
        longer = torch.cat([text, inputs["input_ids"][:, :3]], dim=1)
        plain = target.generate(longer, max_new_tokens=10, speculative_config=False)
        again = target.generate(longer, past_key_values=cache, max_new_tokens=10)
        assert again.tolist() == plain.tolist()
        assert speculates(target).accepted > 0


def test_candidates_come_from_the_copy():
    target, draft = made_pair()
    generator = hf_specdec.SpeculativeCandidateGenerator(
        target, draft, method="draft_model", draft_vocab=4, num_speculative_tokens=3, do_sample=True
    )
    ids, log_probs = generator.get_candidates(prompts(1, 8)["input_ids"])
    assert (ids[0, 8:] < 4).all()
    assert (log_probs[..., 4:] == -torch.inf).all()


def test_models_and_copies_go_when_nobody_holds_them():
    target, draft = made_pair()
    with hf_specdec.enable(target, draft, draft_quantization="int8", num_speculative_tokens=2):
        target.generate(**prompts(), max_new_tokens=6)
    copied = own_copy(draft, hf_specdec.SpeculativeConfig(draft_quantization="int8"), target)
    watches = [weakref.ref(each) for each in (target, draft, copied)]
    del target, draft, copied
    gc.collect()
    assert [watch() for watch in watches] == [None] * 3


# --- files of counts --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with counts in it, and counts beside it."""
    target, draft = made_pair()
    target.save_pretrained(tmp_path / "home")
    draft.save_pretrained(tmp_path / "home" / "draft")
    for path in (tmp_path / "counts.json", tmp_path / "home" / "counts.json"):
        path.write_text(json.dumps({str(token): 1 for token in range(SHORT)}))
    return tmp_path / "home"


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def with_flag(folder, **flag):
    """The checkpoint with a flag in its generation_config.json."""
    path = folder / "generation_config.json"
    data = json.loads(path.read_text())
    data.pop("_from_model_config", None)  # transformers drops what does not come from there
    flag = {"model": "draft", "method": "draft_model", "num_speculative_tokens": 2, **flag}
    path.write_text(json.dumps(data | {"speculative_config": flag}))
    return loaded(folder)


def test_a_path_in_code_may_point_anywhere(saved):
    target = loaded(saved)
    with hf_specdec.enable(target, saved / "draft", draft_vocab=saved.parent / "counts.json"):
        target.generate(**prompts(), max_new_tokens=6)
        assert f"cut to {SHORT} of 40 ids" in speculates(target).notes[0]


def test_a_path_in_data_means_the_checkpoints_folder(saved):
    with hf_specdec.register():
        target = with_flag(saved, draft_vocab={"size": 10, "counts": "counts.json"})
        target.generate(**prompts(), max_new_tokens=6)
        assert "cut to 10 of 40 ids" in speculates(target).notes[0]


@pytest.mark.parametrize("kind", ["absolute", "above", "link", "missing"])
def test_a_path_in_data_leads_nowhere_else(saved, kind):
    (saved / "link.json").symlink_to(saved.parent / "counts.json")
    name = {
        "absolute": str(saved.parent / "counts.json"),
        "above": "../counts.json",
        "link": "link.json",
        "missing": "nowhere.json",
    }[kind]
    expected = (
        f"draft_vocab names the token counts {name!r} in data, where only a file inside the target's checkpoint folder "
        "is read. To use another one, pass it in code: hf_specdec.enable(target, draft, draft_vocab=…)."
    )
    with hf_specdec.register():
        target = with_flag(saved, draft_vocab=name)
        target.generate(**prompts(), max_new_tokens=6)
        assert hf_specdec.report(target).reason == f"no draft: {expected}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            target.generate(**prompts(), max_new_tokens=6, speculative_config={"draft_vocab": name})


def test_bad_counts_are_refused_before_any_model_work(saved, monkeypatch):
    (saved / "bad.json").write_text("no counts")
    target, draft = loaded(saved), loaded(saved / "draft")
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("a model ran"))
    for path, message in ((saved / "bad.json", "cannot be read"), (saved / "nowhere.json", "there is no such file")):
        with pytest.raises(ValueError, match=message):
            hf_specdec.enable(target, draft, draft_vocab=path)
    with hf_specdec.register(), pytest.raises(ValueError, match="cannot be read"):
        target.generate(
            **prompts(), max_new_tokens=4, assistant_model=draft, speculative_config={"draft_vocab": "bad.json"}
        )
