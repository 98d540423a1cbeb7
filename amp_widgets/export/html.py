"""A run as one page."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.charts.exponents import exponent_figure, exponent_sentence
from amp_widgets.charts.labels import shortened
from amp_widgets.charts.look import Theme
from amp_widgets.charts.mountain import KIND_COLOURS, mountain_figure, mountain_sentence
from amp_widgets.charts.still import memory_svg, training_svg
from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.history import Event, History
from amp_widgets.core.memory.profile import StepProfile, memory_text
from amp_widgets.core.number_text import time_text
from amp_widgets.core.settings import FIELD_NAMES, Settings, describe_settings, format_scale
from amp_widgets.export.new_file import check_free
from amp_widgets.export.page import Page, Plotly
from amp_widgets.export.run_block import kept_rows, run_block
from amp_widgets.export.run_figures import RunFigures
from amp_widgets.language import Said, in_language, reason_in_language, say
from amp_widgets.recording.differences import fact_text
from amp_widgets.recording.run_like import RunLike, facts_of, name_of, newest_history

MOST_PROFILES, PROFILE_POINTS, LABEL_CHARACTERS = 6, 300, 40
CELL_CHARACTERS = 2_000
MOST_ROWS = 1_000
"""Of a table."""
ALONE = 300
"""With more events than this, skips and changes of the scale that follow one another share a row."""


def export_html(
    run: RunLike, path: str | os.PathLike[str], *, plotly: Plotly = "inline", overwrite: bool = False, title: str | None = None
) -> Path:
    """Write a run to one page that shows it anywhere: charts, events with reasons, settings, layers, notes and environment.

    Parameters
    ----------
    run
        What is to be shown: a session, or a recorded run.
    path
        Of the file, such as ``"run.html"``.
    plotly
        Where the page has plotly.js from: ``"inline"``, it is in it (4.8 MB); ``"link"``, from Plotly's server, so that it needs
        a network; ``"none"``, it has pictures in place of charts.
    overwrite
        Whether a file that is there is replaced.
    title
        Of the page; None for the name of the run.

    Returns
    -------
    Path
        Of the file, absolute.

    Raises
    ------
    ExportError
        When there is a file and it may not be replaced, or it cannot be written.
    MissingExtraError
        When plotly is not installed.

    Notes
    -----
    A long run takes no more room than a short one: each line has the lowest and the highest value of some 2,000 stretches of the
    run. Every skipped step, every change and every event is there. The page says so.
    """
    check_free(Path(path).absolute(), overwrite=overwrite, what="export_html")
    return run_page(run, plotly=plotly, title=title).write(path, overwrite=overwrite)


def run_page(run: RunLike, *, plotly: Plotly = "inline", title: str | None = None) -> Page:
    """The page of a run, to which more may be added."""
    return _RunPage(run, plotly, title).page


class _RunPage:
    def __init__(self, run: RunLike, plotly: Plotly, title: str | None) -> None:
        self._run = run
        self._history: History = newest_history(run)
        self._columns = self._history.columns()
        self._events = self._history.events()
        self._facts = facts_of(run)
        self._settings = run.settings
        self._layers: Sequence[Any] = getattr(run, "layers_seen" if hasattr(run, "layers_seen") else "layers", ())
        self._source = str(self._facts.get("memory_source", "how it was measured is not known"))
        name = name_of(run)
        self.page = Page(title or name, plotly=plotly)
        self._summary()
        self._training()
        self._memory()
        self._gradients()
        self._settings_table()
        self._event_table()
        self._layer_table()
        self._environment()
        block = run_block(name, self._history, self._columns, self._events, self._settings, self._facts, self._layers)
        self.page.data("run", block)

    # ---- what happened ----------------------------------------------------------------------------------------------

    def _summary(self) -> None:
        facts, columns = self._facts, self._columns
        who = [str(facts[name]) for name in ("model", "device") if facts.get(name)]
        began = f"began {fact_text(facts['began'])}" if facts.get("began") else ""
        self.page.paragraph(" · ".join([*who, *([began] if began else []), describe_settings(self._settings) + " at the end"]))
        losses = columns["loss"][~np.isnan(columns["loss"])]
        peak, times = _known(columns["peak_bytes"]), _known(columns["step_s"])
        skipped = len({event.step for event in self._events if event.kind == "skipped"})
        self.page.terms(
            {
                "steps": f"{self._history.total_rows:,}",
                "last loss": f"{losses[-1]:.4g}" if losses.size else _UNKNOWN,
                "skipped steps": f"{skipped:,}",
                "highest peak": memory_text(float(peak.max())) if peak.size else _UNKNOWN,
                "median step": time_text(float(np.median(times))) if times.size else _UNKNOWN,
                "changes": f"{sum(event.kind == 'applied' for event in self._events):,}",
            }
        )
        notes = [event for event in self._events if event.kind == "note"]
        if notes:
            self.page.heading("Notes")
            said = [Said(say("Step {step}: {reason}", step=f"{event.step:,}", reason=_reason(event))) for event in notes]
            self.page.bullets(said[:MOST_ROWS])

    def _training(self) -> None:
        columns, events = self._columns, self._events
        step = columns["step"]
        if not step.size:
            self.page.paragraph("No training step was recorded.")
            return
        self.page.heading("Training")
        figures = RunFigures(columns, events, memory_source=self._source)
        still = training_svg(columns, events, memory_source=self._source)
        label = f"Loss, loss scale and memory from step {step[0]:,} to {step[-1]:,}"
        self.page.figure(figures.training, label=label, still=still, along="step")
        self.page.figure(figures.step_times, label=_step_time_words(columns["step_s"]), along="step")
        for line in self._honest(figures.limit):
            self.page.paragraph(line, note=True)

    def _honest(self, limit: int | None) -> Iterator[str]:
        history, kept = self._history, len(self._columns["step"])
        yield f"Memory: {self._source}."
        if history.total_rows > kept:
            yield (
                f"{history.total_rows:,} steps were trained, and {kept:,} are kept, as the history had become full: of the older "
                "ones several became one, with the largest memory and the mean step time of all of them."
            )
        if limit is not None:
            yield (
                f"Lines are drawn by {limit:,} of {kept:,} points at most: the lowest and the highest of each of {limit // 2:,} "
                "stretches of equal length. Every skipped step, every change of the loss scale and every change of a setting is "
                "drawn."
            )

    def _memory(self) -> None:
        profiles: tuple[StepProfile, ...] = tuple(getattr(self._run, "profiles", ()))
        shown = [profile for profile in profiles if len(profile.time_s)][-MOST_PROFILES:]
        if not shown:
            return
        self.page.heading("Memory within a step")
        if len(shown) < len(profiles):
            self.page.paragraph(f"The newest {len(shown)} of {len(profiles)} profiled steps.", note=True)
        for profile in shown:
            label = shortened(in_language(profile.label), LABEL_CHARACTERS)
            sentence = mountain_sentence((profile,))
            words = Said(say("{label} (step {step}): {sentence}", label=label, step=f"{profile.step:,}", sentence=sentence))
            draw = functools.partial(_mountain, profile, words)
            self.page.figure(draw, label=words, still=memory_svg((profile,), {}, None, KIND_COLOURS["light"]))

    def _gradients(self) -> None:
        counted: Sequence[GradientCounts] = getattr(self._run, "gradients", ())
        if not len(counted):
            return
        found = GradientRange.of(counted[-1])
        self.page.heading("Gradients")
        self.page.figure(lambda theme: exponent_figure(found, theme=theme), label=exponent_sentence(found))
        for sentence in (*found.sentences(), *found.notes):
            self.page.paragraph(f"{sentence}.", note=True)
        if len(counted) > 1:
            self.page.paragraph(f"The newest of {len(counted):,} steps whose gradients were counted.", note=True)

    # ---- tables -----------------------------------------------------------------------------------------------------

    def _settings_table(self) -> None:
        self.page.heading("Settings at the end")
        first = self._settings_at_first()
        ends = [[_setting_text(name, getattr(settings, name)) for settings in (self._settings, first)] for name in FIELD_NAMES]
        if any(now != then for now, then in ends):
            rows = [(name, *texts) for name, texts in zip(FIELD_NAMES, ends, strict=True)]
            self.page.table(("setting", "at the end", "at the beginning"), rows)
        else:
            same = [(name, texts[0]) for name, texts in zip(FIELD_NAMES, ends, strict=True)]
            self.page.table(("setting", "from beginning to end"), same)

    def _settings_at_first(self) -> Settings:
        """As far as it can be told: from the end, or with all changes taken back to what was before."""
        settings_at = getattr(self._run, "settings_at", None)
        first = self._columns["step"][0] if self._columns["step"].size else 0
        if settings_at is not None:
            found: Settings = settings_at(int(first))
            return found
        changed = {name for event in self._events if event.kind == "applied" for name in event.detail if name in FIELD_NAMES}
        before = Settings()  # a session begins with these
        return self._settings.replace(**{name: getattr(before, name) for name in changed})

    def _event_table(self) -> None:
        self.page.heading("Events")
        if not self._events:
            self.page.paragraph("Nothing was changed, and no step was skipped.")
            return
        rows = list(_event_rows(self._events))
        self.page.table(("step", "after", "what", "reason"), rows[:MOST_ROWS], numbers=(0, 1))
        if len(rows) > MOST_ROWS:
            self.page.paragraph(f"{len(rows) - MOST_ROWS:,} more rows are in the data of this page.", note=True)
        if len(self._events) > ALONE:
            self.page.paragraph(
                "Skipped steps and changes of the loss scale that follow one another share a row; each of them is in the chart, "
                "and in the data of this page.",
                note=True,
            )

    def _layer_table(self) -> None:
        layers = self._layers
        if not layers:
            return
        self.page.heading("Layers")
        checkpointed, kept = set(self._settings.checkpointed), set(self._settings.fp32_layers)
        rows = []
        for layer in layers[:MOST_ROWS]:
            states = [text for text, there in (("checkpointed", checkpointed), ("kept in FP32", kept)) if layer.name in there]
            reason = shortened(layer.why_not or "", CELL_CHARACTERS)
            why_not = f"cannot be checkpointed: {reason}" if reason and not layer.structural else ""
            rows.append((layer.name, layer.type, f"{layer.parameters:,}", ", ".join(states) or why_not))
        self.page.table(("layer", "type", "parameters", "at the end"), rows, numbers=(2,), folded=f"{len(layers):,} layers")
        if len(layers) > MOST_ROWS:
            self.page.paragraph(f"The first {MOST_ROWS:,} of them.", note=True)

    def _environment(self) -> None:
        self.page.heading("Environment")
        rows = []
        for name, value in self._facts.items():
            if name == "packages" and isinstance(value, Mapping):
                rows += [(str(package), str(version)) for package, version in value.items()]
            elif name != "columns":
                text = fact_text(value) if value is None or isinstance(value, str) else json.dumps(value)
                rows.append((name.replace("_", " "), shortened(text, CELL_CHARACTERS)))
        self.page.table(("what", "which"), rows[:MOST_ROWS])
        made = fact_text(datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
        total = len(self._columns["step"])
        part = len(kept_rows(self._columns))
        what = "every step" if part == total else f"{part:,} of {total:,} steps"
        self.page.paragraph(
            f"Exported {made} by amp_widgets {_version()}. The element with the id \u201crun\u201d has the columns of {what} and "
            "every event as JSON, for programs.",
            note=True,
        )


_UNKNOWN = "–"


_GROUPED = ("skipped", "scale_changed")


def _mountain(profile: StepProfile, words: str, theme: Theme) -> Any:
    return mountain_figure((profile,), title=words, theme=theme, limit=PROFILE_POINTS)


def _step_time_words(step_s: npt.NDArray[Any]) -> str:
    known = _known(step_s)
    if not known.size:
        return "Step times were not measured"
    return f"Steps took from {time_text(float(known.min()))} to {time_text(float(known.max()))}"


def _known(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    known: npt.NDArray[Any] = values[np.isfinite(values)]
    return known


def _event_rows(events: Sequence[Event]) -> Iterator[tuple[str, str, str, str]]:
    """One a row; where there are many, skips and changes of the scale in a row are one."""
    waiting: list[Event] = []
    for event in events:
        if len(events) > ALONE and event.kind in _GROUPED:
            waiting.append(event)
            continue
        yield from _together(waiting)
        waiting = []
        yield _row(event)
    yield from _together(waiting)


def _together(events: Sequence[Event]) -> Iterator[tuple[str, str, str, str]]:
    if len(events) < 4:
        yield from map(_row, events)
        return
    skips = [event for event in events if event.kind == "skipped"]
    changes = [event for event in events if event.kind == "scale_changed"]
    said = [f"{len(skips):,} skipped"] * bool(skips)
    if changes:
        to = changes[-1].detail.get("to")
        end = f", to {format_scale(to)} at last" if isinstance(to, (int, float)) else ""
        said.append(f"{len(changes):,} changes of the loss scale{end}")
    first, last = events[0], events[-1]
    kind = "skipped" if not changes else "scale\u00a0changed" if not skips else "skipped, scale\u00a0changed"
    yield f"{first.step:,} – {last.step:,}", _after(first), kind, "; ".join(said)


def _row(event: Event) -> tuple[str, str, str, str]:
    kind = shortened(event.kind, LABEL_CHARACTERS).replace("_", "\u00a0")
    return f"{event.step:,}", _after(event), kind, _reason(event)


def _reason(event: Event) -> Said:
    return Said(shortened(reason_in_language(event), CELL_CHARACTERS))


def _after(event: Event) -> str:
    return f"{event.time_s:,.1f} s" if math.isfinite(event.time_s) else _UNKNOWN


def _setting_text(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return format_scale(value) if name.endswith("_scale") else str(value) if isinstance(value, str) else f"{value:g}"


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("amp-widgets")
    except importlib.metadata.PackageNotFoundError:
        return ""
