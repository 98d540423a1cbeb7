"""The ``%amp`` line magic."""

from __future__ import annotations

import re
import shlex
from typing import Any

from IPython.core.display_functions import display
from IPython.core.magic import Magics, line_magic, magics_class

from amp_widgets.core.settings import FIELD_NAMES, describe_changes, format_scale
from amp_widgets.demos import DEMOS, demo
from amp_widgets.errors import AmpWidgetsError, MagicError
from amp_widgets.session import AmpSession, newest_session

HELP = """\
%amp                               this help, and how the newest session stands
%amp demo digits                   a small model on real data, and its dashboard (also: text)
%amp MODEL [OPTIMIZER]             a session on your own model, and its dashboard
%amp set NAME=VALUE ...            ask for settings, in force from the next step: autocast=fp16 init_scale=2**16
                                   scaling=off growth_interval=100 max_scale=none
                                   checkpointed=layers.0,layers.2 (or layers.*, or none)
%amp close                         let go of the model"""


@magics_class
class AmpMagics(Magics):
    """``%amp``: help and status, a demo, a session on the user's own model, settings."""

    shell: Any  # IPython's, typed as None there as well

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._session: AmpSession | None = None

    @line_magic
    def amp(self, line: str) -> None:
        """Mixed precision and activation checkpointing as live switches; ``%amp`` alone shows the help."""
        try:
            self._run(_words(line))
        except AmpWidgetsError as error:
            # a mistyped line needs its one sentence, not a traceback through this package
            raise type(error)(str(error)).with_traceback(None) from None

    def close(self) -> None:
        """Close the session that the magic made."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _run(self, words: list[str]) -> None:
        if not words or words[0] in ("help", "status"):
            _show_status()
        elif words[0] == "set":
            _set(words[1:])
        elif words[0] == "demo":
            if len(words) > 2:
                raise MagicError(f"%amp demo: got {len(words) - 1} names, expected one of {', '.join(DEMOS)}")
            self._adopt(lambda: demo(words[1] if len(words) == 2 else "digits", display=False))
        elif words[0] == "close":
            self._close_newest()
        elif len(words) <= 2:
            model = self._value(words[0])
            optimizer = self._value(words[1]) if len(words) == 2 else None
            self._adopt(lambda: AmpSession(_checked_model(words[0], model), optimizer))
        else:
            raise MagicError(f"%amp: got {' '.join(words)!r}, expected one of these:\n{HELP}")

    def _adopt(self, make: Any) -> None:
        session = make()
        self.close()  # a cell that is run again must not leave the former run training
        self._session = session
        name = self._free_name()
        self.shell.push({name: session})
        print(f"{name} is the AmpSession behind this dashboard: {name}.request(autocast='fp16') asks for a change from Python")
        display(session.dashboard())

    def _free_name(self) -> str:
        for name in ("session", "amp_session"):
            if isinstance(self.shell.user_ns.get(name), (AmpSession, type(None))):
                return name
        return "amp_session_"

    def _close_newest(self) -> None:
        session = newest_session()
        if session is None:
            raise MagicError("%amp close: there is no open session")
        session.close()
        if session is self._session:
            self._session = None
        print("closed: the model is as it was")

    def _value(self, name: str) -> Any:
        first, *rest = name.split(".")
        if not all(part.isidentifier() for part in (first, *rest)) or first not in self.shell.user_ns:
            raise MagicError(
                f"%amp {name}: got {name!r}, expected 'demo', 'set', 'close', or the name of a model in this notebook; "
                "%amp alone shows the help"
            )
        value = self.shell.user_ns[first]
        for part in rest:
            if not hasattr(value, part):
                raise MagicError(f"%amp {name}: {first!r} has no attribute {part!r}")
            value = getattr(value, part)
        return value


def register(shell: Any) -> None:
    """Bring the magic to `shell`."""
    shell.register_magics(AmpMagics)


def unregister(shell: Any) -> None:
    """Take the magic away from `shell` and close the session it made."""
    magics = shell.magics_manager.registry.pop("AmpMagics", None)
    shell.magics_manager.magics["line"].pop("amp", None)
    if magics is not None:
        magics.close()


def parse_settings(words: list[str]) -> dict[str, Any]:
    """``["autocast=fp16", "init_scale=2**16"]`` → the changes to request.

    Raises
    ------
    MagicError
        When a word is not NAME=VALUE, or a value cannot be read.
    """
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise MagicError(f"%amp set: got {word!r}, expected NAME=VALUE, with NAME one of {', '.join(FIELD_NAMES)}")
        changes[name] = _parse(name, text)
    if not changes:
        raise MagicError(f"%amp set: got nothing to set, expected NAME=VALUE, with NAME one of {', '.join(FIELD_NAMES)}")
    return changes


def _parse(name: str, text: str) -> Any:
    if name == "autocast":
        return text
    if name == "checkpointed":
        if text[:1] + text[-1:] in ("[]", "()"):
            text = text[1:-1]
        return () if text.lower() in ("", "none") else tuple(part.strip(" '\"") for part in text.split(",") if part.strip())
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    power = _POWER.fullmatch(text)
    try:
        if power is not None:
            return float(power[1]) ** int(power[2])
        return float(text) if re.search(r"[.eE]|inf|nan", text) else int(text)
    except (ValueError, OverflowError):
        raise MagicError(
            f"%amp set {name}: got {text!r}, expected a number such as 0.5, 100 or 2**16, or on, off, none"
        ) from None


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise MagicError(f"%amp: got {line!r}, expected words and NAME=VALUE: {error}") from None


_WORDS: dict[str, bool | None] = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False, "none": None}
_POWER = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\*\*|\^)\s*(-?\d{1,4})")


def _set(words: list[str]) -> None:
    session = newest_session()
    if session is None:
        raise MagicError(
            "%amp set: there is no session yet; make one with %amp demo digits, %amp MODEL [OPTIMIZER], or "
            "AmpSession(model, optimizer)"
        )
    request = session.request(source="magic", **parse_settings(words))
    print(f"requested: {describe_changes(request.changes)}; in force from the next step")


def _show_status() -> None:
    session = newest_session()
    print(HELP)
    print()
    if session is None:
        print("There is no session yet.")
        return
    state = session.dashboard_state()
    settings = session.settings
    scaling = f"loss scaling from {format_scale(settings.init_scale)}" if settings.scales_loss else "no loss scaling"
    print(f"{session!r}; run: {state.run}")
    print(
        f"in force: autocast {settings.autocast}, {scaling}, "
        f"{len(settings.checkpointed)} of {len(state.layers)} layers checkpointed"
    )
    if state.pending:
        print(f"waiting:  {describe_changes(state.pending)}")
    if state.last_rejection:
        print(f"rejected: {state.last_rejection}")
    print(f"memory:   {state.memory_source}")


def _checked_model(name: str, model: Any) -> Any:
    if not (hasattr(model, "parameters") and hasattr(model, "named_modules")):
        raise MagicError(f"%amp {name}: got a {type(model).__name__}, expected a torch.nn.Module")
    return model
