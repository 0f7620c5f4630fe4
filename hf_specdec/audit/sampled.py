"""The law of sampled tokens at positions inside a block, against the target's exact law, and a wrong rule to be caught.

Every row samples K + 3 tokens after a prompt. The first comes from the prefill; each later one was drafted, resampled
or a bonus, and has to be a draw from the target's law given that row's own text, which one forward over the finished
texts gives (`host.oracle`). `gtest` compares. The same is done with a wrong rule in the place of the call's own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.audit.checks import Check
from hf_specdec.audit.gtest import LawCounts, chi_square_at
from hf_specdec.audit.observer import CONTROLS, Observations, installed
from hf_specdec.audit.pair import Pair
from hf_specdec.host.call import PROBS_BYTES
from hf_specdec.host.draft_model import output_vocab_size
from hf_specdec.host.oracle import call_processors, later_probs
from hf_specdec.report import SpeculationReport
from hf_specdec.vocabulary import VocabularyMap

__all__ = ["FALSE_ALARM_RATE", "REJECT_BELOW", "Sample", "control_check", "draft_check", "draw_sample", "law_check"]

FALSE_ALARM_RATE = 1e-6
"""Probability that a faultless pair fails an audit by chance, all its tests together."""
NUM_TESTS = 5  # three kinds of cells for the text, two for the drafts
REJECT_BELOW = FALSE_ALARM_RATE / NUM_TESTS
# Tokens that top-k forbids: a tie at its border may fall either way between two passes, with about the mass of one
# token there, in a few draws of a thousand million. A rule that lets p = 0 through does it in whole percents.
MAX_IMPOSSIBLE = 1e-3
LAW_BYTES = 64 * 2**20  # of probabilities held at once
PROMPT_TOKENS = 64  # the end of a longer prompt is sampled from


@dataclass(frozen=True)
class Sample:
    """One sample of texts.

    Attributes:
        counts: its tokens against the target's law.
        observed: what its blocks looked like.
        reports: of its calls.
    """

    counts: LawCounts
    observed: Observations
    reports: list[SpeculationReport]

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ reached, over all calls."""
        reached = sum(report.reached for report in self.reports)
        return sum(report.accepted for report in self.reports) / reached if reached else 0.0


def draw_sample(pair: Pair, num_rows: int, seed: int, control: str | None = None) -> Sample:
    """Sample `num_rows` texts, spread over the prompts, with the pair's rule or the wrong one called `control`."""
    draft_vocab = pair.vocab if pair.draft is None else output_vocab_size(pair.draft)
    shared = VocabularyMap(pair.vocab, draft_vocab).shared_size
    sample = Sample(LawCounts(), Observations(shared, pair.seed), [])
    num_new, position_bytes = pair.draft_length + 3, pair.vocab * 4
    # As many rows as can draft K tokens each within the loop's own limit.
    most = max(1, PROBS_BYTES // (position_bytes * (2 * pair.draft_length + 1)))
    per_prompt, calls = -(-num_rows // len(pair.prompts)), 0
    with installed(pair.rule, sample.observed.watching if control is None else CONTROLS[control]) as rule:
        for prompt in (each[-PROMPT_TOKENS:] for each in pair.prompts):
            left = per_prompt
            while left:
                rows, calls = min(left, most), calls + 1
                inputs = {name: value.repeat(rows, 1) for name, value in pair.batch([prompt]).items()}
                options = {**pair.sampling_options(), "max_new_tokens": num_new}
                ids = pair.generate(inputs, seed + calls, {"rejection_sample_method": rule}, **options)
                sample.reports.append(pair.report())
                left -= rows
                _count(pair, ids, len(prompt), options, sample.counts)
    return sample


def _count(pair: Pair, ids: Tensor, prompt_length: int, options: dict[str, Any], counts: LawCounts) -> None:
    num_new = ids.shape[1] - prompt_length
    if num_new < 2:
        return
    processors = call_processors(pair.target, ids[:1, :prompt_length], options)
    chunk = max(1, LAW_BYTES // (num_new * pair.vocab * 4))
    for rows in ids.split(chunk):
        new = rows[:, prompt_length:]
        is_eos = torch.isin(new, torch.tensor(pair.eos_ids, dtype=torch.long, device=new.device)).long()
        is_drawn = (is_eos.cumsum(dim=1) - is_eos == 0)[:, 1:]
        target_probs = later_probs(pair.target, rows, num_new, processors)[is_drawn]
        draft_probs = None
        if pair.draft is not None:
            draft_probs = later_probs(pair.draft, rows, num_new, processors, pair.vocab)[is_drawn]
        counts.add(target_probs, new[:, 1:][is_drawn], draft_probs)


def law_check(sample: Sample) -> Check:
    """Do the texts follow the target's law?"""
    tests, counts = sample.counts.tests(), sample.counts
    is_possible = counts.num_impossible <= MAX_IMPOSSIBLE * counts.num_draws
    lowest = min((p for _, _, p in tests.values()), default=1.0)
    summary = (
        f"{counts.num_draws} tokens inside blocks, acceptance rate {sample.acceptance_rate:.2f}: lowest p-value "
        f"{lowest:.2g}, fails below {REJECT_BELOW:.0e}"
    )
    if counts.num_impossible:
        summary += f"; {counts.num_impossible} tokens of probability 0"
    return Check("sampled law", lowest >= REJECT_BELOW and is_possible, summary + ".", _facts(sample.counts))


def control_check(sample: Sample, control: str, num_rows: int) -> Check:
    """Is the wrong rule's sample rejected, by the same tests at the same size?"""
    tests = sample.counts.tests()
    lowest = min((p for _, _, p in tests.values()), default=1.0)
    is_caught = lowest < REJECT_BELOW
    summary = f"The wrong rule '{control}' is rejected, p-value {lowest:.2g}."
    if not is_caught:
        summary = (
            f"No power: the wrong rule '{control}' is not rejected, lowest p-value {lowest:.2g} where "
            f"{REJECT_BELOW:.0e} is needed, so that a pass would prove nothing. {_remedy(tests, num_rows)}"
        )
    return Check("negative control", is_caught, summary, _facts(sample.counts) | {"control": control})


def _remedy(tests: dict[str, tuple[float, int, float]], num_rows: int) -> str:
    """How many samples the control needs: what G has above its mean grows with the sample."""
    factors = [
        1.3 * (chi_square_at(REJECT_BELOW, freedom) - freedom) / (statistic - freedom)
        for statistic, freedom, _ in tests.values()
        if freedom and statistic > 2 * freedom
    ]
    if factors and min(factors) < 200:
        return f"Try --samples {int(num_rows * max(1.5, min(factors)))}."
    return "The draft hardly differs from the target on these prompts: try others, or a higher --temperature."


def draft_check(observed: Observations) -> Check:
    """Were drafted tokens drawn from the very q that the rule was given?"""
    tests = observed.draft_counts.tests()
    if not tests:
        return Check("draft law", True, "Drafts are point masses: there is no q to compare them with.", {})
    lowest = min(p for _, _, p in tests.values())
    is_passed = lowest >= REJECT_BELOW and not observed.num_bad_laws and not observed.draft_counts.num_impossible
    summary = f"{observed.draft_counts.num_draws} drafted tokens against their q: lowest p-value {lowest:.2g}"
    if observed.num_bad_laws:
        summary += f"; {observed.num_bad_laws} times q was no law"
    if observed.draft_counts.num_impossible:
        summary += f"; {observed.draft_counts.num_impossible} drafted where q is 0"
    return Check("draft law", is_passed, summary + ".", _facts(observed.draft_counts))


def _facts(counts: LawCounts) -> dict:
    tests = {
        kind: {"g": statistic, "degrees_of_freedom": freedom, "p_value": p}
        for kind, (statistic, freedom, p) in counts.tests().items()
    }
    return {
        "num_draws": counts.num_draws,
        "num_impossible": counts.num_impossible,
        "reject_below": REJECT_BELOW,
        "tests": tests,
    }
