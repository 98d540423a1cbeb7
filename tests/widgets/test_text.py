from __future__ import annotations

import math
from typing import get_args

import pytest

from amp_widgets.analysis.inspections import InspectionKind
from amp_widgets.widgets import text


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (2.0**16, "2^16 = 65536"),
        (1.0, "2^0 = 1"),
        (2.0**40, "2^40 = 1099511627776"),
        (2.0**-3, "2^-3 = 0.125"),
        (2.0**90, "2^90"),
        (2.0**-60, "2^-60"),
        (1000.0, "1000"),
    ],
)
def test_scale(scale: float, expected: str) -> None:
    assert text.scale_text(scale) == expected


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (math.nan, "–"), (math.inf, "–"), (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (78_906_000, "78.9 MB"),
        (999_499, "999 kB"), (999_500, "1.00 MB"), (99_949, "99.9 kB"), (99_950, "100 kB"), (2.5e9, "2.50 GB"),
        (3e15, "3,000 TB"),
    ],
)  # fmt: skip
def test_bytes(size_bytes: float, expected: str) -> None:
    assert text.bytes_text(size_bytes) == expected


@pytest.mark.parametrize(
    ("duration_s", "expected"),
    [
        (math.nan, "–"),
        (2e-5, "20.0 µs"),
        (0.01234, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (2.5, "2.50 s"),
        (1234, "1,234 s"),
    ],
)  # fmt: skip
def test_seconds(duration_s: float, expected: str) -> None:
    assert text.seconds_text(duration_s) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0"), (999, "999"), (1000, "1.00 k"), (1_234_567, "1.23 M"), (7 * 10**12, "7.00 T")]
)
def test_counts(count: int, expected: str) -> None:
    assert text.count_text(count) == expected


@pytest.mark.parametrize("value", [2.0, 0.5, 2000, 1e-7, 1.0000001, 3e20])
def test_a_number_reads_back_as_the_same(value: float) -> None:
    assert float(text.number_text(value)) == value


def test_numbers_are_short() -> None:
    assert (text.number_text(2.0), text.number_text(2000), text.number_text(0.5)) == ("2", "2000", "0.5")


def test_a_loss_that_is_no_number_is_shown_as_it_is() -> None:
    assert (text.loss_text(math.nan), text.loss_text(math.inf), text.loss_text(0.123456)) == ("nan", "inf", "0.1235")


@pytest.mark.parametrize(
    ("what", "why_not", "expected"),
    [
        ("check", "check: the batch is no pair", "Check not run: the batch is no pair"),
        ("preflight", "ValueError: no", "Preflight not run: ValueError: no"),
        ("dtype_map", "dtype_map: TypeError: a: b", "Map not taken: TypeError: a: b"),
        ("precision", "precision_cost: the model is compiled", "Precision not measured: the model is compiled"),
        ("precision_fp64", "precision_fp64: it was interrupted", "Precision not measured: it was interrupted"),
        ("count_gradients", "count_gradients: this session was closed", "Gradients not sampled: this session was closed"),
        ("profile_next_step", "profile_next_step: closed", "Step not profiled: closed"),
        ("check", "check", "Check not run: check"),
    ],
)
def test_what_was_not_done_says_so_and_why(what: str, why_not: str, expected: str) -> None:
    assert text.not_done_text(what, why_not) == expected


def test_every_inspection_has_words_for_when_it_is_not_made() -> None:
    for kind in get_args(InspectionKind):
        assert text.not_done_text(kind, "x").endswith(": x")
