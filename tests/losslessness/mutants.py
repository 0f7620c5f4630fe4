"""Wrong rules, each a bug some project has had, to be put where the right ones go. Every law test must reject them.

`MUTANTS` are verifiers around a right one: ``MUTANTS[name](inner)``, or ``registered_class(name, rule)`` for
`register_verifier`. `DRAW_MUTANTS` go where a drafter draws its token, `LENGTH_MUTANTS` where drafting ends;
`show_prefixes_one_short` and `take_another_row` put a block through logits processors.
`DropTheBonus` keeps the law of the text; what it loses is tokens per step, so it is rejected by their count.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_specdec.registry import VERIFIERS
from hf_specdec.sampling import draw
from hf_specdec.verification import Verdict, Verifier


class Mutant(Verifier):
    """A right verifier whose inputs or outputs are tampered with; as it stands, nothing is."""

    shares_uniform = False

    def __init__(self, inner: Verifier):
        self.inner = inner

    def rewire(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms):
        """The arguments that the right rule is given instead."""
        return target_probs, draft_probs, draft_ids, draft_lengths, uniforms

    def __call__(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms) -> Verdict:
        return self.inner(*self.rewire(target_probs, draft_probs, draft_ids, draft_lengths, uniforms))


class ResampleFromTarget(Mutant):
    """After a rejection draws from p instead of the residual."""

    def __call__(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms) -> Verdict:
        verdict = self.inner(target_probs, draft_probs, draft_ids, draft_lengths, uniforms)
        rows = torch.arange(len(draft_ids), device=draft_ids.device)
        return verdict._replace(next_ids=draw(target_probs[rows, verdict.num_accepted], uniforms[:, -1]))


class AlwaysAccept(Mutant):
    """Keeps every drafted token."""

    def __call__(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms) -> Verdict:
        verdict = self.inner(target_probs, draft_probs, draft_ids, draft_lengths, uniforms)
        rows = torch.arange(len(draft_ids), device=draft_ids.device)
        next_ids = draw(target_probs[rows, draft_lengths], uniforms[:, -1])
        return verdict._replace(num_accepted=draft_lengths.long(), next_ids=next_ids)


class DropTheBonus(Mutant):
    """Emits no further token when the whole draft is accepted."""

    def __call__(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms) -> Verdict:
        verdict = self.inner(target_probs, draft_probs, draft_ids, draft_lengths, uniforms)
        if draft_ids.shape[1] == 0:
            return verdict
        is_dropped = (verdict.num_accepted == draft_lengths) & (draft_lengths > 0)
        last = (draft_lengths - 1).clamp(min=0)
        last_ids = draft_ids.gather(1, last.unsqueeze(1)).squeeze(1)
        return verdict._replace(
            num_accepted=torch.where(is_dropped, last, verdict.num_accepted),
            next_ids=torch.where(is_dropped, last_ids, verdict.next_ids),
        )


class ShiftByOne(Mutant):
    """Judges each drafted token by the target's law of the position after it."""

    def rewire(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms):
        return target_probs.roll(-1, dims=1), draft_probs, draft_ids, draft_lengths, uniforms


class ShareOneUniform(Mutant):
    """Uses one uniform for every coin and for the final draw."""

    shares_uniform = True

    def rewire(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms):
        return target_probs, draft_probs, draft_ids, draft_lengths, uniforms[:, :1].expand_as(uniforms)


class DraftProbsBeforeWarpers(Mutant):
    """Judges by q as it was before a temperature of 0.5, while the token was drawn after it."""

    def rewire(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms):
        if draft_probs is not None:
            draft_probs = draft_probs.sqrt()
            draft_probs = draft_probs / draft_probs.sum(dim=-1, keepdim=True)
        return target_probs, draft_probs, draft_ids, draft_lengths, uniforms


class DropAfterDraw(Mutant):
    """Ends the draft before the first drafted token that q finds unlikely: kept or not depends on what was drawn."""

    def rewire(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms):
        if draft_probs is not None:
            is_likely = draft_probs.gather(-1, draft_ids.unsqueeze(-1)).squeeze(-1) >= 0.3
            draft_lengths = torch.minimum(draft_lengths, is_likely.long().cumprod(dim=1).sum(dim=1))
        return target_probs, draft_probs, draft_ids, draft_lengths, uniforms


class AcceptAtZero(Mutant):
    """Accepts on u * q <= p, so that a coin of 0 lets an impossible token through."""

    def __call__(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms) -> Verdict:
        verdict = self.inner(target_probs, draft_probs, draft_ids, draft_lengths, uniforms)
        if draft_ids.shape[1] == 0:
            return verdict
        index = draft_ids.unsqueeze(-1)
        target_at = target_probs.gather(-1, index).squeeze(-1)
        draft_at = torch.ones_like(target_at) if draft_probs is None else draft_probs.gather(-1, index).squeeze(-1)
        is_equal = uniforms[:, :-1] * draft_at == target_at
        rejected = verdict.num_accepted.clamp(max=draft_ids.shape[1] - 1)
        is_let_through = (verdict.num_accepted < draft_lengths) & is_equal.gather(1, rejected.unsqueeze(1)).squeeze(1)
        return verdict._replace(num_accepted=verdict.num_accepted + is_let_through.long())


def draw_argmax(probs: Tensor, uniforms: Tensor) -> Tensor:
    """A drafter that takes the most probable token and still reports `probs` as the law it drew from."""
    return probs.argmax(dim=-1)


def drop_drafted_eos(draft_ids: Tensor, draft_lengths: Tensor, eos_ids: Tensor | None) -> Tensor:
    """Ends the draft before a drafted end-of-sequence token instead of after it."""
    if eos_ids is None:
        return draft_lengths
    is_other = ~(draft_ids.unsqueeze(-1) == eos_ids).any(dim=-1)
    return torch.minimum(draft_lengths, is_other.long().cumprod(dim=1).sum(dim=1))


def show_prefixes_one_short(call: Callable) -> Callable:
    """`call` of `BlockProcessors`, where every position's prefix lacks its last token."""

    def wrong(self, scores, sequence, first=0, real=None):
        return call(self, scores, sequence, first - 1, real)

    return wrong


def take_another_row(call: Callable, num_prompts: int) -> Callable:
    """`processors._one_row`, where a processor is asked for a row of the next prompt."""

    def wrong(processor, ids, scores, row, batch):
        return call(processor, ids, scores, (row + batch // num_prompts) % batch, batch)

    return wrong


MUTANTS: dict[str, type[Mutant]] = {
    "resample from p": ResampleFromTarget,
    "always accept": AlwaysAccept,
    "drop the bonus": DropTheBonus,
    "shift by one": ShiftByOne,
    "share one uniform": ShareOneUniform,
    "q taken before the warpers": DraftProbsBeforeWarpers,
    "drop after draw": DropAfterDraw,
    "<= for < at p = 0": AcceptAtZero,
}
DRAW_MUTANTS: dict[str, Callable[..., Tensor]] = {"argmax draft with its logits as q": draw_argmax}
LENGTH_MUTANTS: dict[str, Callable[..., Tensor]] = {"drop a drafted EOS": drop_drafted_eos}
# Rejected by the number of emitted tokens, and by a coin of exactly 0; the law of the text is right in both.
KEEP_THE_LAW = {"drop the bonus", "<= for < at p = 0"}


def registered_class(name: str, rule: str) -> type[Verifier]:
    """A class without arguments for `register_verifier`: the mutant around the rule registered as `rule`."""
    mutant, inner = MUTANTS[name], VERIFIERS[rule]

    class Registered(mutant):
        def __init__(self):
            super().__init__(inner())

    return Registered
