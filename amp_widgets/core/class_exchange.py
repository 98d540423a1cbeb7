"""Changes to the forward pass of single modules of a live model, made and unmade without a trace.

A module is given a subclass of its own class that differs in ``forward`` alone. Names, hooks, ``state_dict`` and ``repr``
stay as they are; a copy, an unpickled module and a slice of a ``Sequential`` are plain again.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from amp_widgets.errors import CheckpointingError

Run = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What is run in place of a forward pass: the module, its own bound forward, and what it was called with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change to a forward pass.

    Parameters
    ----------
    word
        What a module with it is, for people.
    run
        What runs instead.
    rank
        Of two changes to one module, the one of the lower rank is around the other.
    """

    word: str
    run: Run
    rank: int


def changes_of(module: nn.Module) -> frozenset[Change]:
    """The changes that are made to a module now."""
    return getattr(type(module), _CHANGES, _NONE)


def changed_class(module: nn.Module, changes: frozenset[Change]) -> type[nn.Module]:
    """The class for a module that has no changes yet.

    Raises
    ------
    TypeError
        When no class can be derived from the module's own.
    """
    return _changed_class(module, changes) if changes else type(module)


def set_changes(module: nn.Module, changes: Iterable[Change]) -> None:
    """Make these changes and no others.

    Raises
    ------
    TypeError
        When no class can be derived from the module's own, or it cannot be exchanged for it.
    """
    if changes_of(module):
        _restore(module)
    set_class(module, changed_class(module, frozenset(changes)))


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Past any ``__setattr__`` of the user's."""
    if type(module) is not kind:
        object.__setattr__(module, "__class__", kind)


_ORIGINAL = "_amp_widgets_original"
"""The attribute of a changed class that holds the class it stands for."""
_CHANGES = "_amp_widgets_changes"
_NONE: frozenset[Change] = frozenset()
_classes: weakref.WeakValueDictionary[tuple[type[nn.Module], frozenset[Change]], type[nn.Module]] = weakref.WeakValueDictionary()


def _restore(module: nn.Module) -> None:
    kind = type(module)
    original = vars(kind).get(_ORIGINAL)
    if original is not None:
        if kind.__bases__ != (original,):
            _carry_over_parametrizations(kind, original)
        set_class(module, original)
        return
    # A parametrization was registered while the layer was on: torch derived a class from the changed one.
    for derived in kind.__mro__:
        if any(_ORIGINAL in vars(base) for base in derived.__bases__):
            derived.__bases__ = tuple(vars(base).get(_ORIGINAL, base) for base in derived.__bases__)


def _changed_class(module: nn.Module, changes: frozenset[Change]) -> type[nn.Module]:
    """The class of `module` with a ``forward`` that is changed; the same for all modules of that class."""
    original = type(module)
    parametrized = parametrize.is_parametrized(module)
    known = _classes.get((original, changes))
    if known is not None and not parametrized:
        return known
    inside_out = sorted(changes, key=lambda change: -change.rank)
    runs = [change.run for change in inside_out]

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super(kind, self).forward  # type: ignore[misc]
        for run in runs[:-1]:
            call = _Inner(run, self, call)
        return runs[-1](self, call, args, kwargs)

    def construct(self: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        # Somebody makes a new module of this module's class, as a slice of a Sequential does: a plain one.
        if type(self) is kind:
            set_class(self, original)
        original.__init__(self, *args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any, /) -> Any:
        if type(self) is not kind:
            return original.__reduce_ex__(self, protocol)
        return _as_plain(self, original, lambda: _without_class_check(self.__reduce_ex__(protocol), original))

    def deepcopy(self: nn.Module, memo: dict[int, Any], /) -> Any:
        copy_of: Callable[[nn.Module, dict[int, Any]], Any] = original.__deepcopy__  # type: ignore[attr-defined]
        return copy_of(self, memo) if type(self) is not kind else _as_plain(self, original, lambda: copy_of(self, memo))

    def prepare_scriptable(self: nn.Module) -> nn.Module:
        words = " and ".join(change.word for change in reversed(inside_out))
        raise CheckpointingError(
            f"torch.jit.script: a {original.__name__} in this model is {words}, which TorchScript cannot compile; "
            "switch that off first"
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
        _CHANGES: changes,
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
        _classes[original, changes] = kind
    return kind


class _Inner:
    """A call with one change, for another change around it."""

    __slots__ = ("_call", "_module", "_run")

    def __init__(self, run: Run, module: nn.Module, call: Callable[..., Any]) -> None:
        self._run = run
        self._module = module
        self._call = call

    @property
    def __self__(self) -> nn.Module:
        """Whose call it is, as a bound method has it."""
        return self._module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._module, self._call, args, kwargs)


def _as_plain(module: nn.Module, original: type[nn.Module], make: Callable[[], Any]) -> Any:
    kind = type(module)
    set_class(module, original)
    try:
        return make()
    finally:
        set_class(module, kind)


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
