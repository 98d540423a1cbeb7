"""Masks whose numbers are known though they are fake: steps of transformers, byte by byte as real ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_widgets.analysis import fake_numbers
from amp_widgets.analysis.fake_model import _Fakes, _RealToFake
from amp_widgets.analysis.fake_step import PREDICTED, predict_step
from amp_widgets.analysis.on_cuda import predict_on_cuda
from amp_widgets.session import AmpSession

LENGTH, WIDTH = 7, 16
Mask = Callable[[Tensor], Tensor]


def causal(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.triu(torch.full((length, length), float("-inf"), dtype=dtype), diagonal=1)


def window(length: int) -> Tensor:
    """Not causal."""
    return causal(length) + causal(length).T


class Both(nn.Module):
    """What takes its masks by name, from a batch that is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 2, 1, 1, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        output: Tensor = self.head(self.inner(**given)[:, -1])
        return output


class Masked(nn.Module):
    """What makes its mask itself."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, dropout=0.0)
        self.layers, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, 4)
        self.make = mask
        self.register_buffer("whole", causal(20), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.whole[: x.shape[1], : x.shape[1]] if self.make is None else self.make(x)
        output: Tensor = self.head(self.layers(x, mask=mask)[:, -1])
        return output


def check(model: nn.Module, inputs: Any) -> int:
    """Predict a step, and measure one; the peak of both."""
    batch = inputs, torch.randint(4, (5,))
    with AmpSession(model, torch.optim.Adam(model.parameters())) as session:
        predicted = predict_step(session, batch, F.cross_entropy)
        session.profile_step(batch, F.cross_entropy)
        real = session.profile_step(batch, F.cross_entropy)
        assert predicted.obtained == PREDICTED
        assert predicted.peak_bytes == real.peak_bytes
        assert predicted.profile.peak_by_layer == real.peak_by_layer
        assert predict_on_cuda(session, batch, F.cross_entropy).tensor_peak_bytes > 0
    return predicted.peak_bytes


def drawn() -> Tensor:
    return torch.randn(5, LENGTH, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("made", [causal, window])
def test_masks_in_a_dict(made: Callable[..., Tensor], dtype: torch.dtype) -> None:
    mask = made(LENGTH) if dtype == torch.float32 else made(LENGTH) < 0
    check(Both(), {"src": drawn(), "tgt": drawn(), "tgt_mask": mask, "src_mask": mask})


def old_tutorial(x: Tensor) -> Tensor:
    mask = (torch.triu(torch.ones(LENGTH, LENGTH)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


MASKS: dict[str, Mask | None] = {
    "generated": lambda x: nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
    "old tutorial": old_tutorial,
    "bool": lambda x: ~torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
    "in place": lambda x: torch.zeros(LENGTH, LENGTH).masked_fill_(torch.ones(LENGTH, LENGTH).triu(1) > 0, float("-inf")),
    "a part of a buffer": None,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_a_model_makes(name: str) -> None:
    check(Masked(MASKS[name]), drawn())  # type: ignore[arg-type]


@pytest.fixture
def fakes() -> Any:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = _Fakes(mode)
    with mode, _RealToFake(found):
        yield found


def listed(fakes: Any, fake: Tensor) -> Any:
    return fake_numbers._beside(Tensor.tolist, fakes.numbers.of(fake))


def test_numbers_are_those_of_the_real_functions(fakes: Any) -> None:
    a = torch.full((3, 3), 2.0)
    a = torch.tril(a).masked_fill(torch.eye(3).bool(), -1.0)
    part, turned, same = a[:2, 1:], a.t(), torch.full_like(a, 4)
    assert listed(fakes, a) == [[-1, 0, 0], [2, -1, 0], [2, 2, -1]]
    assert listed(fakes, part) == [[0, 0], [-1, 0]]
    assert listed(fakes, turned) == [[-1, 2, 2], [0, -1, 2], [0, 0, -1]]
    assert listed(fakes, same) == [[4, 4, 4]] * 3
    assert bool((a == a.t().t()).all())
    assert not bool((a == turned).all())
    assert fakes.numbers.of(a[:2]) is None  # not square


@pytest.mark.parametrize("change", ["itself", "a part", "what it is a part of"])
def test_what_is_changed_unseen_is_not_known_any_more(fakes: Any, change: str) -> None:
    whole = torch.ones(4, 4)
    part = whole[1:3, 1:3]
    assert fakes.numbers.of(part) is not None
    {"itself": part, "a part": part[0], "what it is a part of": whole}[change].add_(1)
    assert fakes.numbers.of(part) is None
    with pytest.raises(Exception, match=r"fake|symbolic|data-dependent|_local_scalar_dense"):
        bool((part == 1).all())


def test_large_matrices_are_not_worked_out(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_numbers, "MOST_NUMBERS", 8)
    assert fakes.numbers.of(torch.ones(3, 3)) is None
    assert torch.full((1 << 20, 1 << 20), 1.0).shape == (1 << 20, 1 << 20)


def test_the_users_tensors_are_not_kept_alive() -> None:
    fakes = _Fakes(FakeTensorMode(allow_non_fake_inputs=True))
    real = torch.ones(3, 3)
    fake = fakes.of(real)
    assert fakes.numbers.of(fake) is real
    gone = weakref.ref(real)
    del real
    gc.collect()
    assert gone() is None
    assert fakes.numbers.of(fake) is None
