"""What is no path of a run file is refused with what was got and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.errors import RecordingError
from amp_widgets.recorded_run import open_run
from amp_widgets.recording.run_path import run_path
from amp_widgets.session import AmpSession

NO_PATHS = (5, None, "", "  ", b"run.db", 3.5, "a\0b")


def test_what_is_a_path(tmp_path: Path) -> None:
    assert run_path(tmp_path / "run.db") == run_path(str(tmp_path / "run.db")) == tmp_path / "run.db"
    assert [run_path(one) for one in NO_PATHS] == [None] * len(NO_PATHS)
    assert run_path("~/run.db") == Path.home() / "run.db"
    assert run_path("~nobody-of-this-name/run.db") == Path("~nobody-of-this-name/run.db").absolute()


@pytest.mark.parametrize("path", NO_PATHS)
def test_what_is_said(path: Any) -> None:
    with pytest.raises(RecordingError) as caught:
        open_run(path)
    assert str(caught.value).startswith(f"open_run: got {path!r}, expected the path of a file")
    model = nn.Linear(2, 2)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        with pytest.raises(RecordingError) as caught:
            session.record(path)
        assert session.recorded_to is None
    assert str(caught.value).startswith(f"record: got {path!r}, expected the path of a new file")
