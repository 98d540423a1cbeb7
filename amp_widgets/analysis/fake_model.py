"""A copy of a model and its optimizers whose tensors have shapes and no numbers: it trains without memory of its own."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from amp_widgets.analysis.fake_kernels import FakeKernels, UnfakeableError
from amp_widgets.analysis.fake_numbers import KnownNumbers
from amp_widgets.core.batch_tree import batch_leaves, first_dimension, is_batched, map_batch
from amp_widgets.core.layers import inner_model
from amp_widgets.core.memory.compiled import is_compiled


class FakeTraining:
    """Copies of a model, its optimizers and a loss function, on fake tensors.

    The copies are plain: no layer is checkpointed or kept in FP32. What the loss function and hooks of the user's refer to in
    closures and by global names is copied with them, so that what they do there is not seen by the user. A real tensor that
    is met all the same, in whatever the user's code refers to, is replaced by its fake when a function of torch is called.

    Parameters
    ----------
    model, optimizers, loss_fn
        The user's own; nothing of them is changed, and none is kept alive.

    Attributes
    ----------
    model, optimizers, loss_fn
        The copies.

    Raises
    ------
    UnfakeableError
        When they cannot be copied.

    Notes
    -----
    What the code of the user's classes does to objects that it refers to by global names is done to the user's own, as in a
    real step: a list that outputs are appended to gets fake ones.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss_fn: Callable[..., Any]) -> None:
        _check(model, optimizers, loss_fn)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._fakes = _Fakes(self._mode)
        with self.active(), torch.inference_mode(False), torch.no_grad():
            copier = _Copier(self._fakes)
            try:
                self.model: nn.Module = copier.model(model)
                self.optimizers = tuple(map(copier.optimizer, optimizers))
                self.loss_fn: Callable[..., Any] = copier.function(loss_fn)
            except UnfakeableError:
                raise
            except Exception as error:  # a class of the user's may refuse to be copied in any way
                raise UnfakeableError(f"it cannot be copied: {_in_words(error)}") from error
        self._leaves = [tensor for tensor in _leaves_of(self.model, self.optimizers) if tensor.requires_grad]
        self._with_gradient = [tensor.grad is not None for tensor in self._leaves]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """On this thread, every tensor that is made is fake, and every real one is taken for its fake."""
        with self._mode, FakeKernels(), _RealToFake(self._fakes):
            yield

    def begin(self) -> None:
        """As the user's model is: gradients where there are any, and none else; within `active`."""
        for tensor, with_gradient in zip(self._leaves, self._with_gradient, strict=True):
            if not with_gradient:
                tensor.grad = None
            elif tensor.grad is None:
                tensor.grad = torch.empty_like(tensor)

    def keep_gradients(self) -> None:
        """`begin` leaves gradients as they are now."""
        self._with_gradient = [tensor.grad is not None for tensor in self._leaves]

    def batch(self, batch: Any, device: torch.device, size: int | None) -> Any:
        """A batch of fakes on a device.

        Parameters
        ----------
        batch
            The user's, of real tensors.
        size
            The first dimension of every tensor and array in it that is as long there as the first of them; as it is without.
        """
        length = first_dimension(batch_leaves(batch))

        def faked(leaf: Any) -> Any:
            resized = size is not None and is_batched(leaf, length)
            if isinstance(leaf, np.ndarray):
                return np.zeros((size, *leaf.shape[1:]), leaf.dtype) if resized else leaf.copy()
            if not isinstance(leaf, Tensor):
                return leaf
            fake = self._fakes.of(leaf).detach()
            if resized and fake.layout != torch.strided:
                raise UnfakeableError(f"the batch has a tensor of layout {fake.layout}, whose size is not known in advance")
            made = (
                torch.empty_permuted((size, *fake.shape[1:]), memory_order(fake), dtype=fake.dtype, device=device)  # type: ignore[arg-type]
                if resized
                else fake.to(device=device, copy=True)
            )
            return made.requires_grad_(leaf.requires_grad)

        with torch.inference_mode(False), torch.no_grad():
            return map_batch(faked, batch)


class FakeScaler(torch.amp.GradScaler):
    """Scales as torch's, and takes every gradient for finite, as fakes have no numbers."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a copy of it, the one that is slowest in memory first."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))


# ---- copies ----------------------------------------------------------------------------------------------------------


class _Fakes:
    """Real tensor → its fake, always the same one; the real ones are not kept alive."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self.numbers = KnownNumbers()

    def of(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with torch._C.DisableTorchFunction():
            known = self._known.get(tensor)
            if known is None:
                known = self._known[tensor] = self._made(tensor)
                self.numbers.note(known, tensor)
        return known

    def in_all(self, values: Any) -> Any:
        """Values in which each real tensor is replaced by its fake."""
        return pytree.tree_map_only(Tensor, self.of, values)

    def _made(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in _PLAIN and not isinstance(tensor, (nn.Parameter, nn.Buffer)):
            raise UnfakeableError(f"it has a tensor of the class {type(tensor).__name__}")
        if tensor.grad_fn is not None:
            with torch._C._DisableTorchDispatch():
                tensor = tensor.detach()
        if tensor.numel() == 1 and not tensor.requires_grad and tensor.device.type == "cpu" and tensor.layout == torch.strided:
            # Its number is known to code that asks for it, as Adam asks for the number of the step.
            with torch._C._DisableTorchDispatch():
                number = tensor.detach().clone()
            made: Tensor = self._mode.fake_tensor_converter.from_real_tensor(self._mode, number, make_constant=True)
            return made
        return self._mode.from_tensor(tensor)


class _RealToFake(TorchFunctionMode):
    """Calls functions of torch with fakes, whatever they are called with."""

    def __init__(self, fakes: _Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__deepcopy__:
            return self._fakes.of(args[0])
        if _has_real((args, kwargs)):
            args, kwargs = self._fakes.in_all((args, kwargs))
        return self._fakes.numbers.call(function, args, kwargs or {})


def _has_real(values: Any) -> bool:
    if isinstance(values, Tensor):
        return not isinstance(values, FakeTensor)
    if isinstance(values, (tuple, list)):
        return any(map(_has_real, values))
    if isinstance(values, dict):
        return any(map(_has_real, values.values()))
    return False


class _Copier:
    """Copies what refers to real tensors, where these are taken for their fakes."""

    def __init__(self, fakes: _Fakes) -> None:
        self._fakes = fakes
        self._memo: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._done: dict[int, tuple[Any, types.FunctionType]] = {}  # by id; both held so that an id means one

    def model(self, model: nn.Module) -> nn.Module:
        """A model with all that is in it."""
        self._know(model)
        made: nn.Module = copy.deepcopy(model, self._memo)
        for original, module in list(zip(model.modules(), made.modules(), strict=True)):
            self._settle(original, module)
        return made

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """One for the copied parameters, with its state."""
        for group in optimizer.param_groups:
            self._memo |= {id(parameter): self._fakes.of(parameter) for parameter in group["params"]}
        made: torch.optim.Optimizer = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if name == "step":  # a learning rate scheduler's, which would step the user's own
                continue
            vars(made)[name] = self._hooks(value) if "_hooks" in name else copy.deepcopy(value, self._memo)
        for group, original in zip(made.param_groups, optimizer.param_groups, strict=True):
            _settle_foreach(group, original)
        return made

    def function(self, function: Any) -> Any:
        """A loss function, or a hook, with what it refers to."""
        if isinstance(function, types.FunctionType):
            return self._plain_function(function)
        if isinstance(function, types.MethodType):
            return types.MethodType(function.__func__, self._value(function.__self__))
        if isinstance(function, functools.partial):
            arguments, keywords = self._value(function.args), self._value(function.keywords)
            return functools.partial(self.function(function.func), *arguments, **keywords)
        if isinstance(function, nn.Module):
            known = self._memo.get(id(function))
            return self.model(function) if known is None else known
        return copy.deepcopy(function, self._memo)

    def _know(self, model: nn.Module) -> None:
        """Parameters and buffers first: a parameter that is copied by itself would not be the same one elsewhere.

        And random generators, whose state has to stay a real tensor.
        """
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._memo[id(tensor)] = self._fakes.of(tensor)
            for value in vars(module).values():
                if isinstance(value, torch.Generator):
                    self._memo[id(value)] = value.clone_state()

    def _settle(self, original: nn.Module, module: nn.Module) -> None:
        """Functions are not copied with what has them."""
        for name, value in vars(original).items():
            if "_hooks" in name and isinstance(value, OrderedDict):
                vars(module)[name] = self._hooks(value)
            elif isinstance(value, types.FunctionType):
                vars(module)[name] = self._plain_function(value)

    def _hooks(self, hooks: Any) -> Any:
        return OrderedDict((key, self.function(hook) if callable(hook) else hook) for key, hook in hooks.items())

    def _value(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._plain_function(value)
        if isinstance(value, nn.Module) and id(value) not in self._memo:
            return self.model(value)
        try:
            return copy.deepcopy(value, self._memo)
        except UnfakeableError:
            raise
        except Exception:  # a lock, a file: it stays the user's own
            return value

    def _plain_function(self, function: types.FunctionType) -> types.FunctionType:
        if (function.__module__ or "").split(".")[0] in ("torch", "amp_widgets"):
            return function
        if id(function) in self._done:
            return self._done[id(function)][1]
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        names = self._globals.setdefault(id(function.__globals__), dict(function.__globals__))
        made = types.FunctionType(function.__code__, names, function.__name__, None, cells or None)
        made.__dict__.update(vars(function))
        self._done[id(function)] = function, made
        made.__defaults__, made.__kwdefaults__ = self._value(function.__defaults__), self._value(function.__kwdefaults__)
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                cell.cell_contents = self._value(original.cell_contents)
        for name in _names_in(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, _CHANGEABLE) or (
                isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
            ):
                names[name] = self._value(value)
        return made


_PLAIN = (Tensor, nn.Parameter)
_CHANGEABLE = (Tensor, nn.Module, list, dict, set, deque, bytearray)


def _check(model: nn.Module, optimizers: Iterable[Any], loss_fn: Any) -> None:
    """Check what is known beforehand not to run on fake tensors.

    Raises
    ------
    UnfakeableError
        When something is.
    """
    for module in (*model.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())):
        if isinstance(module, torch.jit.ScriptModule):
            raise UnfakeableError(f"it has a TorchScript module ({_kind(module)}), whose code runs on real tensors alone")
        if is_compiled(module):
            raise UnfakeableError(f"it is compiled by torch.compile ({_kind(inner_model(module))})")
    if hasattr(loss_fn, "_torchdynamo_orig_callable"):
        raise UnfakeableError("loss_fn is compiled by torch.compile")
    if isinstance(loss_fn, torch.jit.ScriptFunction):
        raise UnfakeableError("loss_fn is a TorchScript function, whose code runs on real tensors alone")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnfakeableError(f"its optimizer is a {type(optimizer).__name__}, which is none of torch's")
    global_hooks = nn.modules.module
    for hooks in (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks):
        for hook in tuple(hooks.values()):
            if (getattr(hook, "__module__", None) or "").split(".")[0] not in ("torch", "amp_widgets"):
                raise UnfakeableError("there is a global forward hook, which would be given fake tensors")


def _kind(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))


def _in_words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _settle_foreach(group: dict[str, Any], original: dict[str, Any]) -> None:
    """An optimizer takes the kernels for many tensors by itself on some devices, but not for fakes."""
    parameters = original["params"]
    if not parameters or parameters[0].device.type == "cpu" or group.get("foreach", False) is not None or group.get("fused"):
        return
    group["foreach"] = not group.get("differentiable") and not group.get("capturable")


def _leaves_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
    return [tensor for tensor in {id(tensor): tensor for tensor in tensors}.values() if tensor.is_leaf]
