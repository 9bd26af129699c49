"""The variables by which ranks find each other are those of `mlx.launch`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UsageError
from protocol.settings import RankBackend, RankGroupSettings, RankHost
from services.ranks.environment import Variables, export_variables, variables_of


def group(backend: RankBackend, *hosts: RankHost, **more: Any) -> RankGroupSettings:
    limits = {"port": 4000, "start_timeout_s": 1.0, "silence_timeout_s": 1.0}
    return RankGroupSettings(hosts=list(hosts), backend=backend, **limits, **more)


LAPTOP = RankHost(name="laptop", ips=["10.0.0.1"])
STUDIO = RankHost(name="studio", is_local=False, ips=["10.0.0.2", "10.0.1.2"])


def test_a_ring_between_machines_has_a_port_per_rank() -> None:
    """All ranks get the same list, and each its own number."""
    first, second = variables_of(group("ring", LAPTOP, STUDIO))
    assert json.loads(first.files["MLX_HOSTFILE"]) == [
        ["10.0.0.1:4000"],
        ["10.0.0.2:4001", "10.0.1.2:4001"],
    ]
    assert first.files == second.files
    assert (first.plain["MLX_RANK"], second.plain["MLX_RANK"]) == ("0", "1")


def test_a_ring_on_one_machine_takes_free_ports() -> None:
    """Nothing is reachable from outside, and two groups do not meet."""
    addresses = [
        json.loads(variables_of(group("ring", RankHost(), RankHost()))[0].files["MLX_HOSTFILE"])
        for _ in range(2)
    ]
    flat = [address for nodes in addresses for [address] in nodes]
    assert all(address.startswith("127.0.0.1:") for address in flat)
    assert len(set(addresses[0][0] + addresses[0][1])) == 2


def test_jaccl_gets_its_devices_and_its_coordinator() -> None:
    """The first host's address; a ring only where it was asked for."""
    hosts = [
        RankHost(name="a", ips=["10.0.0.1"], rdma=[None, "rdma_en2"]),
        RankHost(name="b", is_local=False, rdma=["rdma_en3", None]),
    ]
    [first, _] = variables_of(group("jaccl", *hosts))
    assert first.plain["MLX_JACCL_COORDINATOR"] == "10.0.0.1:4000"
    assert json.loads(first.files["MLX_IBV_DEVICES"]) == [[None, "rdma_en2"], ["rdma_en3", None]]
    assert "MLX_JACCL_RING" not in first.plain
    assert variables_of(group("jaccl-ring", *hosts))[0].plain["MLX_JACCL_RING"] == "1"


def test_nccl_gets_a_meeting_point_and_the_number_of_ranks() -> None:
    """And each rank the variables of its own host and of all."""
    own = RankHost(name="a", ips=["10.0.0.1"], environment={"CUDA_VISIBLE_DEVICES": "1"})
    first, second = variables_of(group("nccl", own, STUDIO, environment={"X": "y"}))
    assert first.plain == {
        "NCCL_HOST_IP": "10.0.0.1",
        "NCCL_PORT": "4000",
        "MLX_WORLD_SIZE": "2",
        "MLX_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "1",
        "X": "y",
    }
    assert "CUDA_VISIBLE_DEVICES" not in second.plain


@pytest.mark.parametrize(
    ("backend", "hosts", "words"),
    [
        ("ring", (LAPTOP, RankHost(name="bare", is_local=False)), "the host 'bare' has no `ips`"),
        ("nccl", (RankHost(name="bare"), STUDIO), "the host 'bare' has no `ips`"),
        ("jaccl", (LAPTOP, STUDIO), "for 'laptop', one RDMA device per rank"),
    ],
)
def test_hosts_that_lack_something_are_named(
    backend: RankBackend, hosts: tuple[RankHost, ...], words: str
) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match=words):
        variables_of(group(backend, *hosts))


def test_files_last_as_long_as_the_group_forms() -> None:
    """MLX finds them under their variables; nothing is left."""

    def seen(name: str) -> str:
        command = ["/bin/sh", "-c", f'echo "${name}"']
        return subprocess.check_output(command, text=True).strip()

    with export_variables(Variables({"SSD_TEST_PLAIN": "1"}, {"SSD_TEST_FILE": "content"})):
        path = Path(seen("SSD_TEST_FILE"))
        assert (seen("SSD_TEST_PLAIN"), path.read_text()) == ("1", "content")
    assert not path.exists()
    os.unsetenv("SSD_TEST_FILE")
    os.unsetenv("SSD_TEST_PLAIN")
