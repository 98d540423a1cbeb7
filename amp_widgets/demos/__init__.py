"""Small models on real data that every machine has: no network, no download."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any, NamedTuple

from amp_widgets.errors import DemoError

if TYPE_CHECKING:
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


def demo(name: str = "digits", *, display: bool = True) -> AmpSession:
    """A session with a small model on real data, ready to start, and its dashboard.

    Parameters
    ----------
    name
        One of `DEMOS`: ``"digits"``, ``"text"``, ``"underflow"`` or ``"overflow"``.
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
        known = ", ".join(f"{key!r} ({one.text})" for key, one in DEMOS.items())
        raise DemoError(f"demo: got {name!r}, expected one of {known}")
    make = pkgutil.resolve_name(f"{__name__}.{DEMOS[name].maker}")  # with the first use come torch and the demo's data
    session: AmpSession = make()
    if display:
        _show(session)
    return session


def _show(session: AmpSession) -> None:
    from amp_widgets import kernel

    if not kernel.in_kernel():
        return
    from IPython.display import display

    shown: Any = display
    shown(session.dashboard())
