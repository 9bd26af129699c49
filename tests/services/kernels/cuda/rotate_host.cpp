// Runs services/kernels/cuda/rotate.cuh on the host. Test only.
//
// stdin:  rotated, position, eps, whether it is normed, then the gains, the speeds and the head
// stdout: the head
constexpr int WARPS = 1;
#include "cuda_host.h"

#include "common.cuh"
#include "rotate.cuh"

int main() {
  const auto given = numbers(4);
  const auto gains = numbers(HEAD_SIZE), speeds = numbers(size_t(given[0]) / 2);
  const auto head = numbers(HEAD_SIZE);
  std::vector<float> out(HEAD_SIZE);
  run_block([&] {
    rotate_head<float, HEAD_SIZE>(head.data(), given[3] > 0 ? gains.data() : nullptr, given[2],
                                  int(given[0]), Angles{speeds.data(), given[1]}, out.data());
  });
  print(out);
}
