"""Tables answer as numpy's general functions do, for dense and for wide ranges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.trace.lookup import contained, distinct, flags

SMALL = st.integers(0, 12)
WIDE = st.integers(-(2**40), 2**40)
DTYPES = (np.uint8, np.int32, np.int64)


@given(st.lists(SMALL) | st.lists(WIDE), st.lists(SMALL) | st.lists(WIDE))
def test_membership_is_that_of_isin(ids: list[int], members: list[int]) -> None:
    values, wanted = np.array(ids, np.int64), np.array(members, np.int64)
    assert contained(values, wanted).tolist() == np.isin(values, wanted).tolist()


@given(st.lists(SMALL) | st.lists(WIDE))
def test_distinct_values_are_those_of_unique(ids: list[int]) -> None:
    values = np.array(ids, np.int64)
    assert distinct(values).tolist() == np.unique(values).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_integer_type_is_looked_up(dtype: type[np.integer]) -> None:
    values = np.array([3, 1, 3, 7], dtype)
    assert distinct(values).tolist() == [1, 3, 7]
    assert contained(values, np.array([7, 3], dtype)).tolist() == [True, False, True, True]
    assert flags(9, [7, 3])[values].tolist() == [True, False, True, True]
