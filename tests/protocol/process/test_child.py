"""How a child process reports what ended it."""

import pytest

from protocol.process.child import run_reporting_errors
from protocol.version import describe_missing


@pytest.mark.parametrize(
    ("library", "code", "words"),
    [
        ("coremltools.proto", 2, "pip install 'ssd-decode[coreml]'"),
        ("matplotlib", 2, "pip install 'ssd-decode[report]'"),
        ("no_such_library", 4, "No module named 'no_such_library'"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    library: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which extra to install, in the last line, with the exit code of a usage error."""

    def body() -> None:
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    assert run_reporting_errors("test", body) == code
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert bool(describe_missing(library)) == (code == 2)
