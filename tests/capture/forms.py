"""Training loops as people write them, each with a counterpart that is instrumented by hand.

``make()`` gives what the loop works on, ``loop(**made)`` is the untouched loop, ``by_hand(hand, **made)`` the same with
every place where live controls could act going through a `Hand`. Both may return more things whose state counts.
Tiny on purpose: fp16 is very slow on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.capture.hand import Hand, Script

Batch = tuple[torch.Tensor, torch.Tensor]
Made = dict[str, Any]


def batches(count: int = 8, size: int = 6, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)) for _ in range(count)]


class Net(nn.Module):
    """Batch norm, dropout and a few small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.stem(x)))
        return logits

    @property
    def first(self) -> nn.Linear:
        layer = self.stem[0]
        assert isinstance(layer, nn.Linear)
        return layer


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def sgd(model: nn.Module, lr: float = 5e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def to_bf16_and_back(own: str, at: tuple[int, int] = (2, 4)) -> Script:
    return {at[0]: {"autocast": "bf16"}, at[1]: {"autocast": own}}


def to_fp32_and_back(own: str, at: tuple[int, int] = (2, 4)) -> Script:
    return {at[0]: {"autocast": "fp32"}, at[1]: {"autocast": own}}


NEW_SCALE: Script = {2: {"init_scale": 2.0**5}, 5: {"init_scale": 2.0**8, "growth_interval": 2}}
ADD_FP16: Script = {2: {"autocast": "fp16", "init_scale": 2.0**8}}
ADD_FP16_GROWING: Script = {
    2: {"autocast": "fp16", "init_scale": 2.0**8, "growth_interval": 2}, 5: {"autocast": "fp32"}, 6: {"autocast": "fp16"},
}  # fmt: skip
OVERFLOW: Script = {2: {"autocast": "fp16", "init_scale": 2.0**120, "backoff_factor": 2.0**-106}}
OVERFLOW_OWN: Script = {2: {"init_scale": 2.0**120, "backoff_factor": 2.0**-106}}

PLAIN = {"bf16": to_bf16_and_back("fp32"), "fp16": ADD_FP16, "growing": ADD_FP16_GROWING, "overflow": OVERFLOW}
SCALED = {
    "bf16": to_bf16_and_back("fp16"), "fp32": to_fp32_and_back("fp16"), "scale": NEW_SCALE, "overflow": OVERFLOW_OWN,
}  # fmt: skip


class Form:
    """One way to write a training loop.

    Attributes
    ----------
    steps
        Steps that are to be recorded.
    own
        The format of the loop's regions.
    scripts
        Name → changes whose effect is defined for this form.
    models
        Under which names `make` or `loop` gives what the session is to find; several are controlled as parts of one.
    """

    steps: ClassVar[int] = 8
    own: ClassVar[str] = "fp32"
    scripts: ClassVar[dict[str, Script]] = {}
    models: ClassVar[tuple[str, ...]] = ("model",)
    make: ClassVar[Callable[[], Made]]
    loop: ClassVar[Callable[..., Made | None]]
    by_hand: ClassVar[Callable[..., Made | None]]


# ---- (1) the classic tutorial ----------------------------------------------------------------------------------------


class Tutorial(Form):
    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        x, y = batches(count=1, size=24)[0]
        return {"dataset": TensorDataset(x, y)}

    @staticmethod
    def loop(dataset: TensorDataset) -> Made:
        loader = DataLoader(dataset, batch_size=6, shuffle=True)
        model = Net()
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = GradScaler("cpu")
        model.train()
        for _epoch in range(2):
            for images, labels in loader:
                optimizer.zero_grad()
                with autocast(device_type="cpu", dtype=torch.float16):
                    outputs = model(images)
                    loss = criterion(outputs, labels)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    @staticmethod
    def by_hand(hand: Hand, dataset: TensorDataset) -> Made:
        loader = DataLoader(dataset, batch_size=6, shuffle=True)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        own = GradScaler("cpu")
        for _epoch in range(2):
            for images, labels in loader:
                optimizer.zero_grad()
                with hand.region(torch.float16):
                    loss = F.cross_entropy(model(images), labels)
                scaler = hand.scaler(own)
                scaler.scale(hand.sees(loss)).backward()
                scaler.step(optimizer)
                hand.end(own)
        return {"model": model, "optimizer": optimizer, "scaler": own}


class TutorialOldNames(Tutorial):
    """As above, with the deprecated classes, which have an ``__enter__`` of their own."""

    @staticmethod
    def loop(dataset: TensorDataset) -> Made:
        loader = DataLoader(dataset, batch_size=6, shuffle=True)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = torch.cpu.amp.GradScaler()  # type: ignore[attr-defined]
        for _epoch in range(2):
            for images, labels in loader:
                optimizer.zero_grad()
                with torch.cpu.amp.autocast(dtype=torch.float16):  # type: ignore[attr-defined]
                    loss = F.cross_entropy(model(images), labels)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return {"model": model, "optimizer": optimizer, "scaler": scaler}


class TutorialWithoutCuda(Form):
    """The CUDA tutorial where there is no CUDA: torch turns its regions and its scaler off, and warns."""

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        scaler = torch.cuda.amp.GradScaler()
        for x, y in data:
            optimizer.zero_grad()
            with torch.cuda.amp.autocast():
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return {"scaler": scaler}

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        for x, y in data:
            optimizer.zero_grad()
            hand.sees(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            hand.end()
        return {"scaler": GradScaler("cpu", enabled=False)}


# ---- (2) checkpointing in the model's own forward --------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Says nothing about ``use_reentrant``: torch warns and takes the reentrant way, with a backward inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layer1 = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.layer2 = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = checkpoint(self.layer1, x)
        x = checkpoint(self.layer2, x)
        logits: torch.Tensor = self.head(x)
        return logits


class OwnCheckpointing(Form):
    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        model = Checkpointed()
        return {"model": model, "optimizer": adam(model), "scaler": GradScaler("cpu", init_scale=2.0**10), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            with hand.region(torch.float16):
                loss = F.cross_entropy(model(x), y)
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            hand.scaler(scaler).step(optimizer)
            hand.end(scaler)


class OwnCheckpointingPlain(Form):
    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        model = Checkpointed()
        return {"model": model, "optimizer": sgd(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            hand.backward(F.cross_entropy(hand.forward(model, x), y))
            hand.step(optimizer)
            hand.end()


# ---- (3) regions of every kind ---------------------------------------------------------------------------------------


class KeptRegion(Form):
    """Region objects that are made once and entered again and again; inside of one, a part that is to stay fp32."""

    own = "bf16"
    scripts: ClassVar = {"fp32": to_fp32_and_back("bf16"), "bf16 again": {3: {"autocast": "bf16"}}, "fp16": ADD_FP16}

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: Net, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        region, inner = torch.autocast(device_type="cpu"), torch.autocast("cpu", torch.bfloat16)
        off = torch.autocast("cpu", enabled=False)
        for x, y in data:
            optimizer.zero_grad(set_to_none=False)
            with region:
                out = model(x)
                with off:
                    extra = F.linear(x, model.first.weight).square().mean()
                with inner:
                    loss = F.cross_entropy(out, y) + extra
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: Net, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad(set_to_none=False)
            with hand.region(torch.bfloat16):
                out = model(x)
                with hand.region(enabled=False):
                    extra = F.linear(x, model.first.weight).square().mean()
                with hand.region(torch.bfloat16):
                    loss = F.cross_entropy(out, y) + extra
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()


class MixedRegions(Form):
    """fp16 and bf16 side by side; a choice holds for both."""

    own = "fp16"
    scripts: ClassVar = {"bf16": {2: {"autocast": "bf16"}}, "fp32": {2: {"autocast": "fp32"}, 5: {"autocast": "bf16"}}}

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: Net, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                h = model.stem(x)
                with torch.cpu.amp.autocast():  # type: ignore[attr-defined]
                    logits = model.head(model.body(h))
            loss = F.cross_entropy(logits.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: Net, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            with hand.region(torch.float16):
                h = model.stem(x)
                with hand.region(torch.bfloat16):
                    logits = model.head(model.body(h))
            optimizer.zero_grad()
            hand.backward(F.cross_entropy(logits.float(), y))
            hand.step(optimizer)
            hand.end()


class OneRegionForAll(Form):
    """One region around the whole loop: torch enters it once, so only what needs no entering can change."""

    own = "bf16"

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        with torch.autocast("cpu"):
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        with torch.autocast("cpu"):
            for x, y in data:
                optimizer.zero_grad()
                hand.sees(F.cross_entropy(model(x), y)).backward()
                optimizer.step()
                hand.end()


# ---- (4) decorators --------------------------------------------------------------------------------------------------


class Decorated(Net):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class DecoratedForward(Form):
    own = "bf16"
    scripts: ClassVar = {"fp32": to_fp32_and_back("bf16"), "fp16": ADD_FP16}

    @staticmethod
    def make() -> Made:
        model = Decorated()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: Decorated, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            with hand.region(torch.bfloat16):
                logits = Net.forward(model, x)
            hand.backward(F.cross_entropy(logits, y))
            hand.step(optimizer)
            hand.end()


@torch.autocast("cpu", dtype=torch.float16)
def decorated_train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


class DecoratedTrainStep(Form):
    """The whole step inside of the region, its end included."""

    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "scaler": GradScaler("cpu", init_scale=2.0**8), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        for x, y in data:
            decorated_train_step(model, optimizer, scaler, x, y)

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        for x, y in data:
            with hand.region(torch.float16):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                hand.scaler(scaler).scale(hand.sees(loss)).backward()
                hand.scaler(scaler).step(optimizer)
                hand.end(scaler)


# ---- (5) bf16, (6) fp32 ----------------------------------------------------------------------------------------------


class PlainBf16(Form):
    own = "bf16"
    scripts: ClassVar = {
        "fp32": to_fp32_and_back("bf16"), "fp16": ADD_FP16, "overflow": OVERFLOW,
        "fp16 and back": {2: {"autocast": "fp16", "init_scale": 2.0**12}, 4: {"autocast": "bf16"}, 6: {"autocast": "fp16"}},
    }  # fmt: skip

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            with hand.region(torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()


class ScaledBf16(Form):
    """A scaler where bf16 would not need one: until a format is chosen, the loop's own scaler is in force."""

    own = "bf16"
    scripts: ClassVar = {"fp16": {2: {"autocast": "fp16", "init_scale": 2.0**8}, 5: {"autocast": "fp32"}}}

    @staticmethod
    def make() -> Made:
        model = Net()
        scaler = GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
        return {"model": model, "optimizer": sgd(model), "scaler": scaler, "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            with hand.region(torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            hand.scaler(scaler).step(optimizer)
            hand.end(scaler)


class PlainFp32(Form):
    scripts: ClassVar = {**PLAIN, "default scale": {3: {"autocast": "fp16"}}, "fp32": {2: {"autocast": "fp32"}}}

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        criterion = nn.CrossEntropyLoss()
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {"losses": losses}

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(hand.forward(model, x), y)
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()
            losses.append(loss.item())
        return {"losses": losses}


# ---- (7) gradient accumulation ---------------------------------------------------------------------------------------


class ScaledAccumulation(Form):
    """Eleven batches, three to a step: the last two are never stepped."""

    steps = 3
    own = "fp16"
    scripts: ClassVar = {
        "bf16": to_bf16_and_back("fp16", (1, 2)), "fp32": to_fp32_and_back("fp16", (1, 2)),
        "scale": {1: {"init_scale": 2.0**5}, 2: {"init_scale": 2.0**9}},
        "overflow": {1: {"init_scale": 2.0**120, "backoff_factor": 2.0**-106}},
    }  # fmt: skip

    @staticmethod
    def make() -> Made:
        model = Net()
        scaler = GradScaler("cpu", init_scale=2.0**10)
        return {"model": model, "optimizer": adam(model), "scaler": scaler, "data": batches(11)}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        optimizer.zero_grad()
        for i, (x, y) in enumerate(data):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y) / 3
            scaler.scale(loss).backward()
            if (i + 1) % 3 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        optimizer.zero_grad()
        for i, (x, y) in enumerate(data):
            with hand.region(torch.float16):
                loss = F.cross_entropy(model(x), y) / 3
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            if (i + 1) % 3 == 0:
                hand.scaler(scaler).step(optimizer)
                hand.end(scaler)
                optimizer.zero_grad()


class PlainAccumulation(Form):
    steps = 4
    scripts: ClassVar = {
        "bf16": to_bf16_and_back("fp32", (1, 2)),
        "fp16": {1: {"autocast": "fp16", "init_scale": 2.0**8, "growth_interval": 2}, 3: {"autocast": "fp32"}},
        "overflow": {1: {"autocast": "fp16", "init_scale": 2.0**120, "backoff_factor": 2.0**-106}},
    }

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": sgd(model), "data": batches(9)}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if (i + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            hand.backward(F.cross_entropy(hand.forward(model, x), y) / 2)
            if (i + 1) % 2 == 0:
                hand.step(optimizer)
                hand.end()
                optimizer.zero_grad()


# ---- (8) clipping ----------------------------------------------------------------------------------------------------


class ScaledClipping(Form):
    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "scaler": GradScaler("cpu", init_scale=2.0**12), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> Made:
        norms = []
        for x, y in data:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            scaler.step(optimizer)
            scaler.update()
        return {"norms": norms}

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> Made:
        norms = []
        for x, y in data:
            optimizer.zero_grad(set_to_none=True)
            with hand.region(torch.float16):
                loss = F.cross_entropy(model(x), y)
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            hand.scaler(scaler).unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            hand.scaler(scaler).step(optimizer)
            hand.end(scaler)
        return {"norms": norms}


class PlainClipping(Form):
    """What is clipped, and what is read of it, are true gradients."""

    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        norms = []
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5).item())
            optimizer.step()
        return {"norms": norms}

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        norms = []
        for x, y in data:
            optimizer.zero_grad()
            hand.backward(F.cross_entropy(hand.forward(model, x), y))
            hand.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5).item())
            hand.step(optimizer)
            hand.end()
        return {"norms": norms}


# ---- (9) several optimizers ------------------------------------------------------------------------------------------


def two_optimizers() -> Made:
    model = Net()
    first = torch.optim.Adam([*model.stem.parameters(), *model.body.parameters()], lr=1e-2)
    return {"model": model, "first": first, "second": torch.optim.SGD(model.head.parameters(), lr=0.1), "data": batches()}


class ScaledTwoOptimizers(Form):
    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        return {**two_optimizers(), "scaler": GradScaler("cpu", init_scale=2.0**10)}

    @staticmethod
    def loop(
        model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]
    ) -> None:
        for x, y in data:
            first.zero_grad()
            second.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(first)
            scaler.step(second)
            scaler.update()

    @staticmethod
    def by_hand(
        hand: Hand,
        model: nn.Module,
        first: torch.optim.Optimizer,
        second: torch.optim.Optimizer,
        scaler: GradScaler,
        data: list[Batch],
    ) -> None:
        for x, y in data:
            first.zero_grad()
            second.zero_grad()
            with hand.region(torch.float16):
                loss = F.cross_entropy(model(x), y)
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            hand.scaler(scaler).step(first)
            hand.scaler(scaler).step(second)
            hand.end(scaler)


class PlainTwoOptimizers(Form):
    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        return two_optimizers()

    @staticmethod
    def loop(model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            first.zero_grad()
            second.zero_grad()
            F.cross_entropy(model(x), y).backward()
            first.step()
            second.step()

    @staticmethod
    def by_hand(
        hand: Hand, model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, data: list[Batch]
    ) -> None:
        for x, y in data:
            first.zero_grad()
            second.zero_grad()
            hand.backward(F.cross_entropy(hand.forward(model, x), y))
            hand.step(first)
            hand.step(second)
            hand.end()


class ScaledSecondOptimizerSeldom(Form):
    """The second steps every third time, with the gradients of all three: nothing of the scale may change in between."""

    steps = 9
    own = "fp16"
    scripts: ClassVar = {
        "bf16": to_bf16_and_back("fp16", (3, 6)),
        "scale": {3: {"init_scale": 2.0**5}, 6: {"init_scale": 2.0**9}},
    }

    @staticmethod
    def make() -> Made:
        return {**two_optimizers(), "data": batches(9), "scaler": GradScaler("cpu", init_scale=2.0**10)}

    @staticmethod
    def loop(
        model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]
    ) -> None:
        for i, (x, y) in enumerate(data):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(first)
            first.zero_grad()
            if i % 3 == 2:
                scaler.step(second)
                second.zero_grad()
            scaler.update()

    @staticmethod
    def by_hand(
        hand: Hand,
        model: nn.Module,
        first: torch.optim.Optimizer,
        second: torch.optim.Optimizer,
        scaler: GradScaler,
        data: list[Batch],
    ) -> None:
        for i, (x, y) in enumerate(data):
            with hand.region(torch.float16):
                loss = F.cross_entropy(model(x), y)
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            hand.scaler(scaler).step(first)
            first.zero_grad()
            if i % 3 == 2:
                hand.scaler(scaler).step(second)
                second.zero_grad()
            hand.end(scaler)


class PlainSecondOptimizerSeldom(Form):
    steps = 9
    scripts: ClassVar = {
        "bf16": to_bf16_and_back("fp32", (3, 6)),
        "fp16": {2: {"autocast": "fp16", "init_scale": 2.0**8}, 4: {"autocast": "fp32"}},  # true gradients at all times
    }

    @staticmethod
    def make() -> Made:
        return {**two_optimizers(), "data": batches(9)}

    @staticmethod
    def loop(model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            F.cross_entropy(model(x), y).backward()
            first.step()
            first.zero_grad()
            if i % 3 == 2:
                second.step()
                second.zero_grad()

    @staticmethod
    def by_hand(
        hand: Hand, model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, data: list[Batch]
    ) -> None:
        for i, (x, y) in enumerate(data):
            loss = F.cross_entropy(hand.forward(model, x), y)
            slow = second.param_groups[0]["params"]
            sums = [p.grad for p in slow]
            second.zero_grad()
            hand.backward(loss)
            for p, so_far in zip(slow, sums, strict=True):
                p.grad /= hand.factor
                if so_far is not None:
                    p.grad += so_far
            hand.step(first)
            first.zero_grad()
            if i % 3 == 2:
                second.step()
                second.zero_grad()
            hand.end()


# ---- (10) learning-rate schedulers -----------------------------------------------------------------------------------


class ScaledScheduler(Form):
    """Stepped by batch unless the scale fell: what people write to know of a skip."""

    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        model = Net()
        optimizer = sgd(model)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "data": batches()}

    @staticmethod
    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: OneCycleLR, scaler: GradScaler, data: list[Batch]
    ) -> Made:
        rates = []
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skip_lr_sched = scale > scaler.get_scale()
            if not skip_lr_sched:
                scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return {"rates": rates}

    @staticmethod
    def by_hand(
        hand: Hand,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: OneCycleLR,
        scaler: GradScaler,
        data: list[Batch],
    ) -> Made:
        rates = []
        for x, y in data:
            optimizer.zero_grad()
            with hand.region(torch.float16):
                loss = F.cross_entropy(model(x), y)
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            hand.scaler(scaler).step(optimizer)
            hand.end(scaler)
            if not hand.rows[-1].skipped:
                scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return {"rates": rates}


class PlainScheduler(Form):
    """The scheduler is made inside, wraps ``optimizer.step``, and is stepped by batch, come what may."""

    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        return {"data": batches()}

    @staticmethod
    def loop(data: list[Batch]) -> Made:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        warmup = LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 4))
        scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warmup.step()
            scheduler.step()
        return {"model": model, "optimizer": optimizer, "warmup": warmup, "scheduler": scheduler}

    @staticmethod
    def by_hand(hand: Hand, data: list[Batch]) -> Made:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        warmup = LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 4))
        scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
        for x, y in data:
            loss = F.cross_entropy(hand.forward(model, x), y)
            optimizer.zero_grad()
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()
            warmup.step()
            scheduler.step()
        return {"model": model, "optimizer": optimizer, "warmup": warmup, "scheduler": scheduler}


# ---- (11) validation in between --------------------------------------------------------------------------------------


class ScaledValidation(Form):
    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        model = Net()
        scaler = GradScaler("cpu", init_scale=2.0**10)
        return {"model": model, "optimizer": adam(model), "scaler": scaler, "data": batches(), "held_out": batches(2, seed=9)}

    @staticmethod
    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch], held_out: list[Batch]
    ) -> None:
        def validate() -> float:
            model.eval()
            total = 0.0
            with torch.no_grad():
                for x, y in held_out:
                    with torch.autocast("cpu", dtype=torch.float16):
                        total += F.cross_entropy(model(x), y).item()
            with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
                model(held_out[0][0])
            with torch.inference_mode():
                model(held_out[0][0])
            model.train()
            return total

        validate()
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            validate()

    @staticmethod
    def by_hand(
        hand: Hand,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
        data: list[Batch],
        held_out: list[Batch],
    ) -> None:
        OwnCheckpointing.by_hand(hand, model, optimizer, scaler, data)  # validation leaves no trace


class PlainValidation(Form):
    """Also in the middle of a step: between the training forward and its backward, and between backward and step."""

    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": sgd(model), "data": batches(), "held_out": batches(2, seed=9)}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch], held_out: list[Batch]) -> None:
        @torch.no_grad()
        def validate() -> float:
            model.eval()
            total = sum(F.cross_entropy(model(x), y).item() for x, y in held_out)
            model.train()
            return total

        @torch.inference_mode()
        def predict() -> torch.Tensor:
            model.eval()
            logits: torch.Tensor = model(held_out[0][0])
            model.train()
            return logits

        predict()
        for i, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if i % 2:
                validate()
            loss.backward()
            predict()
            optimizer.step()
            validate()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch], held_out: list[Batch]) -> None:
        OwnCheckpointingPlain.by_hand(hand, model, optimizer, data)


# ---- (12) where the loop and the model live --------------------------------------------------------------------------


class LocalModel(Form):
    """Model, optimizer and scaler are made inside of a function within the function."""

    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        return {"data": batches()}

    @staticmethod
    def loop(data: list[Batch]) -> Made:
        def train() -> Made:
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = GradScaler("cpu", init_scale=2.0**10)
            for x, y in data:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return {"model": model, "scale": scaler.get_scale()}

        return train()

    @staticmethod
    def by_hand(hand: Hand, data: list[Batch]) -> Made:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        OwnCheckpointing.by_hand(hand, model, optimizer, scaler, data)
        return {"model": model, "scale": scaler.get_scale()}


class Trainer:
    """Keeps everything in attributes; one epoch by default."""

    def __init__(self, model: nn.Module, lr: float = 1e-2) -> None:
        self.model = model
        self.optimizer = adam(model, lr)
        self.step_count = 0

    def fit(self, data: Iterable[Batch]) -> None:
        self.model.train()
        for batch in data:
            loss = self.training_step(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step_count += 1

    def training_step(self, batch: Batch) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)


class ClassBasedTrainer(Form):
    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        return {"model": Net(), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, data: list[Batch]) -> Made:
        trainer = Trainer(model)
        trainer.fit(data)
        return {"optimizer": trainer.optimizer}

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, data: list[Batch]) -> Made:
        optimizer = adam(model)
        OwnCheckpointingPlain.by_hand(hand, model, optimizer, data)
        return {"optimizer": optimizer}


class Lit(nn.Module):
    """A module that trains itself: its own ``forward`` is never called, its parts are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 4))

    def training_step(self, batch: Batch) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class ModuleTrainsItself(Form):
    scripts: ClassVar = {"bf16": to_bf16_and_back("fp32"), "fp16": ADD_FP16, "overflow": OVERFLOW}
    models = ("module",)

    @staticmethod
    def make() -> Made:
        module = Lit()
        return {"module": module, "optimizer": module.configure_optimizers(), "data": batches()}

    @staticmethod
    def loop(module: Lit, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for batch in data:
            loss = module.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, module: Lit, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            h = hand.forward(module.encoder, x)
            loss = F.cross_entropy(hand.forward(module.head, h), y)
            optimizer.zero_grad()
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()


# ---- (13) GANs -------------------------------------------------------------------------------------------------------


def gan() -> Made:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return {
        "generator": generator,
        "discriminator": discriminator,
        "opt_g": adam(generator, 1e-3),
        "opt_d": adam(discriminator, 1e-3),
        "data": batches(),
    }


ADVERSARIAL = F.binary_cross_entropy_with_logits


class ScaledGan(Form):
    own = "fp16"
    scripts = SCALED
    models = ("generator", "discriminator")

    @staticmethod
    def make() -> Made:
        return {**gan(), "scaler": GradScaler("cpu", init_scale=2.0**10)}

    @staticmethod
    def loop(
        generator: nn.Module,
        discriminator: nn.Module,
        opt_g: torch.optim.Optimizer,
        opt_d: torch.optim.Optimizer,
        scaler: GradScaler,
        data: list[Batch],
    ) -> None:
        for real, _ in data:
            n = len(real)
            with torch.autocast("cpu", dtype=torch.float16):
                fake = generator(torch.randn(n, 4))
                loss_d = ADVERSARIAL(discriminator(real), torch.ones(n, 1))
                loss_d = loss_d + ADVERSARIAL(discriminator(fake.detach()), torch.zeros(n, 1))
            opt_d.zero_grad()
            scaler.scale(loss_d).backward()
            scaler.step(opt_d)

            with torch.autocast("cpu", dtype=torch.float16):
                loss_g = ADVERSARIAL(discriminator(fake), torch.ones(n, 1))
            opt_g.zero_grad()
            scaler.scale(loss_g).backward()
            scaler.step(opt_g)
            scaler.update()

    @staticmethod
    def by_hand(
        hand: Hand,
        generator: nn.Module,
        discriminator: nn.Module,
        opt_g: torch.optim.Optimizer,
        opt_d: torch.optim.Optimizer,
        scaler: GradScaler,
        data: list[Batch],
    ) -> None:
        for real, _ in data:
            n = len(real)
            with hand.region(torch.float16):
                fake = generator(torch.randn(n, 4))
                loss_d = ADVERSARIAL(discriminator(real), torch.ones(n, 1))
                loss_d = loss_d + ADVERSARIAL(discriminator(fake.detach()), torch.zeros(n, 1))
            opt_d.zero_grad()
            hand.scaler(scaler).scale(hand.sees(loss_d)).backward()
            hand.scaler(scaler).step(opt_d)
            with hand.region(torch.float16):
                loss_g = ADVERSARIAL(discriminator(fake), torch.ones(n, 1))
            opt_g.zero_grad()
            hand.scaler(scaler).scale(hand.sees(loss_g)).backward()
            hand.scaler(scaler).step(opt_g)
            hand.end(scaler)


class PlainGan(Form):
    """Each optimizer's step is one, since there are forward passes between them."""

    steps = 16
    scripts: ClassVar = {
        "bf16": to_bf16_and_back("fp32"), "bf16 in between": to_bf16_and_back("fp32", (3, 6)),
        "fp16": ADD_FP16, "overflow": OVERFLOW,
    }  # fmt: skip
    models = ("generator", "discriminator")

    @staticmethod
    def make() -> Made:
        return gan()

    @staticmethod
    def loop(
        generator: nn.Module,
        discriminator: nn.Module,
        opt_g: torch.optim.Optimizer,
        opt_d: torch.optim.Optimizer,
        data: list[Batch],
    ) -> None:
        for real, _ in data:
            n = len(real)
            fake = generator(torch.randn(n, 4))
            opt_d.zero_grad()
            loss_real = ADVERSARIAL(discriminator(real), torch.ones(n, 1))
            loss_fake = ADVERSARIAL(discriminator(fake.detach()), torch.zeros(n, 1))
            loss_real.backward()
            loss_fake.backward()
            opt_d.step()
            opt_g.zero_grad()
            ADVERSARIAL(discriminator(fake), torch.ones(n, 1)).backward()
            opt_g.step()

    @staticmethod
    def by_hand(
        hand: Hand,
        generator: nn.Module,
        discriminator: nn.Module,
        opt_g: torch.optim.Optimizer,
        opt_d: torch.optim.Optimizer,
        data: list[Batch],
    ) -> None:
        for real, _ in data:
            n = len(real)
            fake = hand.forward(generator, torch.randn(n, 4))
            opt_d.zero_grad()
            hand.backward(ADVERSARIAL(hand.forward(discriminator, real), torch.ones(n, 1)))
            hand.backward(ADVERSARIAL(hand.forward(discriminator, fake.detach()), torch.zeros(n, 1)))
            hand.step(opt_d)
            hand.end()
            opt_g.zero_grad()
            hand.backward(ADVERSARIAL(hand.forward(discriminator, fake), torch.ones(n, 1)))
            hand.step(opt_g)
            hand.end()


# ---- (14) encoder and decoder ----------------------------------------------------------------------------------------


def encoder_and_decoder() -> Made:
    encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
    decoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    return {"encoder": encoder, "decoder": decoder, "optimizer": optimizer, "data": batches()}


class ScaledEncoderDecoder(Form):
    own = "fp16"
    scripts = SCALED
    models = ("encoder", "decoder")

    @staticmethod
    def make() -> Made:
        return {**encoder_and_decoder(), "scaler": GradScaler("cpu", init_scale=2.0**10)}

    @staticmethod
    def loop(
        encoder: nn.Module, decoder: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]
    ) -> None:
        for x, _ in data:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(decoder(encoder(x)), x)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    @staticmethod
    def by_hand(
        hand: Hand,
        encoder: nn.Module,
        decoder: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
        data: list[Batch],
    ) -> None:
        for x, _ in data:
            with hand.region(torch.float16):
                loss = F.mse_loss(decoder(encoder(x)), x)
            optimizer.zero_grad()
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            hand.scaler(scaler).step(optimizer)
            hand.end(scaler)


class PlainEncoderDecoder(Form):
    scripts: ClassVar = {"bf16": to_bf16_and_back("fp32"), "fp16": ADD_FP16, "overflow": OVERFLOW}
    models = ("encoder", "decoder")

    @staticmethod
    def make() -> Made:
        return encoder_and_decoder()

    @staticmethod
    def loop(encoder: nn.Module, decoder: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, _ in data:
            loss = F.mse_loss(decoder(encoder(x)), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, encoder: nn.Module, decoder: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, _ in data:
            loss = F.mse_loss(hand.forward(decoder, hand.forward(encoder, x)), x)
            optimizer.zero_grad()
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()


# ---- (15) use_amp = False --------------------------------------------------------------------------------------------


class AmpSwitchedOff(Form):
    """``use_amp = False``: the scaler is disabled, and so are the regions, which stay off whatever is chosen."""

    scripts: ClassVar = {"bf16": {2: {"autocast": "bf16"}}}

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        use_amp = False
        scaler = GradScaler("cpu", enabled=use_amp)
        for x, y in data:
            with torch.autocast(device_type="cpu", dtype=torch.float16, enabled=use_amp):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {"scaler": scaler}

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        for x, y in data:
            with hand.region(torch.float16, enabled=False):
                loss = F.cross_entropy(model(x), y)
            hand.sees(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            hand.end()
            optimizer.zero_grad()
        return {"scaler": GradScaler("cpu", enabled=False)}


# ---- (16) zero_grad and backward in other ways -----------------------------------------------------------------------


class ScaledTwoLosses(Form):
    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "scaler": GradScaler("cpu", init_scale=2.0**8), "data": batches()}

    @staticmethod
    def loop(model: Net, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(x)
                first = F.cross_entropy(logits, y)
                second = logits.float().square().mean()
            if i % 2:
                torch.autograd.backward(scaler.scale([first, second]))
            else:
                scaler.scale(first).backward(retain_graph=True)
                scaler.scale(second).backward()
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=False)

    @staticmethod
    def by_hand(hand: Hand, model: Net, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            with hand.region(torch.float16):
                logits = model(x)
                first = F.cross_entropy(logits, y)
                second = logits.float().square().mean()
            if i % 2:
                torch.autograd.backward(hand.scaler(scaler).scale([hand.sees(first), hand.sees(second)]))
            else:
                hand.scaler(scaler).scale(hand.sees(first)).backward(retain_graph=True)
                hand.scaler(scaler).scale(hand.sees(second)).backward()
            hand.scaler(scaler).step(optimizer)
            hand.end(scaler)
            model.zero_grad(set_to_none=False)


class PlainTwoLosses(Form):
    """Two losses, one of them twice; gradients are set to zero in four places, in two ways."""

    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": sgd(model, 1e-2), "data": batches()}

    @staticmethod
    def loop(model: Net, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            if i % 4 == 0:
                optimizer.zero_grad(set_to_none=False)
            logits = model(x)
            if i % 4 == 1:
                optimizer.zero_grad()
            first = F.cross_entropy(logits, y)
            second = logits.square().mean()
            if i % 4 == 2:
                model.zero_grad(set_to_none=False)
            first.backward(retain_graph=True)
            second.backward(retain_graph=True)
            first.backward()
            optimizer.step()
            if i % 4 == 2:
                model.zero_grad()

    @staticmethod
    def by_hand(hand: Hand, model: Net, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            if i % 4 == 0:
                optimizer.zero_grad(set_to_none=False)
            logits = hand.forward(model, x)
            if i % 4 == 1:
                optimizer.zero_grad()
            first = F.cross_entropy(logits, y)
            second = logits.square().mean()
            if i % 4 == 2:
                model.zero_grad(set_to_none=False)
            hand.backward(first, retain_graph=True)
            hand.backward(second, retain_graph=True)
            hand.backward(first)
            hand.step(optimizer)
            hand.end()
            if i % 4 == 2:
                model.zero_grad()


class GradientArgument(Form):
    """Backpropagates a vector, with ``gradient=`` and through ``torch.autograd.backward``: such a loss is no one number."""

    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            optimizer.zero_grad()
            losses = F.cross_entropy(model(x), y, reduction="none")
            if i % 2:
                torch.autograd.backward([losses], [torch.full_like(losses, 0.5)])
            else:
                losses.backward(gradient=torch.full_like(losses, 0.25))
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            optimizer.zero_grad()
            losses = F.cross_entropy(hand.forward(model, x), y, reduction="none")
            hand.backward_vector(losses, torch.full_like(losses, 0.5 if i % 2 else 0.25))
            hand.step(optimizer)
            hand.end()


class GradientPenalty(Form):
    """``torch.autograd.grad`` on the way to the loss is none of the step's backward."""

    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, _ in data:
            x.requires_grad_()
            score = model(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = score.mean() + (slope.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, _ in data:
            x.requires_grad_()
            score = hand.forward(model, x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = score.mean() + (slope.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()


class InheritedStep(torch.optim.SGD):
    """Calls its parent's ``step``, so that torch runs the hooks of a step twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OptimizerOfTheUsers(Form):
    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": InheritedStep(model.parameters(), lr=0.1, momentum=0.9), "data": batches()}

    loop = OwnCheckpointingPlain.loop
    by_hand = OwnCheckpointingPlain.by_hand


class Closure(Form):
    """The backward pass comes after the optimizer's step has begun: such a loss is not scaled."""

    scripts: ClassVar = {"bf16": to_bf16_and_back("fp32")}

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": sgd(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]  # torch says float and takes a tensor

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        OwnCheckpointingPlain.by_hand(hand, model, optimizer, data)


# ---- (17) models that are not trained --------------------------------------------------------------------------------


class FrozenTeacher(Form):
    """The teacher comes first: under ``no_grad`` every other time, else with frozen parameters alone."""

    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        teacher, model = Net(), Net()
        teacher.eval().requires_grad_(False)
        return {"teacher": teacher, "model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(teacher: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for i, (x, y) in enumerate(data):
            with torch.set_grad_enabled(i % 2 == 0):
                soft = teacher(x).softmax(1)
            logits = model(x)
            loss = F.cross_entropy(logits, y) + F.cross_entropy(logits, soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, teacher: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            with torch.no_grad():
                soft = teacher(x).softmax(1)
            logits = hand.forward(model, x)
            loss = F.cross_entropy(logits, y) + F.cross_entropy(logits, soft)
            optimizer.zero_grad()
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()


class ScaledTeacher(Form):
    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        teacher, model = Net(), Net()
        scaler = GradScaler("cpu", init_scale=2.0**10)
        return {"teacher": teacher.eval(), "model": model, "optimizer": adam(model), "scaler": scaler, "data": batches()}

    @staticmethod
    def loop(
        teacher: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, data: list[Batch]
    ) -> None:
        for x, y in data:
            with torch.autocast("cpu", dtype=torch.float16):
                with torch.no_grad():
                    soft = teacher(x).softmax(1)
                logits = model(x)
                loss = F.cross_entropy(logits, y) + F.cross_entropy(logits, soft)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    @staticmethod
    def by_hand(
        hand: Hand,
        teacher: nn.Module,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
        data: list[Batch],
    ) -> None:
        for x, y in data:
            with hand.region(torch.float16):
                with torch.no_grad():
                    soft = teacher(x).softmax(1)
                logits = model(x)
                loss = F.cross_entropy(logits, y) + F.cross_entropy(logits, soft)
            optimizer.zero_grad()
            hand.scaler(scaler).scale(hand.sees(loss)).backward()
            hand.scaler(scaler).step(optimizer)
            hand.end(scaler)


class PerceptualLoss(Form):
    """A second net inside of the loss, with parameters that get gradients and that nobody steps or sets to zero."""

    scripts: ClassVar = {"bf16": to_bf16_and_back("fp32"), "fp16": ADD_FP16, "overflow": OVERFLOW}
    models = ("model", "features")

    @staticmethod
    def make() -> Made:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        features = nn.Sequential(nn.Linear(8, 12), nn.ReLU())
        return {"model": model, "features": features, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, features: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, _ in data:
            loss = F.l1_loss(features(model(x)), features(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, features: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, _ in data:
            loss = F.l1_loss(hand.forward(features, hand.forward(model, x)), hand.forward(features, x))
            optimizer.zero_grad()
            hand.backward(loss)
            hand.step(optimizer)
            hand.end()


# ---- other optimizers, outputs and scalers ----------------------------------------------------------------------


class FusedScaled(OwnCheckpointing):
    """A fused optimizer is given the scale, and decides itself whether to skip."""

    @staticmethod
    def make() -> Made:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
        return {"model": model, "optimizer": optimizer, "scaler": GradScaler("cpu", init_scale=2.0**10), "data": batches()}


class FusedPlain(OwnCheckpointingPlain):
    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, fused=True), "data": batches()}


class Bag(nn.Module):
    """Sparse gradients, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 8, sparse=True)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x.abs().argsort(1)).mean(1)
        logits: torch.Tensor = self.head(self.mix(self.mix(h).relu()))
        return logits


class SparseGradients(OwnCheckpointingPlain):
    @staticmethod
    def make() -> Made:
        model = Bag()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data": batches()}


class WithLoss(Net):
    """Computes its loss itself, in a forward pass that is called by keyword."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(x)
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits, "words": ["a"]}


class LossInForward(Form):
    scripts = PLAIN

    @staticmethod
    def make() -> Made:
        model = WithLoss()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            output = model(x=x, labels=y)
            (output["loss"] + output["logits"].square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        for x, y in data:
            output = hand.forward(model, x=x, labels=y)
            hand.backward(output["loss"] + output["logits"].square().mean())
            hand.step(optimizer)
            hand.end()
            optimizer.zero_grad()


class CountingScaler(GradScaler):
    """A scaler of the user's own class, which counts."""

    updates = 0

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self.updates += 1
        super().update(new_scale)


class ScalerOfTheUsers(OwnCheckpointing):
    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": sgd(model), "scaler": CountingScaler("cpu", init_scale=2.0**10), "data": batches()}


# ---- (18) a scaler that goes on from a state -------------------------------------------------------------------------


class ResumedScaler(Form):
    own = "fp16"
    scripts = SCALED

    @staticmethod
    def make() -> Made:
        model = Net()
        return {"model": model, "optimizer": adam(model), "data": batches()}

    @staticmethod
    def state() -> dict[str, Any]:
        return {"scale": 2.0**7, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 4, "_growth_tracker": 2}

    @staticmethod
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        scaler = GradScaler("cpu")
        scaler.load_state_dict(ResumedScaler.state())
        OwnCheckpointing.loop(model, optimizer, scaler, data)
        return {"scaler": scaler}

    @staticmethod
    def by_hand(hand: Hand, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Made:
        scaler = GradScaler("cpu")
        scaler.load_state_dict(ResumedScaler.state())
        OwnCheckpointing.by_hand(hand, model, optimizer, scaler, data)
        return {"scaler": scaler}


FORMS: list[type[Form]] = [
    Tutorial, TutorialOldNames, TutorialWithoutCuda, OwnCheckpointing, OwnCheckpointingPlain, KeptRegion, MixedRegions,
    OneRegionForAll, DecoratedForward, DecoratedTrainStep, PlainBf16, ScaledBf16, PlainFp32, ScaledAccumulation,
    PlainAccumulation, ScaledClipping, PlainClipping, ScaledTwoOptimizers, PlainTwoOptimizers,
    ScaledSecondOptimizerSeldom, PlainSecondOptimizerSeldom, ScaledScheduler, PlainScheduler, ScaledValidation,
    PlainValidation, LocalModel, ClassBasedTrainer, ModuleTrainsItself, ScaledGan, PlainGan, ScaledEncoderDecoder,
    PlainEncoderDecoder, AmpSwitchedOff, ScaledTwoLosses, PlainTwoLosses, GradientArgument, GradientPenalty,
    OptimizerOfTheUsers, Closure, FrozenTeacher, ScaledTeacher, PerceptualLoss, ResumedScaler, FusedScaled, FusedPlain,
    SparseGradients, LossInForward, ScalerOfTheUsers,
]  # fmt: skip
