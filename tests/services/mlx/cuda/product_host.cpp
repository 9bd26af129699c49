// Runs services/mlx/cuda/product.cuh on the host: a thread for each lane of a warp. Test only.
//
// stdin:  rows, inputs, outputs, then x and w as numbers
// stdout: out [rows, outputs]
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

constexpr int LANES = 32;

#define __device__
using std::min;

struct Index { int x; };
thread_local Index threadIdx;
std::barrier<> warp(LANES);
float exchanged[LANES];

float __shfl_xor_sync(unsigned, float value, int lane) {
  exchanged[threadIdx.x] = value;
  warp.arrive_and_wait();
  const float other = exchanged[threadIdx.x ^ lane];
  warp.arrive_and_wait();
  return other;
}

#include "common.cuh"
#include "product.cuh"

std::vector<float> numbers(size_t count) {
  std::vector<float> found(count);
  for (auto& number : found)
    if (scanf("%f", &number) != 1) exit(1);
  return found;
}

int main() {
  int rows, inputs, outputs;
  if (scanf("%d%d%d", &rows, &inputs, &outputs) != 3) return 1;
  const auto x = numbers(size_t(rows) * inputs), w = numbers(size_t(outputs) * inputs);
  std::vector<float> out(size_t(rows) * outputs);
  std::vector<std::thread> threads;
  for (int lane = 0; lane < LANES; lane++)
    threads.emplace_back([&, lane] {
      threadIdx.x = lane;
      for (int row = 0; row < rows; row += WARP_ROWS)
        for (int first = 0; first < outputs + WARP_OUTPUTS; first += WARP_OUTPUTS)
          multiply_rows<float, WARP_ROWS, WARP_OUTPUTS, LANE_RUN>(
              x.data(), w.data(), rows, inputs, outputs, row, first, out.data());
    });
  for (auto& thread : threads) thread.join();
  for (float number : out) printf("%.9g\n", number);
}
