// Runs services/mlx/cuda/best.cuh on the host. Test only.
//
// stdin:  head, then the row as numbers
// stdout: columns, values, logarithm of the sum
constexpr int WARPS = 2;
#include "cuda_host.h"

#include "common.cuh"
#include "best.cuh"

int main() {
  const int head = int(numbers(1)[0]);
  const auto row = numbers(head);
  std::vector<float> out(2 * BEST_WIDTH + 1);
  run_block([&] { find_best<float, BEST_WIDTH, WARPS>(row.data(), head, out.data()); });
  print(out);
}
