// out = x @ w.T for 1 to 16 rows of x, w quantised as MLX packs it; see product.py.
//
// Weights are the left matrix of 8x8 products, eight outputs by eight inputs; the right one is
// eight inputs by eight rows of x. Missing rows are zero, so that a row's sums are the same,
// and in the same order, whatever company it has.

// Four lanes share a row of w and hold a quarter of a group each, WORDS of it; a word is two
// halves of FIELDS values. In the products, the halves of a lane's word i are its two columns,
// and field s of all halves is one matrix. A field stays where it is in the word: 2^(its
// position) times too large, for which the inputs are scaled down by the same, exactly.
template <typename T, int BITS, int GROUP, int TILES, int BLOCKS, int SPLIT>
void multiply(
    device const T* x, device const uint* w, device const T* scales, device const T* biases,
    int rows, int inputs, int outputs, int first, uint simd, uint lane,
    threadgroup float* parts, device T* out) {
  constexpr int WORDS = GROUP * BITS / 128, FIELDS = 16 / BITS;
  constexpr uint MASK = (1u << BITS) - 1;
  const Place place = place_of(lane);
  const int groups = inputs / GROUP;

  size_t w_row[BLOCKS];  // this lane's output of each block; beyond the last: the last
  UNROLL for (int b = 0; b < BLOCKS; b++)
    w_row[b] = size_t(min(first + 8 * b + place.row, outputs - 1));

  float sums[TILES][BLOCKS][2];
  UNROLL for (int t = 0; t < TILES; t++)
    UNROLL for (int b = 0; b < BLOCKS; b++) sums[t][b][0] = sums[t][b][1] = 0.0f;

  for (int group = int(simd); group < groups; group += SPLIT) {
    Neighbours<uint, WORDS> packed[BLOCKS];
    UNROLL for (int b = 0; b < BLOCKS; b++)
      packed[b] = *(device const Neighbours<uint, WORDS>*)(
          w + (w_row[b] * groups + group) * (4 * WORDS) + place.column / 2 * WORDS);

    simdgroup_float8x8 products[TILES][BLOCKS];
    float inputs_sum[TILES][2];
    UNROLL for (int t = 0; t < TILES; t++) {
      inputs_sum[t][0] = inputs_sum[t][1] = 0.0f;
      UNROLL for (int b = 0; b < BLOCKS; b++) fill(products[t][b], 0.0f, 0.0f);
    }

    UNROLL for (int i = 0; i < WORDS; i++) {
      // The half that is this lane's row of the right matrices.
      const int at = group * GROUP + ((place.row / 2 * WORDS + i) * 2 + place.row % 2) * FIELDS;
      simdgroup_float8x8 fields[TILES][FIELDS];
      UNROLL for (int t = 0; t < TILES; t++) {
        UNROLL for (int p = 0; p < 2; p++) {
          const int row = 8 * t + place.column + p;
          Neighbours<T, FIELDS> read;
          if (row < rows) read = *(device const Neighbours<T, FIELDS>*)(x + row * inputs + at);
          float shrink = place.row % 2 ? 1.0f / 65536.0f : 1.0f;
          UNROLL for (int s = 0; s < FIELDS; s++) {
            const float value = row < rows ? float(read.at[s]) : 0.0f;
            inputs_sum[t][p] += value;
            fields[t][s].thread_elements()[p] = value * shrink;
            shrink *= 1.0f / (1 << BITS);
          }
        }
      }
      UNROLL for (int b = 0; b < BLOCKS; b++) {
        const uint word = packed[b].at[i];
        UNROLL for (int s = 0; s < FIELDS; s++) {
          simdgroup_float8x8 weights;
          fill(weights, float(word & (MASK << (BITS * s))),
               float(word & (MASK << (16 + BITS * s))));
          UNROLL for (int t = 0; t < TILES; t++)
            simdgroup_multiply_accumulate(products[t][b], weights, fields[t][s], products[t][b]);
        }
      }
    }

    UNROLL for (int t = 0; t < TILES; t++)
      UNROLL for (int p = 0; p < 2; p++) inputs_sum[t][p] = sum_over_rows(inputs_sum[t][p]);
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      const float scale = float(scales[w_row[b] * groups + group]);
      const float bias = float(biases[w_row[b] * groups + group]);
      UNROLL for (int t = 0; t < TILES; t++)
        UNROLL for (int p = 0; p < 2; p++)
          sums[t][b][p] = fma(
              scale, products[t][b].thread_elements()[p],
              fma(bias, inputs_sum[t][p], sums[t][b][p]));
    }
  }

  // The simdgroups' shares of the inputs, added up in their order.
  constexpr int EACH = TILES * BLOCKS * 2;
  UNROLL for (int t = 0; t < TILES; t++)
    UNROLL for (int b = 0; b < BLOCKS; b++)
      UNROLL for (int p = 0; p < 2; p++)
        parts[(int(simd) * EACH + (t * BLOCKS + b) * 2 + p) * 32 + int(lane)] = sums[t][b][p];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = int(simd); e < EACH; e += SPLIT) {
    float sum = parts[e * 32 + int(lane)];
    for (int s = 1; s < SPLIT; s++) sum += parts[(s * EACH + e) * 32 + int(lane)];
    const int row = e / (2 * BLOCKS) * 8 + place.column + e % 2;
    const int output = first + e / 2 % BLOCKS * 8 + place.row;
    if (row < rows && output < outputs) out[size_t(row) * outputs + output] = T(sum);
  }
}
