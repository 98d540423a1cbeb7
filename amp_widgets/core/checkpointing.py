"""Activation checkpointing of single layers of a live model, switched on and off without a trace.

A layer is switched on by giving the module a subclass of its own class that differs in ``forward`` alone. Names, hooks,
``state_dict`` and ``repr`` stay as they are; a copy, an unpickled module and a slice of a ``Sequential`` are plain again.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.layers import (
    Layer,
    is_compiled_wrapper,
    list_layers,
    named_layers,
    resolve_layers,
)
from amp_widgets.core.recompute import Recomputable, recomputing
from amp_widgets.errors import CheckpointingError, ModelError, SessionClosedError

__all__ = ["Checkpointing", "Layer", "recomputing"]


class Checkpointing:
    """The checkpointed layers of one model.

    A checkpointed layer keeps its inputs alone for the backward pass and computes the rest again when it is needed. Loss,
    gradients, buffers and random numbers are the same, bit for bit: the recompute starts from the random state, autocast
    state, buffers, parameters and plain attributes (numbers, strings, tensors, small lists, tuples and dicts of them) that the
    forward pass started from, and what it does to them is undone. Without gradients (``torch.no_grad``) nothing changes.

    What cannot be seen, and happens twice: whatever else a forward pass does to Python objects that are not attributes of
    the layer's modules (a counter in a global variable, a cache object passed in), or to tensors behind autograd's back that
    are no buffers (``weight.data.clamp_()``); forward hooks of modules *inside* a checkpointed layer also fire in the
    recompute, where `recomputing` is true. A tensor that is passed to a checkpointed layer and overwritten in place *after*
    it, before the backward pass, raises torch's own error there, also where the layer alone would not have needed it.

    Parameters
    ----------
    model
        The model; wrappers around it (``torch.compile``, DataParallel, DistributedDataParallel) are seen through.

    Raises
    ------
    ModelError
        When `model` is not a module.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        self._source: Callable[[], nn.Module | None] = lambda: model
        self._switched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every module inside the model, in its order, as it is now; empty after `close`."""
        model = self._model
        return () if model is None else list_layers(model)

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the layers that are checkpointed now, in the model's order."""
        model = self._model
        return () if model is None else tuple(name for name, module in named_layers(model).items() if _is_on(module))

    @property
    def compiled(self) -> bool:
        """Whether ``torch.compile`` was applied to the model or to a module in it: a switched layer is then compiled anew."""
        model = self._model
        return model is not None and any(
            is_compiled_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
        )

    def resolve(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Layer names and globs → layer names, in the model's order; see `amp_widgets.core.layers.resolve_layers`.

        Raises
        ------
        LayerError
            When a name or glob matches no layer.
        CheckpointingError
            When a layer that is named or matched cannot be checkpointed.
        SessionClosedError
            After `close`.
        """
        return resolve_layers(self._open_model(), patterns)

    def apply(self, names: Sequence[str]) -> None:
        """Checkpoint exactly these layers from the next forward pass on: all of them, or none and nothing has changed.

        Graphs that are alive are not affected: a backward pass recomputes what its forward pass left out.

        Raises
        ------
        LayerError, CheckpointingError, SessionClosedError
            As `resolve` does.
        """
        model = self._open_model()
        layers = named_layers(model)
        wanted = {name: layers[name] for name in resolve_layers(model, names)}
        keep = {id(module) for module in wanted.values()}
        switch_on = {name: module for name, module in wanted.items() if not _is_on(module)}
        switch_off = [module for module in {*layers.values(), *self._switched} if _is_on(module) and id(module) not in keep]
        classes = {name: _prepare_class(name, module) for name, module in switch_on.items()}
        before = [(module, type(module)) for module in (*switch_on.values(), *switch_off)]
        try:
            for name, module in switch_on.items():
                _switch_on(name, module, classes[name])
            for module in switch_off:
                _switch_off(module)
        except BaseException:  # also an interrupt of the kernel
            for module, kind in before:
                _set_class(module, kind)
            raise
        self._switched.update(switch_on.values())

    def watch(self, source: Callable[[], nn.Module | None]) -> None:
        """Ask `source` for the model from now on, in place of keeping it alive."""
        self._source = source

    def close(self) -> None:
        """Switch all layers off, also those that have left the model meanwhile, and let go of the model."""
        model = self._model
        for module in {*(() if model is None else named_layers(model).values()), *self._switched}:
            if _is_on(module):
                _switch_off(module)
        self._switched.clear()
        self._source = _no_model

    @property
    def _model(self) -> nn.Module | None:
        return self._source()

    def _open_model(self) -> nn.Module:
        model = self._model
        if model is None:
            raise SessionClosedError("checkpointed: the session was closed, so that the model's layers can no longer be switched")
        return model


def _no_model() -> None:
    return None


_ORIGINAL = "_amp_widgets_original"
"""The attribute of a checkpointed class that holds the class it stands for."""
_classes: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()


def _is_on(module: nn.Module) -> bool:
    return hasattr(type(module), _ORIGINAL)


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", kind)  # past any __setattr__ of the user's


def _switch_on(name: str, module: nn.Module, kind: type[nn.Module]) -> None:
    try:
        _set_class(module, kind)
    except TypeError as error:  # the layout of the class forbids it
        raise CheckpointingError(
            f"checkpointed: cannot checkpoint layer {name!r} ({kind.__name__}): its class cannot be exchanged: {error}"
        ) from error


def _switch_off(module: nn.Module) -> None:
    kind = type(module)
    original = vars(kind).get(_ORIGINAL)
    if original is not None:
        if kind.__bases__ != (original,):
            _carry_over_parametrizations(kind, original)
        _set_class(module, original)
        return
    # A parametrization was registered while the layer was on: torch derived a class from the checkpointed one.
    for derived in kind.__mro__:
        if any(_ORIGINAL in vars(base) for base in derived.__bases__):
            derived.__bases__ = tuple(vars(base).get(_ORIGINAL, base) for base in derived.__bases__)


def _prepare_class(name: str, module: nn.Module) -> type[nn.Module]:
    try:
        return _checkpointed_class(module)
    except TypeError as error:
        raise CheckpointingError(
            f"checkpointed: cannot checkpoint layer {name!r} ({type(module).__name__}): its class cannot be derived from: {error}"
        ) from error


def _checkpointed_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` with a ``forward`` that checkpoints; the same for all modules of that class."""
    original = type(module)
    parametrized = parametrize.is_parametrized(module)
    known = _classes.get(original)
    if known is not None and not parametrized:
        return known

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super(kind, self).forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler keeps buffers and random numbers right itself
            return checkpoint(call, *args, use_reentrant=False, **kwargs)
        if _is_transformed():
            return call(*args, **kwargs)
        return Recomputable(self, call, args, kwargs).run()

    def construct(self: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        # Somebody makes a new module of this module's class, as a slice of a Sequential does: a plain one.
        if type(self) is kind:
            _set_class(self, original)
        original.__init__(self, *args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any, /) -> Any:
        if type(self) is not kind:
            return original.__reduce_ex__(self, protocol)
        return _as_plain(self, original, lambda: _without_class_check(self.__reduce_ex__(protocol), original))

    def deepcopy(self: nn.Module, memo: dict[int, Any], /) -> Any:
        copy_of: Callable[[nn.Module, dict[int, Any]], Any] = original.__deepcopy__  # type: ignore[attr-defined]
        return copy_of(self, memo) if type(self) is not kind else _as_plain(self, original, lambda: copy_of(self, memo))

    def prepare_scriptable(self: nn.Module) -> nn.Module:
        raise CheckpointingError(
            f"torch.jit.script: a {original.__name__} in this model is checkpointed, which TorchScript cannot compile; "
            "switch checkpointing off first"
        )

    body: dict[str, Any] = {  # with the signatures of the original, which some libraries inspect
        "forward": functools.update_wrapper(forward, original.forward, updated=()),
        "__init__": functools.update_wrapper(construct, original.__init__, updated=()),
        "__reduce_ex__": reduce_ex,
        "__prepare_scriptable__": prepare_scriptable,  # what torch.jit.script asks for
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        _ORIGINAL: original,
    }
    if hasattr(original, "__deepcopy__"):  # without one, a copy goes the way of __reduce_ex__
        body["__deepcopy__"] = deepcopy
    bases: tuple[type, ...] = (original,)
    if parametrized:
        # torch keeps the parametrized tensors as properties of a class made for this module, deletes them there, and takes
        # its first base for the unparametrized class: this one must stand beside that class, not derive from it.
        bases = original.__bases__
        body = {**_parametrizations(original), **body}
    # Made of nn.Module first, so that an __init_subclass__ or a metaclass of the user's does not register a class of ours.
    kind: type[nn.Module] = type.__new__(type(original), original.__name__, (nn.Module,), body)
    kind.__bases__ = bases
    if not parametrized:
        _classes[original] = kind
    return kind


def _is_transformed() -> bool:
    """Within ``torch.func`` or a tracer, neither of which can be checkpointed: the layer runs as it is."""
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


def _as_plain(module: nn.Module, original: type[nn.Module], make: Callable[[], Any]) -> Any:
    kind = type(module)
    _set_class(module, original)
    try:
        return make()
    finally:
        _set_class(module, kind)


def _without_class_check(reduced: Any, original: type[nn.Module]) -> Any:
    """`reduced` such that pickle does not compare the class in it with that of the module."""
    if not isinstance(reduced, tuple) or reduced[0] not in (copyreg.__newobj__, copyreg.__newobj_ex__):  # type: ignore[attr-defined]
        return reduced
    if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        arguments, keywords = reduced[1][1:], {}
    else:
        _, arguments, keywords = reduced[1]
    if original.__new__ is object.__new__ and not arguments and not keywords:
        return copyreg._reconstructor, (original, object, None), *reduced[2:]  # type: ignore[attr-defined]
    return functools.partial(original.__new__, original, *arguments, **keywords), (), *reduced[2:]


def _parametrizations(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}


def _carry_over_parametrizations(source: type, target: type) -> None:
    """Give `target` the properties that torch has meanwhile put into `source`, and take away those it has deleted there."""
    here = {name: value for name, value in vars(source).items() if isinstance(value, property)}
    there = {name for name, value in vars(target).items() if isinstance(value, property)}
    for name in there - here.keys():
        delattr(target, name)
    for name in here.keys() - there:
        setattr(target, name, here[name])
