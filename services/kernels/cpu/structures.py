"""The structures of `c/decoder.h`, `c/layout.h` and `c/source.h`."""

import ctypes

BITS4, BITS8, HALF, BFLOAT, FLOAT, SHARED = range(6)  # `enum number`


class MatrixStruct(ctypes.Structure):
    """`struct matrix`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("strips", "bias")),
        *((name, ctypes.c_int) for name in ("outputs", "inputs", "weights", "scales", "group")),
    )


class SourceStruct(ctypes.Structure):
    """`struct source`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "biases")),
        *((name, ctypes.c_int) for name in ("bits", "group", "numbers")),
    )


class NormStruct(ctypes.Structure):
    """`struct norm`."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


NORMS = ("before", "q_norm", "k_norm", "attended", "after", "fed")
PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


class BlockStruct(ctypes.Structure):
    """`struct block`."""

    _fields_ = (
        *((name, NormStruct) for name in NORMS),
        *((name, MatrixStruct) for name in PRODUCTS),
        *((name, ctypes.c_int) for name in ("rotation", "window")),
    )


class DecoderStruct(ctypes.Structure):
    """`struct decoder`."""

    _fields_ = (
        ("blocks", ctypes.POINTER(BlockStruct)),
        *(
            (name, ctypes.c_int)
            for name in ("count", "heads", "kv_heads", "size", "rotated", "rounds", "gelu")
        ),
        *(
            (name, ctypes.c_float)
            for name in ("scale", "score_cap", "logit_cap", "embedding_scale")
        ),
        ("embedding", MatrixStruct),
        ("norm", NormStruct),
        ("head", MatrixStruct),
    )


class SequenceStruct(ctypes.Structure):
    """`struct sequence`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("number", ctypes.c_int),
        ("visible", ctypes.c_void_p * 2),
        ("head", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("start", "rows")),
    )


class PassStruct(ctypes.Structure):
    """`struct pass`."""

    _fields_ = (
        ("rows", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions")),
        *((name, ctypes.c_void_p * 2) for name in ("cos", "sin")),
        ("parts", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("sequences", "logits")),
        ("taps", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("tapped", "tap")),
    )
