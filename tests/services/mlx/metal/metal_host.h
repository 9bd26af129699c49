// Enough of Metal to run a kernel of services/mlx/metal on the host. Test only.
//
// Each thread of a threadgroup is a fiber; they take turns. A fiber that exchanges something
// with its simdgroup puts it down and gives way once: when its turn comes again, all others
// have put theirs down.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace host {

constexpr int LANES = 32, STACK = 256 * 1024;

struct Exchange {
  float values[LANES][4];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  int index;
  int exchanges = 0;
  bool is_done = false;
};

inline std::vector<Fiber> fibers;
inline std::vector<Exchange> boxes;  // two for each simdgroup, in turn
inline Fiber* current;
inline std::function<void(int)> body;
inline int arrived;

inline void give_way() {
  Fiber* const from = current;
  do {
    current = &fibers[(current->index + 1) % fibers.size()];
    if (current == from) return;
  } while (current->is_done);
  swapcontext(&from->context, &current->context);
}

// What all lanes of this simdgroup have put down.
inline const Exchange& exchange(const float (&own)[4]) {
  const int simd = current->index / LANES, lane = current->index % LANES;
  Exchange& box = boxes[2 * simd + current->exchanges++ % 2];
  std::memcpy(box.values[lane], own, sizeof own);
  give_way();
  return box;
}

inline ucontext_t finished;

inline void start() {
  body(current->index);
  Fiber* const from = current;
  from->is_done = true;
  give_way();
  if (current == from) setcontext(&finished);
}

// Runs `function(thread)` for every thread of one threadgroup.
inline void run_threadgroup(int threads, const std::function<void(int)>& function) {
  body = function;
  arrived = 0;
  fibers = std::vector<Fiber>(threads);
  boxes.assign(2 * (threads / LANES), {});
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.index = i;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, start, 0);
  }
  current = &fibers[0];
  swapcontext(&finished, &current->context);
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
inline void threadgroup_barrier(mem_flags) {
  const int size = int(host::fibers.size()), round = host::arrived++ / size;
  while (host::arrived < (round + 1) * size) host::give_way();
}

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
