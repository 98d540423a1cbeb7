"""The CSS of the widgets: what one brings to a page must not reach into another."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import amp_widgets.widgets.control
from amp_widgets.widgets.checks_panel import ChecksPanel
from amp_widgets.widgets.control import Control
from amp_widgets.widgets.dtype_panel import DtypePanel
from amp_widgets.widgets.events_table import EventsTable
from amp_widgets.widgets.format_lab import FormatLab
from amp_widgets.widgets.gradient_control import GradientControl
from amp_widgets.widgets.gradient_table import GradientTable
from amp_widgets.widgets.layer_table import LayerTable
from amp_widgets.widgets.memory_control import MemoryControl
from amp_widgets.widgets.plan_control import PlanControl
from amp_widgets.widgets.plan_tables import BatchSizesControl, CudaControl
from amp_widgets.widgets.precision_panel import PrecisionPanel
from amp_widgets.widgets.question import Answer, Question
from amp_widgets.widgets.runs_control import RunsControl, RunsTable
from amp_widgets.widgets.scenario_control import MeasureControl, ScenarioControl
from amp_widgets.widgets.tab_bar import TabBar
from amp_widgets.widgets.transport import Transport

HERE = Path(amp_widgets.widgets.control.__file__).parent
SHARED = {"page", "virtual_table"}
ROOTS = {
    "page": (".ampw", ".ampw-dashboard"),
    "virtual_table": (".ampw-scroll",),
    "checks_panel": (".ampw-checks", ".ampw-checks-tab"),
    "compare_panel": (".ampw-compare-panel", ".ampw-compare"),
    "dtype_panel": (".ampw-dtypes",),
    "format_lab": (".ampw-formats",),
    "gradient": (".ampw-gradient-panel", ".ampw-gradients", ".ampw-gradient-table"),
    "memory": (".ampw-memory-panel", ".ampw-memory", ".ampw-layer-table"),
    "plan_panel": (".ampw-plan-panel", ".ampw-plan"),
    "precision_panel": (".ampw-precision",),
    "question": (".ampw-question", ".ampw-answer"),
    "presenting": (".ampw-presenting",),
    "runs_view": (".ampw-runs-view", ".ampw-runs", ".ampw-runs-table"),
    "replay": (".ampw-transport", ".ampw-events"),
    "scenario": (".ampw-scenarios", ".ampw-situation", ".ampw-measure"),
    "tab_bar": (".ampw-tabs", ".ampw-tabs-list"),
}
"""File → the classes one of which each of its selectors begins with, after what it stands in."""
AROUND = re.compile(r"^(body[^ ]* |\.ampw-dashboard |\.ampw )")
CLASS = re.compile(r"\.([\w-]+)")
WIDGETS: dict[type[Control], str] = {
    ChecksPanel: "checks_panel", DtypePanel: "dtype_panel", FormatLab: "format_lab", GradientControl: "gradient",
    GradientTable: "gradient", LayerTable: "memory", MemoryControl: "memory", PrecisionPanel: "precision_panel",
    TabBar: "tab_bar", PlanControl: "plan_panel", BatchSizesControl: "plan_panel", CudaControl: "plan_panel",
    Transport: "replay", EventsTable: "replay", Question: "question", Answer: "question",
    RunsControl: "runs_view", RunsTable: "runs_view",
    ScenarioControl: "scenario", MeasureControl: "scenario",
}  # fmt: skip
OTHERS = {"widget-box", "vscode-dark", "amp-figure", "jupyter-widgets-disconnected"}
"""Classes that are not of the widgets here."""


def style_of(name: str) -> str:
    return (HERE / f"{name}.css").read_text(encoding="utf-8")


def selectors(style: str) -> Iterator[str]:
    """Each selector of each rule, also of those in a query."""
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    for block in re.findall(r"([^{}]+)\{", style):
        if block.strip().startswith("@"):
            continue
        for one in re.split(r",(?![^(]*\))", block):
            yield " ".join(one.split())


def own_classes(name: str) -> set[str]:
    """Those that a file styles: of the last part of its selectors."""
    lasts = (re.split(r"[ >+~]+(?![^(]*\))", one)[-1] for one in selectors(style_of(name)))
    return {found for last in lasts for found in CLASS.findall(re.sub(r":not\([^)]*\)", "", last))} - OTHERS


def test_each_file_is_known() -> None:
    assert {path.stem for path in HERE.glob("*.css")} == set(ROOTS)
    rules = "/* a, b */ .a:is(x, y), .b > .c { d: e } @container (f) { .g { h: i } }"
    assert [*selectors(rules)] == [".a:is(x, y)", ".b > .c", ".g"]


@pytest.mark.parametrize("name", sorted(set(ROOTS) - {"page"}))
def test_a_rule_holds_within_its_own_widget_alone(name: str) -> None:
    roots = "|".join(re.escape(root) for root in ROOTS[name])
    strangers = [one for one in selectors(style_of(name)) if not re.match(rf"({roots})(?![\w-])", AROUND.sub("", one))]
    assert strangers == []


def test_a_class_belongs_to_one_file_or_to_all() -> None:
    shared = set.union(*map(own_classes, SHARED))
    files = defaultdict(set)
    for name in set(ROOTS) - SHARED:
        for one in own_classes(name) - shared:
            files[one].add(name)
    assert {one: sorted(names) for one, names in files.items() if len(names) > 1} == {}


@pytest.mark.parametrize("kind", WIDGETS, ids=lambda kind: kind.__name__)
def test_a_widget_brings_the_style_of_all_that_its_page_is_made_of(kind: type[Control]) -> None:
    style = str(kind._css)
    assert style_of("page") in style
    assert style_of(WIDGETS[kind]) in style
    assert (style_of("virtual_table") in style) == ("function scrolledTable(" in str(kind._esm))


def test_no_button_is_disabled_in_a_way_that_loses_the_focus() -> None:
    """See ``setOff`` in page.js. The tabs and the buttons of a run put the focus elsewhere by themselves."""
    found = []
    for path in HERE.glob("*.js"):
        if path.stem in ("tab_bar", "run_control"):
            continue
        script = path.read_text(encoding="utf-8")
        buttons = set(re.findall(r"const (\w+) = (?:h\(\s*\"button\"|button\()", script)) | {"button", "twisty"}
        targets = re.findall(r"([\w.]+)\.disabled = ", script)
        found += [f"{path.name}: {target}" for target in targets if target.split(".")[-1] in buttons]
    assert found == []
