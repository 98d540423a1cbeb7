"""What users call has a docstring that tells of its parameters: the API reference (``make docs``) is made from them."""

from __future__ import annotations

import inspect
import pkgutil
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import amp_widgets as aw
from amp_widgets.core.autocast import Autocasting
from amp_widgets.core.hooks import HookListener
from amp_widgets.core.scaler import ScalerListener

# Beside the names of the package itself: what these give, and what the README sends its readers to.
OTHERS = (
    "analysis.batch_sizes:BatchSizes", "analysis.batch_sizes:largest_batch", "analysis.compare:compare",
    "analysis.comparison:Comparison", "analysis.cuda_corners:predict_corners_on_cuda", "analysis.dtype_map:DtypeMap",
    "analysis.dtype_map:dtype_map", "analysis.gradients:GradientRange", "analysis.on_cuda:CudaPredictions",
    "analysis.parity:ParityReport", "analysis.parity:check", "analysis.plan:Plan", "analysis.planner:plan",
    "analysis.precision:PrecisionReport", "analysis.precision:precision_cost", "analysis.preflight:Findings",
    "analysis.preflight:preflight", "analysis.profiled_step:LayerProfiles", "analysis.profiled_step:ProfiledStep",
    "analysis.step_profile:profile_step", "core.formats:FloatFormat", "core.formats:GridFormat", "core.formats:fixed_point",
    "core.formats:format_of", "core.formats:int8", "core.formats:round_to", "core.formats:scaled_round_trip",
    "core.formats:update_survives", "core.history:Event", "core.history:History", "core.settings:format_scale",
    "demos.scenario_panel:ScenarioPanel", "export.html:export_html", "export.picture:export_picture", "export.sink:Sink",
    "export.tables:export_csv", "export.tables:export_parquet", "export.tensorboard_sink:TensorBoardSink",
    "export.trackio_sink:TrackioSink", "left_branch:LeftBranch", "recorded_run:RecordedRun",
    "recording.differences:Differences", "runs_comparison:RunsComparison", "widgets.question:Answer",
)  # fmt: skip
# What the parts of a session tell it is no matter of its user's.
TOLD = {name for listener in (Autocasting, HookListener, ScalerListener) for name in vars(listener) if not name.startswith("_")}


def public_things() -> dict[str, Any]:
    """What is looked at, by its name."""
    own = {f"amp_widgets.{name}": getattr(aw, name) for name in aw.__all__ if not name.startswith("_")}
    return own | {f"amp_widgets.{name.replace(':', '.')}": pkgutil.resolve_name(f"amp_widgets.{name}") for name in OTHERS}


def complaints(name: str, thing: Any) -> Iterator[str]:
    """What is missing, one sentence each."""
    if not isinstance(thing, type):
        yield from _of_function(name, thing)
        return
    text = _text(thing)
    if not text:
        yield f"{name} has no docstring"
    if inspect.isfunction(thing.__init__) and _is_ours(thing.__init__):
        whole = "\n".join(_text(one) for one in thing.__mro__ if one.__module__.startswith("amp_widgets"))
        untold = _untold(whole, _parameters(thing.__init__), thing)
        yield from (f"{name}: its docstring says nothing of {one!r}" for one in untold)
    for member, value in inspect.getmembers_static(thing):
        if member.startswith("_") or member in TOLD:
            continue
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, property):
            if function.fget is not None and _is_ours(function.fget) and not _text(getattr(thing, member)):
                yield f"{name}.{member} has no docstring"
        elif inspect.isfunction(function) and _is_ours(function):
            yield from _of_function(f"{name}.{member}", function, getattr(thing, member), thing)


def _of_function(name: str, function: Callable[..., Any], bound: Any = None, owner: type | None = None) -> Iterator[str]:
    text = _text(function if bound is None else bound)
    if not text:
        yield f"{name} has no docstring"
        return
    where = owner or inspect.getmodule(function)
    yield from (f"{name}: its docstring says nothing of {one!r}" for one in _untold(text, _parameters(function), where))


def _untold(text: str, parameters: list[str], where: object) -> list[str]:
    """Those that the docstring does not tell of: in its list or as `name`; a lone one in a word of its sentences, too."""
    told = text + "".join(_referred(name, where) for name in re.findall(r"(?:[Ss]ee|[Aa]s in) `([\w.]+)`", text))
    missing = []
    for name in parameters:
        listed = re.search(rf"^ *(?:[\w*]+, )*\**{name}(?:, [\w*, ]+)?$|`{name}\b|\b{name}=", told, re.MULTILINE)
        in_words = len(parameters) == 1 and re.search(rf"\b{re.sub('_(s|bytes)$', '', name)}s?\b", text, re.IGNORECASE)
        if not listed and not in_words:
            missing.append(name)
    return missing


def _referred(name: str, where: object) -> str:
    """The docstring of what a docstring refers to."""
    if name.startswith("amp_widgets."):
        return "\n" + _text(pkgutil.resolve_name(name))  # which raises where it is not there
    return "\n" + _text(getattr(where, name, None))


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [one for one in inspect.signature(function).parameters if one not in ("self", "cls") and not one.startswith("_")]


def _is_ours(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith("amp_widgets")


def _text(thing: Any) -> str:
    return "" if thing is None else inspect.getdoc(thing) or ""


@pytest.mark.parametrize(("name", "thing"), public_things().items(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_users_call_is_documented(name: str, thing: Any) -> None:
    assert list(complaints(name, thing)) == []


def test_the_reference_has_a_page_of_everything_that_is_looked_at() -> None:
    pages = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "build_reference.py"))["PAGES"]
    homes = {f"amp_widgets.{name.partition(':')[0]}" for name in OTHERS}
    assert {home for home in homes if not home.startswith("amp_widgets.demos.")} <= set(pages)
    for page in pages:
        assert pkgutil.resolve_name(page).__doc__, page


def test_what_is_missing_is_found() -> None:
    class Documented:
        """A class.

        Parameters
        ----------
        first, second
            Both.
        """

        def __init__(self, first: int, second: int, third: int) -> None: ...

        def silent(self) -> None: ...

        @property
        def quiet(self) -> int: ...

        def half(self, width: int, height: int) -> None:
            """As wide as `width`."""

        def whole(self, duration_s: float) -> None:
            """For this duration."""

        def alike(self, width: int, height: int) -> None:
            """As in `tall`."""

        def tall(self, width: int, height: int) -> None:
            """As wide as `width`, as high as `height`."""

    for one in vars(Documented).values():
        if inspect.isfunction(one):
            one.__module__ = "amp_widgets.made_up"
    Documented.__module__ = "amp_widgets.made_up"
    Documented.quiet.fget.__module__ = "amp_widgets.made_up"
    assert sorted(complaints("D", Documented)) == [
        "D.half: its docstring says nothing of 'height'",
        "D.quiet has no docstring",
        "D.silent has no docstring",
        "D: its docstring says nothing of 'third'",
    ]
