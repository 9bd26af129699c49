// A few queries against many keys, each key read once for eight rows; see attention.py.
//
// A row is a query of one of the heads that share keys. Keys go through in blocks of eight, as
// the left matrix of 8x8 products, under an online softmax (Milakov and Gimelshein, 2018).
// Which simdgroup takes a block depends on the block's number alone, and what a row does not
// see leaves its sums as they are: so they are the same whatever company it has, and however
// many keys follow. A key that no row may see must be finite, as it is weighted with zero.

constant constexpr int ALL = 0, CAUSAL = 1, MASKED = 2;

// Leaves each simdgroup's maxima, sums and weighted values [8 rows, D] in threadgroup memory.
// Steps are from one element to the next; `begin` and `end` are the keys of this chunk.
template <typename T, int D, int GROUP, int SPLIT, int SEES>
void attend(
    device const T* q, size_t q_head, size_t q_row, size_t q_step, device const T* k,
    size_t k_step, device const T* v, size_t v_step, device const bool* mask, size_t mask_row,
    size_t mask_step, int queries, int keys, int begin, int end, int first, float scale,
    uint simd, uint lane, threadgroup float* maxima, threadgroup float* totals,
    threadgroup float* parts) {
  constexpr int TILES = D / 8;
  const Place place = place_of(lane);

  // Column j of a block of keys stands for the values (j / 2) * D / 4 + 2 * s + j % 2.
  simdgroup_float8x8 wanted[TILES], held[TILES];
  int query[2];
  UNROLL for (int p = 0; p < 2; p++) {
    const int row = first + place.column + p;
    query[p] = row / GROUP;
    const bool exists = query[p] < queries;
    device const T* from = q + (exists ? row % GROUP * q_head + query[p] * q_row : 0);
    UNROLL for (int s = 0; s < TILES; s++) {
      const int at = place.row / 2 * (D / 4) + 2 * s + place.row % 2;
      wanted[s].thread_elements()[p] = exists ? float(from[at * q_step]) * scale : 0.0f;
    }
  }
  UNROLL for (int s = 0; s < TILES; s++) fill(held[s], 0.0f, 0.0f);

  // Finite, so that a simdgroup that has seen no key yet is no special case.
  float highest[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};
  for (int block = begin + 8 * int(simd); block < end; block += 8 * SPLIT) {
    const int key = min(block + place.row, keys - 1);
    device const T* k_from = k + key * k_step + place.column / 2 * (D / 4);
    simdgroup_float8x8 scores;
    fill(scores, 0.0f, 0.0f);
    UNROLL for (int c = 0; c < TILES / 4; c++) {
      const Neighbours<T, 8> read = *(device const Neighbours<T, 8>*)(k_from + 8 * c);
      UNROLL for (int s = 0; s < 4; s++) {
        simdgroup_float8x8 some;
        fill(some, float(read.at[2 * s]), float(read.at[2 * s + 1]));
        simdgroup_multiply_accumulate(scores, some, wanted[4 * c + s], scores);
      }
    }

    simdgroup_float8x8 weights;
    float shrink[2];
    UNROLL for (int p = 0; p < 2; p++) {
      const int at = block + place.row;
      bool seen = at < keys && query[p] < queries;
      if (SEES == CAUSAL) seen = seen && at <= keys - queries + query[p];
      if (SEES == MASKED) seen = seen && mask[seen ? query[p] * mask_row + at * mask_step : 0];
      const float score = scores.thread_elements()[p];
      // A score that is no number is seen as such: the maximum would hide it, the weight not.
      const float top = max(highest[p], max_over_rows(seen ? score : -1e30f));
      const float weight = seen ? exp(score - top) : 0.0f;
      shrink[p] = exp(highest[p] - top);
      highest[p] = top;
      total[p] = fma(total[p], shrink[p], weight);
      weights.thread_elements()[p] = weight;
    }

    // Row j of the values' matrix s stands for the value j * TILES + s. Keys beyond the last are
    // the last once more, with a weight of zero.
    const int at = block + place.column;
    device const T* v_first = v + min(at, keys - 1) * v_step + place.row * TILES;
    device const T* v_second = v + min(at + 1, keys - 1) * v_step + place.row * TILES;
    UNROLL for (int c = 0; c < TILES / 4; c++) {
      const Neighbours<T, 4> one = *(device const Neighbours<T, 4>*)(v_first + 4 * c);
      const Neighbours<T, 4> two = *(device const Neighbours<T, 4>*)(v_second + 4 * c);
      UNROLL for (int i = 0; i < 4; i++) {
        const int s = 4 * c + i;
        held[s].thread_elements()[0] *= shrink[0];
        held[s].thread_elements()[1] *= shrink[1];
        simdgroup_float8x8 some;
        fill(some, float(one.at[i]), float(two.at[i]));
        simdgroup_multiply_accumulate(held[s], some, weights, held[s]);
      }
    }
  }

  UNROLL for (int p = 0; p < 2; p++) {
    const int slot = int(simd) * 8 + place.column + p;
    const float sum = sum_over_rows(total[p]);
    if (place.row == 0) {
      maxima[slot] = highest[p];
      totals[slot] = sum;
    }
    UNROLL for (int s = 0; s < TILES; s++)
      parts[slot * D + place.row * TILES + s] = held[s].thread_elements()[p];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

struct Merged {
  float highest;
  float total;
  float value;
};

// One value of a row from `count` maxima, sums and values, in their order.
template <typename Floats, typename Values>
Merged merge(Floats maxima, Floats totals, int step, Values values, size_t values_step, int count) {
  Merged found = {maxima[0], 0.0f, 0.0f};
  for (int i = 1; i < count; i++) found.highest = max(found.highest, maxima[i * step]);
  for (int i = 0; i < count; i++) {
    const float weight = exp(maxima[i * step] - found.highest);
    found.total = fma(weight, totals[i * step], found.total);
    found.value = fma(weight, values[i * values_step], found.value);
  }
  return found;
}

// Not `total > 0`: what is no number must stay one that is seen.
inline float quotient(Merged merged) {
  return merged.total == 0.0f ? 0.0f : merged.value / merged.total;
}
