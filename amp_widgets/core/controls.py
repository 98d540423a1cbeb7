"""What of a loop can be changed between two steps: the settings in force, and what carries them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.fp32_layers import Fp32Layers
from amp_widgets.core.layer_switch import LayerSwitch
from amp_widgets.core.scaler import LiveScaler, ScalerListener, rules_of
from amp_widgets.core.settings import Settings
from amp_widgets.errors import SettingsError


class Controls:
    """Those of one loop, which holds a lock around whatever changes them.

    Parameters
    ----------
    model
        Whose layers are switched.
    device_type
        Where it is.
    listener
        Told of what the user does with the scaler; not kept alive.

    Attributes
    ----------
    settings
        In force.
    checkpointing, fp32_layers
        The layers' switches; `switches` has them by the setting that is made of them.
    scaler
        The loop's own, or the first one of the user's.
    """

    def __init__(self, model: nn.Module, device_type: str, listener: ScalerListener) -> None:
        self.settings = Settings()
        self.checkpointing = Checkpointing(model)
        self.fp32_layers = Fp32Layers(model)
        self.switches: dict[str, LayerSwitch] = {"checkpointed": self.checkpointing, "fp32_layers": self.fp32_layers}
        self.scaler = LiveScaler(device_type, self.settings)
        self.scaler.listen(listener)
        self._scalers = [self.scaler]
        self._asked_for: set[str] = set()  # settings that override what the user's own loop has
        self._released = False

    # ---- what is in force ---------------------------------------------------------------------------------------------

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Put changes in force: all of them, or none, whatever is raised.

        Parameters
        ----------
        changes
            Setting → value, as `RequestQueue` has validated them.

        Raises
        ------
        SettingsError
            When they cannot be met, as a layer has left the model meanwhile.
        """
        before = self.settings
        try:
            settings = before.replace(**changes)
            for name in (name for name in self.switches if name in changes):
                self.switches[name].apply(getattr(settings, name))  # all of it or nothing
            if not changes.keys() <= self.switches.keys():
                self._configure_scalers(settings, set_scale="init_scale" in changes)
        except BaseException:  # also an interrupt of the kernel
            self._roll_back(before, changes)
            raise
        self.settings = settings
        self._asked_for.update(changes)

    def found(self, settings: Mapping[str, Any]) -> None:
        """The user's own loop has these settings: they are in force where no request has overridden them."""
        theirs = {name: value for name, value in settings.items() if name not in self._asked_for}
        self.settings = self.settings.replace(**theirs)

    def adopted(self, settings: Settings, changes: Mapping[str, Any]) -> None:
        """The user has made these `changes` on a scaler, which has them as `settings` already."""
        self.settings = self.settings.replace(**{name: getattr(settings, name) for name in changes})

    @property
    def overrides_autocast(self) -> bool:
        """Whether autocast was asked for."""
        return "autocast" in self._asked_for

    @property
    def adds_scaling(self) -> bool:
        """Whether the loss of a loop without a scaler is to be scaled, because that was asked for."""
        asked_for = "autocast" in self._asked_for or "scaling" in self._asked_for
        return self.settings.scales_loss and not self.has_users_scaler and asked_for

    def go_to(self, settings: Settings, progress: Sequence[tuple[float, int]]) -> None:
        """Put the `settings` in force of some earlier moment, and what the scalers' `progress` was then.

        Raises
        ------
        SettingsError
            When a layer is not there any more; half of it may be done then.
        """
        for name, switch in self.switches.items():
            switch.apply(getattr(settings, name))
        self._configure_scalers(settings, set_scale=False)
        for scaler, (scale, growth_tracker) in zip(self._scalers, progress, strict=True):
            scaler.put_back(scale, growth_tracker)
        self.settings = settings

    # ---- the scalers ----------------------------------------------------------------------------------------------------

    def adopt_scaler(self, scaler: torch.amp.GradScaler, listener: ScalerListener) -> None:
        """Control the user's own scaler, one of several perhaps, and tell `listener` of it, which is not kept alive.

        Raises
        ------
        TypeError
            When its class cannot be extended.
        """
        if not self.has_users_scaler:
            self.found(rules_of(scaler))
        live = LiveScaler.adopt(scaler, self.settings)
        if self._overrides_scaler:
            live.configure(self.settings, set_scale=False)
        if not self.has_users_scaler:
            self.scaler = live
            self._scalers.clear()
        live.listen(listener)
        self._scalers.append(live)

    @property
    def has_users_scaler(self) -> bool:
        """Whether the user's loop has a scaler of its own."""
        return self.scaler.adopted

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, which a scaler of the user's may do whatever is in force."""
        return self.settings.scales_loss if self._released else self.scaler.is_enabled()  # released, it is theirs again

    @property
    def one_scales(self) -> bool:
        """Whether one of the scalers is at work."""
        return any(scaler.is_enabled() for scaler in self._scalers)

    @property
    def scales(self) -> dict[int, float]:
        """The live scale of each scaler, by its id; waits for the device."""
        return {id(scaler): scaler.progress()[0] for scaler in self._scalers}

    @property
    def progress(self) -> tuple[tuple[float, int], ...]:
        """The live scale of each scaler and its growth tracker; waits for the device."""
        return tuple(scaler.progress() for scaler in self._scalers)

    def restart_scale(self) -> None:
        """Set the live scale of the scaler to the initial scale in force."""
        self.scaler.configure(self.settings, set_scale=True)

    def abandon_step(self) -> None:
        """A step was broken off: the next one starts clean."""
        for scaler in self._scalers:
            scaler.abandon_step()

    def release_scalers(self) -> None:
        """They go on as plain ones; the switches are closed by whoever is there at the end."""
        self._released = True
        for scaler in self._scalers:
            scaler.release()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _configure_scalers(self, settings: Settings, *, set_scale: bool) -> None:
        for scaler in self._scalers:
            scaler.configure(settings, set_scale=set_scale)

    def _roll_back(self, settings: Settings, changes: Mapping[str, Any]) -> None:
        if self._overrides_scaler or not self.has_users_scaler:
            self._configure_scalers(settings, set_scale=False)
        for name in (name for name in self.switches if name in changes):
            try:
                self.switches[name].apply(getattr(settings, name))
            except SettingsError:
                pass  # a layer in force has left the model, which is why nothing was switched: `apply` does all or nothing

    @property
    def _overrides_scaler(self) -> bool:
        return not self._asked_for <= self.switches.keys()
