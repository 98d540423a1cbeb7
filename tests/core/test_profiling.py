from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from amp_widgets.core.profiling import MOST_TRIES, ProfilePlan, combination_of, free_label, positions_kept, without_step
from amp_widgets.core.settings import Settings

FP32 = Settings()
BF16 = Settings(autocast="bf16")
TICKED = Settings(checkpointed=("a", "b"))


def profiled(plan: ProfilePlan, *stretches: tuple[Settings, int], fails: int = 0) -> list[tuple[int, str]]:
    """The steps that are profiled, when each stretch of settings lasts so many; the first `fails` profiles come to nothing."""
    found: list[tuple[int, str]] = []
    kept: list[str] = []
    step = 0
    for settings, steps in stretches:
        for _ in range(steps):
            label = plan.label_for(step, settings, kept)
            if label is not None:
                found.append((step, label))
                if len(found) > fails:
                    kept.append(label)
            step += 1
    return found


def test_the_second_step_with_each_combination() -> None:
    assert profiled(ProfilePlan(), (FP32, 10), (BF16, 10), (TICKED, 10)) == [
        (1, "fp32"), (11, "bf16"), (21, "fp32 + 2 layers checkpointed"),
    ]  # fmt: skip


def test_one_that_comes_back_is_profiled_again_under_another_label() -> None:
    assert profiled(ProfilePlan(), (FP32, 5), (BF16, 5), (FP32, 5), (BF16, 5)) == [
        (1, "fp32"), (6, "bf16"), (11, "fp32 (step 11)"), (16, "bf16 (step 16)"),
    ]  # fmt: skip


def test_other_layers_are_another_combination_and_their_order_makes_none() -> None:
    one, turned, other = (Settings(checkpointed=names) for names in (("a", "b"), ("b", "a"), ("b", "c")))
    assert profiled(ProfilePlan(), (one, 3), (turned, 3), (other, 3)) == [
        (1, "fp32 + 2 layers checkpointed"), (7, "fp32 + 2 layers checkpointed (step 7)"),
    ]  # fmt: skip


def test_the_loss_scale_makes_no_other_combination() -> None:
    assert profiled(ProfilePlan(), (FP32, 3), (FP32.replace(init_scale=8.0, scaling=False), 3)) == [(1, "fp32")]


def test_what_was_in_force_for_one_step_is_not_profiled() -> None:
    assert profiled(ProfilePlan(), (FP32, 3), (BF16, 1), (FP32, 1), (BF16, 1), (FP32, 3)) == [(1, "fp32"), (7, "fp32 (step 7)")]


def test_it_may_be_first_asked_in_the_middle_of_a_run() -> None:
    plan = ProfilePlan()
    assert [plan.label_for(step, FP32, ()) for step in (500, 501)] == [None, "fp32"]


def test_a_first_step_that_broke_off_counts_as_none() -> None:
    plan = ProfilePlan()
    assert [plan.label_for(step, FP32, ()) for step in (0, 0, 0, 1)] == [None, None, None, "fp32"]


def test_a_step_that_brought_no_profile_is_followed_by_some_more_but_not_for_ever() -> None:
    assert profiled(ProfilePlan(), (FP32, 9), fails=1) == [(1, "fp32"), (2, "fp32")]
    tries = profiled(ProfilePlan(), (FP32, 99), (BF16, 3), fails=MOST_TRIES)
    assert tries == [(1, "fp32"), (2, "fp32"), (3, "fp32"), (100, "bf16")]


def test_a_profile_that_is_dropped_later_is_not_made_again() -> None:
    plan = ProfilePlan()
    kept: list[str] = []
    asked = []
    for step in range(6):
        label = plan.label_for(step, FP32, kept)
        asked.append(label)
        kept = [label] if label else kept if step < 3 else []  # gone from step 3 on
    assert asked == [None, "fp32", None, None, None, None]


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ((), "fp32"),
        (("fp16",), "fp32"),
        (("fp32",), "fp32 (step 7)"),
        (("fp32", "fp32 (step 7)"), "fp32 (step 7, 2)"),
        (("fp32", "fp32 (step 7)", "fp32 (step 7, 2)"), "fp32 (step 7, 3)"),
    ],
)
def test_free_labels(taken: tuple[str, ...], expected: str) -> None:
    assert free_label("fp32", 7, taken) == expected


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import amp_widgets.core.profiling"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_newest_of_each_combination_is_dropped_last() -> None:
    kept: list[tuple[int, str]] = []
    for step, label in enumerate(["fp32", "bf16", *(f"fp16 (step {i})" for i in range(2, 30))]):
        kept.append((step, label))
        places = positions_kept([combination_of(each, ()) for _, each in kept], 8)
        assert places == sorted(places)
        kept = [kept[place] for place in places]
    assert [step for step, _ in kept] == [0, 1, 24, 25, 26, 27, 28, 29]


def test_of_combinations_with_one_profile_each_the_oldest_is_dropped() -> None:
    assert positions_kept(["a", "b", "c"], 3) == [0, 1, 2]
    assert positions_kept(["a", "b", "c"], 2) == [1, 2]
    assert positions_kept(["a", "b", "a"], 2) == [1, 2]  # an older one of the newest combination goes before another one
    assert positions_kept([], 2) == []


def test_other_layers_are_another_combination_though_the_label_is_the_same() -> None:
    assert combination_of("fp32 + 2 layers checkpointed (step 7)", ("b", "c")) != combination_of(
        "fp32 + 2 layers checkpointed", ("a", "b")
    )
    assert combination_of("fp32 (step 7)", ()) == combination_of("fp32", ())
    for label in ("fp32", "fp32 + 2 layers checkpointed"):
        taken = {label}
        for _ in range(3):
            taken.add(free_label(label, 12, taken))
        assert {without_step(one) for one in taken} == {label}


def test_a_loop_keeps_the_before_when_the_new_setting_is_profiled_again_and_again() -> None:
    import torch

    from amp_widgets.core.loop import LiveLoop
    from amp_widgets.core.step_memory import PROFILES_KEPT

    model = torch.nn.Linear(2, 2)
    loop = LiveLoop(model, (torch.optim.SGD(model.parameters()),))
    try:
        layers = (types.SimpleNamespace(name="a", checkpointed=True), types.SimpleNamespace(name="b", checkpointed=False))
        labels = ["fp32", "bf16", *(f"bf16 (step {step})" for step in range(20))]
        for label in labels:
            profile: Any = types.SimpleNamespace(label=label, layers=layers)
            loop.keep_profile(profile)
        assert [profile.label for profile in loop.profiles] == ["fp32", *labels[1 - PROFILES_KEPT :]]
    finally:
        loop.close()
