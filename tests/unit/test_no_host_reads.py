"""Do draft, verify and commit run without host reads and at fixed shapes, and a whole step with one read?"""

import contextlib
import traceback
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation import logits_process

import hf_specdec
from hf_specdec import decoding
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters import DraftRequest
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.host import call as host_call
from hf_specdec.host import masks
from hf_specdec.host.processors import BlockProcessors
from hf_specdec.host.runner import ModelRunner
from hf_specdec.sequence import Sequence
from hf_specdec.steps import commit
from hf_specdec.verification import BlockVerifier, StandardVerifier
from tests.host_reads import ForbidHostReads

VOCAB, BATCH, WIDTH = 12, 3, 3
RULES = {"standard": StandardVerifier, "block": BlockVerifier}
EOS = torch.tensor([2])
ONCE = "once per call"


def built_in_processors(prompt_length: int) -> LogitsProcessorList:
    """What `generate()` makes of the options that everybody uses."""
    return LogitsProcessorList(
        [
            logits_process.RepetitionPenaltyLogitsProcessor(1.2),
            logits_process.NoRepeatNGramLogitsProcessor(3),
            logits_process.MinLengthLogitsProcessor(prompt_length + 2, EOS),
            logits_process.MinNewTokensLengthLogitsProcessor(prompt_length, 3, EOS),
            logits_process.TemperatureLogitsWarper(0.8),
            logits_process.TopKLogitsWarper(8),
            logits_process.TopPLogitsWarper(0.9),
            logits_process.MinPLogitsWarper(0.01),
        ]
    )


def llama(seed: int) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).eval()


def prompt(batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and their mask; one row is full."""
    ids = torch.randint(3, VOCAB, (batch, 6), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(6) >= torch.arange(batch)[:, None]).long()
    return ids * mask, mask


def make_drafter(sequence: Sequence, mask: torch.Tensor, is_sampling: bool) -> ModelDrafter:
    process = BlockProcessors(built_in_processors(sequence.prompt_length))
    target = llama(0)
    return ModelDrafter(
        DraftRequest(
            config=SpeculativeConfig(),
            target=target,
            model=llama(1),
            padding_mask=mask,
            is_sampling=is_sampling,
            eos_ids=EOS,
            process=process,
            vocab_size=VOCAB,
        )
    )


class Shapes(TorchDispatchMode):
    """Records operators with the shapes of their results, but for forwards: their keys and masks grow with the text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.log: list[tuple] = []
        self._depth = 0
        forward = ModelRunner.forward

        def outside_of_the_log(*args, **kwargs):
            self._depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._depth -= 1

        monkeypatch.setattr(ModelRunner, "forward", outside_of_the_log)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self._depth == 0:
            parts = result if isinstance(result, (tuple, list)) else [result]
            self.log.append((str(func), *(tuple(part.shape) for part in parts if isinstance(part, torch.Tensor))))
        return result


@pytest.fixture
def ragged_masks():
    """Masks as a flagged call has them."""
    originals = masks.install_masks()
    yield
    masks.uninstall_masks(originals)


def advance(sequence: Sequence, counts: list[int]) -> None:
    lengths = [length + count for length, count in zip(sequence.host_lengths, counts, strict=True)]
    sequence.advance(torch.tensor(counts), lengths)
    sequence.reserve(WIDTH + 1)


# Even and uneven rows take different ways through cache and masks; each is compared with itself.
@pytest.mark.parametrize("counts", [[[2, 2, 2], [1, 1, 1]], [[1, 3, 2], [2, 1, 4]]])
@pytest.mark.parametrize("is_sampling", [False, True])
@torch.no_grad()
def test_drafting_reads_nothing_on_the_host_and_keeps_its_shapes(is_sampling, counts, ragged_masks, monkeypatch):
    ids, mask = prompt()
    sequence = Sequence(ids, 60)
    drafter = make_drafter(sequence, mask, is_sampling)
    uniforms = torch.rand(3, BATCH, WIDTH, dtype=torch.float64)
    advance(sequence, [1, 1, 1])
    drafter.propose(sequence, WIDTH, uniforms[0])  # prefill, which is allowed to read
    logs = []
    for step, change in enumerate(counts):
        advance(sequence, change)
        with ForbidHostReads(), Shapes(monkeypatch) as shapes:
            draft = drafter.propose(sequence, WIDTH, uniforms[step + 1])
        logs.append(shapes.log)
        assert draft.token_ids.shape == (BATCH, WIDTH)
    assert logs[0] == logs[1]


def block_step(sequence: Sequence, processors, verifier, scores, draft_ids, draft_probs, uniforms):
    """Processors, decision and commit as the loop does them."""
    draft = decoding.Draft(draft_ids, draft_probs, torch.tensor([WIDTH, 1, 0]))
    sequence.write(0, draft_ids)
    processed = processors(scores, sequence, 0, None)
    verdict, is_nan = decoding.decide(deciding_call(verifier), processed, draft, uniforms)
    committed = commit(
        sequence.ids, sequence.lengths, sequence.is_finished, draft.token_ids, verdict.num_accepted, verdict.next_ids,
        EOS, sequence.limits(),
    )  # fmt: skip
    return committed, is_nan


def deciding_call(verifier) -> decoding.SpeculativeCall:
    """A call with nothing but what `decoding.decide` asks of it."""
    call = object.__new__(decoding.SpeculativeCall)
    call.verifier, call.is_sampling = verifier, verifier is not None
    return call


@pytest.mark.parametrize("rule", ["greedy", *RULES])
@pytest.mark.parametrize("is_point_mass", [False, True])
def test_verification_and_commit_read_nothing_on_the_host_and_keep_their_shapes(rule, is_point_mass, monkeypatch):
    ids, _ = prompt()
    sequence = Sequence(ids, 60)
    processors = BlockProcessors(built_in_processors(ids.shape[1]))
    verifier = None if rule == "greedy" else RULES[rule]()
    generator = torch.Generator().manual_seed(2)
    logs, accepted = [], []
    for change in ([1, 3, 2], [2, 1, 4]):
        advance(sequence, change)
        scores = torch.randn(BATCH, WIDTH + 1, VOCAB, generator=generator)
        probs = None if is_point_mass else torch.rand(BATCH, WIDTH, VOCAB, generator=generator).softmax(-1)
        draft_ids = torch.randint(3, VOCAB, (BATCH, WIDTH), generator=generator)
        uniforms = torch.rand(BATCH, WIDTH + 1, generator=generator, dtype=torch.float64)
        with ForbidHostReads(), Shapes(monkeypatch) as shapes:
            committed, _ = block_step(sequence, processors, verifier, scores, draft_ids, probs, uniforms)
        logs.append(shapes.log)
        accepted.append(committed.num_emitted.tolist())
    assert logs[0] == logs[1]
    assert accepted[0] != accepted[1], "both steps decided alike: shapes that follow values would not show"


class CountReads(TorchDispatchMode):
    """Counts reads of tensors by the host and remembers where each came from."""

    def __init__(self):
        super().__init__()
        self.places: list[str] = []
        self._methods = _CountReadingMethods(self.places)

    def __enter__(self):
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *exc_info):
        result = super().__exit__(*exc_info)
        self._methods.__exit__(*exc_info)
        return result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"):
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


class _CountReadingMethods(TorchFunctionMode):
    def __init__(self, places: list[str]):
        super().__init__()
        self._places = places

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            self._places.append(_place())
        return func(*args, **(kwargs or {}))


def _place() -> str:
    frames = traceback.extract_stack()
    if any(frame.name in ("_prefill", "_start") for frame in frames):
        return ONCE
    own = [f for f in frames if "site-packages/torch" not in f.filename and f.filename != __file__]
    return f"{own[-1].filename}:{own[-1].lineno} {own[-1].line}"


@contextlib.contextmanager
def counted_loop(monkeypatch) -> Iterator[CountReads]:
    """The reads inside `speculative_sampling` of the calls made here."""
    counter = CountReads()

    def counted(call):
        with counter:
            decoding.speculative_sampling(call)

    monkeypatch.setattr(host_call, "speculative_sampling", counted)
    yield counter


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("rule", ["greedy", *RULES])
@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_a_step_reads_once_on_the_host(method, rule, implementation, is_padded, batch, monkeypatch):
    target, draft = llama(0), llama(1) if method == "draft_model" else None
    target.set_attn_implementation(implementation)
    if draft is not None:
        draft.set_attn_implementation(implementation)
    ids, mask = prompt(batch)
    options = {"do_sample": rule != "greedy", "max_new_tokens": 16, "eos_token_id": 2, "pad_token_id": 0}
    options |= {"repetition_penalty": 1.1, "min_new_tokens": 12, "no_repeat_ngram_size": 5}
    if rule != "greedy":
        options |= {"temperature": 0.8, "top_k": 8, "top_p": 0.95, "min_p": 0.01}
    if not is_padded:
        ids, mask = ids.clamp(min=3), torch.ones_like(mask)
    flag = {"method": method} if rule == "greedy" else {"method": method, "rejection_sample_method": rule}
    with hf_specdec.enable(target, draft, **flag), counted_loop(monkeypatch) as counter:
        target.generate(ids, attention_mask=mask, **options)
        report = hf_specdec.report(target)
    assert report is not None
    assert report.reason is None
    # The first step prefills the draft and takes the target's cache over; both may look at the padding, once.
    places = [place for place in counter.places if place != ONCE]
    assert len(places) == report.target_passes, "\n".join(sorted(set(places)))
