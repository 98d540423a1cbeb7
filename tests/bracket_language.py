"""A language of its own, in which each text of the catalogue is in brackets: what is outside of them has to be data."""

from __future__ import annotations

import re
from collections.abc import Iterable

from amp_widgets import language

# Names, units and code, which are the same in every language.
DATA = frozenset(
    """
    amp_widgets fp32 fp16 bf16 fp64 tf32 int8 fixed e4m3 e5m2 fp8_e4m3 fp8_e5m2 cpu CPU CUDA GPU cuda torch inf nan NaN dtype ckpt
    kB MB GB TB KiB MiB ms ulp bits Adam Sequential Linear Dropout ReLU Block LayerNorm Conv2d BatchNorm2d model stem body head
    norm weight bias layers FP32 UTC Linux SGD lr Python db run Autocast readout conv mlp attention
    int64 float32 float16 bfloat16 zero_grad none all planned chosen loss_fn torch.utils cross_entropy
    init_scale growth_factor backoff_factor growth_interval min_scale max_scale checkpointed fp32_layers scaling autocast widgets
    numpy plotly ipywidgets anywidget ipykernel jupyterlab ipython
    """.split()  # noqa: SIM905
)


def bracketed() -> language.Catalogue:
    """The catalogue of that language."""
    korean = language._read("ko")._messages
    return language.Catalogue({key: _bracketed(key if isinstance(key, str) else key[0]) for key in korean})


def _bracketed(text: str) -> str:
    """In brackets, but for its placeholders, and for what joins it to a part before."""
    joint = re.match(r"[,;:] | |", text)
    assert joint is not None
    return joint[0] + re.sub(r"(\{\w+\})", r"⟧\1⟦", f"⟦{text[joint.end() :]}⟧")


def outside(text: str) -> str:
    """What is in no brackets."""
    depth, kept = 0, []
    for character in text:
        depth += (character == "⟦") - (character == "⟧")
        kept.append(" " if depth or character == "⟧" else character)
    return "".join(kept)


def words_of(text: str, data: Iterable[str] = ()) -> list[str]:
    """The words of a text that are neither translated nor data."""
    known = DATA | set(data)
    rest = re.sub(r"%\{[^}]*\}|<[^>]*>|&\w+;|\b\d[\d.,]*(e[+-]?\d+)?|\w+::\w+", " ", outside(text))
    for name in sorted((one for one in data if not one.isalnum()), key=len, reverse=True):
        rest = rest.replace(name, " ")
    return [word for word in re.findall(r"[A-Za-z][A-Za-z_0-9]*[A-Za-z0-9]", rest) if word not in known]
