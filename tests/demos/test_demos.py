from __future__ import annotations

import gc
import pkgutil
import weakref

import pytest

import amp_widgets as aw
from amp_widgets.charts.asset import plotly_asset
from amp_widgets.demos import DEMOS
from amp_widgets.errors import DemoError


@pytest.mark.parametrize("name", DEMOS)
def test_what_makes_a_demo_is_there_and_goes_by_its_name(name: str) -> None:
    make = pkgutil.resolve_name(f"amp_widgets.demos.{DEMOS[name].maker}")
    assert make.__name__ == f"{name}_session"
    assert make.__module__ == f"amp_widgets.demos.{name}"


def test_an_unknown_demo_names_the_known() -> None:
    with pytest.raises(DemoError) as caught:
        aw.demo("mnist")
    for name in DEMOS:
        assert repr(name) in str(caught.value)


def test_the_demos_of_numbers_begin_in_fp16_as_asked_for_by_themselves() -> None:
    for name in ("underflow", "overflow"):
        with aw.demo(name, display=False) as session:
            assert session.run_state == "ready"
            assert session.pending is not None
            assert session.pending.changes == {"autocast": "fp16"}
            assert session.settings.init_scale == 2.0**16
            assert session.settings.scaling


class Shell:
    """What is asked of IPython's: which cell runs, and how many have run."""

    user_ns: dict[str, object] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.execution_count, self.cell = 0, "a"

    def run(self, cell: str) -> None:
        self.execution_count, self.cell = self.execution_count + 1, cell

    def get_parent(self) -> dict[str, object]:
        return {"metadata": {"cellId": self.cell}}


@pytest.mark.parametrize("name", ["digits", "memory-wall"])
def test_a_cell_that_is_run_again_frees_what_it_has_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widgets = pytest.importorskip("ipywidgets").widgets.widget._instances
    shell, shown = Shell(), []
    monkeypatch.setattr("amp_widgets.kernel.in_kernel", lambda: True)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setattr("amp_widgets.demos._shown", {})
    plotly_asset()
    known = {*widgets}
    shell.run("a")
    aw.demo(name)
    first, second = (weakref.ref(aw.demo(name)) for _ in range(2))  # in the same run of the cell
    assert first() is not None
    assert not first().closed  # type: ignore[union-attr]
    of_a = {*widgets} - known
    shell.run("b")
    kept = aw.demo(name)
    of_b = {*widgets} - known - of_a
    assert of_a <= {*widgets}
    shell.run("a")
    shown.clear()
    newest = aw.demo(name)
    gc.collect()
    assert not of_a & {*widgets}
    assert (first(), second()) == (None, None)
    assert of_b <= {*widgets}
    assert (kept.closed, newest.closed, len(shown)) == (False, False, 1)
    shell.run("a")
    shell.run("b")
    for cell in ("a", "b"):
        shell.run(cell)
        aw.demo(name).close()
    assert (kept.closed, newest.closed) == (True, True)
