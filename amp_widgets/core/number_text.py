"""Durations and ratios as text."""

from __future__ import annotations


def time_text(duration_s: float) -> str:
    """Three digits.

    >>> time_text(0.01234), time_text(2.5), time_text(0.000_04)
    ('12.3 ms', '2.5 s', '40 µs')
    """
    size, unit = next((each for each in _TIME_UNITS if duration_s >= each[0]), _TIME_UNITS[-1])
    return f"{duration_s / size:.3g} {unit}" if duration_s < 100 * size else f"{duration_s / size:,.0f} {unit}"


_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def ratio_text(ratio: float) -> str:
    """Two decimals, as long as they say something.

    >>> ratio_text(0.344), ratio_text(1234.5)
    ('×0.34', '×1,234')
    """
    return f"×{ratio:.2f}" if ratio < 9.995 else f"×{ratio:,.0f}"
