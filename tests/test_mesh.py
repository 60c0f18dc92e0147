"""Host values on the mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes


@pytest.mark.parametrize("num_devices", [1, 2])
def test_numbers_come_onto_the_mesh_as_all_else_does(num_devices):
    mesh = meshes.make_mesh(num_devices)
    trees = {
        meshes.over_clients(mesh): np.arange(12).reshape(4, 3),
        meshes.replicated(mesh): {"a": np.zeros((4, 0)), "b": np.int32(7)},
    }
    expected = [meshes.put_global(tree, where) for where, tree in trees.items()]
    found = [meshes.put_numbers(tree, where) for where, tree in trees.items()]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.sharding, x.committed) == (y.dtype, y.sharding, y.committed)
        np.testing.assert_array_equal(x, y)


def test_numbers_may_change_once_they_are_on_the_mesh():
    whole = meshes.replicated(meshes.make_mesh(1))
    for _ in range(20):
        numbers = np.zeros(1000, np.int32)
        (placed,) = meshes.put_numbers((numbers,), whole)
        numbers += 1
        assert not np.asarray(placed).any()


@pytest.mark.parametrize("num_model_shards", [1, 2])
def test_each_client_device_computes_its_own_part(num_model_shards):
    mesh = meshes.make_mesh(2, num_model_shards)
    one = lambda x: (x.sum()[None], meshes.sum_over_clients(mesh, x.sum()))
    run = meshes.over_client_devices(mesh, one, P("clients"), (P("clients"), P()))
    own, total = jax.jit(run)(np.arange(4.0))
    np.testing.assert_array_equal(own, [1, 5])
    assert total == 6


@pytest.mark.parametrize("max_bytes", [1, 40, 2**20])
def test_arrays_of_processes_are_gathered_a_part_at_a_time(max_bytes, monkeypatch):
    """Here of one process, which gets its own."""
    monkeypatch.setattr(meshes, "GATHERED_BYTES", max_bytes)
    tree = {
        "rows": np.arange(21, dtype=np.float32).reshape(7, 3) / 3,
        "ids": np.arange(7)[::-1],
        "is_new": np.arange(7) % 2 == 0,
        "none": np.zeros((7, 0), np.float32),
    }
    found = meshes.gather_processes(tree)
    jax.tree.map(np.testing.assert_array_equal, found, tree)
    assert found["rows"].dtype == np.float32 and found["is_new"].dtype == bool
