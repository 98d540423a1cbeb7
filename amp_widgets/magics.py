"""The ``%amp`` and ``%%amp`` magics."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from typing import Any

from IPython.core.display_functions import display
from IPython.core.magic import Magics, line_cell_magic, magics_class

from amp_widgets.analysis.weights import WeightReader
from amp_widgets.captured_cell import NO_DASHBOARD, CapturedCell
from amp_widgets.cell import cell_id
from amp_widgets.compare_magic import HELP as COMPARE_HELP
from amp_widgets.compare_magic import Compare
from amp_widgets.core.memory.budget import typed_size
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.settings import FIELD_NAMES, describe_changes, format_scale
from amp_widgets.demos import DEMOS, demo, is_scenario, scenario
from amp_widgets.errors import AmpWidgetsError, FormatError, MagicError, MissingExtraError, SettingsError
from amp_widgets.language import in_language, marked, marked_all, say
from amp_widgets.replay_magics import (
    ASKS_FOR_HELP,
    Command,
    Replay,
    carry_out,
    help_of,
    in_one_line,
    present,
    speak,
    tell_errors,
    words_of,
)
from amp_widgets.replay_magics import HELP as REPLAY_HELP
from amp_widgets.session import AmpSession, newest_session
from amp_widgets.widgets.picture import Picture

HELP = (
    *marked_all(
        "%amp                               this help, and how the newest session stands",
        """\
%amp demo digits                   a small model on real data, and its dashboard (also: text,
                                   underflow, overflow; --scenarios: with situations to play above it)""",
        """\
%amp demo memory-wall              a situation to play: guess, run it, see how far off you were (also: scaling-off,
                                   first-scale, growth, bf16-fp16, both, batchnorm, speed)""",
        "%amp MODEL [OPTIMIZER]             a session on your own model, and its dashboard",
        """\
%%amp [--model NAME] [--cpu]       runs the cell as it is, with its training loop under live control
                                   (--model: which of several models; --cpu: CUDA-only code, without a GPU;
                                   --cover NAME: shows nothing until the question of this name has a guess)""",
        """\
%amp set NAME=VALUE ...            ask for settings, in force from the next step: autocast=fp16 init_scale=2**16
                                   scaling=off growth_interval=100 max_scale=none
                                   checkpointed=layers.0,layers.2 (or layers.*, or none)  fp32_layers=**.norm""",
        "%amp set NAME=VALUE ... --at STEP  the same from a later step on; also in a %%amp cell, before its loop",
        """\
%amp budget 200MB                  memory that a step on a CPU may hold: above it, it is out of memory (also: off);
                                   without a size: what it is""",
        """\
%amp record run.db                 write the run to a new file as it happens (off: no more); also in a %%amp cell, before
                                   its loop""",
        "%amp note TEXT                     a note of yours among the events",
    ),
    *REPLAY_HELP,
    COMPARE_HELP,
    *marked_all(
        "%amp formats 2**-24                a number in each number format, bit by bit; without one: 0.1",
        "%amp close                         let go of the model",
    ),
)
"""What `%amp` shows, in English: a text for each line that there is."""


@magics_class
class AmpMagics(Magics):
    """``%amp``: help and status, a demo, a session on the user's own model, settings."""

    shell: Any  # IPython's, typed as None there as well

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._session: AmpSession | None = None
        self._views: list[tuple[str, str, Any]] = []  # what sessions of the magic are shown in: cell, what was asked for, view
        self._cell: CapturedCell | None = None  # that is running
        self._covered: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # what its outputs are kept in
        self._shown: dict[str, CapturedCell] = {}  # by the front end's name of the cell
        self._replay = Replay(shell)
        self._compare = Compare(shell)
        self._commands: dict[str, Command] = {
            "demo": self._demo, "set": self._set, "budget": self._set_budget, "record": self._record, "note": _note,
            "replay": self._replay.show, "compare": self._compare.show, "formats": _show_formats, "lang": speak,
            "present": present, "close": self._close_newest,
        }  # fmt: skip

    @line_cell_magic
    def amp(self, line: str, cell: str | None = None) -> None:
        """Mixed precision and activation checkpointing as live switches; ``%amp`` alone shows the help."""
        try:
            captured = None if cell is None else self._captured(words_of(line))
            if cell is None:
                command, *text = line.strip().split(maxsplit=1)[:2] or [""]
                # a note is a text, not words as a shell has them
                self._run([command, *text] if command == "note" else words_of(line))
        except AmpWidgetsError as error:
            raise in_one_line(error) from None
        if captured is not None and cell is not None:
            self._run_cell(captured, cell)

    def close(self) -> None:
        """Close the session that the magic made, and the run that it opened."""
        self._replay.close()
        self._compare.close()
        self._close_session()

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _show(self, view: Any, asked: str) -> None:
        """Display it, and free what the same cell has shown, or what was shown when the same was asked for."""
        place = cell_id(self.shell)
        before, self._views = self._views, []
        for one in before:
            if one[0] == place != "" or one[1] == asked:
                if hasattr(one[2], "tick"):
                    one[2].tick()  # the picture that stays in the notebook is that of the whole run
                one[2].close()
            else:
                self._views.append(one)
        self._views.append((place, asked, view))
        display(view)

    def _run(self, words: list[str]) -> None:
        command, *rest = words or ["help"]
        if command in self._commands:
            carry_out(self._commands, words, HELP)
        elif command in ("help", "status", *ASKS_FOR_HELP):
            if rest and rest[0] in self._commands:
                print(*help_of(rest[0], HELP), sep="\n")
            else:
                _show_status()
        elif len(words) <= 2:
            model = self._value(command)
            optimizers = [self._value(word, model=command) for word in rest]
            self._adopt(lambda: AmpSession(_checked_model(command, model), *optimizers), command)
        else:
            raise MagicError(f"%amp: got {' '.join(words)!r}, expected one of the lines of the help; %amp alone shows it")

    def _demo(self, words: list[str]) -> None:
        names = [word for word in words if word != "--scenarios"]
        unknown = next((word for word in names if word.startswith("-")), None)
        if unknown is not None:
            raise MagicError(f"%amp demo: got {unknown!r}, expected --scenarios, or the name of a demo or of a situation")
        if len(names) > 1:
            raise MagicError(f"%amp demo: got {len(names)} names, expected one of {', '.join(DEMOS)}, or a situation to play")
        name = names[0] if names else "digits"
        if len(names) == len(words) and not is_scenario(name):
            self._adopt(lambda: demo(name, display=False), f"demo {name}")
            return
        panel = scenario(name)
        self._close_session()
        # the panel closes the one before; where another one is open, the notebook has gone on to that
        panel.on_session(lambda session: self._take(session) if self._session is None or self._session.closed else None)
        self._take(panel.session)
        self._show(panel, f"demo {name}")

    def _take(self, session: AmpSession) -> None:
        """Let this be the session of the magic, known to the notebook."""
        self._session = session
        self.shell.push({self._free_name(): session})

    def _captured(self, words: list[str]) -> CapturedCell | None:
        """What a ``%%amp`` line asks for; None where that is only its help."""
        if self._cell is not None:
            raise MagicError("%%amp: got a %%amp cell within a %%amp cell, expected one at a time")
        if not {*words}.isdisjoint(ASKS_FOR_HELP):
            print(*help_of("", HELP), sep="\n")
            return None
        model_name, on_cpu, waiting = None, False, list(words)
        self._covered = contextlib.nullcontext()
        while waiting:
            word, equals, value = waiting.pop(0).partition("=")
            if word == "--cpu" and not equals:
                on_cpu = True
            elif word == "--model" and (value if equals else waiting and waiting[0]):
                model_name = value if equals else waiting.pop(0)
            elif word == "--cover" and (value if equals else waiting and waiting[0]):
                self._covered = self._cover(value if equals else waiting.pop(0))
            else:
                line = ONE_SIGN.format(words=" ".join(words)) if words[0] in self._commands else ""
                raise MagicError(
                    f"%%amp: got {' '.join(words)!r}, expected %%amp [--model NAME] [--cpu] [--cover NAME] and the code "
                    f"below it{line}"
                )
        return CapturedCell(self.shell, model_name=model_name, on_cpu=on_cpu)

    def _run_cell(self, captured: CapturedCell, source: str) -> None:
        __tracebackhide__ = True
        place = cell_id(self.shell)
        before = self._shown.pop(place, None)
        if before is not None:  # the page has let go of it: this cell is run again
            before.close()
        self._cell = captured
        try:
            with self._covered:
                captured.run(source)
        finally:
            self._cell = None
            if place:
                self._shown[place] = captured
            if captured.session is not None:
                self.shell.push({self._free_name(): captured.session})

    def _cover(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What keeps the outputs of a cell until the question of this `name` has a guess; they are live where it has one."""
        question = self.shell.user_ns.get(name)
        if not (hasattr(question, "covered") and hasattr(question, "guessed")):
            raise MagicError(
                f"%%amp --cover: got {name!r}, expected the name of a question in this notebook, made with aw.ask(…)"
            )
        kept: contextlib.AbstractContextManager[None] = question.covered()
        return kept if question.guessed is None else contextlib.nullcontext()

    def _set(self, words: list[str]) -> None:
        words, at_step = _without_step(words)
        changes = parse_settings(words)
        if self._cell is not None:
            asked, model = self._cell.request(changes, at_step), ""
        else:
            session = newest_session()
            if session is None:
                raise MagicError(f"%amp set: {NO_SESSION}")
            model = session.model_type
            if at_step is None:
                asked = session.request(source="magic", **changes).changes
            else:
                asked = session.schedule(at_step=at_step, source="magic", **changes).changes
        # as typed while the layers are not known
        text = " ".join(words) if asked is changes else in_language(describe_changes(asked))
        when = say("the next step") if at_step is None else say("step {step}", step=at_step)
        if model:
            sentence = marked("requested: {changes}; in force from {when} of the session on {model}")
            print(say(sentence, changes=text, when=when, model=model))
        else:
            print(say("requested: {changes}; in force from {when}", changes=text, when=when))

    def _set_budget(self, words: list[str]) -> None:
        if not words:
            self._show_budget()
            return
        budget = parse_size(" ".join(words))
        if self._cell is not None:
            self._cell.set_budget(budget)
            print(say("memory budget: {size}, from the next step on", size=_budget_text(budget)))
        else:
            session = newest_session()
            if session is None:
                raise MagicError(f"%amp budget: {NO_SESSION}")
            session.memory_budget = budget
            print(
                say(
                    "memory budget of the session on {model}: {size}, from the next step on",
                    model=session.model_type,
                    size=_budget_text(budget),
                )
            )

    def _show_budget(self) -> None:
        session = newest_session()
        if self._cell is not None:
            print(say("memory budget: {size}", size=_budget_text(self._cell.budget)))
        elif session is None:
            print(say("memory budget: there is no session yet; %amp budget 200MB in a %%amp cell, above its loop, sets one"))
        else:
            size = _budget_text(session.memory_budget)
            print(say("memory budget of the session on {model}: {size}", model=session.model_type, size=size))
            if session.budget_gap is not None:
                print(in_language(session.budget_gap))

    def _record(self, words: list[str]) -> None:
        session = newest_session()
        if len(words) > 1:
            raise MagicError(f"%amp record: got {len(words)} words, expected the name of a new file, such as run.db, or off")
        if self._cell is not None and words and words[0] != "off":
            self._cell.record(words[0])
            print(say("recording: to {path}, from the loop's first step on", path=words[0]))
            return
        if session is None:
            raise MagicError(f"%amp record: {NO_SESSION}")
        if words == ["off"]:
            session.stop_recording()
        elif words:
            session.record(words[0])
        model, where = session.model_type, session.recorded_to
        if where is None:
            print(say("recording of the session on {model}: off", model=model))
        else:
            print(say("recording of the session on {model}: to {path}", model=model, path=where))

    def _adopt(self, make: Any, asked: str) -> None:
        session = make()
        self._close_session()  # a cell that is run again must not leave the former run training
        name = self._free_name()
        self._take(session)
        sentence = marked(
            "{name} is the AmpSession behind this dashboard: {name}.request(autocast='fp16') asks for a change from Python"
        )
        print(say(sentence, name=name))
        try:
            view = session.dashboard()
        except MissingExtraError as error:  # the magics work without widgets
            display(Picture(session, f"{NO_DASHBOARD} {error}"))
        else:
            self._show(view, asked)

    def _free_name(self) -> str:
        for name in ("session", "amp_session"):
            if isinstance(self.shell.user_ns.get(name), (AmpSession, type(None))):
                return name
        return "amp_session_"

    def _close_newest(self, words: list[str]) -> None:
        if words:
            raise MagicError(f"%amp close: got {' '.join(words)!r}, expected nothing: it closes the newest session")
        session = newest_session()
        if session is None:
            raise MagicError("%amp close: there is no open session")
        session.close()
        if session is self._session:
            self._session = None
        print(say("closed: the model is as it was"))

    def _value(self, name: str, *, model: str | None = None) -> Any:
        """What has this name in the notebook: a model, or the optimizer of a `model`."""
        first, *rest = name.split(".")
        if not all(part.isidentifier() for part in (first, *rest)) or first not in self.shell.user_ns:
            if model is not None:
                raise MagicError(f"%amp {model} {name}: got {name!r}, expected the name of an optimizer in this notebook")
            raise MagicError(
                f"%amp {name}: got {name!r}, expected one of {', '.join(self._commands)}, or the name of a model in this "
                "notebook; %amp alone shows the help"
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
    tell_errors(shell)


def parse_settings(words: list[str]) -> dict[str, Any]:
    """``["autocast=fp16", "init_scale=2**16"]`` → the changes to request.

    Raises
    ------
    MagicError
        When a word is not NAME=VALUE, a value cannot be read, or a name is there twice.
    """
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise MagicError(f"%amp set: got {word!r}, expected NAME=VALUE, with NAME one of {', '.join(FIELD_NAMES)}")
        if name in changes:
            raise MagicError(f"%amp set: got {name} twice, expected each setting once")
        changes[name] = _parse(name, text)
    if not changes:
        raise MagicError(f"%amp set: got nothing to set, expected NAME=VALUE, with NAME one of {', '.join(FIELD_NAMES)}")
    return changes


def parse_size(text: str) -> float | None:
    """A budget as `amp_widgets.core.memory.budget.typed_size` reads it.

    Raises
    ------
    MagicError
        When it is no size.
    """
    try:
        return typed_size(text)
    except SettingsError as error:
        raise MagicError(f"%amp budget: {error}") from None


def _parse(name: str, text: str) -> Any:
    if name == "autocast":
        return text
    if name in ("checkpointed", "fp32_layers"):
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


_WORDS: dict[str, bool | None] = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False, "none": None}
_POWER = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\*\*|\^)\s*(-?\d{1,4})")


def _without_step(words: list[str]) -> tuple[list[str], int | None]:
    """The words but for ``--at STEP``, and the step."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--at":
            value = value if equals else next(iter(words[index + 1 :]), "")
            if not value.isdecimal():
                raise MagicError(f"%amp set --at: got {value!r}, expected the number of a step, such as --at 200")
            others = [*words[:index], *words[index + (1 if equals else 2) :]]
            if any(other.partition("=")[0] == "--at" for other in others):
                raise MagicError("%amp set --at: got it twice, expected one step; each step has a line of its own")
            return others, int(value)
    return words, None


def _show_status() -> None:
    session = newest_session()
    print(*map(say, HELP), sep="\n")
    print()
    if session is None:
        print(say("There is no session yet."))
        return
    state = session.dashboard_state()
    settings = session.settings
    print(say("{session}; run: {state}", session=repr(session), state=in_language(state.run)))
    scale = format_scale(settings.init_scale)
    print(
        say(
            "in force: autocast {autocast}, {scaling}, {checkpointed} of {layers} layers checkpointed, {kept} kept in FP32",
            autocast=settings.autocast,
            scaling=say("loss scaling from {scale}", scale=scale) if settings.scales_loss else say("no loss scaling"),
            checkpointed=len(settings.checkpointed),
            layers=len(state.layers),
            kept=len(settings.fp32_layers),
        )
    )
    if state.pending:
        print(say("waiting:  {changes}", changes=in_language(describe_changes(state.pending))))
    if state.last_rejection:
        print(say("rejected: {why}", why=in_language(state.last_rejection)))
    print(say("memory:   {source}", source=in_language(state.memory_source)))
    if session.memory_budget is not None:
        print(say("budget:   {size} a step", size=memory_text(session.memory_budget)))
    if session.recorded_to is not None:
        print(say("recorded: to {path}", path=session.recorded_to))
    death = session.out_of_memory
    if death is not None:
        print(say("died:     {what}; session.out_of_memory.report says more", what=in_language(death.report[0])))
    if not _has_widgets():
        display(Picture(session, marked("The charts as they stand:")))


def _budget_text(budget: float | None) -> str:
    return say("off") if budget is None else memory_text(budget)


ONE_SIGN = marked("; a line of its own has one %: %amp {words}")
NO_SESSION = marked(
    "there is no session yet; make one with %amp demo digits, %amp MODEL [OPTIMIZER], or AmpSession(model, optimizer). For a "
    "%%amp cell, put this line into the cell, above its loop"
)


def _note(words: list[str]) -> None:
    text = " ".join(words)
    session = newest_session()
    if session is None:
        raise MagicError(f"%amp note: {NO_SESSION}")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if not text:
        raise MagicError("%amp note: got nothing, expected a text")
    session.note(text)


def _show_formats(words: list[str]) -> None:
    if len(words) > 1:
        raise MagicError(f"%amp formats: got {len(words)} words, expected a number to begin with, such as 2**-24, or nothing")
    try:
        from amp_widgets.widgets.format_lab import FormatLab
    except ImportError as error:
        raise MissingExtraError(
            f"%amp formats: {error}; install the widgets with: pip install 'amp-widgets[notebook]'"
        ) from error

    session = newest_session()
    weights = None if session is None else WeightReader(session, session.between_steps)
    try:
        lab = FormatLab(*words, weights=weights)
    except FormatError as error:
        raise MagicError(f"%amp formats: {error}") from None
    display(lab)


def _has_widgets() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("ipywidgets", "anywidget", "plotly", "tsdownsample"))


def _checked_model(name: str, model: Any) -> Any:
    if not (hasattr(model, "parameters") and hasattr(model, "named_modules")):
        raise MagicError(f"%amp {name}: got a {type(model).__name__}, expected a torch.nn.Module")
    return model
