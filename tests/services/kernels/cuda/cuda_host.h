// What kernels for CUDA take from the device, on the host: a fiber for each of their threads. Test only.
// WARPS of a block is defined before.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "../fibers.h"

constexpr int LANES = 32, THREADS = WARPS * LANES;

#define __device__
#define __shared__ static thread_local
#define __int_as_float(bits) std::bit_cast<float>(unsigned(bits))
#define __expf expf
using std::max;
using std::min;

#ifndef __GLIBC__  // which has it
void sincosf(float angle, float* sine, float* cosine) {
  *sine = std::sin(angle);
  *cosine = std::cos(angle);
}
#endif
float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

struct Index {
  struct X {
    operator int() const { return host::current->index; }
  } x;
} threadIdx;

void __syncthreads() { host::all.wait(); }

template <typename T>
T exchange(T value, int from) {
  static thread_local T exchanged[2][THREADS];
  auto& place = exchanged[host::exchange_place()];
  place[threadIdx.x] = value;
  host::await_lanes();
  return place[from];
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane) {
  return exchange(value, threadIdx.x ^ lane);
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return exchange(value, threadIdx.x / LANES * LANES + lane);
}

bool __any_sync(unsigned all, bool value) {
  for (int lane = 1; lane < LANES; lane *= 2) value |= __shfl_xor_sync(all, value, lane);
  return value;
}

unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
int __clz(int value) { return std::countl_zero(unsigned(value)); }
void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
void __threadfence_system() { __threadfence(); }
void __nanosleep(unsigned) { std::this_thread::yield(); }
template <typename T>
T atomicAdd(T* to, T value) {
  return std::atomic_ref<T>(*to).fetch_add(value);
}

// Once by every thread of a block.
void run_block(const std::function<void()>& kernel) {
  host::run_block(THREADS, [&kernel](int) { kernel(); });
}

std::vector<float> numbers(size_t count) {
  std::vector<float> found(count);
  for (auto& number : found)
    if (scanf("%f", &number) != 1) exit(1);
  return found;
}

// Words of 32 bits, whose lower and upper halves are numbers of their own.
std::vector<unsigned> words_of(const std::vector<float>& halves) {
  std::vector<unsigned> found;
  for (size_t i = 0; i < halves.size(); i += 2)
    found.push_back(unsigned(halves[i]) | unsigned(halves[i + 1]) << 16);
  return found;
}

void print(const std::vector<float>& out) {
  for (float number : out) printf("%.9g\n", number);
}
