"""Greedy text with the flag on is plain's text, token for token, in float32, and speculation really ran."""

import contextlib

import pytest
import torch

from hf_specdec.host.families import why_frequencies_move
from tests.comparison import assert_parity, assert_same_text, assert_speculated, new_tokens, plain, speculate
from tests.zoo import BOS, FAMILIES, WINDOW, family, pair, prompts

DRAFT_LENGTHS = (1, 2, 4, 8)
ROWS = {1: (9,), 3: (11, 5, 8)}
NEW_TOKENS = 24


def _cases(families):
    """(family, attention implementation); families outside part one are slow."""
    return [
        pytest.param(
            entry.name, implementation, marks=[pytest.mark.slow] * entry.is_slow, id=f"{entry.name}-{implementation}"
        )
        for entry in families
        for implementation in entry.implementations
        if entry.reason is None
    ]


@contextlib.contextmanager
def counted_forwards(model):
    """Ids [batch, width] of every forward of `model`, in order."""
    seen = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


_PLAIN: dict[tuple[str, str, int], torch.Tensor] = {}


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "implementation"), _cases(FAMILIES))
def test_text_equals_plain_for_every_family(name, implementation, batch, draft_length):
    models, prompt = pair(name, implementation), prompts(ROWS[batch])
    key = name, implementation, batch
    if key not in _PLAIN:
        _PLAIN[key] = plain(models[0], **prompt, max_new_tokens=NEW_TOKENS)
    text, report = speculate(models, draft_length, **prompt, max_new_tokens=NEW_TOKENS)
    assert_same_text(text, _PLAIN[key])
    assert_speculated(report)
    assert report.emitted == batch * NEW_TOKENS
    assert max(report.draft_lengths) == draft_length


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.reason is not None])
def test_family_that_cannot_have_ragged_rows_decodes_plainly_and_says_why(name):
    entry = family(name)
    for window in (WINDOW, 4 * WINDOW):  # the self-test's eight tokens do not see a wide window
        target = entry.build(**({"window_size": window} if "window_size" in entry.options else {}))
        models, prompt = (target, entry.build_draft(target)), prompts((11, 5, 8))
        text, report = speculate(models, **prompt, max_new_tokens=60)
        assert entry.reason in report.reason
        assert_same_text(text, plain(target, **prompt, max_new_tokens=60))


@pytest.mark.parametrize("lengths", [(3,), (WINDOW - 1,), (WINDOW,), (WINDOW + 1,), (20,), (20, 3, 9)], ids=str)
@pytest.mark.parametrize(("name", "implementation"), _cases(f for f in FAMILIES if f.window is not None))
def test_text_equals_plain_before_at_and_past_the_sliding_window(name, implementation, lengths):
    assert_parity(pair(name, implementation), **prompts(lengths, seed=1), max_new_tokens=20)


@pytest.mark.parametrize("draft_length", [2, 8])
def test_text_past_the_window_equals_plain_when_rows_drift_far_apart(gemma, draft_length):
    assert_parity(gemma, draft_length, **prompts((30, 2, 12, 8)), max_new_tokens=90)


@pytest.mark.parametrize("slides", ["target", "draft"])
def test_only_target_or_only_draft_may_slide(slides):
    entry = family("Qwen2-sliding")
    sliding, full = pair("Qwen2-sliding")[0], entry.build(use_sliding_window=False, layer_types=None)
    full.load_state_dict(sliding.state_dict())
    models = (sliding, full) if slides == "target" else (full, sliding)
    assert_parity(models, **prompts((14, 6, 3)), max_new_tokens=30)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT-2", "OPT"])
def test_prompt_of_one_token(name, rows):
    ids = torch.tensor([[BOS], [7], [9]][:rows])
    assert_parity(pair(name), input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16)


def test_rows_of_one_and_many_tokens(llama):
    assert_parity(llama, **prompts((1, 12, 2)), max_new_tokens=16)


def test_prompt_without_a_mask(llama):
    assert_parity(llama, input_ids=prompts((9,))["input_ids"], max_new_tokens=16)


@pytest.mark.parametrize("draft_length", [1, 3, 8])
@pytest.mark.parametrize("lengths", [(9,), (11, 5, 8)], ids=["one row", "ragged"])
def test_few_new_tokens(llama, lengths, draft_length):
    for count in sorted({1, 2, 3, draft_length, draft_length + 1, draft_length + 2}):
        prompt = prompts(lengths)
        text, report = assert_parity(llama, draft_length, accepts=False, rejects=False, **prompt, max_new_tokens=count)
        assert text.shape[1] == max(lengths) + count
        assert report.emitted == count * len(lengths)
        assert max([0, *report.draft_lengths]) == max(0, min(draft_length, count - 2))


@pytest.mark.parametrize("count", [1, 2])
def test_draft_is_not_asked_for_the_last_token(llama, count):
    with counted_forwards(llama[1]) as calls:
        assert_parity(llama, accepts=False, rejects=False, **prompts((9,)), max_new_tokens=count)
    assert calls == []


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
def test_right_draft_is_accepted_whole_and_ends_at_the_exact_count(llama, draft_length):
    target = llama[0]
    for count in range(1, draft_length + 3):
        _, report = assert_parity(
            (target, target), draft_length, accepts=False, rejects=False, **prompts((9, 4)), max_new_tokens=count
        )
        assert report.accepted == report.reached == report.drafted
        assert report.cut == 0


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
def test_text_does_not_depend_on_the_draft(draft_length):
    target, stranger = pair("Llama")[0], family("Qwen3").build(seed=5)
    _, report = assert_parity(
        (target, stranger), draft_length, accepts=False, **prompts((11, 5, 8)), max_new_tokens=NEW_TOKENS
    )
    assert report.acceptance_rate < 0.5


@pytest.mark.parametrize("lengths", [(9,), (11, 5, 8), (40, 12, 33)], ids=str)
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_drafting_ends_where_the_drafts_context_ends(name, lengths):
    entry, (target, draft) = family(name), pair(name)
    option = "n_positions" if name == "GPT-2" else "max_position_embeddings"
    short = entry.build(**{option: 32})
    sizes = {key: value.shape for key, value in short.state_dict().items()}
    weights = {key: value[: sizes[key][0]] if value.ndim else value for key, value in draft.state_dict().items()}
    short.load_state_dict(weights)
    is_short = max(lengths) < 32
    _, report = assert_parity(
        (target, short), accepts=is_short, rejects=is_short, **prompts(lengths), max_new_tokens=50
    )
    assert report.notes == ["Drafting ended where the draft's context did."]
    assert report.draft_lengths[-1] == 0


def test_long_text_outgrows_every_first_buffer():
    entry = family("Llama")
    target = entry.build(max_position_embeddings=1024)
    assert_parity((target, entry.build_draft(target)), **prompts((20, 6)), max_new_tokens=300)


@pytest.mark.parametrize("name", ["GPT-2", "OPT", "Llama"])
def test_text_may_run_to_the_last_learned_position(name):
    models, prompt = pair(name), prompts((200, 190, 196))
    assert_parity(models, 8, **prompt, max_new_tokens=56)  # row 0 ends at position 255, the last one there is


ROPE_LIMIT = 32
MOVING_ROPE = {
    "dynamic": ("Llama", {"rope_type": "dynamic", "factor": 4.0}, {"max_position_embeddings": ROPE_LIMIT}),
    "longrope": (
        "Phi-3",
        {
            "rope_type": "longrope",
            "factor": 8.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0, 3.0, 2.0, 5.0],
            "original_max_position_embeddings": ROPE_LIMIT,
        },
        {"original_max_position_embeddings": ROPE_LIMIT, "sliding_window": None},
    ),
}


def _moving_rope(kind):
    name, rope, changes = MOVING_ROPE[kind]
    target = family(name).build(rope_parameters={"rope_theta": 10000.0, **rope}, **changes)
    return target, family(name).build_draft(target)


@pytest.mark.parametrize("kind", MOVING_ROPE)
def test_text_before_the_point_where_rotary_frequencies_change_equals_plain(kind):
    models = _moving_rope(kind)
    _, report = assert_parity(models, **prompts((11, 5, 8)), max_length=ROPE_LIMIT)
    assert report.reason is None
    assert why_frequencies_move(models[0], ROPE_LIMIT) is None


@pytest.mark.parametrize("kind", MOVING_ROPE)
def test_text_past_the_point_where_rotary_frequencies_change_is_plain_and_says_why(kind):
    models, prompt = _moving_rope(kind), prompts((11, 5, 8))
    text, report = speculate(models, **prompt, max_new_tokens=50)
    assert_same_text(text, plain(models[0], **prompt, max_new_tokens=50))
    assert report.reason == why_frequencies_move(models[0], 61)


def test_moving_rotary_frequencies_are_known_by_their_type():
    for kind in MOVING_ROPE:
        target, _ = _moving_rope(kind)
        expected = f"rotary frequencies of type {kind} change past 32 positions, and this text may get there"
        assert why_frequencies_move(target, ROPE_LIMIT + 1) == expected
        assert why_frequencies_move(target, None) == expected
    for entry in FAMILIES:
        assert why_frequencies_move(pair(entry.name)[0], None) is None


def test_rows_of_num_return_sequences_are_plains(llama):
    # transformers refuses several greedy rows; with one candidate left sampling is greedy.
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    text, _ = assert_parity(llama, **prompts((11, 5)), **options, max_new_tokens=NEW_TOKENS)
    assert text.shape[0] == 6
    assert text[0].tolist() == text[1].tolist() == text[2].tolist()
    assert text[3].tolist() == text[4].tolist() == text[5].tolist()


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
@pytest.mark.parametrize("produced", [3, 5])
@pytest.mark.parametrize("lengths", [(9,), (11, 5, 8)], ids=["one row", "ragged"])
@pytest.mark.parametrize("draft", ["noisy", "right"])
def test_eos_in_mid_block_ends_the_row_where_plain_ends_it(llama, draft, lengths, produced, draft_length):
    target = llama[0]
    models, prompt = (llama if draft == "noisy" else (target, target)), prompts(lengths)
    free = plain(target, **prompt, max_new_tokens=NEW_TOKENS)
    eos = free[0, max(lengths) + produced - 1].item()
    text, _ = assert_parity(
        models, draft_length, accepts=False, rejects=False, **prompt, max_new_tokens=NEW_TOKENS, eos_token_id=eos
    )
    assert new_tokens(text, max(lengths))[-1] == eos
    assert len(new_tokens(text, max(lengths))) <= produced


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
def test_any_of_several_eos_ids_ends_a_row_and_rows_end_at_different_times(llama, draft_length):
    prompt = prompts((11, 5, 8))
    free = plain(llama[0], **prompt, max_new_tokens=NEW_TOKENS)[:, 11:]
    eos = [free[0, 3].item(), free[1, 9].item(), free[2, 16].item()]
    text, _ = assert_parity(llama, draft_length, accepts=False, **prompt, max_new_tokens=NEW_TOKENS, eos_token_id=eos)
    assert len({len(new_tokens(text, 11, row)) for row in range(3)}) > 1


def test_eos_none_ends_no_row(llama):
    text, _ = assert_parity(llama, **prompts((11, 5, 8)), max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert text.shape[1] == 11 + NEW_TOKENS


def test_eos_as_the_first_token_ends_the_call_without_a_step(llama):
    prompt = prompts((9,))
    eos = plain(llama[0], **prompt, max_new_tokens=1)[0, -1].item()
    _, report = assert_parity(
        llama, accepts=False, rejects=False, **prompt, max_new_tokens=NEW_TOKENS, eos_token_id=eos
    )
    assert report.steps == 0
    assert report.emitted == 1


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT-2"])
def test_one_row_goes_on_long_after_the_others_have_ended(name):
    models, prompt = pair(name), prompts((11, 5, 8))
    free = plain(models[0], **prompt, max_new_tokens=60)[:, 11:].tolist()
    # An id that ends some row early and that row 0, 1 or 2 does not produce.
    for eos in dict.fromkeys(free[1][1:5] + free[2][1:5] + free[0][1:5]):
        ended = [eos in row for row in free]
        if any(ended) and not all(ended):
            break
    else:
        pytest.fail("no id ends some rows and not others")
    text, _ = assert_parity(models, **prompt, max_new_tokens=60, eos_token_id=eos)
    assert text.shape[1] == 71


@pytest.mark.parametrize("extra", [1, 2, 5, 12])
def test_max_length_holds(llama, extra):
    prompt = prompts((11, 5, 8))
    text, _ = assert_parity(llama, accepts=False, rejects=False, **prompt, max_length=11 + extra)
    assert text.shape[1] == 11 + extra


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "OPT"])
def test_ragged_rows_equal_their_own_single_row_calls(name, draft_length):
    models, lengths = pair(name), (11, 5, 8)
    prompt = prompts(lengths)
    text, report = speculate(models, draft_length, **prompt, max_new_tokens=NEW_TOKENS)
    assert_speculated(report)
    for row, length in enumerate(lengths):
        alone = prompt["input_ids"][row : row + 1, 11 - length :]
        expected = plain(models[0], input_ids=alone, attention_mask=torch.ones_like(alone), max_new_tokens=NEW_TOKENS)
        assert text[row, 11 - length :].tolist() == expected[0].tolist()
