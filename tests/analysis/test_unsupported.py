"""What oneDNN cannot do in a format is said in words, wherever a format is tried: in tables, in the tabs, and from code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.analysis.batch_size import first_line
from amp_widgets.analysis.inspections import Inspections
from amp_widgets.analysis.unsupported import unsupported_text
from amp_widgets.language import in_language, set_language
from amp_widgets.session import AmpSession

RAW = (
    "could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with environment variable "
    "ONEDNN_VERBOSE=all to get additional diagnostic information."
)
SAYS = "cannot be run in fp16 on this CPU (oneDNN could not create a primitive)"
WORDS = f"the LSTM {SAYS}"
GRID = {"autocast": ["fp32", "fp16"], "checkpointed": ["none"]}


class NotInHalf(nn.Module):
    """As an LSTM on a CPU without such instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if out.dtype == torch.float16:
            raise RuntimeError(RAW)
        return out


@pytest.fixture
def ours() -> Any:
    model = NotInHalf()
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        yield session


BATCH = torch.ones(4, 4), torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("raw", "operator"),
    [
        (RAW, "the LSTM"),
        ("could not create a primitive descriptor for a convolution forward propagation primitive", "the convolution"),
        ("could not create a primitive descriptor for the matmul primitive. Run workload", "the matmul"),
        ("could not create a primitive descriptor for a GRU backward propagation primitive\nmore", "the GRU"),
        ("could not create a primitive", "an operator of this model"),
        ("could not create a primitive. Run", "an operator of this model"),
    ],
)
def test_the_operator_is_named(raw: str, operator: str) -> None:
    assert unsupported_text(RuntimeError(raw), "fp16") == f"{operator} {SAYS}"


def test_other_errors_are_left_alone() -> None:
    assert unsupported_text(RuntimeError("test"), "fp16") is None
    assert unsupported_text(ValueError(RAW), "fp16") is None
    assert unsupported_text(RuntimeError(RAW), "fp32") is None
    assert first_line(RuntimeError(RAW)) == f"RuntimeError: {RAW}"


def test_in_the_table_of_batches(ours: AmpSession) -> None:
    table = ours.largest_batch(batch=BATCH, loss_fn=F.mse_loss, budget_bytes="1 MB", grid=GRID)
    assert [row.why_not for row in table] == [None, WORDS]


def test_in_the_comparison(ours: AmpSession) -> None:
    compared = ours.compare(BATCH, F.mse_loss, grid=GRID, steps=1, rounds=1)
    assert [row.why_not for row in compared.rows] == [None, WORDS]


def test_for_a_plan_in_that_format(ours: AmpSession) -> None:
    ours.request(autocast="fp16")
    with pytest.raises(RuntimeError, match="ONEDNN"), ours.autocast():
        ours.model(BATCH[0])  # type: ignore[misc]
    ours.abandon_step()
    assert ours.settings.autocast == "fp16"
    with pytest.raises(RuntimeError, match="ONEDNN") as caught:
        ours.plan(budget_bytes="1 MB", batch=BATCH, loss_fn=F.mse_loss)
    assert caught.value.__notes__ == [WORDS]
    inspections = Inspections()
    inspections.ask("plan", budget_bytes=1e6)
    inspections.carry_out("plan", ours, BATCH, F.mse_loss)
    assert inspections.of("plan").why_not == f"plan: {WORDS}"


def test_in_korean() -> None:
    set_language("ko")
    try:
        for text in (WORDS, f"plan: {WORDS}", str(unsupported_text(RuntimeError("could not create a primitive"), "fp16"))):
            assert "cannot be run" not in in_language(text)
    finally:
        set_language(None)
