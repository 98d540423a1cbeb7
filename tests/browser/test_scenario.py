"""A scenario in a real JupyterLab, from the guess to the answer; and a question of a lesson, shown in two cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

# Elements are found by their classes and roles, not by words: in another language it is the same path.
PLAY = """
import torch
import amp_widgets as aw
torch.set_num_threads(1)
panel = aw.scenario("growth")
panel
"""
# The run takes less than a second, and the page may take several: it waits for what the page is to show.
HOLD = """
import threading
from amp_widgets.demos import prepared_scenario
go_on, look_again = threading.Event(), prepared_scenario._wait
prepared_scenario._wait = lambda *run: go_on.wait(120) and look_again(*run)
"""
ASK = """
question = aw.ask("Which is <b>faster</b>?", choices=["checkpointing", "<img src=x onerror='window.harmed = 1'>"])
question
"""
COVERED = """
from IPython.display import HTML
with question.covered():
    print("told in print")
    display(HTML("<b class='told'>told in bold</b>"))
    handle = display(HTML("<b class='first'>told in a handle</b>"), display_id=True)
    display(panel.session.dashboard())
"""
LATER = """handle.update(HTML("<b class='later'>told in an update</b>"))"""
REVEAL = """question.reveal("checkpointing", why="<i>Because</i> it is so.", more="More.")"""


def test_a_situation_is_guessed_at_run_and_explained(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([PLAY, ASK, "question", REVEAL, COVERED, LATER], height=2600)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    whole = area.locator(".ampw-scenarios")
    whole.wait_for()
    question, measure, answer = (whole.locator(f".ampw-{name}") for name in ("question", "measure", "answer"))
    guess, run, far = question.locator("input[type=text]"), measure.locator(".ampw-run-it"), answer.locator(".ampw-far")
    area.locator(".ampw-dashboard").wait_for()
    options = whole.locator(".ampw-situation select option")
    assert options.evaluate_all("all => all.map(one => one.value)") == python("list(aw.demos.scenarios.SCENARIOS)")
    assert not notebook.scrolls_sideways(0)
    notebook.screenshot("scenario-asked-light", whole)

    # nothing is run, and nothing told, before there is a guess
    wait(lambda: run.get_attribute("aria-disabled") == "true", "it can be run without a guess")
    run.click(force=True)
    assert far.count() == 0
    guess.fill("soon")
    guess.press("Enter")
    wait(question.get_by_role("alert").is_visible, "it is not said that this is no number")
    assert python("panel.question.guessed") is None

    # by keyboard: the guess, another one, and the run
    guess.fill("30")
    guess.press("Enter")
    wait(lambda: python("panel.question.guessed") == 30, "the guess has not arrived")
    guess.fill("20")
    guess.press("Tab")
    assert question.locator(".ampw-guess").evaluate("one => one === document.activeElement")
    notebook.page.keyboard.press("Enter")
    wait(lambda: python("panel.question.guessed") == 20, "the guess cannot be changed")
    wait(question.get_by_role("alert").is_hidden, "what was wrong is still said")
    wait(lambda: run.get_attribute("aria-disabled") == "false", "it cannot be run")
    notebook.kernel.exec(HOLD)
    run.press("Space")
    wait(measure.get_by_role("progressbar").is_visible, "no progress is shown")
    notebook.kernel.exec("go_on.set()")
    wait(lambda: far.count() == 1 and far.is_visible(), "there is no answer")
    said = answer.locator(".ampw-told").inner_text().split()
    assert said == " ".join(python("panel.question.answer.text").splitlines()[:2]).split()
    for number in ("20", "25"):
        assert number in answer.locator(".ampw-said").inner_text()
    assert far.get_attribute("data-tone") == "warn"
    assert python("panel.session.run_state") == "paused"
    scales = python("panel.session.history.columns('scale')['scale'][:30].tolist()")
    assert scales.index(4096.0, 5) == 25
    wait(lambda: guess.get_attribute("readonly") is not None, "the guess can be changed afterwards")
    wait(lambda: run.get_attribute("aria-disabled") == "false", "it cannot be run again")
    answer.locator("summary").click()
    notebook.page.wait_for_timeout(500)  # the charts draw what has come
    notebook.screenshot("scenario-answered-light", whole)

    # another situation, with choices
    whole.locator(".ampw-situation select").select_option("batchnorm")
    radios = question.get_by_role("radio")
    wait(lambda: radios.count() == 4, "another situation has no other question")
    wait(lambda: far.count() == 0, "the answer to the other is still there")
    wait(lambda: run.get_attribute("aria-disabled") == "true", "it can be run without a guess")
    wait(lambda: area.locator(".ampw-dashboard").count() == 1, "there is not one dashboard")
    radios.nth(1).focus()
    notebook.page.keyboard.press("ArrowDown")
    assert radios.nth(2).is_checked()
    question.locator(".ampw-guess").press("Enter")
    wait(lambda: python("panel.question.guessed") is not None, "the choice has not arrived")
    notebook.set_theme("dark")
    notebook.screenshot("scenario-choice-dark", whole)
    notebook.page.set_viewport_size({"width": 900, "height": 2600})
    notebook.page.wait_for_timeout(200)
    assert not notebook.scrolls_sideways(0)
    notebook.screenshot("scenario-choice-dark-900", whole)

    # a question in two cells, and its answer in a third: without a guess, as after Run All
    for cell in (1, 2, 3, 4, 5):
        notebook.run_and_wait(cell)
    first, second, told, covered = (notebook.output(cell) for cell in (1, 2, 3, 4))
    assert "told in" not in covered.inner_text()
    assert "told in" not in str(notebook.outputs(4))
    told.locator(".ampw-answer .ampw-sentence").wait_for()
    assert told.locator(".ampw-far").is_hidden()
    first.get_by_role("radio").nth(1).check()
    first.locator(".ampw-guess").click()
    wait(told.locator(".ampw-far").is_visible, "a guess does not bring the answer")
    wait(covered.locator("b.told").is_visible, "a guess does not uncover what was displayed")
    assert "told in print" in covered.inner_text()
    wait(covered.locator("b.later").is_visible, "an update of what is covered goes nowhere")
    assert covered.locator("b.first").count() == 0
    assert covered.locator(".ampw-dashboard").count() == 1
    assert covered.locator("[class*=ampw-still]").count() == 1
    wait(lambda: second.get_by_role("radio").nth(1).is_checked(), "the other view of the question has another guess")
    wait(second.get_by_role("radio").first.is_disabled, "there can be another guess")
    assert told.locator(".ampw-far").get_attribute("data-tone") == "warn"
    assert "<i>Because</i>" in told.inner_text()
    assert notebook.page.evaluate("window.harmed") is None
    assert first.locator("img").count() == 0
    notebook.screenshot("question-dark-900", first)
    notebook.set_theme("light")
    notebook.screenshot("answer-light-900", told)
