"""`python -m tests.tools.audit`: known holes in the dependencies, if pip-audit is there.

Exit code 1 if there are any; 0 if there are none, or if nobody can be asked from here, which
is then said.
"""

import importlib.util
import json
import subprocess
import sys

_SECONDS = 120


def say(line: str) -> None:
    """To the log of whoever runs this."""
    sys.stdout.write(line + "\n")


def main() -> int:
    """Ask pip-audit about this environment."""
    if importlib.util.find_spec("pip_audit") is None:
        say("not checked: pip-audit is not installed (pip install pip-audit)")
        return 0
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--local",
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        say("not checked: the list of known holes cannot be reached from here")
        return 0
    asked = [package for package in found["dependencies"] if "skip_reason" not in package]
    skipped = len(found["dependencies"]) - len(asked)
    holes = [(p["name"], p["version"], v["id"]) for p in asked for v in p.get("vulns", [])]
    for name, version, hole in holes:
        say(f"{name} {version}: {hole}")
    if not asked:
        say("not checked: the list of known holes cannot be reached from here")
    else:
        say(f"{len(asked)} packages checked, {skipped} not (unknown to it), {len(holes)} holes")
    return int(bool(holes))


if __name__ == "__main__":
    sys.exit(main())
