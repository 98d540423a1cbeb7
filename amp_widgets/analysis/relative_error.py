"""How far numbers are from a reference, as one number."""

from __future__ import annotations

import math

import torch


class RelativeError:
    """The norm of the difference over the norm of the reference, of all tensors added.

    ``sqrt(Σ (value − reference)²) / sqrt(Σ reference²)``, in fp64, over the elements that are finite in both. Elements that
    are inf or NaN in the value alone are counted and otherwise left out. A complex number counts as two.

    Attributes
    ----------
    nonfinite
        Elements that are inf or NaN where the reference is finite.
    """

    def __init__(self) -> None:
        self.nonfinite = 0
        self._difference = 0.0
        self._reference = 0.0
        self._compared = 0

    def add(self, value: torch.Tensor, reference: torch.Tensor, *, scale: float = 1.0) -> None:
        """Take a pair of tensors of one shape into it, the value divided by `scale`; waits for the device."""
        value, reference = _on_host(value) / scale, _on_host(reference)
        known = torch.isfinite(reference)
        both = known & torch.isfinite(value)
        self.nonfinite += int(known.sum()) - int(both.sum())
        difference = torch.where(both, value - reference, 0.0)
        self._difference += float(difference.square().sum())
        self._reference += float(torch.where(both, reference, 0.0).square().sum())
        self._compared += int(both.sum())

    @property
    def value(self) -> float:
        """The error; NaN when no element could be compared, or of many that are inf or NaN only zeros, and these were met.

        It is inf when a reference of zeros was not met.
        """
        nothing_known = self._reference == 0.0 == self._difference and self.nonfinite > 0
        if self._compared == 0 or nothing_known:
            return math.nan
        if self._reference == 0.0:
            return 0.0 if self._difference == 0.0 else math.inf
        return math.sqrt(self._difference / self._reference)

    @property
    def reference_norm(self) -> float:
        """Of the elements that were compared."""
        return math.sqrt(self._reference)


def error_text(error: float) -> str:
    """Two digits; a dash where it is not known.

    >>> error_text(0.00123), error_text(0.0), error_text(float("nan"))
    ('1.2e-03', '0', '–')
    """
    if math.isnan(error):
        return "–"
    return "0" if error == 0 else f"{error:.1e}"


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64)
