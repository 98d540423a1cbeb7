"""Numbers and settings as a dashboard writes them. An unknown number is a dash, never a zero."""

from __future__ import annotations

import html
import math
import re

from amp_widgets.core.settings import format_scale
from amp_widgets.language import in_language, marked, say, say_number
from amp_widgets.widgets.state import DashboardState

UNKNOWN = "–"


def scale_text(scale: float) -> str:
    """A loss scale with its value: ``2^16 = 65536``; only the value where it is no power of two.

    >>> scale_text(2.0**16), scale_text(1000.0), scale_text(2.0**90)
    ('2^16 = 65536', '1000', '2^90')
    """
    power = format_scale(scale)
    if not power.startswith("2^"):
        return power
    value = str(int(scale)) if scale >= 1 else f"{scale:.12g}"
    return f"{power} = {value}" if len(value) <= 13 else power


def bytes_text(size_bytes: float) -> str:
    """Three digits and a decimal unit, as on the memory chart.

    >>> bytes_text(78_906_000), bytes_text(512), bytes_text(math.nan)
    ('78.9 MB', '512 B', '–')
    """
    if not math.isfinite(size_bytes):
        return UNKNOWN
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size_bytes /= 1000
        if size_bytes < 999.5 or unit == "TB":
            break
    return f"{_three_digits(size_bytes)} {unit}"


def seconds_text(duration_s: float) -> str:
    """A duration of a step.

    >>> seconds_text(0.01234), seconds_text(2.5), seconds_text(0.00002)
    ('12.3 ms', '2.50 s', '20.0 µs')
    """
    if not math.isfinite(duration_s):
        return UNKNOWN
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if duration_s * factor < 999.5:
            return f"{_three_digits(duration_s * factor)} {unit}"
    return f"{_three_digits(duration_s)} s"


def rate_text(per_s: float) -> str:
    """How many a second, without the unit.

    >>> rate_text(81.25), rate_text(12345.6)
    ('81.2', '12,346')
    """
    return UNKNOWN if not math.isfinite(per_s) else _three_digits(per_s)


def count_text(count: int) -> str:
    """How many, short.

    >>> count_text(950), count_text(1_234_567), count_text(0)
    ('950', '1.23 M', '0')
    """
    if count < 1000:
        return str(count)
    amount = float(count)
    for unit in ("k", "M", "G", "T"):
        amount /= 1000
        if amount < 999.5 or unit == "T":
            break
    return f"{_three_digits(amount)} {unit}"


def number_text(value: float) -> str:
    """The shortest form that reads back as the same number.

    >>> number_text(2.0), number_text(0.5), number_text(2000)
    ('2', '0.5', '2000')
    """
    return repr(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def loss_text(loss: float) -> str:
    """Four digits; ``nan`` and ``inf`` as they are, because they are results."""
    return f"{loss:.4g}"


def in_force_text(state: DashboardState) -> str:
    """What is in force, in one line: ``fp16 · loss scale 2^14 · 4 layers checkpointed``."""
    settings = state.settings
    if settings.scales_loss:
        scale = say("loss scaled") if state.scale is None else say("loss scale {scale}", scale=format_scale(state.scale))
    else:
        scale = say("loss not scaled")
    count = len(settings.checkpointed)
    layers = (
        say_number("{count} layer checkpointed", "{count} layers checkpointed", count) if count else say("no layer checkpointed")
    )
    kept = f" · {say('{count} kept in FP32', count=len(settings.fp32_layers))}" if settings.fp32_layers else ""
    return f"{settings.autocast} · {scale} · {layers}{kept}"


def not_done_text(what: str, why_not: str) -> str:
    """That something was not done, and why; without the name of a function, with which errors begin.

    Parameters
    ----------
    what
        A kind of inspection, or the name of what the session was asked to do.

    >>> not_done_text("check", "check: the model is compiled")
    'Check not run: the model is compiled'
    """
    name, colon, reason = why_not.partition(": ")
    known = name in _NOT_DONE or name in ("inspect", "precision_cost")
    return f"{say(_NOT_DONE[what])}: {in_language(reason if colon and known else why_not)}"


def html_in_language(markup: str) -> str:
    """HTML whose texts are put into the language in force: of a report, which is made where no language is known."""
    return re.sub(r">(\s*)([^<>]+?)(\s*)(?=<)", lambda found: f">{found[1]}{_text_in_language(found[2])}{found[3]}", markup)


def _text_in_language(text: str) -> str:
    return html.escape(in_language(html.unescape(text)))


_NOT_DONE = {
    "check": marked("Check not run"),
    "preflight": marked("Preflight not run"),
    "dtype_map": marked("Map not taken"),
    "precision": marked("Precision not measured"),
    "precision_fp64": marked("Precision not measured"),
    "compare": marked("Settings not compared"),
    "plan": marked("No plan made"),
    "largest_batch": marked("Largest batch not found"),
    "predict_on_cuda": marked("Not predicted for CUDA"),
    "count_gradients": marked("Gradients not sampled"),
    "profile_next_step": marked("Step not profiled"),
    "record": marked("Not recorded"),
}


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
