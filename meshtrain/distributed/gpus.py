"""Which GPUs a process takes. Before jax looks for any: it binds them when it starts."""

from collections.abc import Mapping
from pathlib import Path

from meshtrain.distributed.place import Place
from meshtrain.errors import LaunchError

NO_DEVICE = ("-1", "NoDevFiles", "none", "void")  # what schedulers and containers write for none at all


def visible_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int | None:
    """How many GPUs this process may use; None where nothing says so.

    The visible list counts, up to its first entry that stands for no device, as CUDA reads it; without one, the
    machine's device files do.

    Args:
        root: of the file system, for tests.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return _device_files(root) or None
    count = 0
    for entry in listed.split(","):
        if not entry.strip() or entry.strip() in NO_DEVICE:
            break
        count += 1
    return count


def plan_gpus(
    num_visible: int, place: Place, environment: Mapping[str, str], root: Path = Path("/")
) -> tuple[int, ...]:
    """The GPUs of one process, as positions in its visible list, which are what jax calls local device ids.

    One task per node takes all. With several, each takes its share by its local number, unless the scheduler has
    already shown each task its own.

    Args:
        root: of the file system, for tests.

    Raises:
        LaunchError: there are more tasks on the host than GPUs, or the GPUs cannot be shared out equally.
    """
    if place.num_local == 1 or _shows_own_only(num_visible, environment, root):
        return tuple(range(num_visible))
    host, tasks = place.hosts[place.process_id] or "this host", place.num_local
    if tasks > num_visible:
        raise LaunchError(
            f"{tasks} tasks on host {host}, and {num_visible} visible GPUs: start at most one task per GPU, or ask the "
            "scheduler for more"
        )
    share, rest = divmod(num_visible, tasks)
    if rest:
        raise LaunchError(
            f"{num_visible} visible GPUs on host {host} cannot be shared out equally to its {tasks} tasks: start one "
            "task per node, or one per GPU"
        )
    return tuple(range(place.local_id * share, (place.local_id + 1) * share))


def _shows_own_only(num_visible: int, env: Mapping[str, str], root: Path) -> bool:
    """Whether each task of the host sees GPUs of its own: as many as it asked for, or fewer than the job has here."""
    per_task = env.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    if per_task.isdecimal() and int(per_task) == num_visible:
        return True
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal():
        return num_visible < int(on_node)
    return num_visible == 1 and _device_files(root) > 1  # a wrapper of the user's own has chosen one


def _device_files(root: Path) -> int:
    return sum(1 for _ in (root / "dev").glob("nvidia[0-9]*"))
