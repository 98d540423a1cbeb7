"""What importing costs and does: nothing heavy, nothing optional where it is not needed, no side effects."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "amp_widgets"
OPTIONAL = (
    "IPython", "ipykernel", "ipywidgets", "anywidget", "plotly", "tsdownsample", "sklearn", "comm", "traitlets", "pandas",
    "pyarrow", "kaleido", "tensorboard", "trackio",
)  # fmt: skip
WITHOUT_TORCH = (
    "amp_widgets", "amp_widgets.errors", "amp_widgets.core.settings", "amp_widgets.core.history", "amp_widgets.core.formats",
)  # fmt: skip


def core_modules() -> list[str]:
    paths = sorted((PACKAGE / "core").rglob("*.py"))
    return [".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def run_python(code: str) -> str:
    """Run the code in a fresh interpreter in which warnings are errors, as here; what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK = """
import sys

def block(*names):
    assert not set(names) & set(sys.modules), sorted(set(names) & set(sys.modules))
    sys.modules.update(dict.fromkeys(names))  # None: importing it raises ModuleNotFoundError, and find_spec finds nothing
"""


def test_importing_the_package_brings_in_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "tqdm", *OPTIONAL)
    out = run_python(f"""
        import json, sys
        before = set(sys.modules)
        import amp_widgets
        print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} & set({heavy!r}))))
    """)
    assert json.loads(out) == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_without_torch(module: str) -> None:
    out = run_python(f"{BLOCK}\nblock('torch')\nimport {module}\nprint('imported')")
    assert out == "imported\n"


def test_charts_import_without_torch() -> None:
    modules = sorted(path.stem for path in (PACKAGE / "charts").glob("*.py") if path.stem != "__init__")
    lines = "\n".join(f"import amp_widgets.charts.{module}" for module in modules)
    out = run_python(f"{BLOCK}\nblock('torch')\n{lines}\nprint('imported')")
    assert out == "imported\n"


def test_core_and_session_work_without_the_notebook_packages_and_what_needs_them_names_the_extra() -> None:
    lines = "\n".join(f"import {module}" for module in core_modules())
    out = run_python(f"""{BLOCK}
block(*{OPTIONAL!r})
{lines}
import torch
import amp_widgets as aw
import amp_widgets.session
from amp_widgets.errors import MissingExtraError

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with aw.AmpSession(model, optimizer) as session:
    session.request(autocast="bf16")
    with session.autocast():
        loss = model(torch.ones(4, 2)).square().mean()
    session.scaler.scale(loss).backward()
    session.scaler.step(optimizer)
    session.scaler.update()
    print(session.settings.autocast, len(session.history.columns("step")["step"]))
    try:
        session.dashboard()
    except MissingExtraError as error:
        print(error)
""")
    worked, error = out.splitlines()
    assert worked.split() == ["bf16", "1"]
    assert "notebook" in error


def test_importing_has_no_side_effects() -> None:
    lines = "\n".join(f"import {module}" for module in core_modules())
    out = run_python(f"""
import atexit, gc, json, signal, sys, threading, warnings
import numpy, torch, torch.utils.checkpoint, torch.utils._python_dispatch, torch.utils.data, tqdm.auto

def state():
    scaler, module = torch.amp.GradScaler, torch.nn.modules.module
    return {{
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signal handlers": {{int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()}},
        "atexit": atexit._ncallbacks(),
        "hooks": repr((sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, sys.meta_path)),
        "garbage": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "autograd": repr((torch.autograd.backward, torch.Tensor.backward, torch.amp.autocast_mode.autocast.__enter__)),
        "scaler": repr([getattr(scaler, name) for name in ("scale", "unscale_", "step", "update")]),
        "module": repr((torch.nn.Module.__call__, dict(module._global_forward_hooks), dict(module._global_forward_pre_hooks))),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(), torch.is_grad_enabled()),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random numbers": torch.random.get_rng_state().sum().item(),
        "default dtype": repr(torch.get_default_dtype()),
    }}

before = state()
{lines}
import amp_widgets, amp_widgets.session
after = state()
print(json.dumps([name for name in before if before[name] != after[name]]))
""")
    assert json.loads(out) == []
