"""Devices that are not there: a tensor says where it would lie, computes on the CPU, and meets none of another device.

`Places` is a mode under which a tensor may carry a place. Making or moving a tensor to a device gives it one, results
take that of their arguments, `.device` tells it, and an operation on two places is an error, as it is on real devices
(but for numbers without dimensions, and copies). `spread` lays a model out over places and moves what enters each part,
as accelerate's hooks do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["CPU", "Places", "put", "spread"]

CPU = torch.device("cpu")
_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.type_as}
_COPIES = {torch.Tensor.copy_}


def place_of(tensor: Tensor) -> torch.device:
    """Where `tensor` would lie."""
    return tensor.__dict__.get("place", CPU)


def put(tensor: Tensor, place: torch.device) -> Tensor:
    """`tensor`, said to lie at `place`."""
    tensor.__dict__["place"] = place
    return tensor


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for part in value.values() for each in _tensors(part)]
    if isinstance(value, slice):
        return _tensors([value.start, value.stop, value.step])
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in _tensors(part)]
    return []


class Places(TorchFunctionMode):
    """See the module. `met` counts the operations that were looked at, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[torch.device, int] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "__get__":
            return self._read(func, args)
        asked, args = self._asked(func, args, kwargs)
        if func in _COPIES or asked is not None:
            result = func(*args, **kwargs)
            if asked is None:
                return result
            changed = place_of(args[0]) != asked if func in _MOVES else False
            # What stays where it is may be the very tensor; what moves never is.
            return self._placed(result.clone() if changed and result is args[0] else result, asked)
        place = self._common(func, [*_tensors(args), *_tensors(kwargs)])
        self.met[place] = self.met.get(place, 0) + 1
        return self._placed(func(*args, **kwargs), place)

    @staticmethod
    def _read(func: Any, args: tuple) -> Any:
        owner, name = args[0], getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "device":
            return place_of(owner)
        value = func(*args)
        return put(value, place_of(owner)) if isinstance(value, Tensor) and value is not owner else value

    @staticmethod
    def _asked(func: Any, args: tuple, kwargs: dict) -> tuple[torch.device | None, tuple]:
        """The device that a call names, taken out of its arguments."""
        device = kwargs.pop("device", None)
        if func is torch.Tensor.cpu:
            return CPU, args
        if func is torch.Tensor.to:
            rest = []
            for each in args[1:]:
                if isinstance(each, Tensor):
                    device = place_of(each)
                    rest.append(each.dtype)
                elif isinstance(each, (torch.device, str, int)) and not isinstance(each, bool):
                    device = each
                else:
                    rest.append(each)
            # A call that named nothing else still has to be one.
            args = (args[0], *(rest or ([] if "dtype" in kwargs else [args[0].dtype])))
        return None if device is None else torch.device(device), args

    @staticmethod
    def _common(func: Any, tensors: list[Tensor]) -> torch.device:
        places = {place_of(tensor) for tensor in tensors if tensor.ndim > 0 or place_of(tensor) != CPU}
        if len(places) > 1:
            raise RuntimeError(f"{getattr(func, '__name__', func)} met tensors on {sorted(map(str, places))}")
        return next(iter(places), CPU)

    @staticmethod
    def _placed(result: Any, place: torch.device) -> Any:
        for tensor in _tensors(result):
            put(tensor, place)
        return result


def _moved(value: Any, place: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(place)
    if type(value) in (list, tuple):
        return type(value)(_moved(each, place) for each in value)
    return value


def spread(model: nn.Module, places: dict[str, torch.device]) -> nn.Module:
    """Lay the modules called so, and what is in them, at their places; "" is the rest.

    What enters a module is moved to its place, and the model's logits go back to where its ids came from.
    """
    for name in sorted(places, key=len):
        module = model.get_submodule(name)
        for tensor in [*module.parameters(), *module.buffers()]:
            put(tensor, places[name])
        if name:
            module.register_forward_pre_hook(
                lambda _, args, kwargs, place=places[name]: (
                    _moved(args, place),
                    {key: _moved(value, place) for key, value in kwargs.items()},
                ),
                with_kwargs=True,
            )

    def back(_, args, kwargs, output):
        output.logits = output.logits.to(kwargs["input_ids"].device)
        return output

    model.register_forward_hook(back, with_kwargs=True)
    return model
