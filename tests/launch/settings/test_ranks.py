"""From flags and a hosts file to a group of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.settings.ranks import rank_group
from launch.settings.settings import StackSettings
from launch.stack.child import environment_for
from protocol.errors import UsageError
from protocol.settings import VerifierSettings


def hosts_file(folder: Path, content: object) -> str:
    path = folder / "hosts.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_without_flags_there_is_no_group() -> None:
    """The target is one process."""
    assert rank_group(StackSettings()) is None


def test_ranks_on_this_machine_share_its_cores() -> None:
    """One core or more for each; none is pinned where there are too few."""
    group = rank_group(StackSettings(target_ranks=2), [0, 1, 2, 3, 4])
    assert group is not None
    assert [host.cores for host in group.hosts] == [[0, 2, 4], [1, 3]]
    crowded = rank_group(StackSettings(target_ranks=3), [0, 1])
    assert crowded is not None
    assert [host.cores for host in crowded.hosts] == [[], [], []]


def test_a_hosts_file_of_mlx_is_read(tmp_path: Path) -> None:
    """Backend, variables, addresses and devices; the first host is this machine."""
    content = {
        "backend": "jaccl",
        "envs": ["MLX_METAL_FAST_SYNCH=1"],
        "hosts": [
            {"ssh": "laptop", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
            {"ssh": "studio", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None], "new": 1},
        ],
    }
    group = rank_group(StackSettings(hosts=hosts_file(tmp_path, content), split="3,2"), [0, 1])
    assert group is not None
    assert (group.backend, group.split) == ("jaccl", [3, 2])
    assert group.environment["MLX_METAL_FAST_SYNCH"] == "1"
    assert [(h.name, h.is_local, h.ips) for h in group.hosts] == [
        ("laptop", True, ["10.0.0.1"]),
        ("studio", False, ["10.0.0.2"]),
    ]
    assert [host.cores for host in group.hosts] == [[0, 1], []]


def test_a_bare_list_of_hosts_and_a_flag_for_the_backend(tmp_path: Path) -> None:
    """The older form of the file; flags win over it."""
    path = hosts_file(tmp_path, [{"ssh": "127.0.0.1"}, {"ssh": "localhost"}, {"ssh": "far"}])
    group = rank_group(StackSettings(hosts=path, backend="ring"))
    assert group is not None
    assert [host.is_local for host in group.hosts] == [True, True, False]
    assert group.backend == "ring"


def test_gpus_of_this_machine_are_given_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes one per rank; those that we may not see are not used."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    group = rank_group(StackSettings(target_ranks=2, backend="nccl"))
    assert group is not None
    assert [host.environment["CUDA_VISIBLE_DEVICES"] for host in group.hosts] == ["4", "6"]
    with pytest.raises(UsageError, match="cuda:2"):
        rank_group(StackSettings(target_ranks=3, backend="nccl"))


def test_gpus_are_given_out_whatever_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the target's device on; a target on the CPU takes none, and the ring."""
    monkeypatch.setattr("launch.settings.ranks.has_cuda", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def shown(**change: Any) -> tuple[str, list[str]]:
        found = rank_group(StackSettings(target_ranks=2, **change))
        assert found is not None
        environments = (host.environment for host in found.hosts)
        return found.backend, [one.get("CUDA_VISIBLE_DEVICES", "") for one in environments]

    assert shown() == ("nccl", ["0", "1"])
    assert shown(backend="ring", target_device="cuda:2") == ("ring", ["2", "3"])
    assert shown(target_device="cpu") == ("ring", ["", ""])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": "1,2"}, "need --target-ranks or --hosts"),
        ({"backend": "ring"}, "need --target-ranks or --hosts"),
        ({"target_ranks": 2, "split": "1,x"}, "not '1,x'"),
        ({"target_ranks": 2, "split": "1,1", "backend": "nccl"}, "cannot pipeline over nccl"),
        ({"target_ranks": 2, "backend": "nccl", "target_device": "cpu"}, "--target-device is cpu"),
        ({"target_ranks": 2, "split": "0,2"}, "not '0,2'"),
        ({"target_ranks": 3, "split": "1,2"}, "2 numbers for 3 ranks"),
        ({"target_ranks": 2, "backend": "mpi"}, "no backend 'mpi'"),
        ({"target_ranks": 2, "hosts": "x"}, "leave out --target-ranks"),
        ({"hosts": "/nowhere/hosts.json"}, "/nowhere/hosts.json"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    """With the flag that is wrong."""
    with pytest.raises(UsageError, match=words):
        rank_group(StackSettings(**change))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"ssh": "127.0.0.1"}], "fewer than two hosts"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "-oProxyCommand=evil"}], "cannot be used"),
        ([{"ssh": "127.0.0.1"}, {"ips": []}], "cannot be used"),
        ({"hosts": [{"ssh": "a"}, {"ssh": "b"}], "envs": ["nonsense"]}, "among its envs"),
        ("hosts", "cannot be used"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, content: object, words: str) -> None:
    """With its path; a name that ssh would take for an option is no name."""
    with pytest.raises(UsageError, match=words):
        rank_group(StackSettings(hosts=hosts_file(tmp_path, content)))


def test_rank_0_is_shown_its_gpu_from_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX counts the GPUs when it is imported, which is before the group is formed."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    group = rank_group(StackSettings(target_ranks=2, backend="nccl"))
    told = VerifierSettings(lifeline=0, address="", ranks=group)
    assert environment_for(told)["CUDA_VISIBLE_DEVICES"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in environment_for(VerifierSettings(lifeline=0, address=""))


def test_a_pass_is_launched_as_a_whole_where_it_waits_for_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the user's own environment says about graphs counts."""
    monkeypatch.delenv("MLX_MAX_MB_PER_BUFFER", raising=False)
    plain = VerifierSettings(lifeline=0, address="")
    assert "MLX_MAX_MB_PER_BUFFER" not in environment_for(plain)
    waits = VerifierSettings(lifeline=0, address="", prelaunches=True)
    told = environment_for(waits)
    assert int(told["MLX_MAX_OPS_PER_BUFFER"]) >= 10_000  # in a pass of the largest models
    assert int(told["MLX_MAX_MB_PER_BUFFER"]) >= 1_000_000
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "7")
    assert environment_for(waits)["MLX_MAX_MB_PER_BUFFER"] == "7"
