from __future__ import annotations

import doctest

import numpy as np
import pytest

from amp_widgets import size_text
from amp_widgets.charts.mountain import mountain_sentence
from amp_widgets.size_text import difference_text, memory_text, sizes_texts
from tests.core.memory.test_profile import made


def test_the_examples_are_right() -> None:
    assert doctest.testmod(size_text).failed == 0


def test_sizes() -> None:
    texts = ["0 B", "999 B", "1.0 kB", "104.4 MB", "999.9 kB", "1.0 MB", "3.0 TB", "5,000.0 TB"]
    assert [memory_text(size) for size in (0, 999, 1000, 104_390_000, 999_949, 999_950, 3e12, 5e15)] == texts


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (185_100_000, 104_400_000, "peak 185.1 MB → 104.4 MB, 80.7 MB less (-43.6 %)"),
        (1000, 1500, "peak 1.00 kB → 1.50 kB, 0.50 kB more (+50.0 %)"),
        (1000, 1000, "peak 1.0 kB → 1.0 kB, the same"),
        (0, 10, "peak 0 B → 10 B, 10 B more"),
        (10_051_000, 5_249_000, "peak 10.05 MB → 5.25 MB, 4.80 MB less (-47.8 %)"),  # 4.8 is not the difference of 10.1 and 5.2
        (10_140_000, 10_260_000, "peak 10.14 MB → 10.26 MB, 0.12 MB more (+1.2 %)"),
        (1_249_000_000, 950_000_000, "peak 1.25 GB → 0.95 GB, 0.30 GB less (-23.9 %)"),
        (500_000_000, 900_000, "peak 500.0 MB → 900.0 kB, 499.1 MB less (-99.8 %)"),
        (10_141_000, 10_141_100, "peak 10.1 MB → 10.1 MB, 100 B more (+0.0 %)"),
        (7_149_000, 3_551_000, "peak 7.15 MB → 3.55 MB, 3.60 MB less (-50.3 %)"),  # 3.5 with one digit each, 3.6 in bytes
    ],
)
def test_what_became_of_a_peak(before: int, after: int, text: str) -> None:
    assert difference_text(before, after) == text


@pytest.mark.parametrize("seed", range(3))
def test_a_difference_is_that_in_bytes_and_that_of_the_sizes_as_they_are_written(seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    compared = 0
    for _ in range(2000):
        before = int(10 ** random.uniform(3, 12))
        after = int(before * 10 ** random.uniform(-1, 1))
        texts = sizes_texts(before, after)
        numbers = [text.split()[0].replace(",", "") for text in texts]
        units = {text.split()[1] for text in texts}
        if len(units) > 1:
            continue
        compared += 1
        one, two, apart = map(float, numbers)
        digits = len(numbers[2].partition(".")[2])
        assert abs(two - one) == pytest.approx(apart, abs=1e-9 if digits < size_text.MOST_DIGITS else 1.5e-3), texts
        scale = 1000.0 ** ("B", "kB", "MB", "GB", "TB").index(units.pop())
        half = 0.5 * 10.0**-digits
        assert abs(apart - abs(after - before) / scale) <= half * (1 + 1e-6), (before, after, texts)
    assert compared > 1000


def test_a_profile_and_its_picture_say_the_same() -> None:
    before, after = made(bytes_by_kind=made().bytes_by_kind * 14_321), made(bytes_by_kind=made().bytes_by_kind * 7_109)
    assert before.difference_text(after).endswith(f": {mountain_sentence((before, after))}")
