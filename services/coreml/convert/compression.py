"""Compress weights before they enter a program: int8, or palettes by groups of output rows.

coremltools' own passes refuse programs of several functions, and its default 4-bit palette, one for
a whole matrix, ruins a small model; so the compressed constants are made here and given to the
builder, where any number of functions share them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import Floats
from protocol.jobs.convert import Compression

_BITS: dict[str, int] = {"palette8": 8, "palette6": 6, "palette4": 4}

GROUP = 16
"""Output rows that share a palette."""


class Packed(NamedTuple):
    """One weight matrix [rows, columns] as it is stored."""

    bits: int
    """16: `data` is the matrix itself; 8 with an empty palette: int8 with a scale per row."""
    data: npt.NDArray[np.generic]
    """[rows, columns] float16, int8, or uint8 indices into the palette of the row's group."""
    palettes: npt.NDArray[np.float16]
    """[groups, 2**bits]; no rows if there are none."""
    scales: npt.NDArray[np.float16]
    """[rows] factor of each row; empty if there is none."""

    def dense(self) -> Floats:
        """Return the matrix it represents, float32."""
        matrix: Floats
        if self.palettes.size:
            group = len(self.data) // len(self.palettes)
            groups = np.arange(len(self.data))[:, None] // group
            matrix = self.palettes.astype(np.float32)[groups, self.data.astype(np.int64)]
        else:
            matrix = self.data.astype(np.float32)
        return matrix * self.scales.astype(np.float32)[:, None] if self.scales.size else matrix

    def rows(self, part: slice) -> "Packed":
        """Return some of the rows; a palettised matrix is cut between groups."""
        group = len(self.data) // len(self.palettes) if self.palettes.size else 1
        palettes = self.palettes[part.start // group : -(-part.stop // group)]
        return Packed(self.bits, self.data[part], palettes, self.scales[part])


Doubles = npt.NDArray[np.float64]

_BINS = 64
_ROUNDS = 100
"""Most iterations of k-means; it converges after about twenty."""

_SMALLEST_SCALE = 2.0**-14
"""float16's smallest normal number; devices may flush smaller ones to 0."""

_NONE = np.zeros(0, np.float16)


def pack(matrix: Floats, compression: Compression) -> Packed:
    """Compress one matrix."""
    if compression == "none":
        return Packed(16, matrix.astype(np.float16), _NONE[:, None], _NONE)
    scales = np.maximum(np.abs(matrix).max(axis=1), _SMALLEST_SCALE)
    if compression == "int8":
        scales = np.maximum(scales / 127, _SMALLEST_SCALE).astype(np.float16)
        levels = np.clip(np.rint(matrix / scales.astype(np.float32)[:, None]), -127, 127)
        return Packed(8, levels.astype(np.int8), _NONE[:, None], scales)
    scales = scales.astype(np.float16)
    return _palettise(matrix / scales.astype(np.float32)[:, None], scales, _BITS[compression])


def _palettise(matrix: Floats, scales: npt.NDArray[np.float16], bits: int) -> Packed:
    """Run k-means per group of rows; an error is weighted by its row's scale."""
    group = GROUP if len(matrix) % GROUP == 0 else len(matrix)
    indices = np.empty(matrix.shape, np.uint8)
    palettes = np.zeros((len(matrix) // group, 2**bits), np.float16)
    weights = scales.astype(np.float64) ** 2
    for number in range(len(palettes)):
        rows = slice(number * group, (number + 1) * group)
        # Rounded, values recur: fewer points to cluster.
        values, inverse = np.unique(matrix[rows].astype(np.float16), return_inverse=True)
        of_points = np.broadcast_to(weights[rows, None], matrix[rows].shape).ravel()
        mass = np.bincount(inverse.ravel(), of_points, len(values)).astype(np.float64)
        points = values.astype(np.float64)
        palette = _centres(points, mass, 2**bits).astype(np.float16)
        nearest = np.searchsorted(_borders(palette.astype(np.float64)), points)
        palettes[number, : len(palette)] = palette
        indices[rows] = nearest.astype(np.uint8)[inverse.ravel()].reshape(matrix[rows].shape)
    return Packed(bits, indices, palettes, scales)


def _centres(points: Doubles, mass: Doubles, count: int) -> Doubles:
    """Run weighted k-means on ascending points; return at most `count` ascending centres.

    Lloyd's iteration with running sums, initialised by Bennett's law of quantisation: as densely as
    the cube root of the mass. Its squared error is within a tenth of the minimum on random weights,
    for a hundredth of the time of the exact algorithm.
    """
    if len(points) <= count:
        return points
    total = np.concatenate([[0.0], np.cumsum(mass)])
    moment = np.concatenate([[0.0], np.cumsum(mass * points)])
    density, edges = np.histogram(points, _BINS, weights=mass)
    share = np.concatenate([[0.0], np.cumsum(np.cbrt(density))])
    centres: Doubles = np.interp((np.arange(count) + 0.5) / count, share / share[-1], edges)
    for _ in range(_ROUNDS):
        cuts = np.concatenate([[0], np.searchsorted(points, _borders(centres)), [len(points)]])
        masses, moments = np.diff(total[cuts]), np.diff(moment[cuts])
        # A centre without points stays where it is.
        moved = np.where(masses > 0, moments / np.maximum(masses, 1e-300), centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres


def _borders(centres: Doubles) -> Doubles:
    """Return the midpoint between each two neighbours."""
    borders: Doubles = (centres[1:] + centres[:-1]) / 2
    return borders
