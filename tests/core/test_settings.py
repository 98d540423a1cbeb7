"""Settings: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from amp_widgets.core.settings import FIELD_NAMES, Settings, describe_changes, describe_settings, format_scale
from amp_widgets.errors import SettingsError


def test_defaults_are_what_the_user_had_before() -> None:
    settings = Settings()
    plain = torch.amp.GradScaler("cpu")
    assert settings.autocast == "fp32"
    assert settings.checkpointed == settings.fp32_layers == ()
    assert (settings.init_scale, settings.growth_factor, settings.backoff_factor, settings.growth_interval) == (
        plain.get_scale(),
        plain.get_growth_factor(),
        plain.get_backoff_factor(),
        plain.get_growth_interval(),
    )


def test_public_fields() -> None:
    assert FIELD_NAMES == (
        "autocast", "scaling", "init_scale", "growth_factor", "backoff_factor", "growth_interval",
        "min_scale", "max_scale", "checkpointed", "fp32_layers",
    )  # fmt: skip


def test_layers_kept_in_fp32_are_named_and_told_like_those_checkpointed() -> None:
    settings = Settings(autocast="bf16").replace(fp32_layers=["norm*", "head"])
    assert settings.fp32_layers == ("norm*", "head")
    assert Settings(fp32_layers="head").fp32_layers == ("head",)
    assert settings.differences(Settings(autocast="bf16")) == {"fp32_layers": (("norm*", "head"), ())}
    assert describe_changes({"fp32_layers": settings.fp32_layers}) == "2 layers kept in FP32"
    assert describe_changes({"fp32_layers": ()}) == "no layer kept in FP32"
    assert describe_settings(settings) == "bf16 + 2 layers kept in FP32"
    assert describe_settings(settings.replace(checkpointed="a")) == "bf16 + 1 layer checkpointed + 2 layers kept in FP32"
    for wrong in (3, ["head", 4]):
        with pytest.raises(SettingsError, match="fp32_layers: got"):
            settings.replace(fp32_layers=wrong)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().autocast = "fp16"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"autocast": "fp8"}, "autocast: got 'fp8', expected one of 'fp32', 'fp16', 'bf16'"),
        ({"autocast": torch.float16}, "did you mean 'fp16'"),
        ({"autocast": None}, "expected one of"),
        ({"scaling": 1}, "scaling: got 1, expected True or False"),
        ({"init_scale": 0}, "expected a positive finite number"),
        ({"init_scale": -2.0}, "expected a positive finite number"),
        ({"init_scale": math.inf}, "expected a positive finite number"),
        ({"init_scale": math.nan}, "expected a positive finite number"),
        ({"init_scale": "big"}, "expected a number"),
        ({"init_scale": True}, "expected a number"),
        ({"init_scale": 2.0**-127}, "expected a scale from 2^-126 to 2^126"),
        ({"init_scale": 2**127}, "expected a scale from 2^-126 to 2^126"),
        ({"init_scale": 10**400}, "expected a finite number"),
        ({"growth_factor": 1.0}, "expected a finite number above 1"),
        ({"growth_factor": math.nan}, "expected a finite number above 1"),
        ({"backoff_factor": 1.0}, "expected a number between 0 and 1"),
        ({"backoff_factor": 0.0}, "expected a number between 0 and 1"),
        ({"growth_interval": 0}, "expected a whole number of steps"),
        ({"growth_interval": 1.5}, "expected a whole number of steps"),
        ({"growth_interval": math.nan}, "expected a whole number of steps"),
        ({"growth_interval": math.inf}, "expected a whole number of steps"),
        ({"min_scale": 8.0, "max_scale": 4.0, "init_scale": 4.0}, "which is above max_scale 2^2"),
        ({"checkpointed": 3}, "expected layer names or globs"),
        ({"checkpointed": [3]}, "expected layer names or globs"),
        ({"checkpointed": None}, "expected layer names or globs"),
        ({"initial_scale": 4.0}, "initial_scale: there is no such setting; did you mean 'init_scale'?"),
        ({"zzz": 4.0}, "expected one of autocast, scaling"),
    ],
)
def test_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings().replace(**changes)
    assert said in str(caught.value)


def test_numbers_of_other_libraries_are_taken() -> None:
    settings = Settings(init_scale=np.float32(1024), growth_interval=np.int64(5), growth_factor=torch.tensor(3.0))  # type: ignore[arg-type]
    assert (settings.init_scale, settings.growth_interval, settings.growth_factor) == (1024.0, 5, 3.0)
    assert type(settings.init_scale) is float
    assert type(settings.growth_interval) is int


def test_one_layer_name_may_stand_alone() -> None:
    assert Settings(checkpointed="layers.*").checkpointed == ("layers.*",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("autocast", "scaling", "scales"),
    [("fp32", True, False), ("bf16", True, False), ("fp16", True, True), ("fp16", False, False)],
)
def test_the_loss_is_scaled_for_fp16_only(autocast: str, scaling: bool, scales: bool) -> None:
    assert Settings(autocast=autocast, scaling=scaling).scales_loss is scales  # type: ignore[arg-type]


def test_the_safe_range_is_where_the_reciprocal_is_a_normal_fp32() -> None:
    for scale in (2.0**-126, 2.0**126):
        reciprocal = np.float32(1 / scale)
        assert np.isfinite(reciprocal)
        assert reciprocal >= np.finfo(np.float32).tiny
    assert np.float32(1 / 2.0**127) < np.finfo(np.float32).tiny


def test_format_scale() -> None:
    assert [format_scale(s) for s in (1.0, 65536.0, 0.25, 3.0, 2.0**40, 1e5)] == ["2^0", "2^16", "2^-2", "3", "2^40", "100000"]


def test_describe_changes() -> None:
    text = describe_changes(
        {"autocast": "fp16", "scaling": False, "init_scale": 1024.0, "max_scale": None, "checkpointed": ("a", "b")}
    )
    assert text == "autocast fp16, scaling off, init_scale 2^10, max_scale none, 2 layers checkpointed"
    assert describe_changes({"checkpointed": ()}) == "no layer checkpointed"


def test_differences() -> None:
    assert Settings().differences(Settings(autocast="bf16")) == {"autocast": ("fp32", "bf16")}


def test_import_needs_no_torch() -> None:
    code = "import sys; import amp_widgets.core.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
