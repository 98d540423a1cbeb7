"""What a cell prints and displays, covered until there is a guess at what it tells."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from IPython.display import display as _display
from IPython.utils.capture import capture_output

from amp_widgets.language import say
from amp_widgets.widgets.question_text import WAITING, Value

display: Any = _display
Part = tuple[dict[str, Any], dict[str, Any]]
"""MIME type → content, and its metadata."""


class Guessed(Protocol):
    """Of a question, what is asked here."""

    @property
    def guessed(self) -> Value | None:
        """The guess, if there is one."""

    def on_guess(self, call: Callable[[], None]) -> None:
        """Have `call` called after each guess."""


@contextlib.contextmanager
def cover(questions: Sequence[Guessed]) -> Iterator[None]:
    """Keep what is printed and displayed inside until all `questions` have a guess; then show it where it was covered.

    What is printed comes first. Warnings and errors are not covered.

    Parameters
    ----------
    questions
        What the output tells the answers of.
    """
    try:
        with capture_output(stderr=False) as captured:
            yield
    except BaseException:
        captured.show()
        raise
    printed: list[Part] = [({"text/plain": captured.stdout.removesuffix("\n")}, {})] if captured.stdout else []
    parts = [*printed, *((one.data, one.metadata or {}) for one in captured.outputs)]
    _Cover(questions, parts)


class _Cover:
    """Outputs in a cell that wait for guesses."""

    def __init__(self, questions: Sequence[Guessed], parts: Sequence[Part]) -> None:
        self._questions = questions
        self._waiting = {f"ampw-covered-{uuid.uuid4().hex}": part for part in parts}
        covered = not self._all_guessed()
        for number, (place, (data, metadata)) in enumerate(self._waiting.items()):
            if covered:
                display({"text/plain": "" if number else say(WAITING)}, raw=True, display_id=place)
            else:
                display(data, metadata=metadata, raw=True, display_id=place)
        if covered:
            for question in questions:
                question.on_guess(self._look)

    def _all_guessed(self) -> bool:
        return all(question.guessed is not None for question in self._questions)

    def _look(self) -> None:
        if not self._all_guessed():
            return
        waiting, self._waiting = self._waiting, {}
        for place, (data, metadata) in waiting.items():
            display(data, metadata=metadata, raw=True, display_id=place, update=True)
