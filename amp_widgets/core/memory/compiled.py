"""Whether a model, or a step, runs code made by ``torch.compile``, inside of which tensors cannot be counted."""

from __future__ import annotations

import sys
import threading
from typing import ClassVar

from torch import nn
from torch._C._dynamo import eval_frame

REASON = "tensors inside of code made by torch.compile cannot be counted on a CPU"


def why_compiled(model: nn.Module) -> str | None:
    """Why the bytes of a compiled model cannot be counted, or None if neither it nor a submodule is compiled."""
    for name, module in model.named_modules():
        if is_compiled(module):
            what = f"layer {name!r}" if name else "the model"
            return f"{what} is compiled, and {REASON}"
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether this very module was compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    # Read from the dictionaries: __getattr__ of an OptimizedModule goes on to the module inside.
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


class CompiledCode:
    """Watches whether compiled code is entered, or made, from its making until `stop`.

    A model may be compiled behind the meter's back, as ``model = torch.compile(model)`` leaves no mark on the original, and
    so may be a loss function. Dynamo calls a hook, one per process, whenever it looks for the compiled form of a frame.
    """

    _watching: ClassVar[set[CompiledCode]] = set()
    _lock: ClassVar[threading.RLock] = threading.RLock()  # reentrant, as the garbage collector may come to stop one

    def __init__(self) -> None:
        self._entered = False
        self._made = frames_compiled()
        with CompiledCode._lock:
            previous = eval_frame.set_guard_complete_hook(_note_entered)
            if previous is None or previous is _note_entered:
                CompiledCode._watching.add(self)
            else:  # whoever uses the hook compiles, and needs it more
                eval_frame.set_guard_complete_hook(previous)
                self._entered = True

    def stop(self) -> bool:
        """Stop watching, and say whether compiled code may have run; may be called more than once."""
        with CompiledCode._lock:
            CompiledCode._watching.discard(self)
            if not CompiledCode._watching:
                previous = eval_frame.set_guard_complete_hook(None)
                if previous is not _note_entered:
                    eval_frame.set_guard_complete_hook(previous)
        return self._entered or frames_compiled() != self._made


def _note_entered(cache_hit: bool) -> bool:
    for watching in tuple(CompiledCode._watching):
        watching._entered = True
    return True  # go on as if there were no hook


def frames_compiled() -> int:
    """How many frames ``torch.compile`` has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])
