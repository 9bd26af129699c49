"""mlx-lm's own generation over the ranks of `mx.distributed`, as a yardstick for `--target-ranks`.

`mlx.launch -n 2 -- python docs/lab/sharded_reference.py --model FOLDER --prompts FILE`: rank 0
prints a JSON line per prompt, with tokens and tokens per second of its decoding. The backend is
the launcher's; two ranks of one machine over NCCL without it:

    export NCCL_HOST_IP=127.0.0.1 NCCL_PORT=12345 MLX_WORLD_SIZE=2
    CUDA_VISIBLE_DEVICES=1 MLX_RANK=1 python docs/lab/sharded_reference.py ... &
    CUDA_VISIBLE_DEVICES=0 MLX_RANK=0 python docs/lab/sharded_reference.py ...

The model is loaded as `mlx_lm.utils.sharded_load` does, but for its last line: that waits for the
other ranks on the CPU's stream, which NCCL does not have.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.utils import load_model, load_tokenizer


def main() -> None:
    """Answer every prompt twice; the first answer warms the kernels and is not shown."""
    parser = argparse.ArgumentParser(description="mlx-lm over several ranks.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--max-tokens", type=int, default=96)
    given = parser.parse_args()
    group = mx.distributed.init()
    loaded: Any = load_model(Path(given.model), lazy=True)
    model: Any = loaded[0]
    tokenizer = load_tokenizer(Path(given.model))
    if mx.default_device() == mx.cpu:  # where half precision is slow
        model.set_dtype(mx.float32)
    if group.size() > 1:
        model.shard(group)
    mx.eval(model.parameters())
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))
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
