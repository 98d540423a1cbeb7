"""Which layers of a model are alike: made of the same parts, with the same settings, and given and giving the same shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_SETTING = (bool, int, float, str, type(None))


@contextlib.contextmanager
def noting_kinds(names: Mapping[int, str], kinds: MutableMapping[str, Hashable]) -> Iterator[None]:
    """Note of which kind each layer is that is called within.

    Two layers of a kind compute the same on what has the same shape, unless they look at the values.

    Parameters
    ----------
    names
        Of the layers, by ``id(module)``.
    kinds
        Gets the kind of each by its name; to be compared with others, and nothing else.
    """

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in names:
            name = names[id(module)]
            kinds[name] = kinds.get(name, module_kind(module)), _shapes(args), _shapes(output)

    handle = register_module_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def module_kind(module: nn.Module) -> Hashable:
    """What it is made of: its class and settings, and the same of its parts; with shapes and formats, and without values.

    What is no plain number or text, such as a list, is the same only if it is the same object.

    Parameters
    ----------
    module
        Any.
    """
    settings = tuple(
        (name, value if _is_setting(value) else id(value)) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE
    )
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return (
        type(module),
        settings,
        tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in tensors),
        tuple((name, module_kind(child)) for name, child in module.named_children()),
    )


def _is_setting(value: Any) -> bool:
    return isinstance(value, _SETTING) or (isinstance(value, tuple) and all(isinstance(one, _SETTING) for one in value))


def _shapes(values: Any) -> Hashable:
    return tuple((one.shape, one.dtype) for one in tree_leaves(values) if isinstance(one, torch.Tensor))
