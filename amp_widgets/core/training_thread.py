"""The thread on which a loop is trained: who may begin steps, who ended the last one, and of whom something was heard."""

from __future__ import annotations

from amp_widgets.core.threads import is_alive, this_thread

NO_THREAD = -1


class TrainingThread:
    """Of one loop; threads are told apart by their numbers, see `amp_widgets.core.threads`.

    Attributes
    ----------
    owner
        The only one that may begin steps (that of a background run), or `NO_THREAD`; None: any may.
    last
        The one that ended the last step.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self.last: int | None = None
        self._heard: tuple[int, float] | None = None  # thread and time of the last begin or end of a step without an owner

    def may_train(self) -> bool:
        """Whether this thread may begin and end steps."""
        return self.owner is None or self.owner == this_thread()

    def last_is_another(self) -> bool:
        """Whether the last step was ended by another thread than this one, which has not ended."""
        return self.last not in (None, this_thread()) and is_alive(self.last)

    def note(self, now_s: float) -> None:
        """A step begins or ends here."""
        if self.owner is None:
            self._heard = (this_thread(), now_s)

    def forget(self) -> None:
        """The user's loop is over, and not just quiet."""
        self._heard = None

    def is_heard_elsewhere(self, now_s: float, step_s: float) -> bool:
        """Whether a loop without an owner seems to be training on another thread than this one.

        Its end cannot be seen from here; it counts as over when nothing was heard of it for some steps' time.

        Parameters
        ----------
        now_s
            On the clock of `note`.
        step_s
            What a step takes.
        """
        if self.owner is not None or self._heard is None or self._heard[0] == this_thread():
            return False
        return now_s - self._heard[1] < max(_QUIET_S, _QUIET_STEPS * step_s)


_QUIET_S = 3.0
_QUIET_STEPS = 5
