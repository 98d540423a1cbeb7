from __future__ import annotations

from typing import get_args

import pytest

from amp_widgets.core.run_state import RunState
from amp_widgets.widgets.status_line import StatusLine
from amp_widgets.widgets.text import in_force_text


def nobody(_: int) -> None:
    pass


def test_one_glance(state) -> None:
    shown = StatusLine(
        nobody,
        state(
            run="running", step=1234, loss=0.51234, step_s=0.0123, steps_per_s=81.0, samples_per_s=5184.0, skipped_steps=3,
            autocast="fp16", scale=2.0**14, checkpointed=("blocks.0", "blocks.2"), notes=("Compiled.",),
            allocated_bytes=120e6, peak_bytes=185.1e6, overall_peak_bytes=190e6, memory_source="live tensor bytes on cpu",
            pending={"autocast": "bf16", "init_scale": 8.0},
        ),
    )  # fmt: skip
    assert (shown.word, shown.tone) == ("running", "active")
    assert shown.numbers == [
        ["Step", "1,234", "3 skipped"],
        ["Loss", "0.5123", ""],
        ["Step time", "12.3 ms", "81.0 steps/s · 5,184 samples/s"],
        ["Peak memory", "185 MB", "120 MB after the step · highest 190 MB", "live tensor bytes on cpu"],
    ]
    assert shown.machine == "cpu · torch 2.13.0"
    assert shown.in_force == "fp16 · loss scale 2^14 · 2 layers checkpointed"
    assert shown.waiting == "autocast bf16, init_scale 2^3"
    assert (shown.rejection, shown.error, shown.notes) == ("", "", ["Compiled."])


def test_what_is_not_known_is_a_dash(state) -> None:
    assert [number[1:3] for number in StatusLine(nobody, state()).numbers] == [["0", ""], ["–", ""], ["–", ""], ["–", ""]]


def test_every_state_of_a_run_has_a_word_and_a_colour(state) -> None:
    words = {run: StatusLine(nobody, state(run=run, step=1)) for run in get_args(RunState)}
    assert {run: (line.word, line.tone) for run, line in words.items()} == {
        "none": ("idle", "idle"),
        "ready": ("ready", "idle"),
        "running": ("running", "active"),
        "paused": ("paused", "waiting"),
        "stopped": ("stopped", "idle"),
        "finished": ("finished", "done"),
        "failed": ("failed", "bad"),
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "fp32 · loss not scaled · no layer checkpointed"),
        ({"autocast": "bf16", "checkpointed": ("norm",)}, "bf16 · loss not scaled · 1 layer checkpointed"),
        ({"autocast": "fp16", "scaling": False}, "fp16 · loss not scaled · no layer checkpointed"),
        ({"autocast": "fp16"}, "fp16 · loss scaled · no layer checkpointed"),
        ({"autocast": "fp16", "scale": 3.0}, "fp16 · loss scale 3 · no layer checkpointed"),
    ],
)
def test_what_is_in_force(state, settings: dict, expected: str) -> None:
    assert in_force_text(state(**settings)) == expected


def test_rejection_and_error_travel_as_they_are(state) -> None:
    shown = StatusLine(nobody, state(run="failed", last_rejection="no <b>such</b> layer", error="Error: <script>"))
    assert (shown.rejection, shown.error) == (
        "no <b>such</b> layer",
        "Error: <script>",
    )  # the page makes text of it (test_page.py)
    shown.render(state(run="running"))
    assert (shown.rejection, shown.error) == ("", "")


def test_one_message_a_change_and_none_without(state, messages) -> None:
    shown = StatusLine(nobody, state(run="running", step=5, loss=0.5))
    messages.clear()
    shown.render(state(run="running", step=5, loss=0.500001))  # as it is written, the same
    assert messages.sent == []
    shown.render(state(run="paused", step=6, loss=0.5))
    [update] = messages.updates
    assert set(update) == {"word", "tone", "numbers"}


def test_what_could_not_be_done_is_no_rejection(state) -> None:
    shown = StatusLine(nobody, state(last_rejection="init_scale: no", complaint="Check not run: <b>"))
    assert (shown.rejection, shown.complaint) == ("init_scale: no", "Check not run: <b>")
    shown.render(state())
    assert (shown.rejection, shown.complaint) == ("", "")


def test_the_views_that_look_are_counted(state) -> None:
    counts: list[int] = []
    shown = StatusLine(counts.append, state())
    for view, there in (("a", True), ("b", True), ("a", True), ("a", False), ("never", False), ("b", False)):
        shown._handle_custom_msg({"view": view, "open": there}, [])
    assert counts == [1, 2, 2, 1, 1, 0]


def test_closed(state) -> None:
    shown = StatusLine(nobody, state(run="running", pending={"autocast": "fp16"}))
    shown.show_closed()
    assert (shown.word, shown.tone, shown.waiting) == ("closed", "idle", "")
    assert shown.in_force_label == "closed: the model is as it was; last in force"


def test_a_loop_of_the_users_own(state) -> None:
    shown = StatusLine(nobody, state())
    assert shown.word == "attached"
    shown.loop_runs = True
    for run, word in (("none", "your loop"), ("ready", "your loop"), ("finished", "your loop"), ("running", "running")):
        shown.render(state(run=run, step=1))
        assert (shown.word, shown.tone) == (word, "active")
