// Runs services/kernels/cuda/sampling/guess.cuh on the host. Test only.
//
// stdin:  guesses, kind, head, the words of a rule in two halves each, the ids of the columns, then the logits
// stdout: the likeliest token, the ids of the likeliest ones, how sure each is
constexpr int WARPS = 2;
#include "../cuda_host.h"

#include "common.cuh"
#include "sampling/rule.cuh"
#include "sampling/best.cuh"
#include "sampling/guess.cuh"

template <int GUESSES, int KIND>
void guess() {
  const int head = int(numbers(1)[0]);
  const auto words = words_of(numbers(2 * RULE_WORDS));
  const auto named = numbers(head), row = numbers(head);
  const std::vector<int> ids(named.begin(), named.end());
  std::vector<float> out(1 + 2 * GUESSES);
  int token = 0;
  const int count = head < 4 * CANDIDATES ? 1 : 4;
  Best<GUESSES, KIND> best, parts[4];
  run_block([&] {
    const Row<float> values{row.data(), 1};
    for (int part = 0; part < count; part++)
      scan_columns<GUESSES, KIND, WARPS>(values, head * part / count, head * (part + 1) / count,
                                         ids.data(), words.data(), parts[part]);
    __syncthreads();
    join_parts<GUESSES, KIND, WARPS>(parts, count, best);
    name_tokens<GUESSES, KIND>(best, ids.data(), words.data(), &token, out.data() + 1,
                               out.data() + 1 + GUESSES);
  });
  out[0] = float(token);
  print(out);
}

int main() {
  const bool one = numbers(1)[0] == 1;
  const int kind = int(numbers(1)[0]);
  if (kind == 0) one ? guess<1, 0>() : guess<8, 0>();
  if (kind == 1) one ? guess<1, 1>() : guess<8, 1>();
  if (kind == 2) one ? guess<1, 2>() : guess<8, 2>();
}
