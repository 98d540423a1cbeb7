"""Small models on real data that every machine has: no network, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_widgets.errors import DemoError

if TYPE_CHECKING:
    from amp_widgets.session import AmpSession

DEMOS = {
    "digits": "a convolutional network on scikit-learn's handwritten digits",
    "text": "a small GPT on the text of Python's own standard library",
}


def demo(name: str = "digits", *, display: bool = True) -> AmpSession:
    """A session with a small model on real data, ready to start, and its dashboard.

    Parameters
    ----------
    name
        ``"digits"`` or ``"text"``.
    display
        Show the dashboard, when in a notebook. It is ``session.dashboard()`` otherwise.

    Returns
    -------
    AmpSession
        Prepared, not started: press Start, or call ``session.start()``.

    Raises
    ------
    DemoError
        When there is no demo of that name.
    MissingExtraError
        When the demo's data needs a package that is not installed.
    """
    if name not in DEMOS:
        known = ", ".join(f"{key!r} ({text})" for key, text in DEMOS.items())
        raise DemoError(f"demo: got {name!r}, expected one of {known}")
    session = _make(name)
    if display:
        _show(session)
    return session


def _make(name: str) -> AmpSession:
    if name == "digits":
        from amp_widgets.demos.digits import digits_session

        return digits_session()
    from amp_widgets.demos.text import text_session

    return text_session()


def _show(session: AmpSession) -> None:
    from amp_widgets import kernel

    if not kernel.in_kernel():
        return
    from IPython.display import display

    shown: Any = display
    shown(session.dashboard())
