"""Small models on real data that every machine has: no network, no download; and prepared situations to play with them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any, NamedTuple

from amp_widgets.errors import DemoError, MissingExtraError

if TYPE_CHECKING:
    from amp_widgets.demos.scenario_panel import ScenarioPanel
    from amp_widgets.session import AmpSession


class Demo(NamedTuple):
    """What a demo shows, and ``module:function`` of what makes its session."""

    text: str
    maker: str


DEMOS = {
    "digits": Demo("a convolutional network on scikit-learn's handwritten digits", "digits:digits_session"),
    "text": Demo("a small GPT on the text of Python's own standard library", "text:text_session"),
    "underflow": Demo("digits, with gradients too small for FP16 where the loss is not scaled", "underflow:underflow_session"),
    "overflow": Demo("digits, with one layer whose gradient is too large for FP16 at first", "overflow:overflow_session"),
}


def demo(name: str = "digits", *, display: bool = True, scenarios: bool = False) -> AmpSession:
    """A session with a small model on real data, ready to start, and its dashboard; or a prepared situation.

    Parameters
    ----------
    name
        One of `DEMOS`: ``"digits"``, ``"text"``, ``"underflow"`` or ``"overflow"``. Or a prepared situation, with a question to
        guess at, one of `amp_widgets.demos.scenarios.SCENARIOS`, such as ``"memory-wall"``: see `scenario`.
    display
        Show the dashboard, when in a notebook. It is ``session.dashboard()`` otherwise.
    scenarios
        For a demo, too, show the situations to choose from above the dashboard, the first one that is played with it chosen.

    Returns
    -------
    AmpSession
        Prepared, not started: press Start, or call ``session.start()``. When another situation is chosen on the page, or one is
        run again, it is closed; the notebook's names that stood for it then stand for the session that takes its place. When
        the cell that has shown it is run again, it is closed as well.

    Raises
    ------
    DemoError
        When there is neither a demo nor a situation of that name.
    MissingExtraError
        When the demo's data needs a package that is not installed.
    """
    if name not in DEMOS or scenarios:
        return _session_of_scenario(name, display=display)
    make = pkgutil.resolve_name(f"{__name__}.{DEMOS[name].maker}")  # with the first use come torch and the demo's data
    session: AmpSession = make()
    if display:
        _show(session)
    return session


def scenario(name: str) -> ScenarioPanel:
    """A prepared situation, to be displayed by being the last expression of a cell: guess, run it, see how far off you were.

    Parameters
    ----------
    name
        One of `amp_widgets.demos.scenarios.SCENARIOS`; or of `DEMOS`, for the first situation that is played with it.

    Raises
    ------
    DemoError
        When there is neither a demo nor a situation of that name.
    MissingExtraError
        When ipywidgets, anywidget, plotly or the demo's data is not installed.
    """
    known = _known_scenario(name)
    try:
        module = importlib.import_module(f"{__name__}.scenario_panel")
    except ImportError as error:
        raise MissingExtraError(f"scenario: {error}; install the widgets with: pip install 'amp-widgets[notebook]'") from error
    panel: ScenarioPanel = module.ScenarioPanel(known)
    return panel


def is_scenario(name: str) -> bool:
    """Whether there is a prepared situation of that name."""
    return name not in DEMOS and name in _scenarios().SCENARIOS


def _session_of_scenario(name: str, *, display: bool) -> AmpSession:
    from amp_widgets import kernel

    known = _known_scenario(name)
    if display and kernel.in_kernel():
        panel = scenario(known)
        panel.on_session(_Renamed(panel.session))
        _show_in_cell(panel)
        return panel.session
    session: AmpSession = _scenarios().SCENARIOS[known].session()
    return session


class _Renamed:
    """Lets the notebook's names that stand for a session stand for the one that takes its place.

    Parameters
    ----------
    session
        The first one.
    """

    def __init__(self, session: AmpSession) -> None:
        self._session = session

    def __call__(self, session: AmpSession) -> None:
        """Put `session` in the place of the one before."""
        from IPython.core.getipython import get_ipython

        before, self._session = self._session, session
        shell: Any = get_ipython()
        names = {} if shell is None else shell.user_ns
        for name in [name for name, value in list(names.items()) if value is before and not name.startswith("_")]:
            names[name] = session


def _known_scenario(name: str) -> str:
    """The name of a situation: this one, or the first that is played with a demo of this name."""
    situations = _scenarios()
    if name in DEMOS:
        first: str = situations.scenario_of_demo(name).name
        return first
    if name not in situations.SCENARIOS:
        known, played = ", ".join(map(repr, DEMOS)), ", ".join(map(repr, situations.SCENARIOS))
        raise DemoError(f"demo: got {name!r}, expected one of {known}; or a situation to play: {played}")
    return name


def _scenarios() -> Any:
    return importlib.import_module(f"{__name__}.scenarios")  # with it comes torch


def _show(session: AmpSession) -> None:
    from amp_widgets import kernel

    if kernel.in_kernel():
        _show_in_cell(session.dashboard(), session)


def _show_in_cell(view: Any, *others: Any) -> None:
    """Display the `view`, and close what the cell has shown when it was run before, with the `others` that belonged to it."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    from amp_widgets.cell import cell_id

    shell: Any = get_ipython()
    place, count = cell_id(shell), shell.execution_count
    if place:
        before, shown = _shown.get(place, (count, []))
        if before != count:
            for one in shown:
                one.close()
            shown = []
        _shown[place] = (count, [*shown, *others, view])
    show: Any = display
    show(view)


_shown: dict[str, tuple[int, list[Any]]] = {}
"""By cell: the number under which it was run last, and what it has shown then."""
