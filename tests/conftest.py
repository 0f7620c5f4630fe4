"""One torch thread, warm tiny models, and a watch that no test leaves transformers or the shared models changed."""

import copy
import zlib

import pytest
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_specdec import integration
from hf_specdec.auto_length import MeasuredLength
from tests.zoo import made_pairs, pair

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


# Their tables are long: half of the cells, by the checksum of their names, are in the fast suite, the rest in the slow.
HALVED = ("test_processors_parity.py", "test_greedy_parity.py", "test_caches.py")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in HALVED and "[" in item.name and zlib.crc32(item.name.encode()) % 2:
            item.add_marker(pytest.mark.slow)


def _hooks() -> dict[str, object]:
    """Everything in transformers that the package replaces."""
    mapping = type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
    return {
        "generate": GenerationMixin.__dict__["generate"],
        "_sample": GenerationMixin.__dict__["_sample"],
        "speculative_config": vars(GenerationConfig).get("speculative_config", "absent"),
        **{f"mask {name}": function for name, function in mapping.items()},
    }


def _changed(before: dict[str, object]) -> list[str]:
    after = _hooks()
    return [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]


@pytest.fixture(autouse=True, scope="session")
def transformers_ends_as_it_was():
    """The hooks at the end of the run are the objects that were there before the first test."""
    before = _hooks()
    yield
    assert not _changed(before)


@pytest.fixture(autouse=True)
def transformers_stays_as_found(monkeypatch):
    """Removes every handle that the test made, then compares with what the test found."""
    before, handles = _hooks(), []
    make = integration.Handle.__init__

    def remembered(self, undo):
        make(self, undo)
        handles.append(self)

    monkeypatch.setattr(integration.Handle, "__init__", remembered)
    configs = [(m, copy.deepcopy(vars(m.generation_config))) for models in made_pairs.values() for m in models]
    yield
    for handle in reversed(handles):
        handle.remove()
    assert not _changed(before)
    assert all(vars(model.generation_config) == config for model, config in configs)


@pytest.fixture
def measured():
    """Draft lengths follow measured times, as they do for users."""


@pytest.fixture(autouse=True)
def four_tokens_under_auto(request, monkeypatch):
    """Where no length is named, four tokens are drafted, except in tests that ask for `measured`: the times of tiny
    models say nothing, and what these suites ask is whether all is right when something drafts."""
    if "measured" not in request.fixturenames:
        monkeypatch.setattr(MeasuredLength, "choose", lambda self, state, sources: min(4, state.limit))
        monkeypatch.setattr(MeasuredLength, "why_aside", lambda self, state, sources: None)


@pytest.fixture
def llama():
    """(target, draft): Llama with grouped-query attention, and a noisy copy of it."""
    return pair("Llama")


@pytest.fixture
def gemma():
    """(target, draft): Gemma 3 with one sliding and one full layer."""
    return pair("Gemma3")


@pytest.fixture
def mistral():
    """(target, draft): every layer slides."""
    return pair("Mistral")
