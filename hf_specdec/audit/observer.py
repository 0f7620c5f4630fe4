"""Verifiers that the audit puts in the place of the call's own: one that looks on, and wrong ones that must be caught.

`CONTROLS` are faults that real implementations have had. An audit that does not reject them on the same pair, prompts
and sample size has no power, and says so instead of passing.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hf_specdec.audit.gtest import LawCounts
from hf_specdec.registry import VERIFIERS
from hf_specdec.sampling import draw
from hf_specdec.verification import Verdict, Verifier

__all__ = ["CONTROLS", "Observations", "installed"]

Rule = Callable[..., Verdict]
NUM_PROBES = 3  # blocks on which the rule is probed with p = q
ALMOST_ONE = 1 - 2**-53  # the largest uniform that float64 draws can give
SUM_TOLERANCE = 1e-3  # a float32 softmax over 2^18 ids sums to 1 within 2^18 half-ulps of its terms, far less than this


def resample_from_target(rule: Rule) -> Rule:
    """After a rejection draws from p instead of from the residual."""

    def wrong(target_probs: Tensor, draft_probs, draft_ids: Tensor, draft_lengths: Tensor, uniforms: Tensor) -> Verdict:
        verdict = rule(target_probs, draft_probs, draft_ids, draft_lengths, uniforms)
        rows = torch.arange(len(draft_ids), device=draft_ids.device)
        return verdict._replace(next_ids=draw(target_probs[rows, verdict.num_accepted], uniforms[:, -1]))

    return wrong


def always_accept(rule: Rule) -> Rule:
    """Keeps every drafted token."""

    def wrong(target_probs: Tensor, draft_probs, draft_ids: Tensor, draft_lengths: Tensor, uniforms: Tensor) -> Verdict:
        verdict = rule(target_probs, draft_probs, draft_ids, draft_lengths, uniforms)
        rows = torch.arange(len(draft_ids), device=draft_ids.device)
        next_ids = draw(target_probs[rows, draft_lengths], uniforms[:, -1])
        return verdict._replace(num_accepted=draft_lengths.long(), next_ids=next_ids)

    return wrong


CONTROLS: dict[str, Callable[[Rule], Rule]] = {
    "resample from p": resample_from_target,
    "always accept": always_accept,
}


@contextlib.contextmanager
def installed(rule: str, wrap: Callable[[Rule], Rule]) -> Iterator[str]:
    """Register `wrap` around the rule called `rule` for a while; gives the name to ask for."""

    class Wrapped(Verifier):
        def __init__(self) -> None:
            self._rule = wrap(VERIFIERS[rule]())

        def __call__(self, target_probs, draft_probs, draft_ids, draft_lengths, uniforms) -> Verdict:
            return self._rule(target_probs, draft_probs, draft_ids, draft_lengths, uniforms)

    name = f"audit of {rule} {id(Wrapped)}"
    VERIFIERS[name] = Wrapped
    try:
        yield name
    finally:
        del VERIFIERS[name]


class Observations:
    """What the blocks of a sampled call looked like to its rule.

    Args:
        shared_size: ids below this one are the draft's too.
        seed: of the probes' own randomness.

    Attributes:
        draft_counts: drafted tokens against the q that they were said to be drawn from.
        num_drafted: drafted tokens seen.
        num_foreign: drafted ids that are not the draft's.
        num_bad_laws: positions where q is negative or does not sum to 1.
        num_probed, num_refused: tokens drafted from q = p, and those not kept.
        num_let_through: drafted tokens with p = q = 0 that were kept, and resampled ones with p = 0.
    """

    def __init__(self, shared_size: int, seed: int) -> None:
        self.shared_size, self._seed = shared_size, seed
        self.draft_counts = LawCounts()
        self.num_drafted = self.num_foreign = self.num_bad_laws = 0
        self.num_probed = self.num_refused = self.num_let_through = 0
        self._probes_left = NUM_PROBES

    def watching(self, rule: Rule) -> Rule:
        """`rule`, looked at."""

        def watched(target_probs, draft_probs, draft_ids, draft_lengths, uniforms) -> Verdict:
            is_drafted = torch.arange(draft_ids.shape[1], device=draft_ids.device) < draft_lengths[:, None]
            self._look(draft_probs, draft_ids, is_drafted)
            if self._probes_left and bool(is_drafted.any()):
                self._probes_left -= 1
                self._probe(rule, target_probs)
            return rule(target_probs, draft_probs, draft_ids, draft_lengths, uniforms)

        return watched

    def _look(self, draft_probs: Tensor | None, draft_ids: Tensor, is_drafted: Tensor) -> None:
        self.num_drafted += int(is_drafted.sum())
        self.num_foreign += int((is_drafted & (draft_ids >= self.shared_size)).sum())
        if draft_probs is None or not self.num_drafted:
            return
        laws = draft_probs[is_drafted]
        is_bad = (laws.sum(dim=1) - 1).abs() > SUM_TOLERANCE
        self.num_bad_laws += int((is_bad | (laws < 0).any(dim=1)).sum())
        self.draft_counts.add(laws, draft_ids[is_drafted])

    def _probe(self, rule: Rule, target_probs: Tensor) -> None:
        """Draft from p itself: everything has to stay, also under the largest coin; an impossible token never."""
        batch, width = target_probs.shape[0], target_probs.shape[1] - 1
        generator = torch.Generator().manual_seed(self._seed + self._probes_left)
        draft_probs, device = target_probs[:, :width], target_probs.device
        shape = (batch, 2 * width + 1)
        uniforms = torch.rand(shape, generator=generator, dtype=torch.float64).to(device)
        ids, lengths = draw(draft_probs, uniforms[:, :width]), torch.full((batch,), width, device=device)
        coins = uniforms[:, width:]
        for coin in (coins, torch.full_like(coins, ALMOST_ONE)):
            verdict = rule(target_probs, draft_probs, ids, lengths, coin)
            self.num_probed += batch * width
            self.num_refused += int((lengths - verdict.num_accepted).sum())
            self.num_let_through += _num_impossible(target_probs, verdict)
        is_possible, unlikely = target_probs[:, 0].min(dim=1)
        rows = is_possible == 0
        if bool(rows.any()):
            ids = torch.cat([unlikely[:, None], ids[:, 1:]], dim=1)
            verdict = rule(target_probs, draft_probs, ids, lengths, torch.zeros_like(coins))
            self.num_let_through += int((verdict.num_accepted[rows] > 0).sum())
            self.num_let_through += _num_impossible(target_probs, verdict)


def _num_impossible(target_probs: Tensor, verdict: Verdict) -> int:
    """Final tokens of a block that the target gives probability 0."""
    rows = torch.arange(len(target_probs), device=target_probs.device)
    return int((target_probs[rows, verdict.num_accepted, verdict.next_ids] <= 0).sum())
