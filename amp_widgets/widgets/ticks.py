"""Layers that are ticked one by one, and asked for all together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def with_tick(names: Iterable[str], name: str, on: bool, order: Mapping[str, int]) -> tuple[str, ...]:
    """The names with one more or less of them, in the model's order; those that the model does not have come last.

    >>> with_tick(("head", "gone"), "stem", True, {"stem": 0, "head": 1})
    ('stem', 'head', 'gone')
    """
    wanted = {one for one in names if one != name} | ({name} if on else set())
    return tuple(sorted(wanted, key=lambda one: (order.get(one, len(order)), one)))
