"""Which model a piece of code trains, told by the modules that it calls and the optimizers that it steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn


class Models:
    """The models seen at work.

    Parameters
    ----------
    namespace
        Variables of the code, for names; looked at when asked, never changed.
    wanted
        Name of the model to pick, as a variable (also ``trainer.model``) or as a class; None: the first one trained.
    """

    def __init__(self, namespace: Mapping[str, Any], wanted: str | None) -> None:
        self._namespace = namespace
        self._wanted = wanted
        self._seen: list[weakref.ref[nn.Module]] = []

    def called(self, module: nn.Module) -> nn.Module | None:
        """The model that a call of `module`, from outside of any other, is part of; None if it is not to be picked."""
        if not _trainable(module):
            return None
        model = self._remember(module)
        return model if self._wanted is None else self._picked(model)

    def owner_of(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        """The model with the most of an optimizer's parameters, among those called, else wherever it is; None: it has none."""
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        called = [model for reference in self._seen if (model := reference()) is not None]
        best = max(called, key=lambda model: _overlap(model, ids), default=None)
        if best is None or not _overlap(best, ids):
            best = _module_with(next((p for group in optimizer.param_groups for p in group["params"]), None))
            if best is None:
                return None
            best = self._remember(best)
        return best if self._wanted is None else self._picked(best)

    def name_of(self, module: nn.Module) -> str:
        """What to call it: the variable that holds it, or its class."""
        names = [name for name, value in self._named_modules() if value is module and not name.startswith("_")]
        return names[0] if names else type(module).__name__

    @property
    def by_name(self) -> dict[str, nn.Module]:
        """All that were seen and are still there; of one name, the later ones get a number."""
        found: dict[str, nn.Module] = {}
        for model in filter(None, (reference() for reference in self._seen)):
            name, number = self.name_of(model), 2
            while name in found:
                name, number = f"{self.name_of(model)}_{number}", number + 1
            found[name] = model
        return found

    def _remember(self, module: nn.Module) -> nn.Module:
        """The whole that `module` is a part of, seen from now on."""
        for reference in self._seen:
            model = reference()
            if model is not None and _contains(model, module):
                return model
        model = self._whole(module)
        self._seen.append(weakref.ref(model))
        return model

    def _whole(self, module: nn.Module) -> nn.Module:
        named = [value for _, value in self._named_modules()]
        if any(value is module for value in named):
            return module
        holders = [value for value in named if _contains(value, module)]
        if holders:
            return max(holders, key=lambda holder: sum(1 for _ in holder.modules()))
        return _topmost(module)

    def _picked(self, model: nn.Module) -> nn.Module | None:
        assert self._wanted is not None
        first, *rest = self._wanted.split(".")
        value = self._namespace.get(first)
        for part in rest:
            value = getattr(value, part, None)
        if _is_module(value):
            return value if _contains(value, model) or _contains(model, value) else None
        return model if type(model).__name__ == self._wanted else None

    def _named_modules(self) -> list[tuple[str, nn.Module]]:
        return [(name, value) for name, value in list(self._namespace.items()) if _is_module(value)]


def _is_module(value: Any) -> TypeGuard[nn.Module]:
    return issubclass(type(value), nn.Module)  # by isinstance a lazy stand-in would be asked for its class, and may not have one


def _trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in nn.Module.parameters(module))  # which users override, to group parameters


def _contains(model: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in model.modules())


def _overlap(model: nn.Module, ids: set[int]) -> int:
    return sum(id(p) in ids for p in nn.Module.parameters(model))


def _module_with(parameter: torch.Tensor | None) -> nn.Module | None:
    """The module that a parameter belongs to, found by who refers to it."""
    if parameter is None:
        return None
    return next(_holders(parameter, "_parameters"), None)


def _topmost(module: nn.Module) -> nn.Module:
    """The module that contains `module` and is contained in none."""
    seen = {id(module)}
    while (parent := next((m for m in _holders(module, "_modules") if id(m) not in seen), None)) is not None:
        seen.add(id(parent))
        module = parent
    return module


def _holders(value: object, attribute: str) -> Iterator[nn.Module]:
    """Modules in whose `attribute`, a dict, the value is."""
    for registry in gc.get_referrers(value):
        if type(registry) is not dict or not any(item is value for item in registry.values()):
            continue
        for holder in gc.get_referrers(registry):
            if _is_module(holder) and holder.__dict__.get(attribute) is registry:
                yield holder
            elif type(holder) is dict and holder.get(attribute) is registry:
                yield from (owner for owner in gc.get_referrers(holder) if _is_module(owner))
