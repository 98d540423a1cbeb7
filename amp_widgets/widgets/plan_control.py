"""A memory budget, the plan for it, and how to use that."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import traitlets

from amp_widgets.analysis.plan import Alternative, Plan
from amp_widgets.core.memory.budget import typed_size, without_unit
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.settings import AUTOCAST_NAMES, Settings
from amp_widgets.errors import SettingsError
from amp_widgets.language import in_language, marked, say, say_number
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.plan_state import MeasuredPoint, PlanState, came_true_text, measured_points
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import not_done_text

EXPLAINED = marked(
    "A budget says how much memory a step may hold at a time. Proposed are the layers to checkpoint that keep a step within"
    " it and take the least extra time, in the format in force. A step on the newest batch is followed on tensors that have"
    " shapes and no numbers, so that nothing is allocated for it; that tells what each layer holds and when, and so what "
    "checkpointing it would change at each moment. How long a layer takes is timed in a few real forward passes. Of all "
    "sets the cheapest that fits is looked for, and the step with that one is predicted, too. The run waits a few seconds "
    "meanwhile, and all is as before afterwards. The curve shows what each budget would cost; a cross is what steps of the "
    "run came to."
)
EXAMPLE = marked(
    "In the text demo: press Start, then Propose a plan for the budget that is filled in. Without checkpointing a step "
    "holds 124.8 MB. Use the plan: the memory chart steps down, and after the next step predicted and measured stand beside"
    " each other. Then drag the budget: below 43 MB no set of layers fits, and bf16 is offered."
)
SUGGESTED = 0.6
"""Of the highest peak so far: the budget that is filled in where nobody has said one."""
LEAST_DRAGGED = 0.1
"""Of the highest peak so far: the least budget that can be dragged to before a plan tells what is possible."""


class PlanControl(Control):
    """Asks with ``command("plan", budget_bytes=…)``, and with ``request(checkpointed=…)`` for the layers of a plan.

    A plan that is being made is ended with ``command("cancel_inspection", kind="plan")``.

    `show` shows how the plan stands, `render` what is in force; neither sends anything when it is what is shown.

    Parameters
    ----------
    command
        Called for plans.
    request
        Called for settings, as by every control.
    on_budget
        Called when the budget is another one.
    state, dashboard
        What to show first.
    """

    _esm = page_script("plan_control", "plain_table")
    _css = page_style("plan_panel")

    explanation = traitlets.Unicode(EXPLAINED).tag(sync=True, said=True)
    example = traitlets.Unicode(EXAMPLE).tag(sync=True, said=True)
    budget_bytes = traitlets.Float(0.0, help="0: none was said.").tag(sync=True)
    budget_text = traitlets.Unicode().tag(sync=True)
    budget_error = traitlets.Unicode().tag(sync=True)
    range: traitlets.List[Any] = traitlets.List(
        help="What can be dragged, with texts: from the least possible peak to that of none, before a plan to the peak so far; "
        "empty: not known."
    ).tag(sync=True)
    why_no_batch = traitlets.Unicode().tag(sync=True)
    pending = traitlets.Bool(False).tag(sync=True)
    cancelling = traitlets.Bool(False).tag(sync=True)
    why_not = traitlets.Unicode().tag(sync=True)
    caption = traitlets.Unicode(help="When it was planned.").tag(sync=True)
    sentence = traitlets.Unicode(help="Of the plan.").tag(sync=True)
    fits = traitlets.Bool(True).tag(sync=True)
    layers: traitlets.List[Any] = traitlets.List().tag(sync=True)
    use = traitlets.Unicode(help="Whether its layers are requested or in force.").tag(sync=True)
    measured = traitlets.Unicode(help="What came true of it.").tag(sync=True)
    stale = traitlets.Unicode(help="What has changed since, so that it cannot be used.").tag(sync=True)
    alternatives: traitlets.List[Any] = traitlets.List(help="Of each what `_alternative` says.").tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List(help="Of the sets on the curve; the first are the headings.").tag(sync=True)
    obtained = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        command: Callable[..., None],
        request: Callable[..., None],
        on_budget: Callable[[], None] = lambda: None,
        state: PlanState | None = None,
        dashboard: DashboardState | None = None,
    ) -> None:
        self._command = command
        self._on_budget = on_budget
        self._state = PlanState() if state is None else state
        self._plan: Plan | None = None
        self._dashboard: DashboardState | None = None
        self._said = False  # whether somebody has said a budget
        super().__init__(request, dashboard)
        self.show(self._state)

    def show(self, state: PlanState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        self._state = state
        values: dict[str, Any] = {}
        plan, inspection = state.newest, state.plan
        if plan is not self._plan:
            self._plan = plan
            values = _plan_traits(plan)
            if plan is not None and not inspection.pending:
                self._said = True
                values |= _budget_traits(plan.budget_bytes)
        values |= {
            "pending": inspection.pending,
            "cancelling": inspection.cancelling,
            "why_not": "" if inspection.why_not is None else not_done_text("plan", inspection.why_not),
            "why_no_batch": "" if state.why_no_batch is None else say("To plan, {why}.", why=in_language(state.why_no_batch)),
            "caption": "" if plan is None else say("Planned before step {step}", step=f"{inspection.step:,}"),
            **self._suggestion(),
            **self._first_range(),
            **self._uses(),
        }
        self._put(values)

    @property
    def points(self) -> tuple[MeasuredPoint, ...]:
        """What was measured of the sets on the curve of the plan."""
        plan, dashboard = self._plan, self._dashboard
        if plan is None:
            return ()
        kept = plan.fp32_layers
        if plan.autocast == "fp32" and dashboard is not None:  # it makes no difference then
            kept = dashboard.settings.fp32_layers
        return measured_points(plan, self._state.measured, kept)

    def close(self) -> None:
        """Close it, and forget whom it asks and what it showed."""
        self._command = self._on_budget = _nobody
        self._plan = self._dashboard = None
        self._state = PlanState()
        super().close()

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        self._dashboard = state
        return {**self._suggestion(), **self._first_range(), **self._uses()}

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"propose": True, "text": str(text)}:
                if self._set_budget(text):
                    self._propose()
            case {"text": str(text)}:
                if self._set_budget(text) and self._plan is not None:
                    self._propose()
            case {"budget": int() | float() as budget} if self.range and math.isfinite(budget) and budget > 0:
                self._set_budget(memory_text(float(budget)))
                self._propose()
            case {"cancel": True}:
                if self.pending:
                    self._command("cancel_inspection", kind="plan")
            case {"use": True}:
                if self._plan is not None and self.use == "" and not self.stale:
                    self._request(checkpointed=self._plan.layers)
            case {"alternative": int(position)}:
                offered = () if self._plan is None else self._plan.alternatives
                if 0 <= position < len(offered) and self.alternatives[position]["use"] == "":
                    self._request(**offered[position].changes)

    def _propose(self) -> None:
        if not self.why_no_batch and self.budget_bytes:
            self._command("plan", budget_bytes=self.budget_bytes)

    def _set_budget(self, text: str) -> bool:
        """Whether it is one."""
        self._said = True
        if text.strip() == self.budget_text and self.budget_bytes and not self.budget_error:
            return True
        try:
            found = _size(text)
        except SettingsError as error:
            self._put({"budget_text": text, "budget_error": say("Budget: {error}", error=in_language(str(error)))})
            return False
        self._put(_budget_traits(found))
        self._on_budget()
        return True

    def _suggestion(self) -> dict[str, Any]:
        """A budget for a start, as long as nobody has said one."""
        if self._said:
            return {}
        peak = self._peak_so_far
        found = self._state.budget_bytes if self._state.budget_bytes is not None else _two_digits(SUGGESTED * peak)
        return _budget_traits(found) if found > 0 else {}

    def _first_range(self) -> dict[str, Any]:
        """What can be dragged before there is a plan, which knows better."""
        if self._plan is not None:
            return {}
        peak = math.nan if self._state.why_no_batch is not None else self._peak_so_far
        low = _two_digits(LEAST_DRAGGED * peak)
        return {"range": [low, peak, memory_text(low), memory_text(peak)] if peak > low > 0 else []}

    @property
    def _peak_so_far(self) -> float:
        return math.nan if self._dashboard is None else self._dashboard.overall_peak_bytes

    def _uses(self) -> dict[str, Any]:
        plan, dashboard = self._plan, self._dashboard
        if plan is None or dashboard is None:
            return {"use": "", "measured": "", "stale": "", "alternatives": []}
        settings, waiting = dashboard.settings, dashboard.waiting
        names = {name: value for name, value in waiting.items() if name in ("autocast", "checkpointed", "fp32_layers")}
        wanted = settings.replace(**names) if names else settings
        stale, points = _stale_text(plan, settings, wanted), self.points
        made_for: dict[str, Any] = {"autocast": plan.autocast}
        if plan.autocast != "fp32":
            made_for["fp32_layers"] = plan.fp32_layers
        use = _use({"checkpointed": plan.layers, **made_for}, settings, wanted)
        measured = came_true_text(
            points,
            plan.layers,
            predicted_bytes=plan.predicted_peak_bytes,
            extra_s=plan.predicted_extra_seconds,
            budget_bytes=plan.budget_bytes,
        )
        if not measured and use == "in force" and not stale:
            measured = say("What is measured stands here after the next step")
        return {
            "use": use,
            "measured": measured,
            "stale": stale,
            "alternatives": [self._alternative(each, settings, wanted, plan) for each in plan.alternatives],
        }

    def _alternative(self, one: Alternative, settings: Settings, wanted: Settings, plan: Plan) -> dict[str, Any]:
        """Texts, and whether it is requested or in force; that is None for what is no setting."""
        count = len(one.changes.get("checkpointed", ()))
        what = in_language(one.label)
        if count:
            what = say_number(
                "{what} with {count} layer checkpointed", "{what} with {count} layers checkpointed", count, what=what
            )
        size = memory_text(one.peak_bytes)
        if one.batch_size is not None:
            said = say("{what}: predicted {size}", what=what, size=size)
            fits = say("which fits") if one.fits else say("which is still above the budget")
            text = say("{said}, {fits}. Change it in your data loader", said=said, fits=fits)
            return {"text": text, "label": in_language(one.label), "use": None}
        autocast = str(one.changes.get("autocast", plan.autocast))
        measured = [
            each
            for each in self._state.measured
            if each.autocast == autocast and set(each.layers) == set(one.changes.get("checkpointed", plan.layers))
        ]
        if measured and measured[-1].peak_bytes > 0:
            came = memory_text(measured[-1].peak_bytes)
            said = say("{what}: predicted {size}, measured {came}", what=what, size=size, came=came)
        else:
            said = say("{what}: predicted {size}", what=what, size=size)
        fits = say("which fits") if one.fits else say("which is still above the budget")
        return {"text": f"{said}, {fits}", "label": in_language(one.label), "use": _use(one.changes, settings, wanted)}

    def __repr__(self) -> str:
        return f"<amp_widgets plan control: {self.sentence or 'nothing planned yet'}>"


def _plan_traits(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {"sentence": "", "layers": [], "fits": True, "rows": [], "obtained": "", "range": []}
    sentence = in_language(str(plan))
    return {
        # a format that it begins with, as in Korean, is written as everywhere
        "sentence": sentence if sentence.startswith(AUTOCAST_NAMES) else sentence[:1].upper() + sentence[1:],
        "layers": list(plan.layers),
        "fits": plan.fits,
        "rows": _in_language(plan.to_table()),
        "obtained": say(
            "Chosen by: {how}. {explanation}", how=in_language(plan.chosen_by), explanation=in_language(plan.explanation)
        ),
        "range": _range(plan),
    }


# Words of one of these tables that are in no sentence.
_HEADINGS = (
    marked("set"), marked("count"), marked("peak"), marked("obtained"), marked("fits"), marked("extra time"), marked("predicted"),
    marked("estimate"), marked("yes"), marked("no"), marked("Note: {note}"),
)  # fmt: skip


def _in_language(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """A table's texts; names of layers and numbers are none of the catalogue and stay."""
    return [[in_language(cell) for cell in row] for row in rows]


def _size(text: str) -> float:
    """As `typed_size`, but no size of 0, and none that is off.

    Raises
    ------
    SettingsError
        When it is none.
    """
    if (bare := without_unit(text)) is not None:
        raise SettingsError(bare)
    found = None
    with contextlib.suppress(SettingsError):
        found = typed_size(text)
    if found is not None and math.isfinite(found) and found > 0:
        return found
    raise SettingsError(f"got {text!r}, expected a size above 0, such as 8 GB or 60 MB")


def _range(plan: Plan) -> list[Any]:
    """From the least peak that was found to that of none."""
    none = next((point.peak_bytes for point in plan.points if not point.layers), math.nan)
    least = plan.least_peak_bytes
    return [least, none, memory_text(least), memory_text(none)] if none > least > 0 else []


def _budget_traits(budget_bytes: float) -> dict[str, Any]:
    return {"budget_bytes": float(budget_bytes), "budget_text": memory_text(budget_bytes), "budget_error": ""}


def _stale_text(plan: Plan, settings: Settings, wanted: Settings) -> str:
    """Why a plan is none for what will be in force; nothing where it is one."""
    if wanted.autocast != plan.autocast:
        values = {"autocast": plan.autocast, "autocast2": wanted.autocast}
        if settings.autocast == wanted.autocast:
            return say("This was planned for {autocast}, and {autocast2} is in force now: propose a plan again", **values)
        return say("This was planned for {autocast}, and {autocast2} was asked for: propose a plan again then", **values)
    if plan.autocast != "fp32" and not _same(tuple(wanted.fp32_layers), plan.fp32_layers):
        return say("This was planned with other layers kept in FP32: propose a plan again")
    return ""


def _use(changes: Mapping[str, Any], settings: Settings, wanted: Settings) -> str:
    def is_of(one: Settings) -> bool:
        return all(_same(getattr(one, name), value) for name, value in changes.items())

    if is_of(wanted):
        return "in force" if is_of(settings) else "requested"
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, Sequence):
        return set(one) == set(other)
    return bool(one == other)


def _two_digits(number: float) -> float:
    return float(f"{number:.1e}") if math.isfinite(number) else math.nan


def _nobody(*_args: object, **_values: object) -> None:
    """Nobody is asked after `close`."""
