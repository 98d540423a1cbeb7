from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_widgets.core.formats import FORMATS
from amp_widgets.errors import FormatError
from amp_widgets.widgets import format_state
from amp_widgets.widgets.format_lab import FormatLab
from amp_widgets.widgets.format_state import PRESETS, FormatLabState, format_rows, plain, scaled_rows, update_rows
from amp_widgets.widgets.typed_number import typed_number

NAMES = ["fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "fixed 4+2"]


def say(lab: FormatLab, **message: object) -> None:
    lab._handle_custom_msg({**message, "id": "1"}, [])


def row(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [found] = [row for row in rows if row["name"] == name]
    return found


# ---- typed numbers ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1), (" 2e-8 ", 2e-8), ("2**-24", 2.0**-24), ("2^10", 1024.0), ("1/3", 1 / 3), ("-1/3", -1 / 3), (".5", 0.5),
        ("5.", 5.0), ("+3", 3.0), ("1E3", 1000.0), ("3 * 2**-24", 3 * 2.0**-24), ("3 × 2 ^ -24", 3 * 2.0**-24), ("1/2/2", 0.25),
        ("10**-8", 1e-8), ("-2**2", -4.0), ("−7", -7.0), ("inf", math.inf), ("-INF", -math.inf), ("1e-5*-2", -2e-5),
        ("2**-1074", 5e-324), ("2**1023", 2.0**1023), ("2**-2000 * 2**1999", 0.5), ("0**0", 1.0), ("65519.99", 65519.99),
    ],
)  # fmt: skip
def test_numbers_as_people_type_them(text: str, value: float) -> None:
    assert typed_number(text) == value


def test_zeros_and_nan() -> None:
    assert math.copysign(1, typed_number("-0")) == -1
    assert math.copysign(1, typed_number("0")) == 1
    assert math.isnan(typed_number("nan"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got '', expected a number such as"),
        ("abc", "got 'abc', expected a number such as"),
        ("__import__('os')", "expected a number such as"),
        ("1 2", "expected a number such as"),
        ("1,5", "expected a number such as"),
        ("1+1", "expected a number such as"),
        ("2**0.5", "expected a number such as"),
        ("2**3**4", "expected a number such as"),
        ("1//2", "expected a number such as"),
        ("1/", "expected a number such as"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("1e400", "within float64"),
        ("-1e400", "within float64"),
        ("1e-400", "within float64"),
        ("9e9999", "within float64"),
        ("9**99999", "within float64"),
        ("9e9999**99999", "within float64"),
        ("2**1024", "within float64"),
        ("1" * 81, "got 81 characters"),
    ],
)
def test_what_is_no_number_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        typed_number(text)


@given(st.floats(allow_nan=False))
def test_what_is_shown_reads_back(value: float) -> None:
    assert typed_number(plain(value)) == value
    assert math.copysign(1, typed_number(plain(value))) == math.copysign(1, value)


# ---- rows ----


def test_0_1_in_fp16() -> None:
    got = row(format_rows(FormatLabState()), "fp16")
    bar = got.pop("bar")
    assert got == {
        "name": "fp16",
        "layout": "1+5+10 bits",
        "groups": [5, 10],
        "bits": "0010111001100110",
        "digits": [],
        "meaning": "1.5996094 × 2^(11-15)",
        "stored": "0.0999755859",
        "word": "rounded",
        "tone": "",
        "error": ["-2.44e-5", "0.024 %", "0.4 ulp"],
        "above": "0.100036621",
        "below": "0.0999145508",
        "spacing": "2^-14 = 6.1e-5",
        "range": "±6e-8 … 65504",
        "decades": "12.0 decades",
    }
    places = [round(math.log2(value), 3) for value in (2.0**-24, 2.0**-14, 65504, 0.1)]
    assert list(bar.values()) == [pytest.approx((place + 150) / 2.8, abs=0.01) for place in places]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.5, ["exact"] * 8),
        (2e-7, ["rounded", "rounded", "subnormal", "rounded", *["underflow to zero"] * 4]),
        (2e-8, ["rounded", "rounded", "underflow to zero", "rounded", *["underflow to zero"] * 4]),
        (65519.99, ["rounded", "rounded", "rounded", "rounded", *["overflow"] * 4]),
        (65520.0, ["exact", "rounded", "overflow", "rounded", *["overflow"] * 4]),
        (1e39, ["overflow"] * 8),
        (math.inf, [*["exact"] * 4, "overflow", "exact", "overflow", "overflow"]),
        (math.nan, ["not a number"] * 8),
    ],
)
def test_a_word_for_each_format(value: float, words: list[str]) -> None:
    assert {row["name"]: row["word"] for row in format_rows(FormatLabState(value=value))} == dict(zip(NAMES, words, strict=True))


def test_the_tutorials_fixed_point() -> None:
    got = {value: row(format_rows(FormatLabState(value=value)), "fixed 4+2") for value in (1234.56, 0.0001, 1234567.0, -3.5)}
    assert [(row["digits"], row["stored"], row["word"]) for row in got.values()] == [
        (["+", "1234", "56"], "1234.56", "exact"),
        (["+", "0000", "00"], "0", "underflow to zero"),
        (["–", "––––", "––"], "does not fit", "overflow"),
        (["-", "0003", "50"], "-3.5", "exact"),
    ]
    assert got[1234567.0]["error"] == []
    assert got[1234.56]["range"] == "-9999.99 … 9999.99"


@pytest.mark.parametrize(
    ("value", "name", "meaning"),
    [
        (2e-7, "fp16", "3 × 2^-24 (subnormal)"), (-2e-7, "fp16", "-3 × 2^-24 (subnormal)"), (-1.5, "bf16", "-1.5 × 2^(127-127)"),
        (-0.0, "fp16", "-0"), (-math.inf, "fp16", "exponent all ones, fraction 0: -inf"),
        (math.nan, "fp16", "exponent all ones: NaN"), (math.nan, "fp8_e4m3", "all ones: NaN"),
        (448.0, "fp8_e4m3", "1.75 × 2^(15-7)"), (-0.05, "int8", "-5 × 0.01"),
        (math.nan, "int8", "no code for it"), (1234.56, "fixed 4+2", "123456 / 100"),
    ],
)  # fmt: skip
def test_the_bits_in_words(value: float, name: str, meaning: str) -> None:
    assert row(format_rows(FormatLabState(value=value)), name)["meaning"] == meaning


def test_scale_store_unscale() -> None:
    rows = scaled_rows(FormatLabState(value=2e-5, scale=1000.0))
    assert [row["name"] for row in rows] == NAMES
    assert row(rows, "fp16") == {
        "name": "fp16",
        "cells": ["0.02", "0.0200042725", "2.00042725e-5"],
        "error": "0.021 %",
        "without": "0.14 %",
        "word": "rounded",
        "tone": "",
    }
    lost = row(scaled_rows(FormatLabState(value=2e-8, scale=1.0)), "fp16")
    assert (lost["cells"], lost["error"], lost["word"]) == (["2e-8", "0", "0"], "100 %", "underflow to zero")
    saved = row(scaled_rows(FormatLabState(value=2e-8, scale=2.0**16)), "fp16")
    assert (saved["error"], saved["without"]) == ("0.028 %", "100 %")
    burst = row(scaled_rows(FormatLabState(value=1.0, scale=2.0**16)), "fp16")
    assert (burst["cells"], burst["error"], burst["word"]) == (["65536", "inf", "inf"], "–", "overflow")


def test_whether_a_weight_moves() -> None:
    assert update_rows(FormatLabState()) == []
    state = FormatLabState(samples=(format_state.Sample("a", 1.0, 1.0, 1e-3),))
    moves = {row["name"]: row["word"] == "changes" for row in update_rows(state)}
    assert moves == dict(zip(NAMES, [True, True, True, False, False, False, False, False], strict=True))
    assert row(update_rows(state), "fp16")["cells"] == ["1", "0.0009765625", "0.999023438"]
    assert format_state.picked_sentence(state) == "w = 1,  g = 1,  lr = 0.001:  lr·g = 0.001"


@given(st.floats(), st.sampled_from([1.0, 1000.0, 2.0**40]))
def test_any_number_can_be_shown(value: float, scale: float) -> None:
    state = FormatLabState(value=value, scale=scale, samples=(format_state.Sample("x", value, value, 1.0),))
    for made in (format_rows(state), scaled_rows(state), update_rows(state)):
        assert len(made) == len(NAMES)


# ---- the control ----


def test_it_begins_with_a_number_or_its_text() -> None:
    lab = FormatLab()
    assert (lab.value, lab.text, lab.float64, lab.exponent, lab.has_weights) == (0.1, "0.1", "", -4, False)
    lab = FormatLab("1/3")
    assert (lab.value, lab.text, lab.float64) == (1 / 3, "1/3", "0.3333333333333333")
    assert repr(lab) == "<amp_widgets format lab: 0.3333333333333333>"
    with pytest.raises(FormatError, match="got 'a third'"):
        FormatLab("a third")


def test_typing_and_setting() -> None:
    lab = FormatLab()
    say(lab, text=" 2e-8 ")
    assert (lab.value, lab.text, row(lab.rows, "fp16")["word"]) == (2e-8, "2e-8", "underflow to zero")
    lab.value = 65520.0
    assert (lab.text, row(lab.rows, "fp16")["stored"]) == ("65520", "inf")
    for value in (math.nan, math.inf, -math.inf):
        lab.value = value
        assert (lab.text, row(lab.rows, "fp16")["stored"]) == (repr(value), repr(value))


def test_what_cannot_be_read_is_said_and_changes_nothing() -> None:
    lab = FormatLab()
    before = lab.state
    wrong = {"text": ["1+1", ""], "scale": ["0", "-1", "inf", "nan"], "int8_scale": ["0", "inf", ""]}
    for field, text in [(field, text) for field, texts in wrong.items() for text in texts]:
        say(lab, **{field: text})
        assert list(lab.problems) == [field]
        assert "expected" in lab.problems[field]
        assert lab.state == before
    for digits in ([4, "x"], ["", 2], [12, 4], [0, "0"]):
        say(lab, digits=digits)
        assert list(lab.problems) == ["digits"]
        assert lab.state == before
    assert "'0'" not in lab.problems["digits"]  # it was read as a number
    say(lab, text="7")
    assert (lab.problems, lab.value) == ({}, 7.0)


@pytest.mark.parametrize("name", [*FORMATS, "int8"])
def test_flipping_every_bit_there_and_back(name: str) -> None:
    lab = FormatLab()
    start = row(lab.rows, name)["bits"]
    for bit in range(len(start)):
        say(lab, flip=[name, bit])
        flipped = row(lab.rows, name)["bits"]
        assert [at for at in range(len(start)) if start[at] != flipped[at]] == [len(start) - 1 - bit]
        say(lab, flip=[name, bit])
        assert row(lab.rows, name)["bits"] == start


def test_a_flipped_bit_makes_another_number_for_all_formats() -> None:
    lab = FormatLab("2e-8")
    say(lab, flip=["fp16", 14])
    assert (lab.value, lab.text) == (2.0, "2")
    assert row(lab.rows, "bf16")["stored"] == "2"


def test_bits_of_a_nan_stay_as_they_were_flipped() -> None:
    lab = FormatLab("inf")
    say(lab, flip=["fp16", 0])
    assert (lab.text, row(lab.rows, "fp16")["bits"]) == ("nan", "0111110000000001")
    say(lab, flip=["fp16", 1])
    assert row(lab.rows, "fp16")["bits"] == "0111110000000011"
    assert row(lab.rows, "bf16")["bits"] == "0111111111000000"
    say(lab, flip=["fp16", 14])
    assert lab.value == FORMATS["fp16"].decode(0b0011110000000011)


@pytest.mark.parametrize("flip", [["fp17", 0], ["fp16", 16], ["fixed 4+2", 0], ["fp16", -1]])
def test_a_bit_that_is_not_there(flip: list[Any]) -> None:
    lab = FormatLab()
    say(lab, flip=flip)
    assert (list(lab.problems), lab.value) == (["flip"], 0.1)


def test_no_bit_of_a_number_that_has_no_code() -> None:
    lab = FormatLab("nan")
    assert row(lab.rows, "int8")["bits"] == ""
    say(lab, flip=["int8", 0])
    assert "cannot store" in lab.problems["flip"]


def test_the_slider_keeps_sign_and_fraction() -> None:
    lab = FormatLab("-1.5")
    say(lab, exponent=-20)
    assert (lab.value, lab.exponent) == (-1.5 * 2.0**-20, -20)
    assert row(lab.rows, "fp16")["bits"] == "1000000000011000"
    for text in ("0", "inf", "nan"):
        say(lab, text=text)
        say(lab, exponent=3)
        assert lab.value == 8.0
    say(lab, exponent=10_000)
    assert lab.value == 2.0**130


def test_scale_typed_and_dragged() -> None:
    lab = FormatLab("2e-5")
    say(lab, scale="1000")
    assert (lab.state.scale, lab.scale, lab.scale_exponent) == (1000.0, "1000", 10)
    say(lab, scale_exponent=16)
    assert (lab.state.scale, lab.scale) == (65536.0, "2^16 = 65536")
    say(lab, scale=lab.scale)  # its own text reads back
    assert (lab.state.scale, lab.problems) == (65536.0, {})
    say(lab, scale="2**-3")
    assert (lab.state.scale, lab.scale_exponent) == (0.125, 0)


def test_the_steps_of_int8_and_the_digits_of_fixed_point() -> None:
    lab = FormatLab()
    say(lab, int8_scale="1/4")
    assert (lab.int8_scale, row(lab.rows, "int8")["stored"], row(lab.rows, "int8")["word"]) == ("0.25", "0", "underflow to zero")
    say(lab, digits=["2", 5])
    assert (lab.digits, row(lab.rows, "fixed 2+5")["digits"]) == ([2, 5], ["+", "00", "10000"])


@pytest.mark.parametrize("name", PRESETS)
def test_examples(name: str) -> None:
    lab = FormatLab("3")
    say(lab, flip=["fp16", 3])
    say(lab, digits=[1, 1])
    say(lab, preset=name)
    assert lab.value == typed_number(name.split(" ")[0])
    assert lab.text == name.split(" ")[0]
    assert lab.state.scale == (1000.0 if "1000" in name else 1024.0)
    assert lab.digits == ([4, 2] if "digits" in name else [1, 1])


def test_the_examples_of_the_tutorial_come_out_as_it_should_say() -> None:
    lab = FormatLab()
    for name, kind, stored, word in (
        ("1234.56 (4+2 digits)", "fixed 4+2", "1234.56", "exact"),
        ("0.0001 (4+2 digits)", "fixed 4+2", "0", "underflow to zero"),
        ("1234567 (4+2 digits)", "fixed 4+2", "does not fit", "overflow"),
        ("2e-7", "fp16", "1.78813934e-7", "subnormal"),
        ("2e-8", "fp16", "0", "underflow to zero"),
    ):
        say(lab, preset=name)
        shown = row(lab.rows, kind)
        assert (shown["stored"], shown["word"]) == (stored, word), name
    say(lab, preset="2e-5 × 1000")
    scaled = row(lab.scaled, "fp16")
    assert scaled["cells"][0] == "0.02"
    assert float(scaled["cells"][2]) == pytest.approx(2e-5, rel=5e-4)


def test_weights_of_a_callable_are_read_anew() -> None:
    given_samples = [("a", 1.0, 1.0, 1e-3), ("b", 2.0, 1.0, 1e-3)]
    lab = FormatLab(weights=lambda: given_samples)
    assert (lab.has_weights, lab.samples, lab.picked) == (True, ["a", "b"], 0)
    say(lab, pick=1)
    assert (lab.picked, row(lab.updates, "fp16")["cells"][0]) == (1, "2")
    say(lab, look="g")
    assert lab.value == 1.0
    say(lab, look="w")
    assert lab.value == 2.0
    given_samples.insert(0, ("new", 5.0, 0.0, 1e-3))
    say(lab, read=True)
    assert (lab.samples, lab.picked) == (["new", "a", "b"], 2)  # the same one is chosen
    given_samples.clear()
    say(lab, read=True)
    assert (lab.samples, lab.picked, lab.updates, lab.picked_numbers) == ([], 0, [], "")
    for message in ({"look": "w"}, {"pick": 0}, {"pick": -1}):
        say(lab, **message)
    assert lab.value == 2.0


def test_weights_of_a_mapping() -> None:
    lab = FormatLab(weights={"a": (1.0, 1.0)}, lr=1e-3)
    assert lab.picked_numbers == "w = 1,  g = 1,  lr = 0.001:  lr·g = 0.001"


def test_weights_that_cannot_be_read() -> None:
    with pytest.raises(FormatError, match=r"got \('a', 1\), expected \(label, w, g, lr\)"):
        FormatLab(weights=lambda: [("a", 1)])  # type: ignore[list-item]
    works = True

    def samples() -> list[tuple[str, float, float, float]]:
        if not works:
            raise RuntimeError("the session is closed")
        return [("a", 1.0, 1.0, 0.1)]

    lab = FormatLab(weights=samples)
    works = False
    say(lab, read=True)
    assert lab.problems == {"read": "the weights could not be read: RuntimeError: the session is closed"}
    assert lab.samples == ["a"]


def test_an_equal_state_sends_nothing(messages: Any) -> None:
    lab = FormatLab("1/3", weights={"a": (1.0, 1.0)})
    messages.clear()
    lab.show(lab.state)
    say(lab, text="1/3")
    say(lab, nothing="of this")
    assert messages.updates == []
    say(lab, pick=0)
    say(lab, scale_exponent=11)
    [update] = messages.updates
    assert set(update) == {"scale", "scale_exponent", "scaled"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0])
def test_all_that_is_sent_is_json(value: float) -> None:
    lab = FormatLab(value, weights={"a": (value, value)})
    sent = {name: sent for name, sent in lab.get_state().items() if not name.startswith("_")}
    json.dumps(sent, allow_nan=False)
    assert "rows" in sent
    assert "value" not in sent


def test_a_locked_or_closed_lab_does_nothing() -> None:
    lab = FormatLab()
    lab.lock()
    say(lab, text="7")
    assert lab.value == 0.1
    lab.close()


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\n"
    code += "from amp_widgets.widgets.format_lab import FormatLab; print(FormatLab('2**-24').value)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) == 2.0**-24


@pytest.mark.parametrize(
    ("value", "weights", "message"),
    [
        (0.1, {"a": 1}, r"weights: got 1 for 'a', expected \(w, g\)"),
        (0.1, {"a": (1.0, 2.0, 3.0)}, r"got \(1.0, 2.0, 3.0\) for 'a'"),
        (0.1, {"a": ("x", 2.0)}, "expected .label, w, g, lr."),
        (0.1, 5, "weights: got 5, expected a callable, or a mapping"),
        (0.1, [("w", 1.0, 1.0, 0.1)], "expected a callable, or a mapping"),
        (0.1, lambda: 5, "the weights could not be read: TypeError"),
        (None, None, "value: got None, expected a number or a text"),
        (10**400, None, "value: got 1000"),
    ],
)
def test_a_lab_cannot_be_made_of_anything(value: Any, weights: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        FormatLab(value, weights=weights)


# ---- a real weight ----


def test_the_rule_is_that_of_plain_sgd_and_another_optimizer_is_named() -> None:
    entries = [
        ("plain", 1.0, 0.5, 0.1),
        ("momentum", 1.0, 0.5, 0.1, "SGD with momentum", None, 41),
        ("adam", 1.0, 0.5, 0.1, "Adam", -3.25e-5, 42),
        ("still", 1.0, 0.5, 0.1, "Adam", 0.0, 1),
        ("none", 1.0, 0.5, 0.01, None, None, 0),
    ]
    lab = FormatLab(weights=lambda: entries)
    assert (lab.optimizer, lab.picked_numbers) == ("", "w = 1,  g = 0.5,  lr = 0.1:  lr·g = 0.05")
    say(lab, pick=1)
    assert lab.picked_numbers.endswith("lr·g = 0.05, after 41 steps")
    assert lab.optimizer.startswith("Your optimizer is SGD with momentum, whose step is not lr·g")
    assert "was not seen" in lab.optimizer
    say(lab, pick=2)
    assert lab.optimizer.endswith("Its last step really changed this weight by -3.25e-5.")
    say(lab, pick=3)
    assert lab.optimizer.endswith("changed this weight by 0.")
    assert lab.picked_numbers.endswith("after 1 step")
    say(lab, pick=4)
    assert lab.optimizer == "No optimizer is known that has this weight: lr = 0.01 is assumed."


def test_the_chosen_weight_stays_chosen_when_others_come() -> None:
    entries = [("a[0]", 1.0, 1.0, 0.1), ("b[1, 2]", 2.0, 1.0, 0.1), ("c", 3.0, 1.0, 0.1)]
    lab = FormatLab(weights=lambda: entries)
    say(lab, pick=1)
    entries[:] = [("z", 0.0, 1.0, 0.1), *entries]
    say(lab, read=True)
    assert (lab.samples[lab.picked], lab.state.samples[lab.picked].w) == ("b[1, 2]", 2.0)
    entries[:] = [("a[0]", 1.0, 1.0, 0.1), ("c", 3.0, 1.0, 0.1), ("b[3, 0]", 4.0, 1.0, 0.1)]
    say(lab, read=True)
    assert lab.samples[lab.picked] == "b[3, 0]"  # another one of the same parameter
    entries[:] = [("c", 3.0, 1.0, 0.1)]
    say(lab, read=True)
    assert lab.picked == 0


def test_an_entry_with_too_much_is_refused() -> None:
    with pytest.raises(FormatError, match="expected"):
        FormatLab(weights=lambda: [("a", 1.0, 1.0, 0.1, "", None, 0, "more")])


@pytest.mark.parametrize(
    ("text", "scale"), [("65536 = 2^3", None), ("2^16 = 65536 = 1", None), ("2^16=65536", 65536.0), ("8 =", None)]
)
def test_a_scale_is_one_number(text: str, scale: float | None) -> None:
    lab = FormatLab()
    say(lab, scale=text)
    assert lab.state.scale == (1024.0 if scale is None else scale)
    assert ("scale" in lab.problems) == (scale is None)


def test_a_product_that_float64_has_not_is_not_exact() -> None:
    burst = scaled_rows(FormatLabState(value=1e10, scale=1e308))
    assert {(one["cells"][0], one["word"], one["tone"]) for one in burst} == {("inf", "overflow", "bad")}
    lost = scaled_rows(FormatLabState(value=1e-200, scale=1e-200))
    assert {(one["cells"][0], one["word"]) for one in lost} == {("0", "underflow to zero")}
    assert row(scaled_rows(FormatLabState(value=math.inf)), "fp16")["word"] == "exact"
    assert row(scaled_rows(FormatLabState(value=0.0)), "fp16")["word"] == "exact"
