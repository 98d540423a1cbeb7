"""What this machine cannot run in a number format, in words: oneDNN, torch's library for a CPU, speaks of its own parts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from amp_widgets.core.settings import AutocastName


def unsupported_text(error: BaseException, autocast: AutocastName) -> str | None:
    """Which operator cannot be run in a format on this CPU, by what oneDNN says; None where an error says nothing of it.

    >>> text = "could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with …"
    >>> unsupported_text(RuntimeError(text), "fp16")
    'the LSTM cannot be run in fp16 on this CPU (oneDNN could not create a primitive)'

    Parameters
    ----------
    autocast
        The format in force; in fp32, it is none that the format is to blame for.
    """
    found = _NO_PRIMITIVE.match(str(error)) if isinstance(error, RuntimeError) and autocast != "fp32" else None
    if found is None:
        return None
    operator = found["operator"]
    if operator is None:
        return f"an operator of this model cannot be run in {autocast} on this CPU (oneDNN could not create a primitive)"
    return f"the {operator} cannot be run in {autocast} on this CPU (oneDNN could not create a primitive)"


@contextlib.contextmanager
def unsupported_noted(autocast: AutocastName) -> Iterator[None]:
    """An error that is raised within says so too, where `unsupported_text` has words for it.

    Parameters
    ----------
    autocast
        The format in force.
    """
    try:
        yield
    except RuntimeError as error:
        if (words := unsupported_text(error, autocast)) is not None:
            error.add_note(words)
        raise


_NO_PRIMITIVE = re.compile(
    r"could not create a primitive(?: descriptor)?"
    r"(?: for (?:the|an?) (?P<operator>[^.\n]+?)(?: (?:forward|backward)[^.\n]*?)? primitive)?(?=[.\s]|$)"
)
