"""Which process of a job this one is, by the variables that launchers set: a table of environments."""

from typing import Any

import pytest

from meshtrain.distributed.place import find_place, job_port, task_hosts, tasks_per_node
from meshtrain.errors import LaunchError


def slurm(process_id: int = 0, **changes: Any) -> dict[str, str]:
    """A task of `srun -N2 -n4`."""
    env = {
        "SLURM_JOB_ID": "123", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4",
        "SLURM_STEP_NODELIST": "gpu-a-[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": str(process_id),
        "SLURM_LOCALID": str(process_id % 2), "SLURM_NODEID": str(process_id // 2),
    } | changes  # fmt: skip
    return {key: value for key, value in env.items() if value is not None}


FLAGS = {"MESHTRAIN_COORDINATOR": "head:4000", "MESHTRAIN_NUM_PROCESSES": "3", "MESHTRAIN_PROCESS_ID": "2"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1234.0;tcp://10.0.0.1,192.168.0.1:5678",
}  # fmt: skip


def test_nothing_at_all_is_one_process() -> None:
    place = find_place({})
    assert (place.process_id, place.num_processes, place.source, place.warnings) == (0, 1, "one process", ())


def test_slurm() -> None:
    place = find_place(slurm(3))
    assert (place.process_id, place.num_processes, place.local_id, place.num_local) == (3, 4, 1, 2)
    assert place.hosts == ("gpu-a-01", "gpu-a-01", "gpu-a-02", "gpu-a-02")
    assert (place.coordinator, place.source) == ("gpu-a-01", "SLURM")
    assert place.why == "process 3 of 4 on 2 nodes: SLURM job 123.0"


def test_flags_come_before_slurm_and_slurm_before_open_mpi() -> None:
    assert find_place(slurm(3) | FLAGS | MPI).source == "flags"
    assert find_place(slurm(3) | MPI).source == "SLURM"
    assert find_place(MPI).source == "Open MPI"


def test_mpirun_inside_a_slurm_job_of_another_size() -> None:
    """mpirun starts its daemons with srun, one per node, and they hand the daemon's SLURM variables on."""
    daemon = slurm(1, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_LOCALID="0", SLURM_NODEID="1")
    place = find_place(daemon | MPI)
    assert (place.source, place.process_id, place.num_processes) == ("Open MPI", 3, 4)
    assert "Open MPI started 4 processes, and SLURM's step has 2" in place.warnings[0]


def test_every_process_of_a_step_finds_the_same_meeting_point() -> None:
    places = [find_place(slurm(i)) for i in range(4)]
    assert len({(place.coordinator, place.port, place.hosts, place.job) for place in places}) == 1


# ------------------------------------------------------------ partly set (jax issue 30073)


def test_a_shell_on_a_node_of_the_job_is_one_process_with_one_warning() -> None:
    env = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "gpu-a-[01-02]"}
    place = find_place(env)
    assert place.num_processes == 1
    (warning,) = place.warnings
    for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"):
        assert name in warning
    with pytest.raises(LaunchError) as caught:
        find_place(env, mode="required")
    assert warning in str(caught.value)


def test_a_batch_script_without_srun() -> None:
    """There SLURM_PROCID is 0 and SLURM_NTASKS the whole job's, but no step has begun."""
    env = {"SLURM_JOB_ID": "123", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    place = find_place(env)
    assert place.num_processes == 1 and "srun before the command" in place.warnings[0]


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
def test_a_task_that_sees_part_of_its_step_is_refused(missing: str) -> None:
    """A container that hides variables would otherwise make each task a run of its own."""
    with pytest.raises(LaunchError, match=f"of a SLURM step, and {missing} are not set"):
        find_place(slurm(1, **{missing: None}))


def test_a_task_number_alone_shows_that_there_are_others() -> None:
    with pytest.raises(LaunchError, match="this is task 1 of a SLURM step"):
        find_place({"SLURM_JOB_ID": "123", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})


# ------------------------------------------------------------ modes


def test_off_looks_at_nothing() -> None:
    assert find_place(slurm(3) | FLAGS, mode="off").num_processes == 1


def test_required_refuses_one_process_that_nobody_asked_for() -> None:
    with pytest.raises(LaunchError, match="launch.distributed=required, and one process: neither MESHTRAIN_PROCESS_ID"):
        find_place({}, mode="required")
    assert find_place(slurm(3), mode="required").num_processes == 4


# ------------------------------------------------------------ addresses and ports


@pytest.mark.parametrize(
    ("text", "port", "expected"),
    [
        ("head:4000", 0, ("head", 4000)),
        ("head:4000", 5000, ("head", 5000)),
        ("10.0.0.1:4000", 0, ("10.0.0.1", 4000)),
        ("[2001:db8::1]:4000", 0, ("2001:db8::1", 4000)),
        ("[2001:db8::1]", 5000, ("2001:db8::1", 5000)),
        ("2001:db8::1", 5000, ("2001:db8::1", 5000)),
        ("head", 5000, ("head", 5000)),
    ],
)
def test_addresses(text: str, port: int, expected: tuple[str, int]) -> None:
    place = find_place(FLAGS | {"MESHTRAIN_COORDINATOR": text}, port=port)
    assert (place.coordinator, place.port) == expected


@pytest.mark.parametrize("text", ["", ":4000", "head:x", "head:70000", "[]:4000"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(LaunchError, match="MESHTRAIN_COORDINATOR=.* must be HOST:PORT"):
        find_place(FLAGS | {"MESHTRAIN_COORDINATOR": text})


def test_an_address_of_the_users_own_on_slurm() -> None:
    place = find_place(slurm(1, MESHTRAIN_COORDINATOR="10.1.2.3:4000"))
    assert (place.coordinator, place.port, place.source) == ("10.1.2.3", 4000, "SLURM")


def test_two_steps_of_one_job_never_share_a_port() -> None:
    """Nor do jobs that follow each other, with up to 37 steps."""
    ports = [job_port(f"slurm {job}.{step}") for job in (123, 4_000_000_000) for step in range(12000)]
    assert len(set(ports[:12000])) == len(set(ports[12000:])) == 12000
    assert all(20000 <= port < 32000 for port in ports)
    near = [job_port(f"slurm {job}.{step}") for job in range(900, 1000) for step in range(37)]
    assert len(set(near)) == len(near)
    assert find_place(slurm(1)).port != find_place(slurm(1, SLURM_STEP_ID="1")).port


# ------------------------------------------------------------ contradictions


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"MESHTRAIN_PROCESS_ID": "0"}, "PROCESS_ID set, and MESHTRAIN_NUM_PROCESSES and MESHTRAIN_COORDINATOR not"),
        (FLAGS | {"MESHTRAIN_PROCESS_ID": "3"}, "MESHTRAIN_PROCESS_ID=3 must be below MESHTRAIN_NUM_PROCESSES=3"),
        (FLAGS | {"MESHTRAIN_PROCESS_ID": "-1"}, "MESHTRAIN_PROCESS_ID=-1 must be a number"),
        (FLAGS | {"MESHTRAIN_PROCESS_ID": "$SLURM_PROCID"}, "MESHTRAIN_PROCESS_ID=$SLURM_PROCID must be a number"),
        (FLAGS | {"MESHTRAIN_LOCAL_ID": "0"}, "MESHTRAIN_LOCAL_ID and MESHTRAIN_NUM_LOCAL go together"),
        (FLAGS | {"MESHTRAIN_LOCAL_ID": "2", "MESHTRAIN_NUM_LOCAL": "2"}, "MESHTRAIN_LOCAL_ID=2 must be below"),
        (slurm(1, SLURM_STEP_NUM_TASKS="5"), "SLURM's variables contradict each other: task 1 of 5"),
        (slurm(1, SLURM_STEP_NODELIST="gpu[1-3]"), "3 names in SLURM_STEP_NODELIST=gpu[1-3]"),
        (slurm(1, SLURM_NODEID="2"), "on node number 2"),
        (slurm(1, SLURM_STEP_TASKS_PER_NODE="two"), "SLURM_STEP_TASKS_PER_NODE=two must be a list such as 2(x3),1"),
        (slurm(1, SLURM_STEP_NODELIST="gpu[1-"), "node list 'gpu[1-': a bracket '[' is not closed"),
        ({k: v for k, v in MPI.items() if "uri" not in k}, "set MESHTRAIN_COORDINATOR=HOST:PORT, with mpirun -x"),
    ],
)  # fmt: skip
def test_contradictions_are_named(env: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find_place(env)
    assert text in str(caught.value)


# ------------------------------------------------------------ which task runs where


@pytest.mark.parametrize(
    ("text", "tasks"), [("2(x3),1", (2, 2, 2, 1)), ("4", (4,)), ("1,2,1(x2)", (1, 2, 1, 1)), ("8(x1)", (8,))]
)
def test_tasks_per_node(text: str, tasks: tuple[int, ...]) -> None:
    assert tasks_per_node(text) == tasks


def test_distributions() -> None:
    assert task_hosts(("a", "b"), (3, 1)) == ("a", "a", "a", "b")
    assert task_hosts(("a", "b"), (3, 1), "cyclic") == ("a", "b", "a", "a")
    place = find_place(slurm(1, SLURM_DISTRIBUTION="cyclic", SLURM_NODEID="1", SLURM_LOCALID="0"))
    assert place.hosts == ("gpu-a-01", "gpu-a-02", "gpu-a-01", "gpu-a-02")


def test_hosts_that_cannot_be_known_are_left_open() -> None:
    place = find_place(slurm(1, SLURM_NODEID="1", SLURM_LOCALID="0"))  # neither block nor cyclic was said
    assert place.hosts == ("gpu-a-01", "gpu-a-02", "", "")


def test_open_mpi_on_one_host_and_on_several() -> None:
    place = find_place(MPI)
    assert (place.process_id, place.num_processes, place.local_id, place.num_local) == (3, 4, 1, 2)
    assert place.coordinator == "10.0.0.1"
    assert find_place(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).coordinator == "localhost"
