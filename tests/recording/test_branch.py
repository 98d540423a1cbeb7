"""The course that was left: its settings, step by step, and that reading it takes no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from amp_widgets.core.history import Event, History
from amp_widgets.recording.branch import Branch


def branch() -> Branch:
    history = History()
    for step in range(6):
        history.append(step=step, loss=1.0 / (step + 1))
    for step, changes in ((2, {"autocast": "bf16", "source": "script"}), (4, {"checkpointed": ["0", "1"], "source": "widget"})):
        history.record(Event(step=step, kind="applied", reason="asked for", detail=changes))
    return Branch(name="run", history=history, left_at=3, facts={"model": "Net"})


def test_settings_are_those_of_each_step() -> None:
    left = branch()
    assert [left.settings_at(step).autocast for step in range(4)] == ["fp32", "fp32", "bf16", "bf16"]
    assert left.settings_at(3).checkpointed == ()
    assert left.settings == left.settings_at(5)
    assert left.settings.checkpointed == ("0", "1")
    assert [event.step for event in left.events] == [2, 4]
    assert repr(left) == "<Branch run: 6 steps, left at step 3>"
    with pytest.raises(AttributeError):
        left.name = "other"  # type: ignore[misc]


def test_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from amp_widgets.core.history import History\n"
        "from amp_widgets.recording.branch import Branch\n"
        "from amp_widgets.recording.run_like import as_run, name_of, facts_of, changes_still\n"
        "one = Branch(name='fork-1', history=History(), left_at=0, facts={'model': 'Net'})\n"
        "assert as_run(one) is one and name_of(one) == 'fork-1' and facts_of(one)['model'] == 'Net' and not changes_still(one)\n"
        "print(one.settings.autocast)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("fp32", 0), done.stderr
