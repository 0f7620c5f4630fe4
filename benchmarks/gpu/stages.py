"""The stages in order, with the time each needs and may take."""

from benchmarks.gpu import attention, correctness, end_to_end, exactness, micro, passes
from benchmarks.gpu.run import Stage

__all__ = ["STAGES", "chosen"]

STAGES = (
    Stage(0, "versions and device", micro.device_facts, 1, 20),
    Stage(1, "bandwidth, launches, waits", micro.micro, 8, 20),
    Stage(2, "small net and drafts", exactness.base_net_and_drafts, 8, 20, is_correctness=True),
    Stage(3, "widening is exact in float32", exactness.widening, 8, 20, is_correctness=True),
    Stage(4, "correctness", correctness.correctness, 20, 75, is_correctness=True),
    Stage(5, "pass times by rows", passes.pass_times, 20, 60),
    Stage(6, "bf16 texts", end_to_end.bf16, 30, 80),
    Stage(7, "nf4 texts", end_to_end.nf4, 30, 80),
    Stage(8, "70B in nf4", end_to_end.large, 30, 50),
    Stage(9, "never slower", end_to_end.never_slower, 15, 25),
    Stage(10, "attention over a long cache", attention.attention, 5, 15),
)


def chosen(text: str) -> tuple[Stage, ...]:
    """The stages that "all" or a list such as "0,2,4-6" names.

    Raises:
        ValueError: something that is neither.
    """
    if text == "all":
        return STAGES
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            numbers |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            numbers.add(-1)
    unknown = numbers - {stage.number for stage in STAGES}
    if unknown or not numbers:
        raise ValueError(
            f'--stages must be "all" or numbers of 0 to {STAGES[-1].number} such as "0,2,4-6", got {text!r}.'
        )
    return tuple(stage for stage in STAGES if stage.number in numbers)
