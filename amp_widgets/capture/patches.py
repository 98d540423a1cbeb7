"""Attributes that are replaced for a while and put back."""

from __future__ import annotations

import threading
from types import ModuleType, TracebackType
from typing import Any

_ABSENT: Any = object()
_LIVE: list[_Replacement] = []  # every replacement in force, of all `Patches`, oldest first
_LOCK = threading.RLock()


class Patches:
    """Replaces attributes of modules, classes and objects, and puts the original objects back.

    `restore` puts back the very object that was there: for a class the entry of its ``__dict__`` (a ``staticmethod`` stays one),
    and an attribute that the owner only inherited is deleted again.

    Other code may replace the same attribute in the meantime. Then there is no restoring that is right in every case. What is
    done harms least:

    - Another `Patches` did, and they are restored in any order: the attribute ends up as it was before the first.
    - Someone else did: their replacement stays, since it is not ours to undo, and most likely calls ours. `restore` names it in
      `left`. Because ours may so be called for ever, **a replacement must behave like the original once it is no longer
      wanted**; the code that makes one has to see to that.

    Use as a context manager, or call `restore`. It may be used again afterwards.

    Attributes
    ----------
    left
        What the last `restore` left to others, as ``"owner.name"``; empty as a rule.
    """

    def __init__(self) -> None:
        self.left: tuple[str, ...] = ()
        self._replacements: list[_Replacement] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Make `value` the attribute `name` of `owner`.

        Raises
        ------
        AttributeError
            When `owner` has no such attribute, or refuses another; nothing was changed. (``TypeError`` for a built-in class.)
        """
        getattr(owner, name)  # a name that is not there is a mistake, or another version of what is patched
        with _LOCK:
            replacement = _Replacement(owner, name, value)
            # noted before it is done: an interrupt in between leaves a note too many, which is harmless
            self._replacements.append(replacement)
            _LIVE.append(replacement)
            try:
                setattr(owner, name, value)
            except (AttributeError, TypeError):
                _LIVE.remove(replacement)
                self._replacements.remove(replacement)
                raise

    def restore(self) -> None:
        """Put everything back, the newest first.

        A ``KeyboardInterrupt`` that arrives in the middle is raised when all is back.
        """
        interrupt: KeyboardInterrupt | None = None
        left: list[str] = []
        while True:
            try:
                if not self._replacements:
                    break
                with _LOCK:
                    replacement = self._replacements[-1]
                    done = replacement.undo()  # harmless when done twice
                    if not done and replacement.label not in left:
                        left.append(replacement.label)
                    if replacement in _LIVE:
                        _LIVE.remove(replacement)
                    self._replacements.pop()
            except KeyboardInterrupt as error:
                interrupt = error
        self.left = tuple(left)
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.restore()


class _Replacement:
    """One attribute, what it was and what it became."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner = owner
        self.name = name
        self.value = value
        self.original = _own(owner, name)
        self._undone = False

    @property
    def label(self) -> str:
        """``"owner.name"``, for people."""
        named = self.owner if isinstance(self.owner, (type, ModuleType)) else type(self.owner)
        return f"{named.__name__}.{self.name}"

    def undo(self) -> bool:
        """Put the original back; whether it could be done."""
        if self._undone:
            return True
        if _own(self.owner, self.name) is self.value:
            if self.original is _ABSENT:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
            self._undone = True
            return True
        for other in _LIVE:
            if other.owner is self.owner and other.name == self.name and other.original is self.value:
                other.original = self.original  # it came after this one: it will put back what this one found
                self._undone = True
                return True
        return False


def _own(owner: Any, name: str) -> Any:
    """What `owner` itself holds under `name`, unbound; `_ABSENT` when it only inherits it."""
    try:
        return vars(owner).get(name, _ABSENT)
    except TypeError:  # an object with slots has no __dict__
        return getattr(owner, name, _ABSENT)
