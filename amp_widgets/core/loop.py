"""The live loop: attached to a model and its optimizers, it holds requests until the step boundary and records every step."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_widgets.core.autocast import LiveAutocast, Support, autocast_support
from amp_widgets.core.checkpointing import Checkpointing, Layer
from amp_widgets.core.history import COLUMNS, DEFAULT_CAPACITY, Event, History
from amp_widgets.core.memory import MemoryMeter, MemoryReading, meter_for
from amp_widgets.core.readback import Readback
from amp_widgets.core.scaler import LiveScaler, ScaledStep
from amp_widgets.core.settings import AutocastName, Settings, describe_changes, format_scale
from amp_widgets.errors import ModelError, SessionClosedError, SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Changes that wait for the next step boundary.

    Parameters
    ----------
    changes
        Setting → value, validated; layer names instead of globs.
    source
        Who asked: ``"script"``, ``"widget"``, ``"magic"``, ...
    """

    changes: Mapping[str, Any]
    source: str = "script"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopStatus:
    """How a loop stands, without waiting for the device. Sizes in bytes, times in seconds; NaN where not measured.

    Parameters
    ----------
    step
        Steps completed.
    step_s
        Median duration of the recent steps, from the step's begin to its boundary.
    steps_per_s
        Of the recent steps, everything between them included (data loading, validation).
    scale
        The live loss scale; None while the loss is not scaled.
    allocated_bytes, peak_bytes
        Of the newest measured step.
    overall_peak_bytes
        The highest peak of all measured steps.
    """

    step: int
    loss: float
    step_s: float
    steps_per_s: float
    skipped_steps: int
    scale: float | None
    allocated_bytes: float
    peak_bytes: float
    overall_peak_bytes: float
    last_rejection: str | None


class LiveLoop:
    """Makes precision, loss scale and checkpointed layers of a training loop changeable while it runs.

    A step begins with the first `autocast()`, forward in grad mode, or ``scaler.scale()`` after a boundary, and ends with
    ``scaler.update()``; where the scaler is not used, with the optimizers' step. Requests are applied between steps, on the
    thread that trains.

    Parameters
    ----------
    model
        The model; its own attributes, hooks and names stay as they are.
    optimizers
        The optimizers that make up one step, each with parameters of the model. Empty: any optimizer that has some.
    memory_every
        Measure memory on every n-th step; 0 never.
    reset_peak
        On CUDA, whether torch's peak counter may be reset at every step, without which a peak per step cannot be read.
    history_capacity
        Rows kept at full resolution.
    clock
        Seconds, monotonic.

    Raises
    ------
    ModelError
        When the model has no parameters, or an optimizer has none of the model's.

    Notes
    -----
    One model has one loop: attaching a second closes the first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        memory_every: int = 1,
        reset_peak: bool = True,
        history_capacity: int = DEFAULT_CAPACITY,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        devices = _devices(model)
        _check_optimizers(model, optimizers)
        if memory_every < 0:
            raise SettingsError(f"memory_every: got {memory_every}, expected a number of steps, or 0 to measure nothing")
        before = _attached.pop(model, None)
        previous = before() if before is not None else None
        if previous is not None:
            previous.close()

        self.device = devices[0]
        self.memory_every = memory_every
        self.on_boundary: list[Callable[[], None]] = []
        self._model: nn.Module | None = model
        self._optimizers = tuple(optimizers)
        self._module_ids = {id(module) for module in model.modules()}
        self._clock = clock
        self._started_s = clock()
        self._lock = threading.RLock()

        self._settings = Settings()
        self._queue: collections.deque[Request] = collections.deque()
        self._checkpointing = Checkpointing(model)
        self._layers = self._checkpointing.layers
        self._support = autocast_support(self.device)
        self._scaler = LiveScaler(self.device.type, self._settings)
        self._scaler.listen(self)
        self._meter: MemoryMeter = meter_for(model, self._optimizers, reset_peak=reset_peak)
        self._devices = devices
        extra = [f"{name}[{device}]" for device in devices for name in _MEMORY_COLUMNS] if len(devices) > 1 else []
        self._history = History(capacity=history_capacity, extra_columns=extra)

        self._outbox: collections.deque[_Row | Event] = collections.deque()
        self._totals = _Totals()
        self._step = 0
        self._open: _OpenStep | None = None
        self._owner: int | None = None
        self._closed = False
        self._stepped: set[int] = set()
        self._known: dict[int, tuple[weakref.ref[torch.optim.Optimizer], bool]] = {}

        on_forward, on_optimizer_step = _weak_hooks(self)
        self._forward_hook = _ForwardHook(on_forward)
        optimizer_handle = register_optimizer_step_post_hook(on_optimizer_step)
        self._finalizer = weakref.finalize(self, _let_go, optimizer_handle, self._forward_hook, self._checkpointing, self._meter)
        self._finalizer.atexit = False
        self._arm()
        _attached[model] = weakref.ref(self)

    # ---- what the user's loop calls ---------------------------------------------------------------------------------

    def autocast(self, *, enabled: bool = True, cache_enabled: bool | None = None) -> LiveAutocast:
        """Drop-in for ``torch.autocast(...)``: a region in the format in force when it is entered."""
        return LiveAutocast(self, self.device.type, enabled=enabled, cache_enabled=cache_enabled)

    @property
    def scaler(self) -> LiveScaler:
        """Drop-in for ``torch.amp.GradScaler``, also right while autocast is fp32 or bf16."""
        return self._scaler

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of the step in progress, in a loop that does not call ``scaler.scale(loss)``."""
        self._begin()
        self._add_loss(loss)

    # ---- settings ---------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._settings

    @property
    def pending(self) -> Request | None:
        """What waits for the next boundary, all requests taken together, or None."""
        with self._lock:
            if not self._queue:
                return None
            merged: dict[str, Any] = {}
            for request in self._queue:
                merged.update(request.changes)
            return Request(changes=merged, source=self._queue[-1].source)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What may be checkpointed, read from the live model: name, type, parameters, and why not where it may not."""
        if not self._closed:
            self._layers = self._checkpointing.layers
        return self._layers

    @property
    def layers_seen(self) -> tuple[Layer, ...]:
        """The layers as they were when last read: free of cost."""
        return self._layers

    @property
    def support(self) -> Mapping[AutocastName, Support]:
        """Which autocast formats the device has."""
        return self._support

    def request(self, *, source: str = "script", **changes: Any) -> Request:
        """Ask for settings, from any thread; in force from the step that begins next.

        Parameters
        ----------
        source
            Who asks, for the event log.
        **changes
            Fields of `Settings`. ``init_scale`` sets the live scale; ``checkpointed`` takes names, globs or a plan.

        Raises
        ------
        SettingsError
            When the request cannot be met; nothing is changed, and the rejection is an event.
        SessionClosedError
            After `close`.
        """
        with self._lock:
            if self._closed:
                raise SessionClosedError(
                    "request: this session was closed, and no longer controls the model; make a new AmpSession"
                )
            try:
                request = Request(changes=self._validated(changes), source=source)
            except SettingsError as error:
                self._reject(str(error), changes, source)
                raise
            self._queue.append(request)
            return request

    def apply_pending(self) -> None:
        """Apply what waits, if no step is in progress; for the thread that trains."""
        if self._open is None and not self._closed:
            self._apply_queue()

    def restart_scale(self) -> None:
        """Set the live scale to the initial scale in force, between steps; for a run that starts over."""
        with self._lock:
            self._scaler.configure(self._settings, set_scale=True)
            self._totals.scale = None

    # ---- what was recorded ------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Every step so far; waits until the device has delivered the newest values."""
        self._drain(wait=True)
        return self._history

    @property
    def history_so_far(self) -> History:
        """Every step whose values have arrived; never waits."""
        self._drain(wait=False)
        return self._history

    def status(self) -> LoopStatus:
        """How the loop stands; never waits for the device."""
        self._drain(wait=False)
        with self._lock:
            totals = self._totals
            scale = totals.scale if totals.scale is not None else self._settings.init_scale
            return LoopStatus(
                step=self._step,
                loss=totals.loss,
                step_s=_median(totals.durations_s),
                steps_per_s=_rate(totals.boundaries_s),
                skipped_steps=totals.skipped_steps,
                scale=scale if self._settings.scales_loss else None,
                allocated_bytes=totals.allocated_bytes,
                peak_bytes=totals.peak_bytes,
                overall_peak_bytes=totals.overall_peak_bytes,
                last_rejection=totals.last_rejection,
            )

    @property
    def memory_source(self) -> str:
        """How the memory numbers are obtained, and on what; or why they are not."""
        if self.memory_every == 0:
            return "not measured: memory_every is 0"
        return self._meter.source if self.memory_every == 1 else f"{self._meter.source}, on every {self.memory_every}th step"

    @property
    def compiled(self) -> bool:
        """Whether the model, or a part of it, goes through torch.compile."""
        return self._checkpointing.compiled

    def record_event(self, kind: str, reason: str, **detail: Any) -> None:
        """Add an event at the present step."""
        with self._lock:
            self._put_event(kind, reason, {name: _plain(value) for name, value in detail.items()})

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def step_in_progress(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._open is not None

    def own(self, thread_ident: int | None) -> None:
        """Let only this thread begin steps (a background run); None lets any."""
        self._owner = thread_ident
        if thread_ident is None:
            self._arm()
        else:
            self._forward_hook.disarm()

    def begin_step(self) -> None:
        """Begin a step now, unless one is in progress; for loops that know where theirs begin."""
        self._begin()

    def abandon_step(self) -> None:
        """Forget a step that was broken off by an exception or an interrupt; it is not recorded."""
        if self._open is None:
            return
        self._open = None
        self._stepped.clear()
        self._meter.abandon()
        self._scaler.abandon_step()
        self._arm()

    def close(self) -> None:
        """Let go of the model: no layer checkpointed, no hook left; the scaler goes on as a plain ``GradScaler``."""
        if self._closed:
            return
        self.abandon_step()
        self._drain(wait=True)
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._forward_hook.disarm()
            self._layers = self._checkpointing.layers
            self._finalizer()
            self._scaler.release()
            if self._model is not None:
                _attached.pop(self._model, None)
            self._model = None
            self._optimizers = ()
            self._known.clear()
            self.on_boundary.clear()

    # ---- told by the autocast region (Autocasting) ------------------------------------------------------------------

    def enter_autocast(self) -> AutocastName:
        if torch.is_grad_enabled():
            self._begin(by_autocast=True)
        return self._settings.autocast

    def exit_autocast(self, failed: bool) -> None:
        step = self._open
        if step is None:
            return
        if failed or (step.by_autocast and step.inferred and not step.trained):
            self.abandon_step()  # a validation pass under no_grad inside of it is no step

    # ---- told by the scaler (ScalerListener) ------------------------------------------------------------------------

    def scaling(self, outputs: object) -> None:
        self._begin()
        if self._open is not None:
            self._open.trained = self._open.scaler_used = True
        if isinstance(outputs, torch.Tensor):
            self._add_loss(outputs)
        elif isinstance(outputs, (list, tuple)):
            for output in outputs:
                if isinstance(output, torch.Tensor):
                    self._add_loss(output)

    def stepping(self) -> None:
        self._begin()
        if self._open is not None:
            self._open.scaler_used = True

    def updated(self, step: ScaledStep) -> None:
        self._end(step)

    def adopted(self, settings: Settings, changes: dict[str, Any]) -> None:
        with self._lock:
            new = self._settings.replace(**{name: getattr(settings, name) for name in changes})
            self._settings = new
            self._put_event(
                "applied", describe_changes(changes), {**{k: _plain(v) for k, v in changes.items()}, "source": "scaler"}
            )

    def parameter_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        names = {} if self._model is None else {id(p): name for name, p in self._model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [names.get(id(p), f"parameter {i} of shape {tuple(p.shape)}") for i, p in enumerate(parameters)]

    # ---- told by torch's global hooks -------------------------------------------------------------------------------

    def _forward(self, module: nn.Module) -> None:
        if id(module) not in self._module_ids:
            inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)  # compiled, DDP, DataParallel
            if inner is None or id(inner) not in self._module_ids:
                return
        if not torch.is_grad_enabled():
            if self._open is not None:
                self._open.inferred = True
            return
        self._begin()
        if self._open is not None and self._owner_is_here():
            self._open.trained = True
            self._forward_hook.disarm()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_ours(optimizer) or not self._owner_is_here() or (self._open is not None and self._open.scaler_used):
            return
        again = id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))
        if again or len(self._stepped) >= len(self._optimizers):
            self._end(ScaledStep(None, None, False, None))

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _begin(self, *, by_autocast: bool = False) -> None:
        if self._open is not None or self._closed or not self._owner_is_here():
            return
        self._apply_queue()
        if not by_autocast:
            self._forward_hook.disarm()
        measured = self.memory_every > 0 and self._step % self.memory_every == 0
        if measured:
            self._meter.begin()
        self._open = _OpenStep(
            by_autocast=by_autocast, measured=measured, begun_s=self._clock(), timer=_DeviceTimer.start(self.device)
        )

    def _end(self, scaled: ScaledStep) -> None:
        if self._closed or not self._owner_is_here():
            return
        opened, self._open = self._open, None
        now_s = self._clock()
        self._stepped.clear()
        if opened is not None and opened.timer is not None:
            opened.timer.stop()
        reading = self._meter.end() if opened is not None and opened.measured else None
        self._outbox.append(
            _Row(
                step=self._step,
                time_s=now_s - self._started_s,
                duration_s=math.nan if opened is None else now_s - opened.begun_s,
                timer=None if opened is None else opened.timer,
                skipped=scaled.skipped,
                scaled=scaled.used is not None,
                growth_interval=self._settings.growth_interval,
                memory=reading,
                values=Readback((None if opened is None else opened.loss, scaled.used, scaled.after, scaled.found_inf)),
            )
        )
        self._step += 1
        self._apply_queue()
        self._arm()
        self._drain(wait=False)
        for listener in tuple(self.on_boundary):
            listener()

    def _add_loss(self, loss: torch.Tensor) -> None:
        """Sum up what is backpropagated in a step: the quantity whose gradient the step applies."""
        step = self._open
        if step is None or loss.numel() != 1 or type(loss) not in (torch.Tensor, nn.Parameter):
            return
        value = loss.detach().reshape(())
        if step.loss is None:
            step.loss = value
        else:
            step.loss = step.loss.float() + value.to(step.loss.device, non_blocking=True)

    def _owner_is_here(self) -> bool:
        return self._owner is None or self._owner == threading.get_ident()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._optimizers:
            return any(optimizer is ours for ours in self._optimizers)
        known = self._known.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            ids = set() if self._model is None else {id(p) for p in self._model.parameters()}
            ours = any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
            known = self._known[id(optimizer)] = (weakref.ref(optimizer), ours)
        return known[1]

    def _arm(self) -> None:
        if self._owner is None and not self._closed:
            self._forward_hook.arm()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _validated(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        if not changes:
            raise SettingsError("request: got no change, expected settings by name, such as autocast='fp16'")
        changes = dict(changes)
        prospective = self._settings
        for request in self._queue:
            prospective = prospective.replace(**request.changes)
        if "checkpointed" in changes:
            wanted = getattr(changes["checkpointed"], "layers", changes["checkpointed"])
            changes["checkpointed"] = self._checkpointing.resolve(prospective.replace(checkpointed=wanted).checkpointed)
        settings = prospective.replace(**changes)
        support = self._support[settings.autocast]
        if "autocast" in changes and not support.available:
            usable = ", ".join(repr(name) for name, s in self._support.items() if s.available)
            raise SettingsError(f"autocast: got {settings.autocast!r}, expected one of {usable} on {self.device}: {support.note}")
        return {name: getattr(settings, name) for name in changes}

    def _apply_queue(self) -> None:
        if not self._queue:
            return
        with self._lock:
            while self._queue:
                self._apply(self._queue[0])
                self._queue.popleft()  # only now: an interrupt leaves it waiting

    def _apply(self, request: Request) -> None:
        before = self._settings
        try:
            settings = before.replace(**request.changes)
            self._checkpointing.apply(settings.checkpointed)
            self._scaler.configure(settings, set_scale="init_scale" in request.changes)
        except Exception as error:  # whatever it is, it is shown: a request is never half applied nor lost
            self._roll_back(before)
            reason = str(error) if isinstance(error, SettingsError) else f"{type(error).__name__}: {error}"
            self._reject(reason, request.changes, request.source)
        except BaseException:
            self._roll_back(before)
            raise
        else:
            self._settings = settings
            if "init_scale" in request.changes:
                self._totals.scale = None
            self._totals.last_rejection = None
            detail = {name: _plain(value) for name, value in request.changes.items()}
            self._put_event("applied", describe_changes(request.changes), {**detail, "source": request.source})

    def _roll_back(self, settings: Settings) -> None:
        self._checkpointing.apply(settings.checkpointed)
        self._scaler.configure(settings, set_scale=False)

    def _reject(self, reason: str, changes: Mapping[str, Any], source: str) -> None:
        self._totals.last_rejection = reason
        self._put_event("rejected", reason, {**{name: _plain(value) for name, value in changes.items()}, "source": source})

    # ---- from the device to the history -----------------------------------------------------------------------------

    def _put_event(self, kind: str, reason: str, detail: Mapping[str, Any]) -> None:
        step = self._step
        self._outbox.append(Event(step=step, kind=kind, reason=reason, detail=detail, time_s=self._clock() - self._started_s))

    def _drain(self, *, wait: bool) -> None:
        if not self._outbox:
            return
        with self._lock:
            while self._outbox:
                item = self._outbox[0]
                if isinstance(item, Event):
                    self._history.record(item)
                elif wait or item.ready():
                    self._write(item)
                else:
                    return
                self._outbox.popleft()

    def _write(self, row: _Row) -> None:
        loss, used, after, found_inf = row.values.values()
        skipped = row.skipped if row.skipped is not None else found_inf > 0
        scale = used if row.scaled else 1.0
        values = {
            "step": row.step,
            "time_s": row.time_s,
            "loss": loss,
            "scale": scale,
            "skipped": float(skipped),
            "step_s": row.step_s(),
        }
        if row.memory is not None:
            values.update(self._memory_columns(row.memory))
        self._history.append(**values)
        self._totals.add(values)
        if skipped:
            reason = f"skipped: inf or NaN in the gradients at scale {format_scale(scale)}"
            self._record(row.step, row.time_s, "skipped", reason, {"scale": scale})
        if not row.scaled:
            return
        known = self._totals.last_after
        if known is not None and known != used:
            self._record_scale(row.step, row.time_s, known, used, f"set to {format_scale(used)}")
        if after != used:
            why = "inf or NaN in the gradients" if skipped else f"{row.growth_interval} steps without inf or NaN"
            self._record_scale(row.step + 1, row.time_s, used, after, f"{'backed off' if after < used else 'grew'}: {why}")
        self._totals.last_after = self._totals.scale = after

    def _record_scale(self, step: int, time_s: float, before: float, after: float, reason: str) -> None:
        text = f"scale {format_scale(before)} → {format_scale(after)} ({reason})"
        self._record(step, time_s, "scale_changed", text, {"from": before, "to": after})

    def _record(self, step: int, time_s: float, kind: str, reason: str, detail: Mapping[str, Any]) -> None:
        self._history.record(Event(step=step, kind=kind, reason=reason, detail=detail, time_s=time_s))

    def _memory_columns(self, reading: MemoryReading) -> dict[str, float]:
        columns = {
            "allocated_bytes": reading.allocated_bytes,
            "peak_bytes": reading.peak_bytes,
            "reserved_bytes": reading.reserved_bytes,
        }
        if len(self._devices) > 1:
            for device, parts in reading.per_device.items():
                columns.update({f"{name}[{device}]": part for name, part in zip(_MEMORY_COLUMNS, parts, strict=True)})
        return columns


_MEMORY_COLUMNS = tuple(name for name in COLUMNS if name.endswith("_bytes"))
_RECENT_STEPS = 50

_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LiveLoop]] = weakref.WeakKeyDictionary()


class _ForwardHook:
    """torch's global forward hook, there only between steps: while it is, every module call takes torch's slow path."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook
        self._handle: Any = None

    def arm(self) -> None:
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._hook)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _OpenStep:
    __slots__ = ("begun_s", "by_autocast", "inferred", "loss", "measured", "scaler_used", "timer", "trained")

    def __init__(self, *, by_autocast: bool, measured: bool, begun_s: float, timer: _DeviceTimer | None) -> None:
        self.by_autocast = by_autocast
        self.measured = measured
        self.begun_s = begun_s
        self.timer = timer
        self.inferred = False
        self.trained = False
        self.scaler_used = False
        self.loss: torch.Tensor | None = None


@dataclasses.dataclass(slots=True)
class _Row:
    step: int
    time_s: float
    duration_s: float
    timer: _DeviceTimer | None
    skipped: bool | None
    scaled: bool
    growth_interval: int
    memory: MemoryReading | None
    values: Readback

    def ready(self) -> bool:
        return self.values.ready() and (self.timer is None or self.timer.ready())

    def step_s(self) -> float:
        return self.duration_s if self.timer is None else self.timer.seconds()


class _DeviceTimer:
    """Times a step on CUDA's own clock: the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)
        self._first.record(self._stream)

    @classmethod
    def start(cls, device: torch.device) -> _DeviceTimer | None:
        return cls(device) if device.type == "cuda" else None

    def stop(self) -> None:
        self._last.record(self._stream)

    def ready(self) -> bool:
        return bool(self._last.query())

    def seconds(self) -> float:
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) / 1000


class _Totals:
    """What the status line needs, kept as rows are written."""

    def __init__(self) -> None:
        self.loss = math.nan
        self.durations_s: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self.boundaries_s: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self.skipped_steps = 0
        self.scale: float | None = None
        self.last_after: float | None = None
        self.allocated_bytes = math.nan
        self.peak_bytes = math.nan
        self.overall_peak_bytes = math.nan
        self.last_rejection: str | None = None

    def add(self, row: Mapping[str, float]) -> None:
        self.loss = row["loss"]
        self.durations_s.append(row["step_s"])
        self.boundaries_s.append(row["time_s"])
        self.skipped_steps += int(row["skipped"])
        peak = row.get("peak_bytes", math.nan)
        if not math.isnan(peak):
            self.peak_bytes = peak
            self.overall_peak_bytes = peak if math.isnan(self.overall_peak_bytes) else max(peak, self.overall_peak_bytes)
        allocated = row.get("allocated_bytes", math.nan)
        if not math.isnan(allocated):
            self.allocated_bytes = allocated


def _weak_hooks(loop: LiveLoop) -> tuple[Callable[..., None], Callable[..., None]]:
    # torch's global hooks must not keep the loop, and through it the model, alive
    reference = weakref.ref(loop)

    def forward(module: nn.Module, args: Any) -> None:
        live = reference()
        if live is not None:
            live._forward(module)

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        live = reference()
        if live is not None:
            live._optimizer_stepped(optimizer)

    return forward, stepped


def _let_go(optimizer_handle: Any, forward_hook: _ForwardHook, checkpointing: Checkpointing, meter: MemoryMeter) -> None:
    optimizer_handle.remove()
    forward_hook.disarm()
    checkpointing.close()
    meter.close()


def _devices(model: nn.Module) -> list[torch.device]:
    parameters = list(model.parameters())
    if not parameters:
        raise ModelError(f"model: got a {type(model).__name__} without parameters, expected a model to train")
    devices = list(dict.fromkeys(p.device for p in parameters))
    if any(device.type == "meta" for device in devices):
        raise ModelError(
            "model: got parameters on the meta device, which hold no numbers; materialise them first: model.to_empty(device=...)"
        )
    return sorted(devices, key=lambda device: (device.type == "cpu", str(device)))


def _check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    ids = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise ModelError(f"optimizer: got a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        theirs = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in ids for p in theirs):
            raise ModelError(
                f"optimizer: got a {type(optimizer).__name__} with {len(theirs)} parameters, none of them the model's, "
                "expected one made with model.parameters(). Was the model replaced (or moved with a copy) after the optimizer was made?"
            )


def _plain(value: Any) -> Any:
    """As JSON can keep it; what was asked for may be anything."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)


def _median(values: Sequence[float]) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[len(known) // 2] if known else math.nan


def _rate(times_s: Sequence[float]) -> float:
    if len(times_s) < 2 or times_s[-1] <= times_s[0]:
        return math.nan
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])
