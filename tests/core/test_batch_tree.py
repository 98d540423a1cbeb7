"""The leaves of a batch, its form and its size."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch

from amp_widgets.core.batch_tree import batch_form, batch_leaves, first_dimension, is_batched, map_batch
from amp_widgets.runner import _samples


class Encoding(collections.UserDict[str, Any]):
    """As a tokenizer gives it."""


def batch(values: list[Any]) -> Any:
    one, two, three, four = values
    return Encoding(ids=one, more=Encoding(mask=two)), [{"t": three}, (four, Encoding())]


def test_leaves_are_found_in_every_mapping_and_put_back_into_the_same_form() -> None:
    made = batch([1, 2, 3, 4])
    assert batch_leaves(made) == [1, 2, 3, 4]
    seen: list[int] = []
    doubled = map_batch(lambda leaf: seen.append(leaf) or 2 * leaf, made)  # type: ignore[func-returns-value]
    assert seen == [1, 2, 3, 4]
    assert doubled == batch([2, 4, 6, 8])
    assert isinstance(doubled[0]["more"], Encoding)
    assert made == batch([1, 2, 3, 4])
    assert batch_leaves(5) == [5]


def test_forms_differ_by_containers_and_keys_alone() -> None:
    form = batch_form(batch([1, 2, 3, 4]))
    assert form == batch_form(batch([5, "text", torch.zeros(2), 8.0]))
    others = [
        batch([1, 2, 3, (4, 4)]),
        (Encoding(ids=1, less=Encoding(mask=2)), batch([1, 2, 3, 4])[1]),
        (Encoding(ids=1, more={"mask": 2}), batch([1, 2, 3, 4])[1]),
        (collections.UserDict(ids=1, more=Encoding(mask=2)), batch([1, 2, 3, 4])[1]),
    ]
    assert form not in map(batch_form, others)


def test_the_size_of_a_batch_is_that_of_its_first_tensor() -> None:
    leaves = batch_leaves((Encoding(lr=torch.tensor(0.1), ids=torch.zeros(3, 2)), np.zeros(4)))
    assert first_dimension(leaves) == 3
    assert [is_batched(leaf, 3) for leaf in leaves] == [False, True, False]
    assert first_dimension([torch.tensor(1.0), "text"]) is None


@pytest.mark.parametrize(
    ("inputs", "targets", "samples"),
    [
        (torch.zeros(3, 2), torch.zeros(6), 3),
        (torch.tensor(1.0), torch.zeros(6), 0),
        (Encoding(ids=torch.zeros(4, 7), mask=torch.zeros(4, 7)), torch.zeros(4), 4),
        ((torch.zeros(4, 7), torch.zeros(7, 7)), {"labels": torch.zeros(4, 7)}, 4),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}], 0),
        ("text", torch.zeros(4), 0),
    ],
    ids=["tensor", "number", "mapping", "tuple", "pictures of their own sizes", "no tensor"],
)
def test_how_many_samples_a_step_of_the_run_has(inputs: Any, targets: Any, samples: int) -> None:
    assert _samples(inputs, targets) == samples
