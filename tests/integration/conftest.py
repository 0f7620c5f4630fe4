"""What holds after every test here: transformers is as it was found."""

import pytest
from transformers import GenerationConfig, GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


def found() -> dict:
    """Every object of transformers that the package replaces while a handle lives."""
    return {
        "generate": GenerationMixin.__dict__["generate"],
        "_sample": GenerationMixin.__dict__["_sample"],
        "flag": "speculative_config" in vars(GenerationConfig),
        **type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping,
    }


def is_as_found(before: dict) -> bool:
    """Whether transformers holds the very objects of `before`."""
    now = found()
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


@pytest.fixture(autouse=True)
def as_found():
    """A function that says whether transformers is as it was before the test; it has to be after it."""
    before = found()
    yield lambda: is_as_found(before)
    assert is_as_found(before), "a handle outlived its test"
