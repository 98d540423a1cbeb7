"""What cells print and show without widgets is in the language in force: the magics' lines, errors, and reports.

Found with a language of its own, in which each text of the catalogue is in brackets: what is outside of them has to be data.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from amp_widgets import language
from amp_widgets.recorded_run import open_run
from amp_widgets.runs_comparison import compare_runs
from amp_widgets.session import AmpSession
from tests.bracket_language import bracketed, words_of

LOSS = nn.functional.cross_entropy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


@pytest.fixture(autouse=True)
def brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The language in which every text of the catalogue is in brackets, in place of English."""
    monkeypatch.setitem(language._catalogues, "en", bracketed())


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    made = InteractiveShell.instance()
    made.reset(new_session=False)
    made.run_line_magic("load_ext", "amp_widgets")
    yield made
    made.run_line_magic("unload_ext", "amp_widgets")
    InteractiveShell.clear_instance()


def made(**options: Any) -> tuple[AmpSession, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.stem = nn.Linear(4, 8)
    model.body = nn.Sequential(Block(), Block())
    model.head = nn.Linear(8, 3)
    session = AmpSession(model, torch.optim.Adam(model.parameters()), **options)
    return session, (torch.randn(40, 4), torch.randint(3, (40,)))


def plain(shown: Any) -> str:
    """What a cell shows of it: as text, as printed, and its HTML without the tags; of a plain record what is printed."""
    markup = getattr(shown, "_repr_html_", lambda: "")()
    texts = [str(shown), html.unescape(re.sub(r"<[^>]*>", " ", markup))]
    return "\n".join(texts if repr(shown).startswith(f"{type(shown).__name__}(") else [repr(shown), *texts])


def untranslated(texts: dict[str, str], session: AmpSession, *names: str) -> list[str]:
    data = {*names, *(layer.name for layer in session.layers), *(layer.type for layer in session.layers)}
    found = {name: words_of(text, data | {word for one in data for word in one.split(".")}) for name, text in texts.items()}
    return [f"{name}: {' '.join(words)}\n{texts[name]}" for name, words in found.items() if words]


@pytest.mark.parametrize("autocast", ["fp32", "bf16", "fp16"])
def test_reports(autocast: str) -> None:
    session, batch = made()
    with session:
        if autocast != "fp32":
            session.request(autocast=autocast, init_scale=2.0**10, checkpointed=["body.0"])
        session.count_gradients()
        session.profile_next_step()
        session.fit([batch] * 2, LOSS, epochs=1)
        assert session.wait(60)
        at_budget = {"batch": batch, "loss_fn": LOSS}
        predicted = session.predict_on_cuda(*batch_and_loss(batch))
        profile = session.profile_step(*batch_and_loss(batch))
        taken = session.dtype_map(*batch_and_loss(batch))
        confirmed = session.largest_batch(budget_bytes=30e3, confirm=True, **at_budget)
        shown: dict[str, Any] = {
            "plan": session.plan(budget_bytes=60e3, **at_budget),
            "a plan that does not fit": session.plan(budget_bytes=1e3, **at_budget),
            "largest batch": confirmed,
            "found": confirmed.rows[0].found,
            "confirmed": confirmed.rows[0].confirmed,
            "check": session.check(*batch_and_loss(batch)),
            "dtype map": taken,
            "precision": session.precision_cost(*batch_and_loss(batch)),
            "preflight": session.preflight(*batch_and_loss(batch)),
            "CUDA": predicted,
            "gradients": session.gradient_range(),
            "layers": session.layer_profile(),
            "comparison": session.compare(*batch_and_loss(batch), steps=1, rounds=1),
        }
        texts = {name: plain(one) for name, one in shown.items()}
        texts["profile"] = html.unescape(re.sub(r"<[^>]*>", " ", profile._repr_html_()))
        texts["difference"] = profile.difference_text(session.profiles[0])
        operators = [word for row in taken.rows for word in (row.operator, row.text, *row.operator.split("."))]
        left = untranslated(texts, session, *operators, *re.findall(r"\w+", str(torch.__version__)), "aten")
    assert min(map(len, texts.values())) > 20
    assert not left, "\n\n".join(left)


def batch_and_loss(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
    return batch, LOSS


def test_what_preflight_finds() -> None:
    session, _ = made()
    with session:
        session._model.half()  # type: ignore[attr-defined]
        found = session.preflight()
        texts = {str(place): plain(one) for place, one in enumerate(found)} | {"all": plain(found)}
        left = untranslated(texts, session, "weight", "bias", "half", *re.findall(r"[\w.]+\(", " ".join(texts.values())))
    assert len(texts) > 2
    assert not left, "\n\n".join(left)


def test_a_step_that_ran_out_of_memory() -> None:
    session, batch = made()
    with session:
        session.memory_budget = 8e3
        session.fit([batch], LOSS, epochs=1)
        with pytest.raises(torch.OutOfMemoryError):
            session.wait(60)
        death = session.out_of_memory
        assert death is not None
        left = untranslated({"death": str(death)}, session, death.operator, "aten", *death.operator.split("::"))
    assert not left, "\n\n".join(left)


def test_runs_over_each_other(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.db" for name in ("one", "other")]
    for path in paths:
        session, batch = made(record=path)
        with session:
            session.request(autocast="bf16" if path == paths[0] else "fp32")
            session.fit([batch] * 3, LOSS, epochs=1)
            assert session.wait(60)
    compared = compare_runs(*paths)
    system = str(open_run(paths[0]).facts.get("system", ""))
    texts = {"table": plain(compared.table)}
    compared.close()
    left = untranslated(texts, session, "one", "other", *re.findall(r"\w+", system), "amp-widgets", "widgets")
    assert not left, "\n\n".join(left)


LINES = (
    "", "help", "demo digits", "set autocast=bf16 checkpointed=none", "set autocast=fp16 --at 9", "", "budget", "budget 200MB",
    "budget", "record", "record a.db", "record off", "note x", "budget off", "", "lang", "close", "budget", "compare a.db",
)  # fmt: skip
"""Each is carried out."""
WRONG = (
    "set", "set autocast", "set autocast=fp8", "set init_scale=many", "set --at x autocast=fp16", "set colour=red", "budget",
    "budget many", "record a b", "record a.db", "note", "replay", "replay a b", "replay no.db", "compare", "compare no.db",
    "lang xx", "lang en ko", "demo mnist", "demo digits text", "nothing_here", "nothing here at_all", "torch.absent", "torch",
    "close", "set checkpointed='0",
)  # fmt: skip
"""Each is refused, without a session or with one."""
WORDS = (
    "amp", "MODEL", "OPTIMIZER", "NAME", "VALUE", "STEP", "digits", "text", "underflow", "overflow", "session", "run", "compared",
    "Sequential", "DigitsNet", "a.db", "no.db", "AmpSession", "step", "closed", "of", "on", "en", "ko", "English", "nothing_here",
    "module", "absent", "colour", "No", "such", "file", "or", "directory",  # names, and what Python says
    "demo", "set", "budget", "record", "note", "replay", "compare", "formats", "lang", "present", "close",  # what is typed
)  # fmt: skip


def test_the_lines_of_the_magics(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.push({"torch": torch})
    left = []
    for line in LINES:
        shell.run_line_magic("amp", line)
        said = re.sub(r"<[^>]*>|(?<!\w)/[\w/.-]+|Linux-\S+|amp-widgets", " ", capsys.readouterr().out)
        words = words_of(said, WORDS)
        if words:
            left.append(f"%amp {line}: {' '.join(words)}\n{said}")
    assert not left, "\n\n".join(left)


@pytest.mark.parametrize("with_session", [False, True])
def test_lines_that_are_refused(shell: Any, with_session: bool, tmp_path: Path) -> None:
    shell.push({"torch": torch})
    (tmp_path / "a.db").touch()
    session = made()[0] if with_session else None
    refused, left = 0, []
    for line in WRONG:
        try:
            shell.run_line_magic("amp", line)
        except Exception as error:
            refused += 1
            (said,) = error._render_traceback_()  # type: ignore[attr-defined]
            said = re.sub(r"'[^']*'|\"[^\"]*\"|^\w+:|(?<![\w/])/[\w/.-]+", " ", said)
            words = words_of(said, WORDS)
            if words:
                left.append(f"%amp {line}: {' '.join(words)}\n{said}")
    if session is not None:
        session.close()
    assert refused >= len(WRONG) - 2
    assert not left, "\n\n".join(left)


def test_errors_of_a_cell_are_said_below_the_traceback(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("import amp_widgets as aw\naw.open_run(5)")
    told = capsys.readouterr().err
    assert "⟦open_run: got ⟧5⟦, expected the path of a file that a session has recorded" in told
    shell.run_cell("1 / 0")
    assert "⟦" not in capsys.readouterr().err
