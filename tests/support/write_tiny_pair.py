"""`python -m tests.support.write_tiny_pair FOLDER`: a tiny random pair, for `make chaos`."""

import sys
from pathlib import Path

from tests.support.tiny_models import write_tiny_model

for name, noise in (("target", 0.0), ("draft", 0.3)):
    write_tiny_model(Path(sys.argv[1]) / name, "llama", seed=1, noise=noise)
