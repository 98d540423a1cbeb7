"""Autocast by name: the region in force, and what a device is said to support."""

from __future__ import annotations

import pytest
import torch

from amp_widgets.core.autocast import LiveAutocast, autocast_context, autocast_support


class Told:
    """Answers with what it is set to, and keeps what it is told."""

    def __init__(self) -> None:
        self.name = "bf16"
        self.left: list[bool] = []

    def enter_autocast(self):  # type: ignore[no-untyped-def]
        return self.name

    def exit_autocast(self, error: BaseException | None) -> None:
        self.left.append(error is not None)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_products_are_computed_in_the_format(name: str, dtype: torch.dtype) -> None:
    a = torch.ones(2, 2)
    with autocast_context(name, "cpu"):  # type: ignore[arg-type]
        assert (a @ a).dtype == dtype
    with autocast_context(name, "cpu", enabled=False):  # type: ignore[arg-type]
        assert (a @ a).dtype == torch.float32


def test_fp32_is_disabled_autocast() -> None:
    a = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast_context("fp32", "cpu"):
        assert (a @ a).dtype == torch.float32


def test_live_region_asks_when_it_is_entered_and_nests() -> None:
    told = Told()
    region = LiveAutocast(told, "cpu")
    a = torch.ones(2, 2)
    with region:
        told.name = "fp16"
        assert (a @ a).dtype == torch.bfloat16
        with region:
            assert (a @ a).dtype == torch.float16
        assert (a @ a).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ZeroDivisionError), region:
        raise ZeroDivisionError
    assert told.left == [False, False, True]


def test_support_on_a_cpu_says_what_to_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    support = autocast_support(torch.device("cpu"))
    assert [support[name].available for name in ("fp32", "fp16", "bf16")] == [True, True, True]
    monkeypatch.setattr("amp_widgets.core.autocast._ask", lambda name: False)
    without = autocast_support(torch.device("cpu"))
    assert "very slow" in without["fp16"].note
    assert "emulated" in without["bf16"].note
    assert without["fp32"].note == ""


def test_support_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __init__(self, *args: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *args: object) -> None: ...

    has = {False: False, True: True}  # native, emulated: an old GPU
    monkeypatch.setattr(torch.cuda, "device", Nothing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has[including_emulation])
    assert autocast_support(torch.device("cuda", 0))["bf16"].note.startswith("emulated: Old GPU")
    has[True] = False
    refused = autocast_support(torch.device("cuda", 0))["bf16"]
    assert (refused.available, refused.note) == (False, "Old GPU does not support bf16")
    has[False] = has[True] = True
    assert autocast_support(torch.device("cuda", 0))["bf16"].available
