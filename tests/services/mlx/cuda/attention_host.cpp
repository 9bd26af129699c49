// Runs services/mlx/cuda/attention.cuh on the host. Test only.
//
// stdin:  heads, kv heads, queries, keys, then q, k, v, mask as numbers
// stdout: out [queries, heads, D]
constexpr int D = SIZE, WARPS = 4, GROUP = SHARING;
#include "cuda_host.h"

#include "common.cuh"
#include "tile_host.h"
#include "attention.cuh"

int main() {
  int heads, kv, queries, keys;
  if (scanf("%d%d%d%d", &heads, &kv, &queries, &keys) != 4 || heads != kv * GROUP) return 1;
  const auto q = numbers(heads * queries * D), k = numbers(kv * keys * D), v = numbers(k.size());
  const auto seen = numbers(queries * keys);
  auto mask = std::make_unique<bool[]>(seen.size());
  for (size_t i = 0; i < seen.size(); i++) mask[i] = seen[i] != 0;
  std::vector<float> out(q.size());
  for (int head = 0; head < kv; head++)
    for (int tile = 0; tile * TILE < queries * GROUP; tile++)
      run_block([&, head, tile] {
        attend_tile<float, D, WARPS, GROUP>(
            &q[head * GROUP * queries * D], queries * D, D, 1, &k[head * keys * D], D,
            &v[head * keys * D], D, mask.get(), keys, 1, queries, tile, keys, 1.0f / sqrtf(D),
            &out[head * GROUP * D], heads * D);
      });
  print(out);
}
