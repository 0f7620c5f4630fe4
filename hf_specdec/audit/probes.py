"""Small questions with exact answers: the draft's vocabulary, p = q, and replaying a call."""

from hf_specdec.audit.checks import Check
from hf_specdec.audit.observer import Observations
from hf_specdec.audit.pair import Pair

__all__ = ["replay_check", "residual_check", "vocabulary_check"]


def vocabulary_check(observed: Observations) -> Check:
    """The draft proposes no id that it does not share with the target."""
    summary = (
        f"{observed.num_foreign} of {observed.num_drafted} drafted ids beyond the {observed.shared_size} shared ones."
    )
    facts = {"num_drafted": observed.num_drafted, "num_foreign": observed.num_foreign}
    return Check("vocabulary", not observed.num_foreign, summary, facts | {"shared_size": observed.shared_size})


def residual_check(observed: Observations) -> Check:
    """With q = p the residual is zero: every drafted token stays, and a token with p = 0 never comes out."""
    is_passed = observed.num_probed > 0 and not observed.num_refused and not observed.num_let_through
    summary = (
        f"{observed.num_probed - observed.num_refused} of {observed.num_probed} tokens drafted from q = p accepted, "
        f"{observed.num_let_through} impossible ones let through."
    )
    facts = {name: getattr(observed, name) for name in ("num_probed", "num_refused", "num_let_through")}
    return Check("zero residual", is_passed, summary, facts)


def replay_check(pair: Pair, max_new_tokens: int) -> Check:
    """The same seed and call give the same tokens, and so does the recorded schedule under another K."""
    inputs = pair.batch(pair.prompts)
    options = {**pair.sampling_options(), "max_new_tokens": max_new_tokens}

    def tokens(flag: dict | None) -> list:
        return pair.generate(inputs, 7, flag, **options).tolist()

    first = tokens(None)
    schedule = pair.report().draft_lengths
    is_same = tokens(None) == first
    is_replayed = tokens({"draft_lengths": schedule, "num_speculative_tokens": pair.draft_length + 1}) == first
    words = {True: "the same", False: "OTHER"}
    summary = f"The same seed gave {words[is_same]} tokens, its draft lengths {words[is_replayed]} ones."
    facts = {"is_same": is_same, "is_replayed": is_replayed, "num_steps": len(schedule)}
    return Check("seeded replay", is_same and is_replayed, summary, facts)
