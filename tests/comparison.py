"""Plain and speculative calls side by side, and what every parity case asserts of the speculative one."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.report import SpeculationReport
from tests.zoo import PAD

__all__ = [
    "Pair",
    "assert_same_text",
    "assert_speculated",
    "first_layers_draft",
    "new_tokens",
    "plain",
    "speculate",
]

Pair = tuple[PreTrainedModel, PreTrainedModel]


def plain(model: PreTrainedModel, **options: Any) -> Any:
    """What transformers' own loop gives; greedy unless told otherwise."""
    return model.generate(**{"do_sample": False, **options})


def speculate(pair: Pair, draft_length: int = 4, **options: Any) -> tuple[Any, SpeculationReport]:
    """The same call with the flag on, and its report."""
    target, draft = pair
    with hf_specdec.enable(target, draft, num_speculative_tokens=draft_length):
        output = target.generate(**{"do_sample": False, **options})
        report = hf_specdec.report(target)
    assert report is not None
    return output, report


def first_layers_draft(
    pair: Pair, draft_length: int = 4, layer: int = 1, **options: Any
) -> tuple[Any, SpeculationReport]:
    """The same call with the target's first layers drafting, and its report; the pair's draft is left out."""
    target, flag = pair[0], {"early_exit_layer": layer, "num_speculative_tokens": draft_length}
    with hf_specdec.enable(target, method="early_exit", **flag):
        output = target.generate(**{"do_sample": False, **options})
        report = hf_specdec.report(target)
    assert report is not None
    return output, report


def assert_speculated(report: SpeculationReport, accepts: bool = True, rejects: bool = True) -> None:
    """Ours ran, every token is accounted for, and both branches ran where the length allows."""
    assert report.reason is None, report.reason
    report.check()
    if accepts:
        assert report.accepted > 0, str(report)
    if rejects:
        assert report.reached > report.accepted, str(report)


def assert_same_text(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Token for token."""
    assert actual.tolist() == expected.tolist(), f"\nplain       {expected.tolist()}\nspeculative {actual.tolist()}"


def assert_parity(
    pair: Pair, draft_length: int = 4, accepts: bool = True, rejects: bool = True, **options: Any
) -> tuple[torch.Tensor, SpeculationReport]:
    """Greedy text equals plain's, and speculation ran; returns both the text and the report."""
    expected = plain(pair[0], **options)
    actual, report = speculate(pair, draft_length, **options)
    assert_same_text(actual, expected)
    assert_speculated(report, accepts, rejects)
    return actual, report


def new_tokens(sequences: torch.Tensor, prompt_length: int, row: int = 0) -> list[int]:
    """What a row produced, its padding at the end dropped."""
    tokens = sequences[row, prompt_length:].tolist()
    while tokens and tokens[-1] == PAD:
        tokens.pop()
    return tokens


def tiled(options: dict[str, torch.Tensor], rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """Some rows of a prompt."""
    return {name: value[list(rows)] for name, value in options.items()}
