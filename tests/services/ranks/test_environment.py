"""The variables by which ranks find each other are those of `mlx.launch`."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UsageError
from protocol.settings import RankBackend, RankGroupSettings, RankHost
from services.ranks.environment import Ports, Variables, export_variables, hold_ports, variables_of


def group(backend: RankBackend, *hosts: RankHost, **more: Any) -> RankGroupSettings:
    limits = dict.fromkeys(("start_timeout_s", "meet_timeout_s", "silence_timeout_s"), 1.0)
    return RankGroupSettings(hosts=list(hosts), backend=backend, port=4000, **limits, **more)


NONE = Ports(0)
LAPTOP = RankHost(name="laptop", ips=["10.0.0.1"])
STUDIO = RankHost(name="studio", is_local=False, ips=["10.0.0.2", "10.0.1.2"])


def test_a_ring_between_machines_has_a_port_per_rank() -> None:
    """All ranks get the same list, and each its own number."""
    first, second = variables_of(group("ring", LAPTOP, STUDIO), NONE)
    assert json.loads(first.files["MLX_HOSTFILE"]) == [
        ["10.0.0.1:4000"],
        ["10.0.0.2:4001", "10.0.1.2:4001"],
    ]
    assert first.files == second.files
    assert (first.plain["MLX_RANK"], second.plain["MLX_RANK"]) == ("0", "1")


def test_a_ring_on_one_machine_has_ports_that_are_its_own() -> None:
    """Nothing is reachable from outside, and two groups do not meet."""
    settings = group("ring", RankHost(), RankHost())
    with hold_ports(settings) as one, hold_ports(settings) as other:
        found = [
            json.loads(variables_of(settings, ports)[0].files["MLX_HOSTFILE"])
            for ports in (one, other)
        ]
    assert found == [[[f"127.0.0.1:{n}"] for n in ports.numbers] for ports in (one, other)]
    assert len({*one.numbers, *other.numbers}) == 4


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ([socket.SO_REUSEADDR, socket.SO_REUSEPORT], "127.0.0.1"),  # the ring
        ([socket.SO_REUSEADDR], ""),  # NCCL's meeting point
    ],
)
def test_ports_that_are_held_are_free_for_mlx_alone(options: list[int], address: str) -> None:
    """It listens with the options of its sockets; others find the port in use."""
    with Ports(1) as ports, socket.socket() as mlx, socket.socket() as other:
        place = (address, ports.numbers[0])
        with pytest.raises(OSError, match="in use"):
            other.bind(place)
        for option in options:
            mlx.setsockopt(socket.SOL_SOCKET, option, 1)
        mlx.bind(place)
        mlx.listen()
        with socket.create_connection(("127.0.0.1", ports.numbers[0]), timeout=5.0):
            accepted, _ = mlx.accept()
            accepted.close()


def test_ranks_of_one_machine_meet_over_nccl_at_a_port_of_their_own() -> None:
    """On loopback; between machines it is the one of the settings."""
    settings = group("nccl", RankHost(), RankHost())
    with hold_ports(settings) as ports:
        first, _ = variables_of(settings, ports)
    assert first.plain["NCCL_HOST_IP"] == "127.0.0.1"
    assert [first.plain["NCCL_PORT"]] == [str(number) for number in ports.numbers]


def test_jaccl_gets_its_devices_and_its_coordinator() -> None:
    """The first host's address; a ring only where it was asked for."""
    hosts = [
        RankHost(name="a", ips=["10.0.0.1"], rdma=[None, "rdma_en2"]),
        RankHost(name="b", is_local=False, rdma=["rdma_en3", None]),
    ]
    [first, _] = variables_of(group("jaccl", *hosts), NONE)
    assert first.plain["MLX_JACCL_COORDINATOR"] == "10.0.0.1:4000"
    assert json.loads(first.files["MLX_IBV_DEVICES"]) == [[None, "rdma_en2"], ["rdma_en3", None]]
    assert "MLX_JACCL_RING" not in first.plain
    assert variables_of(group("jaccl-ring", *hosts), NONE)[0].plain["MLX_JACCL_RING"] == "1"


def test_nccl_gets_a_meeting_point_and_the_number_of_ranks() -> None:
    """And each rank the variables of its own host and of all."""
    own = RankHost(name="a", ips=["10.0.0.1"], environment={"CUDA_VISIBLE_DEVICES": "1"})
    first, second = variables_of(group("nccl", own, STUDIO, environment={"X": "y"}), NONE)
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
        variables_of(group(backend, *hosts), NONE)


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
