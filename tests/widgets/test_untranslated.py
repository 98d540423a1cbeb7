"""Every text that is seen or spoken is in the language in force.

Found with a language of its own, in which each text of the catalogue is in brackets: what is outside of them has to be data.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets import language
from amp_widgets.analysis.inspections import InspectionKind
from amp_widgets.charts.figure_view import FigureView
from amp_widgets.charts.live import TrainingChart
from amp_widgets.demos.scenario_panel import ScenarioPanel
from amp_widgets.recorded_run import open_run
from amp_widgets.runs_comparison import compare_runs
from amp_widgets.session import AmpSession
from amp_widgets.widgets.control import Control
from amp_widgets.widgets.dashboard import Dashboard
from amp_widgets.widgets.dashboard_box import parts_of
from amp_widgets.widgets.format_lab import FormatLab
from amp_widgets.widgets.panels import TABS
from amp_widgets.widgets.question import ask
from amp_widgets.widgets.replay_dashboard import TABS as REPLAY_TABS
from tests.bracket_language import bracketed, words_of

sync_api = pytest.importorskip("playwright.sync_api")

PATIENCE_S = 60.0
KINDS: tuple[InspectionKind, ...] = (
    "check", "preflight", "dtype_map", "precision", "plan", "largest_batch", "predict_on_cuda",
)  # fmt: skip
MOUNT = """
async ([esm, css, state]) => {
  const style = document.createElement("style");
  style.textContent = css;
  const el = document.createElement("div");
  document.body.replaceChildren(style, el);
  const model = { get: (name) => state[name], on: () => {}, off: () => {}, send: () => {}, };
  const url = URL.createObjectURL(new Blob([esm], { type: "text/javascript" }));
  (await import(url)).default.render({ model, el });
  const said = [];
  const texts = document.createTreeWalker(el, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) if (!texts.currentNode.parentElement.closest("code, style")) said.push(texts.currentNode.data);
  for (const one of el.querySelectorAll("*")) {
    for (const name of ["aria-label", "title", "placeholder", "alt", "aria-valuetext", "aria-description"]) {
      if (one.hasAttribute(name)) said.push(one.getAttribute(name));
    }
  }
  return said;
}
"""
@pytest.fixture(autouse=True)
def brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The language in which every text of the catalogue is in brackets, in place of English."""
    monkeypatch.setitem(language._catalogues, "en", bracketed())


@pytest.fixture(scope="module")
def browser(in_ci: bool) -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        (pytest.fail if in_ci else pytest.skip)("there is no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"]) as browser:
            page = browser.new_page(viewport={"width": 1000, "height": 2600})
            page.goto("about:blank")
            yield page


@pytest.fixture
def said(browser: Any) -> Callable[[Any], list[tuple[str, str]]]:
    """What a widget and all in it say, with the class of what says it."""

    def of(widget: Any) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for one in parts_of(widget):
            name = type(one).__name__
            if isinstance(one, Control):
                state = {key: value for key, value in one.get_state().items() if not key.startswith("_") and key != "layout"}
                found += [(name, text) for text in browser.evaluate(MOUNT, [one._esm, "", state])]
            elif isinstance(one, FigureView):
                found += [(name, one.label), (name, one.note), *((name, text) for text in texts_of(one.figure))]
            elif isinstance(one, TrainingChart):
                found += [(name, text) for text in texts_of(one.spec)]
        return found

    return of


def texts_of(value: Any, key: str = "") -> Iterator[str]:
    """The texts in the description of a figure."""
    if isinstance(value, str):
        if key in ("text", "hovertext", "hovertemplate", "ticktext", "empty_note"):
            yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if name == "name" and "meta" in value:  # of a trace; those of annotations and shapes are not seen
                yield str(one)
            yield from texts_of(one, name if name not in ("light", "dark") else key)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from texts_of(one, key)


def untranslated(found: Iterable[tuple[str, str]], data: Iterable[str] = ()) -> list[str]:
    """One line for each text that is not translated."""
    lines = {}
    for name, text in found:
        words = words_of(text, data)
        if words:
            lines[f"{name}: {text!r} ({', '.join(words)})"] = None
    return list(lines)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def trained(record: Path | None = None) -> AmpSession:
    """A session whose run has changed settings, skipped steps, and been asked for what it cannot do."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.stem = nn.Linear(4, 8)
    model.body = nn.Sequential(Block(), Block())
    model.head = nn.Linear(8, 3)
    options = {} if record is None else {"record": record}
    session = AmpSession(model, torch.optim.Adam(model.parameters()), **options)
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 4, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(8)]
    session.request(autocast="fp16", init_scale=2.0**40)
    session.profile_changes = True
    session.fit(batches, nn.functional.cross_entropy, epochs=None, start=False)
    session.count_gradients()
    for _ in range(6):
        step(session)
    session.request(autocast="bf16", checkpointed=["body.0"])
    session.note("a note")
    session.profile_next_step()
    session.count_gradients()
    step(session)
    return session


def step(session: AmpSession) -> None:
    before = session.step
    session.single_step()
    wait_for(lambda: session.step > before and session.run_state == "paused")


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come")


def test_the_dashboard(said: Callable[[Any], list[tuple[str, str]]]) -> None:
    session = trained()
    with session:
        dashboard = Dashboard(session, live=False)
        for kind in KINDS:
            session.inspect(kind, **({"budget_bytes": 20e3} if kind in ("plan", "largest_batch") else {}))
            wait_for(lambda kind=kind: not session.inspection(kind).pending)
        session.compare_on_newest(grid={"autocast": ["fp32", "bf16"], "checkpointed": ["none", "all"]}, steps=1, rounds=1)
        wait_for(lambda: not session.comparison.pending)
        session.request(checkpointed=["body.1"])
        for tab in TABS:
            dashboard._select_tab(tab)
            dashboard.tick()
        names = [*(layer.name for layer in session.layers), *(layer.type for layer in session.layers), "a note"]
        taken = session.inspection("dtype_map").result
        names += [row.operator for row in taken.rows] + [row.text for row in taken.rows]
        found = said(dashboard)
        failed = [kind for kind in KINDS if session.inspection(kind).why_not]
        dashboard.close()
    assert failed == []
    assert len(found) > 1000
    left = untranslated(found, names)
    assert not left, "\n".join(left)


def test_a_step_that_ran_out_of_memory(said: Callable[[Any], list[tuple[str, str]]]) -> None:
    session = trained()
    with session:
        session.memory_budget = 3e3
        session.resume()
        wait_for(lambda: session.run_state == "failed")
        dashboard = Dashboard(session, live=False)
        dashboard.tick()
        found = said(dashboard)
        picture = dashboard._still._bundle(dashboard._shown, session.history_so_far, dashboard._memory)
        names = [layer.name for layer in session.layers]
        dashboard.close()
    assert any("Out of memory" in text for _, text in found)
    found += [("Still", text) for text in re.findall(r"<p>(.*?)</p>", picture["text/html"])]
    left = untranslated(found, names)
    assert not left, "\n".join(left)


def test_a_replay_and_a_view_of_runs(said: Callable[[Any], list[tuple[str, str]]], tmp_path: Path) -> None:
    paths = [tmp_path / "one.db", tmp_path / "other.db"]
    for path in paths:
        trained(path).close()
    run = open_run(paths[0])
    dashboard = run.dashboard()
    names = [*(layer.name for layer in run.layers), *(layer.type for layer in run.layers), "a note", *map(str, paths)]
    names += [
        "one.db",
        "other.db",
        "one",
        "other",
        *re.findall(r"\w+", str(run.facts.get("system", ""))),
        "amp-widgets",
        "widget",
        "script",
        "user",
        "magic",
    ]
    for tab in REPLAY_TABS:
        dashboard._select(tab)
        dashboard.tick()
    dashboard._move("end")
    dashboard.tick()
    found = said(dashboard)
    dashboard.close()
    run.close()
    compared = compare_runs(*paths)
    view = compared.view()
    found += said(view)
    view.close()
    compared.close()
    left = untranslated(found, names)
    assert not left, "\n".join(left)


def test_a_scenario(said: Callable[[Any], list[tuple[str, str]]]) -> None:
    panel = ScenarioPanel("scaling-off")
    try:
        found = said(panel)
        panel.question.guess("40")
        panel.question.reveal(88.0, why=language.say(panel.scenario.watch))
        found += said(panel.question) + said(panel.question.answer)
        names = [*(layer.name for layer in panel.session.layers), *(layer.type for layer in panel.session.layers)]
        whole = said(panel.question)
    finally:
        panel.close()
    assert len(whole) > 5
    left = untranslated(found, names)
    assert not left, "\n".join(left)


def test_a_question_and_the_formats(said: Callable[[Any], list[tuple[str, str]]]) -> None:
    question = ask("⟦?⟧", unit="%")
    found = said(question) + said(question.reveal(5))
    question._ask({"guess": "no number"})
    question.guess(6)
    found += said(question) + said(question.answer)
    choice = ask("⟦?⟧", choices=["⟦a⟧", "⟦b⟧"])
    found += said(choice)
    lab = FormatLab(weights={"w": (0.5, 1e-9)})
    found += said(lab)
    lab._ask({"text": "no number"})
    found += said(lab)
    left = untranslated(found, ["no", "number"])
    assert not left, "\n".join(left)
