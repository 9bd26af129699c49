// Runs services/kernels/cuda/sampling/best.cuh on the host. Test only.
//
// stdin:  head, step, then head * step numbers, of which the first of each step are the row
// stdout: columns, values, logarithm of the sum
constexpr int WARPS = 2;
#include "../cuda_host.h"

#include "common.cuh"
#include "sampling/best.cuh"

int main() {
  const auto sizes = numbers(2);
  const int head = int(sizes[0]), step = int(sizes[1]);
  const auto row = numbers(size_t(head) * step);
  std::vector<float> out(2 * BEST_WIDTH + 1);
  run_block([&] { find_best<BEST_WIDTH, WARPS>(Row<float>{row.data(), step}, head, out.data()); });
  print(out);
}
