"""`ssd launch` and `ssd serve`: how they end."""

from typing import Any

import pytest
from click.testing import CliRunner

from launch.commands import launch, serve
from launch.serving.model_server import ModelServer
from launch.signals import Terminated
from launch.stack.supervisor import Supervisor


def interrupt(kind: type[BaseException], ended: list[str]) -> dict[str, Any]:
    """Methods of a server that is interrupted at once."""

    def start(self: object) -> None:
        raise kind

    def stop(self: object) -> None:
        ended.append("stopped")

    return {"start": start, "stop": stop}


@pytest.mark.parametrize("several", [False, True], ids=["one model", "several models"])
def test_sigterm_is_the_ordinary_end_of_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, *, several: bool
) -> None:
    """It stops everything and exits with 0, as service managers expect; Ctrl-C is an abort."""
    models = tmp_path / "models.toml"
    models.write_text('[small]\nmodel = "default"\n', encoding="utf-8")
    for kind, code in ((Terminated, 0), (KeyboardInterrupt, 1)):
        ended: list[str] = []
        for name, method in interrupt(kind, ended).items():
            monkeypatch.setattr(Supervisor, name, method)
            monkeypatch.setattr(ModelServer, name, method)
        monkeypatch.setattr(launch, "pair_of", lambda _: None)
        monkeypatch.setattr(Supervisor, "__init__", lambda *_: None)
        monkeypatch.setattr(ModelServer, "__init__", lambda *_: None)
        arguments = ["--models", str(models)] if several else []
        assert CliRunner().invoke(serve.command, arguments).exit_code == code
        assert ended == ["stopped"]
