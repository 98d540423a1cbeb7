"""How a model is called with the inputs of a batch: as they are, as keywords, or one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from amp_widgets.core.layers import inner_model


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's output for the inputs of a batch.

    A dict whose keys are all names of parameters of the model's ``forward``, and that has all which it needs, is given as
    keywords. A tuple or list is given one after the other where ``forward`` cannot be called with one argument, and can be with
    so many. Anything else is given as it is: ``model(inputs)``. A ``forward(*args, **kwargs)`` names no parameters and can be
    called with one argument, so that it is given everything as it is.

    Parameters
    ----------
    model
        What is called; its ``forward`` is looked at within ``torch.compile`` and data parallelism, and behind a
        ``functools.wraps``.
    inputs
        Of a batch ``(inputs, targets)``.

    Raises
    ------
    TypeError
        What the call raises; where the inputs are no tensor, or ``forward`` does not take one argument, with how they were given.
    """
    arguments, keywords = _arguments(model, inputs)
    try:
        return model(*arguments, **keywords)
    except TypeError as error:
        if type(error) is not TypeError or (isinstance(inputs, torch.Tensor) and _binds(_signature(model), inputs)):
            raise
        raise TypeError(_with_how(error, model, inputs, arguments, keywords)) from error


def _arguments(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping) and inputs and all(isinstance(key, str) for key in inputs):
        signature, keywords = _signature(model), dict(inputs)
        if _binds(signature, **keywords) and (keywords.keys() <= _names(signature) or not _binds(signature, inputs)):
            return (), keywords
    elif isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        signature = _signature(model)
        if not _binds(signature, inputs) and _binds(signature, *inputs):
            return tuple(inputs), {}
    return (inputs,), {}


def _signature(model: nn.Module) -> inspect.Signature:
    try:
        return inspect.signature(inner_model(model).forward)
    except (TypeError, ValueError):  # not written in Python
        return inspect.Signature([inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY)])


def _binds(signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _names(signature: inspect.Signature) -> set[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in signature.parameters.items() if parameter.kind in by_name}


def _with_how(error: TypeError, model: nn.Module, inputs: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """What an error says, and how the inputs were given."""
    kind = type(inputs).__name__
    if keywords:
        given = ", ".join(f"{name}=…" for name in keywords)
        return f"{error}; the batch's inputs, a {kind}, were given as keywords: model({given})"
    if not (len(arguments) == 1 and arguments[0] is inputs):
        return f"{error}; the batch's inputs, a {kind}, were given as {len(arguments)} arguments: model(*inputs)"
    names = ", ".join(_STARS.get(one.kind, "") + name for name, one in _signature(model).parameters.items())
    return (
        f"{error}; the batch's inputs, a {kind}, were given as one argument: model(inputs); forward({names}) gets several from a "
        "dict with the names of its parameters, or where it needs more than one from a tuple with as many"
    )


_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
