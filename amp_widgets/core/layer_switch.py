"""A switch that each layer of a live model has: which are on, and names and globs to switch them by."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from torch import nn

from amp_widgets.core.class_exchange import Change, changed_class, changes_of, set_changes, set_class
from amp_widgets.core.layers import LayerSetting, named_layers, resolve_layers
from amp_widgets.errors import ModelError, SessionClosedError


class LayerSwitch:
    """The layers of one model whose forward pass is changed in one way; a subclass says in which.

    Parameters
    ----------
    model
        The model; wrappers around it (``torch.compile``, DataParallel, DistributedDataParallel) are seen through.

    Raises
    ------
    ModelError
        When `model` is not a module.
    """

    setting: ClassVar[LayerSetting]
    change: ClassVar[Change]

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        self._source: Callable[[], nn.Module | None] = lambda: model
        self._switched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the layers that are on now, in the model's order."""
        model = self._model
        return () if model is None else tuple(name for name, module in named_layers(model).items() if self._is_on(module))

    def resolve(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Layer names and globs → layer names, in the model's order; see `amp_widgets.core.layers.resolve_layers`.

        Raises
        ------
        LayerError
            When a name or glob matches no layer.
        SettingsError
            When a layer that is named or matched cannot be switched on (`CheckpointingError` for checkpointing).
        SessionClosedError
            After `close`.
        """
        return resolve_layers(self._open_model(), patterns, setting=self.setting)

    def apply(self, names: Sequence[str]) -> None:
        """Switch on exactly these layers from the next forward pass on: all of them, or none and nothing has changed.

        Graphs that are alive are not affected: a backward pass recomputes what its forward pass left out.

        Raises
        ------
        LayerError, SettingsError, SessionClosedError
            As `resolve` does.
        """
        model = self._open_model()
        layers = named_layers(model)
        wanted = {name: layers[name] for name in resolve_layers(model, names, setting=self.setting)}
        keep = {id(module) for module in wanted.values()}
        switch_on = {name: module for name, module in wanted.items() if not self._is_on(module)}
        switch_off = [module for module in {*layers.values(), *self._switched} if self._is_on(module) and id(module) not in keep]
        for name, module in switch_on.items():
            if not changes_of(module):
                self._prepare(name, module)
        before = [(module, type(module)) for module in (*switch_on.values(), *switch_off)]
        try:
            for name, module in switch_on.items():
                self._switch_on(name, module)
            for module in switch_off:
                set_changes(module, changes_of(module) - {self.change})
        except BaseException:  # also an interrupt of the kernel
            for module, kind in before:
                set_class(module, kind)
            raise
        self._switched.update(switch_on.values())

    def watch(self, source: Callable[[], nn.Module | None]) -> None:
        """Ask `source` for the model from now on, in place of keeping it alive."""
        self._source = source

    def close(self) -> None:
        """Switch all layers off, also those that have left the model meanwhile, and let go of the model."""
        model = self._model
        for module in {*(() if model is None else named_layers(model).values()), *self._switched}:
            if self._is_on(module):
                set_changes(module, changes_of(module) - {self.change})
        self._switched.clear()
        self._source = _no_model

    @property
    def _model(self) -> nn.Module | None:
        return self._source()

    def _open_model(self) -> nn.Module:
        model = self._model
        if model is None:
            raise SessionClosedError(
                f"{self.setting.name}: the session was closed, so that the model's layers can no longer be switched"
            )
        return model

    def _is_on(self, module: nn.Module) -> bool:
        return self.change in changes_of(module)

    def _prepare(self, name: str, module: nn.Module) -> None:
        try:
            changed_class(module, frozenset({self.change}))
        except TypeError as error:
            raise self._refused(name, module, f"its class cannot be derived from: {error}") from error

    def _switch_on(self, name: str, module: nn.Module) -> None:
        try:
            set_changes(module, changes_of(module) | {self.change})
        except TypeError as error:  # the layout of the class forbids it
            raise self._refused(name, module, f"its class cannot be exchanged: {error}") from error

    def _refused(self, name: str, module: nn.Module, because: str) -> Exception:
        layer = f"layer {name!r} ({type(module).__name__})"
        return self.setting.error(f"{self.setting.name}: cannot {self.setting.verb} {layer}: {because}")


def _no_model() -> None:
    return None
