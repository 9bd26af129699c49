// Runs services/kernels/cuda/sampling/choose.cuh on the host. Test only.
//
// stdin:  tokens, the words of a rule in two halves each, then the logits
// stdout: the token, or one of the negative numbers
constexpr int WARPS = 2;
#include "../cuda_host.h"

#include "common.cuh"
#include "sampling/rule.cuh"
#include "sampling/choose.cuh"

int main() {
  const int count = int(numbers(1)[0]);
  const auto words = words_of(numbers(2 * RULE_WORDS));
  const auto row = numbers(count);
  int token = 0;
  run_block([&] { choose_token<WARPS>(Row<float>{row.data(), 1}, count, words.data(), &token); });
  print({float(token)});
}
