from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.gradient_counts import (
    BUCKETS,
    INF_BUCKET,
    MODEL,
    NAN_BUCKET,
    SUBNORMAL_BUCKET,
    ZERO_BUCKET,
    CountedGradients,
    GradientCounts,
)
from amp_widgets.core.gradient_probe import (
    PARAMETER_PART,
    SAMPLE_ELEMENTS,
    GradientProbe,
    bucket_of,
    drawn,
    places_among,
    random_places,
)
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.overflow_probe import OverflowProbe


def bucket(value: float) -> int:
    """By the definition, in float64."""
    value = abs(value)
    if math.isnan(value):
        return NAN_BUCKET
    if value == 0:
        return ZERO_BUCKET
    if math.isinf(value):
        return INF_BUCKET
    mantissa, power = math.frexp(value)
    if power - 1 < -126:
        return SUBNORMAL_BUCKET + (value >= 2.0**-126 * (1 - 2.0**-11))
    part = 0 if mantissa == 0.5 else 2 if 2 * mantissa >= 2 - 2.0**-11 else 1
    return 3 * (power - 1 + 127) + part


def counted(tensors: list[Tensor]) -> list[int]:
    found = np.zeros(BUCKETS, np.int64)
    for tensor in tensors:
        for value in tensor.double().flatten().tolist():
            found[bucket(value)] += 1
    return found.tolist()


def count(model: nn.Module, train: Callable[[], Any], **how: Any) -> GradientCounts:
    probe = GradientProbe(model, **{"sample": None} | how)
    probe.count_next_step()
    assert probe.begin(0)
    train()
    probe.end(None)
    found = probe.newest()
    assert found is not None
    assert found.notes == ()
    return found


def rows(found: GradientCounts, family: str = "output") -> dict[str, CountedGradients]:
    picked = [row for row in found.rows if row.family == family]
    named = {row.layer: row for row in picked}
    assert len(named) == len(picked)
    return named


def numbers(found: GradientCounts) -> dict[Any, Any]:
    return {(row.layer, row.family, row.dtype): (row.arrivals, row.elements, row.counts.tolist()) for row in found.rows}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), nn.Linear(8, 3))


def train(model: nn.Module, factor: float = 1.0) -> None:
    torch.manual_seed(1)
    (model(torch.randn(5, 6)).pow(2).mean() * factor).backward()


# ---- buckets ----


def test_edges_of_the_buckets_are_exact() -> None:
    above = float(np.nextafter(np.float32(2.0**-25), np.float32(1)))
    below = float(np.nextafter(np.float32(65520), np.float32(0)))
    values = [0.0, -0.0, 2.0**-25, above, -above, below, 65520.0, 65536.0, 1e-45, 2.0**-126, 3e38, math.inf, -math.inf]
    buckets = bucket_of(torch.tensor(values)).tolist()
    assert buckets == [bucket(value) for value in values]
    assert buckets[2] + 1 == buckets[3] == buckets[4]
    assert buckets[5] + 1 == buckets[6] < buckets[7]
    assert buckets[-1] == INF_BUCKET


def test_every_bit_pattern_of_nan_is_a_nan() -> None:
    codes = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32)
    assert bucket_of(codes.view(torch.float32)).tolist() == [NAN_BUCKET] * 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert bucket_of(values).tolist() == [bucket(value) for value in values.double().tolist()]


def test_below_the_normal_numbers_there_are_two() -> None:
    codes = torch.tensor([1, 0x7FEFFF, 0x7FF000, 0x7FF792, 0x7FFFFF], dtype=torch.int32)
    assert bucket_of(codes.view(torch.float32)).tolist() == [SUBNORMAL_BUCKET, SUBNORMAL_BUCKET, *[SUBNORMAL_BUCKET + 1] * 3]


def test_random_numbers() -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    codes = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(seed))
    values = codes.to(torch.int32).view(torch.float32)
    assert bucket_of(values).tolist() == [bucket(value) for value in values.double().tolist()]


# ---- what is counted ----


def test_counts_are_those_of_the_gradients_themselves() -> None:
    model, seen = net(), {}
    layers = dict(model.named_modules())
    for name in ("0", "1", "2.0", "2.1", "3"):
        layers[name].register_forward_hook(
            lambda _module, _args, output, name=name: (output.register_hook(lambda g: seen.update({name: g.clone()})), None)[1]
        )
    found = count(model, lambda: train(model, 1e-30))
    outputs = rows(found)
    assert list(outputs) == ["3", "2.1", "2.0", "1", "0"]  # in the order of the backward pass; "2" returns what "2.1" made
    for name, row in outputs.items():
        assert row.counts.tolist() == counted([seen[name]]), name
        assert (row.dtype, row.arrivals, row.elements) == ("fp32", 1, seen[name].numel())
    parameters = rows(found, "parameter")
    assert list(parameters) == ["3", "2.0", "0"]
    for name, row in parameters.items():
        assert row.counts.tolist() == counted([p.grad for p in layers[name].parameters()]), name
        assert row.arrivals == 2
    assert (found.step, found.scale) == (0, 1.0)


def test_under_autocast_gradients_are_counted_in_the_format_in_which_they_are_stored() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Wide(), nn.Linear(8, 3))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(5, 6))
        output.float().sum().backward()

    found = count(model, step)
    assert [(row.layer, row.dtype) for row in found.rows if row.family == "output"] == [
        ("2", "bf16"),
        ("1", "fp32"),
        ("0", "bf16"),
    ]
    assert {row.dtype for row in found.rows if row.family == "parameter"} == {"fp32"}


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().exp()


def test_planted_underflow_is_seen_as_zeros_of_fp16() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            output = model(torch.ones(2, 4))
        (output.float().sum() * 2.0**-25).backward()  # a tie: rounds to zero

    outputs = rows(count(model, step))
    assert outputs["1"].dtype == "fp16"
    assert outputs["1"].counts[ZERO_BUCKET] == 8 == outputs["1"].elements


def test_the_scale_is_noted_with_the_counts() -> None:
    model, scale = net(), torch.tensor(2.0**14)
    probe = GradientProbe(model)
    probe.count_next_step()
    probe.begin(7)
    train(model)
    probe.end(scale)
    scale.fill_(1.0)  # update() has changed it since
    found = probe.newest()
    assert found is not None
    assert (found.step, found.scale) == (7, 2.0**14)


class Several(nn.Module):
    """Called with a tensor, gives several, in a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.linear(x)
        return {"parts": hidden.split(2, dim=1), "more": [hidden.exp(), None, 3], "integers": hidden.argmax()}


def test_outputs_in_structures() -> None:
    model = Several()

    def step() -> None:
        output = model(torch.randn(5, 6))
        (output["parts"][1].sum() + output["more"][0].mean()).backward()

    outputs = rows(count(model, step))
    assert outputs[MODEL].arrivals == 2  # of the first part there is no gradient
    assert outputs[MODEL].elements == 10 + 20
    assert outputs[MODEL].counts[bucket(1.0)] == 10
    assert outputs["linear"].arrivals == 1


def test_a_module_that_is_called_several_times() -> None:
    model = nn.Sequential(nn.Linear(6, 6))

    def step() -> None:
        x = torch.randn(5, 6)
        for _ in range(3):
            x = model[0](x)
        x.sum().backward()

    found = count(model, step)
    assert (rows(found)["0"].arrivals, rows(found)["0"].elements) == (3, 90)
    assert rows(found, "parameter")["0"].elements == 6 * 6 + 6  # summed up before they arrive


def test_several_backward_passes_of_a_step() -> None:
    model = net()
    found = count(model, lambda: (train(model), train(model)))
    assert rows(found)["3"].arrivals == 2
    assert rows(found, "parameter")["3"].arrivals == 4


def test_a_layer_that_gives_back_its_input_or_its_parameter_adds_nothing() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.same, self.table = nn.Linear(6, 3), nn.Identity(), Table()

        def forward(self, x: Tensor) -> Tensor:
            return self.same(self.linear(x)) * self.table()

    model = Net()
    found = count(model, lambda: model(torch.randn(5, 6)).sum().backward())
    assert set(rows(found)) == {MODEL, "linear"}
    assert set(rows(found, "parameter")) == {"linear", "table"}
    assert model.table.weight._backward_hooks is None


class InPlace(nn.Module):
    """Views, and bases that are changed in place after a view of them was returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slice, self.relu, self.last = nn.Linear(6, 8), Slice(), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        part = self.slice(hidden)
        hidden.mul_(2.0)
        return self.last(self.relu(part))


class Slice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        part = x[:, :4]
        x.add_(1.0)  # the base of a view that nobody has asked for its node
        return part


def test_views_and_changes_in_place() -> None:
    def run(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = InPlace()
        step = lambda: train(model)  # noqa: E731
        if watched:
            found = count(model, step)
            assert rows(found)["last"].elements == 10
            assert rows(found)["first"].elements == 40  # of the values before they were changed
        else:
            step()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


class Reentrant(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_of_the_user_are_counted_once(reentrant: bool) -> None:
    def model(wrapped: bool) -> nn.Sequential:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        return nn.Sequential(nn.Linear(6, 8), Reentrant(inner, reentrant) if wrapped else nn.Sequential(inner), nn.Linear(8, 3))

    one, other = model(True), model(False)
    there = dict(numbers(count(other, lambda: train(other))).items())
    here = numbers(count(one, lambda: train(one)))
    inner = {(layer.replace("1.inner", "1.0"), *rest): value for (layer, *rest), value in here.items()}
    extra = set(inner) - set(there)
    assert extra == ({("1", "output", "fp32")} if reentrant else set())  # it makes an output of its own
    assert {key: value for key, value in inner.items() if key not in extra} == there


def test_layers_that_are_checkpointed_live_are_counted_once() -> None:
    plain, checkpointed = net(), net()
    switches = Checkpointing(checkpointed)
    switches.apply(["2", "3"])
    here, there = numbers(count(checkpointed, lambda: train(checkpointed))), numbers(count(plain, lambda: train(plain)))
    switches.close()
    assert here == there


def test_gradients_that_are_sparse_double_or_expanded() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 4, sparse=True)
            self.linear = nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.table(x).double())

    model = Net()
    found = count(model, lambda: model(torch.tensor([1, 2, 2])).sum().backward())
    assert rows(found, "parameter")["table"].elements == 12
    assert rows(found)["linear"].dtype == "fp64"
    assert rows(found)["linear"].counts[bucket(1.0)] == 6  # expanded from one number


def test_forward_passes_that_are_not_trained_on_count_nothing() -> None:
    model = net()

    def step() -> None:
        with torch.no_grad():
            model(torch.randn(5, 6))
        with torch.inference_mode():
            model(torch.randn(5, 6))
        nn.Linear(6, 1)(torch.randn(5, 6)).sum().backward()  # of another model

    assert count(model, step).rows == ()


def test_gradients_within_torch_func_are_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            slope = torch.func.vmap(torch.func.grad(lambda one: self.linear(one).sum().pow(2)))(x)
            return self.linear(slope)

    model = Net()
    found = count(model, lambda: model(torch.randn(5, 6)).sum().backward())
    assert rows(found)["linear"].arrivals == 1


def test_what_cannot_be_counted_is_said_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_values: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nwith details")

    monkeypatch.setattr("amp_widgets.core.gradient_probe.bucket_of", fails)
    model = net()
    for sample, what in ((None, "3"), (100, "one part of the gradients")):
        probe = GradientProbe(model, sample=sample)
        probe.count_next_step()
        probe.begin(0)
        train(model)
        probe.end(None)
        assert model[0].weight.grad is not None
        found = probe.newest()
        assert found is not None
        assert f"{what} was not counted: RuntimeError: no such kernel" in found.notes


# ---- samples ----


@pytest.mark.parametrize("elements", [8193, 100_000, 1_000_003])
def test_a_sample_has_one_element_of_each_part(elements: int) -> None:
    chosen = places_among(elements, random_places(4096, 3, torch.device("cpu")))
    assert chosen.shape == (4096,)
    parts = (chosen.double() + 0.5) * 4096 / elements
    assert bool(((parts - torch.arange(4096) - 0.5).abs() <= 0.5 + 4096 / elements).all())
    assert not torch.equal(chosen, places_among(elements, random_places(4096, 4, torch.device("cpu"))))
    assert torch.equal(chosen, places_among(elements, random_places(4096, 3, torch.device("cpu"))))


def test_each_element_is_as_likely_as_any_other() -> None:
    seen = torch.zeros(1000)
    for seed in range(2000):
        seen += torch.bincount(places_among(1000, random_places(100, seed, torch.device("cpu"))), minlength=1000)
    assert float(seen.sum()) == 200_000
    assert float((seen - 200).abs().max()) < 5 * 200**0.5


def test_the_random_state_of_the_user_is_left_alone() -> None:
    before = torch.get_rng_state()
    random_places(100, 7, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_drawn_from_what_has_gaps_or_is_expanded_or_turned() -> None:
    values = torch.arange(40_000).view(200, 200)
    for tensor in (values, values.t(), values[:, ::2], torch.ones(()).expand(300, 70)):
        chosen = places_among(tensor.numel(), random_places(1000, 1, torch.device("cpu")))
        assert torch.equal(drawn(tensor, chosen), tensor.reshape(-1)[chosen])


def periodic(shape: tuple[int, ...], period: int) -> Tensor:
    """Small in every so many-th element, and else large: what an evenly spaced sample can be at odds with."""
    return torch.where(torch.arange(math.prod(shape)) % period == 0, 2.0**-30, 1.0).view(shape)


@pytest.mark.parametrize(("shape", "period"), [
    ((512, 16, 8, 8), 2), ((512, 16, 8, 8), 17), ((512, 16, 8, 8), 1024), ((2049, 256), 3), ((700_001,), 21),
])  # fmt: skip
def test_shares_of_a_sample_are_right_to_within_a_percentage_point_whatever_the_layout(shape: Any, period: int) -> None:
    weights = periodic(shape, period)
    exact = float((weights < 1).double().mean())
    model = nn.Identity()
    for step in range(20):
        probe = GradientProbe(model)
        probe.count_next_step()
        probe.begin(step)
        x = torch.zeros(shape, requires_grad=True)
        (model(x * 1.0) * weights).sum().backward()
        probe.end(None)
        (row,) = probe.counts[0].rows
        assert (row.looked_at, row.elements) == (SAMPLE_ELEMENTS, weights.numel())
        assert float(row.counts[bucket(2.0**-30)]) / row.elements == pytest.approx(exact, abs=0.01), step
        assert row.counts.sum() == pytest.approx(row.elements)


def test_the_largest_and_what_is_not_finite_are_found_among_all() -> None:
    """One element among 262,144, in every step."""
    weights = torch.full((64, 4096), 2.0**-32)
    weights[7, 1234] = -1.0
    model = nn.Sequential(nn.Linear(64, 4096, bias=False))
    batch = torch.randn(64, 64)

    def peak() -> float:
        return rows(count(model, lambda: (model(batch) * weights).sum().backward(), sample=SAMPLE_ELEMENTS))["0"].peaks[""]

    assert peak() == 1.0
    weights[7, 1234] = -math.inf
    assert peak() == math.inf
    weights[0, 0] = math.nan
    assert math.isnan(peak())


def test_the_largest_of_each_parameter_over_all_its_arrivals() -> None:
    model = nn.Linear(3, 2)

    def step() -> None:
        for factor in (1.0, -8.0, 2.0):
            (model(torch.tensor([[1.0, 2.0, 3.0]])) * factor).sum().backward()

    found = rows(count(model, step), "parameter")[MODEL]
    assert found.peaks == {"weight": 24.0, "bias": 8.0}


def test_tensors_of_different_sizes_weigh_as_much_as_they_have_elements() -> None:
    """A weight of which a sample is looked at, and a bias that is counted in full."""
    model = nn.Linear(512, 4096)
    found = rows(
        count(model, lambda: (model(torch.full((1, 512), 2.0**-30))).sum().backward(), sample=SAMPLE_ELEMENTS), "parameter"
    )[MODEL]
    assert found.counts[bucket(2.0**-30)] == pytest.approx(512 * 4096)
    assert found.counts[bucket(1.0)] == pytest.approx(4096)
    assert found.looked_at == SAMPLE_ELEMENTS // PARAMETER_PART + 4096


@pytest.mark.filterwarnings("error")
def test_complex_parameters_count_with_both_their_parts() -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.phase).imag.sum()

    model = Wave()
    for sample in (None, 2):
        model.zero_grad()
        found = rows(count(model, lambda: model(torch.randn(3, 4)).backward(), sample=sample), "parameter")[MODEL]
        gradient = model.phase.grad
        assert gradient is not None
        assert bool((gradient.real == 0).all())
        assert (found.elements, found.dtype, found.wide) == (8, "complex64", True)
        assert found.peaks["phase"] == float(gradient.imag.abs().max())
        if sample is None:
            assert found.counts.tolist() == counted([gradient.real, gradient.imag])


def test_which_parameters_autocast_leaves_in_fp32() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4))
    found = rows(count(model, lambda: model(torch.tensor([1, 2, 3])).pow(2).sum().backward()), "parameter")
    assert {name: row.wide for name, row in found.items()} == {"0": True, "1": True, "2": False, "3": True, "4": True}
    half = nn.Sequential(nn.LayerNorm(4)).bfloat16()
    found = rows(count(half, lambda: half(torch.randn(3, 4).bfloat16()).pow(2).sum().backward()), "parameter")
    assert not found["0"].wide


@pytest.mark.parametrize("together", [1, 50, 10**6])
def test_samples_come_out_the_same_however_many_are_put_into_buckets_together(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """A sample of everything, against all elements one tensor at a time; twice, so that rows have several arrivals."""
    monkeypatch.setattr("amp_widgets.core.gradient_probe._HELD_ELEMENTS", together)
    step = lambda model: (train(model), train(model, 2.0**-20))  # noqa: E731
    one, other = net(), net()
    assert numbers(count(one, lambda: step(one), sample=10**9)) == numbers(count(other, lambda: step(other)))


def test_in_a_sample_all_elements_are_known_and_some_were_looked_at() -> None:
    model = nn.Sequential(nn.Linear(64, 300))
    found = count(model, lambda: model(torch.randn(100, 64)).pow(2).sum().backward(), sample=1000)
    row = rows(found)["0"]
    assert row.elements == 30_000
    assert row.looked_at == 1000
    assert row.counts.sum() == pytest.approx(30_000)


# ---- which steps ----


def test_every_nth_step_and_on_request() -> None:
    model = net()
    probe = GradientProbe(model, every=3)
    for step in range(8):
        if step == 4:
            probe.count_next_step()
            assert probe.pending
        probe.begin(step)
        train(model)
        probe.end(None)
        assert not probe.pending
    assert [found.step for found in probe.counts] == [0, 3, 4, 6]
    assert probe.counts[0] is probe.counts[0]
    probe.every = 0
    assert not probe.begin(9)
    probe.end(None)
    assert len(probe.counts) == 4


def test_a_step_that_breaks_off_leaves_nothing() -> None:
    model = net()
    probe = GradientProbe(model, every=1)
    probe.begin(0)
    probe.abandon()
    train(model)
    assert probe.counts == ()
    probe.begin(0)  # again, and it was never ended
    probe.begin(0)
    train(model)
    probe.end(None)
    probe.end(None)
    assert len(probe.counts) == 1
    assert rows(probe.counts[0])["3"].arrivals == 1


def test_closing_lets_go_of_the_model_and_keeps_what_was_counted() -> None:
    model = net()
    probe = GradientProbe(model, every=1)
    probe.begin(0)
    train(model)
    probe.end(None)
    probe.begin(1)
    probe.close()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(probe.counts) == 1
    assert not probe.begin(2)


def test_compiled_models_are_left_alone_with_a_sentence() -> None:
    model = net()
    wrapped = torch.compile(model, backend="eager")
    probe = GradientProbe(wrapped, every=1)  # type: ignore[arg-type]
    assert not probe.begin(0)
    assert probe.why_not is not None
    assert "torch.compile" in probe.why_not
    probe = GradientProbe(model)
    probe.count_next_step()
    assert probe.begin(0)
    assert probe.why_not is None
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    (model(compiled(torch.randn(5, 6))).sum()).backward()  # within the step
    probe.end(None)
    assert probe.counts == ()
    assert probe.why_not is not None
    assert "torch.compile" in probe.why_not


# ---- it leaves no trace ----


def steps(model: nn.Module, probe: GradientProbe | None, count: int = 5) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    torch.manual_seed(3)
    for step in range(count):
        if probe is not None:
            probe.begin(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(16, 6))
        scaler.scale(output.float().pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if probe is not None:
            probe.end(2.0**12)
    return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("sample", [None, 16])
def test_training_comes_out_bit_by_bit_as_without(sample: int | None) -> None:
    plain = steps(net(), None)
    model = net()
    watched = steps(model, GradientProbe(model, every=1, sample=sample))
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    for module in model.modules():
        assert not module._forward_hooks
    assert all(p._backward_hooks is None for p in model.parameters())


def test_a_kept_output_keeps_no_hook() -> None:
    model, kept = net(), []
    probe = GradientProbe(model, every=1)
    probe.begin(0)
    kept.append(model(torch.randn(5, 6)))
    kept[0].sum().backward(retain_graph=True)
    probe.end(None)
    kept[0].sum().backward()
    assert rows(probe.counts[0])["3"].arrivals == 1
    assert kept[0]._backward_hooks is None


def test_the_memory_that_is_measured_is_that_of_the_step() -> None:
    def peak(watched: bool) -> float:
        model = net()
        probe, meter = GradientProbe(model), CpuMeter(model, [])
        if watched:
            probe.count_next_step()
        meter.begin()
        probe.begin(0)
        train(model)
        probe.end(None)
        assert len(probe.counts) == watched
        return meter.end().peak_bytes

    assert peak(True) == peak(False)


def test_gradients_with_a_graph_of_their_own() -> None:
    def run(watched: bool) -> list[Tensor]:
        model = net().double()
        model[2][1].p = 0.0
        x = torch.ones(5, 6, dtype=torch.float64, requires_grad=True)
        probe = GradientProbe(model)
        if watched:
            probe.count_next_step()
        probe.begin(0)
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        probe.end(None)
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


def test_modes_of_the_user_see_the_ops_of_the_step_alone() -> None:
    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(watched: bool) -> list[str]:
        model = net()
        probe, overflows = GradientProbe(model), OverflowProbe(model)
        with Ops() as ops:
            if watched:
                probe.count_next_step()
                probe.begin(0)
                overflows.begin(0)
            train(model)
            if watched:
                probe.end(None)
                overflows.end(0, None, True, None)
                assert len(probe.counts) == len(overflows.notes) == 1
        return ops.seen

    assert run(True) == run(False)


def test_it_does_not_keep_the_model_alive() -> None:
    model = net()
    probe = GradientProbe(model, every=1)
    probe.begin(0)
    train(model)
    probe.end(None)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    probe.begin(1)
    probe.end(None)


def test_several_models_go_by_their_names() -> None:
    one, other = net(), net()
    probe = GradientProbe(one, every=1)
    probe.watch([("generator", one), ("critic", other)])
    probe.begin(0)
    train(nn.Sequential(one, nn.Linear(3, 6), other))
    probe.end(None)
    names = [row.layer for row in probe.counts[0].rows]
    assert {"generator.0", "generator.2.0", "critic.3"} <= set(names)
    assert names.index("critic.3") < names.index("generator.3")
