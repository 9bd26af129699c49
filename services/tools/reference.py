"""`python -m services.tools.reference SETTINGS`: mlx-lm itself, as the reference of `ssd bench`.

It uses the same weights, dtype and BLAS as our services, all cores, one process. It reads and
writes JSON lines on stdin and stdout, one answer per request (`protocol.jobs.reference`).
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from protocol.decoding.sampler import score_margin
from protocol.errors import SsdError, UsageError
from protocol.jobs.reference import (
    BatchDecodeRequest,
    BatchDecodeResult,
    DecodeRequest,
    DecodeResult,
    MarginRequest,
    MarginResult,
    ReferenceRequest,
    ReferenceSettings,
)
from protocol.messages import Tokens
from protocol.settings import decode_settings
from services.kernels.cpu.library import load_blas


class Reference:
    """The target and the draft model under mlx-lm's own generation loop."""

    def __init__(self, settings: ReferenceSettings) -> None:
        # MLX must be imported after the BLAS is in place.
        from services.mlx.device import bind  # noqa: PLC0415
        from services.mlx.loader import load  # noqa: PLC0415

        bind(settings.device)
        self._target = load(Path(settings.model), adapter=settings.adapter).module
        self._draft = load(Path(settings.draft_model)).module if settings.draft_model else None

    def answer(self, question: ReferenceRequest) -> DecodeResult | BatchDecodeResult | MarginResult:
        """Answer a request."""
        match question:
            case DecodeRequest():
                return self.decode(question)
            case BatchDecodeRequest():
                return self.decode_many(question)
            case MarginRequest():
                return self.margin(question)

    def decode(self, question: DecodeRequest) -> DecodeResult:
        """Decode with mlx-lm, with or without its draft model."""
        import mlx.core as mx  # noqa: PLC0415
        from mlx_lm.generate import generate_step, speculative_generate_step  # noqa: PLC0415
        from mlx_lm.sample_utils import make_sampler  # noqa: PLC0415

        if question.num_draft_tokens and self._draft is None:
            raise UsageError("mlx-lm was asked to draft, and was given no draft model")
        prompt: Any = mx.array(question.tokens)
        s = question.sampling
        mx.random.seed(s.seed)
        sampler = make_sampler(s.temperature, s.top_p, s.min_p, top_k=s.top_k)
        started = time.perf_counter()
        steps: Any
        draft: Any = self._draft
        if question.num_draft_tokens:
            steps = speculative_generate_step(
                prompt,
                self._target,
                draft,
                num_draft_tokens=question.num_draft_tokens,
                max_tokens=question.max_tokens,
                sampler=sampler,
            )
        else:
            steps = generate_step(
                prompt, self._target, max_tokens=question.max_tokens, sampler=sampler
            )
        times, tokens = [], []
        for step in steps:
            token = int(step[0])
            times.append(time.perf_counter())
            if token in question.stop_ids:
                break
            tokens.append(token)
        return DecodeResult(tokens, 1e3 * (times[0] - started), times[-1] - times[0])

    def decode_many(self, question: BatchDecodeRequest) -> BatchDecodeResult:
        """Decode greedily with mlx-lm's batch generator, without a draft model."""
        from mlx_lm.generate import BatchGenerator  # noqa: PLC0415

        started = time.perf_counter()
        generator: Any = BatchGenerator(
            self._target,
            stop_tokens=[[token] for token in question.stop_ids],
            completion_batch_size=question.streams,
            prefill_batch_size=question.streams,
        )
        numbers = generator.insert(question.prompts, [question.max_tokens] * len(question.prompts))
        tokens: dict[int, Tokens] = {number: [] for number in numbers}
        first: dict[int, float] = {}
        while responses := generator.next_generated():
            for response in responses:
                first.setdefault(response.uid, 1e3 * (time.perf_counter() - started))
                if response.finish_reason != "stop":
                    tokens[response.uid].append(int(response.token))
        seconds = time.perf_counter() - started
        generator.close()
        return BatchDecodeResult(list(tokens.values()), [first[n] for n in numbers], seconds)

    def margin(self, question: MarginRequest) -> MarginResult:
        """Return the distance in logits between two candidates for the next token."""
        import mlx.core as mx  # noqa: PLC0415

        logits: Any = self._target(mx.array(question.tokens)[None])[0, -1]
        row = np.array(logits.astype(mx.float32))
        gap = score_margin(row, len(question.tokens), question.sampling, question.candidates)
        largest = float(np.abs(row[list(question.candidates)]).max())
        return MarginResult(gap, _spacing(largest, mx.finfo(logits.dtype).eps))


def _spacing(size: float, eps: float) -> float:
    """Return the distance to the next float at this size, in a format with relative step `eps`."""
    return eps * 2.0 ** math.floor(math.log2(size)) if size > 0.0 else 0.0


def main() -> int:
    """Answer requests until standard input ends."""
    try:
        settings = decode_settings(sys.argv[1], ReferenceSettings)
        load_blas(settings.threads)
        reference = Reference(settings)
        for line in sys.stdin:
            question = msgspec.json.decode(line, type=ReferenceRequest)
            answer = reference.answer(question)
            sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
            sys.stdout.flush()
    except SsdError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
