"""A session around an unmodified loop: it finds model, optimizers and scaler by watching torch while the code runs."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_widgets.capture.added import HiddenGradients, backward_scaled, call_in_autocast, leaves_of
from amp_widgets.capture.models import Models
from amp_widgets.capture.patches import Patches
from amp_widgets.capture.regions import NAMES, Regions
from amp_widgets.core.hooks import within_another_step
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.scaler import LiveScaler, has_finite_gradients
from amp_widgets.core.settings import AutocastName


class Capture:
    """Runs a block of code, which knows nothing of it, under live control.

    As long as no setting is requested, everything the code does is the same, bit for bit. Its autocast regions, scalers,
    backward passes, optimizers and calls of modules are watched on the thread that enters, and on those started meanwhile.
    When the block ends, torch is as it was, and the session is closed; its history stays. A model is kept alive no longer than
    the code does: one that is freed ends its session, and the next one that is called begins another.

    Parameters
    ----------
    make_session
        Makes the loop for a model. What does not change how the model computes, such as a memory budget, may be set there, and
        holds from the first step on.
    on_found
        Is told of it before the second step begins, when it is known what the loop has: what is requested then is in force from
        that step on. Where memory runs out in the first step, when the block ends.
    model_name
        Which of several models to control: a variable's name (also ``trainer.model``), or a class's. None: those that are called
        until the second step begins, as parts of one.
    namespace
        The variables of the code.

    Notes
    -----
    Asking for autocast in code that has no region of its own adds it around the model's forward passes that record a graph,
    and asking for fp16 where there is no scaler adds scaling around backward and the optimizer's step.
    """

    def __init__(
        self,
        make_session: Callable[[nn.Module], LiveLoop],
        *,
        on_found: Callable[[LiveLoop], None] | None = None,
        model_name: str | None = None,
        namespace: Mapping[str, Any] | None = None,
    ) -> None:
        self.session: LiveLoop | None = None
        self.why_not: str | None = None
        """Why there is no session, or what went wrong in watching the code; said in the dashboard where there is one."""
        self._make_session = make_session
        self._on_found = on_found
        self._model_name = model_name
        self._namespace: Mapping[str, Any] = {} if namespace is None else namespace
        self._patches = Patches()
        self._regions = Regions(self, self._is_here)
        self._hidden = HiddenGradients()
        self._undo = contextlib.ExitStack()
        self._foreign_threads: dict[int | None, threading.Thread] = {}
        self._within = False
        self._in_closure = False
        self._leave_alone = False
        self._look_anew()

    def _look_anew(self) -> None:
        """Forget what was found."""
        self.session = None
        self._models = Models(self._namespace, self._model_name)
        self._scalers: list[torch.amp.GradScaler] = []
        self._together: tuple[str, ...] = ()  # names of the models, where they are several
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()  # what they train
        self._strangers: dict[int, weakref.ref[nn.Module]] = {}  # by id: a user's __eq__ may do anything
        self._outermost: set[int] = set()  # ids of modules that the code itself has called
        self._first_step_ended = False
        self._told = False
        self._has_regions = False
        self._kept_off = False
        self._scaled_last = False
        self._steps_in_backward = False

    def __enter__(self) -> Capture:
        importlib.import_module("torch._dynamo")  # else the first optimizer does, and dynamo would keep what it finds patched
        here = threading.get_ident()
        self._foreign_threads = {thread.ident: thread for thread in threading.enumerate() if thread.ident != here}
        try:
            self._undo.callback(self._close)
            self._undo.callback(self._hidden.give_back_all)
            self._undo.callback(self._patches.restore)
            self._install()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        loop = self.session
        if loop is not None:
            loop.died(error)
        self._undo.close()

    @property
    def names(self) -> list[str]:
        """Of the models that were called."""
        return list(self._models.by_name)

    @property
    def added(self) -> tuple[str, ...]:
        """What was asked for and is no part of the code itself, for people."""
        loop = self._loop()
        if loop is None:
            return ()
        parts = []
        if self._added_autocast(loop) is not None and not self._kept_off:
            parts.append("autocast around the model's forward")
        if loop.adds_scaling and not self._steps_in_backward:
            parts.append("loss scaling around backward and step")
        return tuple(parts)

    def remarks(self) -> list[str]:
        """Plain sentences on what was found."""
        loop = self._loop()
        if loop is None:
            return []
        said = []
        if self.why_not is not None:
            said.append(f"A part of this cell could not be watched: {self.why_not}.")
        if self.added:
            said.append(f"Added by amp_widgets: {' and '.join(self.added)}; your loop has none of its own.")
        if self._steps_in_backward and loop.adds_scaling:
            said.append("Your loop steps its optimizers within backward(), where no scaling can be added.")
        if self._added_autocast(loop) is not None and self._kept_off:
            name = loop.settings.autocast
            said.append(f"Your loop's autocast regions have enabled=False and stay off: nothing runs in {name}.")
        if len(self._together) > 1:
            each = "" if loop.has_users_scaler else " each optimizer's step counts as one, with its own loss;"
            said.append(f"Controls {' and '.join(self._together)};{each} %%amp --model NAME picks one.")
        if self._others:
            names = " and ".join(sorted(set(self._others.values())))
            said.append(f"This cell also trains {names}, which is not controlled here; %%amp --model NAME picks another model.")
        if loop.scaler.is_enabled() and not loop.settings.scales_loss:
            own = loop.settings.autocast
            said.append(f"Your loop scales the loss in {own} too; that stays so until autocast or the scale is set here.")
        return said

    # ---- told by the regions (RegionListener) -----------------------------------------------------------------------

    def region_begins(self, device_type: str, name: AutocastName, *, outermost: bool) -> AutocastName | None:
        loop = self._loop()
        if loop is None or device_type != loop.device.type:
            return None
        if self._first_step_ended and not self._told and torch.is_grad_enabled():
            self._tell(loop)
        in_force = loop.enter_autocast()
        if torch.is_grad_enabled():
            self._has_regions = True
            if outermost and not loop.overrides_autocast and name != in_force:
                loop.found(autocast=name)
        return in_force if loop.overrides_autocast else None

    def region_in_backward(self, device_type: str) -> AutocastName | None:
        loop = self._loop()
        if loop is None or device_type != loop.device.type or not loop.overrides_autocast:
            return None
        return loop.settings.autocast

    def region_ended(self, error: BaseException | None) -> None:
        loop = self._loop()
        if loop is not None:
            loop.exit_autocast(error)

    # ---- what stands in for torch's own -----------------------------------------------------------------------------

    def _install(self) -> None:
        self._undo.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
        region, scaler = torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler
        self._patches.replace(region, "__enter__", self._regions.entering(region.__enter__))
        self._patches.replace(region, "__exit__", self._regions.leaving(region.__exit__))
        for name in ("scale", "unscale_", "step", "update"):
            self._patches.replace(scaler, name, self._scaler_method(name, getattr(scaler, name)))
        self._patches.replace(torch.autograd, "backward", self._backward_function(torch.autograd.backward))
        self._patches.replace(nn.Module, "__call__", self._call_method(nn.Module.__call__))

    def _call_method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            # hot: once for each module in each forward pass. The first question lets torch.compile see the original alone.
            if is_compiling() or self._within or not torch.is_grad_enabled():
                return original(module, *args, **kwargs)

            def call() -> Any:
                __tracebackhide__ = True
                return original(module, *args, **kwargs)

            return self._called(module, call)

        return call_module

    def _called(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """A module was called by the code itself, or by a recompute."""
        __tracebackhide__ = True
        if not self._is_here() or torch._C._get_tracing_state() is not None:  # by torch.jit
            return call()
        loop = self._loop()
        if torch._C._current_graph_task_id() != -1:  # a recompute; parts of a layer are called here one by one
            if loop is None or id(module) not in self._outermost:
                return call()
            return self._run(loop, call)
        loop = self._loop_of(module)
        if loop is None:
            return self._run(None, call)
        self._outermost.add(id(module))
        if self._first_step_ended and not self._told:
            self._tell(loop)
        loop.forward_begins(module)
        if loop.overrides_autocast:
            self._regions.keep_up(loop.settings.autocast, loop.device.type)
        return self._run(loop, call)

    def _run(self, loop: LiveLoop | None, call: Callable[[], Any]) -> Any:
        __tracebackhide__ = True
        self._within, within = True, self._within
        try:
            name = None if loop is None else self._added_autocast(loop)
            if loop is None or name is None:
                return call()
            self._kept_off = bool(self._regions.depth(loop.device.type))  # in a region of the user's that is disabled
            return call() if self._kept_off else call_in_autocast(name, loop.device.type, call)
        finally:
            self._within = within

    def _scaler_method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if is_compiling():
                return original(scaler, *args, **kwargs)
            theirs = getattr(type(scaler), name) is not method  # a subclass's own, which has called this one
            if not self._see_scaler(scaler) or theirs:
                return original(scaler, *args, **kwargs)
            return getattr(scaler, name)(*args, **kwargs)  # a live one now

        method.__name__ = name
        return method

    def _backward_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            loop = self._loop()
            if is_compiling() or loop is None or not self._is_here() or torch._C._current_graph_task_id() != -1:
                return original(tensors, *args, **kwargs)
            begun = loop.backward_begins(tensors, scale=not (self._in_closure or self._steps_in_backward))
            self._scaled_last = begun is not tensors
            try:
                if not self._scaled_last:
                    return original(tensors, *args, **kwargs)
                parameters = {id(leaf): leaf for leaf in (*leaves_of(tensors), *loop.parameters())}
                return backward_scaled(loop.scaler, lambda: original(begun, *args, **kwargs), parameters.values())
            except RuntimeError as error:
                loop.died(error)
                raise

        return backward

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling() or not self._is_here() or within_another_step(sys._getframe(1)):
            return
        if torch._C._current_graph_task_id() != -1:
            self._steps_in_backward = True  # and with gradients that would still be scaled
            return
        try:
            self._meet_optimizer(optimizer)
        except Exception as error:  # as in `_loop_of`
            self.why_not = f"{type(error).__name__}: {error}"
        loop = self._loop()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._in_closure = callable(closure)  # its backward passes come too late for a step to be skipped
        if loop is None or not self._scaled_last:
            return
        if loop.scaling_added:
            skip = loop.scaler.must_skip(optimizer)
        else:  # it follows others, with which the step has ended
            skip = not loop.step_in_progress and not has_finite_gradients(optimizer)
        if skip:
            self._hidden.take(optimizer)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling() or within_another_step(sys._getframe(1)):
            return
        self._in_closure = False
        self._hidden.give_back(optimizer)

    # ---- who is who -------------------------------------------------------------------------------------------------

    def _is_here(self) -> bool:
        foreign = self._foreign_threads.get(threading.get_ident())
        return foreign is None or not foreign.is_alive()  # a new thread may have the number of one that has ended

    def _loop(self) -> LiveLoop | None:
        loop = self.session
        if loop is not None and loop.model_is_gone:
            self._end()
            return None
        return None if loop is None or loop.closed or self._leave_alone else loop

    def _loop_of(self, module: nn.Module) -> LiveLoop | None:
        """The loop that a module called by the code belongs to; nothing that goes wrong in finding out is the code's affair."""
        try:
            loop = self._loop()
            if loop is None:
                loop = self._discover(module)
            elif not loop.owns(module):
                self._meet(loop, module)
            return loop if loop is not None and loop.owns(module) else None
        except Exception as error:
            self.why_not = f"{type(error).__name__}: {error}"
            return None

    def _end(self) -> None:
        """The user has let go of the model: its training is over, and another one may follow."""
        loop = self.session
        self._look_anew()
        if loop is not None:
            loop.close()

    def _discover(self, module: nn.Module) -> LiveLoop | None:
        """A call of `module` may be the first one of the model that the code trains."""
        model = self._models.called(module)
        if model is None or self._leave_alone or self.session is not None:
            return None
        theirs = LiveLoop.of(model)
        if theirs is not None and theirs.step_in_progress:
            self._leave_alone = True  # the code has a session of its own, and uses its drop-ins
            self.why_not = "this cell uses an AmpSession of its own"
            if self._on_found is not None:
                self._on_found(theirs)
            return None
        return self._attach(model)

    def _meet(self, loop: LiveLoop, module: nn.Module) -> None:
        """A module is called that is no part of the model."""
        known = self._strangers.get(id(module))
        if known is not None and known() is module:
            return
        model = self._models.called(module)
        if model is not None and not self._told and self._model_name is None:
            self._control_all(loop)
        else:
            self._strangers[id(module)] = weakref.ref(module)

    def _control_all(self, loop: LiveLoop) -> None:
        models = self._models.by_name
        self._together = tuple(models)
        loop.control_together(models)

    def _meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: it shows what is trained."""
        loop = self._loop()
        if self._leave_alone or self.session is not loop or optimizer in self._others:
            return
        if loop is not None and loop.trains(optimizer):
            return
        owner = self._models.owner_of(optimizer)
        if loop is None:  # the model's own call was not seen
            if owner is not None:
                self._attach(owner)
        elif owner is not None and not self._told and self._model_name is None:
            self._control_all(loop)
        elif owner is not None or self._model_name is not None:
            self._others[optimizer] = "another model" if owner is None else self._models.name_of(owner)
        else:
            loop.count_optimizer(optimizer)  # it trains no model, but an image, for example

    def _attach(self, model: nn.Module) -> LiveLoop | None:
        """Make the session."""
        try:
            loop = self._make_session(model)
        except Exception as error:  # whatever it is, the user's code goes on
            self.why_not = f"{type(error).__name__}: {error}"
            return None
        self.session, self.why_not = loop, None
        loop.control_together({self._models.name_of(model): model})
        loop.remarks.append(lambda: " ".join(self.remarks()) or None)
        if torch.is_autocast_enabled(loop.device.type):
            name = NAMES.get(torch.get_autocast_dtype(loop.device.type))
            if name is not None:
                self._has_regions = True
                loop.found(autocast=name)
        loop.on_boundary.append(self._end_first_step)
        scalers, self._scalers = self._scalers, []
        for scaler in scalers:
            self._adopt(loop, scaler)
        loop.begin_step()
        return loop

    def _end_first_step(self) -> None:
        """It is known now what the loop has, but for models whose turn comes only now."""
        loop = self._loop()
        if loop is None:
            return
        self._first_step_ended = True
        loop.on_boundary.remove(self._end_first_step)
        if loop.settings.autocast == "fp16" and not (loop.has_users_scaler and loop.scaler.is_enabled()):
            loop.found(scaling=False)

    def _tell(self, loop: LiveLoop) -> None:
        """The second step is about to begin."""
        self._told = True
        if self._on_found is not None:
            self._on_found(loop)

    def _see_scaler(self, scaler: torch.amp.GradScaler) -> bool:
        """Take control of a scaler of the user's; whether it was done just now."""
        if isinstance(scaler, LiveScaler) or self._leave_alone or not self._is_here():
            return False
        loop = self._loop()
        if loop is None:
            if not any(scaler is other for other in self._scalers):
                self._scalers.append(scaler)
            return False
        return self._adopt(loop, scaler)

    def _adopt(self, loop: LiveLoop, scaler: torch.amp.GradScaler) -> bool:
        try:
            loop.adopt_scaler(scaler)
        except TypeError as error:
            self.why_not = f"its {type(scaler).__name__} cannot be controlled: {error}"
            return False
        return True

    def _added_autocast(self, loop: LiveLoop) -> AutocastName | None:
        """The format in which the model's forward is to run, in code that has no region of its own."""
        name = loop.settings.autocast
        return name if loop.overrides_autocast and name != "fp32" and not self._has_regions else None

    def _close(self) -> None:
        loop = self.session
        self._scalers.clear()
        self._within = False
        if loop is None:
            return
        if not (self._told or loop.closed) and (self._first_step_ended or loop.out_of_memory is not None):
            self._tell(loop)
        loop.close()
