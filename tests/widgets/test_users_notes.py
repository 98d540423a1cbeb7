"""What a user has noted, and how a user has called a profile, is data: in any language it is shown as it was written."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_widgets.analysis.profiled_step import LayerProfiles
from amp_widgets.charts.labels import event_label, event_text, short_event_label
from amp_widgets.charts.mountain import mountain_figure
from amp_widgets.core.history import Event
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.export.html import run_page
from amp_widgets.language import in_language, reason_in_language, set_language
from amp_widgets.recorded_run import open_run
from amp_widgets.session import AmpSession
from amp_widgets.widgets.events_table import EventsTable
from amp_widgets.widgets.memory_panel import MemoryPanel
from amp_widgets.widgets.memory_state import MemoryState
from amp_widgets.widgets.transport import Transport, TransportState

NOTES = ("normal", "scaling off", "autocast: got 5, expected one of 'fp16', 'bf16'", "scaling on; no layer checkpointed")
"""Each is something else in Korean where it is not a note."""
OURS = "other data than before the fork: they begin at their beginning"


@pytest.fixture(autouse=True)
def korean() -> Iterator[None]:
    set_language("ko")
    yield
    set_language(None)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    model = nn.Linear(3, 2)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        session.record(tmp_path / "run.db")
        for note in NOTES:
            session.note(note)
            model(torch.ones(4, 3)).sum().backward()
            session.optimizers[0].step()
        session.record_event("note", OURS)
    return tmp_path / "run.db"


@pytest.fixture
def events(recorded: Path) -> list[Event]:
    with open_run(recorded) as run:
        return run.history.events("note")


def test_they_would_be_translated_otherwise() -> None:
    assert [in_language(note) for note in NOTES] == [
        "정규",
        "스케일링 끔",
        "autocast: 받은 값: 5, 다음 중 하나가 필요합니다: 'fp16', 'bf16'",
        "스케일링 켬; 체크포인팅 레이어 없음",
    ]


def test_reasons(events: list[Event]) -> None:
    assert [reason_in_language(event) for event in events] == [*NOTES, in_language(OURS)]
    assert re.search("[가-힣]", in_language(OURS))


def test_the_table_of_events(events: list[Event]) -> None:
    table = EventsTable(lambda *words, **more: None)
    table.show(events, 9)
    assert [row[2] for row in table.rows] == [in_language(OURS), *reversed(NOTES)]


def test_the_marks_of_a_slider(events: list[Event]) -> None:
    still = TransportState(first=0, last=9, step=9, mode="still", at_end=True, speed=1.0, played_s=1.0, duration_s=1.0)
    transport = Transport(lambda *words, **more: None, still, sentence="")
    transport.mark(events)
    assert transport.marks == [[step, note] for step, note in enumerate([*NOTES, in_language(OURS)])]
    transport.mark([*events, Event(step=1, kind="run", reason="paused", detail={}, time_s=0.0)])
    assert transport.marks[1] == [1, f"{NOTES[1]}; 일시정지"]


def test_charts(events: list[Event]) -> None:
    for event in events[:-1]:
        assert event_label(event) == event_text(event) == event.reason
    assert [short_event_label(event) for event in events[:2]] == ["normal", "scaling off"]
    assert event_text(events[-1]) == in_language(OURS)


def test_a_page_of_a_run(recorded: Path) -> None:
    with open_run(recorded) as run:
        page = run_page(run, plotly="none").html()
    items = [html.unescape(item) for item in re.findall(r"<li>(.*?)</li>", page)]
    assert items == [f"스텝 {step}: {note}" for step, note in enumerate([*NOTES, in_language(OURS)])]
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", page)]
    assert [note for note in NOTES if note not in cells] == []
    assert in_language(OURS) in cells


# ---- labels of profiles -----------------------------------------------------------------------------------------------

LABELS = ("normal", "normal (step 1)", "scaling off")
PAIR = (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))


@pytest.fixture(params=["of the session", "of its file"])
def profiles(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StepProfile, ...]:
    """Of a run: three with labels of a user, and one without."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        session.record(tmp_path / "run.db")
        for label in ("normal", "normal", "scaling off", ""):
            if not label:
                session.request(checkpointed=["0"])
                session.apply_pending()
            session.profile_next_step(label)
            model(torch.ones(4, 3)).sum().backward()
            session.optimizers[0].step()
        kept = session.profiles
    with open_run(tmp_path / "run.db") as run:
        return tuple(run.profiles) if request.param == "of its file" else kept


def panel_on(profiles: tuple[StepProfile, ...], *shown: str) -> MemoryPanel:
    return MemoryPanel(lambda *words, **more: None, lambda **changes: None, MemoryState(profiles=profiles, shown=shown), None)


def test_labels_of_profiles(profiles: tuple[StepProfile, ...]) -> None:
    assert [profile.label for profile in profiles][:3] == list(LABELS)
    for profile in profiles[:3]:
        assert f"<b>{profile.label}</b>" in profile._repr_html_()
    assert profiles[0].difference_text(profiles[2]).startswith("normal → scaling off: ")
    legend = [str(trace.name) for trace in mountain_figure((profiles[0], profiles[2])).data]
    assert any("normal" in name for name in legend)
    assert not any("정규" in name for name in legend)


def test_labels_in_the_memory_panel(profiles: tuple[StepProfile, ...]) -> None:
    panel = panel_on(profiles, "normal (step 1)")
    options = [text for _, text in panel._control.options]
    assert [re.split(r" ?\(", text)[0] for text in options[:3]] == ["normal", "normal", "scaling off"]
    assert options[0] != options[1]
    assert panel._table.caption.endswith(": normal")
    compared = panel_on(profiles, "normal", "scaling off")
    assert "normal" in repr(compared)
    assert "정규" not in repr(compared)


def test_a_label_of_ours_is_translated(profiles: tuple[StepProfile, ...]) -> None:
    *_, ours = profiles
    assert "checkpointed" in ours.label
    assert "체크포인팅" in panel_on(profiles, ours.label)._table.caption


@pytest.mark.parametrize("label", LABELS)
def test_a_label_of_a_step_of_its_own(label: str) -> None:
    model = nn.Linear(3, 2)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        profile = session.profile_step(PAIR, nn.functional.cross_entropy, label=label)
        assert f"<b>{label}</b>" in profile._repr_html_()
        assert repr(label) in repr(LayerProfiles.of(profile))
        session.keep_profile(profile)
        page = html.unescape(run_page(session, plotly="none").html())
    assert f'alt="{label} (스텝 -1): ' in page
