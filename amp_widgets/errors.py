"""Every exception that amp_widgets raises on purpose.

Each message says what was got, what was expected and what to do about it.
"""

from __future__ import annotations


class AmpWidgetsError(Exception):
    """Base of all errors of this package."""


class SettingsError(AmpWidgetsError, ValueError):
    """A requested setting is not one that can be in force; nothing was changed."""


class LayerError(SettingsError):
    """A layer was named that the model does not have."""


class CheckpointingError(SettingsError):
    """A layer was named that cannot be checkpointed safely; the message says why."""


class RecomputeError(AmpWidgetsError, RuntimeError):
    """A checkpointed layer cannot be recomputed as it was in the forward pass; its gradients would be wrong."""


class ModelError(AmpWidgetsError, ValueError):
    """A session cannot be made of this model and this optimizer."""


class ScalerError(AmpWidgetsError, RuntimeError):
    """The gradient scaler was used in a way that cannot give right gradients."""


class HalfParametersError(ScalerError, ValueError):
    """The model's own parameters are fp16, so that their gradients cannot be unscaled."""


class NoGradientsError(ScalerError, AssertionError):
    """``scaler.step`` was called for an optimizer none of whose parameters got a gradient."""


class SessionClosedError(AmpWidgetsError, RuntimeError):
    """The session was closed: it no longer controls the model."""


class RunError(AmpWidgetsError, RuntimeError):
    """A background run was asked for something that it cannot do in its present state."""


class HistoryError(AmpWidgetsError, KeyError):
    """A column was named that the history does not have."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class MissingExtraError(AmpWidgetsError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class DemoError(AmpWidgetsError, ValueError):
    """A demo was named that does not exist."""


class QuestionError(AmpWidgetsError, ValueError):
    """A guess, or what was measured, does not fit the question."""


class MagicError(AmpWidgetsError, ValueError):
    """A ``%amp`` line that cannot be understood."""


class LanguageError(AmpWidgetsError, ValueError):
    """A language was asked for in which nothing can be shown."""


class FormatError(AmpWidgetsError, ValueError):
    """A number format was named that does not exist, or asked for what it does not have."""


class SnapshotError(AmpWidgetsError, RuntimeError):
    """What training has come to cannot be kept, or what was kept cannot be read or does not fit the model."""


class ForkError(AmpWidgetsError, RuntimeError):
    """A run cannot go back to a step; the message says to which it can. The run is as it was."""


class RecordingError(AmpWidgetsError, OSError):
    """A run cannot be recorded to a file, or a file is none that a run can be read from."""


class ExportError(AmpWidgetsError, OSError):
    """A run cannot be exported to this file, or in this form."""
