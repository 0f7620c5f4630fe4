"""Verification for logits processors that may keep state: one call per committed token, on its exact prefix, in order.

Nothing is known of such a processor but what plain decoding does with it. So the target's block is scored in one
forward, as always, but each position's processed scores are taken only once the token before it is committed: a
rejected continuation is never shown to the processor, and nothing past the end of the text is. The draft goes without
it (q unprocessed stays exact). The rule is the standard one, walked token by token (Chen et al. 2023, arXiv 2302.01318,
Algorithm 2); one row only, since rows apart would be asked at different lengths.
"""

from typing import Any

import torch
from torch import Tensor

from hf_specdec import sampling
from hf_specdec.decoding import SpeculativeCall, check_for_nan, learn, propose, roll_back
from hf_specdec.drafters.base import Draft
from hf_specdec.step_read import read_step
from hf_specdec.timing import StepTimer
from hf_specdec.verification import StandardVerifier, Verdict, verify_greedy

__all__ = ["decode_one_by_one"]


def decode_one_by_one(call: SpeculativeCall, processors: Any) -> None:
    """Run steps until `call.emission.is_done`.

    Args:
        call: a call of one row, without position-wise processors.
        processors: the caller's LogitsProcessorList, called as plain calls it.
    """
    sequence = call.sequence
    while not call.emission.is_done:
        timer = StepTimer(sequence.device)
        timer.mark("start")
        state, plan = call.plan()
        sequence.reserve(plan.length + 1)
        draft_coins, verify_coins = call.coins.next(plan.length)
        draft = propose(call, plan, draft_coins, timer)
        timer.mark("drafted")
        logits, hidden_states = call.target.score(sequence, draft.token_ids)
        accepted, taken = _walk(call, processors, draft, logits, hidden_states, verify_coins)
        timer.mark("committed")
        call.counters.record_step(
            draft.token_ids.shape[1],
            draft.lengths.tolist(),
            [accepted],
            [taken],
            [True],
            timer.seconds("start", "drafted"),
            timer.seconds("drafted", "committed"),
        )
        if call.planner.learns:
            is_rejected = accepted < int(draft.lengths[0]) and not call.emission.is_done
            learn(call, state, plan, [[1.0] * accepted + [0.0] * is_rejected], [taken], timer)
        call.counters.record_dropped(call.emission.take_dropped())


def _walk(
    call: SpeculativeCall, processors: Any, draft: Draft, logits: Tensor, hidden_states: Any, coins: Tensor
) -> tuple[int, int]:
    """Commit tokens of the block until one is rejected or the text ends; returns (accepted, taken)."""
    sequence, accepted, taken = call.sequence, 0, 0
    num_drafted = int(draft.lengths[0])
    for position in range(num_drafted + 1):
        length = sequence.host_lengths[0]
        scores = processors(sequence.ids[:, :length], logits[:, position].clone())
        verdict, is_nan = _judge(call, scores, draft, position, position < num_drafted, coins)
        is_kept = bool(verdict.num_accepted[0])
        token = draft.token_ids[:, position] if is_kept else verdict.next_ids
        nothing = Draft.nothing(sequence)
        alone = Verdict(torch.zeros_like(verdict.num_accepted), token, verdict.accept_probs[:, :0])
        committed = call.commit(nothing.token_ids, alone)
        read = read_step(call.ranks, committed, alone, nothing, is_nan, call.criteria.stop_string_hits(sequence, 1))
        check_for_nan(call, read)
        if not call.recorder.is_idle:
            states = None if hidden_states is None else [layer[:, position : position + 1] for layer in hidden_states]
            column = length - sequence.prompt_length
            call.recorder.add_block(scores[:, None], logits[:, position : position + 1], states, [column], [1])
        taken += call.emission.advance(read.new_tokens, read.ended, read.stop_hits)[0]
        accepted += is_kept
        roll_back(call, committed.num_emitted, [len(tokens) for tokens in read.new_tokens])
        if call.emission.is_done or not is_kept:
            break
    return accepted, taken


def _judge(
    call: SpeculativeCall, scores: Tensor, draft: Draft, position: int, is_drafted: bool, coins: Tensor
) -> tuple[Verdict, Tensor | None]:
    """The rule for one position: keep the drafted token, or draw another; without one, draw from p."""
    ids = draft.token_ids[:, position : position + 1] if is_drafted else draft.token_ids[:, :0]
    lengths = torch.full_like(draft.lengths, int(is_drafted))
    if not call.is_sampling:
        chosen = scores.argmax(dim=-1, keepdim=True)
        return verify_greedy(chosen.expand(-1, 1 + is_drafted), ids, lengths), None
    target_probs = sampling.softmax_probs(scores)[:, None].expand(-1, 1 + is_drafted, -1)
    probs = None if draft.probs is None or not is_drafted else draft.probs[:, position : position + 1]
    pair = torch.cat([coins[:, position : position + int(is_drafted)], coins[:, -1:]], dim=1)
    return StandardVerifier()(target_probs, probs, ids, lengths, pair), target_probs[:, 0, 0].isnan()
