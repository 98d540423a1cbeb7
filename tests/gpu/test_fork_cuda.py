"""A fork on CUDA with nothing changed comes out bit by bit. Needs torch, numpy and pytest only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_widgets.session import AmpSession

if not torch.cuda.is_available():
    pytest.skip("needs CUDA; torch sees none", allow_module_level=True)


def train(session: AmpSession, until: int) -> None:
    def look() -> None:
        if session.step >= until:
            session.pause()

    session.on_boundary.append(look)
    session.start()
    while session.run_state != "paused":
        session.wait(0.01)
    session.on_boundary.remove(look)


def state_of(session: AmpSession) -> list[torch.Tensor]:
    model, optimizer = session.model, session.optimizers[0]
    assert model is not None
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    kept = [*model.state_dict().values(), *moments, torch.cuda.get_rng_state(), torch.get_rng_state()]
    return [value.cpu().clone() for value in kept] + [torch.tensor(session.scaler.progress())]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("autocast", ["fp32", "bf16", "fp16"])
def test_a_fork_with_nothing_changed_comes_out_bit_by_bit(autocast: str, fused: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).cuda()
    data = torch.utils.data.TensorDataset(torch.randn(160, 64), torch.randint(10, (160,)))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(1))
    with AmpSession(model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused), snapshot_every=5) as session:
        session.request(autocast=autocast, init_scale=2.0**24, growth_interval=3, checkpointed=["1"])
        session.fit(loader, nn.functional.cross_entropy, None, start=False)
        train(session, 14)
        then, state = session.history.columns(), state_of(session)
        for at_step in (10, 7, 0):
            session.fork(at_step=at_step)
            train(session, 14)
            now = session.history.columns()
            for name in ("step", "loss", "scale", "skipped"):
                assert np.array_equal(then[name], now[name], equal_nan=True), (at_step, name)
            assert all(torch.equal(one, other) for one, other in zip(state, state_of(session), strict=True)), at_step
