"""`python -m services.gguf.describe FILE...`: what the heads of GGUF files say, a line each."""

import sys
from pathlib import Path

import msgspec
from gguf import LlamaFileType

from protocol.decoding.vocabulary import fingerprint_of
from protocol.errors import ModelError
from protocol.jobs.gguf import GGUFDescription
from services.gguf.architectures import config_of, family_of
from services.gguf.file import GGUFFile
from services.gguf.tokenizer import tokens_of, vocabulary_of


def describe(path: Path) -> GGUFDescription:
    """Read the head of one file; what is wrong with it becomes its problem."""
    try:
        file = GGUFFile(path)
        config = config_of(file, family_of(file))
        vocabulary = vocabulary_of(tokens_of(file))
    except ModelError as error:
        return GGUFDescription(path=str(path), problem=str(error))
    size = config["num_key_value_heads"] * config["head_dim"]
    identity = fingerprint_of(vocabulary)
    return GGUFDescription(
        path=str(path),
        architecture=config["model_type"],
        parameters=file.parameters,
        quantization=_type_of(file),
        context_length=config["max_position_embeddings"],
        weight_bytes=sum(int(tensor.n_bytes) for tensor in file.tensors),
        kv_bytes_per_token=2 * 2 * config["num_hidden_layers"] * size,
        vocabulary=identity.fingerprint,
        vocabulary_size=identity.size,
    )


def _type_of(file: GGUFFile) -> str:
    """Its type in llama.cpp's words, such as Q4_K_M."""
    number = file.value("general.file_type")
    try:
        return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""


def main() -> int:
    """The command line of this module."""
    for name in sys.argv[1:]:
        sys.stdout.buffer.write(msgspec.json.encode(describe(Path(name))) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
