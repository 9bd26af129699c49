"""`python -m tests.write_tiny_pair FOLDER`: a tiny random target and drafter, for `ssd chaos`."""

import sys
from pathlib import Path

from tests.tiny_models import write_tiny_model

for name, noise in (("target", 0.0), ("draft", 0.3)):
    write_tiny_model(Path(sys.argv[1]) / name, "llama", seed=1, noise=noise)
