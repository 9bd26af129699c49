"""mlx-lm in the benchmark: it drafts with MLX models only, and never decodes under a wrong name."""

import pytest

from launch.bench.variant import NAMES, default_modes, parse_all, require_draft_model
from launch.models.pair import Pair
from launch.workers.reference import ReferenceWorker
from protocol.errors import UsageError
from protocol.jobs.reference import DecodeRequest
from protocol.messages import Sampling
from tests.launch.test_cli import USAGE, complains, ssd
from tests.support.converted import converted_folder, source_folder


@pytest.mark.parametrize("backend", ["coreml", "ngram", "stdio"])
def test_mlx_lm_drafts_with_mlx_models_only(backend: str) -> None:
    """With another drafter it would decode plainly under a wrong name: refused, or left out."""
    with pytest.raises(UsageError, match=f"'mlx-lm-draft:k=5' .* {backend!r}"):
        require_draft_model(parse_all("ar,mlx-lm,mlx-lm-draft:k=5"), backend)
    require_draft_model(parse_all("ar,mlx-lm,ssd"), backend)
    require_draft_model(parse_all(default_modes(backend)), backend)
    require_draft_model(parse_all(default_modes("mlx")), "mlx")
    assert default_modes("mlx") == ",".join(NAMES)
    assert set(NAMES) - set(default_modes(backend).split(",")) == {"mlx-lm-draft"}


@pytest.mark.processes
def test_the_bench_refuses_it_before_anything_starts() -> None:
    """A converted drafter named on the command line."""
    folders = (
        "--model",
        str(source_folder("llama")),
        "--draft-model",
        str(converted_folder("llama")),
    )
    done = ssd("bench", *folders, "--modes", "ar,mlx-lm-draft")
    complains(done, USAGE, "mlx-lm-draft", "coreml")


@pytest.mark.processes
def test_the_reference_refuses_to_draft_without_a_model() -> None:
    """It never decodes plainly in place of what was asked."""
    pair = Pair(model=str(source_folder("llama")), draft_model="", backend="ngram")
    with ReferenceWorker(pair) as reference, pytest.raises(UsageError, match="no draft model"):
        reference.decode(DecodeRequest(
            tokens=[1, 2], max_tokens=3, stop_ids=[], sampling=Sampling(), num_draft_tokens=2,
        ))  # fmt: skip
