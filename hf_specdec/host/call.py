"""One speculative call: from what `generate()` prepared to what it returns.

Prefill is transformers' own. The first token comes from it as in plain decoding; then the loop of `decoding` runs, and
the keys go back to the cache they came from, whatever happened.
"""

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_specdec.auto_length import MeasuredLength
from hf_specdec.coins import Coins
from hf_specdec.config import SpeculativeConfig
from hf_specdec.decoding import SpeculativeCall, first_tokens, speculative_sampling
from hf_specdec.draft_length import ConstantLength, LengthChoice, Offer, Part, Planner, Sources, StepState, TableLength
from hf_specdec.drafters import Drafter, DraftRequest
from hf_specdec.drafters.ngram import TextMemory
from hf_specdec.host.adapters import in_turn
from hf_specdec.host.binding import draft_memories
from hf_specdec.host.conversions import draft_in_use
from hf_specdec.host.criteria import Criteria
from hf_specdec.host.draft_copy import copy_facts, copy_quantization, made_copies
from hf_specdec.host.draft_model import DraftMemory, output_vocab_size
from hf_specdec.host.emission import Emission
from hf_specdec.host.knowledge import cost_coefficient, knowledge_of
from hf_specdec.host.outputs import OutputRecorder
from hf_specdec.host.processors import BlockProcessors, why_not_position_wise
from hf_specdec.host.quantized import inexact_fact, quiet_int8, slow_rows_fact
from hf_specdec.host.ranks import Alone, Ranks
from hf_specdec.host.reasons import say_once
from hf_specdec.host.runner import cache_keyword
from hf_specdec.host.target import TargetModel
from hf_specdec.one_by_one import decode_one_by_one
from hf_specdec.registry import DRAFTERS, VERIFIERS, lookup
from hf_specdec.sequence import Sequence
from hf_specdec.statistics import SpeculationCounters
from hf_specdec.timing import StepTimer

__all__ = ["PROBS_BYTES", "Request", "choose_copy", "decide_aside", "run_call"]

# Most bytes that p and q of one step may take when sampling; K is cut to fit.
PROBS_BYTES = 256 * 2**20


@dataclass
class Request:
    """A flagged `generate()` call on its way to `_sample`.

    Attributes:
        model: the target.
        config: the flag.
        draft: the draft model, or None.
        method: the drafter's name; what "auto" came to.
        counters: what the call did.
        why_plain: a reason for plain decoding that was known before.
        is_taken: whether `_sample` was reached.
        num_nested: flagged calls on the same model that ran inside this one.
        ranks: the processes that share the target.
    """

    model: Any
    config: SpeculativeConfig
    draft: Any
    method: str
    counters: SpeculationCounters
    why_plain: str | None = None
    is_taken: bool = False
    num_nested: int = field(default=0)
    ranks: Ranks = field(default_factory=Alone)

    def fall_back(self, why: str) -> None:
        """Plain decoding runs, because of `why`."""
        self.counters.reason = why


def run_call(
    request: Request,
    input_ids: Tensor,
    processors: Any,
    stopping: Any,
    generation_config: Any,
    streamer: Any,
    inputs: dict,
) -> Any:
    """Decode speculatively; returns what `_sample` returns."""
    drafter = lookup("method", DRAFTERS, request.method)
    turn = in_turn(request.model) if getattr(drafter, "changes_target", False) else contextlib.nullcontext()
    with turn, quiet_int8(request.model, request.draft):
        return _run_call(request, input_ids, processors, stopping, generation_config, streamer, inputs)


def _run_call(
    request: Request,
    input_ids: Tensor,
    processors: Any,
    stopping: Any,
    generation_config: Any,
    streamer: Any,
    inputs: dict,
) -> Any:
    model = request.model
    _note_quantization(request)
    timer = StepTimer(input_ids.device)
    timer.mark("start")
    with request.ranks.forward():
        outputs = model._prefill(input_ids, generation_config, inputs)
    cache = outputs[cache_keyword(model)]
    # A copy, as in plain: the prompt's logits may be many.
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
    scores = processors(input_ids, logits)
    recorder = OutputRecorder(generation_config)
    recorder.add_prefill(scores, logits, outputs.get("hidden_states"))
    del outputs
    timer.mark("prefilled")
    call = _prepared(request, input_ids, processors, stopping, generation_config, streamer, inputs, cache, recorder)
    sequences: Tensor | None = None
    drafter = call.drafter
    try:
        with model._optimize_model_for_decode():
            first_tokens(call, scores)
            prefill_seconds = timer.seconds("start", "prefilled")
            request.counters.record_prefill(call.sequence.batch, prefill_seconds)
            call.planner.choice.begin(prefill_seconds / input_ids.numel())
            if call.processors is None and len(processors):
                decode_one_by_one(call, processors)
            else:
                speculative_sampling(call)
        ended = call.emission.finish()
        request.ranks.meet()  # the keys that are still missing come from a forward
        request.ranks.leave()
        sequences = ended
    finally:
        cache = call.target.release(call.sequence, sequences)
        _remember_draft(call, cache)
        if drafter is not None:
            drafter.close(call.sequence)
    call.planner.choice.sum_up(request.counters)
    assert sequences is not None
    return recorder.output(sequences, sequences.shape[1] - input_ids.shape[1], cache)


def _note_quantization(request: Request) -> None:
    inexact = inexact_fact(request.model)
    if inexact is not None:
        request.counters.note(inexact)
        say_once(request.model, inexact)
    slow = slow_rows_fact(request.model, request.draft)
    if slow is not None:
        request.counters.note(slow)
    for fact in copy_facts(request.draft):
        request.counters.note(fact)


def _prepared(
    request: Request,
    input_ids: Tensor,
    processors: Any,
    stopping: Any,
    generation_config: Any,
    streamer: Any,
    inputs: dict,
    cache: Any,
    recorder: OutputRecorder,
) -> SpeculativeCall:
    criteria = Criteria(stopping, input_ids.device)
    _agree(request.ranks, input_ids, criteria, generation_config)
    sequence = Sequence(input_ids, criteria.max_length)
    is_kept = recorder.returns_dict or bool(getattr(cache, "_is_user_defined", False))
    padding_mask = inputs.get("attention_mask")
    extra = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, (bool, int, float, str)) and name not in ("use_cache", "logits_to_keep")
    }
    target = TargetModel(request.model, cache, padding_mask, inputs.get("position_ids"), sequence, is_kept, extra)
    block = None
    if len(processors) and why_not_position_wise(processors) is None:
        block = BlockProcessors(processors, criteria.eos_ids)
    is_sampling = bool(generation_config.do_sample)
    drafter = _drafter(request, target, sequence, padding_mask, is_sampling, criteria, block, generation_config)
    pad, ranks = generation_config._pad_token_tensor, request.ranks
    if ranks.size > 1:
        request.counters.note(f"The target is shared by {ranks.size} ranks: the first one drafts and decides.")
    return SpeculativeCall(
        target=target,
        drafter=drafter if ranks.leads else None,
        verifier=lookup("rejection_sample_method", VERIFIERS, request.config.rejection_sample_method)(),
        sequence=sequence,
        processors=block,
        criteria=criteria,
        emission=Emission(sequence, criteria, streamer, None if pad is None else int(pad), recorder, ranks),
        recorder=recorder,
        counters=request.counters,
        is_sampling=is_sampling,
        planner=_planner(request, drafter, sequence.batch, target.held, is_sampling),
        coins=Coins(sequence.batch, input_ids.device, is_sampling),
        ranks=ranks,
    )


def _agree(ranks: Ranks, input_ids: Tensor, criteria: Criteria, generation_config: Any) -> None:
    """What every rank cuts texts by, each for itself, has to be alike on all."""
    if ranks.size == 1:
        return
    places = torch.arange(1, input_ids.numel() + 1, device=input_ids.device)
    ranks.agree("prompt", [*input_ids.shape, int((input_ids.flatten() * places).sum())])
    ranks.agree("max_length", [-1 if criteria.max_length is None else criteria.max_length])
    ranks.agree("set of ids that end a text", [] if criteria.eos_ids is None else criteria.eos_ids.tolist())
    ranks.agree("choice of stop strings", [int(criteria.has_stop_strings), int(criteria.pads_finished_rows)])
    ranks.agree("do_sample", [int(bool(generation_config.do_sample))])


def _planner(request: Request, drafter: Drafter, batch: int, length: int, is_sampling: bool) -> Planner:
    choice, schedule = _choice(request, batch, length), request.config.draft_lengths or []
    most = 1 << 30
    if is_sampling:
        per_position = batch * output_vocab_size(request.model) * 4
        most = max(1, (PROBS_BYTES // per_position - 1) // 2)  # K rows of q, K + 1 rows of p
        asked = max([choice.most, *schedule])
        if most < asked:
            request.counters.note(
                f"Drafting {most} tokens per step instead of {asked}: more probabilities would not fit 256 MB."
            )
    return Planner(choice, Sources(_cost_guess(request)), schedule, most, has_parts=len(drafter.parts) > 1)


def _choice(request: Request, batch: int, length: int) -> LengthChoice:
    config = request.config
    if config.num_speculative_tokens != "auto":
        return ConstantLength(int(config.num_speculative_tokens))
    if config.deterministic:
        return TableLength()
    variant = lookup("method", DRAFTERS, request.method).variant(request.model, config)
    knowledge = knowledge_of(request.model, request.draft, f"{request.method} {variant}".strip(), batch, length)
    return MeasuredLength(knowledge, _cost_guess(request))


def _cost_guess(request: Request) -> float:
    """c by the models' sizes; of a drafter without a model of its own, as it says."""
    if request.draft is not None:
        return cost_coefficient(request.model, request.draft)
    return lookup("method", DRAFTERS, request.method).cost(request.model, request.config)


def choose_copy(request: Request, input_ids: Tensor) -> None:
    """Put the copy of the draft in its place that pays, if one does, and note what drafts."""
    (batch, length), counters = input_ids.shape, request.counters
    draft, started = request.draft, time.perf_counter()
    before = made_copies(draft)
    request.draft = draft_in_use(request.model, draft, request.config, request.method, batch, length)
    seconds = time.perf_counter() - started
    counters.conversion_seconds = seconds if made_copies(draft) - before else 0.0
    counters.draft_quantization = copy_quantization(request.draft)


def decide_aside(request: Request, input_ids: Tensor, generation_config: Any) -> str | None:
    """One line on why the whole call is plain decoding, where what earlier calls measured says that drafting would not
    pay anywhere in it; else None.

    The original `_sample` then runs, with all that it does for plain decoding only. Where something drafts for free (a
    look-up), only the text can tell, so the loop runs.
    """
    config, (batch, length) = request.config, input_ids.shape
    drafter = lookup("method", DRAFTERS, request.method)
    is_free = request.method == "auto" or drafter.is_free
    if config.num_speculative_tokens != "auto" or config.deterministic or config.draft_lengths or is_free:
        return None
    longest = generation_config.max_length
    remaining = (1 << 20) if longest is None else max(1, longest - length)
    debt = 0 if drafter.is_on_target_keys else batch * length
    part = Part([Offer(remaining, drafter.record, drafter.prior)] * batch, debt=debt)
    choice = _choice(request, batch, length)
    assert isinstance(choice, MeasuredLength)
    return choice.why_aside(StepState(batch, batch, remaining - 1, remaining, [part]), Sources(_cost_guess(request)))


def _drafter(
    request: Request,
    target: TargetModel,
    sequence: Sequence,
    padding_mask: Tensor | None,
    is_sampling: bool,
    criteria: Criteria,
    block: BlockProcessors | None,
    generation_config: Any,
) -> Drafter:
    cls = lookup("method", DRAFTERS, request.method)
    memory = draft_memories.get(target.source)
    history = _history(memory, sequence, target.shift)
    if target.shift and history is None and not cls.is_on_target_keys:
        request.counters.note(
            "The draft does not know the tokens in the cache handed over: it drafts from the new ones only."
        )
        padding_mask = None if padding_mask is None else padding_mask[:, target.shift :]
    return cls(
        DraftRequest(
            config=request.config,
            method=request.method,
            target=request.model,
            model=request.draft,
            padding_mask=padding_mask,
            history_ids=history,
            is_sampling=is_sampling,
            eos_ids=criteria.eos_ids,
            process=block,
            vocab_size=output_vocab_size(request.model),
            prefill_chunk_size=generation_config.prefill_chunk_size,
            resume=memory,
            target_call=target,
        )
    )


def _history(memory: Any, sequence: Sequence, shift: int) -> Tensor | None:
    """The ids behind a cache handed over with new tokens only, if an earlier call left them beside it."""
    if shift <= 0 or not isinstance(memory, (DraftMemory, TextMemory)):
        return None
    is_long_enough = memory.ids.shape[1] >= shift and memory.ids.shape[0] == sequence.batch
    return memory.ids[:, :shift] if is_long_enough else None


def _with_text(memory: Any, drafter: Drafter, sequence: Sequence) -> Any:
    """What a drafter keeps, with the whole text beside it: one that did not draft in this call has not seen its end."""
    history, resumed = drafter.request.history_ids, drafter.request.resume
    ids = sequence.ids[:, : max(sequence.host_lengths)]
    if history is not None:
        ids = torch.cat([history.to(ids.device), ids], dim=1)
    if not isinstance(memory, (DraftMemory, TextMemory)) and memory is not None:
        return memory
    if memory is None or memory is resumed:
        if isinstance(memory, DraftMemory) and memory.ids.shape[1] <= ids.shape[1]:
            held = ids[:, : memory.ids.shape[1]]
            if held.shape == memory.ids.shape and torch.equal(held, memory.ids.to(ids.device)):
                return dataclasses.replace(memory, ids=ids.clone())
        return TextMemory(ids.clone())
    return memory


def _remember_draft(call: SpeculativeCall, cache: Any) -> None:
    if cache is None or not call.target.is_kept:
        return
    memory = None if call.drafter is None else _with_text(call.drafter.keep(), call.drafter, call.sequence)
    if memory is None:
        draft_memories.pop(cache, None)
    else:
        draft_memories[cache] = memory
