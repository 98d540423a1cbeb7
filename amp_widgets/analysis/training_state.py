"""What a model, its optimizers and what goes with them have come to, as data that can be written to a file, and back.

Beside `amp_widgets.analysis.snapshot`, which keeps objects for a moment, this keeps numbers for a long time: tensors on the CPU
and plain values, which ``torch.load(path, weights_only=True)`` reads.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from amp_widgets.errors import SnapshotError


class Stateful(Protocol):
    """What keeps a state of its own beside the model, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a training step changes.

    Attributes
    ----------
    model, optimizers
        Of whom.
    loss_fn
        Called in a step; where it is a module, its tensors are kept too.
    also
        What keeps a state of its own.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss_fn: object = None
    also: Sequence[Stateful] = ()

    @property
    def modules(self) -> dict[str, nn.Module]:
        """By their name in the data."""
        found = {"model": self.model}
        if isinstance(self.loss_fn, nn.Module):
            found["loss_fn"] = self.loss_fn
        return found

    @property
    def others(self) -> dict[str, torch.Tensor]:
        """What the optimizers have that is in no module, by the number of the optimizer and its own."""
        known = {id(one) for module in self.modules.values() for one in _tensors(module).values()}
        return {
            f"{i}.{j}": one
            for i, optimizer in enumerate(self.optimizers)
            for j, one in enumerate(_parameters_of(optimizer))
            if id(one) not in known
        }


def state_as_data(trained: Trained) -> tuple[dict[str, Any], dict[str, Any]]:
    """All of it, copied to the CPU.

    Returns
    -------
    data
        Tensors and plain values.
    shapes
        What there is in it, and where the tensors were: for `check_shapes` and `put_back_state`.

    Raises
    ------
    SnapshotError
        When something of it is no data; it is named.
    """
    modules = {name: _of_module(name, module) for name, module in trained.modules.items()}
    others = {name: _copied(tensor, f"parameter {name} of the optimizers") for name, tensor in trained.others.items()}
    optimizers = [optimizer.state_dict() for optimizer in trained.optimizers]
    also = [other.state_dict() for other in trained.also]
    data = {
        "modules": modules,
        "others": others,
        "optimizers": [as_data(state, f"optimizers.{i}") for i, state in enumerate(optimizers)],
        "also": [as_data(state, f"also.{i} ({type(trained.also[i]).__name__})") for i, state in enumerate(also)],
    }
    return data, shapes_of(data, {"optimizers": optimizers, "also": also})


def check_fits(data: Mapping[str, Any], trained: Trained, what: str) -> None:
    """Raise a `SnapshotError` where the data are of another model, other optimizers or others beside them.

    Parameters
    ----------
    what
        They are, for messages: "the snapshot of step 100".
    """
    if data["modules"].keys() != trained.modules.keys():
        raise SnapshotError(
            f"{what} has {' and '.join(data['modules'])}, expected {' and '.join(trained.modules)}; the loss function is another"
        )
    for part, module in trained.modules.items():
        _check_tensors(data["modules"][part]["tensors"], _tensors(module), what, part)
    _check_tensors(data["others"], trained.others, what, "optimizers'")
    for key, there in (("optimizers", trained.optimizers), ("also", trained.also)):
        if len(data[key]) != len(there):
            raise SnapshotError(f"{what} has {len(data[key])} of {key}, expected {len(there)}, as there are now")
    for i, (kept, optimizer) in enumerate(zip(data["optimizers"], trained.optimizers, strict=True)):
        got, expected = ([len(group["params"]) for group in groups] for groups in (kept["param_groups"], optimizer.param_groups))
        if got != expected:
            raise SnapshotError(
                f"{what} has groups of {got} parameters for optimizer {i} ({type(optimizer).__name__}), expected {expected}, "
                "as it has them now"
            )


def put_back_state(data: Mapping[str, Any], shapes: Mapping[str, Any], trained: Trained) -> None:
    """Make it what it was, in the same tensors and groups, without gradients; after `check_fits`.

    Parameters
    ----------
    shapes
        As from `state_as_data`.
    """
    for part, module in trained.modules.items():
        _put_back_module(module, data["modules"][part])
    _put_back_tensors(trained.others, data["others"])
    for i, optimizer in enumerate(trained.optimizers):
        _put_back_optimizer(optimizer, on_device(data["optimizers"][i], shapes["optimizers"][i]))
    for i, other in enumerate(trained.also):
        other.load_state_dict(on_device(data["also"][i], shapes["also"][i]))


# ---- data ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of a tensor, and where it was."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def as_data(value: Any, path: str) -> Any:
    """A copy of a value whose tensors are on the CPU.

    Parameters
    ----------
    path
        Where it is, for messages.

    Raises
    ------
    SnapshotError
        When it is, or has in it, what is neither a tensor nor a plain value.
    """
    if isinstance(value, torch.Tensor):
        return _copied(value, path)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or type(value) in _PLAIN:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):  # of a class of its own
            return kind(value)
    if isinstance(value, dict):
        items = {as_data(key, path): as_data(item, f"{path}.{key}") for key, item in value.items()}
        return type(value)(items) if type(value) in (collections.OrderedDict, collections.Counter) else items
    if isinstance(value, (list, tuple)):
        items_ = [as_data(item, f"{path}.{i}") for i, item in enumerate(value)]
        return items_ if isinstance(value, list) else tuple(items_)
    raise SnapshotError(
        f"snapshot: {path} is a {type(value).__name__}, expected tensors and plain values, which alone can be kept as data"
    )


def shapes_of(value: Any, original: Any = None) -> Any:
    """What there is in data, without the numbers; of `original`, of which they are a copy, where its tensors are."""
    if isinstance(value, torch.Tensor):
        owner = original if isinstance(original, torch.Tensor) else value
        return Shape(value.dtype, tuple(value.shape), owner.device)
    if isinstance(value, dict):
        there = original if isinstance(original, dict) else {}
        return {key: shapes_of(item, there.get(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        here = original if isinstance(original, (list, tuple)) else [None] * len(value)
        return [shapes_of(item, one) for item, one in zip(value, here, strict=True)]
    return type(value)


def check_shapes(value: Any, shapes: Any, path: str = "") -> None:
    """Raise a `SnapshotError` unless there is in these data what `shapes_of` has found; devices may differ."""
    where = path.lstrip(".") or "the whole"
    if isinstance(shapes, Shape):
        got = _described(value)
        if got != str(shapes):
            raise SnapshotError(f"{where}: got {got}, expected {shapes}")
    elif isinstance(shapes, dict):
        if not isinstance(value, dict) or value.keys() != shapes.keys():
            names = sorted(map(str, value))[:8] if isinstance(value, dict) else f"a {type(value).__name__}"
            raise SnapshotError(f"{where}: got {names}, expected {sorted(map(str, shapes))[:8]}")
        for key, shape in shapes.items():
            check_shapes(value[key], shape, f"{path}.{key}")
    elif isinstance(shapes, list):
        if not isinstance(value, (list, tuple)) or len(value) != len(shapes):
            raise SnapshotError(f"{where}: got {_described(value)}, expected a list of {len(shapes)}")
        for i, shape in enumerate(shapes):
            check_shapes(value[i], shape, f"{path}.{i}")
    elif type(value) is not shapes:
        raise SnapshotError(f"{where}: got {_described(value)}, expected {shapes.__name__}")


def on_device(value: Any, shapes: Any) -> Any:
    """A copy of data, with each tensor where it was."""
    if isinstance(value, torch.Tensor):
        return value.to(shapes.device, copy=True)
    if isinstance(value, dict):
        items = {key: on_device(item, shapes[key]) for key, item in value.items()}
        return type(value)(items)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item, shapes[i]) for i, item in enumerate(value))
    return value


def bytes_of(value: Any) -> int:
    """Of the tensors in data."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(value))


# ---- private ------------------------------------------------------------------------------------------------------------


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _of_module(part: str, module: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: _copied(tensor, f"{part}.{name}") for name, tensor in _tensors(module).items()},
        "evaluated": [name for name, one in nn.Module.named_modules(module) if not one.training],
        "frozen": [name for name, one in nn.Module.named_parameters(module) if not one.requires_grad],
    }


def _put_back_module(module: nn.Module, data: Mapping[str, Any]) -> None:
    evaluated, frozen = frozenset(data["evaluated"]), frozenset(data["frozen"])
    _put_back_tensors(_tensors(module), data["tensors"])
    for name, one in nn.Module.named_modules(module):
        if one.training != (name not in evaluated):
            one.training = name not in evaluated
    for name, parameter in nn.Module.named_parameters(module):
        if parameter.requires_grad != (name not in frozen):
            parameter.requires_grad_(name not in frozen)


def _put_back_tensors(tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(data[name])
            if tensor.is_leaf:
                tensor.grad = None


def _check_tensors(kept: Mapping[str, Any], here: Mapping[str, torch.Tensor], what: str, part: str) -> None:
    for name in here.keys() | kept.keys():
        if name not in kept:
            raise SnapshotError(f"{what} has no {part} tensor {name!r}, expected one: it has come since")
        if name not in here:
            raise SnapshotError(f"{what} has a {part} tensor {name!r}, expected none: it has gone since")
        got, expected = _described(kept[name]), _described(here[name])
        if got != expected:
            raise SnapshotError(f"{what} has {got} for the {part} tensor {name!r}, expected {expected}, as it is now")


def _put_back_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    groups = list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    for i, group in enumerate(groups):  # the user may hold them
        loaded = dict(optimizer.param_groups[i])
        group.clear()
        group.update(loaded)
        optimizer.param_groups[i] = group
    parameters = _parameters_of(optimizer)
    for number, kept in state["state"].items():  # torch gives what it has loaded the parameter's number format
        live = optimizer.state.get(parameters[number]) if isinstance(number, int) and number < len(parameters) else None
        if not isinstance(live, dict) or not isinstance(kept, dict):
            continue
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and _described(live.get(name)) != _described(value):
                live[name] = value


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, also those that are in no state_dict."""
    return {**dict(nn.Module.named_parameters(module)), **dict(nn.Module.named_buffers(module))}


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _copied(tensor: torch.Tensor, path: str) -> torch.Tensor:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor or nn.parameter.is_lazy(tensor) or plain.layout != torch.strided:
        what = "has no shape yet" if nn.parameter.is_lazy(tensor) else f"is a {type(plain).__name__} of layout {plain.layout}"
        raise SnapshotError(f"snapshot: {path} {what}, expected an ordinary tensor, which alone can be kept as data")
    return plain.to("cpu", copy=True)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(Shape(value.dtype, tuple(value.shape), value.device))
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return type(value).__name__


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
