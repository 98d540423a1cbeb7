"""An open dashboard that changes over to Korean, and a scenario in Korean from guess to answer, in a real JupyterLab."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

SHOW = """
import torch
import amp_widgets as aw
torch.set_num_threads(1)
session = aw.demo("overflow", display=False)
session.request(autocast="fp16", init_scale=2**16)
session.dashboard()
"""
SPEAK = """
%load_ext amp_widgets
%amp lang ko
"""
PLAY = """panel = aw.scenario("growth")
panel"""


QUESTIONS = """
import amp_widgets as aw
number = aw.ask({"en": "Which share?", "ko": "비율은?"}, unit="%")
choice = aw.ask({"en": "Which one?", "ko": "어느 것?"}, choices=[{"en": "this", "ko": "이것"}, {"en": "that", "ko": "저것"}])
display(number, choice)
"""


def test_questions_that_are_open(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([QUESTIONS, SPEAK], height=2600)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    area.get_by_text("Which one?", exact=True).wait_for()
    notebook.kernel.eval("choice.guess('that')")
    notebook.wait_until(lambda: area.get_by_label("that", exact=True).is_checked(), what="the guess is not shown")
    assert "within 5 %" in area.inner_text()
    # what came with the script is right anyhow, as the page is drawn anew with it: these come by themselves
    notebook.kernel.eval("number._put({'text': 'Another text?', 'rule': 'Another rule.'})")
    notebook.wait_until(lambda: {"Another text?", "Another rule."} <= set(area.inner_text().splitlines()), what="the text stays")
    notebook.kernel.eval("choice._put({'choices': ['one', 'other'], 'typed': 'other'})")
    notebook.wait_until(lambda: area.get_by_label("other", exact=True).is_checked(), what="the choices stay")
    notebook.kernel.eval("choice._put({'choices': ['this', 'that'], 'typed': 'that'})")
    notebook.run_and_wait(1)
    for text in ("비율은?", "어느 것?", "이것", "저것"):
        area.get_by_text(text, exact=True).wait_for()
    assert area.get_by_label("저것", exact=True).is_checked()
    assert not re.search("Another|Which|this|that|within", area.inner_text())
    notebook.screenshot("korean-questions", area)


def test_the_dashboard_and_a_scenario(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SHOW, SPEAK, PLAY], height=2600)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    notebook.run_and_wait(0)
    area = notebook.output(0)
    area.get_by_role("button", name="Start", exact=True).click()
    wait(lambda: python("session.step") > 12, "it does not train")

    # the dashboard that is open changes over, and goes on
    notebook.run_and_wait(1)
    assert "언어: 한국어" in notebook.text(1)
    wait(lambda: area.get_by_role("button", name="일시정지", exact=True).is_enabled(), "the dashboard stays English")
    assert area.get_by_role("button", name="Pause", exact=True).count() == 0
    area.get_by_text("손실 스케일링", exact=True).first.wait_for()
    wait(lambda: area.locator(".gtitle, .annotation-text").filter(has_text="손실 스케일").count() > 0, "the chart stays English")
    buttons = "area => [...area.querySelectorAll('.modebar-btn')].map((one) => one.dataset.title)"
    wait(lambda: "확대" in area.evaluate(buttons), "the chart's buttons stay English")
    assert not [title for title in area.evaluate(buttons) if re.search("[A-Za-z]", title.replace("PNG", ""))]
    area.get_by_role("tab", name="그래디언트", exact=True).click()
    area.get_by_role("button", name="다음 스텝 샘플링", exact=True).click()
    wait(lambda: "레이어 출력의 그래디언트" in area.inner_text(), "no step was sampled")
    area.get_by_role("button", name="일시정지", exact=True).click()
    wait(lambda: python("session.run_state") == "paused", "it does not pause")
    area.get_by_role("tab", name="메모리", exact=True).click()
    notebook.page.wait_for_timeout(500)
    assert not notebook.scrolls_sideways(0)
    notebook.screenshot("korean-dashboard-light", area)

    # what is refused is said in Korean, and stays English in the history
    python("session.note('a note')")
    area.locator(".ampw-layers .ampw-pattern input").fill("nothing.*")
    area.locator(".ampw-layers .ampw-pattern button").click()
    wait(lambda: "'nothing.*'에 맞는 레이어가 없습니다" in area.inner_text(), "the reason is not shown")
    assert not re.search("[가-힣]", python("' '.join(event.reason for event in session.history.events())"))
    notebook.set_theme("dark")
    notebook.screenshot("korean-dashboard-dark", area)
    notebook.set_theme("light")

    # from the guess to the answer
    notebook.run_and_wait(2)
    whole = notebook.output(2).locator(".ampw-scenarios")
    whole.get_by_text("두 배가 된 스케일로 처음 학습하는 것은 몇 번째 스텝일까요?").wait_for()
    guess = whole.locator(".ampw-question input[type=text]")
    guess.fill("20")
    guess.press("Enter")
    run = whole.get_by_role("button", name="실행하고 측정하기", exact=True)
    wait(lambda: run.get_attribute("aria-disabled") == "false", "it cannot be run")
    run.click()
    answer = whole.locator(".ampw-answer")
    wait(lambda: answer.locator(".ampw-far").count() == 1 and answer.locator(".ampw-far").is_visible(), "there is no answer")
    assert "예상 20, 측정 25." in answer.inner_text()
    assert "예상이 5만큼 작습니다." in answer.inner_text()
    assert "20번 스텝이 아니라 25번 스텝입니다." in answer.inner_text()
    notebook.page.wait_for_timeout(500)
    notebook.screenshot("korean-scenario-light", whole)
