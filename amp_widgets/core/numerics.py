"""What is watched of the numbers in the steps of one loop: the range of gradients, and where inf and NaN came from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from amp_widgets.core.gradient_probe import GradientProbe
from amp_widgets.core.overflow_probe import OverflowProbe
from amp_widgets.core.scaler import ScaledStep


class Numerics:
    """The probes of a loop, told together of its steps.

    Parameters
    ----------
    model
        Whose gradients; not kept alive.

    Attributes
    ----------
    gradients
        Counts the exponents of gradients in steps that are chosen.
    overflow
        Looks at the gradients of skipped steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self.gradients = GradientProbe(model)
        self.overflow = OverflowProbe(model)

    def watch(self, models: Mapping[str, nn.Module]) -> None:
        """Watch these from now on; where they are several, their names come first in those of layers."""
        named = list(models.items()) if len(models) > 1 else [("", model) for model in models.values()]
        self.gradients.watch(named)
        self.overflow.watch(named)

    def begin(self, step: int) -> None:
        """A step begins, on the training thread."""
        self.gradients.begin(step)
        self.overflow.begin(step)

    def end(self, step: int, scaled: ScaledStep, loss: Tensor | None) -> None:
        """The step is over; `loss` is what was backpropagated in it, not scaled."""
        self.gradients.end(scaled.used)
        self.overflow.end(step, scaled.used, scaled.skipped, loss, scaled.found_inf)

    def abandon(self) -> None:
        """The step will not end."""
        self.gradients.abandon()
        self.overflow.abandon()

    def forget_from(self, step: int) -> None:
        """This step and those after it are trained anew: what was found in them is of another course."""
        self.gradients.forget_from(step)
        self.overflow.forget_from(step)

    def close(self) -> None:
        """Let go of the model; what was found stays."""
        self.gradients.close()
        self.overflow.close()
