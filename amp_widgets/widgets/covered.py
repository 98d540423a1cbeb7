"""What a cell prints and displays, covered until there is a guess at what it tells."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from IPython.core.displayhook import CapturingDisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython
from IPython.utils.capture import CapturedIO

from amp_widgets.language import say
from amp_widgets.widgets.question_text import WAITING, Value


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

    What is printed comes first. Warnings and errors are not covered. What is displayed under a display id keeps it, and updates
    of it are kept back, too, as long as it is covered: a dashboard's picture and a handle's ``update`` do not tell the answer
    early, and what is uncovered is the newest.

    Parameters
    ----------
    questions
        What the output tells the answers of.
    """
    covered = _Cover(questions)
    _gate.enter(covered)
    try:
        with _captured() as captured:
            yield
    except BaseException:
        _gate.leave(covered)
        captured.show()
        raise
    covered.put(captured)


@contextlib.contextmanager
def _captured() -> Iterator[CapturedIO]:
    """As IPython's ``capture_output(stderr=False)``, but for one thing: the shell keeps its publisher.

    While the cell runs, messages of the page are handled, within it and on other threads, and for each of them ipykernel tells
    the publisher where its outputs belong (``set_parent``). One that only captures cannot be told, and the message would fail.
    """
    printed = io.StringIO()
    outputs: list[dict[str, Any]] = []
    shell: Any = get_ipython()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        if shell is not None:
            publish = shell.display_pub.publish

            def keep(data: Any, metadata: Any = None, *_: Any, transient: Any = None, update: bool = False, **more: Any) -> None:
                with _gate.lock:
                    elsewhere = (transient or {}).get("display_id") not in _displayed(outputs)
                    if update and elsewhere and _gate.own:  # uncovered by a guess that came meanwhile: it is no part of this
                        publish(data, metadata, transient=transient, update=True, **more)
                    else:
                        outputs.append({"data": data, "metadata": metadata, "transient": transient, "update": update})

            def clear(wait: bool = False) -> None:
                outputs.clear()
                printed.seek(0)
                printed.truncate()

            stack.enter_context(_instead(shell.display_pub, publish=keep, clear_output=clear))
            stack.enter_context(_instead(sys, displayhook=CapturingDisplayHook(shell=shell, outputs=outputs)))
        yield CapturedIO(printed, None, outputs)


@contextlib.contextmanager
def _instead(owner: Any, **functions: Callable[..., None]) -> Iterator[None]:
    """Have `owner` use these in place of its own."""
    before = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name in functions:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)  # the class has it


def _displayed(outputs: Sequence[dict[str, Any]]) -> set[object]:
    """The display ids of what is displayed among these, not updated."""
    return {(output.get("transient") or {}).get("display_id") for output in outputs if not output.get("update")}


class _Part(NamedTuple):
    """An output that waits."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    here: bool
    """It was displayed where it is covered; else it is an update of an output elsewhere."""


class _Cover:
    """Outputs in a cell that wait for guesses.

    Attributes
    ----------
    parts
        Display id → what is to be shown there.
    """

    def __init__(self, questions: Sequence[Guessed]) -> None:
        self._questions = questions
        self.parts: dict[str, _Part] = {}
        self._put = False

    def put(self, captured: CapturedIO) -> None:
        """Keep all this, with a word in its place; or show it, where there are guesses already."""
        with _gate.lock:
            if self._all_guessed():
                _gate.leave(self)
                captured.show()
                return
            places = self._kept(captured)
            _gate.forget_before(self, places)
            for place in places:  # those of one id show the same
                text = say(WAITING) if place == places[0] else ""
                _gate.publish(place, {"text/plain": text}, {}, update=False)
            self._put = True
        for question in self._questions:
            question.on_guess(self._look)
        self._look()  # a guess may have come meanwhile

    def _kept(self, captured: CapturedIO) -> list[str]:
        """Keep the outputs, each as it is at last; and give the ids of those that are displayed here, in their order."""
        places: list[str] = []
        if captured.stdout:
            places.append(_new_id())
            self.parts[places[0]] = _Part({"text/plain": captured.stdout.removesuffix("\n")}, {}, True)
        for output in captured.outputs:
            place = output.transient.get("display_id") or ("" if output.update else _new_id())
            if not output.update:
                places.append(place)
            if place:
                self.parts[place] = _Part(output.data, output.metadata or {}, place in places)
        return places

    def _all_guessed(self) -> bool:
        return all(question.guessed is not None for question in self._questions)

    def _look(self) -> None:
        with _gate.lock:
            if self._put and self._all_guessed():
                _gate.uncover(self)


class _Gate:
    """Keeps covers, and lets no update of what is covered through to the page: it stands before the shell's publisher then.

    A cover within another one shows its word there, which the outer one keeps; what it uncovers goes to the outer one then.
    One whose questions are closed, as nobody can answer them any more, is gone with them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the refresher of a dashboard and a page's guess come on threads of their own
        self._entered: list[weakref.ref[_Cover]] = []  # the newest first: so an inner one comes before its outer
        self._publisher: Any = None
        self._publish: Any = None
        self.own = False  # the cover's own messages pass

    @property
    def _covers(self) -> list[_Cover]:
        return [cover for entered in self._entered if (cover := entered()) is not None]

    def enter(self, cover: _Cover) -> None:
        """A cell is being covered from now on."""
        with self.lock:
            self._entered = [entered for entered in self._entered if entered() is not None]
            self._entered.insert(0, weakref.ref(cover))
            shell = get_ipython()
            publisher = None if shell is None else shell.display_pub
            if publisher is not self._publisher and not isinstance(publisher, CapturingDisplayPublisher):
                self._step_aside()
                if publisher is not None:
                    self._publisher, self._publish = publisher, publisher.publish
                    self._publisher.publish = self._filtered

    def leave(self, cover: _Cover) -> None:
        """It is covered no more."""
        with self.lock:
            self._entered = [entered for entered in self._entered if entered() not in (None, cover)]
            if not self._entered:
                self._step_aside()

    def forget_before(self, cover: _Cover, places: Sequence[str]) -> None:
        """What is displayed anew in a cover waits in no older one."""
        for other in self._older(cover):
            for place in places:
                other.parts.pop(place, None)

    def uncover(self, cover: _Cover) -> None:
        """Show all that it keeps, once; an outer cover that waits keeps it from then on."""
        if cover not in self._covers:
            return
        older = self._older(cover)
        for place, part in cover.parts.items():
            if not _taken(older, place, part.data, part.metadata, update=True):
                self.publish(place, part.data, part.metadata, update=True)
        cover.parts.clear()
        self.leave(cover)

    def publish(self, place: str, data: dict[str, Any], metadata: dict[str, Any], *, update: bool) -> None:
        """Show it, or change what is shown, whether something is covered there or not."""
        shell = get_ipython()
        if shell is None:
            if data.get("text/plain"):
                print(data["text/plain"])
            return
        self.own = True
        try:
            shell.display_pub.publish(data, metadata, transient={"display_id": place}, update=update)
        finally:
            self.own = False

    def _filtered(
        self, data: Any, metadata: Any = None, *args: Any, transient: Any = None, update: bool = False, **more: Any
    ) -> None:
        with self.lock:
            place = (transient or {}).get("display_id")
            if not self.own and place and _taken(self._covers, place, data, metadata or {}, update=update):
                return
            publish = self._publish
            if not self._covers:
                self._step_aside()
            publish(data, metadata, *args, transient=transient, update=update, **more)

    def _older(self, cover: _Cover) -> list[_Cover]:
        covers = self._covers
        return covers[covers.index(cover) + 1 :]

    def _step_aside(self) -> None:
        if self._publisher is not None and vars(self._publisher).get("publish") == self._filtered:
            del self._publisher.publish
        self._publisher = None


def _taken(covers: Sequence[_Cover], place: str, data: dict[str, Any], metadata: dict[str, Any], *, update: bool) -> bool:
    """Whether one of these keeps it; what is newer on the page is not changed back later."""
    for cover in covers:
        part = cover.parts.get(place)
        if part is None:
            continue
        if not part.here:
            del cover.parts[place]
            continue
        cover.parts[place] = _Part(data, metadata, True)
        if update:
            return True
    return False


def _new_id() -> str:
    return f"ampw-covered-{uuid.uuid4().hex}"


_gate = _Gate()
