"""Do processes that share a target commit the same tokens, end together, and leave alone those that share nothing?

The ranks run `ranks_worker.py`, all cases of a kind in one launch; the tests compare what they wrote.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

import hf_specdec
from tests.integration.pairs import pair, prompts

ROOT = Path(__file__).parents[2]
NOTE = "The target is shared by 2 ranks: the first one drafts and decides."
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed"),
    pytest.mark.skipif(sys.platform != "linux", reason="the launchers are tried on Linux"),
]


def launched(folder, kind):
    """What both ranks wrote; nothing that was started lives on."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, str(ROOT / "tests" / "integration" / "ranks_worker.py"), kind, str(folder)],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output[-4000:]
    return [json.loads((folder / f"{kind}-{number}.json").read_text()) for number in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    target, draft = pair()
    target.save_pretrained(path / "target")
    draft.save_pretrained(path / "draft")
    draft.save_pretrained(path / "target" / "draft")
    return path


@pytest.fixture(scope="module")
def shared(folder):
    """Results by case, one entry per rank."""
    first, second = launched(folder, "tensor_parallel")
    return {name: (first[name], second[name]) for name in first}


def both(results):
    """Pairs of results, one per call of the case."""
    first, second = results
    return list(zip(first, second, strict=True)) if isinstance(first, list) else [(first, second)]


@pytest.mark.parametrize(
    "case", ["greedy", "rows_end_apart", "drafts_longer_than_a_message", "looked_up", "turns_on_one_cache"]
)
def test_greedy_text_is_plains_on_every_rank(shared, case):
    for first, second in both(shared[case]):
        assert first["ids"] == second["ids"] == first["plain"] == second["plain"]
        assert first["reason"] is None
        assert second["reason"] is None
        assert first["accepted"] == second["accepted"]
    assert any(first["accepted"] for first, _ in both(shared[case]))


def test_measured_lengths_are_the_first_ranks(shared):
    """Times differ from rank to rank; whether to draft at all is decided by them too."""
    for first, second in both(shared["measured_lengths"]):
        assert first["ids"] == second["ids"] == first["plain"]
        assert first["reason"] == second["reason"]
        assert first["accepted"] == second["accepted"]


@pytest.mark.parametrize("case", ["sampled_under_a_seed_per_rank", "sampled_with_processors"])
def test_sampled_text_is_one_text_although_every_rank_has_a_seed_of_its_own(shared, case):
    first, second = shared[case]
    assert first["ids"] == second["ids"]
    assert first["accepted"] == second["accepted"] > 0
    assert first["notes"] == second["notes"] == [NOTE]


def test_sampled_text_is_that_of_the_first_ranks_seed_in_one_process(shared):
    target, draft = pair()
    torch.manual_seed(0)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        ids = target.generate(**prompts(2), max_new_tokens=20, do_sample=True, top_k=0)
    assert ids.tolist() == shared["sampled_under_a_seed_per_rank"][0]["ids"]


def test_cache_of_each_rank_holds_its_own_heads(shared):
    first, second = shared["turns_on_one_cache"]
    assert first["heads"] == second["heads"] == 1
    assert first["scores"] == second["scores"]


def test_a_streamer_on_one_rank_gets_the_text(shared):
    first, second = shared["streamer_on_one_rank"]
    assert first["streamed"] == first["ids"][0] == second["ids"][0]


def test_criteria_of_the_first_rank_decide(shared):
    first, second = shared["criteria_that_disagree"]
    assert first["ids"] == second["ids"]
    assert len(first["ids"][0]) == 12


def test_clock_of_the_first_rank_decides(shared):
    first, second = shared["clocks_that_disagree"]
    assert first["ids"] == second["ids"]
    assert len(first["ids"][0]) < 200


@pytest.mark.parametrize(
    ("case", "error", "ranks"),
    [
        ("processor_raises", "ValueError: no such grammar", [0, 0, 0, 1, 1, 1]),
        ("criterion_raises", "ValueError: no such grammar", [0, 1]),
        ("streamer_raises", "ConnectionError: the reader has gone", [0, 0, 1, 1]),
    ],
)
def test_what_one_rank_raises_ends_the_call_on_all_and_the_next_call_is_well(shared, case, error, ranks):
    for results, who in zip(both(shared[case]), ranks, strict=True):
        assert results[who]["error"] == error
        assert results[1 - who]["error"] == (
            f"RankError: Rank {who} of the 2 that share the target raised {error}, so the call ends on rank {1 - who} "
            "too."
        )
        for result in results:
            assert result["ids"] == result["plain"]
            assert result["reason"] is None


def test_calls_that_differ_end_on_all_ranks_and_the_next_call_is_well(shared):
    whats = ["max_length", "do_sample", "set of ids that end a text", "set of ids that end a text"]
    for (first, second), what in zip(both(shared["calls_that_differ"]), whats, strict=True):
        assert second["error"] == (
            f"ValueError: Rank 1 was called with another {what} than rank 0, whose target it shares."
        )
        assert first["error"].startswith("RankError: Rank 1 of the 2 that share the target raised ValueError: Rank 1 ")
        assert first["ids"] == second["ids"] == first["plain"]


def test_draft_that_one_rank_cannot_find_ends_the_call_on_all(shared):
    first, second = shared["draft_missing_on_one_rank"]
    assert second["error"].startswith("ValueError: The draft ")
    assert first["error"].startswith("RankError: Rank 1 of the 2 that share the target raised ValueError: The draft ")
    assert first["ids"] == second["ids"] == first["plain"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("target_as_its_own_draft", "tensor parallel draft (rank 0 drafts alone, so the draft has to be whole there)"),
        ("targets_own_layers", "tensor parallel draft (rank 0 drafts alone, so the draft has to be whole there)"),
        ("unknown_processor", "logits processor function is not known to be position-wise"),
        ("fallback_on_one_rank", "logits processor function is not known to be position-wise"),
    ],
)
def test_fallback_is_everybodys_with_the_reason(shared, case, reason):
    first, second = shared[case]
    assert first["ids"] == second["ids"] == first["plain"] == second["plain"]
    for result in (first, second):
        assert result["reason"].startswith(reason)
        assert result["accepted"] == 0


def test_data_parallel_ranks_go_their_own_ways(folder):
    first, second = launched(folder, "data_parallel")
    assert (len(first["calls"]), len(second["calls"])) == (1, 3)
    for result in (first, second):
        assert result["size"] == 2
        assert all(call["ids"] == call["plain"] and call["reason"] is None for call in result["calls"])
        assert result["synced"] == "synced_gpus (ranks must run the same number of forwards)"
    assert sum(call["accepted"] for call in second["calls"]) > 0


def test_fully_sharded_target_decodes_plainly(folder):
    pytest.importorskip("transformers.distributed.fsdp", reason="this transformers cannot shard a target")
    for result in launched(folder, "fully_sharded"):
        assert result["ids"] == result["plain"]
        assert result["reason"] == "synced_gpus (ranks must run the same number of forwards)"
