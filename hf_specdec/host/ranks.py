"""One call of a target that several processes share (tensor parallel): rank 0 drafts and decides, all commit the same.

Every forward of such a target is a collective, so all ranks have to feed it the same tokens, the same number of times.
Little of a step is the same everywhere by itself: coins come from each process' own generator, draft lengths from
measured times, criteria and processors may be anything. So the group's first rank drafts and judges, and what came of
it goes to the others as integers: the drafted block before the forward, the committed tokens after it.

Between two forwards every exchange is one sum over the same number of integers, in which a rank that cannot go on says
so: wherever the others stand, they hear of it at their next exchange, and the call ends on every rank.

Ranks that hold a whole model each (data parallel) exchange nothing: `ranks_of` gives them `Alone`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, distributed

__all__ = ["Alone", "Group", "RankError", "Ranks", "num_ranks", "ranks_of", "why_split"]

ROOM = 1024
"""Integers of a message that travel with the status; longer ones take a second round."""
FAILED, FIRST_FLAG = 1, 2


class RankError(RuntimeError):
    """Another rank of the group raised, so this one's call ends too."""


class Ranks:
    """Who decodes together; this class is a process that decodes alone, and costs nothing.

    Attributes:
        leads: whether this rank drafts and decides.
        size: ranks that take part.
    """

    leads: bool = True
    size: int = 1

    def read(self, values: Tensor) -> list[list[int]]:
        """The leader's int64 [rows, columns], on the host of every rank."""
        return values.tolist()

    def any_of(self, *flags: bool) -> list[bool]:
        """Per flag, whether it is set on some rank."""
        return list(flags)

    def first_text(self, text: str | None) -> str | None:
        """The text of the first rank that has one."""
        return text

    def agree(self, what: str, values: list[int]) -> None:
        """Raise where the call is another one than the leader's.

        Raises:
            ValueError: `values` are not the leader's; the message says of `what`.
        """

    def meet(self) -> None:
        """Go on only if all ranks do."""

    def leave(self) -> None:
        """Nothing is exchanged any more."""

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """What raises inside, before `leave`, ends the call on all ranks."""
        yield

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A pass of the target: its own collectives run, so nobody can be told of an error inside it."""
        yield


@final
class Alone(Ranks):
    """The only rank."""


@final
class Group(Ranks):
    """One of several ranks that share a target.

    Args:
        group: the process group.
        device: where its collectives want tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.leads = self.rank == 0
        self._is_over = self._is_in_forward = False

    def read(self, values: Tensor) -> list[list[int]]:
        """See `Ranks.read`."""
        return self._exchange(0, values.to(self._device, torch.long) if self.leads else None)[1]

    def any_of(self, *flags: bool) -> list[bool]:
        """See `Ranks.any_of`."""
        bits = [FIRST_FLAG << place for place in range(len(flags))]
        codes, _ = self._exchange(sum(bit for bit, flag in zip(bits, flags, strict=True) if flag))
        return [any(code & bit for code in codes) for bit in bits]

    def first_text(self, text: str | None) -> str | None:
        """See `Ranks.first_text`."""
        if not any(self.any_of(text is not None)):
            return None
        return next(each for each in self._texts(text) if each is not None)

    def agree(self, what: str, values: list[int]) -> None:
        """See `Ranks.agree`."""
        if self.read(torch.tensor([values]))[0] != values:
            raise ValueError(f"Rank {self.rank} was called with another {what} than rank 0, whose target it shares.")

    def meet(self) -> None:
        """See `Ranks.meet`."""
        self._exchange(0)

    def leave(self) -> None:
        """See `Ranks.leave`."""
        self._is_over = True

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """See `Ranks.guard`."""
        try:
            yield
        except Exception as error:
            if not self._is_over and not self._is_in_forward:
                self._fail(error)
            raise

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """See `Ranks.forward`."""
        self._is_in_forward = True
        yield
        self._is_in_forward = False

    def _exchange(self, code: int, values: Tensor | None = None) -> tuple[list[int], list[list[int]]]:
        """(every rank's code, the leader's values)."""
        message = torch.zeros(self.size + 2 + ROOM, dtype=torch.long, device=self._device)
        message[self.rank] = code
        fits = values is not None and values.numel() <= ROOM
        if values is not None:
            rows, columns = values.shape
            message[self.size], message[self.size + 1] = rows, columns
            if fits:
                message[self.size + 2 : self.size + 2 + values.numel()] = values.flatten()
        distributed.all_reduce(message, group=self._group)
        told = message.tolist()
        codes, (rows, columns) = told[: self.size], told[self.size : self.size + 2]
        failed = [rank for rank, each in enumerate(codes) if each == FAILED]
        if failed:
            self._is_over = True
            texts = self._texts(None)
            raise RankError(
                f"Rank {failed[0]} of the {self.size} that share the target raised {texts[failed[0]]}, so the call "
                f"ends on rank {self.rank} too."
            )
        count = rows * columns
        held = told[self.size + 2 : self.size + 2 + count]
        if count > ROOM:
            more = torch.zeros(count, dtype=torch.long, device=self._device)
            if values is not None:
                more += values.flatten()
            distributed.all_reduce(more, group=self._group)
            held = more.tolist()
        return codes, [held[row * columns : (row + 1) * columns] for row in range(rows)]

    def _fail(self, error: Exception) -> None:
        """Tell the others, who wait at their next exchange."""
        self._is_over = True
        message = torch.zeros(self.size + 2 + ROOM, dtype=torch.long, device=self._device)
        message[self.rank] = FAILED
        distributed.all_reduce(message, group=self._group)
        self._texts(f"{type(error).__name__}: {error}")

    def _texts(self, text: str | None) -> list[str | None]:
        texts: list[str | None] = [None] * self.size
        distributed.all_gather_object(texts, text, group=self._group)
        return texts


def num_ranks(model: Any) -> int:
    """Ranks over which the weights of `model` are split by a tensor parallel plan."""
    return getattr(model, "_tp_size", None) or 1


def ranks_of(model: Any) -> Ranks:
    """Who takes part in a call of `model`."""
    if num_ranks(model) == 1 or not distributed.is_available() or not distributed.is_initialized():
        return Alone()
    mesh = model._device_mesh
    names = mesh.mesh_dim_names or ()
    mesh = mesh["tp"] if "tp" in names and mesh.ndim > 1 else mesh
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return Group(mesh.get_group(), device)


def why_split(model: Any, draft: Any, runs_target: bool) -> str | None:
    """The reason why a call of a target that several processes share decodes plainly, or None.

    Args:
        model: the target.
        draft: the draft model, or None.
        runs_target: whether drafting runs the target's own layers.
    """
    if getattr(model, "_pp_stage", None) is not None:
        return "pipeline parallel (a rank holds some of the layers only)"
    if num_ranks(model) == 1:
        return None if num_ranks(draft) == 1 else "the draft is split over ranks, and the target is not"
    if runs_target or num_ranks(draft) > 1:
        return "tensor parallel draft (rank 0 drafts alone, so the draft has to be whole there)"
    return None
