"""The catalogues: they are what the sources make of them, nothing is left out, and what is really said is in Korean."""

from __future__ import annotations

import importlib.util
import re
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.core.settings import describe_changes
from amp_widgets.errors import AmpWidgetsError
from amp_widgets.language import in_language, set_language
from amp_widgets.recorded_run import open_run
from amp_widgets.session import AmpSession

pytest.importorskip("babel")
ROOT = Path(__file__).parent.parent


AS_THEY_ARE = (
    "No inf checks were recorded",
    "plan(budget_bytes=8e9, batch=batch, loss_fn=loss_fn)",
    "session.preflight(batch, loss_fn)",
)
"""What torch says itself, and code."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messages", ROOT / "tools" / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["messages"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def korean() -> Iterator[None]:
    set_language("ko")
    yield
    set_language(None)


def test_the_files_are_what_the_sources_make(tool: ModuleType) -> None:
    wrong = [path.name for path, content in tool.files().items() if not path.exists() or path.read_bytes() != content]
    assert wrong == [], "make messages"


def test_every_text_is_there_in_korean_with_its_placeholders(tool: ModuleType) -> None:
    missing, other = [], []
    for message in tool.renewed("ko"):
        if not message.id:
            continue
        texts = message.string if isinstance(message.string, tuple) else (message.string,)
        english = message.id[-1] if isinstance(message.id, tuple) else message.id
        if not all(texts):
            missing.append(message.id)
        for text in texts:
            if tool.placeholders(text) != tool.placeholders(english):
                other.append((english, text))
            list(string.Formatter().parse(text)) if tool.placeholders(english) else None  # raises where braces do not match
    assert missing == []
    assert other == []


def test_korean_is_korean(tool: ModuleType) -> None:
    """A sentence of several words has Hangul in it, and keeps code as it is."""
    left = []
    for message in tool.renewed("ko"):
        if message.id and isinstance(message.id, str):
            words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\{\w+\}", "", message.id))
            if len(words) > 3 and message.id not in AS_THEY_ARE and not re.search("[가-힣]", str(message.string)):
                left.append(message.id)
            for code in re.findall(r"\b(?:session|torch|scaler|optimizer)\.[\w.]+\(", message.id):
                if code not in str(message.string):
                    left.append(f"{code} in {message.id}")
    assert left == []


def test_the_tool_finds_what_is_said(tool: ModuleType, tmp_path: Path) -> None:
    code = '''
"""A docstring is not said."""
NAME = marked("a constant")
def f(x, n):
    """Nor is this."""
    raise ValueError(f"got {x!r}, expected {n:,} step{'s' * (n != 1)} of {x.name}")
    g(f"{say('inside of an f-string')}: {x}", say("with {name}", name=1), say_number("{count} thing", "{count} things", n))
    return "this is said" if x == "this is compared" else {"this is a key": 1}
'''
    tree = tool.ast.parse(code)
    assert set(tool._marked(tree)) == {
        "a constant", "inside of an f-string", "with {name}", ("{count} thing", "{count} things"),
    }  # fmt: skip
    assert set(tool._templates(tree, only_errors=False)) == {
        "got {x}, expected {n} step of {name}", "got {x}, expected {n} steps of {name}", "this is said",
    }  # fmt: skip
    assert set(tool._templates(tree, only_errors=True)) == {
        "got {x}, expected {n} step of {name}", "got {x}, expected {n} steps of {name}",
    }  # fmt: skip


# ---- sentences that are really made ----------------------------------------------------------------------------------


def made() -> AmpSession:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 2))
    return AmpSession(model, torch.optim.Adam(model.parameters(), lr=0.1))


ERRORS: dict[str, Callable[[AmpSession], Any]] = {
    "autocast: 받은 값: 'fp8'": lambda s: s.request(autocast="fp8"),
    "혹시 'fp16'?": lambda s: s.request(autocast="fp_16"),
    "init_scale: 받은 값: -1": lambda s: s.request(init_scale=-1),
    "growth_factor: 받은 값: 0.5": lambda s: s.request(growth_factor=0.5),
    "backoff_factor: 받은 값: 2": lambda s: s.request(backoff_factor=2),
    "growth_interval: 받은 값: 1.5": lambda s: s.request(growth_interval=1.5),
    "그런 설정이 없습니다": lambda s: s.request(colour="red"),
    "변경이 없습니다": lambda s: s.request(),
    "'nothing.*'에 맞는 레이어가 없습니다": lambda s: s.request(checkpointed=["nothing.*"]),
    "필요한 값: True 또는 False": lambda s: s.request(scaling="perhaps"),
    "max_scale": lambda s: s.request(min_scale=2.0**10, max_scale=2.0**4),
    "백그라운드 실행이 없습니다": lambda s: s.start(),
    "필요한 값: 0보다 큰 바이트 수": lambda s: setattr(s, "memory_budget", -5),
    "loss_fn으로 클래스 CrossEntropyLoss": lambda s: s.check((torch.ones(2, 3), torch.ones(2)), nn.CrossEntropyLoss),
    "받은 배치": lambda s: s.check(5, nn.functional.cross_entropy),
    "쓸 배치가 없습니다": lambda s: s.inspect("check"),
    "파일이 이미 있습니다": lambda s: s.record(__file__),
    "at_step: 받은 값: -1": lambda s: s.schedule(at_step=-1, autocast="fp16"),
    "every: 받은 값: -3": lambda s: s.count_gradients(every=-3),
    "스냅샷이 없습니다": lambda s: s.fork(at_step=0),
}


@pytest.mark.parametrize("expected", ERRORS)
def test_errors(expected: str, korean: None) -> None:
    with made() as session:
        with pytest.raises(AmpWidgetsError) as caught:
            ERRORS[expected](session)
        english = str(caught.value)
    told = in_language(english)
    assert expected in told
    assert not _english_words(told), told


def test_events_and_states_of_a_run(korean: None) -> None:
    with made() as session:
        session.request(autocast="fp16", init_scale=2.0**40, checkpointed=["2"])
        batches = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(4)]
        session.fit(batches, nn.functional.cross_entropy, epochs=2)
        assert session.wait(30)
        events = session.history.events()
        state = session.dashboard_state()
    reasons = [event.reason for event in events]
    assert len({event.kind for event in events}) >= 4
    told = {reason: in_language(reason) for reason in (*reasons, *state.notes, state.memory_source)}
    for support in state.support.values():
        told[support.note] = in_language(support.note)
    left = {english: korean for english, korean in told.items() if _english_words(korean)}
    assert left == {}
    assert in_language(describe_changes({"scaling": False, "checkpointed": ("a", "b")})) == "스케일링 끔, 레이어 2개 체크포인팅"


def test_what_was_recorded_stays_english(korean: None, tmp_path: Path) -> None:
    with made() as session:
        session.request(autocast="bf16")
        session.record(tmp_path / "run.db")
        session.fit([(torch.randn(4, 3), torch.randint(2, (4,)))], nn.functional.cross_entropy, epochs=2)
        assert session.wait(30)
        reasons = [event.reason for event in session.history.events()]
    assert not any(re.search("[가-힣]", reason) for reason in reasons)
    with open_run(tmp_path / "run.db") as run:
        assert [event.reason for event in run.history.events()] == reasons


CODE = frozenset(
    """
    autocast init_scale growth_factor backoff_factor growth_interval min_scale max_scale checkpointed fp32_layers scaling inf NaN
    fp16 fp32 bf16 fp64 cpu CPU CUDA dispatch mode True False None float max_scale session fork check inspect record every start
    snapshot loss_fn CrossEntropyLoss cross_entropy at_step memory_budget targets inputs model loss batches such request batch
    loader layers keep_snapshots AmpSession optimizer snapshot_every count_gradients fit dataloader MB count half red perhaps
    colour int dtype_map
    """.split()  # noqa: SIM905
)


def _english_words(text: str) -> list[str]:
    """Words that are no code: what was translated has few."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"|[\w/.-]+\.py\b|\w+\([^)]*\)|\w+\.\w+[\w.()]*|\d\S*|\w+=\S*", " ", text)
    return [word for word in re.findall(r"[A-Za-z_]{3,}", plain) if word not in CODE]
