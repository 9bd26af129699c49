// What the kernels share: which elements of an 8x8 matrix a lane holds, and sums over rows.
//
// Written for Metal; tests/services/kernels/metal/metal_host.h lets the same text run as C++.

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
#endif

#define UNROLL _Pragma("clang loop unroll(full)")

// A lane holds the elements (row, column) and (row, column + 1); MLX relies on the same.
struct Place {
  int row;
  int column;
};

inline Place place_of(uint lane) {
  return Place{int(lane / 16 * 4 + lane / 2 % 4), int(lane / 8 % 2 * 4 + lane % 2 * 2)};
}

// Over the eight lanes that hold the same columns, in one order.
inline float sum_over_rows(float value) {
  value += simd_shuffle_xor(value, 2);
  value += simd_shuffle_xor(value, 4);
  value += simd_shuffle_xor(value, 16);
  return value;
}

inline float max_over_rows(float value) {
  value = max(value, simd_shuffle_xor(value, 2));
  value = max(value, simd_shuffle_xor(value, 4));
  value = max(value, simd_shuffle_xor(value, 16));
  return value;
}

inline void fill(thread simdgroup_float8x8& matrix, float first, float second) {
  matrix.thread_elements()[0] = first;
  matrix.thread_elements()[1] = second;
}

// Read at once: neighbours in memory.
template <typename V, int COUNT>
struct alignas(sizeof(V) * COUNT < 16 ? sizeof(V) * COUNT : 16) Neighbours {
  V at[COUNT];
};
