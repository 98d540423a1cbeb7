from __future__ import annotations

import pkgutil

import pytest

import amp_widgets as aw
from amp_widgets.demos import DEMOS
from amp_widgets.errors import DemoError


@pytest.mark.parametrize("name", DEMOS)
def test_what_makes_a_demo_is_there_and_goes_by_its_name(name: str) -> None:
    make = pkgutil.resolve_name(f"amp_widgets.demos.{DEMOS[name].maker}")
    assert make.__name__ == f"{name}_session"
    assert make.__module__ == f"amp_widgets.demos.{name}"


def test_an_unknown_demo_names_the_known() -> None:
    with pytest.raises(DemoError) as caught:
        aw.demo("mnist")
    for name in DEMOS:
        assert repr(name) in str(caught.value)


def test_the_demos_of_numbers_begin_in_fp16_as_asked_for_by_themselves() -> None:
    for name in ("underflow", "overflow"):
        with aw.demo(name, display=False) as session:
            assert session.run_state == "ready"
            assert session.pending is not None
            assert session.pending.changes == {"autocast": "fp16"}
            assert session.settings.init_scale == 2.0**16
            assert session.settings.scaling
