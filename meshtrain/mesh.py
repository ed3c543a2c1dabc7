"""The device mesh: the only place that makes one.

    mesh = make_mesh(data=-1, model=2)  # 8 devices: a 4x2 mesh

Two kinds of axes, told apart by how they are used, not by how many there are:

* `model` is left to the compiler: rules place parameters over it, XLA partitions the rest (Megatron's tensor
  parallelism, Shoeybi et al. 2019, section 3).
* every other axis is manual inside the step's `jax.shard_map`: what crosses it is a collective that we wrote.

One device is a 1x1 mesh, not a special case.
"""

import math
import os
import warnings
from collections.abc import MutableMapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshtrain.errors import MeshError

DATA = "data"
MODEL = "model"
MEMORY_FRACTION = 0.93  # of a GPU, for arrays; the rest is left to CUDA, NCCL and the libraries
BATCH_AXES = ("replica", DATA)  # the axes that cut the global batch, outermost first, where the mesh has them


class MeshWarning(UserWarning):
    """The mesh works, but is likely slower than it could be."""


def claim_gpu_memory(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets jax take `MEMORY_FRACTION` of each GPU, unless the environment says how much. Before jax is first used.

    jax takes 75 % by itself. `meshtrain plan` counts on what is asked for here.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))


def use_virtual_devices(count: int) -> None:
    """Makes `count` CPU devices on this machine. Must run before jax is first used.

    Raises:
        MeshError: jax has already started with another number of devices.
    """
    ask_for_virtual_devices(count)
    if len(jax.devices()) != count:
        raise MeshError(
            f"devices={count}: {count} virtual CPU devices cannot be made, jax has already started with "
            f"{len(jax.devices())}; ask for them before the first use of jax, in a new process"
        )


def ask_for_virtual_devices(count: int) -> None:
    """Has jax make `count` CPU devices in this process when it starts; where it has started, nothing changes."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # what counts is whether the devices are there


def make_mesh(data: int = -1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arranges devices as a `(data, model)` mesh, the model axis innermost so that it stays inside a node if it fits.

    Args:
        data: size of the data axis; -1 takes all that `model` leaves.
        model: size of the tensor-parallel axis.
        devices: all of the cluster's devices by default; their order does not matter.

    Raises:
        MeshError: the sizes do not multiply to the number of devices.
    """
    if type(data) is not int or type(model) is not int:
        raise MeshError(f"the sizes of a mesh are whole numbers, got data={data!r} and model={model!r}")
    devices = list(jax.devices() if devices is None else devices)
    devices.sort(key=lambda device: (device.process_index, device.id))
    if not devices:
        raise MeshError("there are no devices to make a mesh of")
    if model < 1 or (data < 1 and data != -1):
        raise MeshError(
            f"a mesh of data={data} x model={model}: sizes are at least 1, or data=-1 for all devices that model leaves"
        )
    if data == -1:
        if len(devices) % model:
            sizes = [size for size in range(1, len(devices) + 1) if len(devices) % size == 0]
            raise MeshError(
                f"a mesh of model={model} cannot be made of {len(devices)} devices: choose one of {sizes}, which "
                "divide them, or another number of devices"
            )
        data = len(devices) // model
    if data * model != len(devices):
        raise MeshError(
            f"a mesh of data={data} x model={model} needs {data * model} devices, and there are {len(devices)}: "
            "set data=-1 to use them all, or make N virtual CPU devices (devices=N in a config or on the command line, "
            "use_virtual_devices(N) in a script)"
        )
    num_local = sum(device.process_index == devices[0].process_index for device in devices)
    if num_local < len(devices) and num_local % model and model % num_local:
        text = f"a mesh of model={model} straddles processes of {num_local} devices"
        warnings.warn(f"{text}: each layer's sums cross the network", MeshWarning, stacklevel=2)
    grid = np.array(devices).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def manual_axes(mesh: Mesh) -> frozenset[str]:
    """Names of the axes that are manual inside the training step: all but `model`."""
    return frozenset(mesh.axis_names) - {MODEL}


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Names of the axes that cut the global batch."""
    return tuple(name for name in BATCH_AXES if name in mesh.axis_names)


def sum_axes(mesh: Mesh) -> tuple[str, ...]:
    """Names of the axes that a sum over the batch must cross: the batch axes of more than one device."""
    return tuple(name for name in batch_axes(mesh) if mesh.shape[name] > 1)


def num_batch_shards(mesh: Mesh) -> int:
    """How many parts the global batch is cut into."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def batch_spec(mesh: Mesh) -> P:
    """Spec of a global batch `[batch, ...]`: the first dim cut over the batch axes, the rest whole."""
    return P(batch_axes(mesh))
