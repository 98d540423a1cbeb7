"""What a session keeps of its past, to come back to: weights, optimizers, scaler, random states and the place in the data.

A snapshot is data and never code. One in a folder is a file ``snapshot-<step>.pt`` that ``torch.load(path, weights_only=True)``
reads, a dict:

========== ==========================================================================================================
format     `FORMAT`
session    a number that only the session has that wrote it
step       steps completed
settings   that were in force
modules    ``model`` and, where it is a module, ``loss_fn``: ``tensors`` (parameters and buffers by name), and the names of
           modules in eval mode (``evaluated``) and of parameters that get no gradient (``frozen``)
others     parameters that only the optimizers have
optimizers the ``state_dict()`` of each
also       the ``state_dict()`` of what was named in `keep_snapshots(also=...)`, such as learning-rate schedulers
scalers    of each, the live scale and its growth tracker
random     the states of the random generators of torch (CPU, and each CUDA device), NumPy and Python
place      where in the data: epoch, batches of it that were given, and the random states that it began with
========== ==========================================================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from amp_widgets.analysis.training_state import Stateful, Trained, bytes_of, check_shapes, shapes_of, state_as_data
from amp_widgets.core.batches import BatchStream, EpochStart, Place
from amp_widgets.core.going_back import Standing
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.random_states import RandomStates
from amp_widgets.core.settings import Settings
from amp_widgets.errors import ForkError, SettingsError, SnapshotError

FORMAT = "amp_widgets snapshot 1"
KEPT = 5
"""Snapshots, where nothing else is said."""

Kind = Literal["fit", "steps", "plain"]
"""Whose steps: a background run's, those of a loop over ``session.steps(...)``, or of a loop that nothing is known of."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """Steps that were trained one after the other on the same data, from one beginning.

    Attributes
    ----------
    first_step
        Steps completed when it began.
    key
        `BatchStream.lap`; None where nothing is known of the data.
    kind
        Whose.
    batches
        Gives the data, as long as they are there.
    """

    first_step: int
    key: int | None
    kind: Kind
    batches: Callable[[], object]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A snapshot, in memory or in a file.

    Attributes
    ----------
    step
        Steps completed.
    time_s
        When it was taken, as events have it.
    lap
        The number of the lap that it is of.
    shapes
        What there is in it.
    bytes
        Its size, where it is.
    data
        In memory.
    path
        Of the file.
    """

    step: int
    time_s: float
    lap: int
    shapes: Any
    bytes: int
    data: dict[str, Any] | None = None
    path: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What was in a snapshot."""

    standing: Standing
    state: dict[str, Any]
    random: RandomStates
    place: Place | None


class Snapshots:
    """Takes snapshots of one session, some steps apart, and keeps the first, the newest, and ever fewer of old ones.

    Parameters
    ----------
    every
        Steps from one to the next; 0 takes none.
    folder
        Where to write them; None keeps them in the CPU's memory.
    keep
        At most so many, at least 2.
    also
        What keeps a state of its own beside model and optimizers.

    Attributes
    ----------
    notice
        Why none could be taken last, for people; None while all is well.
    took_s
        Seconds that the newest took, during which training waited.

    Raises
    ------
    SettingsError
        When a number is none of steps.
    SnapshotError
        When the folder cannot be made, or has snapshots of others.
    """

    def __init__(self, *, every: int, folder: str | os.PathLike[str] | None, keep: int, also: Sequence[Stateful]) -> None:
        self.folder = None if folder is None else Path(folder).absolute()
        self.set(every=every, keep=keep, also=also)
        if self.folder is not None:
            _prepare(self.folder)
        self.notice: str | None = None
        self.took_s = 0.0
        self._session = uuid.uuid4().hex
        self._kept: list[Kept] = []  # by step
        self._laps: list[Lap] = []
        self._wanted = True
        self._told = False

    def set(self, *, every: int, keep: int, also: Sequence[Stateful]) -> None:
        """Change what is said of them; what is kept stays."""
        if type(every) is not int or every < 0:
            raise SettingsError(f"snapshots: every: got {every!r}, expected a whole number of steps, or 0 to take none")
        if type(keep) is not int or keep < 2:
            raise SettingsError(f"snapshots: keep: got {keep!r}, expected a whole number, at least 2: the first and the newest")
        for other in also:
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise SettingsError(
                    f"snapshots: also: got a {type(other).__name__}, expected what has state_dict() and load_state_dict(), such "
                    "as a learning-rate scheduler"
                )
        self.every, self.keep, self.also = every, keep, tuple(also)
        self._wanted = every > 0

    @property
    def steps(self) -> tuple[int, ...]:
        """Of which steps there are snapshots: so many steps were completed."""
        return tuple(kept.step for kept in self._kept)

    @property
    def bytes(self) -> int:
        """Their size, all together."""
        return sum(kept.bytes for kept in self._kept)

    @property
    def where(self) -> str:
        """For people."""
        return "in memory" if self.folder is None else f"in {self.folder}"

    def __repr__(self) -> str:
        return f"<Snapshots of steps {', '.join(map(str, self.steps)) or 'none yet'}: {memory_text(self.bytes)} {self.where}>"

    @property
    def lap_kind(self) -> Kind | None:
        """Whose steps are being trained, as far as was seen."""
        return self._laps[-1].kind if self._laps else None

    # ---- taking them ------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether it is time for one, after so many steps."""
        return self.every > 0 and (self._wanted or (step % self.every == 0 and not (self._kept and self._kept[-1].step == step)))

    def between(self, loop: LiveLoop, stream: BatchStream | None, kind: Kind, loss_fn: object = None) -> None:
        """Between two steps, on the thread that trains: take one where it is time. Raises nothing that training could end of.

        Parameters
        ----------
        stream
            The data, before the next batch is taken; None where nothing is known of them.
        """
        key = None if stream is None else stream.lap
        if not self._laps or self._laps[-1].key != key:
            batches = _held(None if stream is None else stream.batches)
            self._laps.append(Lap(first_step=loop.step, key=key, kind=kind, batches=batches))
            self._wanted = True
        if self.is_due(loop.step):
            self.take(loop, None if stream is None else stream.place, loss_fn)

    def take(self, loop: LiveLoop, place: Place | None, loss_fn: object) -> None:
        """Take one now. Where that cannot be, `notice` says so and training goes on."""
        began_s = time.perf_counter()
        self._wanted = False
        try:
            time_s = loop.now_s
            kept = self._store(*self._data(loop, place, loss_fn), time_s)
        except (SnapshotError, OSError, RuntimeError, MemoryError) as error:
            self._complain(loop, f"{type(error).__name__}: {error}" if not isinstance(error, SnapshotError) else str(error))
            return
        except Exception as error:  # of the user's own state_dict()
            self._complain(loop, f"{type(error).__name__}: {error}")
            return
        self.notice = None
        self._drop([one for one in self._kept if one.step >= kept.step], but=kept.path)
        self._kept.append(kept)
        self._thin()
        self.took_s = time.perf_counter() - began_s
        if not self._told:
            self._told = True
            loop.record_event(
                "note",
                f"snapshots every {self.every} steps: {memory_text(kept.bytes)} each {self.where}, at most {self.keep} of them; "
                f"the first took {1000 * self.took_s:.1f} ms",
            )

    # ---- coming back to them ----------------------------------------------------------------------------------------

    def for_step(self, step: int) -> tuple[Kept, Lap]:
        """The snapshot to come to a step from, and the lap that it is in.

        Raises
        ------
        ForkError
            When there is none; it says of which steps there are.
        """
        if not self._kept:
            why = "" if self.notice is None else f" ({self.notice})"
            raise ForkError(f"fork: there is no snapshot yet{why}; train a step first")
        number = max((i for i, lap in enumerate(self._laps) if lap.first_step <= step), default=-1)
        usable = [kept for kept in self._kept if kept.lap == number and kept.step <= step]
        if not usable:
            raise ForkError(f"fork: nothing leads to step {step}; {self.choice()}")
        kept, lap = usable[-1], self._laps[number]
        if kept.step != step and lap.kind != "fit":
            raise ForkError(
                f"fork: there is no snapshot of step {step}, and a loop of your own has trained the steps up to it, which cannot "
                f"be done again from here; {self.choice()}"
            )
        return kept, lap

    def choice(self) -> str:
        """Where one can go, for people."""
        return f"there are snapshots of the steps {', '.join(map(str, self.steps))}"

    def read(self, kept: Kept) -> Past:
        """What is in one.

        Raises
        ------
        SnapshotError
            When its file is damaged, or is not the one that was written.
        """
        data = kept.data if kept.path is None else self._read(kept, kept.path)
        assert data is not None
        place = data["place"]
        try:
            scalers = tuple((float(scale), int(growth_tracker)) for scale, growth_tracker in data["scalers"])
            return Past(
                standing=Standing(step=kept.step, settings=Settings(**data["settings"]), scalers=scalers),
                state={name: data[name] for name in _STATE},
                random=RandomStates.of_data(data["random"]),
                place=None if place is None else _place(place),
            )
        except (ValueError, TypeError) as error:
            raise SnapshotError(f"the snapshot of step {kept.step}: {error}; it is damaged") from None

    def forget_after(self, step: int) -> None:
        """Later steps are of another course now: let go of their snapshots."""
        self._drop([kept for kept in self._kept if kept.step > step])
        self._laps = [lap for lap in self._laps if lap.first_step <= step]

    def close(self) -> None:
        """Let go of what is in memory; files stay."""
        self.every = 0
        self._kept = [kept for kept in self._kept if kept.path is not None]
        self._laps, self.also = [], ()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _data(self, loop: LiveLoop, place: Place | None, loss_fn: object) -> tuple[dict[str, Any], Any]:
        model = loop.model
        if model is None:
            raise SnapshotError("snapshot: the model is gone")
        standing = loop.standing()
        state, state_shapes = state_as_data(
            Trained(model=model, optimizers=loop.known_optimizers, loss_fn=loss_fn, also=self.also)
        )
        rest: dict[str, Any] = {
            "format": FORMAT,
            "session": self._session,
            "step": standing.step,
            "settings": dataclasses.asdict(standing.settings),
            "scalers": [list(scaler) for scaler in standing.scalers],
            "random": RandomStates().as_data(),
            "place": None if place is None else _place_as_data(place),
        }
        return {**rest, **state}, {**shapes_of(rest), **state_shapes}

    def _store(self, data: dict[str, Any], shapes: Any, time_s: float) -> Kept:
        step, lap = data["step"], len(self._laps) - 1
        if self.folder is None:
            return Kept(step=step, time_s=time_s, lap=lap, shapes=shapes, bytes=bytes_of(data), data=data)
        path = self.folder / f"snapshot-{step:08d}.pt"
        part = path.with_suffix(".part")
        try:
            part.unlink(missing_ok=True)
            with part.open("xb") as file:
                torch.save(data, file)
            size = part.stat().st_size
            part.replace(path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return Kept(step=step, time_s=time_s, lap=lap, shapes=shapes, bytes=size, path=path)

    def _read(self, kept: Kept, path: Path) -> dict[str, Any]:
        try:
            if path.stat().st_size != kept.bytes:
                raise SnapshotError(
                    f"{path}: got {path.stat().st_size} bytes, expected {kept.bytes}; it is damaged, or another file"
                )
            data = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise SnapshotError(f"{path}: the snapshot was removed; {self.choice()}") from None
        except SnapshotError:
            raise
        except Exception as error:  # whatever a damaged or hostile file may lead to
            first = (str(error).splitlines() or [""])[0][:200]
            raise SnapshotError(
                f"{path} cannot be read as data: {type(error).__name__}: {first}; it is damaged, or another file"
            ) from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise SnapshotError(f"{path} is no snapshot, expected a file that this session has written")
        if data.get("session") != self._session or data.get("step") != kept.step:
            raise SnapshotError(
                f"{path} is a snapshot of another session or step, expected the one of step {kept.step} of this one"
            )
        try:
            check_shapes(data, kept.shapes)
        except SnapshotError as error:
            raise SnapshotError(f"{path}: {error}; it is damaged, or another file") from None
        return data

    def _complain(self, loop: LiveLoop, why: str) -> None:
        notice = f"No snapshot of step {loop.step}: {why}. Training goes on."
        if self.notice is None:
            loop.record_event("note", notice)
        self.notice = notice

    def _thin(self) -> None:
        while len(self._kept) > self.keep:
            steps = self.steps
            newest = steps[-1]
            # the one that leaves the smallest gap for its age: they come to lie ever farther apart towards the past
            gaps = [(steps[i + 1] - steps[i - 1]) / (newest - steps[i] + self.every) for i in range(1, len(steps) - 1)]
            self._drop([self._kept[1 + gaps.index(min(gaps))]])

    def _drop(self, dropped: Sequence[Kept], *, but: Path | None = None) -> None:
        for kept in dropped:
            self._kept.remove(kept)
            if kept.path is not None and kept.path != but:
                with contextlib.suppress(OSError):
                    kept.path.unlink(missing_ok=True)


_STATE = ("modules", "others", "optimizers", "also")


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = next(folder.glob("snapshot-*.pt"), None)
    except OSError as error:
        raise SnapshotError(f"snapshots: {folder}: {error.strerror}; choose a folder that can be made and written to") from error
    if others is not None:
        raise SnapshotError(
            f"snapshots: {folder} has {others.name} of another session already; choose another folder, or empty it first"
        )


def _held(thing: object) -> Callable[[], object]:
    """Gives the thing; it is kept alive only where Python knows no other way, as for a list."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def _place_as_data(place: Place) -> dict[str, Any]:
    return {"epoch": place.epoch, "given": place.given, "began": place.began.as_data(), "begun": place.begun}


def _place(data: dict[str, Any]) -> Place:
    return Place(epoch=data["epoch"], given=data["given"], began=EpochStart.of_data(data["began"]), begun=data["begun"])
