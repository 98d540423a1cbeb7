from __future__ import annotations

from amp_widgets.charts.labels import (
    LABEL_CHARACTERS,
    SHORT_LABEL_CHARACTERS,
    escaped,
    event_label,
    event_text,
    short_event_label,
    shortened,
)
from amp_widgets.core.history import Event


def label(reason: str = "", **detail: object) -> str:
    return event_label(Event(step=0, kind="applied", reason=reason, detail={**detail, "source": "dashboard"}, time_s=0.0))


def test_the_users_text_is_neutralised() -> None:
    assert escaped('<a href="x">&lt; $x^2$\n b') == '&lt;a href="x">&amp;lt; &#36;x^2&#36; b'


def test_labels_say_what_changed_in_few_words() -> None:
    assert label(autocast="fp16") == "fp16"
    assert label(scaling=False) == "scaling off"
    assert label(scaling=True) == "scaling on"
    assert label(init_scale=2.0**16) == "scale 2^16"
    assert label(init_scale=3000.0) == "scale 3000"
    assert label(init_scale=512.0) == "scale 512"
    assert label(growth_factor=2.0) == "growth ×2"
    assert label(backoff_factor=0.5) == "backoff ×0.5"
    assert label(growth_interval=100) == "growth every 100"
    assert label(min_scale=None, max_scale=2.0**20) == "no floor, cap 2^20"
    assert label(min_scale=1.0) == "floor 1"
    assert label(max_scale=None) == "no cap"
    assert label(checkpointed=[]) == "0 layers"
    assert label(checkpointed=("a",)) == "1 layer"
    assert label(checkpointed=["a", "b"]) == "2 layers"
    assert label(autocast="fp16", init_scale=1024) == "fp16, scale 2^10"
    assert label(something="new") == "something new"
    assert label(something=True) == "something True"


def test_without_details_the_reason_is_the_label() -> None:
    assert label("because <it> was asked for") == "because &lt;it> was asked for"


def test_labels_are_short_and_cut_before_they_are_escaped() -> None:
    assert label("<" * 99) == "&lt;" * (LABEL_CHARACTERS - 1) + "…"
    assert shortened("a b", 3) == "a b"
    assert shortened("ab cd", 4) == "ab…"


def test_a_short_label_is_the_first_change_and_how_many_more() -> None:
    def short(reason: str = "", **detail: object) -> str:
        return short_event_label(Event(step=0, kind="applied", reason=reason, detail=detail, time_s=0.0))

    assert short(autocast="fp16", init_scale=2.0**40, checkpointed=["a"], source="dashboard") == "fp16 +2"
    assert short(checkpointed=["a"] * 4) == "4 layers"
    assert short(growth_interval=1000, autocast="fp16") == "growth eve… +1"
    assert short("<" * 50) == "&lt;" * (SHORT_LABEL_CHARACTERS - 1) + "…"


def test_the_text_of_a_mark_is_the_whole_reason() -> None:
    event = Event(step=0, kind="applied", reason="autocast & more " * 5, detail={"autocast": "fp16"}, time_s=0.0)
    assert event_text(event) == " ".join(["autocast &amp; more"] * 5)
