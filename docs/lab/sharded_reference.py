"""mlx-lm's own generation over the ranks of `mx.distributed`, as a yardstick for `--target-ranks`.

`mlx.launch -n 2 docs/lab/sharded_reference.py --model FOLDER --prompts FILE`: the first rank
prints a JSON line per prompt, with tokens and tokens per second of its decoding. The backend is
the launcher's.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.utils import sharded_load


def main() -> None:
    """Answer every prompt twice; the first answer warms the kernels and is not shown."""
    parser = argparse.ArgumentParser(description="mlx-lm over several ranks.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--max-tokens", type=int, default=96)
    given = parser.parse_args()
    group = mx.distributed.init(strict=True)
    loaded: Any = sharded_load(given.model, None, group)
    model, tokenizer = loaded[:2]
    lines = Path(given.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    for place, entry in enumerate([prompts[0], *prompts]):
        text = "<|im_start|>user\n" + entry["prompt"] + "<|im_end|>\n<|im_start|>assistant\n"
        *_, last = stream_generate(model, tokenizer, text, max_tokens=given.max_tokens)
        if group.rank() == 0 and place:
            row = {
                "id": entry["id"],
                "ranks": group.size(),
                "tokens": last.generation_tokens,
                "tokens_per_s": last.generation_tps,
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
