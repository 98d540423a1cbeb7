"""Errors of number formats and of the format lab in Korean: what is told of them, and what was typed as it was typed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from amp_widgets.core.formats import FORMATS, fixed_point, format_of, int8, round_to, scaled_round_trip, update_survives
from amp_widgets.errors import FormatError
from amp_widgets.language import in_language, set_language
from amp_widgets.widgets.format_lab import FormatLab

FP16 = FORMATS["fp16"]
NAMES = "fp32, tf32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8"


@pytest.fixture(autouse=True)
def korean() -> Iterator[None]:
    set_language("ko")
    yield
    set_language(None)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: format_of("fp7"), f"형식: 받은 값: 'fp7', 필요한 값: {NAMES} 중 하나, 또는 fixed_point(before, after)"),
        (lambda: format_of("fp16", scale=2), "scale: 받은 값: fp16의 2. 스케일은 'int8'에만 지정합니다"),
        (lambda: int8(0), "int8: 받은 스케일: 0, 필요한 값: 0보다 큰 유한한 수. 예: 0.05"),
        (lambda: fixed_point(9, 9), "고정소수점: 받은 자릿수: 소수점 앞 9, 뒤 9. 필요한 값: 모두 합해 1~15자리"),
        (lambda: round_to("x", "fp16"), "value: 받은 값: 'x', 필요한 값: 실수 또는 실수의 배열"),
        (lambda: FP16.spacing([1, 2]), "value: 받은 값: [1, 2], 필요한 값: 수 하나"),
        (lambda: FP16.decode(1.5), "fp16: 받은 코드: 1.5, 필요한 값: 정수"),
        (lambda: FP16.decode(1 << 16), "fp16: 받은 코드: 65536, 필요한 값: 0~65535"),
        (lambda: FP16.flip(0, 16), "fp16: 받은 비트 번호: 16, 필요한 값: 0~15"),
        (lambda: int8().encode(math.nan), "int8: 저장할 수 없는 수입니다. 필요한 값: -128부터 127까지의 수. NaN은 안 됩니다"),
        (
            lambda: fixed_point().fields(3),
            "fixed 4+2: 3의 비트를 물었습니다. 비트가 있는 형식이 필요한데, 이 형식에는 십진 자릿수만 있습니다",
        ),
        (lambda: scaled_round_trip(1, 0, "fp16"), "scale: 받은 값: 0, 필요한 값: 0보다 큰 유한한 수. 예: 2**16"),
        (
            lambda: update_survives([1, 2], [1, 2, 3], 1, "fp16"),
            "w, g, lr: 받은 모양: (2,), (3,), (), 필요한 값: 서로 브로드캐스트할 수 있는 모양",
        ),
        (lambda: FormatLab("zwei"), "받은 값: 'zwei', 필요한 값: 0.1, 2e-8, 2**-24, 1/3 같은 수"),
        (lambda: FormatLab(weights={"a": (1,)}), "weights: 'a'에 받은 값: (1,), 필요한 값: (w, g)"),  # type: ignore[dict-item]
    ],
)
def test_an_error_in_korean(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(FormatError) as caught:
        call()
    assert in_language(str(caught.value)) == said


@pytest.mark.parametrize(
    ("message", "field", "said"),
    [
        (
            {"text": "1e999"},
            "text",
            "받은 값: '1e999', 필요한 값: float64로 나타낼 수 있는 수. 곧 0, 또는 크기가 4.9e-324에서 1.8e308까지인 수",
        ),
        ({"text": "1" * 90}, "text", "받은 글자 수: 90, 필요한 값: 0.1, 2e-8, 2**-24, 1/3 같은 수"),
        ({"int8_scale": "0"}, "int8_scale", "int8: 받은 스케일: 0.0, 필요한 값: 0보다 큰 유한한 수. 예: 0.05"),
        ({"digits": ["x", "2"]}, "digits", "고정소수점: 받은 자릿수: 소수점 앞 'x', 뒤 2. 필요한 값: 모두 합해 1~15자리"),
        ({"flip": ["fp16", 99]}, "flip", "fp16: 받은 비트 번호: 99, 필요한 값: 0~15"),
        ({"flip": ["fp7", 0]}, "flip", f"format: 받은 값: 'fp7', 필요한 값: {NAMES}, fixed 4+2 중 하나"),
    ],
)
def test_what_a_lab_says_of_what_was_typed(message: dict[str, Any], field: str, said: str) -> None:
    lab = FormatLab()
    lab._ask(message)
    assert lab.problems == {field: said}
    lab.close()
