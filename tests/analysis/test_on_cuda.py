"""Steps on CUDA, predicted without one: against real steps on the CPU that make the same tensors, and sums made by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_widgets.analysis.cuda_policy import cuda_policy
from amp_widgets.analysis.fake_step import predict_step
from amp_widgets.analysis.on_cuda import (
    LABEL,
    CudaPrediction,
    CudaPredictions,
    _as_on_cuda,
    cuda_steps,
    predict_on_cuda,
)
from amp_widgets.analysis.real_step import real_step
from amp_widgets.errors import RunError, SettingsError
from amp_widgets.session import AmpSession

MIB = 1 << 20


class Net(nn.Module):
    """Some of what nets consist of, without what a CPU does in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
        self.second = nn.Sequential(nn.Linear(32, 64), nn.Softplus(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.first(x)
        x = x + self.second(x).pow(2)
        output: torch.Tensor = self.head(x)
        return output


def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def tokens(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 50, (batch, 16), generator=torch.Generator().manual_seed(0))
    return drawn, drawn


def session(model: nn.Module | None = None, **options: Any) -> AmpSession:
    torch.manual_seed(0)
    model = model or Net()
    return AmpSession(model, torch.optim.Adam(model.parameters(), **options))


@pytest.mark.parametrize("checkpointed", [(), ("first", "second")])
@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
def test_the_tensors_are_those_of_a_real_step_under_cudas_policy(autocast: Any, checkpointed: tuple[str, ...]) -> None:
    with session() as ours:
        predicted = predict_on_cuda(ours, tokens(), loss_fn, autocast=autocast, checkpointed=checkpointed)
    with session(foreach=True) as ours, cuda_policy():
        model = ours.model
        assert model is not None
        settings = ours.settings.replace(autocast=autocast, checkpointed=checkpointed)
        measured, _ = real_step(ours, model, tokens(), loss_fn, settings, verb="test")
        counters = 4 * len(list(model.parameters()))  # Adam's numbers of steps are on the CPU, also with CUDA
    assert predicted.tensor_peak_bytes == measured.peak_bytes - counters
    assert (predicted.autocast, predicted.checkpointed, predicted.batch_size) == (autocast, checkpointed, 4)


def test_by_hand() -> None:
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as ours:
        batch = (torch.rand(512, 1024), torch.zeros(()))  # 2 MiB
        predicted = predict_on_cuda(ours, batch, lambda output, _: output.sum())
    # In the backward pass: the weight, its gradient and the input; the target, the loss and its gradient, of one number each. The
    # output is let go before, and its gradient is the loss's, expanded.
    assert predicted.tensor_peak_bytes == (4 + 4 + 2) * MIB + 3 * 4
    assert predicted.allocated_peak_bytes == (4 + 4 + 2) * MIB + 3 * 512
    assert predicted.reserved_peak_bytes == (20 + 2) * MIB


def test_blocks_and_segments_are_no_less_than_the_tensors() -> None:
    with session() as ours, cuda_steps(ours, tokens(), loss_fn) as steps:
        for autocast in ("fp32", "fp16", "bf16"):
            for checkpointed in ((), ("first",), ("*",)):
                predicted = steps.step(autocast=autocast, checkpointed=checkpointed)  # type: ignore[arg-type]
                assert predicted.tensor_peak_bytes <= predicted.allocated_peak_bytes <= predicted.reserved_peak_bytes
                assert predicted.allocated_peak_bytes % 512 == 0
                assert predicted.reserved_peak_bytes % (2 * MIB) == 0


def test_cudas_dropout_holds_a_byte_an_element() -> None:
    rows, columns = 64, 4096

    def peaks(p: float) -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(8, columns), nn.Dropout(p), nn.Linear(columns, 8))
        batch = (torch.rand(rows, 8), torch.zeros(()))
        with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as ours:
            on_cuda = predict_on_cuda(ours, batch, lambda out, _: out.sum())
            return on_cuda.tensor_peak_bytes, predict_step(ours, batch, lambda out, _: out.sum()).peak_bytes

    with_dropout, without = peaks(0.5), peaks(0.0)
    assert with_dropout[0] - without[0] == rows * columns
    assert with_dropout[1] - without[1] == rows * columns * 4


def test_cudas_attention_with_dropout_does_not_hold_all_pairs() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.1, batch_first=True)
    length, batch = 256, 2
    pairs_bytes = batch * 4 * length * length * 4
    with session(layer) as ours:
        predicted = predict_on_cuda(ours, (torch.rand(batch, length, 32), torch.zeros(())), lambda out, _: out.sum())
        measured = ours.profile_step((torch.rand(batch, length, 32), torch.zeros(())), lambda out, _: out.sum())
    assert measured.peak_bytes > 2 * pairs_bytes
    assert predicted.tensor_peak_bytes < pairs_bytes
    assert any("attention" in sentence for sentence in predicted.left_out)


def test_the_batch_size_is_what_was_asked_for() -> None:
    with session() as ours, cuda_steps(ours, tokens(4), loss_fn) as steps:
        assert steps.batch_size == 4
        asked = steps.step(batch_size=32)
        assert asked.batch_size == 32
        given = steps.step()
        assert given.batch_size == 4
    with session() as ours:
        assert predict_on_cuda(ours, tokens(32), loss_fn) == asked
    assert given.tensor_peak_bytes < asked.tensor_peak_bytes


def test_optimizers_choose_their_kernels_as_on_cuda() -> None:
    def chosen(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), **options)
        _as_on_cuda(model, [optimizer])
        return optimizer.param_groups[0].get("foreach", "none")

    optim = torch.optim
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.NAdam, optim.RAdam):
        assert chosen(kind, lr=0.1) is True
        assert chosen(kind, lr=0.1, foreach=False) is False
    assert chosen(optim.Adam, fused=True) is None
    assert chosen(optim.Adam, differentiable=True) is None
    assert chosen(optim.Adam, lr=torch.tensor(0.1)) is False
    assert chosen(optim.LBFGS) == "none"


def test_the_session_is_untouched(untouched: Callable[[AmpSession], contextlib.AbstractContextManager[None]]) -> None:
    model = Net()
    loss_fn(model(tokens()[0]), tokens()[1]).backward()  # type: ignore[no-untyped-call]
    with session(model) as ours:
        with untouched(ours):
            predict_on_cuda(ours, tokens(), loss_fn, autocast="fp16", checkpointed=["first"])
        assert ours.optimizers[0].param_groups[0]["foreach"] is None


def test_where_there_is_a_gpu_it_says_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    with session() as ours, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(RunError, match="measure instead"):
            predict_on_cuda(ours, tokens(), loss_fn)


def test_a_model_elsewhere_is_refused() -> None:
    loop: Any = SimpleNamespace(device=torch.device("mps"))
    with pytest.raises(RunError, match="a model on mps, expected one on the CPU"):
        predict_on_cuda(loop, tokens(), loss_fn)


def test_what_does_not_run_on_fake_tensors_is_refused_with_the_reason() -> None:
    class Looks(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            output = super().forward(tokens)
            return output * 2 if output.sum().item() > 0 else output

    ran = False

    def watched(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal ran
        ran = True
        return loss_fn(output, targets)

    with session(Looks()) as ours, pytest.raises(RunError, match="cannot be predicted, because the step asks for a number"):
        predict_on_cuda(ours, tokens(), watched)
    assert not ran


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.layer(x)[0][:, -1])
        return output


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_taken_step_by_step(kind: type[nn.RNNBase]) -> None:
    batch = torch.randn(5, 7, 8), torch.randint(4, (5,))
    with session(Recurrent(kind(8, 12, 2, batch_first=True))) as ours:
        found = predict_on_cuda(ours, batch, F.cross_entropy)
        counters = 4 * len(list(ours.model.parameters()))  # type: ignore[union-attr]
    assert torch._C._get_mkldnn_enabled()
    with session(Recurrent(kind(8, 12, 2, batch_first=True)), foreach=True) as ours:
        torch._C._set_mkldnn_enabled(False)
        try:
            profile, _ = real_step(ours, ours.model, batch, F.cross_entropy, ours.settings, verb="test")  # type: ignore[arg-type]
        finally:
            torch._C._set_mkldnn_enabled(True)
    assert found.tensor_peak_bytes == profile.peak_bytes - counters
    assert any("cuDNN keeps recurrent layers" in each for each in found.left_out)


class Decoder(nn.Module):
    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor], **causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.layers, self.head, self.mask, self.causal = nn.TransformerDecoder(layer, 1), nn.Linear(16, 4), mask, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.layers(x, x, tgt_mask=self.mask(x), **self.causal)[:, -1])
        return output


def causal(x: torch.Tensor) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[1])


def of_the_inputs(x: torch.Tensor) -> torch.Tensor:
    return x[0] @ x[0].T > 0


def test_a_mask_that_torch_looks_into_is_known_as_one_that_is_told() -> None:
    batch = torch.randn(5, 7, 16), torch.randint(4, (5,))
    found = []
    for model in (Decoder(causal), Decoder(causal, tgt_is_causal=True), Decoder(causal, tgt_is_causal=False)):
        with session(model) as ours:
            found.append(predict_on_cuda(ours, batch, F.cross_entropy))
    known, told, otherwise = found
    assert known == told
    assert known.tensor_peak_bytes != otherwise.tensor_peak_bytes


def test_a_mask_of_unknown_numbers_is_refused_with_what_helps() -> None:
    batch = torch.randn(5, 7, 16), torch.randint(4, (5,))
    said = r"whether it is causal.*pass tgt_is_causal=True or False"
    with session(Decoder(of_the_inputs)) as ours, pytest.raises(RunError, match=said):
        predict_on_cuda(ours, batch, F.cross_entropy)
    with session(Decoder(of_the_inputs, tgt_is_causal=False)) as ours:
        assert predict_on_cuda(ours, batch, F.cross_entropy).tensor_peak_bytes > 0


def test_what_cudas_autocast_refuses_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    batch = (torch.rand(4, 4), torch.rand(4, 4))
    with session(model) as ours:
        assert predict_on_cuda(ours, batch, F.binary_cross_entropy).autocast == "fp32"
        with pytest.raises(RunError, match="unsafe to autocast"):
            predict_on_cuda(ours, batch, F.binary_cross_entropy, autocast="bf16")


def test_settings_that_cannot_be_in_force_are_refused() -> None:
    with session() as ours:
        with pytest.raises(SettingsError):
            predict_on_cuda(ours, tokens(), loss_fn, autocast="fp8")  # type: ignore[arg-type]
        with pytest.raises(SettingsError):
            predict_on_cuda(ours, tokens(), loss_fn, checkpointed=["no_such_layer"])
        with pytest.raises(SettingsError):
            predict_on_cuda(ours, tokens(), loss_fn, batch_size=0)


# ---- as a table -----------------------------------------------------------------------------------------------------


def prediction(**changes: Any) -> CudaPrediction:
    values: dict[str, Any] = {
        "tensor_peak_bytes": 103_900_000,
        "allocated_peak_bytes": 104_400_000,
        "reserved_peak_bytes": 128_000_000,
        "autocast": "bf16",
        "checkpointed": ("a", "b", "c"),
        "batch_size": 32,
        "settings": "bf16 + 3 layers checkpointed",
        "left_out": ("a & b",),
    }
    return CudaPrediction(**values | changes)


def test_as_text() -> None:
    assert str(prediction()).splitlines() == [
        "predicted for CUDA, not measured",
        "settings                      layers  batch   tensors  allocated  reserved",
        "bf16 + 3 layers checkpointed       3     32  103.9 MB   104.4 MB  128.0 MB",
        "Left out:",
        "- a & b",
    ]


def test_several_in_one_table() -> None:
    plain = prediction(settings="fp32", checkpointed=(), batch_size=None, left_out=("a & b", "c"))
    table = CudaPredictions([prediction(), plain])
    assert len(table) == 2
    assert table.left_out == ("a & b", "c")
    assert [row[:3] for row in table.to_rows()] == [
        ["settings", "layers", "batch"], ["bf16 + 3 layers checkpointed", "3", "32"], ["fp32", "0", ""],
    ]  # fmt: skip
    assert repr(table) == table.to_text()
    assert len(table[:1]) == 1
    assert table[1].settings == "fp32"


def test_as_html() -> None:
    shown = prediction(settings="<b>")._repr_html_()
    assert LABEL in shown
    assert "<td style=\"text-align:left\">&lt;b&gt;</td>" in shown  # fmt: skip
    assert "<li>a &amp; b</li>" in shown
