"""The checks in this directory need CUDA; torch, numpy and pytest are all that they import. `make gpu` runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CUDA = torch.cuda.is_available()


def pytest_report_header() -> str:
    where = torch.cuda.get_device_name() if CUDA else "no CUDA device"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}), {where}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not CUDA:
            item.add_marker(pytest.mark.skip(reason="needs CUDA; torch sees none"))


@pytest.fixture(autouse=True)
def without_notebook_packages() -> Iterator[None]:
    """These checks must also hold where no widget or chart library is installed: none may come in through them."""
    names = ("ipywidgets", "plotly", "anywidget", "tsdownsample")
    before = {name for name in names if name in sys.modules}
    yield
    brought = {name for name in names if name in sys.modules} - before
    assert not brought, f"imported by a check on the GPU: {', '.join(sorted(brought))}"
