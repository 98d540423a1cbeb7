"""Every exception class of the package, in `errors` and elsewhere: it goes from process to process as it is."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import amp_widgets
from amp_widgets.errors import AmpWidgetsError, MissingExtraError, RecordingError
from amp_widgets.replay_magics import in_one_line

ARGUMENTS: dict[str, tuple[Any, ...]] = {"a message": ("got 3, expected 4",), "more": ("got 3", 4, ("x",)), "none": ()}


def everything() -> list[type[AmpWidgetsError]]:
    for module in pkgutil.walk_packages(amp_widgets.__path__, "amp_widgets."):
        importlib.import_module(module.name)
    return sorted(_below(AmpWidgetsError), key=lambda kind: kind.__name__)


def _below(kind: type[AmpWidgetsError]) -> Iterator[type[AmpWidgetsError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__.startswith("amp_widgets."):
            yield from _below(each)


CLASSES = everything()


def again(error: AmpWidgetsError) -> Any:
    return pickle.loads(pickle.dumps(error))


def test_they_are_found() -> None:
    names = {kind.__name__ for kind in CLASSES}
    assert {"MagicError", "HistoryError", "MemoryBudgetError", "UnfakeableError", "ExportError"} <= names


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("copied", [again, copy.copy, copy.deepcopy])
def test_an_error_can_be_pickled_and_copied(
    kind: type[AmpWidgetsError], arguments: tuple[Any, ...], copied: Callable[[Any], Any]
) -> None:
    error = kind(*arguments)
    error.add_note("in epoch 3")
    made = copied(error)
    assert type(made) is kind
    assert made.args == error.args
    assert str(made) == str(error)
    assert made.__notes__ == ["in epoch 3"]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_as_the_magic_shows_it_can_be_pickled(kind: type[AmpWidgetsError]) -> None:
    shown = in_one_line(kind("got 3, expected 4"))
    made = again(shown)
    assert type(made) is kind
    assert str(made) == "got 3, expected 4"
    assert made._render_traceback_() == [f"{kind.__name__}: got 3, expected 4"]


def test_what_the_classes_of_python_keep_is_kept() -> None:
    error = RecordingError(28, "No space left on device", "run.db")
    assert (again(error).errno, again(error).filename, str(again(error))) == (28, "run.db", str(error))
    missing = MissingExtraError("install plotly", name="plotly", path="there")
    assert (again(missing).name, again(missing).path, str(again(missing))) == ("plotly", "there", "install plotly")


def test_an_error_of_a_line_can_be_pickled() -> None:
    shell = InteractiveShell.instance()
    try:
        shell.run_line_magic("load_ext", "amp_widgets")
        with pytest.raises(AmpWidgetsError) as caught:
            shell.run_line_magic("amp", "demo digits text")
        assert str(again(caught.value)) == str(caught.value)
    finally:
        shell.run_line_magic("unload_ext", "amp_widgets")
        InteractiveShell.clear_instance()
