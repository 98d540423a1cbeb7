"""Where else the run of a session is logged to while it happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amp_widgets.export.sink import Sink
from amp_widgets.export.sink_follower import SinkFollower
from amp_widgets.recording.follower import Followed


class RunSinks:
    """Any number of them."""

    def __init__(self) -> None:
        self._followers: list[SinkFollower] = []
        self._missing: str | None = None

    def add(self, sink: Sink, source: Followed, facts: Mapping[str, Any]) -> None:
        """Log to this one, too, until `end`."""
        self._followers.append(SinkFollower(sink, source, facts=facts))
        self._missing = None

    def end(self) -> str | None:
        """Log what is left, and close them all; what of it has failed, as sentences, which `notice` has from then on, or None."""
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.close()
        missing = " ".join(follower.notice for follower in followers if follower.notice) or None
        self._missing = missing or self._missing
        return missing

    @property
    def notice(self) -> str | None:
        """What is wrong with them, or None."""
        return " ".join(filter(None, (self._missing, *(follower.notice for follower in self._followers)))) or None
