"""Which layers to checkpoint: the cheapest set within a budget at every moment, by a mixed-integer program or greedily."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

ChosenBy = Literal["scipy milp", "greedy"]
Numbers = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """What can be chosen from; sets of positions are chosen.

    Attributes
    ----------
    held_bytes
        At each moment when nothing is chosen, shape (moments,).
    change_bytes
        By how much each candidate changes that, shape (candidates, moments); negative is less.
    cost_s
        Of each candidate, seconds; shape (candidates,).
    exclusive
        Pairs of candidates that do not go together.
    check
        Called now and then in a search; what it raises ends it.
    """

    held_bytes: Numbers
    change_bytes: Numbers
    cost_s: Numbers
    exclusive: Sequence[tuple[int, int]] = ()
    check: Callable[[], None] = lambda: None

    def peak_bytes(self, chosen: Iterable[int]) -> float:
        """The most that is held with these chosen."""
        return float(self._held(chosen).max())

    def total_s(self, chosen: Iterable[int]) -> float:
        """What these cost."""
        return float(sum(self.cost_s[one] for one in chosen))

    def cheapest(
        self, budget_bytes: float, *, without: Iterable[Collection[int]] = (), time_limit_s: float = 2.0
    ) -> frozenset[int] | None:
        """The set that stays within the budget at the least cost; None where there is none.

        Parameters
        ----------
        budget_bytes
            At no moment is more held.
        without
            Sets that are not to be given.
        time_limit_s
            After that, the best that was found; only without scipy it is found greedily, see `chosen_by`.
        """
        if self.peak_bytes(()) <= budget_bytes and frozenset() not in map(frozenset, without):
            return frozenset()
        if _milp() is None:
            return self.greedily(budget_bytes, without=without)
        return _Program(self, budget_bytes, without, time_limit_s).solve()

    def least(self, *, time_limit_s: float = 2.0) -> frozenset[int]:
        """A set with about the lowest peak; of several, a cheap one."""
        found = self._least_greedily() if _milp() is None else _Program(self, None, (), time_limit_s).solve()
        found = frozenset() if found is None else found
        return min((frozenset[int](), found), key=self.peak_bytes)

    def by_bytes_per_second(self) -> list[int]:
        """The candidates, those first that save most for what they cost: in this order most people would choose."""
        saved = -self.change_bytes.min(axis=1, initial=0.0)
        ratio = saved / np.maximum(self.cost_s, _NO_COST_S)
        excluded = self._excluded()
        order: dict[int, None] = {}
        for one in sorted(range(len(saved)), key=lambda one: -ratio[one]):
            if saved[one] > 0 and not excluded[one] & order.keys():
                order[one] = None
        return list(order)

    def greedily(self, budget_bytes: float, *, without: Iterable[Collection[int]] = ()) -> frozenset[int] | None:
        """Add what lowers the excess most for its cost until nothing is above the budget; then leave out what is not needed.

        Returns
        -------
        frozenset of int or None
            None where that leads to nothing, or to one of the sets `without`.
        """
        without = set(map(frozenset, without))
        excluded = self._excluded()
        chosen: set[int] = set()
        held = self.held_bytes.copy()
        while held.max() > budget_bytes:
            self.check()
            above = held > budget_bytes
            excess = float((held[above] - budget_bytes).sum())
            left = np.maximum(held[above] + self.change_bytes[:, above] - budget_bytes, 0.0).sum(axis=1)
            ratio = (excess - left) / np.maximum(self.cost_s, _NO_COST_S)
            ratio[[*chosen, *(other for one in chosen for other in excluded[one])]] = 0.0
            best = int(ratio.argmax()) if len(ratio) else -1
            if best < 0 or ratio[best] <= 0.0:
                best = self._in_exchange(chosen, excluded, held, budget_bytes, excess)
                if best < 0:
                    return None
            chosen = (chosen - excluded[best]) | {best}
            held = self._held(chosen)
        for one in sorted(chosen, key=lambda one: -self.cost_s[one]):
            rest = chosen - {one}
            if self.peak_bytes(rest) <= budget_bytes and frozenset(rest) not in without:
                chosen = rest
        return None if frozenset(chosen) in without else frozenset(chosen)

    def _in_exchange(
        self, chosen: set[int], excluded: Sequence[set[int]], held: Numbers, budget_bytes: float, excess: float
    ) -> int:
        """What lowers the excess most in the place of those that do not go together with it; -1 where nothing does."""
        best, best_left = -1, excess
        for one in range(len(self.cost_s)):
            if one not in chosen and (gone := excluded[one] & chosen):
                changed = held + self.change_bytes[one] - self.change_bytes[sorted(gone)].sum(axis=0)
                left = float(np.maximum(changed - budget_bytes, 0.0).sum())
                if left < best_left * (1 - 1e-9):
                    best, best_left = one, left
        return best

    def _least_greedily(self) -> frozenset[int] | None:
        """By halving the budgets for which the greedy choice finds something."""
        low, high = 0.0, self.peak_bytes(())
        best: frozenset[int] | None = None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = self.greedily(middle)
            if found is None:
                low = middle
            else:
                best, high = found, self.peak_bytes(found)
        return best

    # ---- private ----------------------------------------------------------------------------------------------------

    def _held(self, chosen: Iterable[int]) -> Numbers:
        sums: Numbers = self.held_bytes + self.change_bytes[sorted(chosen)].sum(axis=0)
        return sums

    def _excluded(self) -> list[set[int]]:
        """Of each candidate, those that do not go together with it."""
        excluded: list[set[int]] = [set() for _ in self.cost_s]
        for one, other in self.exclusive:
            excluded[one].add(other)
            excluded[other].add(one)
        return excluded


def chosen_by() -> ChosenBy:
    """How it is chosen: without scipy, greedily."""
    return "greedy" if _milp() is None else "scipy milp"


_NO_COST_S = 1e-9
"""For ratios: less than this is as good as nothing."""
_HALVINGS = 20
_FIRST_ROWS = 24
_MORE_ROWS = 24
_ROUNDS = 40
_GAP = 1e-3
"""A set is the cheapest when no other can be cheaper by more than this share."""
_INFEASIBLE = 2
_LEAST_S = 0.02
"""For each round, also when the time for all of them is over: most take less."""


class _Program:
    """The choice as a mixed-integer program: with a budget the cost is lowered, else the peak.

    There are thousands of moments, of which a few decide. So it begins with some of them, and those at which a solution is
    above the budget are added, until there are none.
    """

    def __init__(
        self, choice: Choice, budget_bytes: float | None, without: Iterable[Collection[int]], time_limit_s: float
    ) -> None:
        self._choice = choice
        self._budget = budget_bytes
        self._without = [frozenset(each) for each in without]
        self._time_limit_s = time_limit_s
        self._unit = max(float(choice.held_bytes.max()), 1.0)
        self._count = len(choice.cost_s)
        self._outer = sorted(set(choice.exclusive))

    def solve(self) -> frozenset[int] | None:
        """The best set; None where there is none, or none was found in time."""
        choice, budget = self._choice, self._budget
        if not self._count:
            return None
        moments = set(np.argsort(choice.held_bytes)[::-1][:_FIRST_ROWS].tolist())
        best: frozenset[int] | None = None
        lowest = math.inf
        until_s = time.perf_counter() + self._time_limit_s
        for _ in range(_ROUNDS):
            choice.check()
            solved = self._solve(sorted(moments), max(until_s - time.perf_counter(), _LEAST_S))
            if solved is None:
                return best
            found, bound_bytes = solved
            held = choice._held(found)
            if held.max() < lowest:
                lowest = float(held.max())
                best = found if budget is None else best
            limit = bound_bytes if budget is None else budget
            above = np.flatnonzero(held > limit + 1e-6 * self._unit * (budget is None))
            if not len(above):
                return found
            new = [int(at) for at in above[np.argsort(held[above])[::-1]] if int(at) not in moments][:_MORE_ROWS]
            moments.update(new)
            if not new:  # above by what the solver takes for nothing
                if budget is None:
                    return best
                self._without.append(found)
        return best

    def _solve(self, moments: Sequence[int], time_limit_s: float) -> tuple[frozenset[int], float] | None:
        """The best by these moments alone, and the peak that it has then."""
        from scipy.optimize import Bounds, LinearConstraint

        choice, count, unit = self._choice, self._count, self._unit
        free_peak = self._budget is None
        columns = count + free_peak
        held, change = choice.held_bytes[moments] / unit, choice.change_bytes[:, moments].T / unit
        rows = np.zeros((len(moments), columns))
        rows[:, :count] = change
        upper = -held
        if free_peak:
            rows[:, -1] = -1.0
        else:
            upper = upper + float(self._budget or 0.0) / unit
        more, at_most = self._exclusions(columns)
        matrix, limits = np.concatenate([rows, more]), np.concatenate([upper, at_most])
        total_s = float(choice.cost_s.sum()) or 1.0
        weights = choice.cost_s / total_s + 1e-6 / count  # of two that cost the same, the fewer layers
        goal = np.concatenate([_PEAK_FIRST * weights, [1.0]]) if free_peak else weights
        solved: Any = _milp()(
            goal,
            constraints=LinearConstraint(matrix, -np.inf, limits),
            integrality=np.concatenate([np.ones(count), np.zeros(int(free_peak))]),
            bounds=Bounds(0.0, np.concatenate([np.ones(count), np.full(int(free_peak), np.inf)])),
            options={"time_limit": time_limit_s, "mip_rel_gap": _GAP},
        )
        if solved.x is None:
            return None
        found = frozenset(int(one) for one in np.flatnonzero(solved.x[:count] > 0.5))
        return found, float(solved.x[-1]) * unit if free_peak else math.inf

    def _exclusions(self, columns: int) -> tuple[Numbers, Numbers]:
        """Rows and their limits: pairs that do not go together, and sets that are not wanted."""
        rows, limits = [], []
        for one, other in self._outer:
            row = np.zeros(columns)
            row[[one, other]] = 1.0
            rows.append(row)
            limits.append(1.0)
        for each in self._without:
            row = np.zeros(columns)
            row[: self._count] = -1.0
            row[sorted(each)] = 1.0
            rows.append(row)
            limits.append(len(each) - 1.0)
        return np.array(rows).reshape(len(rows), columns), np.array(limits)


_PEAK_FIRST = 1e-4
"""Weight of the cost where the peak is to be as low as can be."""


def _milp() -> Any:
    """scipy's solver, or None."""
    try:
        from scipy.optimize import milp
    except ImportError:
        return None
    return milp
