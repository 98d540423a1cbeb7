"""The layers of a model as people name them: what may be checkpointed, and names and globs resolved to them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from amp_widgets.core.globs import is_glob, parts_match
from amp_widgets.errors import CheckpointingError, LayerError, SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One submodule of a model.

    Attributes
    ----------
    name
        Its dotted name in the model, as in ``model.named_modules()``, without the parts that wrappers of the whole model
        (``torch.compile``, DataParallel, DistributedDataParallel) put into it.
    type
        The name of its class.
    parameters
        Number of parameter elements in it and its children, each counted once.
    why_not
        Why it cannot be checkpointed, or None if it can.
    structural
        It only holds other modules and has no forward pass of its own: there is nothing to checkpoint, and globs pass over it.
    """

    name: str
    type: str
    parameters: int
    why_not: str | None
    structural: bool


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every module inside `model` under its first name, in the model's order; wrappers are seen through."""
    layers: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in _walk(inner_model(model)):
        if id(module) not in seen:
            seen.add(id(module))
            layers[name] = module
    return layers


def list_layers(model: nn.Module) -> tuple[Layer, ...]:
    """What `named_layers` gives, described."""
    sizes: dict[int, dict[int, int]] = {}
    known: dict[int, str | None] = {}
    _parameter_sizes(inner_model(model), sizes)
    return tuple(
        Layer(
            name=name,
            type=type(module).__name__,
            parameters=sum(sizes[id(module)].values()),
            why_not=why_not(module, known),
            structural=is_structural(module),
        )
        for name, module in named_layers(model).items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSetting:
    """A setting that consists of layers.

    Parameters
    ----------
    name
        Of the setting.
    verb
        What is done to a layer, to be followed by the layer.
    not_whole
        Why the whole model cannot be given.
    why_not
        The reason why a layer cannot be given, or None.
    error
        To be raised for such a layer.
    """

    name: str
    verb: str
    not_whole: str
    why_not: Callable[[nn.Module], str | None]
    error: type[SettingsError]


def resolve_layers(model: nn.Module, patterns: Iterable[str], *, setting: LayerSetting | None = None) -> tuple[str, ...]:
    """Names and globs → the names of the layers they mean, each once, in the model's order.

    Parameters
    ----------
    patterns
        Layer names, also second names of a shared module, and globs: ``*``, ``?`` and ``[…]`` stand for characters within
        one part of a dotted name, ``**`` for any number of parts, none included. Globs pass over structural layers, and over
        what is never called.
    setting
        What they are named for; without one, ``checkpointed``.

    Raises
    ------
    LayerError
        When a pattern matches no layer; the message names the nearest.
    CheckpointingError
        When a layer that is named or matched cannot be checkpointed (for another setting, what that raises); the message says
        why.
    """
    setting = CHECKPOINTED if setting is None else setting
    layers = named_layers(model)
    first_names = {id(module): name for name, module in layers.items()}
    aliases = {name: first_names[id(module)] for name, module in _walk(inner_model(model))}
    wanted: set[str] = set()
    given_patterns: Iterable[object] = (patterns,) if isinstance(patterns, str) else patterns
    for given in given_patterns:
        if not isinstance(given, str):
            raise LayerError(f"{setting.name}: got {given!r}, expected the name of a layer or a glob, such as 'layers.*'")
        wanted.update(_matches(given, _without_wrappers(given, model), layers, aliases, setting))
    refused = {name: reason for name in layers if name in wanted and (reason := setting.why_not(layers[name])) is not None}
    if refused:
        named = "; ".join(f"layer {name!r} ({type(layers[name]).__name__}): {refused[name]}" for name in list(refused)[:3])
        more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
        holder = next((name for name in refused if is_structural(layers[name])), None)
        advice = (
            f"did you mean {f'{holder}.*'!r}?"
            if holder is not None
            else "leave it out"
            if len(refused) == 1
            else "leave them out"
        )
        raise setting.error(f"{setting.name}: cannot {setting.verb} {named}{more}; {advice}")
    return tuple(name for name in layers if name in wanted)


def inner_model(model: nn.Module) -> nn.Module:
    """The user's model inside the wrappers that ``torch.compile``, DataParallel and DistributedDataParallel put around it."""
    while True:
        if is_compiled_wrapper(model):
            model = _inside_compiled(model)
        elif _is_data_parallel(model):
            module = model.module
            assert isinstance(module, nn.Module)
            model = module
        else:
            return model


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether `module` is what ``torch.compile(module)`` returned (seen without importing the compiler)."""
    return _has_class(module, "torch._dynamo.eval_frame", "OptimizedModule")


def is_structural(module: nn.Module) -> bool:
    """Whether `module` has no forward pass of its own, or only torch's machinery calls it."""
    if isinstance(module, torch.jit.ScriptModule):  # asking its class for forward raises
        return False
    return type(module).forward is nn.Module.forward or isinstance(module, ParametrizationList)


def why_not(module: nn.Module, known: dict[int, str | None] | None = None) -> str | None:
    """The reason why `module` cannot be checkpointed safely, or None; `known` saves work over many modules of one model."""
    return why_not_exchanged(module) or _why_not_inside(module, {} if known is None else known)


def why_not_exchanged(module: nn.Module) -> str | None:
    """The reason why the forward pass of `module` cannot be exchanged, or None."""
    if is_structural(module):
        return "it only holds other modules and has no forward pass of its own"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module: its forward pass is compiled and cannot be exchanged"
    if _has_class(module, "torch.fx.graph_module", "GraphModule"):
        return "it is a torch.fx GraphModule, which writes its own forward pass into its class"
    if _is_data_parallel(module):
        return f"it is a {type(module).__name__} wrapper: choose layers inside it"
    if _is_never_called(module):
        return "it is never called: nn.MultiheadAttention computes with its weights itself, and is the layer to name"
    if "forward" in vars(module):
        owner = "accelerate" if "_hf_hook" in vars(module) else "other code"
        return f"its forward was replaced on the instance (by {owner}), which hides the one of its class: undo that first"
    return None


CHECKPOINTED = LayerSetting(
    name="checkpointed",
    verb="checkpoint",
    not_whole="which cannot be checkpointed: its recompute would hold all that was saved",
    why_not=why_not,
    error=CheckpointingError,
)


def _why_not_inside(module: nn.Module, known: dict[int, str | None]) -> str | None:
    """The reason that `module` or a module inside it gives against checkpointing any module around it."""
    if id(module) in known:
        return known[id(module)]
    reason: str | None = None
    if _has_class(module, "torch.distributed", "FSDPModule", "FullyShardedDataParallel"):
        reason = "its parameters are sharded by FSDP, which moves them between forward and recompute"
    elif any(type(parameter).__name__ == "DTensor" for parameter in module.parameters(recurse=False)):
        reason = "its parameters are sharded over several processes (DTensor)"
    elif any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        reason = "it has parameters without a shape yet (a lazy module): run the model once first"
    elif isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.buffers()):
        reason = "it contains a TorchScript module with buffers, which cannot be kept from changing twice"
    else:
        for child in module.children():
            if (reason := _why_not_inside(child, known)) is not None:
                break
    known[id(module)] = reason
    return reason


def _walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module inside `module` under each of its names, depth first, compiled ones replaced by what they wrap."""
    for part, child in module._modules.items():
        if child is None:
            continue
        name = f"{prefix}{part}"
        inner = _inside_compiled(child) if is_compiled_wrapper(child) else child
        yield name, inner
        yield from _walk(inner, f"{name}.")


def _inside_compiled(module: nn.Module) -> nn.Module:
    while is_compiled_wrapper(module):
        inner = module._modules["_orig_mod"]
        assert inner is not None
        module = inner
    return module


def _is_data_parallel(module: nn.Module) -> bool:
    return isinstance(module, nn.DataParallel) or _has_class(module, "torch.nn.parallel.distributed", "DistributedDataParallel")


def _has_class(module: nn.Module, package: str, *names: str) -> bool:
    return any(kind.__name__ in names and kind.__module__.startswith(package) for kind in type(module).__mro__)


def _parameter_sizes(module: nn.Module, sizes: dict[int, dict[int, int]]) -> dict[int, int]:
    """Fill `sizes`: id of each module → {id of each parameter in it and its children: number of elements}."""
    if id(module) not in sizes:
        own = {
            id(parameter): 0 if isinstance(parameter, nn.UninitializedParameter) else parameter.numel()
            for parameter in module.parameters(recurse=False)
        }
        for child in module.children():
            own.update(_parameter_sizes(child, sizes))
        sizes[id(module)] = own
    return sizes[id(module)]


def _without_wrappers(pattern: str, model: nn.Module) -> str:
    """`pattern` as a name in the innermost model: without ``_orig_mod`` parts and the ``module`` of a parallel wrapper."""
    parts = [part for part in pattern.split(".") if part != "_orig_mod"]
    while is_compiled_wrapper(model):
        model = _inside_compiled(model)
    if _is_data_parallel(model) and parts[:1] == ["module"] and "module" not in inner_model(model)._modules:
        parts = parts[1:]
    return ".".join(parts)


def _matches(
    given: str, pattern: str, layers: Mapping[str, nn.Module], aliases: Mapping[str, str], setting: LayerSetting
) -> list[str]:
    if pattern.strip(".") == "":
        raise LayerError(
            f"{setting.name}: {given!r} names the whole model, {setting.not_whole}. Name layers inside it{_such_as(layers)}"
        )
    if pattern in aliases:
        return [aliases[pattern]]
    if not is_glob(pattern):
        raise LayerError(f"{setting.name}: no layer matches {given!r}{_did_you_mean(pattern, layers)}")
    hits = _glob_hits(pattern, aliases)
    found = [name for name in hits if not is_structural(layers[name]) and not _is_never_called(layers[name])]
    if not found and any(_is_never_called(layers[name]) for name in hits):
        return hits  # to be refused with the reason
    if not found and hits:
        raise LayerError(
            f"{setting.name}: {given!r} matches only layers that hold others and have no forward pass of their own, such as "
            f"{hits[0]!r} ({type(layers[hits[0]]).__name__}); did you mean {f'{pattern}.*'!r}?"
        )
    if not found:
        raise LayerError(f"{setting.name}: no layer matches {given!r}{_did_you_mean(pattern, layers)}")
    return found


def _is_never_called(module: nn.Module) -> bool:
    """Whether it is the last layer of an ``nn.MultiheadAttention``, which does not call it."""
    return type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear


def _glob_hits(pattern: str, aliases: Mapping[str, str]) -> list[str]:
    globs = pattern.split(".")
    return list(dict.fromkeys(first for name, first in aliases.items() if parts_match(name.split("."), globs)))


def _such_as(layers: Mapping[str, nn.Module]) -> str:
    names = [name for name, module in layers.items() if not is_structural(module)]
    if not names:
        return "; this model has no layer inside it"
    return f"; this model has {len(names)} layer{'s' * (len(names) > 1)}, such as {_listed(names[:3], ' and ')}"


def _did_you_mean(pattern: str, layers: Mapping[str, nn.Module]) -> str:
    names = [name for name, module in layers.items() if not is_structural(module)]
    if not is_glob(pattern):
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.6)
        return f"; did you mean {_listed(near, ' or ')}?" if near else _such_as(layers)
    forms = _glob_forms(names)
    near = difflib.get_close_matches(pattern, forms, n=1, cutoff=0.5)
    if not near:
        return _such_as(layers)
    count = forms[near[0]]
    return f"; did you mean {near[0]!r} ({count} layer{'s' * (count > 1)})?"


def _glob_forms(names: Sequence[str]) -> dict[str, int]:
    """Globs that a person might have meant → number of layers each matches."""
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        numbered = ["*" if part.isdigit() else part for part in parts]
        for form in {".".join(numbered), ".".join([*parts[:-1], "*"]), ".".join([*numbered[:-1], "*"])}:
            if "*" in form:
                counts[form] = counts.get(form, 0) + 1
    return counts


def _listed(names: Sequence[str], last: str) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])}{last}{quoted[-1]}"
