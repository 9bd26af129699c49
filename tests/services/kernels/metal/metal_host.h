// Enough of Metal to run a kernel of services/kernels/metal on the host. Test only.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../fibers.h"

namespace host {

struct Exchange {
  float values[LANES][4];
};

// What all lanes of this simdgroup have put down.
inline const Exchange& exchange(const float (&own)[4]) {
  static std::vector<Exchange> boxes[2];
  auto& place = boxes[exchange_place()];
  place.resize(std::max(place.size(), simds.size()));
  Exchange& box = place[current->index / LANES];
  std::memcpy(box.values[current->index % LANES], own, sizeof own);
  await_lanes();
  return box;
}

struct Bfloat {
  uint16_t bits;
  Bfloat() = default;
  explicit Bfloat(float value) {
    uint32_t all;
    std::memcpy(&all, &value, 4);
    const bool is_nan = std::isnan(value);
    bits = is_nan ? 0x7fc0 : uint16_t((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t all = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &all, 4);
    return value;
  }
};

}  // namespace host

using uint = unsigned;
using float16_t = _Float16;
using bfloat16_t = host::Bfloat;
struct uint3 {
  uint x, y, z;
};

#define device
#define thread
#define constant
#define threadgroup

using std::exp, std::fma;
inline int min(int a, int b) { return a < b ? a : b; }
inline float max(float a, float b) { return std::fmax(a, b); }

enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { host::all.wait(); }

inline float simd_shuffle_xor(float value, int mask) {
  const int lane = host::current->index % host::LANES;
  return host::exchange({value, 0, 0, 0}).values[lane ^ mask][0];
}

// Lane holds (row, column) and (row, column + 1): written out from Apple's layout by itself, so
// that a mistake in the kernels' arithmetic of places shows.
struct simdgroup_float8x8 {
  float elements[2];
  float* thread_elements() { return elements; }
};

constexpr int LANE_OF[8][4] = {{0, 1, 8, 9},     {2, 3, 10, 11},   {4, 5, 12, 13},
                               {6, 7, 14, 15},   {16, 17, 24, 25}, {18, 19, 26, 27},
                               {20, 21, 28, 29}, {22, 23, 30, 31}};

inline int lane_of(int row, int column) { return LANE_OF[row][column / 2]; }

inline int place_of_lane(int lane) {
  for (int i = 0; i < 32; i++)
    if (LANE_OF[i / 4][i % 4] == lane) return i;
  return 0;
}
inline int row_of(int lane) { return place_of_lane(lane) / 4; }
inline int column_of(int lane) { return place_of_lane(lane) % 4 * 2; }

inline void simdgroup_multiply_accumulate(
    simdgroup_float8x8& d, simdgroup_float8x8 a, simdgroup_float8x8 b, simdgroup_float8x8 c) {
  const auto& box = host::exchange({a.elements[0], a.elements[1], b.elements[0], b.elements[1]});
  const int lane = host::current->index % host::LANES;
  const int row = row_of(lane), column = column_of(lane);
  for (int p = 0; p < 2; p++) {
    float sum = c.elements[p];
    for (int j = 0; j < 8; j++)
      sum = std::fma(box.values[lane_of(row, j)][j % 2],
                     box.values[lane_of(j, column)][2 + p], sum);
    d.elements[p] = sum;
  }
}
