"""Finished sentences are recognized by the catalogue's templates: each template with values such as there are, and real ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from amp_widgets import language
from amp_widgets.analysis.parity import Difference
from amp_widgets.core.memory.autopsy import autopsy
from amp_widgets.core.memory.budget import MemoryBudgetError
from amp_widgets.core.memory.death import Death
from amp_widgets.demos import demo
from amp_widgets.errors import AmpWidgetsError
from amp_widgets.language import in_language, set_language
from amp_widgets.runs_comparison import compare_runs
from amp_widgets.session import AmpSession
from amp_widgets.widgets.presenting_control import present, present_in_cell

NUMBERS = ("12", "1,024", "7")
NAMES = ("layers.0", "3", "'fp8'", "'loss'")
"""Of a layer, of one in a Sequential, what was typed, and that as a word of the catalogue."""
LISTS = ("fp16, bf16", "'loss', 'memory'", "digits, text, underflow, overflow")
"""Of names that can be typed; some are words of the catalogue elsewhere."""
SHAPED = {
    "fixed": "15.3 MB", "requested_bytes": "786.4 kB", "scale": "2^16", "given": "'zzz'", "count": "12", "count2": "1,024",
    "step": "7", "at_step": "7", "last_step": "1,024", "nonfinite": "0.3 %",
}  # fmt: skip
"""Placeholders that are recognized by what they look like."""
JOINTS = ",;: "
NOT_BY_ITSELF = {
    "{format} at {scale}{value}: {loses}, {overflow}": "made of sentences; what it makes is in the catalogue as a whole",
}
"""Texts that are recognized with figures at most, having next to no letters of their own, and why that is enough."""
BEFORE_A_LIST = re.compile(r"(?:one of|one or more of|such as|some of|all of) $")


@pytest.fixture(autouse=True)
def korean() -> Iterator[None]:
    set_language("ko")
    yield
    set_language(None)


def templates() -> dict[str, str]:
    """Each text with placeholders, and what it is in Korean."""
    found = language._read("ko")
    texts = {key if isinstance(key, str) else key[0]: text for key, text in found._messages.items()}
    texts |= {many: found._messages[one, 0] for many, one in found._plurals.items()}
    return {english: text for english, text in texts.items() if positions(english)}


def letters(text: str) -> int:
    return len(re.findall("[A-Za-z]", re.sub(r"\{\w+\}", "", text)))


def in_a_row(english: str) -> set[str]:
    """The placeholders that follow another one at once: what they stand for begins with a comma or so, or is nothing."""
    return {name for name, at in positions(english).items() if re.search(r"(?<!})}$", english[:at])}


def positions(english: str) -> dict[str, int]:
    return {found[1]: found.start() for found in re.finditer(r"(?<!\{)\{(\w+)\}(?!\})", english)}


def alike(english: str) -> str:
    return re.sub(r"\{\w+\}", "{}", english).lstrip(JOINTS)


def wrong(value: Callable[[str, str], str | None]) -> dict[str, tuple[str, str]]:
    """What is not as it should be where `value` of a text and a placeholder stands for that; the others are named `layers.1`."""
    found = {}
    all_texts = templates()
    twins: dict[str, list[str]] = {}  # such as " on {device}" and " on {system}", which nothing tells apart
    for english in all_texts:
        twins.setdefault(alike(english), []).append(english)
    for english in all_texts.keys() - NOT_BY_ITSELF.keys():
        given = {name: value(english, name) for name in positions(english)}
        if all(one is None for one in given.values()):
            continue
        short = letters(english) < language.LEAST_LETTERS
        filled = {
            name: "" if name in in_a_row(english) else NUMBERS[place % 3] if short else SHAPED.get(name) or one or "layers.1"
            for place, (name, one) in enumerate(given.items())
        }
        told = in_language(english.format(**filled))
        expected = [
            all_texts[twin].format(**dict(zip(positions(twin), filled.values(), strict=True)))
            for twin in twins[alike(english)]
        ]
        if told.lstrip(JOINTS) not in [one.lstrip(JOINTS) for one in expected]:
            found[english.format(**filled)] = (told, expected[0])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_template_is_recognized_with_its_values(name: str) -> None:
    assert wrong(lambda english, placeholder: name) == {}


@pytest.mark.parametrize("name", ["loss", "memory", "checkpointed"])
def test_a_name_before_a_colon_stays(name: str) -> None:
    assert wrong(lambda english, one: name if english.startswith(f"{{{one}}}: ") else None) == {}


@pytest.mark.parametrize("names", LISTS)
def test_lists_of_what_can_be_typed_stay(names: str) -> None:
    def value(english: str, placeholder: str) -> str | None:
        return names if BEFORE_A_LIST.search(english[: positions(english)[placeholder]]) else None

    assert sum(value(english, one) is not None for english in templates() for one in positions(english)) > 20
    assert wrong(value) == {}


# ---- errors that say what can be typed --------------------------------------------------------------------------------


SETTINGS = (
    "autocast, scaling, init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, checkpointed, "
    "fp32_layers"
)
ONE_OF = "다음 중 하나가 필요합니다: 'fp32', 'fp16', 'bf16'"
NO_LAYER = "에 맞는 레이어가 없습니다; 이 모델의 레이어는 5개입니다. 예: '0', '1', '2'"
COLUMNS = "step, time_s, loss, scale, skipped, step_s, allocated_bytes, peak_bytes, reserved_bytes"
BATCH = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
LOSS = nn.functional.cross_entropy
ERRORS: dict[str, Callable[[AmpSession], Any]] = {
    f"autocast: 받은 값: None, {ONE_OF}; 혹시 'fp32'?": lambda s: s.request(autocast=None),
    f"autocast: 받은 값: 'loss', {ONE_OF}": lambda s: s.request(autocast="loss"),
    f"nope: 그런 설정이 없습니다. 필요한 값: {SETTINGS} 중 하나": lambda s: s.request(nope=1),
    f"memory: 그런 설정이 없습니다. 필요한 값: {SETTINGS} 중 하나": lambda s: s.request(memory=1),
    "init_scales: 그런 설정이 없습니다. 혹시 'init_scale'?": lambda s: s.request(init_scales=1),
    "scaling: 받은 값: None, 필요한 값: True 또는 False": lambda s: s.request(scaling=None),
    "init_scale: 받은 값: 'loss', 필요한 값: 수": lambda s: s.request(init_scale="loss"),
    "growth_factor: 받은 값: 'memory', 필요한 값: 수": lambda s: s.request(growth_factor="memory"),
    f"checkpointed: 'zzz'{NO_LAYER}": lambda s: s.request(checkpointed=["zzz"]),
    f"fp32_layers: 'loss'{NO_LAYER}": lambda s: s.request(fp32_layers=["loss"]),
    "checkpointed: '2.9'에 맞는 레이어가 없습니다; 혹시 '2.1' 또는 '2.0'?": lambda s: s.request(checkpointed=["2.9"]),
    "checkpointed: 받은 값: 5, 필요한 값: 레이어 이름이나 글롭. 예: ['layers.*']": lambda s: s.request(checkpointed=5),
    f"x: 그런 열이 없습니다. 필요한 값: {COLUMNS} 중 하나": lambda s: s.history.columns("x"),
    f"memory: 그런 열이 없습니다. 필요한 값: {COLUMNS} 중 하나": lambda s: s.history.last("memory"),
    "inspect: 받은 값: 'memory', 필요한 값: 'dtype_map', 'check', 'preflight', 'precision', 'precision_fp64', 'plan', "
    "'largest_batch', 'predict_on_cuda' 중 하나": lambda s: s.inspect("memory"),  # type: ignore[arg-type]
    "plotly: 받은 값: 'all', 필요한 값: 'inline', 'link', 'none' 중 하나": lambda s: s.export_html("a.html", plotly="all"),
    "language: 받은 값: 'off', 필요한 값: en (English), ko (한국어) 중 하나": lambda s: set_language("off"),
    "theme: 받은 값: 'blue', 필요한 값: 'notebook', 'light', 'dark', 'high-contrast' 중 하나": lambda s: present(theme="blue"),
    "type_size: 받은 값: 'small', 필요한 값: 'normal', 'large', 'very-large' 중 하나": lambda s: present(type_size="small"),
    "%amp present: 받은 값: 'huge', 필요한 값: 크기(normal, large, very-large), 테마(notebook, light, dark, high-contrast), "
    "또는 둘 다": lambda s: present_in_cell(["huge"]),
    "demo: 받은 값: 'memory', 필요한 값: 'digits', 'text', 'underflow', 'overflow' 중 하나, 또는 상황 하나: 'scaling-off', "
    "'first-scale', 'growth', 'bf16-fp16', 'memory-wall', 'both', 'batchnorm', 'speed'": lambda s: demo("memory"),
    "compare_runs: 받은 align: 'time_s', 필요한 값: 'step' 또는 'time'": lambda s: compare_runs(s, s, align="time_s"),
    "to_figure: 받은 metrics: ['memory'], 필요한 값: loss, scale, peak, allocated, step_s 중 하나 이상": lambda s: compare_runs(
        s
    ).to_figure(metrics=["memory"]),
    "note: 받은 값 5, 'warm-up is over' 같은 텍스트가 필요합니다": lambda s: s.note(5),  # type: ignore[arg-type]
    "layer_profile: 'loss'에 맞는 레이어가 없습니다. 필요한 값: 0, 1, 2, 2.0, 2.1 중 하나, 또는 '**' 같은 글롭": lambda s: (
        s.layer_profile(BATCH, LOSS, layers="loss")
    ),
    "plan: budget_bytes: 받은 값: 'memory', 필요한 값: 0보다 큰 바이트 수(예: 8 GB는 8e9), 또는 \"8 GB\"": lambda s: s.plan(
        budget_bytes="memory", batch=BATCH, loss_fn=LOSS
    ),
    "profile_step: 받은 loss_fn: str 객체, 필요한 값: loss_fn(model(inputs), targets)에 쓸 함수. 예: "
    "torch.nn.functional.cross_entropy": lambda s: s.profile_step(BATCH, "mse"),  # type: ignore[arg-type]
    "check: 받은 배치: int 객체, 필요한 값: loss_fn(model(inputs), targets)에 쓸 (inputs, targets)": lambda s: s.check(5, LOSS),  # type: ignore[arg-type]
    "record: /nowhere/r.db: 그런 파일이나 폴더가 없습니다; 있고 쓸 수 있는 폴더를 고르세요": lambda s: s.record("/nowhere/r.db"),
}


@pytest.mark.parametrize("korean_sentence", ERRORS)
def test_what_is_typed_stays_as_it_is(korean_sentence: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 2), nn.ReLU()))
    with AmpSession(model, torch.optim.Adam(model.parameters())) as session, pytest.raises(AmpWidgetsError) as caught:
        ERRORS[korean_sentence](session)
    assert in_language(str(caught.value)) == korean_sentence


MAGICS = {
    "demo digits text": "%amp demo: 받은 이름 2개, 필요한 값: digits, text, underflow, overflow 중 하나, 또는 상황 하나",
    "lang a b": "%amp lang: 받은 단어 2개, 필요한 값: en, ko 중 하나",
    "set": f"%amp set: 설정할 것이 없습니다. 필요한 값: NAME=VALUE, NAME은 {SETTINGS} 중 하나",
    "set loss": f"%amp set: 받은 값: 'loss', 필요한 값: NAME=VALUE, NAME은 {SETTINGS} 중 하나",
    "set init_scale=loss": "%amp set init_scale: 받은 값: 'loss', 필요한 값: 0.5, 100, 2**16 같은 수, 또는 on, off, none",
}


@pytest.mark.parametrize("line", MAGICS)
def test_what_is_typed_in_a_line_stays_as_it_is(line: str) -> None:
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "amp_widgets")
    try:
        with pytest.raises(AmpWidgetsError) as caught:
            shell.run_line_magic("amp", line)
    finally:
        shell.run_line_magic("unload_ext", "amp_widgets")
        InteractiveShell.clear_instance()
    assert in_language(str(caught.value)) == MAGICS[line]


# ---- reports ----------------------------------------------------------------------------------------------------------


def figures_of(text: str) -> list[str]:
    return sorted(re.findall(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d", re.sub(r"fp\d+|bf16", "", text)))


def without_figures(text: str) -> str:
    return re.sub(r"(?<![\w.])\d[\d,.]*(?= (?:B|[kMG]B|ms|%))", "#", text)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + cast(torch.Tensor, self.down(nn.functional.gelu(self.up(x))))


def report(budget: float, *, batch: int = 128, before: int = 0) -> list[str]:
    """Of a step above a budget, in a model whose layers are named ``0`` to ``4``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), Block(16), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(batch, 8), torch.randint(4, (batch,))

    def step() -> None:
        LOSS(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with AmpSession(model, optimizer) as session:
        for _ in range(before):
            step()
        session.memory_budget = budget
        with pytest.raises(MemoryBudgetError):
            step()
        assert session.out_of_memory is not None
        return list(session.out_of_memory.report)


HELD = "추정: 배치를 지금의 # % 이하로 줄였다면 이 연산자와 그래디언트를 지났을 것입니다. 차지한 것 중 # kB는 배치와 "
KINDS_HELD = "상관없습니다 (파라미터, 그래디언트, 옵티마이저 상태, 버퍼)"
REST = "; 나머지는 배치와 함께 줄어듭니다; 그 뒤에 올 것은 알 수 없습니다."
REPORTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "in the forward pass": (
        {"budget": 250e3},
        [
            "스텝 0에서 메모리 부족 (fp32) 순전파 중 3에서, 예산 # kB 초과",
            "aten::gelu 연산자가 # kB 요청 (활성값), 이미 # kB 차지; 예산 # kB, # kB 부족.",
            "그 순간 차지한 것: 활성값 # kB (# %), 파라미터 # kB (# %), 기타 # kB (# %).",
            "그 순간 가장 많이 차지한 레이어(파라미터와 옵티마이저 상태 포함, 그 안의 레이어는 제외): 1 # kB, 2 # kB, 1.up # kB.",
            "추정: 2도 체크포인팅했다면 그 순간 # kB 적어서 이 연산자를 지났을 것입니다, 약 # ms 추가; "
            "그 뒤에 올 것은 알 수 없습니다.",
            "추정: autocast bf16/fp16: 최대 # kB 줄어듭니다. 이 연산자는 지났을 수 있습니다; 그 뒤에 올 것은 알 수 없습니다. "
            "활성값이 절반이 된다고 가정했고, 활성값이 행렬곱과 합성곱에서 나올 때 맞습니다.",
            f"{HELD}{KINDS_HELD}, 그리고 # kB의 그래디언트가 아직 남아 있었습니다{REST}",
            "스텝의 나머지, 특히 역전파에 필요한 양은 알 수 없습니다. 거기까지 가지 못했습니다.",
        ],
    ),
    "in the optimizer's step": (
        {"budget": 60e3, "batch": 4},
        [
            "스텝 0에서 메모리 부족 (fp32) 옵티마이저 스텝에서, 예산 # kB 초과",
            "aten::zeros_like 연산자가 # kB 요청, 이미 # kB 차지; 예산 # kB, # kB 부족.",
            "그 순간 차지한 것: 파라미터 # kB (# %), 그래디언트 # kB (# %), 옵티마이저 상태 # kB (# %), 기타 # B (# %).",
            "그 순간 가장 많이 차지한 레이어(파라미터와 옵티마이저 상태 포함): 1.up # kB, 2.up # kB, 3.up # kB.",
            "체크포인팅해도 비는 것이 없었을 것입니다. 켤 수 있는 레이어 중 활성값을 가진 것이 없었습니다.",
            f"{HELD}{KINDS_HELD}{REST}",
            "옵티마이저의 스텝이 중단되었습니다. 갱신된 파라미터와 갱신되지 않은 파라미터가 섞여 있을 수 있습니다.",
        ],
    ),
    "before anything": (
        {"budget": 30e3, "before": 2},
        [
            "스텝 2에서 메모리 부족: 모델, 그래디언트, 옵티마이저 상태, 배치만으로 # kB가 필요하고 예산은 # kB입니다",
            "aten::addmm 연산자가 # kB 요청 (활성값), 이미 # kB 차지; 예산 # kB, # kB 부족.",
            "그 순간 차지한 것: 옵티마이저 상태 # kB (# %), 파라미터 # kB (# %), 기타 # kB (# %).",
            "그 순간 가장 많이 차지한 레이어(파라미터와 옵티마이저 상태 포함): 1.up # kB, 2.up # kB, 3.up # kB.",
            "배치 크기, autocast, 체크포인팅 어느 것으로도 바꿀 수 없습니다. "
            "차지한 것은 스텝이 무엇을 계산하기 전부터 있던 것입니다.",
        ],
    ),
}


@pytest.mark.parametrize("case", REPORTS)
def test_a_report_of_a_step_that_ran_out_of_memory(case: str) -> None:
    options, expected = REPORTS[case]
    english = report(**options)
    told = [in_language(line) for line in english]
    assert [without_figures(line) for line in told] == expected
    assert [figures_of(line) for line in told] == [figures_of(line) for line in english]


def death_on(device: str, phase: str, layer: str) -> str:
    found = autopsy(
        Death(cause="allocator", device=device, phase=phase, layer=layer), step=3, settings_text="fp16 + 2 layers checkpointed",
        autocast="fp16", formats=(), layers=(), source="",
    )  # fmt: skip
    return str(found).splitlines()[0]


def test_the_heading_of_a_report_on_a_gpu() -> None:
    assert [death_on("cuda:0", *where) for where in (("", ""), ("backward", ""), ("recompute", "3"), ("", "layers.0.mlp"))] == [
        "스텝 3에서 cuda:0 메모리 부족 (fp16 + 레이어 2개 체크포인팅)",
        "스텝 3에서 cuda:0 메모리 부족 (fp16 + 레이어 2개 체크포인팅) 역전파에서",
        "스텝 3에서 cuda:0 메모리 부족 (fp16 + 레이어 2개 체크포인팅) 재계산 중 3에서",
        "스텝 3에서 cuda:0 메모리 부족 (fp16 + 레이어 2개 체크포인팅) 스텝 중 layers.0.mlp에서",
    ]


def test_what_a_check_of_parity_says() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 2)))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        alone = session.check(BATCH, LOSS)
        session.request(checkpointed=["2"])
        LOSS(model(BATCH[0]), BATCH[1]).backward()
        session.optimizers[0].step()
        found = session.check(BATCH, LOSS)
    assert in_language(alone.verdict) == (
        "체크포인팅된 레이어가 없고, 두 번째 실행이 비트까지 같았습니다: 손실, 그래디언트 6개, 버퍼 3개, 난수 상태 3개."
    )
    assert in_language(found.verdict) == (
        "체크포인팅 없는 실행과 비트까지 같습니다: 손실, 그래디언트 6개, 버퍼 3개, 난수 상태 3개."
    )

    def other(kind: Any, name: str, largest: float = 2e-3) -> Difference:
        return Difference(kind=kind, name=name, text="", largest=largest, relative=largest)

    gradients = tuple(other("gradient", f"2.1.{name}") for name in ("weight", "bias"))
    states = (other("random", "cpu", float("nan")),)
    differ = dataclasses.replace(found, differences=(*gradients, other("buffer", "1.running_mean"), *states))
    assert in_language(differ.verdict) == (
        "체크포인팅 때문에 달라진 것: 그래디언트 2개, 버퍼 1개, 난수 상태 1개; 처음 2.1.weight의 그래디언트, 차이 2.0e-03."
    )
    differ = dataclasses.replace(found, differences=(other("loss", ""), *gradients), blamed=("2", "layers.0"))
    assert in_language(differ.verdict) == (
        "체크포인팅 때문에 달라진 것: 손실, 그래디언트 2개; 처음 손실, 차이 2.0e-03. 체크포인팅 때문입니다: '2', 'layers.0'."
    )
    differ = dataclasses.replace(found, reproducible=False, differences=states, noise=states)
    assert in_language(differ.verdict) == (
        "판단할 수 없습니다. 이 모델은 체크포인팅 없이도 두 번 같은 결과를 내지 않습니다. 그런 두 실행의 차이: 난수 상태 1개; "
        "처음 cpu의 난수 상태."
    )
