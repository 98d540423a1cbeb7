"""One call of a checkpointed layer: run now, and run again in the backward pass from the very same state."""

from __future__ import annotations

import functools
import pickle
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from amp_widgets.errors import CheckpointingError


def recomputing() -> bool:
    """Whether this thread is within a backward pass, where a forward hook that fires means a recompute.

    It does not matter whose checkpointing it is.
    """
    return torch._C._current_graph_task_id() != -1 or getattr(_thread, "recomputing", False)


class Recomputable:
    """A call of a layer's forward pass that ``torch.utils.checkpoint`` can repeat without a trace.

    Parameters
    ----------
    layer
        The module, whose state is put back for the recompute.
    call
        Its bound forward method.
    args, kwargs
        What it was called with.

    Notes
    -----
    Arguments go to torch flattened: it looks for devices among positional tensors only, and only positional tensors are
    protected from being overwritten unnoticed.
    """

    __slots__ = ("_call", "_host_random", "_inputs", "_pending", "_state")

    def __init__(self, layer: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        facts = _facts.get(layer)
        if facts is None:
            facts = _facts[layer] = _Facts(layer)
        self._call = call
        self._pending: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._inputs = _Inputs(facts, args, kwargs)
        self._state = _State(layer)
        self._host_random = _HostRandom() if facts.draws_on_host else None

    def run(self) -> Any:
        """The layer's output, whose graph recomputes what it needs."""
        saved = self._inputs.for_torch()
        missing = self._state.devices - {value.device for value in saved if isinstance(value, torch.Tensor)}
        # torch rewinds the random state of those devices only that a tensor argument is on
        markers = [torch.empty(0, device=device) for device in missing]
        return checkpoint(self, *saved, *markers, use_reentrant=False)

    def __call__(self, *saved: Any) -> Any:
        """What torch calls: the first time for the forward pass, then for each recompute."""
        if self._pending is None:
            return self._recompute(saved)
        args, kwargs = self._pending
        self._pending = None
        output = self._call(*args, **kwargs)  # the caller's own objects: what is done to them in place is to be seen
        self._inputs.settle()
        self._state.settle()
        if self._host_random is not None and not self._host_random.was_used():
            self._host_random = None
        return output

    def _recompute(self, saved: Sequence[Any]) -> Any:
        args, kwargs = self._inputs.rebuild(saved)
        was_recomputing = getattr(_thread, "recomputing", False)
        _thread.recomputing = True
        try:
            with self._state:
                if self._host_random is None:
                    return self._call(*args, **kwargs)
                with self._host_random:
                    return self._call(*args, **kwargs)
        finally:
            _thread.recomputing = was_recomputing


_thread = threading.local()


class _Facts:
    """What is known of a layer from its code and its first call."""

    __slots__ = ("draws_on_host", "kind", "overwrites_inputs")

    def __init__(self, layer: nn.Module) -> None:
        self.kind = type(layer).__name__
        self.draws_on_host = _draws_on_host(layer)
        self.overwrites_inputs: bool | None = None
        """None before the first call."""


_facts: weakref.WeakKeyDictionary[nn.Module, _Facts] = weakref.WeakKeyDictionary()


class _Inputs:
    """The arguments of a call, such that the recompute gets them as they were.

    Most layers leave their inputs alone; some overwrite them, as a ReLU with ``inplace=True`` does, which shows only
    afterwards. So copies are made in the first call of each layer, and later for those layers alone that need them. A tensor
    that is passed several times is the same tensor again in the recompute: attention asks whether its query is its key.
    """

    __slots__ = ("_copies", "_facts", "_held", "_learning", "_overwritten", "_positions", "_spec", "_values", "_versions")

    def __init__(self, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        places = {identity: place for place, identity in enumerate(dict.fromkeys(map(id, leaves)))}
        self._facts = facts
        self._positions = [places[id(leaf)] for leaf in leaves]
        self._values = list({id(leaf): leaf for leaf in leaves}.values())  # each object once
        self._versions = [_version(value) for value in self._values]
        self._overwritten: set[int] = set()
        self._learning = facts.overwrites_inputs is None
        self._copies = None if facts.overwrites_inputs is False else [_copy(value) for value in self._values]
        self._held: list[Any] | None = None

    def for_torch(self) -> list[Any]:
        """What torch shall save; tensors of the same shapes each time, as a checkpoint around this one counts them."""
        if self._copies is None:
            return self._values
        return [_stand_in(copy) for copy in self._copies] if self._learning else self._copies

    def settle(self) -> None:
        """After the forward pass: remember what was overwritten, and let go of what is not needed."""
        values, self._values = self._values, []
        self._overwritten = {at for at, value in enumerate(values) if _version(value) != self._versions[at]}
        if self._copies is None and self._overwritten:
            self._facts.overwrites_inputs = True
            raise CheckpointingError(
                f"a checkpointed {self._facts.kind} overwrote its input in place, which it had not done before, so that "
                "its forward pass cannot be recomputed: run this step again, or do not checkpoint this layer"
            )
        if self._learning:
            self._facts.overwrites_inputs = bool(self._overwritten)
            assert self._copies is not None
            self._held = [self._copies[at] if at in self._overwritten else value for at, value in enumerate(values)]
        self._copies = None

    def rebuild(self, saved: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args, kwargs`` for a recompute."""
        values = list(saved if self._held is None else self._held)
        for at in self._overwritten:
            values[at] = values[at].clone()  # no leaf of the graph any more, so that it may be overwritten
        if self._held is not None and any(
            _version(value) != version
            for at, (value, version) in enumerate(zip(values, self._versions, strict=True))
            if at not in self._overwritten
        ):
            raise CheckpointingError(
                f"an input of a checkpointed {self._facts.kind} was overwritten in place after its forward pass, which "
                "therefore cannot be recomputed: do not checkpoint this layer, or do not overwrite its input"
            )
        args, kwargs = pytree.tree_unflatten([values[place] for place in self._positions], self._spec)
        return args, kwargs


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else -1


def _stand_in(value: Any) -> Any:
    """Of the shape of a tensor, but with no memory of its own."""
    if isinstance(value, torch.Tensor):
        return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
    return value


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


class _State:
    """What the modules of a layer were when its forward pass began; entered, they are that again.

    Each module gets a dictionary of attributes made for the recompute, and afterwards its own back, so that whatever the
    recompute does to buffers and attributes is undone.
    """

    __slots__ = ("_generators", "_modules", "_real", "_tensors", "devices")

    def __init__(self, layer: nn.Module) -> None:
        self._tensors: dict[int, _Tensor] = {}
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._modules = [(module, type(module), self._pin_attributes(module)) for module in _modules(layer)]
        self._real: list[Callable[[], None]] = []
        self.devices = {device for module, _, _ in self._modules for device in _device(module)} if _has_accelerator() else set()

    def settle(self) -> None:
        """After the forward pass: let go of copies that are large and not needed."""
        for tensor in self._tensors.values():
            tensor.settle()

    def __enter__(self) -> None:
        for tensor in self._tensors.values():
            tensor.begin()
        for generator, state in self._generators:
            self._real.append(functools.partial(_set_generator, generator, generator.get_state()))
            generator.set_state(state)
        for module, kind, pinned in self._modules:
            real = vars(module)
            self._real.append(functools.partial(_become, module, type(module), real))
            then = {name: real.get(name) if pin is _AS_NOW else _unpin(pin) for name, pin in pinned.items()}
            _become(module, kind, then)

    def __exit__(self, *_: object) -> None:
        for put_back in self._real:
            put_back()
        self._real = []
        for tensor in self._tensors.values():
            tensor.now = None

    def _pin_attributes(self, module: nn.Module) -> dict[str, Any]:
        attributes = vars(module)
        pinned = dict.fromkeys(attributes, _AS_NOW)
        if _keeps_attributes(module):
            pinned["training"] = module.training
        else:
            for name in attributes.keys() - _MACHINERY:
                pinned[name] = self._pin(attributes[name])
        pinned["_parameters"] = dict(module._parameters)
        if module._buffers:
            pinned["_buffers"] = {
                name: None if buffer is None else self._pin_tensor(buffer) for name, buffer in module._buffers.items()
            }
        return pinned

    def _pin(self, value: Any) -> Any:
        """Something from which `_unpin` makes `value` as it is now, or ``_AS_NOW`` where it can only be what it will be then.

        It must not keep a graph alive: a layer that stores its last output would hold the graphs of all steps that way.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._pin_tensor(value)
        if kind is torch.Generator:
            self._generators.append((value, value.get_state()))
        elif kind in (tuple, list, dict) and len(value) <= _SMALL_CONTAINER_LEN:
            items = [self._pin(item) for item in (value.values() if kind is dict else value)]
            if not any(item is _AS_NOW for item in items):
                return dict(zip(value, items, strict=True)) if kind is dict else kind(items)
        return _AS_NOW

    def _pin_tensor(self, value: torch.Tensor) -> Any:
        if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf) or value.is_inference():
            return value  # cannot be overwritten within a forward pass that has gradients
        if id(value) not in self._tensors:
            self._tensors[id(value)] = _Tensor(value)
        return self._tensors[id(value)]


def _keeps_attributes(module: nn.Module) -> bool:
    """Whether a forward pass leaves the plain attributes alone: torch's own layers do, but for the hooks of the older
    ``weight_norm`` and ``spectral_norm``. (An RNN renews its list of weights by itself.)
    """
    return type(module).__module__.startswith("torch.nn.modules.") and not module._forward_pre_hooks


_AS_NOW: Any = object()
_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_PLAIN: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, type(None), weakref.ref}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
_SMALL_CONTAINER_LEN = 64


def _unpin(pin: Any) -> Any:
    kind = type(pin)
    if kind is _Tensor:
        return pin.now
    if kind is dict:
        return {name: _unpin(item) for name, item in pin.items()}
    return kind(map(_unpin, pin)) if kind in (tuple, list) else pin


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _become(module: nn.Module, kind: type[nn.Module], attributes: dict[str, Any]) -> None:
    object.__setattr__(module, "__dict__", attributes)
    if type(module) is not kind:
        object.__setattr__(module, "__class__", kind)


class _Tensor:
    """A buffer, or a tensor that is an attribute, as it was when the forward pass began.

    The copy of a small one is kept until the backward pass. A large one's is kept only if the forward pass was seen to
    write to it; a write through ``.data`` is not seen.
    """

    __slots__ = ("_copy", "_live", "_version", "now")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._live = tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
        self._version = tensor._version
        self._copy: torch.Tensor | None = self._live.detach().clone().requires_grad_(self._live.requires_grad)
        self.now: torch.Tensor | None = None

    def settle(self) -> None:
        """Let go of the copy if it is large and its original was not written to."""
        if self._copy is not None and self._copy.nbytes > _SMALL_TENSOR_BYTES and self._live._version == self._version:
            self._copy = None

    def begin(self) -> None:
        """Make what the recompute sees, in ``now``."""
        if self._copy is not None:
            self.now = self._copy.clone()
        elif self._live._version == self._version:
            self.now = self._live
        else:
            raise CheckpointingError(
                f"a buffer of shape {tuple(self._live.shape)} in a checkpointed layer was overwritten between the layer's "
                "forward pass and the backward pass, so that it cannot be recomputed: do not checkpoint this layer"
            )


_SMALL_TENSOR_BYTES = 2**20


def _modules(layer: nn.Module) -> list[nn.Module]:
    """The layer and all modules in it whose attributes can be exchanged; faster than ``layer.modules()``."""
    found: dict[int, nn.Module] = {}
    waiting = [layer]
    while waiting:
        module = waiting.pop()
        if id(module) not in found and not isinstance(module, torch.jit.ScriptModule):
            found[id(module)] = module
            waiting.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _device(module: nn.Module) -> list[torch.device]:
    """The device of the module's own tensors, unless it is the CPU: a list of one or none."""
    first = next((tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None), None)
    return [] if first is None or first.device.type in ("cpu", "meta") else [first.device]


class _HostRandom:
    """The states of Python's and NumPy's global random generators when the forward pass began; entered, they are that again."""

    __slots__ = ("_now", "_then")

    def __init__(self) -> None:
        self._then = _host_random_state()

    def was_used(self) -> bool:
        """Whether anything was drawn since."""
        return pickle.dumps(self._then) != pickle.dumps(_host_random_state())

    def __enter__(self) -> None:
        self._now = _host_random_state()
        _set_host_random_state(self._then)

    def __exit__(self, *_: object) -> None:
        _set_host_random_state(self._now)


def _host_random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_host_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def _draws_on_host(layer: nn.Module) -> bool:
    """Whether the code of the layer's classes names Python's or NumPy's global generator: reading their state takes 60 µs."""
    kinds = {kind for module in _modules(layer) for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")}
    functions = [value for kind in kinds for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    seen: set[types.FunctionType] = set()
    while functions:
        function = functions.pop()
        if function in seen or function.__module__.startswith("torch."):
            continue
        seen.add(function)
        names = set(_names(function.__code__))
        used = [function.__globals__[name] for name in names if name in function.__globals__]
        if any(value is random or value is np.random or _is_method_of_generator(value) for value in used):
            return True
        if "random" in names and any(value is np for value in used):
            return True
        functions += [value for value in used if isinstance(value, types.FunctionType)]
    return False


def _is_method_of_generator(value: Any) -> bool:
    return isinstance(getattr(value, "__self__", None), (random.Random, np.random.RandomState))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
