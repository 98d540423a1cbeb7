"""How a model is called with the inputs of a batch."""

from __future__ import annotations

import functools
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from amp_widgets.core.model_call import call_model

A, B = torch.arange(3.0), torch.arange(3.0, 6.0)


def model_of(forward: Any) -> nn.Module:
    """A model that gives back what it is called with."""

    class Net(nn.Module):
        pass

    Net.forward = forward  # type: ignore[method-assign]
    return Net()


def two(self: Any, ids: Any, mask: Any) -> Any:
    return "two", ids, mask


def second_optional(self: Any, ids: Any, mask: Any = None) -> Any:
    return "second_optional", ids, mask


def one(self: Any, batch: Any) -> Any:
    return "one", batch


def all_optional(self: Any, ids: Any = None, mask: Any = None, **more: Any) -> Any:
    return "all_optional", ids, mask, more


def keyword_only(self: Any, *, ids: Any, mask: Any = None) -> Any:
    return "keyword_only", ids, mask


def anything(self: Any, *args: Any, **kwargs: Any) -> Any:
    return "anything", args, kwargs


def any_keywords(self: Any, **kwargs: Any) -> Any:
    return "any_keywords", kwargs


def positional_only(self: Any, ids: Any, mask: Any, /) -> Any:
    return "positional_only", ids, mask


@functools.wraps(two)
def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
    return two(self, *args, **kwargs)


BOTH: dict[str, Any] = {"mask": B, "ids": A}
PACKED = pack_sequence([A, B])


@pytest.mark.parametrize(
    ("forward", "inputs", "given"),
    [
        (one, A, ("one", A)),
        (second_optional, A, ("second_optional", A, None)),
        (two, BOTH, ("two", A, B)),
        (two, UserDict(BOTH), ("two", A, B)),
        (two, (A, B), ("two", A, B)),
        (two, [A, B], ("two", A, B)),
        (wrapped, BOTH, ("two", A, B)),
        (wrapped, (A, B), ("two", A, B)),
        (second_optional, BOTH, ("second_optional", A, B)),
        (second_optional, {"ids": A}, ("second_optional", A, None)),
        (second_optional, {"mask": B}, ("second_optional", {"mask": B}, None)),  # what it needs is missing
        (second_optional, (A, B), ("second_optional", (A, B), None)),  # one argument is enough
        (one, BOTH, ("one", BOTH)),
        (one, (A, B), ("one", (A, B))),
        (one, {}, ("one", {})),
        (one, {1: A}, ("one", {1: A})),
        (all_optional, BOTH, ("all_optional", A, B, {})),
        (all_optional, {"ids": A, "other": B}, ("all_optional", {"ids": A, "other": B}, None, {})),
        (keyword_only, BOTH, ("keyword_only", A, B)),
        (anything, BOTH, ("anything", (BOTH,), {})),
        (anything, (A, B), ("anything", ((A, B),), {})),
        (any_keywords, BOTH, ("any_keywords", BOTH)),
        (positional_only, (A, B), ("positional_only", A, B)),
        (one, PACKED, ("one", PACKED)),
    ],
)
def test_how(forward: Any, inputs: Any, given: Any) -> None:
    called = call_model(model_of(forward), inputs)
    assert list(map(repr, called)) == list(map(repr, given))
    if given[0] == "one":
        assert called[1] is inputs


def test_within_data_parallelism_and_a_forward_of_the_instance() -> None:
    inner = model_of(two)
    assert call_model(nn.DataParallel(inner), (A, B)) == ("two", A, B)
    inner.forward = lambda ids: ("mine", ids)
    assert call_model(inner, (A, B)) == ("mine", (A, B))


def test_a_packed_sequence_is_one_argument() -> None:
    four = model_of(lambda self, a, b, c, d: None)
    with pytest.raises(TypeError, match=r"missing 3 required positional arguments.*as one argument"):
        call_model(four, PACKED)


def test_a_forward_that_is_not_written_in_python() -> None:
    net = model_of(one)
    net.forward = max  # has no signature
    assert call_model(net, (A[0], B[0])) == B[0]


def all_optional_summed(self: Any, ids: Any = None, mask: Any = None, *rest: Any, **more: Any) -> Any:
    return ids + A


ONE = "were given as one argument: model(inputs)"
ADVICE = "gets several from a dict with the names of its parameters, or where it needs more than one from a tuple with as many"


@pytest.mark.parametrize(
    ("forward", "inputs", "how"),
    [
        (lambda self, x: nn.functional.embedding(x, A), BOTH, f"a dict, {ONE}; forward(x) {ADVICE}"),
        (two, A, f"a Tensor, {ONE}; forward(ids, mask) {ADVICE}"),
        (two, (A, B, A), f"a tuple, {ONE}; forward(ids, mask) {ADVICE}"),
        (two, {"ids": A, "msak": B}, f"a dict, {ONE}; forward(ids, mask) {ADVICE}"),
        (all_optional_summed, {"ids": A, "msak": B}, f"a dict, {ONE}; forward(ids, mask, *rest, **more) {ADVICE}"),
        (lambda self, a, b: a + "", [A, B], "a list, were given as 2 arguments: model(*inputs)"),
        (lambda self, ids, mask: ids + "", BOTH, "a dict, were given as keywords: model(mask=…, ids=…)"),
    ],
)  # fmt: skip
def test_an_error_says_how(forward: Any, inputs: Any, how: str) -> None:
    with pytest.raises(TypeError) as caught:
        call_model(model_of(forward), inputs)
    assert str(caught.value) == f"{caught.value.__cause__}; the batch's inputs, {how}"
    assert type(caught.value.__cause__) is TypeError


@pytest.mark.parametrize("error", [TypeError("mine"), type("Mine", (TypeError,), {})("mine"), ValueError("mine")])
def test_an_error_of_the_model_with_one_tensor_is_as_it_is(error: Exception) -> None:
    def forward(self: Any, x: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        call_model(model_of(forward), A)
    assert caught.value is error
