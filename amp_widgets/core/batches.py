"""Data that are gone through epoch after epoch, and where one is in them: so that one can come back to that place."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from amp_widgets.core.random_states import RandomStates, counters_of, generator_state, generators_of, set_generator_state
from amp_widgets.errors import ForkError

NO_MORE: Any = object()
"""What `BatchStream.take` gives when the last epoch is over."""


class EpochStart:
    """What the order of an epoch follows from: the random states as it began, also of generators that the data carry."""

    def __init__(self, batches: object) -> None:
        self._random = RandomStates()
        self._generators = {path: generator_state(one) for path, one in generators_of(batches).items()}
        self._counters = {path: one.epoch for path, one in counters_of(batches).items()}
        self._had_workers = _has_workers(batches)

    def put_back(self, batches: object) -> None:
        """Make the data, and the global random generators, begin that epoch again."""
        if lasts(batches):  # its workers draw a number when they are started, and none when they begin another epoch
            loader: Any = batches
            if not self._had_workers:
                loader._iterator = None
            elif not _has_workers(batches):
                iter(loader)
        for path, one in counters_of(batches).items():
            if path in self._counters:
                one.epoch = self._counters[path]
        for path, one in generators_of(batches).items():
            if path in self._generators:
                set_generator_state(one, self._generators[path])
        self._random.restore()

    def as_data(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        return {
            "random": self._random.as_data(),
            "generators": dict(self._generators),
            "counters": dict(self._counters),
            "had_workers": self._had_workers,
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> EpochStart:
        """What `as_data` has given.

        Raises
        ------
        ValueError
            When that is none of it.
        """
        start = cls.__new__(cls)
        try:
            start._random = RandomStates.of_data(data["random"])
            start._generators, start._counters = dict(data["generators"]), dict(data["counters"])
            start._had_workers = bool(data["had_workers"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no start of an epoch: {error}") from None
        return start


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one is in data that are gone through epoch after epoch.

    Attributes
    ----------
    epoch
        Which, from 0.
    given
        Batches of it that were given.
    began
        How it began, or will begin.
    begun
        Whether it has.
    """

    epoch: int
    given: int
    began: EpochStart
    begun: bool


class BatchStream:
    """Goes through data epoch after epoch.

    Parameters
    ----------
    batches
        Iterated once an epoch.
    epochs
        How often; None for ever.
    on_empty
        Called with the number of an epoch, from 1, that has given no batch.

    Attributes
    ----------
    lap
        By which steps are known that were trained on the same data, one after the other from one beginning.
    """

    def __init__(self, batches: Iterable[Any], epochs: int | None, *, on_empty: Callable[[int], None] | None = None) -> None:
        self.batches = batches
        self.epochs = epochs
        self.lap = next(_numbers)
        self._on_empty = on_empty
        self._iterator: Iterator[Any] | None = None
        self._at_epoch = 0
        self._given = 0
        self._began: EpochStart | None = None

    @property
    def place(self) -> Place:
        """Where it is: before the batch that `take` gives next."""
        began = EpochStart(self.batches) if self._began is None else self._began
        return Place(epoch=self._at_epoch, given=self._given, began=began, begun=self._began is not None)

    @property
    def given(self) -> int:
        """Batches of the present epoch that were given."""
        return self._given

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._at_epoch

    def begin_lap(self) -> None:
        """What was trained is set back, while the data go on."""
        self.lap = next(_numbers)

    def take(self) -> Any:
        """The next batch, or `NO_MORE`."""
        while True:
            if self._iterator is None:
                if self.epochs is not None and self._at_epoch >= self.epochs:
                    return NO_MORE
                self._began = EpochStart(self.batches)
                self._iterator = iter(self.batches)
            try:
                batch = next(self._iterator)
            except StopIteration:
                was_empty = self._given == 0
                self._at_epoch += 1
                self._iterator, self._began, self._given = None, None, 0
                if was_empty and self._on_empty is not None:
                    self._on_empty(self._at_epoch)
                continue
            self._given += 1
            return batch

    def go_to(self, place: Place, check: Callable[[], None]) -> None:
        """Come back to a place: the epoch is begun as it was, and gone through up to there.

        The global random states are those of the data then: they are for the caller to put right.

        Parameters
        ----------
        check
            Called before each batch that is passed over; what it raises is raised.

        Raises
        ------
        ForkError
            When the data can be gone through only once, or have fewer batches than before.
        """
        self._iterator, self._at_epoch, self._began, self._given = None, place.epoch, None, 0
        if place.begun:
            refuse_once_only(self.batches)
        place.began.put_back(self.batches)
        if not place.begun:
            return
        self._began = place.began
        self._iterator = iter(self.batches)
        while self._given < place.given:
            check()
            if next(self._iterator, NO_MORE) is NO_MORE:
                raise ForkError(
                    f"fork: got {self._given} batches when epoch {place.epoch} of the data was gone through again, expected "
                    f"at least the {place.given} that it had given; the data are others than before"
                )
            self._given += 1


def refuse_once_only(batches: object) -> None:
    """Raise a `ForkError` for data that can be gone through only once."""
    if isinstance(batches, Iterator):
        raise ForkError(
            f"fork: got data that can be gone through only once (a {type(batches).__name__}), expected such as begin anew; pass "
            "a DataLoader or a list"
        )


_numbers = itertools.count()


def lasts(batches: object) -> bool:
    """Whether the iterator of one epoch is that of the next, too: a DataLoader's with persistent workers."""
    return getattr(batches, "persistent_workers", False) is True and hasattr(batches, "_iterator")


def _has_workers(batches: object) -> bool:
    return lasts(batches) and getattr(batches, "_iterator", None) is not None
