"""The mesh: sizes, the order of its devices, its axes."""

import dataclasses
import subprocess
import sys
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshtrain.errors import MeshError
from meshtrain.mesh import (
    MEMORY_FRACTION,
    MeshWarning,
    batch_axes,
    batch_spec,
    claim_gpu_memory,
    make_mesh,
    manual_axes,
    num_batch_shards,
    sum_axes,
    use_virtual_devices,
)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What the order of a mesh goes by."""

    process_index: int
    id: int
    platform = "gpu"
    device_kind = "fake"


def shuffled(devices: list[Any], seed: int) -> list[Any]:
    """The same devices in another order."""
    return [devices[i] for i in np.random.default_rng(seed).permutation(len(devices))]


def cluster(num_processes: int, num_local: int) -> list[Any]:
    """Devices as a cluster reports them: in any order, with ids that do not follow the processes'."""
    devices = [
        FakeDevice(process, 100 * (num_processes - process) + local)
        for process in range(num_processes)
        for local in range(num_local)
    ]
    return shuffled(devices, 0)


@pytest.mark.parametrize(
    ("data", "model", "sizes"),
    [(-1, 1, (8, 1)), (-1, 2, (4, 2)), (-1, 8, (1, 8)), (4, 2, (4, 2)), (2, 4, (2, 4)), (8, 1, (8, 1))],
)
def test_the_sizes_are_those_asked_for(data: int, model: int, sizes: tuple[int, int]) -> None:
    mesh = make_mesh(data, model)
    assert mesh.axis_names == ("data", "model")
    assert mesh.devices.shape == sizes
    assert {device.id for device in mesh.devices.flat} == set(range(8))
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


@pytest.mark.parametrize("sizes", [{"data": "4"}, {"model": 2.0}, {"model": True}])
def test_sizes_are_whole_numbers(sizes: dict) -> None:
    with pytest.raises(MeshError, match="whole numbers"):
        make_mesh(**sizes)


def test_one_device_is_a_mesh_of_both_axes() -> None:
    mesh = make_mesh(devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    assert num_batch_shards(mesh) == 1 and sum_axes(mesh) == ()


def test_the_order_in_which_devices_are_given_does_not_matter() -> None:
    expected = make_mesh(4, 2)
    for seed in range(5):
        mesh = make_mesh(4, 2, shuffled(jax.devices(), seed))
        assert mesh == expected
        assert [device.id for device in mesh.devices.flat] == list(range(8))


def test_devices_are_ordered_by_process_first() -> None:
    devices = list(make_mesh(devices=cluster(3, 2)).devices.flat)
    assert [(device.process_index, device.id) for device in devices] == [
        (0, 300), (0, 301), (1, 200), (1, 201), (2, 100), (2, 101),
    ]  # fmt: skip


def test_a_model_group_lies_inside_one_process() -> None:
    mesh = make_mesh(model=4, devices=cluster(2, 8))
    assert mesh.devices.shape == (4, 4)
    for group in mesh.devices:
        assert len({device.process_index for device in group}) == 1
        first = group[0].id
        assert [device.id for device in group] == list(range(first, first + 4))


def test_a_model_group_larger_than_a_process_fills_whole_processes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = make_mesh(model=8, devices=cluster(4, 4))
    for group in mesh.devices:
        processes = [device.process_index for device in group]
        assert processes == sorted(processes)
        assert {processes.count(process) for process in processes} == {4}


def test_a_model_group_across_an_edge_between_processes_gets_a_warning() -> None:
    with pytest.warns(MeshWarning, match="a mesh of model=2 straddles processes of 3 devices"):
        make_mesh(model=2, devices=cluster(2, 3))


def test_the_callers_list_stays_as_it_was() -> None:
    devices = cluster(2, 2)
    before = list(devices)
    make_mesh(devices=devices)
    assert devices == before


@pytest.mark.parametrize(
    ("data", "model", "parts"),
    [
        (-1, 3, ["a mesh of model=3", "8 devices", "[1, 2, 4, 8]"]),
        (-1, 16, ["a mesh of model=16", "8 devices", "[1, 2, 4, 8]"]),
        (3, 2, ["data=3 x model=2", "needs 6", "there are 8", "set data=-1", "devices=N", "use_virtual_devices(N)"]),
        (16, 1, ["data=16 x model=1", "needs 16", "there are 8"]),
        (2, 2, ["needs 4", "there are 8"]),
        (0, 1, ["data=0", "at least 1"]),
        (-2, -4, ["data=-2", "model=-4"]),
        (-1, 0, ["model=0", "at least 1"]),
        (-1, -8, ["model=-8"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(data: int, model: int, parts: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        make_mesh(data, model)
    assert all(part in str(caught.value) for part in parts)
    assert "\n" not in str(caught.value)
    assert "mesh.model" not in str(caught.value) and "mesh.data" not in str(caught.value)  # a script has no such keys


def test_no_devices_make_no_mesh() -> None:
    with pytest.raises(MeshError, match="no devices"):
        make_mesh(devices=[])


def test_axes_are_found_by_name_not_by_number() -> None:
    devices = np.array(jax.devices()).reshape(2, 2, 1, 2)
    mesh = Mesh(devices, ("replica", "data", "seq", "model"), axis_types=(AxisType.Auto,) * 4)
    assert manual_axes(mesh) == {"replica", "data", "seq"}
    assert batch_axes(mesh) == ("replica", "data")
    assert num_batch_shards(mesh) == 4
    assert batch_spec(mesh) == P(("replica", "data"))
    flat = Mesh(devices.reshape(1, 4, 2), ("replica", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    assert sum_axes(flat) == ("data",)  # an axis of one device sums nothing


def test_the_batch_is_cut_over_data_alone() -> None:
    mesh = make_mesh(4, 2)
    placed = jax.device_put(np.arange(16).reshape(8, 2), jax.sharding.NamedSharding(mesh, batch_spec(mesh)))
    rows = {shard.device.id: np.asarray(shard.data)[:, 0].tolist() for shard in placed.addressable_shards}
    assert rows == {device: [4 * (device // 2), 4 * (device // 2) + 2] for device in range(8)}


# ---------------------------------------------------------------- virtual devices


def test_virtual_devices_that_are_there_already_are_fine() -> None:
    use_virtual_devices(8)
    assert len(jax.devices()) == 8


def test_another_number_of_virtual_devices_is_refused_once_jax_runs() -> None:
    jax.devices()
    with pytest.raises(MeshError, match=r"devices=3: 3 virtual CPU devices .*started with 8.*new process"):
        use_virtual_devices(3)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "3 True"),
        ("import jax; jax.devices()", "3 virtual CPU devices cannot be made, jax has already started with 1"),
    ],
)
def test_virtual_devices_in_a_new_process(before: str, expected: str) -> None:
    code = f"""
{before}
import jax
from meshtrain.mesh import make_mesh, use_virtual_devices
from meshtrain.errors import MeshError
try:
    use_virtual_devices(3)
    print(len(jax.devices()), make_mesh().shape == {{"data": 3, "model": 1}})
except MeshError as error:
    print(error)
"""
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert expected in done.stdout


# ---------------------------------------------------------------- a GPU's memory


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": str(MEMORY_FRACTION)}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}),
    ],
)
def test_the_share_of_a_gpus_memory_is_ours_unless_the_user_gave_one(before: Any, after: Any) -> None:
    claim_gpu_memory(before)
    assert before == after
