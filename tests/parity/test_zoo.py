"""The zoo's models must be able to show a fault, else parity over them proves nothing."""

import inspect

import pytest
import torch

from tests.comparison import new_tokens, plain
from tests.zoo import FAMILIES, MAX_POSITIONS, pair, prompts

PROMPT = prompts((11, 5, 8))
NAMES = [f.name for f in FAMILIES]
SLIDING = [f for f in FAMILIES if f.window is not None]


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_has_five_distinct_tokens_and_needs_the_padding_mask(name):
    target, _ = pair(name)
    text = plain(target, **PROMPT, max_new_tokens=24)
    assert all(len(set(new_tokens(text, 11, row))) >= 5 for row in range(3)), text.tolist()
    blind = plain(target, **{**PROMPT, "attention_mask": torch.ones_like(PROMPT["input_ids"])}, max_new_tokens=24)
    assert blind[0].tolist() == text[0].tolist()
    assert all(blind[row].tolist() != text[row].tolist() for row in (1, 2))


@pytest.mark.parametrize("name", NAMES)
def test_draft_agrees_on_part_of_the_text(name):
    target, draft = pair(name)
    text = plain(target, **PROMPT, max_new_tokens=24)
    mask = torch.cat([PROMPT["attention_mask"], torch.ones_like(text[:, 11:])], dim=1)
    inputs = {"input_ids": text, "attention_mask": mask}
    if "position_ids" in inspect.signature(draft.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    with torch.no_grad():
        guesses = draft(**inputs).logits[:, 10:-1].argmax(dim=-1)
    agreement = (guesses == text[:, 11:]).float().mean().item()
    assert 0.2 <= agreement <= 0.9, agreement


@pytest.mark.parametrize("name", [f.name for f in SLIDING])
def test_plain_text_needs_the_sliding_window(name):
    entry = next(f for f in SLIDING if f.name == name)
    option = "window_size" if "window_size" in entry.options else "sliding_window"
    target, _ = pair(name)
    text = plain(target, **PROMPT, max_new_tokens=24)
    wide = entry.build(**{option: MAX_POSITIONS})
    assert plain(wide, **PROMPT, max_new_tokens=24).tolist() != text.tolist()
