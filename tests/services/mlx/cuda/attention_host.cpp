// Runs services/mlx/cuda/attention.cuh on the host: a thread for each thread of a block. Test only.
//
// stdin:  heads, kv heads, queries, keys, then q, k, v, mask as numbers
// stdout: out [queries, heads, D]
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

constexpr int D = SIZE, WARPS = 2, THREADS = WARPS * 32;

#define __device__
#define __shared__ static
#define __int_as_float(bits) (-INFINITY)
#define __expf expf

struct Index { int x; };
thread_local Index threadIdx;
std::unique_ptr<std::barrier<>> block, warps[WARPS];
float exchanged[THREADS];

void __syncthreads() { block->arrive_and_wait(); }

float __shfl_xor_sync(unsigned, float value, int lane) {
  auto& warp = *warps[threadIdx.x / 32];
  exchanged[threadIdx.x] = value;
  warp.arrive_and_wait();
  const float other = exchanged[threadIdx.x ^ lane];
  warp.arrive_and_wait();
  return other;
}

#include "common.cuh"
#include "attention.cuh"

void run(int heads, int group, int queries, int keys, const std::vector<float>& q,
         const std::vector<float>& k, const std::vector<float>& v, const bool* mask,
         std::vector<float>& out) {
  for (int head = 0; head < heads; head++)
    for (int row = 0; row < queries; row++) {
      std::vector<std::thread> threads;
      for (int t = 0; t < THREADS; t++)
        threads.emplace_back([=, &q, &k, &v, &out] {
          threadIdx.x = t;
          attend_one<float, D, WARPS>(
              &q[(head * queries + row) * D], 1, &k[head / group * keys * D], D,
              &v[head / group * keys * D], D, mask + row * keys, 1, keys, 1.0f / sqrtf(D), &out[(row * heads + head) * D]);
        });
      for (auto& thread : threads) thread.join();
    }
}

std::vector<float> numbers(size_t count) {
  std::vector<float> found(count);
  for (auto& number : found)
    if (scanf("%f", &number) != 1) exit(1);
  return found;
}

int main() {
  int heads, kv, queries, keys;
  if (scanf("%d%d%d%d", &heads, &kv, &queries, &keys) != 4) return 1;
  block = std::make_unique<std::barrier<>>(THREADS);
  for (auto& warp : warps) warp = std::make_unique<std::barrier<>>(32);
  const auto q = numbers(heads * queries * D), k = numbers(kv * keys * D), v = numbers(k.size());
  const auto seen = numbers(queries * keys);
  auto mask = std::make_unique<bool[]>(seen.size());
  for (size_t i = 0; i < seen.size(); i++) mask[i] = seen[i] != 0;
  std::vector<float> out(q.size());
  run(heads, heads / kv, queries, keys, q, k, v, mask.get(), out);
  for (float number : out) printf("%.9g\n", number);
}
