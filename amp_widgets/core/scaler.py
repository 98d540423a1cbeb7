"""A ``torch.amp.GradScaler`` that can be changed between steps and tells what each step did."""

from __future__ import annotations

import copyreg
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import OptState

from amp_widgets.core.readback import host_value
from amp_widgets.core.settings import Settings
from amp_widgets.errors import HalfParametersError, NoGradientsError, ScalerError, SettingsError


class ScalerListener(Protocol):
    """Who is told what the user's loop does with the scaler."""

    def scaling(self, outputs: object) -> None:
        """``scale(outputs)`` is about to scale."""

    def stepping(self) -> None:
        """``step(optimizer)`` is about to step."""

    def skipping(self, *, as_arrived: bool) -> None:
        """An optimizer's step is skipped; its gradients are still there, as the backward pass has left them or perhaps not."""

    def refused(self, reason: str) -> None:
        """``step`` or ``update`` has refused to go on, as no gradient was checked for inf."""

    def updated(self, step: ScaledStep) -> None:
        """``update()`` is done: this is the step boundary."""

    def adopted(self, settings: Settings, changes: dict[str, Any]) -> None:
        """The user changed settings on the scaler itself (``load_state_dict``, a setter)."""

    def parameter_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of the optimizer's parameters, for messages."""


class ScaledStep:
    """What one step did with the scale.

    Attributes
    ----------
    used
        The scale used in the step: a number on a CPU, else a copy on the device; None when the loss was not scaled.
    after
        The scale after ``update()``, likewise.
    skipped
        Whether an optimizer's step was skipped, where the host knows already; None where only the device knows.
    found_inf
        Above 0 where a step was skipped, on the device; None where `skipped` is known.
    by_rule
        Whether the scale followed the update rule; False where the user gave ``update`` a new scale.
    scaler_id
        Of the scaler, where there are several.
    """

    __slots__ = ("after", "by_rule", "found_inf", "scaler_id", "skipped", "used")

    def __init__(
        self,
        used: torch.Tensor | float | None,
        after: torch.Tensor | float | None,
        skipped: bool | None,
        found_inf: torch.Tensor | None,
        *,
        by_rule: bool = True,
        scaler_id: int = 0,
    ) -> None:
        self.scaler_id = scaler_id
        self.used = used
        self.after = after
        self.skipped = skipped
        self.found_inf = found_inf
        self.by_rule = by_rule


class LiveScaler(torch.amp.GradScaler):
    """Drop-in for ``torch.amp.GradScaler``, also right when autocast is fp32 or bf16.

    While the settings in force do not scale the loss it passes everything through, as a disabled ``GradScaler`` does, and
    keeps its scale, its growth tracker and its ``state_dict`` for later.

    Parameters
    ----------
    device
        Device type, ``"cuda"`` or ``"cpu"`` for example.
    settings
        The settings in force.
    """

    def __init__(self, device: str, settings: Settings) -> None:
        super().__init__(
            device=device,
            init_scale=settings.init_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
        )
        self._settings = settings
        self._enabled = settings.scales_loss
        self._begin(settings, theirs=None)

    @classmethod
    def adopt(cls, scaler: torch.amp.GradScaler, settings: Settings) -> LiveScaler:
        """Make a user's own scaler a live one, in place: by a subclass of its class, until `release`.

        It computes just what it did before until `configure` is called for the first time.

        Raises
        ------
        TypeError
            When its class cannot be extended that way.
        """
        kind = type(scaler)
        live_kind = type(kind.__name__, (cls, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
        theirs = {name: scaler.__dict__[name] for name in _RULES if name in scaler.__dict__}
        missing = {name: value for name, value in _usual_state().items() if name not in scaler.__dict__}
        scaler.__class__ = live_kind  # first, as it may be refused
        scaler.__dict__.update(missing)  # a disabled one has hardly anything
        assert isinstance(scaler, LiveScaler)
        scaler._begin(settings, theirs=theirs, lent=tuple(missing))
        return scaler

    def _begin(self, settings: Settings, *, theirs: dict[str, Any] | None, lent: tuple[str, ...] = ()) -> None:
        self._settings = settings
        self._listener_ref: Callable[[], ScalerListener | None] = _nobody
        self._skipped_by: dict[int, bool | torch.Tensor] = {}
        self._last_skipped: dict[int, bool | torch.Tensor] = {}
        self._theirs = theirs  # an adopted one's own rules, to be put back
        self._lent = lent  # attributes that it did not have
        self._as_arrived = False
        self._ruled = theirs is None  # whether the settings rule it, or its own values still do

    # ---- what the user's loop calls ---------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply `outputs` by the loss scale; see ``torch.amp.GradScaler.scale``."""
        listener = self._listener_ref()
        if listener is not None:
            listener.scaling(outputs)
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale; see ``torch.amp.GradScaler.unscale_``.

        Raises
        ------
        HalfParametersError
            When the model's own parameters are fp16.
        """
        try:
            super().unscale_(optimizer)
        except (ValueError, AssertionError) as error:
            self._explain(error, optimizer)
            raise

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients have inf or NaN; see ``torch.amp.GradScaler.step``.

        Raises
        ------
        HalfParametersError
            When the model's own parameters are fp16.
        NoGradientsError
            When no parameter of the optimizer got a gradient.
        """
        listener = self._listener_ref()
        if listener is not None:
            listener.stepping()
        if not self._enabled:
            self._skipped_by[id(optimizer)] = False
            return super().step(optimizer, *args, **kwargs)
        self._skipped_by.pop(id(optimizer), None)
        state = self._per_optimizer_states.get(id(optimizer))
        self._as_arrived = state is None or state["stage"] is OptState.READY  # else the user's loop has unscaled, to clip perhaps
        try:
            result = super().step(optimizer, *args, **kwargs)
        except (ValueError, AssertionError) as error:
            self._explain(error, optimizer)
            raise
        finally:
            self._as_arrived = False
        if id(optimizer) not in self._skipped_by:  # a fused optimizer decides on the device
            found = self._found_infs(id(optimizer))
            self._skipped_by[id(optimizer)] = _total(found) if found else False
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the loss scale: the step boundary; see ``torch.amp.GradScaler.update``.

        Raises
        ------
        SettingsError
            When `new_scale` is a number outside the safe range.
        NoGradientsError
            When no optimizer was stepped since the last update.
        """
        if isinstance(new_scale, (int, float)) and self._ruled:
            new_scale = self._settings.replace(init_scale=new_scale, min_scale=None, max_scale=None).init_scale
        if not self._enabled:
            self._finish(ScaledStep(None, None, False, None))
            return
        used = None if self._scale is None else _snapshot(self._scale)
        try:
            super().update(new_scale)
        except AssertionError as error:
            self._explain(error, None)
            raise
        self._clamp()
        assert self._scale is not None  # update() would have raised
        skips = list(self._skipped_by.values())
        skipped: bool | None = None
        found_inf: torch.Tensor | None = None
        if all(isinstance(skip, bool) for skip in skips):
            skipped = any(skips)
        else:
            found_inf = _total([torch.full_like(self._scale, skip) if isinstance(skip, bool) else skip for skip in skips])
        self._finish(ScaledStep(used, _snapshot(self._scale), skipped, found_inf, by_rule=new_scale is None, scaler_id=id(self)))

    def step_was_skipped(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Whether the last step was skipped because of inf or NaN in the gradients.

        Between ``step`` and ``update`` it speaks of the step in progress. A learning-rate scheduler is stepped right with
        ``if not scaler.step_was_skipped(optimizer): scheduler.step()``.

        Parameters
        ----------
        optimizer
            Which optimizer's step; without it, whether any was skipped.

        Notes
        -----
        For a fused optimizer on CUDA only the device knows, and this call waits for it.
        """
        known = self._skipped_by or self._last_skipped
        picked = known.values() if optimizer is None else [known[id(optimizer)]] if id(optimizer) in known else []
        return any(bool(skip) if isinstance(skip, bool) else bool(skip.item()) for skip in picked)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, whole also while it passes through; waits for the device."""
        with self._as_if_scaling():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, all of it or nothing.

        Raises
        ------
        ScalerError
            When entries are missing.
        SettingsError
            When a value cannot be in force.
        """
        if not self._enabled and (not state_dict or not self._ruled):
            return  # as between two disabled scalers
        missing = [key for key in _STATE_KEYS if key not in state_dict]
        if missing:
            raise ScalerError(
                f"load_state_dict: got a state without {', '.join(missing)}, expected all of {', '.join(_STATE_KEYS)}; "
                "an empty state comes from a scaler that was disabled when it was saved"
            )
        tracker = state_dict["_growth_tracker"]
        if isinstance(tracker, bool) or not isinstance(tracker, int) or tracker < 0:
            raise ScalerError(f"load_state_dict: got _growth_tracker {tracker!r}, expected a number of steps, 0 or more")
        changes = {
            "init_scale": state_dict["scale"],
            "growth_factor": state_dict["growth_factor"],
            "backoff_factor": state_dict["backoff_factor"],
            "growth_interval": state_dict["growth_interval"],
        }
        settings = self._settings.replace(**changes)
        changes = {name: getattr(settings, name) for name in changes}
        if tracker >= settings.growth_interval:
            tracker = 0  # torch would never meet the interval again
        with self._as_if_scaling():
            super().load_state_dict({**state_dict, "scale": settings.init_scale, "_growth_tracker": tracker})
        self._adopt(settings, changes)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor now; checked as in a request."""
        self._set(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor now; checked as in a request."""
        self._set(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval now; checked as in a request."""
        self._set(growth_interval=new_interval)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy as the plain scaler, which loads without this package."""
        state = {key: value for key, value in self.__getstate__().items() if key not in _OWN_ATTRIBUTES}
        return copyreg._reconstructor, (self._plain_kind(), object, None), state  # type: ignore[attr-defined]  # typeshed lacks it

    # ---- what the loop calls, between steps --------------------------------------------------------------------------

    def listen(self, listener: ScalerListener) -> None:
        """Tell `listener` from now on, for as long as it lives; the scaler does not keep it alive."""
        self._listener_ref = weakref.ref(listener)

    def configure(self, settings: Settings, *, set_scale: bool) -> None:
        """Put settings in force; only between a step's ``update()`` and the next step.

        Parameters
        ----------
        settings
            What is in force from now on.
        set_scale
            Set the live scale to ``settings.init_scale``, and count the growth interval anew.
        """
        self._settings = settings
        self._ruled = True
        self._growth_factor = settings.growth_factor
        self._backoff_factor = settings.backoff_factor
        self._growth_interval = settings.growth_interval
        self._enabled = settings.scales_loss
        if set_scale:
            self._init_scale = settings.init_scale
            self._init_growth_tracker = 0
        if self._scale is not None and self._growth_tracker is not None:
            if set_scale:
                self._scale.fill_(settings.init_scale)
                self._growth_tracker.zero_()
            # torch grows when tracker + 1 == interval: a tracker at or past a lowered interval would never meet it again
            self._growth_tracker.mul_(self._growth_tracker < settings.growth_interval)
        self._clamp()

    def progress(self) -> tuple[float, int]:
        """The live scale, and the steps without inf or NaN since it changed; waits for the device."""
        with self._as_if_scaling():
            return float(self.get_scale()), int(self._get_growth_tracker())

    def put_back(self, scale: float, growth_tracker: int) -> None:
        """Come back to what `progress` has given; between steps, with the settings of then in force."""
        if self._scale is None or self._growth_tracker is None:
            self._init_scale, self._init_growth_tracker = scale, growth_tracker
        else:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(growth_tracker)
        self._per_optimizer_states.clear()
        self._skipped_by, self._last_skipped = {}, {}

    @property
    def adopted(self) -> bool:
        """Whether it is a user's own, made live by `adopt`."""
        return self._theirs is not None

    @property
    def in_mid_step(self) -> bool:
        """Whether gradients were unscaled, or an optimizer stepped, and ``update()`` has not been called since."""
        return bool(self._per_optimizer_states) or bool(self._skipped_by)

    def abandon_step(self) -> None:
        """Forget what a step that was broken off had done, so that the next one starts clean."""
        self._per_optimizer_states.clear()
        self._skipped_by = {}

    def release(self) -> None:
        """Go on as the plain scaler: one of ours with what is in force now, an adopted one by its own rules."""
        kind, theirs = self._plain_kind(), self._theirs
        self.__dict__.update(theirs or {})
        for name in (*self._lent, *_OWN_ATTRIBUTES):
            self.__dict__.pop(name, None)
        self.__class__ = kind  # type: ignore[assignment]  # the point of it

    # ---- scaling that the user's loop does not know of ---------------------------------------------------------------

    def scale_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Multiply gradients that are there by the loss scale, before those of a scaled loss are added to them."""
        assert self._scale is not None
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
                    values.mul_(self._scale.to(values.device, non_blocking=True))

    def unscale_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the loss scale right after a backward pass, and keep whether they were finite.

        Raises
        ------
        HalfParametersError
            When the model's own parameters are fp16.
        """
        assert self._scale is not None
        owner: Any = _ParameterGroup(parameters)
        inverse = self._scale.double().reciprocal().float()  # as torch's own unscale_
        nothing = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        try:
            found = self._unscale_grads_(owner, inverse, nothing, False)
        except ValueError as error:
            self._explain(error, owner)
            raise
        kept = self._per_optimizer_states[_NO_OPTIMIZER]["found_inf_per_device"]
        for device, tensor in (found or {nothing.device: nothing}).items():
            kept[device] = kept[device] + tensor if device in kept else tensor

    def must_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's gradients have inf or NaN, after `unscale_gradients`; waits for the device as ``step`` does."""
        found = any(bool(found.item()) for found in self._found_infs(_NO_OPTIMIZER))  # of anybody's; rare
        skip = found and not has_finite_gradients(optimizer)
        self._skipped_by[id(optimizer)] = skip
        if skip:
            self._tell_of_skip()
        assert self._scale is not None
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {self._scale.device: torch.full_like(self._scale, skip)}
        return skip

    def update_after_steps(self) -> None:
        """``update()`` after `must_skip`: what counts is the optimizers that have stepped, not gradients that nobody applies."""
        if self._per_optimizer_states.keys() > {_NO_OPTIMIZER}:
            del self._per_optimizer_states[_NO_OPTIMIZER]
        self.update()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        # torch's own method, with its one sync, keeping what it found out
        skipped = bool(sum(found.item() for found in optimizer_state["found_inf_per_device"].values()))
        self._skipped_by[id(optimizer)] = skipped
        if skipped:
            self._tell_of_skip()
        return None if skipped else optimizer.step(*args, **kwargs)

    def _tell_of_skip(self) -> None:
        listener = self._listener_ref()
        if listener is not None:
            listener.skipping(as_arrived=self._as_arrived)

    def _finish(self, step: ScaledStep) -> None:
        self._last_skipped, self._skipped_by = self._skipped_by, {}
        listener = self._listener_ref()
        if listener is not None:
            listener.updated(step)

    def _clamp(self) -> None:
        if not self._ruled:
            return
        # Without a floor the scale could fall to where its reciprocal is inf: steps are no longer skipped, parameters go NaN.
        if self._scale is None:
            self._init_scale = self._settings.held(self._init_scale)
        elif self._scale.is_cpu:
            scale = host_value(self._scale)  # a look costs a fifth of the operation
            if self._settings.held(scale) != scale:
                self._scale.fill_(self._settings.held(scale))
        else:
            self._scale.clamp_(self._settings.held(0.0), self._settings.held(math.inf))

    def _found_infs(self, key: int) -> list[torch.Tensor]:
        return list(self._per_optimizer_states[key]["found_inf_per_device"].values())

    def _set(self, **changes: Any) -> None:
        settings = self._settings.replace(**changes)
        if self._ruled:
            self.configure(settings, set_scale=False)
        else:
            self.__dict__.update({f"_{name}": value for name, value in changes.items()})
        self._adopt(settings, changes)

    def _adopt(self, settings: Settings, changes: dict[str, Any]) -> None:
        self._settings = settings
        if self._theirs is not None:
            self._theirs.update({f"_{name}": value for name, value in changes.items() if f"_{name}" in _RULES})
        self._clamp()
        listener = self._listener_ref()
        if listener is not None:
            listener.adopted(settings, changes)

    def _plain_kind(self) -> type[torch.amp.GradScaler]:
        return torch.amp.GradScaler if self._theirs is None else type(self).__bases__[1]

    @contextmanager
    def _as_if_scaling(self) -> Iterator[None]:
        enabled, self._enabled = self._enabled, True
        try:
            yield
        finally:
            self._enabled = enabled

    def _explain(self, error: Exception, optimizer: torch.optim.Optimizer | None) -> None:
        """Raise our own error where torch's can be explained."""
        if "unscale FP16 gradients" in str(error):
            raise HalfParametersError(self._explain_half(optimizer)) from error
        if "No inf checks were recorded" in str(error):
            reason = self._explain_no_gradients(optimizer)
            self._forget_unchecked()
            listener = self._listener_ref()
            if listener is not None:
                listener.refused(reason)
            raise NoGradientsError(reason) from error

    def _forget_unchecked(self) -> None:
        """As if nothing had been unscaled where nothing was: torch would refuse every later step, too."""
        unchecked = [key for key, state in self._per_optimizer_states.items() if not state["found_inf_per_device"]]
        for key in unchecked:
            del self._per_optimizer_states[key]

    def _explain_half(self, optimizer: torch.optim.Optimizer | None) -> str:
        named = self._named(optimizer, lambda p: p.grad is not None and p.grad.dtype == torch.float16)
        return (
            f"Attempting to unscale FP16 gradients: got fp16 parameters ({named}), expected fp32 ones. The scaler works with "
            "autocast, which keeps the parameters in fp32 and casts where it is safe; keep the model in fp32: model.float(), "
            "not model.half()"
        )

    def _explain_no_gradients(self, optimizer: torch.optim.Optimizer | None) -> str:
        if optimizer is None:
            return (
                "No inf checks were recorded prior to update: got update() without a scaler.step(optimizer) since the last one, "
                "expected scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update() in this order"
            )
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return (
                "No inf checks were recorded for this optimizer: got scaler.unscale_(optimizer) before any of its parameters had "
                "a gradient, expected it after scaler.scale(loss).backward()"
            )
        named = self._named(optimizer, lambda p: p.grad is None)
        return (
            f"No inf checks were recorded for this optimizer: got no gradient in any of its parameters ({named}), expected at "
            "least one. Call scaler.scale(loss).backward() before scaler.step(optimizer), and check that the loss depends on "
            "these parameters and that they require a gradient"
        )

    def _named(self, optimizer: torch.optim.Optimizer | None, wanted: Callable[[torch.Tensor], bool]) -> str:
        listener = self._listener_ref()
        if optimizer is None or listener is None:
            return "names unknown"
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = [n for n, p in zip(listener.parameter_names(optimizer), parameters, strict=True) if wanted(p)]
        shown = ", ".join(names[:5])
        return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"


def rules_of(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """The scaler's own rules as settings, as far as they can be settings."""
    scale = getattr(scaler, "_scale", None)
    rules = {
        "init_scale": host_value(scale) if scale is not None and scale.is_cpu else getattr(scaler, "_init_scale", None),
        "growth_factor": getattr(scaler, "_growth_factor", None),
        "backoff_factor": getattr(scaler, "_backoff_factor", None),
        "growth_interval": getattr(scaler, "_growth_interval", None),
    }
    found = {}
    for name, value in rules.items():
        try:
            found[name] = getattr(Settings().replace(**{name: value}), name)
        except SettingsError:
            pass  # a disabled scaler has none; what is out of range stays the scaler's own affair
    return found


def has_finite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether none of an optimizer's gradients has inf or NaN; waits for the device."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return all(bool(torch.isfinite(gradient).all()) for gradient in map(_dense, gradients))


class _ParameterGroup:
    """As much of an optimizer as torch's unscaling looks at."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]


_OWN_ATTRIBUTES = ("_settings", "_listener_ref", "_skipped_by", "_last_skipped", "_theirs", "_lent", "_ruled", "_as_arrived")
_RULES = ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval")
_NO_OPTIMIZER = -1
_STATE_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _usual_state() -> dict[str, Any]:
    """What a scaler has that was not disabled when it was made, before its first use."""
    return dict(torch.amp.GradScaler("cpu").__dict__)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _nobody() -> None:
    return None


def _snapshot(scale: torch.Tensor) -> torch.Tensor | float:
    return host_value(scale) if scale.is_cpu else scale.clone()


def _total(tensors: list[torch.Tensor]) -> torch.Tensor:
    first, *rest = tensors
    total = first.detach().reshape(()).clone()  # torch's update() adds to the original in place
    for tensor in rest:
        total = total + tensor.to(total.device, non_blocking=True)
    return total
