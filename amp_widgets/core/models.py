"""The models of a loop, and the optimizers that go with them: what is checked before a loop is attached."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from amp_widgets.errors import ModelError


def devices_of(model: nn.Module) -> list[torch.device]:
    """The devices that a model's parameters are on, the first of other devices than the CPU first.

    Raises
    ------
    ModelError
        When it is no model, has no parameters, or none that hold numbers.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: got a {type(model).__name__}, expected a torch.nn.Module; AmpSession(model, optimizer)")
    parameters = list(nn.Module.parameters(model))
    if not parameters:
        raise ModelError(f"model: got a {type(model).__name__} without parameters, expected a model to train")
    devices = list(dict.fromkeys(p.device for p in parameters))
    if any(device.type == "meta" for device in devices):
        raise ModelError(
            "model: got parameters on the meta device, which hold no numbers; materialise them first: model.to_empty(device=...)"
        )
    return sorted(devices, key=lambda device: (device.type == "cpu", str(device)))


def check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that each optimizer has parameters of the model.

    Raises
    ------
    ModelError
        When one has none.
    """
    ids = {id(p) for p in nn.Module.parameters(model)}  # the class's own: users override it, to group parameters
    for optimizer in optimizers:
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise ModelError(f"optimizer: got a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        theirs = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in ids for p in theirs):
            raise ModelError(
                f"optimizer: got a {type(optimizer).__name__} with {len(theirs)} parameters, none of them the model's, "
                "expected one made with model.parameters(). Was the model replaced or copied after the optimizer was made?"
            )


class Held:
    """The model of a loop, kept alive until `let_go`; called, it gives the model, or None."""

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model
        self._module_ids = self._ids_now()

    def __call__(self) -> nn.Module | None:
        return self._model

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is the model or a part of it, or a wrapper around it (compiled, DDP, DataParallel)."""
        if self._has_lost_some():  # the ids of a model that was freed come again
            self._module_ids = self._ids_now()
        if id(module) in self._module_ids:
            return True
        inside = module.__dict__.get("_modules", {})  # not by getattr: it may be the user's own property
        return any(id(inside[name]) in self._module_ids for name in ("_orig_mod", "module") if name in inside)

    def parameters(self) -> list[nn.Parameter]:
        """Of the model, as long as it is there."""
        model = self()
        return [] if model is None else list(nn.Module.parameters(model))

    def names_of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """The names of these parameters; of one that is not the model's, what can be said of it."""
        model = self()
        names = {} if model is None else {id(p): name for name, p in nn.Module.named_parameters(model)}
        return [names.get(id(p), f"parameter {i} of shape {tuple(p.shape)}") for i, p in enumerate(parameters)]

    def let_go(self) -> None:
        """Forget it."""
        self._model = None

    def is_gone(self) -> bool:
        """Whether there is none any more."""
        return self._model is None

    def _has_lost_some(self) -> bool:
        """Whether a model has been freed since this was last asked."""
        return False

    def _ids_now(self) -> set[int]:
        model = self()
        return set() if model is None else {id(module) for module in model.modules() if type(module) is not Together}


class Watched(Held):
    """The models of a loop, which are freed when the user lets go of them.

    Parameters
    ----------
    models
        By name; several are the parts of one, which is made anew each time it is asked for.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._references = {name: weakref.ref(model, self._note) for name, model in models.items()}
        self._lost = False
        self._module_ids = self._ids_now()

    def __call__(self) -> nn.Module | None:
        models = {name: model for name, reference in self._references.items() if (model := reference()) is not None}
        if not models:
            return None
        return Together(models) if len(self._references) > 1 else next(iter(models.values()))

    def let_go(self) -> None:
        self._references = {}

    def is_gone(self) -> bool:
        return all(reference() is None for reference in self._references.values())

    def _has_lost_some(self) -> bool:
        lost, self._lost = self._lost, False
        return lost

    def _note(self, reference: weakref.ref[nn.Module]) -> None:
        self._lost = True


class Together(nn.Module):
    """Several models in one tree; never called."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            name = name.replace(".", "_")
            while hasattr(self, name):
                name += "_"
            self.add_module(name, model)
