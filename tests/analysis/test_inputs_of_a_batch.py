"""Several inputs in a batch: wherever the model is called, all is exactly as with one that takes them as one argument."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amp_widgets.analysis.fake_step import predict_step
from amp_widgets.analysis.on_cuda import predict_on_cuda
from amp_widgets.analysis.real_step import real_step
from amp_widgets.session import AmpSession

cross_entropy = nn.functional.cross_entropy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.logits(ids, mask)

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids) * mask.unsqueeze(-1)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def one_argument(self: Any, batch: Any) -> Tensor:
    logits: Tensor = self.logits(**batch) if isinstance(batch, Mapping) else self.logits(*batch)
    return logits


Reference: type[nn.Module] = type("Net", (Net,), {"forward": one_argument})
"""The same, wrapped by hand."""


class Encoding(collections.UserDict[str, Tensor]):
    """What tokenizers give is such a mapping: no dict, and unknown to torch's pytrees."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch(form: str) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(12, (32, 10), generator=generator), torch.randint(4, (32,), generator=generator)
    mask = (torch.rand(32, 10, generator=generator) > 0.3).float()
    named = {"mask": mask, "ids": ids}
    inputs: dict[str, Any] = {"dict": named, "tuple": (ids, mask), "mapping": Encoding(named)}
    return inputs[form], targets


Made = Callable[[AmpSession, Any], Any]


def fitted(session: AmpSession, of: Any) -> Any:
    session.fit([of] * 3, cross_entropy, epochs=1)
    session.wait()
    columns = session.history.columns("loss", "peak_bytes", "allocated_bytes", "scale")
    return [column.tolist() for column in columns.values()]


def profiled(session: AmpSession, of: Any) -> Any:
    made = session.profile_step(of, cross_entropy)
    return made.peak_bytes, [(layer.name, layer.activation_bytes, layer.output_bytes) for layer in made.layers]


def rehearsed(session: AmpSession, of: Any) -> Any:
    """With half of the rows."""
    assert session.model is not None
    made, _ = real_step(session, session.model, of, cross_entropy, session.settings, batch_size=16, verb="test")
    return made.peak_bytes


def predicted(session: AmpSession, of: Any) -> Any:
    made = [predict_step(session, of, cross_entropy, checkpointed=layers) for layers in ((), ("blocks.1",))]
    assert all(step.predicted for step in made), made[0].obtained
    return [step.peak_bytes for step in made]


def planned(session: AmpSession, of: Any) -> Any:
    made = session.plan(budget_bytes=1e9, batch=of, loss_fn=cross_entropy)
    assert made.fits
    assert "measured" not in made.obtained
    return made.predicted_peak_bytes, made.least_peak_bytes, made.candidates


def sized(session: AmpSession, of: Any) -> Any:
    grid = {"autocast": ["fp32"], "checkpointed": ["none", "all"]}
    made = session.largest_batch(batch=of, loss_fn=cross_entropy, budget_bytes=3e5, grid=grid, confirm=True)
    assert all(row.size for row in made)
    return [(row.label, row.size, row.found.predicted_peak_bytes, row.confirmed.peak_bytes, row.why_not) for row in made]


def on_cuda(session: AmpSession, of: Any) -> Any:
    return predict_on_cuda(session, of, cross_entropy, autocast="fp16")


def compared(session: AmpSession, of: Any) -> Any:
    made = session.compare(of, cross_entropy, steps=1, rounds=1, grid={"autocast": ["fp32", "bf16"]})
    return [(row.label, row.peak_bytes, row.loss, row.gradient_error, row.why_not) for row in made.rows]


def checked(session: AmpSession, of: Any) -> Any:
    made = session.check(of, cross_entropy)
    assert made.identical
    return made


def precision(session: AmpSession, of: Any) -> Any:
    made = [session.precision_cost(of, cross_entropy, reference=reference) for reference in ("fp32", "fp64")]
    assert made[0].layers
    return made


def mapped(session: AmpSession, of: Any) -> Any:
    made = session.dtype_map(of, cross_entropy)
    assert made.rows
    return made.rows


def looked(session: AmpSession, of: Any) -> Any:
    found = session.preflight(of, cross_entropy)
    assert not any(one.title == "No forward pass was watched" for one in found)
    return tuple(found)


PLACES: list[Made] = [
    fitted, profiled, rehearsed, predicted, planned, sized, on_cuda, compared, checked, precision, mapped, looked,
]  # fmt: skip


@pytest.mark.parametrize("form", ["dict", "tuple", "mapping"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_it_is_as_with_one_argument(place: Made, form: str) -> None:
    made, weights = [], []
    for kind in (Net, Reference):
        torch.manual_seed(0)
        np.random.seed(0)
        model = kind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with AmpSession(model, optimizer) as session:
            session.request(autocast="bf16", checkpointed=["blocks.2"])
            session.apply_pending()
            made.append(place(session, batch(form)))
        weights.append([values.tolist() for values in model.state_dict().values()])
    assert made[0] == made[1]
    assert repr(made[0]) == repr(made[1])
    assert weights[0] == weights[1]


def test_where_forward_takes_something_else_the_error_says_how_it_was_called() -> None:
    model = Net()
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        inputs, targets = batch("dict")
        wrong = {"ids": inputs["ids"], "msak": inputs["mask"]}, targets
        how = r"were given as one argument: model\(inputs\); forward\(ids, mask\) gets several from a dict"
        with pytest.raises(TypeError, match=how):
            session.compare(wrong, cross_entropy)
        with pytest.raises(TypeError, match=how):
            session.plan(budget_bytes=1e6, batch=wrong, loss_fn=cross_entropy)
        session.fit([wrong], cross_entropy)
        with pytest.raises(TypeError, match=how):
            session.wait()
