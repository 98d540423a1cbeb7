"""Sizes of memory as they are written, and what became of one, wherever it is said."""

from __future__ import annotations

from amp_widgets.language import say

FAR_APART = 50
"""Sizes so many times as large as each other are each written in a unit of its own."""
MOST_DIGITS = 3
_UNITS = ("kB", "MB", "GB", "TB")


def memory_text(size_bytes: float) -> str:
    """Bytes with one decimal, fit to be compared.

    >>> memory_text(104_390_000), memory_text(950), memory_text(0)
    ('104.4 MB', '950 B', '0 B')
    """
    if abs(size_bytes) < 1000:
        return f"{size_bytes:.0f} B"
    for unit in _UNITS:
        size_bytes /= 1000
        if abs(size_bytes) < 999.95 or unit == "TB":
            break
    return f"{size_bytes:,.1f} {unit}"


def pair_texts(before_bytes: float, after_bytes: float) -> tuple[str, str]:
    """Two sizes in one unit if they are not too far apart, with so many digits that they are seen to differ.

    >>> pair_texts(10_051_000, 5_249_000), pair_texts(10_140_000, 10_260_000), pair_texts(500_000_000, 900_000)
    (('10.1 MB', '5.2 MB'), ('10.14 MB', '10.26 MB'), ('500.0 MB', '900.0 kB'))
    """
    before, after, _ = _texts(before_bytes, after_bytes, agree=False)
    return before, after


def sizes_texts(before_bytes: float, after_bytes: float) -> tuple[str, str, str]:
    """Two sizes and how far they are apart, which is worked out in bytes and rounded then.

    They have as many digits, up to `MOST_DIGITS`, as the third needs to be the difference of the first two as they are written.

    >>> sizes_texts(185_100_000, 104_400_000), sizes_texts(10_051_000, 5_249_000), sizes_texts(10_140_000, 10_260_000)
    (('185.1 MB', '104.4 MB', '80.7 MB'), ('10.05 MB', '5.25 MB', '4.80 MB'), ('10.14 MB', '10.26 MB', '0.12 MB'))
    """
    return _texts(before_bytes, after_bytes, agree=True)


def difference_text(before_bytes: int, after_bytes: int) -> str:
    """What became of a peak, in bytes and per cent.

    >>> difference_text(185_100_000, 104_400_000)
    'peak 185.1 MB → 104.4 MB, 80.7 MB less (-43.6 %)'
    """
    before, after, apart = sizes_texts(before_bytes, after_bytes)
    values = {"before": before, "after": after, "apart": apart}
    if before_bytes == after_bytes:
        return say("peak {before} → {after}, the same", **values)
    share = f" ({100 * (after_bytes - before_bytes) / before_bytes:+.1f} %)" if before_bytes else ""
    if after_bytes > before_bytes:
        return say("peak {before} → {after}, {apart} more", **values) + share
    return say("peak {before} → {after}, {apart} less", **values) + share


def _texts(before_bytes: float, after_bytes: float, *, agree: bool) -> tuple[str, str, str]:
    small, large = sorted((abs(before_bytes), abs(after_bytes)))
    texts = memory_text(before_bytes), memory_text(after_bytes)
    apart_bytes = abs(after_bytes - before_bytes)
    same_unit = texts[0].split()[1] == texts[1].split()[1]
    if large < 1000 or small == large or not (same_unit or large <= FAR_APART * small):
        return *texts, memory_text(apart_bytes)
    unit = memory_text(large).split()[1]
    scale = 1000.0 ** (1 + _UNITS.index(unit))
    before, after, apart = before_bytes / scale, after_bytes / scale, apart_bytes / scale
    for digits in range(1, MOST_DIGITS + 1):
        written = round(abs(round(after, digits) - round(before, digits)), digits)
        if min(apart, small / scale) * 10**digits >= 10 and (not agree or written == round(apart, digits)):
            break
    if not written:
        return *texts, memory_text(apart_bytes)
    return f"{before:,.{digits}f} {unit}", f"{after:,.{digits}f} {unit}", f"{apart:,.{digits}f} {unit}"
