"""The states of a background run, by name."""

from __future__ import annotations

from typing import Literal

RunState = Literal["none", "ready", "running", "paused", "stopped", "finished", "failed"]
"""``none``: no run was prepared, the loop runs in the user's own cell. ``ready``: prepared, not started."""

ALIVE: tuple[RunState, ...] = ("running", "paused")
"""In these a thread is there."""
