"""CUDA's autocast on a CPU: which operators it casts, and to what, so that a prediction without a GPU can follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from amp_widgets.analysis.autocast_lists import LISTS
from amp_widgets.analysis.operator_overrides import Kernel, Kernels, OperatorOverrides, has_kernel, overloads_of


def cuda_policy() -> OperatorOverrides:
    """A context manager: inside, and in this thread, autocast on ``"cpu"`` casts what autocast on CUDA does.

    Which format it casts to is up to the ``torch.autocast("cpu", ...)`` around or inside of it, as always. Other threads go on
    with the CPU's own lists. Afterwards torch is as it was before.

    Notes
    -----
    The lists are those of `LISTS`, and which overloads they mean is asked of torch's dispatcher, which knows CUDA's also where
    torch was built without it; torch's headers are not needed. The casts are those of ``aten/src/ATen/autocast_mode.h``. Where
    both devices treat an operator alike, torch's own kernel stays, with its cache of casts of the weights; operators that
    only CUDA casts to the lower precision, such as ``einsum`` and the cells of recurrent layers, do without that cache here.
    """
    return _POLICY


def _kernels() -> Kernels:
    return dict(_find_kernels())


def _find_kernels() -> Iterator[tuple[Any, tuple[Kernel, Kernel]]]:
    cuda, cpu = LISTS["cuda"], LISTS["cpu"]
    for name in sorted(cuda.keys() | cpu.keys()):
        for overload in overloads_of(name):
            on_cuda = cuda.get(name) if has_kernel(overload, "AutocastCUDA") else None
            on_cpu = cpu.get(name) if has_kernel(overload, "AutocastCPU") else None
            if on_cuda == "fp32" and name in SETS_DTYPE:
                inside = _with_dtype_fp32(overload)
            elif on_cuda == "fp32" and name in APPENDS_DTYPE:
                inside = _appending_dtype_fp32(overload)
            elif name == "binary_cross_entropy" and has_kernel(overload, "AutocastCUDA"):
                inside = _refuse
            elif on_cuda == on_cpu or (on_cuda is None and on_cpu == "lower"):
                # The same; or one that only a CPU has, or that ends at one that is on CUDA's list as well.
                continue
            else:
                inside = _CASTS[on_cuda](overload)
            yield overload, (inside, _CASTS[on_cpu](overload))


SETS_DTYPE = frozenset(("prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum"))
"""Of CUDA's list of float32 those whose inputs are not cast, but that are told to give float32."""
APPENDS_DTYPE = frozenset(("norm",))
"""The same, by the overload that takes a dtype."""

# ---- the kernels ----------------------------------------------------------------------------------------------------


def _casting_to_lower(op: Any) -> Kernel:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return _call(op, args, kwargs, lambda *_: torch.get_autocast_dtype("cpu"))

    return kernel


def _casting_to_fp32(op: Any) -> Kernel:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return _call(op, args, kwargs, lambda *_: torch.float32)

    return kernel


def _promoting(op: Any) -> Kernel:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return _call(op, args, kwargs, _widest)

    return kernel


def _with_dtype_fp32(op: Any) -> Kernel:
    place = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("dtype")
        if given is None and _is_eligible(args[0]):
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        return _call(op, args, kwargs)

    return kernel


def _appending_dtype_fp32(op: Any) -> Kernel:
    with_dtype = getattr(torch.ops.aten.norm, "ScalarOpt_dim_dtype" if "dim" in op._overloadname else "ScalarOpt_dtype")
    defaults = [getattr(argument, "default_value", None) for argument in op._schema.arguments]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
        return _call(with_dtype, (*args, *defaults[len(args) :]), {**kwargs, "dtype": dtype})

    return kernel


def _leaving(op: Any) -> Kernel:
    """As if there were no kernel for autocast: on to the next key, from which autocast is still seen."""
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keyset & below, *args, **kwargs)

    return kernel


def _refuse(keyset: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: autocast on CUDA refuses them. "
        "Combine the sigmoid before it with the loss: torch.nn.functional.binary_cross_entropy_with_logits or "
        "torch.nn.BCEWithLogitsLoss."
    )


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], to: Any = None) -> Any:
    """Call an operator, and those that it calls, without autocast; its inputs are cast before, as autograd sees it."""
    # Operators in C++ are not seen by functions' modes either when they call each other.
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU), torch._C.DisableTorchFunction():
        if to is not None:
            dtype = to(args, kwargs)
            args = tuple(_cast(value, dtype) for value in args)
            kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
        return op(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(each, dtype) for each in value)
    return value.to(dtype) if _is_eligible(value) and value.dtype != dtype else value


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == "cpu"
    )


def _widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """The lower precision, or float32 where one of the inputs has it."""
    lower = torch.get_autocast_dtype("cpu")
    found = lower
    for value in _flat((*args, *kwargs.values())):
        if value.dtype == torch.float32 or found == torch.float32:
            found = torch.float32
        elif value.dtype != lower:
            raise RuntimeError(
                f"Unexpected floating ScalarType in at::autocast::prioritize: {value.dtype}, with autocast {lower}"
            )
    return found


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        elif _is_eligible(value):
            yield value


_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_CASTS: dict[str | None, Any] = {"lower": _casting_to_lower, "fp32": _casting_to_fp32, "promote": _promoting, None: _leaving}
_POLICY = OperatorOverrides("AutocastCPU", _kernels)
