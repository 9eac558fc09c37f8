"""What GGUF stores otherwise, against the formulas, element by element."""

import numpy as np
import pytest

from localinfer.models.checkpoint.changes import (
    FIRST_HALVES,
    NEGATIVE_EXPONENTIAL,
    SECOND_HALVES,
    UNIT_COLUMNS,
    adjacent_pairs,
    latent_keys,
    latent_values,
    parts_of_groups,
    scaled,
    scaled_rows,
    tiled_columns,
    tiled_heads,
)

RANDOM = np.random.default_rng(3)


def test_adjacent_pairs_leave_what_does_not_rotate() -> None:
    order = adjacent_pairs(2 * 10, 2, 0.6)
    assert order.tolist() == [0, 3, 1, 4, 2, 5, 6, 7, 8, 9, 10, 13, 11, 14, 12, 15, 16, 17, 18, 19]
    with pytest.raises(ValueError, match="15 rows"):
        adjacent_pairs(15, 3)


def test_heads_of_values_go_from_groups_to_tiles() -> None:
    groups, heads, size, before = 3, 6, 2, 5
    rows = RANDOM.standard_normal((before + heads * size, 4))
    found = tiled_heads(groups, heads, size, before).apply(rows)
    for head in range(heads):
        # Head h of GGUF reads the keys of group h % groups.
        group, place = head % groups, head // groups
        source = before + (group * heads // groups + place) * size
        np.testing.assert_array_equal(found[before + head * size :][:size], rows[source : source + size])
    np.testing.assert_array_equal(found[:before], rows[:before])
    columns = rows[before:].T
    np.testing.assert_array_equal(tiled_columns(groups, heads, size).apply(columns), found[before:].T)


def test_parts_of_groups_are_taken_group_by_group() -> None:
    rows = np.arange(2 * (2 + 3 + 1))
    queries_and_gates = parts_of_groups(2, (2, 3, 1), (0, 2)).apply(rows)
    assert queries_and_gates.tolist() == [0, 1, 6, 7, 5, 11]
    with pytest.raises(ValueError, match="11 rows"):
        parts_of_groups(2, (2, 3, 1), (0,)).apply(rows[:-1])


def test_latent_matrix_splits_into_what_meets_queries_and_what_makes_values() -> None:
    heads, key_size, value_size, rank = 3, 4, 5, 7
    matrix = RANDOM.standard_normal((heads * (key_size + value_size), rank))
    latent, query = RANDOM.standard_normal(rank), RANDOM.standard_normal((heads, key_size))
    keys, values = latent_keys(heads, key_size, value_size), latent_values(heads, key_size, value_size)
    by_head = (matrix @ latent).reshape(heads, key_size + value_size)
    absorbed = np.einsum("hrk,hk->hr", keys.apply(matrix), query)
    np.testing.assert_allclose(absorbed @ latent, (query * by_head[:, :key_size]).sum(1))
    np.testing.assert_allclose(values.apply(matrix) @ latent, by_head[:, key_size:])
    assert keys.shape(matrix.shape) == (heads, rank, key_size)


def test_stacks_of_gate_and_up_are_halved_matrix_by_matrix() -> None:
    stack = RANDOM.standard_normal((3, 10, 4))
    np.testing.assert_array_equal(np.concatenate([FIRST_HALVES.apply(stack), SECOND_HALVES.apply(stack)], 1), stack)
    with pytest.raises(ValueError, match="9 rows"):
        FIRST_HALVES.shape((3, 9, 4))


def test_rows_and_columns_are_scaled() -> None:
    matrix = RANDOM.standard_normal((6, 3)).astype(np.float32)
    found = scaled_rows((1, 2, 3), (2.0, 0.5, 4.0)).apply(matrix)
    np.testing.assert_allclose(found, matrix * np.array([[2], [0.5], [0.5], [4], [4], [4]]), rtol=1e-6)
    np.testing.assert_allclose((UNIT_COLUMNS.apply(matrix) ** 2).sum(0), np.ones(3), rtol=1e-5)


def test_what_float32_has_no_number_for_is_infinite_without_a_warning() -> None:
    values = np.array([[0.0, 89.0], [-104.0, np.inf]], np.float32)
    assert NEGATIVE_EXPONENTIAL.apply(values).tolist() == [[-1.0, -np.inf], [0.0, -np.inf]]
    assert scaled(3.0).apply(np.float32([3e38])).tolist() == [np.inf]
    columns = UNIT_COLUMNS.apply(np.float32([[1e20], [0.0]]))
    assert columns.shape == (2, 1) and columns[1] == 0
