// Runs services/mlx/cuda/attention.cuh on the host. Test only.
//
// stdin:  heads, kv heads, queries, keys, then q, k, v, mask as numbers
// stdout: out [queries, heads, D]
constexpr int D = SIZE, WARPS = 2;
#include "cuda_host.h"

#include "common.cuh"
#include "attention.cuh"

int main() {
  int heads, kv, queries, keys;
  if (scanf("%d%d%d%d", &heads, &kv, &queries, &keys) != 4) return 1;
  const auto q = numbers(heads * queries * D), k = numbers(kv * keys * D), v = numbers(k.size());
  const auto seen = numbers(queries * keys);
  auto mask = std::make_unique<bool[]>(seen.size());
  for (size_t i = 0; i < seen.size(); i++) mask[i] = seen[i] != 0;
  std::vector<float> out(q.size());
  const int group = heads / kv;
  for (int head = 0; head < heads; head++)
    for (int row = 0; row < queries; row++)
      run_block([&, head, row] {
        attend_one<float, D, WARPS>(
            &q[(head * queries + row) * D], 1, &k[head / group * keys * D], D,
            &v[head / group * keys * D], D, &mask[row * keys], 1, keys, 1.0f / sqrtf(D),
            &out[(row * heads + head) * D]);
      });
  print(out);
}
