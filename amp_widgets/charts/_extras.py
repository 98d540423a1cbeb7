"""The error for a chart that is asked for where its libraries are not installed."""

from __future__ import annotations

from amp_widgets.errors import MissingExtraError


def missing_extra(error: ImportError) -> MissingExtraError:
    """What to raise for `error`; the message names the extra to install."""
    return MissingExtraError(
        f"charts need {error.name or 'a library'}, which cannot be imported ({error}); "
        'install what they need with: pip install "amp-widgets[notebook]"'
    )
