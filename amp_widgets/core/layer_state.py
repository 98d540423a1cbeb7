"""What the modules of a layer were when its forward pass began, to be that again for the recompute."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_widgets.errors import RecomputeError

Place = tuple[int, str]
"""Where a module has a tensor: the id of the module, and the name of the buffer or attribute."""


class LayerState:
    """What the modules of a layer were when its forward pass began; entered, they are that again.

    Each module gets a dictionary of attributes made for the recompute, and afterwards its own back, so that whatever the
    recompute does to buffers and attributes is undone.

    Parameters
    ----------
    layer
        The module whose forward pass is about to begin.
    writes_to
        The large tensors that earlier calls wrote to; None if there were none. After `settle`, of this call too.

    Attributes
    ----------
    devices
        Other than the CPU, on which its modules have parameters or buffers.
    """

    __slots__ = ("_generators", "_kind", "_modules", "_real", "_tensors", "devices", "writes_to")

    def __init__(self, layer: nn.Module, writes_to: frozenset[Place] | None) -> None:
        self.writes_to = writes_to
        self._kind = type(layer).__name__
        self._tensors: dict[int, _Tensor] = {}
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._modules = [(module, type(module), self._pin_attributes(module)) for module in modules_of(layer)]
        self._real: list[Callable[[], None]] = []
        self.devices = {device for module, _, _ in self._modules for device in _device(module)} if _has_accelerator() else set()

    def settle(self) -> None:
        """After the forward pass: let go of the copies of large tensors that were not written to.

        Raises
        ------
        RecomputeError
            When one was written to of which there is no copy, because no earlier call had.
        """
        large = [tensor for tensor in self._tensors.values() if tensor.is_large]
        written = {tensor.place for tensor in large if tensor.was_written()}
        unforeseen = [tensor for tensor in large if tensor.place in written and not tensor.has_copy()]
        self.writes_to = (self.writes_to or frozenset()) | written
        if unforeseen:
            raise RecomputeError(
                f"a checkpointed {self._kind} wrote to its {unforeseen[0].place[1]!r}, which it had not done before, so that its "
                "forward pass cannot be recomputed: run this step again, or do not checkpoint this layer"
            )
        for tensor in large:
            if tensor.place not in written:
                tensor.let_go()

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
                pinned[name] = self._pin(attributes[name], (id(module), name))
        pinned["_parameters"] = dict(module._parameters)
        if module._buffers:
            pinned["_buffers"] = {
                name: None if buffer is None else self._pin_tensor(buffer, (id(module), name))
                for name, buffer in module._buffers.items()
            }
        return pinned

    def _pin(self, value: Any, place: Place) -> Any:
        """Something from which `_unpin` makes `value` as it is now, or ``_AS_NOW`` where it can only be what it will be then.

        It must not keep a graph alive: a layer that stores its last output would hold the graphs of all steps that way.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._pin_tensor(value, place)
        if kind is torch.Generator:
            self._generators.append((value, value.get_state()))
        elif kind in (tuple, list, dict) and len(value) <= _SMALL_CONTAINER_LEN:
            items = [self._pin(item, place) for item in (value.values() if kind is dict else value)]
            if not any(item is _AS_NOW for item in items):
                return dict(zip(value, items, strict=True)) if kind is dict else kind(items)
        return _AS_NOW

    def _pin_tensor(self, value: torch.Tensor, place: Place) -> Any:
        if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf) or value.is_inference():
            return value  # cannot be overwritten within a forward pass that has gradients
        if id(value) not in self._tensors:
            is_large = value.nbytes > _SMALL_TENSOR_BYTES
            copied = not is_large or self.writes_to is None or place in self.writes_to
            self._tensors[id(value)] = _Tensor(value, place, is_large=is_large, copied=copied)
        return self._tensors[id(value)]


def modules_of(layer: nn.Module) -> list[nn.Module]:
    """The layer and all modules in it whose attributes can be exchanged; faster than ``layer.modules()``."""
    found: dict[int, nn.Module] = {}
    waiting = [layer]
    while waiting:
        module = waiting.pop()
        if id(module) not in found and not isinstance(module, torch.jit.ScriptModule):
            found[id(module)] = module
            waiting.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of its own that asks for a gradient as `tensor` does, so that autograd saves the same with it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


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

    A small one is copied. A large one is copied in the layer's first call, and later if that wrote to it (but a write through
    ``.data`` is not seen); otherwise it is only watched.
    """

    __slots__ = ("_copy", "_live", "_version", "is_large", "now", "place")

    def __init__(self, tensor: torch.Tensor, place: Place, *, is_large: bool, copied: bool) -> None:
        self.place = place
        self.is_large = is_large
        self._live = tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
        self._version = tensor._version
        self._copy = copy_of(self._live) if copied else None
        self.now: torch.Tensor | None = None

    def was_written(self) -> bool:
        return self._live._version != self._version

    def has_copy(self) -> bool:
        return self._copy is not None

    def let_go(self) -> None:
        self._copy = None

    def begin(self) -> None:
        """Make what the recompute sees, in ``now``."""
        if self._copy is not None:
            self.now = self._copy.clone()
        elif not self.was_written():
            self.now = self._live
        else:
            raise RecomputeError(
                f"{self.place[1]!r} in a checkpointed layer was written to between the layer's forward pass and the backward "
                "pass, so that the layer cannot be recomputed: do not checkpoint it"
            )


_SMALL_TENSOR_BYTES = 2**20


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _device(module: nn.Module) -> list[torch.device]:
    """The device of the module's own tensors, unless it is the CPU: a list of one or none."""
    first = next((tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None), None)
    return [] if first is None or first.device.type in ("cpu", "meta") else [first.device]
