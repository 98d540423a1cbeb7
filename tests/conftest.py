"""What holds for every test: markers by directory, time limits, and nothing left behind in torch.

Loaded for tests/gpu too, which runs where only torch, numpy and pytest are installed: nothing else is imported here.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported, for child processes too: threads that wait for each other on a busy machine slow tiny models tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Texts are compared as they are in the code; for the kernels and pages that tests start, too.
os.environ["AMP_WIDGETS_LANG"] = "en"

HERE = Path(__file__).parent
MARKERS = {"browser": pytest.mark.browser, "notebooks": pytest.mark.notebook, "gpu": pytest.mark.gpu}
TIMEOUTS_S = {"browser": 300, "notebooks": 180, "gpu": 120}
DEFAULT_TIMEOUT_S = 90

# Ten seconds and more, the longest first. They are begun first, so that no worker is left with one when the others have ended.
LONG = (
    "capture/test_loop_forms.py", "analysis/test_planner.py", "analysis/test_fake_step.py", "core/memory/test_malloc.py",
    "core/memory/test_device_threads.py", "test_session_plan.py", "test_kernel.py", "analysis/test_models_of_a_package.py",
    "test_readme.py", "test_captured_cell.py", "test_imports.py", "test_out_of_memory.py", "test_messages.py", "test_magics.py",
    "analysis/test_batch_size.py", "core/memory/test_whole_step.py", "test_busy_cell.py", "widgets/test_untranslated.py",
    "widgets/test_dashboard.py", "core/test_checkpointing.py", "test_fork.py", "scenarios/test_measured.py",
    "core/test_recompute.py", "analysis/test_compare.py", "capture/test_on_cpu.py", "capture/test_capture.py",
)  # fmt: skip

try:
    import hypothesis
except ImportError:
    pass
else:  # a busy machine is no bug, and a failure elsewhere must be repeatable here
    hypothesis.settings.register_profile("amp_widgets", deadline=None, print_blob=True, database=None)
    hypothesis.settings.load_profile("amp_widgets")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limits_time = config.pluginmanager.hasplugin("timeout")
    for item in items:
        if HERE not in item.path.parents:
            continue
        directory = item.path.relative_to(HERE).parts[0]
        if directory in MARKERS:
            item.add_marker(MARKERS[directory])
        if limits_time and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S.get(directory, DEFAULT_TIMEOUT_S)))
    places = {HERE / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays() -> None:
    """The garbage collector, which many tests call, need not go through what imports and the modules before have made.

    Nor need what asks it for objects or for who refers to one, as a session does that looks for its optimizers.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def torch_left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a patch, a global hook or a mode behind in torch: it would change the tests after it."""
    before = _torch_state()
    yield
    if before is None:  # torch came in with this very test
        return
    after = _torch_state()
    left = [name for name, value in before.items() if after is None or after[name] != value]
    _forget_compiled_code()
    assert not left, f"{request.node.nodeid} left these changed in torch: {', '.join(left)}"


def _forget_compiled_code() -> None:
    """A loop watches forwards otherwise where torch.compile is in use, so that no test may find what another has compiled."""
    dynamo, utils = sys.modules.get("torch._dynamo"), sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and utils is not None and utils.counters["frames"]["total"]:
        dynamo.reset()
        utils.counters.clear()


def _torch_state() -> dict[str, object] | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "amp"):
        return None
    scaler = torch.amp.GradScaler
    module = torch.nn.modules.module
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "dispatch modes on the stack": torch._C._len_torch_dispatch_stack(),
        "function modes on the stack": torch._C._len_torch_function_stack(),
        "autocast.__enter__": torch.amp.autocast_mode.autocast.__enter__,
        "torch.autograd.backward": torch.autograd.backward,
        "GradScaler's methods": (scaler.scale, scaler.unscale_, scaler.step, scaler.update, scaler.load_state_dict),
        "Module.__call__": torch.nn.Module.__call__,
        "global forward hooks": len(module._global_forward_hooks) + len(module._global_forward_pre_hooks),
        "what is noted of global forward hooks": (
            len(module._global_forward_hooks_always_called), len(module._global_forward_hooks_with_kwargs),
        ),
        "global backward hooks": len(module._global_backward_hooks) + len(module._global_backward_pre_hooks),
    }


@pytest.fixture(scope="session")
def in_ci() -> bool:
    """Whether a test that cannot run here must fail rather than be skipped (CI=true)."""
    return os.environ.get("CI", "").lower() in ("1", "true")
