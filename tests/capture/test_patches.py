"""Attributes are replaced, and the original objects come back."""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from typing import Any

import pytest

from amp_widgets.capture.patches import Patches


class Base:
    def method(self) -> str:
        return "base"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @property
    def size(self) -> int:
        return 1


class Derived(Base):
    pass


def test_everything_is_the_original_object_again() -> None:
    module = types.ModuleType("m")
    module.f = original_f = len  # type: ignore[attr-defined]
    instance = Base()
    instance.own = own = object()  # type: ignore[attr-defined]
    before = dict(vars(Base))
    with Patches() as patches:
        for name in ("method", "static", "of_class", "size"):
            patches.replace(Base, name, lambda *args: "patched")
        patches.replace(module, "f", abs)
        patches.replace(instance, "own", 3)
        assert Base.static() == "patched"
        assert (module.f, instance.own) == (abs, 3)  # type: ignore[attr-defined]
    assert {name: vars(Base)[name] for name in before} == before
    assert all(vars(Base)[name] is before[name] for name in before)
    assert module.f is original_f  # type: ignore[attr-defined]
    assert instance.own is own  # type: ignore[attr-defined]
    assert patches.left == ()


def test_what_was_inherited_is_deleted_again() -> None:
    instance = Base()
    with Patches() as patches:
        patches.replace(Derived, "method", lambda self: "patched")
        patches.replace(instance, "method", lambda: "of the instance")
        assert (Derived().method(), instance.method()) == ("patched", "of the instance")
    assert "method" not in vars(Derived)
    assert "method" not in vars(instance)
    assert Derived().method() == instance.method() == "base"


def test_an_object_with_slots() -> None:
    class Slotted:
        __slots__ = ("x",)

    slotted = Slotted()
    slotted.x = original = object()
    with Patches() as patches:
        patches.replace(slotted, "x", 2)
        assert slotted.x == 2
    assert slotted.x is original


def test_one_attribute_twice() -> None:
    original = vars(Base)["method"]
    with Patches() as patches:
        patches.replace(Base, "method", lambda self: "first")
        patches.replace(Base, "method", lambda self: "second")
        assert Base().method() == "second"
    assert vars(Base)["method"] is original


def test_an_exception_does_not_keep_it() -> None:
    original = vars(Base)["method"]

    def broken_off() -> None:
        with Patches() as patches:
            patches.replace(Base, "method", None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken_off()
    assert vars(Base)["method"] is original


def test_what_cannot_be_replaced_changes_nothing() -> None:
    patches = Patches()
    with pytest.raises(AttributeError):
        patches.replace(Base, "no_such_method", 1)
    with pytest.raises(AttributeError):
        patches.replace(Base(), "size", 1)
    with pytest.raises(TypeError):
        patches.replace(int, "bit_length", 1)
    assert not hasattr(Base, "no_such_method")
    patches.restore()
    assert patches.left == ()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_are_restored_in_any_order(order: tuple[int, ...]) -> None:
    original = vars(Base)["method"]
    several = [Patches() for _ in range(3)]
    for number, patches in enumerate(several):
        before = Base.method
        patches.replace(Base, "method", lambda self, n=number, before=before: f"{n} {before(self)}")
    assert Base().method() == "2 1 0 base"
    for number in order:
        several[number].restore()
        assert several[number].left == ()
    assert vars(Base)["method"] is original


def test_what_someone_else_put_there_stays() -> None:
    original = vars(Derived).get("method")
    patches = Patches()
    patches.replace(Derived, "method", lambda self: "ours")
    ours = Derived.method

    def theirs(self: Any) -> str:
        return f"theirs over {ours(self)}"

    Derived.method = theirs  # type: ignore[method-assign]
    try:
        patches.restore()
        assert Derived().method() == "theirs over ours"
        assert patches.left == ("Derived.method",)
        patches.restore()
        assert patches.left == ()
    finally:
        del Derived.method
    assert vars(Derived).get("method") is original


def test_it_can_be_used_again() -> None:
    original = vars(Base)["method"]
    patches = Patches()
    for _ in range(2):
        with patches:
            patches.replace(Base, "method", lambda self: "patched")
            assert Base().method() == "patched"
        assert vars(Base)["method"] is original


def test_an_interrupt_at_any_line_of_restoring_is_raised_when_all_is_back() -> None:
    original, static = vars(Base)["method"], vars(Base)["static"]
    source, first = inspect.getsourcelines(Patches.restore)
    starts = [
        number for number, text in enumerate(source, first) if text.strip() in ("try:", "except KeyboardInterrupt as error:")
    ]
    guarded = range(starts[0] + 1, starts[1])  # the rest is a line of preparation, and the one that raises
    interrupted = 0
    for line in itertools.count(1):
        patches = Patches()
        patches.replace(Base, "method", lambda self: "patched")
        patches.replace(Base, "static", lambda: "patched")
        patches.replace(Derived, "method", lambda self: "patched")
        lines_seen = 0

        def trace(frame: Any, event: str, argument: Any, line: int = line) -> Any:
            nonlocal lines_seen
            if not frame.f_code.co_filename.endswith("patches.py"):
                return None
            if event == "line" and (frame.f_code.co_name != "restore" or frame.f_lineno in guarded):
                lines_seen += 1
                if lines_seen == line:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            patches.restore()
            raised = False
        except KeyboardInterrupt:
            raised = True
        finally:
            sys.settrace(before)
        if lines_seen < line:
            assert not raised
            break
        assert raised
        interrupted += 1
        assert vars(Base)["method"] is original, line
        assert vars(Base)["static"] is static, line
        assert "method" not in vars(Derived), line
    assert interrupted > 20
