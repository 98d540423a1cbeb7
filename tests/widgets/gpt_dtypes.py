"""A made-up dtype map of a small GPT in bf16 on a CPU."""

from __future__ import annotations

from typing import Any

from amp_widgets.analysis.dtype_map import DtypeMap, OperatorDtypes
from amp_widgets.core.layers import Layer


def operator(layer: str, name: str, formats: str, **changes: Any) -> OperatorDtypes:
    """`formats` are those in, of the computation, out and backward, such as ``"fp32 bf16 bf16 bf16"``."""
    came, compute, gone, backward = (tuple(part.split("+")) if part != "-" else () for part in formats.split())
    given: dict[str, Any] = {
        "layer": layer, "operator": name, "function": "", "calls": 1, "dtypes_in": came, "compute": compute, "dtypes_out": gone,
        "reason": "through", "why": "on none of CPU's lists: it takes what comes", "casts": 0, "cast_bytes": 0,
        "backward_compute": backward, "backward_casts": 0, "backward_cast_bytes": 0, "recompute_calls": 0, "recompute_casts": 0,
        "recompute_cast_bytes": 0, "on_cuda": None,
    }  # fmt: skip
    return OperatorDtypes(**(given | changes))


def linear(layer: str, **changes: Any) -> OperatorDtypes:
    given = {
        "reason": "lower", "why": "linear is on CPU's lower-precision list", "casts": 3, "cast_bytes": 164_000,
        "backward_casts": 3, "backward_cast_bytes": 328_000, "on_cuda": "lower",
    }  # fmt: skip
    return operator(layer, "linear", "fp32 bf16 bf16 bf16", **(given | changes))


def gpt_map(blocks: int = 6, **changes: Any) -> DtypeMap:
    rows = [operator("token", "embedding", "fp32 fp32 fp32 fp32")]
    types = {"(model)": "GPT", "token": "Embedding", "blocks": "ModuleList"}
    for i in range(blocks):
        name = f"blocks.{i}"
        types |= {name: "Block", f"{name}.norm": "LayerNorm", f"{name}.attention": "Attention", f"{name}.mlp": "Sequential"}
        types |= {f"{name}.mlp.0": "Linear", f"{name}.mlp.1": "GELU", f"{name}.mlp.2": "Linear"}
        rows += [
            operator(f"{name}.norm", "layer_norm", "fp32 fp32 fp32 fp32", on_cuda="fp32"),
            linear(f"{name}.attention", recompute_calls=1, recompute_casts=3, recompute_cast_bytes=164_000),
            operator(f"{name}.attention", "softmax", "bf16 bf16 bf16 bf16", on_cuda="fp32"),
            operator(f"{name}.attention", "rotate in Rotary", "bf16+fp32 bf16+fp32 fp32 -", calls=2),
            linear(f"{name}.mlp.0"),
            operator(f"{name}.mlp.1", "gelu", "bf16 bf16 bf16 bf16"),
            linear(f"{name}.mlp.2"),
            operator(name, "add", "fp32+bf16 fp32+bf16 fp32 -", calls=2, backward_casts=2, backward_cast_bytes=16_400),
        ]
    types |= {"norm": "LayerNorm", "head": "Linear"}
    rows += [
        operator("norm", "layer_norm", "fp32 fp32 fp32 fp32", on_cuda="fp32"),
        linear("head"),
        operator(
            "loss_fn", "cross_entropy_loss", "bf16 fp32 fp32 fp32", reason="fp32",
            why="cross_entropy_loss is on CPU's fp32 list", casts=1, cast_bytes=9_000, backward_casts=1,
            backward_cast_bytes=4_500, on_cuda="fp32",
        ),
    ]  # fmt: skip
    given: dict[str, Any] = {
        "rows": tuple(rows), "types": types, "autocast": "bf16", "checkpointed": (), "fp32_layers": (), "device_type": "cpu",
        "torch_version": "2.13.0",
    }  # fmt: skip
    return DtypeMap(**(given | changes))


def layers_of(taken: DtypeMap) -> tuple[Layer, ...]:
    return tuple(
        Layer(name=name, type=kind, parameters=0, why_not=None, structural=kind == "ModuleList")
        for name, kind in taken.types.items()
        if name != "(model)"
    )
