"""The decoding loop: draft, verify, commit, roll back.

Source: Chen et al. 2023, *Accelerating Large Language Model Decoding with Speculative Sampling* (arXiv 2302.01318),
Algorithm 2, for a batch of rows that accept different numbers of tokens:

    while some row runs:
        x̃₁ … x̃_K ~ q(· | text)                    draft            drafters/
        p(· | text, x̃₁ … x̃ᵢ)  for i = 0 … K        one forward      host/target.py, host/processors.py
        n, y = accept/resample(p, q, x̃, u)         verify           verification.py
        text += x̃₁ … x̃ₙ, y   (cut at ends)         commit           steps.py, host/emission.py
        forget the keys past n                     roll back        one integer per row (host/cache.py)

The host reads one packed integer tensor per step. All randomness enters as uniforms, fresh per step, row and slot.
Where several processes share the target, the first of them drafts and judges, and all commit what it says
(`host/ranks.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec import sampling
from hf_specdec.coins import Coins
from hf_specdec.draft_length import DraftPlan, Part, Planner, StepOutcome, StepState
from hf_specdec.drafters.base import Draft, Drafter, DraftFailure
from hf_specdec.host.criteria import Criteria
from hf_specdec.host.emission import Emission
from hf_specdec.host.outputs import OutputRecorder
from hf_specdec.host.processors import BlockProcessors
from hf_specdec.host.ranks import Ranks
from hf_specdec.host.target import TargetModel
from hf_specdec.sequence import Sequence
from hf_specdec.statistics import SpeculationCounters
from hf_specdec.step_read import StepRead, read_step
from hf_specdec.steps import Committed, commit
from hf_specdec.timing import StepTimer
from hf_specdec.verification import Verdict, Verifier, verify_greedy

__all__ = ["SpeculativeCall", "TargetNaN", "first_tokens", "speculative_sampling"]


class TargetNaN(RuntimeError):
    """The target's processed scores hold NaN where a token has to be drawn."""


@dataclass
class SpeculativeCall:
    """Everything that one call's loop needs.

    Attributes:
        target: the model that decides.
        drafter: proposes; None once there is none (any more).
        verifier: the accept/resample rule.
        sequence: the text.
        processors: position-wise logits processors, None if there are none.
        criteria, emission, recorder, counters: when rows end, what the caller sees, what is collected, what is counted.
        is_sampling: draw (True) or take the most probable token.
        planner: decides how many tokens a step drafts, and from where.
        coins: the randomness.
        ranks: the processes that share the target.
    """

    target: TargetModel
    drafter: Drafter | None
    verifier: Verifier
    sequence: Sequence
    processors: BlockProcessors | None
    criteria: Criteria
    emission: Emission
    recorder: OutputRecorder
    counters: SpeculationCounters
    is_sampling: bool
    planner: Planner
    coins: Coins
    ranks: Ranks

    def plan(self) -> tuple[StepState, DraftPlan]:
        """What the step that begins may draft, and what it will. To be asked once per step.

        A row's last token is not drafted, a draft's context may end, rows may have left.
        """
        sequence, rows = self.sequence, self.sequence.live_rows
        remaining = max(sequence.remaining(row) for row in rows)
        limit, parts, room = max(0, remaining - 1), [], 1 << 30
        try:
            for drafter in [] if self.drafter is None else self.drafter.parts:
                room = max(0, drafter.max_draft_length(sequence))
                offers = drafter.offers(sequence, min(limit, room))
                parts.append(Part([offers[row] for row in rows], drafter.is_free, drafter.debt(sequence)))
        except Exception as failure:  # whatever a drafter may raise: the call must go on without it
            drop_draft(self, f"the draft failed ({_said(failure)})")
            parts, room = [], 1 << 30
        state = StepState(sequence.batch, len(rows), limit, remaining, parts)
        plan = self.planner.plan(state)
        if room < limit and plan.length >= room:
            self.counters.note("Drafting ended where the draft's context did.")
        return state, plan

    def commit(self, draft_ids: Tensor, verdict: Verdict) -> Committed:
        """Write what `verdict` keeps of `draft_ids` [batch, draft], and its next token, into the text."""
        sequence = self.sequence
        return commit(
            sequence.ids,
            sequence.lengths,
            sequence.is_finished,
            draft_ids,
            verdict.num_accepted,
            verdict.next_ids,
            self.criteria.eos_ids,
            sequence.limits(),
        )


def speculative_sampling(call: SpeculativeCall) -> None:
    """Run steps until `call.emission.is_done`."""
    sequence, emission = call.sequence, call.emission
    while not emission.is_done:
        timer = StepTimer(sequence.device)
        timer.mark("start")
        state, plan = call.plan()
        draft, verify_coins = draft_block(call, plan, timer)
        width = draft.token_ids.shape[1]
        timer.mark("drafted")
        real = draft_lengths_on_host(call, draft)
        with call.ranks.forward():
            logits, hidden_states = call.target.score(sequence, draft.token_ids)
        timer.mark("scored")
        scores = logits if call.processors is None else call.processors(logits, sequence, 0, real)
        verdict, is_nan = decide(call, scores, draft, verify_coins)
        committed = call.commit(draft.token_ids, verdict)
        hits = call.criteria.stop_string_hits(sequence, width + 1)
        read = read_step(call.ranks, committed, verdict, draft, is_nan, hits, call.planner.learns)
        timer.mark("committed")
        follow(call, read)
        check_for_nan(call, read)
        columns = [length - sequence.prompt_length for length in sequence.host_lengths]
        counts = [len(tokens) for tokens in read.new_tokens]
        if not call.recorder.is_idle:
            call.recorder.add_block(scores, logits, hidden_states, columns, counts)
        was_running = [not is_over for is_over in sequence.finished]
        taken = emission.advance(read.new_tokens, read.ended, read.stop_hits)
        call.counters.record_step(
            width,
            read.drafted,
            read.accepted,
            taken,
            was_running,
            timer.seconds("start", "drafted"),
            timer.seconds("drafted", "committed"),
        )
        if call.planner.learns and call.ranks.leads:
            learn(
                call, state, plan, [s for s, was in zip(read.survivals, was_running, strict=True) if was], taken, timer
            )
        call.counters.record_dropped(emission.take_dropped())
        roll_back(call, committed.num_emitted, counts)


def draft_block(call: SpeculativeCall, plan: DraftPlan, timer: StepTimer) -> tuple[Draft, Tensor]:
    """The step's draft, the same on every rank, and the coins [batch, draft + 1] of its verification."""
    sequence = call.sequence
    sequence.reserve(plan.length + 1)
    draft_coins, verify_coins = call.coins.next(plan.length)
    draft = propose(call, plan, draft_coins, timer)
    if call.ranks.size > 1:
        draft = leaders_draft(call, draft)
    width = draft.token_ids.shape[1]
    if width < plan.length:  # a drafter may propose less, or have failed
        verify_coins = torch.cat([verify_coins[:, :width], verify_coins[:, -1:]], dim=1)
    elif width > plan.length:  # the leader's: this rank's verdict is not asked for
        verify_coins = verify_coins[:, -1:].expand(-1, width + 1)
    return draft, verify_coins


def leaders_draft(call: SpeculativeCall, draft: Draft) -> Draft:
    """What the leader drafted, on every rank."""
    sequence = call.sequence
    rows = call.ranks.read(torch.cat([draft.lengths[:, None], draft.token_ids], dim=1))
    if call.ranks.leads:
        return draft
    told = torch.tensor(rows, dtype=torch.long, device=sequence.device)
    sequence.reserve(told.shape[1])
    sequence.write(0, told[:, 1:])
    return Draft(told[:, 1:], None, told[:, 0])


def propose(call: SpeculativeCall, plan: DraftPlan, coins: Tensor, timer: StepTimer) -> Draft:
    """The drafter's proposal, cut at each row's limit; nothing where there is nothing to draft or the draft fails."""
    sequence, width = call.sequence, plan.length
    if width == 0 or call.drafter is None:
        timer.mark("prepared")
        return Draft.nothing(sequence)
    try:
        call.drafter.prepare(sequence, plan)
        timer.mark("prepared")
        draft = call.drafter.propose(sequence, width, coins)
    except Exception as failure:  # whatever a drafter may raise; an error of a processor is the caller's to see
        if call.processors is not None and call.processors.raised is failure:
            raise
        drop_draft(call, f"the draft failed ({_said(failure)})")
        timer.mark("prepared")
        return Draft.nothing(sequence)
    if call.processors is not None:  # they look for each position's own prefix in the scratch
        sequence.write(0, draft.token_ids)
    room = (sequence.limits() - sequence.lengths - 1).clamp(0, width)
    lengths = torch.where(sequence.is_finished, 0, torch.minimum(draft.lengths, room))
    probs = None if draft.probs is None else draft.probs[:, :width]
    return Draft(draft.token_ids[:, :width], probs, lengths, draft.is_broken)


def _said(failure: Exception) -> str:
    return str(failure) if isinstance(failure, DraftFailure) else f"{type(failure).__name__}: {failure}"


def drop_draft(call: SpeculativeCall, why: str) -> None:
    """Go on without a drafter until the call ends."""
    call.drafter = None
    call.counters.note(f"Decoded plainly from the point where {why}.")


def learn(
    call: SpeculativeCall,
    state: StepState,
    plan: DraftPlan,
    survivals: list[list[float]],
    taken: list[int],
    timer: StepTimer,
) -> None:
    """Tell the planner what came of its plan; a draft that failed teaches nothing."""
    if call.drafter is None and plan.length:
        return
    seconds = [
        timer.seconds(*pair) for pair in (("start", "prepared"), ("prepared", "drafted"), ("drafted", "committed"))
    ]
    call.planner.learn(state, plan, StepOutcome(survivals, sum(taken), *seconds))


def draft_lengths_on_host(call: SpeculativeCall, draft: Draft) -> list[int] | None:
    """Positions per row that mean something, read only when a processor must be called on real prefixes."""
    if call.processors is None or not call.processors.needs_prefixes:
        return None
    lengths = draft.lengths.tolist()
    return [0 if is_over else n + 1 for n, is_over in zip(lengths, call.sequence.finished, strict=True)]


def decide(call: SpeculativeCall, scores: Tensor, draft: Draft, coins: Tensor) -> tuple[Verdict, Tensor | None]:
    """Verify the block; also bool [batch], rows whose next token came from NaN (None when greedy: plain takes it)."""
    if not call.is_sampling:
        return verify_greedy(scores.argmax(dim=-1), draft.token_ids, draft.lengths), None
    target_probs = sampling.softmax_probs(scores)
    verdict = call.verifier(target_probs, draft.probs, draft.token_ids, draft.lengths, coins)
    # One NaN score makes the whole softmax of its position NaN: one entry tells.
    at_next = target_probs[..., 0].gather(1, verdict.num_accepted[:, None])[:, 0]
    return verdict, at_next.isnan()


def follow(call: SpeculativeCall, read: StepRead) -> None:
    """Where another rank leads: its tokens, in place of those that this rank's own commit wrote."""
    if not call.ranks.leads:
        call.sequence.rewrite(read.new_tokens)


def check_for_nan(call: SpeculativeCall, read: StepRead) -> None:
    """Raise if the target gave NaN in a running row; drop the draft if it did."""
    live = call.sequence.live_rows
    for row in live:
        if read.target_is_nan[row]:
            raise target_nan(call.target.name, row)
    if call.drafter is not None and any(read.draft_is_broken[row] for row in live):
        drop_draft(call, "the draft gave NaN")


def target_nan(name: str, row: int) -> TargetNaN:
    """The error for NaN in the target's scores."""
    return TargetNaN(
        f"The target {name} gave NaN or only -inf scores in row {row}, after its logits processors: no token can be "
        "drawn. Check its dtype (float16 overflows) and its logits processors; the draft has no part in this."
    )


def roll_back(call: SpeculativeCall, num_emitted: Tensor, counts: list[int]) -> None:
    """Set every row's length to what it keeps. Keys past it are forgotten by the next forward."""
    sequence, lengths = call.sequence, call.emission.lengths
    is_kept = lengths == [length + count for length, count in zip(sequence.host_lengths, counts, strict=True)]
    if is_kept and call.ranks.leads:
        sequence.advance(num_emitted, lengths)
    else:  # a criterion on the host ended a row before the device did, or the leader did
        sequence.set_lengths(lengths)
    sequence.set_finished(call.emission.rows_over())


def first_tokens(call: SpeculativeCall, scores: Tensor) -> None:
    """Choose every row's first token from the prefill's processed `scores` [batch, vocab] and commit it."""
    nothing = Draft.nothing(call.sequence)
    verdict, is_nan = decide(call, scores[:, None], nothing, call.coins.next(0)[1])
    committed = call.commit(nothing.token_ids, verdict)
    read = read_step(call.ranks, committed, verdict, nothing, is_nan, call.criteria.stop_string_hits(call.sequence, 1))
    follow(call, read)
    check_for_nan(call, read)
    call.emission.advance(read.new_tokens, read.ended, read.stop_hits)
    roll_back(call, committed.num_emitted, [len(tokens) for tokens in read.new_tokens])
