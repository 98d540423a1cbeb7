"""``%amp``: what each line does, and how a wrong line is answered. The shell is a real one, without a kernel."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from amp_widgets.charts.asset import plotly_asset
from amp_widgets.demos import DEMOS
from amp_widgets.errors import DemoError, LanguageError, LayerError, MagicError, ModelError, RecordingError, SettingsError
from amp_widgets.language import set_language
from amp_widgets.magics import HELP, parse_settings, parse_size
from amp_widgets.recording.run import open_run
from amp_widgets.replay_magics import words_of
from amp_widgets.session import AmpSession, newest_session
from amp_widgets.widgets.presenting_control import present


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = InteractiveShell.instance()
    made.reset(new_session=False)
    made.run_line_magic("load_ext", "amp_widgets")
    yield made
    made.run_line_magic("unload_ext", "amp_widgets")
    InteractiveShell.clear_instance()


def put_model(shell: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    shell.push({"net": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)})
    return model


def test_parse_settings() -> None:
    words = (
        "autocast=fp16 scaling=off init_scale=2**16 growth_factor=1.5 growth_interval=100 min_scale=none max_scale=2^20 "
        "checkpointed=layers.*,head"
    )
    assert parse_settings(words.split()) == {
        "autocast": "fp16",
        "scaling": False,
        "init_scale": 65536.0,
        "growth_factor": 1.5,
        "growth_interval": 100,
        "min_scale": None,
        "max_scale": 2.0**20,
        "checkpointed": ("layers.*", "head"),
    }
    assert parse_settings(["checkpointed=none"]) == {"checkpointed": ()}
    assert parse_settings(["init_scale=2**-3"]) == {"init_scale": 0.125}


@pytest.mark.parametrize("line", ["fp16", "=3", "init_scale=__import__('os')", "init_scale=2**99999999", ""])
def test_lines_that_cannot_be_read(line: str) -> None:
    with pytest.raises(MagicError, match="expected"):
        parse_settings(line.split())


def test_status_and_help(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_line_magic("amp", "")
    said = capsys.readouterr().out
    assert "%amp demo digits" in said
    assert "There is no session yet." in said


def test_a_session_on_the_users_model(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = put_model(shell)
    shell.run_line_magic("amp", "net optim")
    session = shell.user_ns["session"]
    assert isinstance(session, AmpSession)
    assert session._model is model
    assert "session is the AmpSession" in capsys.readouterr().out
    shell.run_line_magic("amp", "set autocast=bf16 checkpointed=0,2")
    assert "requested: autocast bf16, 2 layers checkpointed" in capsys.readouterr().out
    assert session.pending is not None
    assert session.pending.source == "magic"
    assert session.pending.changes == {"autocast": "bf16", "checkpointed": ("0", "2")}
    shell.run_line_magic("amp", "")
    assert "waiting:  autocast bf16" in capsys.readouterr().out
    shell.run_line_magic("amp", "close")
    assert session.closed


def test_the_same_line_again_closes_the_former_session(shell: Any) -> None:
    put_model(shell)
    shell.run_line_magic("amp", "net optim")
    first = shell.user_ns["session"]
    shell.run_line_magic("amp", "net")
    assert first.closed
    assert shell.user_ns["session"] is newest_session() is not first


def test_a_variable_of_the_user_is_not_overwritten(shell: Any) -> None:
    put_model(shell)
    shell.push({"session": "mine"})
    shell.run_line_magic("amp", "net optim")
    assert shell.user_ns["session"] == "mine"
    assert isinstance(shell.user_ns["amp_session"], AmpSession)


def test_a_demo(shell: Any) -> None:
    shell.run_line_magic("amp", "demo digits")
    assert shell.user_ns["session"].run_state == "ready"


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ("demo mnist", DemoError, "expected one of"),
        ("demo digits text", MagicError, "got 2 names"),
        (
            "nothing_here",
            MagicError,
            "expected one of demo, set, budget, record, note, replay, compare, formats, lang, present, close, or the name of a",
        ),
        ("net.absent", MagicError, "no attribute 'absent'"),
        ("optim", MagicError, "got a SGD, expected a torch.nn.Module"),
        ("net optim more", MagicError, "expected one of the lines of the help"),
        ("close", MagicError, "no open session"),
        ("close all", MagicError, "got 'all', expected nothing"),
        ("set autocast=fp16", MagicError, "there is no session yet"),
        ("formats x", MagicError, "%amp formats: got 'x', expected a number such as 0.1, 2e-8, 2**-24 or 1/3"),
        ("net 3", MagicError, "%amp net 3: got '3', expected the name of an optimizer"),
        ("set autocast=fp16 --at 3 --at 4", MagicError, "--at: got it twice"),
        ("demo --scenario", MagicError, "got '--scenario', expected --scenarios"),
        ("compare net", MagicError, "got 'net', here a Sequential, expected a run or a session"),
        ("formats 1 2", MagicError, "got 2 words, expected a number"),
    ],
)
def test_lines_that_cannot_be_done(shell: Any, line: str, kind: type[Exception], said: str) -> None:
    put_model(shell)
    with pytest.raises(kind) as caught:
        shell.run_line_magic("amp", line)
    assert said in str(caught.value)


def test_settings_that_cannot_be(shell: Any) -> None:
    put_model(shell)
    shell.run_line_magic("amp", "net optim")
    with pytest.raises(SettingsError, match="expected one of 'fp32'"):
        shell.run_line_magic("amp", "set autocast=fp8")
    with pytest.raises(LayerError, match="no layer matches"):
        shell.run_line_magic("amp", "set checkpointed=layer.*")


def test_unloading_takes_the_magic_away_and_closes() -> None:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "amp_widgets")
    put_model(shell)
    shell.run_line_magic("amp", "net optim")
    session = shell.user_ns["session"]
    shell.run_line_magic("unload_ext", "amp_widgets")
    assert session.closed
    with pytest.raises(UsageError, match="amp"):
        shell.run_line_magic("amp", "")
    InteractiveShell.clear_instance()


HELP_OF = {"set": 2, "demo": 2, "note": 1, "formats": 1, "replay": 1, "compare": 1, "lang": 1, "present": 1, "budget": 1}
"""Command → how many texts there are about it."""


@pytest.mark.parametrize("command", HELP_OF)
@pytest.mark.parametrize("line", ["{} --help", "{} -h", "help {}", "--help {}"])
def test_the_help_of_one_command(shell: Any, command: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_line_magic("amp", line.format(command))
    said = capsys.readouterr().out
    assert len(re.findall("^%amp", said, re.M)) == len(re.findall(f"^%amp {command}\\b", said, re.M)) == HELP_OF[command]
    assert newest_session() is None


@pytest.mark.parametrize("line", ["--help", "--cpu -h"])
def test_the_help_of_a_cell_runs_nothing(shell: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell_magic("amp", line, "ran = True")
    assert capsys.readouterr().out.startswith("%%amp [--model NAME] [--cpu]")
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize("line", ["--model", "--model=", "--cpu=1", "--modle net", "x"])
def test_options_of_a_cell_that_there_are_not(shell: Any, line: str) -> None:
    with pytest.raises(MagicError, match=r"expected %%amp \[--model NAME\] \[--cpu\] \[--cover NAME\] and the code below it$"):
        shell.run_cell_magic("amp", line, "ran = True")
    assert "ran" not in shell.user_ns


def test_a_line_that_was_given_two_percent_signs(shell: Any) -> None:
    with pytest.raises(MagicError, match=r"a line of its own has one %: %amp set autocast=fp16$"):
        shell.run_cell_magic("amp", "set autocast=fp16", "pass")


@pytest.mark.parametrize("lines", [("net optim", "net"), ("demo digits", "demo digits"), ("demo both", "demo both")])
def test_what_showed_the_former_session_is_freed_with_it(shell: Any, lines: tuple[str, str]) -> None:
    """The model too, where it is not the user's own."""
    widgets = pytest.importorskip("ipywidgets").widgets.widget._instances
    put_model(shell)
    plotly_asset()  # one for all charts, which stays
    known = {*widgets}
    shell.run_line_magic("amp", lines[0])
    first, of_first = weakref.ref(shell.user_ns["session"]), {*widgets} - known
    model = weakref.ref(first()._model)  # type: ignore[union-attr]
    assert len(of_first) > 20
    shell.run_line_magic("amp", lines[1])
    gc.collect()
    assert not of_first & {*widgets}
    assert first() is None
    assert (model() is None) == (lines[0] != "net optim")
    assert newest_session() is shell.user_ns["session"]


@pytest.mark.parametrize("lines", [("net optim", "net"), ("demo both", "demo both")])
def test_the_picture_that_stays_is_of_the_whole_run(shell: Any, lines: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("amp_widgets.widgets.still.update_display", lambda bundle, **_options: drawn.append(bundle["text/plain"]))
    put_model(shell)
    shell.run_line_magic("amp", lines[0])
    session = shell.user_ns["session"]
    if lines[0] == "net optim":
        for _ in range(3):
            with session.autocast():
                loss = shell.user_ns["net"](torch.ones(4, 2)).sum()
            session.scaler.scale(loss).backward()
            session.scaler.step(shell.user_ns["optim"])
            session.scaler.update()
    else:
        session.single_step()
        while session.run_state == "running":
            session.wait(0.01)
    steps = session.step
    shell.run_line_magic("amp", lines[1])
    assert steps > 0
    assert [text for text in drawn if f"at step {steps} (" in text]


def test_what_another_cell_shows_is_freed_when_that_cell_is_run_again(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widgets = pytest.importorskip("ipywidgets").widgets.widget._instances
    put_model(shell)
    plotly_asset()
    known, shown = {*widgets}, []
    for cell, line in (("a", "demo both"), ("b", "net"), ("a", "demo digits")):
        monkeypatch.setattr("amp_widgets.magics.cell_id", lambda shell, cell=cell: cell)
        shell.run_line_magic("amp", line)
        shown.append({*widgets} - known)
        known |= shown[-1]
    of_a, of_b, of_a_again = shown
    assert not of_a & {*widgets}
    assert of_b | of_a_again <= {*widgets}


def test_a_session_that_was_closed_is_shown_until_there_is_another(shell: Any) -> None:
    widgets = pytest.importorskip("ipywidgets").widgets.widget._instances
    put_model(shell)
    plotly_asset()
    known = {*widgets}
    shell.run_line_magic("amp", "net optim")
    shown = {*widgets} - known
    shell.run_line_magic("amp", "close")
    assert shown <= {*widgets}
    shell.run_line_magic("amp", "net")
    assert not shown & {*widgets}


@pytest.mark.parametrize("line", ["demo digts", "no_parameters", "optim"])
def test_a_mistyped_line_leaves_the_running_session(shell: Any, line: str) -> None:
    put_model(shell)
    shell.push({"no_parameters": nn.ReLU()})
    shell.run_line_magic("amp", "net optim")
    session = shell.user_ns["session"]
    with pytest.raises((MagicError, DemoError, ModelError)):
        shell.run_line_magic("amp", line)
    assert not session.closed


def test_an_open_quotation_is_ours_to_explain(shell: Any) -> None:
    with pytest.raises(MagicError, match=r"got \"set checkpointed='0\", expected .*, and the end of each quotation"):
        shell.run_line_magic("amp", "set checkpointed='0")
    with pytest.raises(MagicError, match="and the end of each quotation"):
        shell.run_line_magic("amp", 'record "my run.db')


WORDS = {
    r"record C:\runs\a.jsonl": ["record", r"C:\runs\a.jsonl"],
    r"replay \\server\share\run.db ": ["replay", r"\\server\share\run.db"],
    r'record "C:\my runs\a b.db"': ["record", r"C:\my runs\a b.db"],
    r"compare 'C:\it is\' b.db": ["compare", "C:\\it is\\", "b.db"],
    r'compare "C:\new\" b.db': ["compare", "C:\\new\\", "b.db"],
    r"record C:\runs\ ": ["record", "C:\\runs\\"],
    r"record my\ run.db": ["record", "my run.db"],
    r"record it\'s.db": ["record", "it's.db"],
    """set a='b c'd"e f" ''""": ["set", "a=b cde f", ""],
    "  \t ": [],
}


@pytest.mark.parametrize("line", WORDS)
def test_backslashes_of_paths_and_quotes_are_words(line: str) -> None:
    assert words_of(line) == WORDS[line]


@pytest.mark.parametrize("name", [r"C:\runs\a.db", "my run.db"])
def test_a_run_is_recorded_and_replayed_where_the_line_says(shell: Any, tmp_path: Path, name: str) -> None:
    put_model(shell)
    shell.run_line_magic("amp", "net optim")
    path = f"{tmp_path}/{name}"
    quote = '"' * (" " in name)
    shell.run_line_magic("amp", f"record {quote}{path}{quote}")
    assert [one.name for one in tmp_path.glob("*.db")] == [name]
    shell.run_line_magic("amp", "note it's")
    shell.run_line_magic("amp", "record off")
    shell.run_line_magic("amp", f"replay {quote}{path}{quote}")
    assert [event.reason for event in shell.user_ns["run"].history.events("note")][-1] == "it's"


@pytest.mark.parametrize(
    ("code", "line", "wanted"),
    [
        ("en", "very large", ("very-large", "light")),
        ("en", "very-large dark", ("very-large", "dark")),
        ("en", "high contrast Very_Large", ("very-large", "high-contrast")),
        ("en", "'very large' as the notebook", ("very-large", "notebook")),
        ("en", "light normal", ("normal", "light")),
        ("ko", "very large high-contrast", ("very-large", "high-contrast")),
        ("ko", "아주 크게 고대비", ("very-large", "high-contrast")),
        ("ko", "어둡게 크게", ("large", "dark")),
        ("ko", "보통 크기 노트북과 같게", ("normal", "notebook")),
    ],
)
def test_present_takes_what_the_menu_says(shell: Any, code: str, line: str, wanted: tuple[str, str]) -> None:
    set_language(code)
    try:
        present(type_size="large", theme="light")
        shell.run_line_magic("amp", f"present {line}")
        assert (present().type_size, present().theme) == (wanted[0], wanted[1])
        for wrong in ("very", "large very large", "contrast", "large -", "very dark large"):
            with pytest.raises(SettingsError, match=f"got '{wrong}', expected a size"):
                shell.run_line_magic("amp", f"present {wrong}")
        assert (present().type_size, present().theme) == (wanted[0], wanted[1])
    finally:
        set_language(None)
        present(type_size="normal", theme="notebook")


def test_brackets_of_globs_are_kept() -> None:
    assert parse_settings(["checkpointed=layers.[02]"]) == {"checkpointed": ("layers.[02]",)}
    assert parse_settings(["checkpointed=[02]*"]) == {"checkpointed": ("[02]*",)}
    assert parse_settings(["checkpointed=['a','b']"]) == {"checkpointed": ("a", "b")}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200e6", 200e6),
        ("200MB", 200e6),
        ("200mb", 200e6),
        ("1.5GB", 1.5e9),
        (".5 kB", 500.0),
        ("3 KiB", 3 * 1024.0),
        ("2MiB", 2 * 1024.0**2),
        ("1GiB", 1024.0**3),
        ("12B", 12.0),
        ("off", None),
        ("None", None),
    ],
)
def test_sizes(text: str, size: float | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "12 apples", "-5", "1e", "0x10", "1,5GB", "nan", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(MagicError, match="expected a size such as 200MB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["12", " 60 ", "8000", "1e2"])
def test_a_size_without_a_unit(text: str) -> None:
    with pytest.raises(MagicError, match=f"%amp budget: got '{text}' without a unit, .*such as {text.strip()} MB"):
        parse_size(text)


def test_budget(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MagicError, match="there is no session yet"):
        shell.run_line_magic("amp", "budget 1MB")
    shell.run_line_magic("amp", "budget")
    assert "there is no session yet" in capsys.readouterr().out
    model = put_model(shell)
    optimizer = shell.user_ns["optim"]
    session = AmpSession(model, optimizer)
    shell.run_line_magic("amp", "budget 1.5 kB")
    assert session.memory_budget == 1500
    assert "memory budget of the session on Sequential: 1.5 kB, from the next step on" in capsys.readouterr().out
    with pytest.raises(torch.OutOfMemoryError), session.autocast():
        model(torch.ones(1000, 2))
    shell.run_line_magic("amp", "")
    said = capsys.readouterr().out
    assert "budget:   1.5 kB a step" in said
    assert "died:     Out of memory at step 0: the model, its gradients, the optimizer's state and the batch alone" in said
    shell.run_line_magic("amp", "budget")
    assert capsys.readouterr().out == "memory budget of the session on Sequential: 1.5 kB\n"
    shell.run_line_magic("amp", "budget off")
    assert session.memory_budget is None
    shell.run_line_magic("amp", "budget")
    assert "on Sequential: off" in capsys.readouterr().out
    with pytest.raises(MagicError, match="got '100MB extra', expected a size"):
        shell.run_line_magic("amp", "budget 100MB extra")
    for line in ("budget 0", "budget many bytes of it", "budget -1MB"):
        with pytest.raises((MagicError, SettingsError)):
            shell.run_line_magic("amp", line)
    session.close()


def test_record_and_note(shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for line in ("record run.db", "note x"):
        with pytest.raises(MagicError, match="there is no session yet"):
            shell.run_line_magic("amp", line)
    session = AmpSession(put_model(shell), shell.user_ns["optim"])
    path = tmp_path / "run.db"
    shell.run_line_magic("amp", "record")
    assert capsys.readouterr().out == "recording of the session on Sequential: off\n"
    shell.run_line_magic("amp", f"record {path}")
    assert capsys.readouterr().out == f"recording of the session on Sequential: to {path}\n"
    shell.run_line_magic("amp", "note what I see here")
    texts = {"what I see here": "what I see here", r"it's  c\d fine": r"it's  c\d fine", "'two words'": "two words"}
    for typed in list(texts)[1:]:
        shell.run_line_magic("amp", f"note {typed}")
    shell.run_line_magic("amp", "record off")
    assert session.recorded_to is None
    with open_run(path) as run:
        assert [event.reason for event in run.events] == list(texts.values())
    with pytest.raises(RecordingError, match="exists already"):
        shell.run_line_magic("amp", f"record {path}")
    with pytest.raises(MagicError, match="got 2 words"):
        shell.run_line_magic("amp", "record a b")
    with pytest.raises(MagicError, match="got nothing, expected a text"):
        shell.run_line_magic("amp", "note")
    session.close()


def test_formats_reads_the_weights_of_the_newest_session(shell: Any) -> None:
    pytest.importorskip("anywidget")
    from amp_widgets.widgets.format_lab import FormatLab

    model = put_model(shell)
    shown: list[Any] = []
    with AmpSession(model, shell.user_ns["optim"]), pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_widgets.magics.display", shown.append)
        model(torch.ones(4, 2)).sum().backward()
        shell.user_ns["optim"].step()
        shell.run_line_magic("amp", "formats")
    (lab,) = shown
    assert isinstance(lab, FormatLab)
    assert [one.label.partition("[")[0] for one in lab.state.samples] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {(one.lr, one.step) for one in lab.state.samples} == {(0.1, 1)}


def test_the_help_names_every_demo() -> None:
    lines = "\n".join(text for text in HELP if text.startswith("%amp demo"))
    assert all(name in lines for name in DEMOS)


def test_the_language(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        shell.run_line_magic("amp", "lang")
        assert capsys.readouterr().out == "language: English; there are en (English), ko (한국어)\n"
        shell.run_line_magic("amp", "lang ko")
        assert capsys.readouterr().out.splitlines()[-1].startswith("언어: 한국어.")  # pictures that are open come before
        with pytest.raises(LanguageError, match="got 'xx', expected one of en"):
            shell.run_line_magic("amp", "lang xx")
        with pytest.raises(MagicError, match="got 2 words"):
            shell.run_line_magic("amp", "lang en ko")
    finally:
        set_language(None)
    assert any("%amp lang ko" in text for text in HELP)


def test_a_setting_that_is_there_twice_is_refused() -> None:
    with pytest.raises(MagicError, match="got autocast twice"):
        parse_settings(["autocast=fp16", "autocast=bf16"])
