"""Which layers are chosen: against every set there is, for small cases drawn at random."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from amp_widgets.analysis import choice
from amp_widgets.analysis.choice import Choice, chosen_by

pytest.importorskip("scipy", reason="the solver is scipy's: pip install 'amp-widgets[planner]'")


def drawn(seed: int, *, candidates: int = 8, moments: int = 40) -> Choice:
    """A case: what is held rises and falls again, each candidate frees something for a while and needs a little elsewhere."""
    rng = np.random.default_rng(seed)
    hill = np.minimum(np.arange(moments), np.arange(moments)[::-1]) + 1.0
    change = np.zeros((candidates, moments))
    for row in change:
        start, stop = sorted(rng.integers(0, moments + 1, 2))
        row[start:stop] -= rng.integers(1, 2000)
        row[rng.integers(0, moments)] += rng.integers(0, 300)
    pairs = [(int(a), int(b)) for a, b in itertools.combinations(range(candidates), 2) if rng.random() < 0.15]
    return Choice(
        held_bytes=np.round(hill * 300.0),
        change_bytes=change,
        cost_s=rng.uniform(0.001, 0.1, candidates),
        exclusive=pairs,
    )


def allowed(case: Choice) -> Iterable[tuple[int, ...]]:
    """Every set whose members go together."""
    count = len(case.cost_s)
    for size in range(count + 1):
        for each in itertools.combinations(range(count), size):
            if not any(pair in case.exclusive for pair in itertools.combinations(each, 2)):
                yield each


def best_by_trying(case: Choice, budget_bytes: float) -> float | None:
    costs = [case.total_s(each) for each in allowed(case) if case.peak_bytes(each) <= budget_bytes]
    return min(costs) if costs else None


@pytest.mark.parametrize("seed", range(8))
def test_the_cheapest_is_the_cheapest_of_all_sets(seed: int) -> None:
    case = drawn(seed)
    least = min(case.peak_bytes(each) for each in allowed(case))
    none = case.peak_bytes(())
    for share in (0.0, 0.1, 0.4, 0.7, 0.95, 1.0):
        budget = least + share * (none - least)
        found = case.cheapest(budget)
        best = best_by_trying(case, budget)
        assert best is not None
        assert found is not None, f"seed {seed}, share {share}"
        assert case.peak_bytes(found) <= budget
        assert tuple(sorted(found)) in set(allowed(case))
        assert case.total_s(found) <= best * 1.002 + 1e-9, f"seed {seed}, share {share}"


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_chosen_where_nothing_fits_or_nothing_is_needed(seed: int) -> None:
    case = drawn(seed)
    least = min(case.peak_bytes(each) for each in allowed(case))
    assert case.cheapest(least - 1.0) is None
    assert case.greedily(least - 1.0) is None
    assert case.cheapest(case.peak_bytes(())) == frozenset()
    assert case.greedily(case.peak_bytes(())) == frozenset()


@pytest.mark.parametrize("seed", range(4))
def test_the_least_is_the_least_of_all_sets(seed: int) -> None:
    case = drawn(seed)
    least = min(case.peak_bytes(each) for each in allowed(case))
    assert least <= case.peak_bytes(case.least()) <= least * 1.005


@pytest.mark.parametrize("seed", range(4))
def test_sets_that_are_not_wanted_are_not_given(seed: int) -> None:
    case = drawn(seed)
    least = min(case.peak_bytes(each) for each in allowed(case))
    budget = least + 0.5 * (case.peak_bytes(()) - least)
    given: list[frozenset[int]] = []
    for _ in range(4):
        found = case.cheapest(budget, without=given)
        if found is None:
            break
        assert found not in given
        assert case.peak_bytes(found) <= budget
        given.append(found)
    costs = [case.total_s(each) for each in given]
    assert len(given) >= 2
    assert all(later >= earlier * 0.998 for earlier, later in itertools.pairwise(costs))


@pytest.mark.parametrize("seed", range(8))
def test_the_greedy_choice_is_within_the_budget_and_has_nothing_that_is_not_needed(seed: int) -> None:
    case = drawn(seed)
    least = min(case.peak_bytes(each) for each in allowed(case))
    for share in (0.3, 0.6, 0.9):
        budget = least + share * (case.peak_bytes(()) - least)
        found = case.greedily(budget)
        if found is None:  # it may get stuck
            continue
        assert case.peak_bytes(found) <= budget
        assert tuple(sorted(found)) in set(allowed(case))
        assert not any(case.peak_bytes(found - {one}) <= budget for one in found)


def test_without_scipy_it_is_greedy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(1)
    assert chosen_by() == "scipy milp"
    monkeypatch.setattr(choice, "_milp", lambda: None)
    assert chosen_by() == "greedy"
    least = min(case.peak_bytes(each) for each in allowed(case))
    budget = least + 0.6 * (case.peak_bytes(()) - least)
    assert case.cheapest(budget) == case.greedily(budget)
    assert least <= case.peak_bytes(case.least()) < case.peak_bytes(())


def test_what_saves_most_for_its_cost_comes_first() -> None:
    case = Choice(
        held_bytes=np.array([100.0, 100.0]),
        change_bytes=np.array([[-10.0, 0.0], [0.0, -30.0], [5.0, 0.0], [-8.0, -8.0]]),
        cost_s=np.array([1.0, 2.0, 0.1, 1.0]),
        exclusive=[(1, 3)],
    )
    assert case.by_bytes_per_second() == [1, 0]


def test_nothing_to_choose_from() -> None:
    case = Choice(held_bytes=np.array([5.0]), change_bytes=np.zeros((0, 1)), cost_s=np.zeros(0))
    assert case.cheapest(5.0) == frozenset()
    assert case.cheapest(4.0) is None
    assert case.greedily(4.0) is None
    assert case.least() == frozenset()
    assert case.by_bytes_per_second() == []
