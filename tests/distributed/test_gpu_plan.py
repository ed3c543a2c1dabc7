"""Which GPUs a process takes, by what it sees and its place: a table of what schedulers show."""

from pathlib import Path

import pytest

from meshtrain.distributed.gpus import plan_gpus, visible_gpus
from meshtrain.distributed.place import Place
from meshtrain.errors import LaunchError


def place(local_id: int, num_local: int, num_hosts: int = 2) -> Place:
    count = num_local * num_hosts
    hosts = tuple(f"gpu{i // num_local}" for i in range(count))
    return Place(local_id, count, local_id, num_local, hosts, "gpu0", 4000, "slurm 1.0", "SLURM", "")


def machine(root: Path, num_gpus: int) -> Path:
    (root / "dev").mkdir()
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(num_gpus))]:
        (root / "dev" / name).touch()
    return root


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("0,1,2,3", 4), ("2,3", 2), ("7", 1), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,-1,2", 1), ("void", 0),
        ("GPU-8f3c,GPU-11aa", 2), ("MIG-1,MIG-2,MIG-3", 3), (" 0, 1 ", 2),
    ],
)  # fmt: skip
def test_the_visible_list_counts(tmp_path: Path, listed: str, count: int) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, machine(tmp_path, 8)) == count


def test_without_a_list_the_machine_counts(tmp_path: Path) -> None:
    assert visible_gpus({}, machine(tmp_path, 3)) == 3


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) is None


GRES = {"SLURM_GPUS_ON_NODE": "4"}  # --gres=gpu:4: all tasks of the node see all its GPUs
PER_TASK = GRES | {"SLURM_GPUS_PER_TASK": "1"}  # --gpus-per-task=1: each sees its own
TYPED = GRES | {"SLURM_GPUS_PER_TASK": "a100:2"}


@pytest.mark.parametrize(
    ("env", "num_visible", "num_tasks", "expected"),
    [
        (GRES, 4, 1, [(0, 1, 2, 3)]),  # jax issue 16788: one task per node takes all
        (GRES, 4, 2, [(0, 1), (2, 3)]),
        (GRES, 4, 4, [(0,), (1,), (2,), (3,)]),
        ({"SLURM_GPUS_ON_NODE": "2"}, 2, 2, [(0,), (1,)]),  # jax issue 23452: positions, whatever the ordinals are
        (PER_TASK, 1, 4, [(0,)] * 4),
        (TYPED, 2, 2, [(0, 1)] * 2),
        (PER_TASK, 4, 4, [(0,), (1,), (2,), (3,)]),  # and --gpu-bind=none, which NCCL likes: each sees all again
        (GRES, 1, 4, [(0,)] * 4),  # --gpu-bind=single:1
        ({}, 8, 1, [tuple(range(8))]),
        ({}, 8, 8, [(i,) for i in range(8)]),
    ],
)
def test_a_plan_for_each_task(
    tmp_path: Path, env: dict[str, str], num_visible: int, num_tasks: int, expected: list[tuple[int, ...]]
) -> None:
    plans = [plan_gpus(num_visible, place(i, num_tasks), env, tmp_path) for i in range(num_tasks)]
    assert plans == expected


def test_a_wrapper_that_shows_each_task_one_gpu(tmp_path: Path) -> None:
    assert plan_gpus(1, place(2, 4), {"CUDA_VISIBLE_DEVICES": "2"}, machine(tmp_path, 4)) == (0,)


@pytest.mark.parametrize("local_id", [0, 6])
def test_more_tasks_than_gpus_are_refused_with_both_numbers(tmp_path: Path, local_id: int) -> None:
    with pytest.raises(LaunchError, match="8 tasks on host gpu0, and 4 visible GPUs"):
        plan_gpus(4, place(local_id, 8), GRES, machine(tmp_path, 8))


def test_gpus_that_cannot_be_shared_out(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="8 visible GPUs on host gpu0 cannot be shared out equally to its 3 tasks"):
        plan_gpus(8, place(1, 3), {}, tmp_path)
