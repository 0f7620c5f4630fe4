"""The target's own first layers as a model: embeddings → layers 1 … E → final norm → output head.

No weight is copied and the target is not touched. The modules on the way to the list of layers are made again as
shells that share their originals' parameters, buffers and children; only the list in the innermost is shorter. Whatever
sits on layers, embeddings or head (adapters, quantized linears, hooks that move weights) is therefore there too. A view
is made per call, so it follows weights and modules that were replaced, and nothing of it outlives the call.

Its keys go into the target's own cache, past each row's length, where the verify pass writes the same slots again.
"""

import copy
import functools
import threading
import types
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_specdec.drafters.base import DraftFailure, DraftRequest
from hf_specdec.host.families import ROWS, TOLERANCE, is_covered, weights_key
from hf_specdec.host.knowledge import cost_coefficient
from hf_specdec.host.runner import ModelRunner, cache_keyword, input_device
from hf_specdec.sequence import Sequence
from hf_specdec.vocabulary import VocabularyMap

__all__ = ["ExitModel", "exit_cost", "exit_layer", "first_layers", "why_no_exit", "why_not_alone"]

DEFAULT_SHARE = 4
"""One layer in this many drafts, where none is named."""

# What a config may ask every forward to collect; it needs hooks on layers, which are the target's.
_COLLECTED = ("output_attentions", "output_hidden_states", "output_router_logits")
_HOOKS = ("_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks")
_HOOKS += ("_forward_pre_hooks_with_kwargs",)

_LOCK = threading.Lock()
_VERDICTS: "weakref.WeakKeyDictionary[Any, dict[Any, str | None]]" = weakref.WeakKeyDictionary()


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _layers_name(model: Any) -> str | None:
    """The dotted name of the list of decoder layers: the outermost one as long as the config says, if it is the only
    one there."""
    number = getattr(_text_config(model), "num_hidden_layers", None)
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model
    of_decoder = {id(module) for module in decoder.modules()}
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == number and id(module) in of_decoder
    ]
    depth = min((name.count(".") for name in lists), default=0)
    outermost = [name for name in lists if name.count(".") == depth]
    return outermost[0] if len(outermost) == 1 else None


def why_no_exit(target: Any) -> str | None:
    """The reason why `target` has no first layers to draft with, as far as its structure tells, or None."""
    if target.config.is_encoder_decoder:
        return None  # the target's own reason says more
    if _layers_name(target) is None:
        return f"no draft: method 'early_exit' finds no list of decoder layers in {type(target).__name__}"
    if _text_config(target).num_hidden_layers < 2:
        return "no draft: method 'early_exit' needs a target of at least two layers"
    return None


def exit_layer(target: Any, asked: int | None) -> int:
    """Layers that draft.

    Raises:
        ValueError: `asked` leaves the target no layer of its own.
    """
    number = _text_config(target).num_hidden_layers
    if asked is None:
        return max(1, number // DEFAULT_SHARE)
    if asked >= number:
        raise ValueError(
            f"early_exit_layer must be below the number of layers, which is {number} in {type(target).__name__}, got "
            f"{asked}. Leave it out for a quarter of them."
        )
    return asked


def exit_cost(target: Any, number: int) -> float:
    """A draft forward in target passes, by bytes."""
    return cost_coefficient(target, first_layers(target, number))


def first_layers(target: Any, number: int) -> Any:
    """`target` with its first `number` layers only: a view, to be dropped with the call it is for."""
    name = _layers_name(target)
    assert name is not None
    layers: Any = target.get_submodule(name)
    return _with_child(target, name.split("."), nn.ModuleList(list(layers)[:number]).train(layers.training))


def _with_child(module: nn.Module, path: list[str], child: nn.Module) -> nn.Module:
    """A shell of `module` in which the submodule at `path` is `child`."""
    first, *rest = path
    shell = _shell(module)
    shell._modules[first] = _with_child(module.get_submodule(first), rest, child) if rest else child
    return shell


def _shell(module: nn.Module) -> nn.Module:
    """A module of the same class and state, whose children and config can be changed apart."""
    shell: Any = object.__new__(type(module))
    vars(shell).update(vars(module))
    vars(shell)["_modules"] = dict(module._modules)
    # What the user hooked on the whole target is not for a draft's passes; hooks on its layers run in both, as those of
    # accelerate have to. What was compiled has the original inside.
    vars(shell).update({name: type(vars(module)[name])() for name in _HOOKS if name in vars(module)})
    vars(shell)["_compiled_call_impl"] = None
    for name in ("forward", "_old_forward"):  # wraps on the instance, such as accelerate's
        if name in vars(module):
            vars(shell)[name] = _rebound(vars(module)[name], module, shell)
    config = getattr(module, "config", None)
    if config is not None:
        config = copy.copy(config)
        for name in _COLLECTED:
            if getattr(config, name, None):
                setattr(config, name, False)
        shell.config = config
    return shell


def _rebound(forward: Any, module: nn.Module, shell: nn.Module) -> Any:
    """`forward` of `module` as one of `shell`; the class's own where it cannot be told from another closure."""
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        return types.MethodType(forward.__func__, shell)
    if isinstance(forward, functools.partial) and forward.args and forward.args[0] is module:
        again = functools.partial(forward.func, shell, *forward.args[1:], **forward.keywords)
        wrapped = getattr(forward, "__wrapped__", None)  # has the signature
        return again if wrapped is None else functools.update_wrapper(again, _rebound(wrapped, module, shell))
    return types.MethodType(type(shell).forward, shell)


# --- whether a view is right ----------------------------------------------------------------------------------------


def why_not_alone(target: Any, number: int) -> str | None:
    """The reason why the first `number` layers of `target` do not draft, None if they can. Families that the suites
    cover are taken as they are; any other is tried once, a pass of eight tokens each."""
    if is_covered(target):
        return None
    key = number, target.dtype, weights_key(target)
    with _LOCK:
        verdicts = _VERDICTS.setdefault(target, {})
        if key not in verdicts:
            verdicts[key] = _why_keys_differ(target, number)
        return verdicts[key]


def _why_keys_differ(target: Any, number: int) -> str | None:
    name = type(target).__name__
    try:
        error, scale = _largest_error(target, number)
    except Exception as failure:  # whatever a forward may raise that was not made for fewer layers
        return f"no draft: the first layers of {name} do not run alone: {type(failure).__name__}: {failure}"
    tolerance = TOLERANCE.get(target.dtype, 0.06) * scale
    if error <= tolerance:
        return None
    return f"no draft: the first layers of {name} alone give other keys, by {error:.2g}, tolerance {tolerance:.2g}"


@torch.no_grad()
def _largest_error(target: Any, number: int) -> tuple[float, float]:
    """(largest difference, scale) of the first layers' keys, alone and in the whole target.

    Raises:
        ValueError: other layers ran too, or the logits are no logits.
    """
    config = _text_config(target)
    ids = torch.tensor(ROWS[:1]) % max(2, config.vocab_size - 1)
    caches, logits = [], []
    for model in (target, first_layers(target, number)):
        caches.append(DynamicCache(config=config))
        inputs: dict[str, Any] = {cache_keyword(model): caches[-1], "use_cache": True, "return_dict": True}
        logits.append(model(input_ids=ids.to(input_device(model, ids)), **inputs).logits)
    whole, alone = (cast(Any, cache).layers for cache in caches)
    if any(layer.is_initialized for layer in alone[number:]):
        raise ValueError("other layers ran too")
    if logits[1].shape != logits[0].shape or not logits[1].isfinite().all():
        raise ValueError("what comes out is no logits")
    error, scale = 0.0, 1.0
    for layer, expected in zip(alone[:number], whole, strict=False):
        if expected.is_initialized:
            difference = (layer.keys - expected.keys).abs().max()
            error, scale = max(error, float(difference)), max(scale, float(expected.keys.abs().max()))
    return error, scale


# --- during a call --------------------------------------------------------------------------------------------------


class ExitModel:
    """The draft of one call, in the form of `host.draft_model.DraftModel`. Its forwards raise `DraftFailure`, whatever
    goes wrong inside them."""

    feed_width = 1
    """The target holds the keys of all but the newest token, also after a full acceptance: nothing is read again."""

    def __init__(self, request: DraftRequest, number: int) -> None:
        self._target_call, self._view = request.target_call, first_layers(request.target, number)
        self.vocabulary = VocabularyMap(request.vocab_size, request.vocab_size)
        self._runner: ModelRunner | None = None

    def room(self, sequence: Sequence) -> int:
        """No limit of its own."""
        return 1 << 30

    def debt(self, sequence: Sequence) -> int:
        """Nothing: the target has read the text."""
        return 0

    def is_blocked(self, feed: Tensor) -> Tensor:
        """bool [batch]: no row."""
        return torch.zeros(feed.shape[0], dtype=torch.bool, device=feed.device)

    def follow(self, sequence: Sequence, draft_length: int) -> None:
        """Make room for a step of `draft_length` tokens."""
        if self._runner is None:
            self._runner = self._target_call.lend(self._view, sequence)
        # Here, at the lengths to which the verify pass takes the rows back, and not between drafted tokens.
        self._target_call.make_room(sequence, draft_length + 1)

    def next_scores(self, feed: Tensor, sequence: Sequence, position: int, is_short: bool = False) -> Tensor:
        """Scores [batch, target vocab] float32 for drafted position `position`; `feed` [batch, 1] is its input."""
        assert self._runner is not None
        starts = [length - 1 + position for length in self._target_call.slots(sequence)]
        try:
            output = self._runner.forward(feed, starts, num_logits=1)
        except Exception as error:  # the call must go on without a draft
            raise DraftFailure(f"{type(error).__name__}: {error}") from error
        return self.vocabulary.to_target_logits(output.logits[:, -1].to(sequence.device))

    def forget_drafted(self, sequence: Sequence, rows: list[int]) -> None:
        """Nothing: the verify pass writes all that was written here."""

    def keep(self) -> None:
        """Nothing: the keys are the target's."""
