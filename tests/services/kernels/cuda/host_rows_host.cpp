// Runs services/kernels/cuda/host_rows.cuh on the host. Test only.
//
// stdin:  words, threads, then the words, each below 2^24
// stdout: what the threads have sent, with one number behind it that is nobody's
constexpr int WARPS = 1;
#include "cuda_host.h"

#include "common.cuh"
#include "host_rows.cuh"

int main() {
  const auto sizes = numbers(2);
  const long words = long(sizes[0]), threads = long(sizes[1]);
  const auto given = numbers(words);
  const std::vector<unsigned> from(given.begin(), given.end());
  std::vector<unsigned> to(words + 1, 77);
  for (long thread = 0; thread < threads; ++thread)
    send_words(from.data(), words, thread, threads, to.data());
  print(std::vector<float>(to.begin(), to.end()));
}
