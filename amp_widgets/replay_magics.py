"""``%amp replay``, by itself where torch is not installed."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from IPython.core.magic import Magics, line_cell_magic, magics_class

from amp_widgets.cell_views import CellViews
from amp_widgets.compare_magic import HELP as COMPARE_HELP
from amp_widgets.compare_magic import Compare
from amp_widgets.errors import AmpWidgetsError, MagicError
from amp_widgets.language import LANGUAGES, in_language, language, marked, marked_all, say, set_language
from amp_widgets.recorded_run import RecordedRun, open_run

HELP = marked_all(
    "%amp replay run.db                 a run that was recorded, step by step; one that is being recorded is followed",
    "%amp lang ko                       the language of what is shown: en, ko; without a code: which one it is",
    """\
%amp present large high-contrast   dashboards for a projector: normal, large, very-large; notebook, light, dark, high-contrast;
                                   without either: the choices""",
)
WITHOUT_TORCH = marked(
    "torch is not installed: a run that was recorded can be looked at, and nothing else. The whole of %amp needs torch"
)


Command: TypeAlias = Callable[[list[str]], object]
"""What a line of ``%amp`` does with the words after its name."""
ASKS_FOR_HELP = ("--help", "-h")


class Replay:
    """Opens run files for a shell, one a cell.

    Parameters
    ----------
    shell
        IPython's; in its namespace the run is put under the name ``run``, where that is free.
    """

    def __init__(self, shell: Any) -> None:
        self._views = CellViews(shell, ("run", "recorded_run"), RecordedRun)

    def show(self, words: list[str]) -> None:
        """Display the run in this file.

        Raises
        ------
        MagicError
            When it is not one name.
        RecordingError
            When the file cannot be read.
        """
        if len(words) != 1:
            raise MagicError(f"%amp replay: got {len(words)} names, expected that of a file such as run.db")
        run = open_run(words[0])
        try:
            dashboard = run.dashboard()
        except BaseException:
            run.close()
            raise
        told = say("{name} is the run behind this dashboard: {name}.history.columns('step', 'loss') has its numbers")
        self._views.show(run, dashboard, told)

    def close(self) -> None:
        """Close the runs that were opened, and their dashboards."""
        self._views.close()


@magics_class
class ReplayMagics(Magics):
    """``%amp`` without torch: recorded runs."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._replay = Replay(shell)
        self._compare = Compare(shell)
        self._commands: dict[str, Command] = {
            "replay": self._replay.show, "compare": self._compare.show, "lang": speak, "present": present,
        }  # fmt: skip

    @line_cell_magic
    def amp(self, line: str, cell: str | None = None) -> None:
        """Recorded runs; without torch there is nothing else."""
        try:
            words = words_of(line)
            lines = (*HELP, COMPARE_HELP)
            if cell is None and words and words[0] in self._commands:
                carry_out(self._commands, words, lines)
            elif cell is None and (not words or words[0] in ("help", "status", *ASKS_FOR_HELP)):
                print(*map(say, lines), f"\n{say(WITHOUT_TORCH)}.", sep="\n")
            else:
                raise MagicError(f"%amp {line.strip()}: {WITHOUT_TORCH}")
        except AmpWidgetsError as error:
            raise in_one_line(error) from None

    def close(self) -> None:
        """Close the runs that were opened."""
        self._replay.close()
        self._compare.close()


def carry_out(commands: Mapping[str, Command], words: list[str], lines: Sequence[str]) -> None:
    """Do what a line asks for, or show the help of its command.

    Parameters
    ----------
    commands
        By name.
    words
        Of the line; the first is one of these names.
    lines
        Of the whole help.
    """
    command, *rest = words
    if {*rest}.isdisjoint(ASKS_FOR_HELP):
        commands[command](rest)
    else:
        print(*help_of(command, lines), sep="\n")


def help_of(command: str, lines: Sequence[str]) -> list[str]:
    """Those of the `lines` of the help that are about one `command`, in the language in force; without a name about ``%%amp``."""
    start = ["%amp", command] if command else ["%%amp"]
    return [say(text) for text in lines if text.split()[: len(start)] == start]


def register(shell: Any) -> None:
    """Bring the magic to `shell`."""
    shell.register_magics(ReplayMagics)
    tell_errors(shell)


def tell_errors(shell: Any) -> None:
    """Have errors of this package said in the language in force as well, below the traceback of a cell."""
    shell.events.register("post_run_cell", _tell_error)


def _tell_error(result: Any) -> None:
    error = result.error_in_exec
    if isinstance(error, AmpWidgetsError) and not hasattr(error, "_render_traceback_"):  # which is in the language
        told = in_language(str(error))
        if told != str(error):
            print(told, file=sys.stderr)


def unregister(shell: Any) -> None:
    """Take ``%amp`` away from `shell`, the whole of it or this one, and close what it has opened."""
    for name in ("AmpMagics", ReplayMagics.__name__):
        magics = shell.magics_manager.registry.pop(name, None)
        if magics is not None:
            magics.close()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("amp", None)
    with contextlib.suppress(ValueError):
        shell.events.unregister("post_run_cell", _tell_error)


def speak(words: list[str]) -> None:
    """``%amp lang``: say which language is in force, or change it.

    Raises
    ------
    MagicError
        When more than one is named.
    LanguageError
        When there is no such language.
    """
    if len(words) > 1:
        raise MagicError(f"%amp lang: got {len(words)} words, expected one of {', '.join(LANGUAGES)}")
    if words:
        set_language(words[0])
        print(
            say(
                "language: {name}. Open dashboards follow at once, all else when it is shown next",
                name=LANGUAGES[language()],
            )
        )
    else:
        known = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        print(say("language: {name}; there are {known}", name=LANGUAGES[language()], known=known))


def present(words: list[str]) -> None:
    """``%amp present``: the size of type and the theme of what is shown.

    Parameters
    ----------
    words
        Of the size and of the theme, if they are to change.
    """
    from amp_widgets.widgets.presenting_control import present_in_cell

    present_in_cell(words)


def words_of(line: str) -> list[str]:
    """The words of a line, as a shell has them; but a backslash is one, as in the path of a file on Windows.

    Outside quotes one before a space or a quote keeps that from parting words, as completion on other systems writes it.

    Raises
    ------
    MagicError
        When a quotation does not end.
    """
    words: list[str] = []
    line = line.rstrip()
    joined, at = False, 0  # to the word before
    while at < len(line):
        piece = _PIECE.match(line, at)
        if piece is None:
            raise MagicError(f"%amp: got {line!r}, expected words and NAME=VALUE, and the end of each quotation")
        if piece["space"] is None:
            text = next(text for text in piece.groups() if text is not None)
            if joined:
                words[-1] += text
            else:
                words.append(text)
        joined, at = piece["space"] is None, piece.end()
    return words


_PIECE = re.compile(r"""(?P<space>\s+)|"([^"]*)"|'([^']*)'|\\([\s"'])|([^\s"'\\]+|\\)""")
"""Of a line: space, a text in quotes, what a backslash keeps from being either, or any other."""


def in_one_line(error: AmpWidgetsError) -> AmpWidgetsError:
    """The same error, shown as one sentence in the language in force: a mistyped line needs no traceback through this package."""
    shown = type(error)(str(error))
    lines = [f"{type(error).__name__}: {in_language(str(error))}"]
    # IPython asks for it; it can be pickled, as whoever hands errors from process to process does
    shown._render_traceback_ = functools.partial(list, lines)  # type: ignore[attr-defined]
    return shown
