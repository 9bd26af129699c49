"""A chat template is a program of strangers: its time, memory and numbers are bounded."""

import resource
import signal
import sys

import pytest
from jinja2.exceptions import SecurityError

from protocol.decoding.chat_template import OutOfBounds, compile_template, limit_work

MB = 1 << 20
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(t='x') %}"
    "{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}"
)


def test_a_loop_is_interrupted() -> None:
    """Wherever it is; what was set for it is gone afterwards."""
    before = signal.getsignal(signal.SIGPROF), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(OutOfBounds), limit_work(0.1, 512 * MB):
        compile_template(ENDLESS).render()
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert (signal.getsignal(signal.SIGPROF), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert compile_template("{{ 1 + 1 }}").render() == "2"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux alone")
def test_a_text_that_doubles_ends() -> None:
    """Before the machine's memory does."""
    with pytest.raises(MemoryError), limit_work(30.0, 64 * MB):
        compile_template(DOUBLING).render()


@pytest.mark.parametrize(
    "source",
    ["{{ 'x' * 10 ** 10 }}", "{{ 10 ** (10 ** 8) }}", "{{ 10 ** n }}", "{{ [0] * n }}",
     "{{ n * p }}", "{{ 'x' * n }}", "{{ n * 'x' }}"],
)  # fmt: skip
def test_one_operation_cannot_take_for_ever(source: str) -> None:
    """Powers and products are bounded by their size; also when the template is compiled."""
    template = compile_template(source)
    with pytest.raises(SecurityError, match="too large"):
        template.render(n=10**9, p=10**2000)


def test_usual_sums_are_as_ever() -> None:
    """Templates indent, count and repeat."""
    source = "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 3 * 1.5 }}{{ [1] * 2 }}{{ {'a': 1} | tojson }}"
    assert compile_template(source).render() == '---10244.5[1, 1]{"a": 1}'
