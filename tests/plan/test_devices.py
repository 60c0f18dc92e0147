"""Names of devices that are not there, and of slices."""

import types

import pytest

from fedfr_jax import mesh
from fedfr_jax.plan.devices import parse_grid, topologies, topology


def test_several_slices_are_asked_of_the_compiler(monkeypatch):
    assert parse_grid("v5e:4x4:2").num_devices == 32
    asked = {}

    def describe(**options):
        asked.update(options)
        return types.SimpleNamespace(devices=())

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    with topology("v5e:4x4:2"):
        pass
    assert asked == {"platform": "tpu", "topology_name": "v5e:4x4", "num_slices": 2}


def test_a_gpu_is_asked_for_with_its_own_data_sheet(monkeypatch):
    asked = []

    def describe(target_config, **options):
        asked.append((options["topology"], target_config))
        return types.SimpleNamespace(devices=())

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    for name in ("v100:1x1x8", "h100:1x1x1"):
        with topology(name):
            pass
    (shape, v100), (_, h100) = asked
    assert shape == "1x1x8"
    assert "major: 7 " in v100 and "memory_bandwidth: 900000000000\n" in v100
    assert "major: 9 " in h100 and "memory_bandwidth: 3350000000000\n" in h100


def test_devices_of_a_slice_stand_side_by_side(monkeypatch):
    devices = mesh.list_devices()[:4]
    slices = dict(zip(devices, [1, 0, 1, 0], strict=True))
    monkeypatch.setattr(mesh, "list_devices", lambda: devices)
    monkeypatch.setattr(mesh, "_slice_index", slices.get)
    found = mesh.make_mesh().devices.reshape(-1)
    assert list(found) == [devices[i] for i in (1, 3, 0, 2)]


NO_GRIDS = ["v5e:4x4:0", "v5e:4x4:2:2", "v9:2x2", "h200:1x1x8:2", "v5e:3x5", "v5e:1x1"]


@pytest.mark.parametrize("name", [*NO_GRIDS, "v5p:4x4", "v5p:4x4x0", "h200:8", "v5p"])
def test_a_grid_that_no_pod_has_is_refused(name):
    with pytest.raises(
        ValueError, match="must be one of v5e, v5p, v6e, h200, h100, v100 and its"
    ):
        parse_grid(name)


@pytest.mark.parametrize("name", ["v5e:16x16:2", "v5p:4x4x3", "v6e:2x10", "h200:1x2x8"])
def test_a_grid_of_a_pod_is_taken(name):
    assert parse_grid(name).num_devices > 1
