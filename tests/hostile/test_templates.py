"""A model whose chat template hangs on some prompts: those are refused, the others answered."""

import json
from collections.abc import Iterator

import pytest

from launch.settings.settings import StackSettings
from protocol.errors import UsageError
from tests.hostile.bystanders import Bystanders
from tests.support.stack import RunningStack, running
from tests.support.tiny_models import CHAT_TEMPLATE, write_tiny_model

pytestmark = pytest.mark.processes

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0]['content'] == 'hang' %}" + ENDLESS + "{% endif %}" + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_model(folder / "target", "llama", seed=1)
    draft = write_tiny_model(folder / "draft", "llama", seed=2)
    config = target / "tokenizer_config.json"
    entries = json.loads(config.read_text()) | {"chat_template": TEMPLATE}
    config.write_text(json.dumps(entries))
    settings = StackSettings(model=str(target), draft_model=str(draft), prompt_timeout_s=6.0)
    with running(settings) as started:
        yield started


def test_a_template_that_hangs_hurts_nobody(stack: RunningStack) -> None:
    """Each such prompt is refused with the limit; the orchestrator lives, and others go on."""
    orchestrator = stack.client.status().pid
    with Bystanders(stack.supervisor.run_dir.clients_address) as bystanders:
        bystanders.await_answers(2)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"within 6 s \(prompt_timeout_s\)"):
                stack.answer("hang")
        bystanders.await_answers(4)
        tally = bystanders.reset()
    assert (tally.failed, tally.changed) == ([], [])
    assert stack.client.status().pid == orchestrator
