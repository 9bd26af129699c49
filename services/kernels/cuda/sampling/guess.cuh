// The likeliest choices of the target after a drafter's row of logits, by one block; see guess.py.

constexpr int CANDIDATES = 64;  // that filters look at
constexpr float DROPPED = 1e9f;

// A row of logits under the noise of the tokens that its columns stand for.
template <typename Values>
struct Perturbed {
  const Values& values;
  const int* ids;
  const Rule& rule;
  __device__ float operator()(int column) const {
    return values(column) + rule.temperature * gumbel_of(rule.bits_of(unsigned(ids[column])));
  }
};

// The logarithm of the sum of all exponentials.
template <typename Values>
__device__ float sum_logarithms(const Values& values, int count) {
  float top = values(0), sum = 0.0f;
  for (int i = 1; i < count; i++) top = fmaxf(top, values(i));
  for (int i = 0; i < count; i++) sum += expf(values(i) - top);
  return top + logf(sum);
}

// The best of some columns: their numbers, their values, and the logarithm of the sum of the
// exponentials of all of these columns.
template <int WIDTH, int KIND>
struct Best {
  static constexpr int COUNT = KIND == 2 ? CANDIDATES : WIDTH;
  float columns[COUNT], values[COUNT], total;
};

// Finds the best columns from `first` to before `last`, at least Best::COUNT, by one block.
template <int WIDTH, int KIND, int WARPS, typename Values>
__device__ void scan_columns(const Values& values, int first, int last, const int* ids,
                             const unsigned* words, Best<WIDTH, KIND>& best) {
  constexpr int COUNT = Best<WIDTH, KIND>::COUNT;
  const auto part = [&](int column) { return values(first + column); };
  if constexpr (KIND == 1) {
    const Rule rule(words);
    find_best<COUNT, WARPS>(Perturbed<decltype(part)>{part, ids + first, rule}, last - first,
                            reinterpret_cast<float*>(&best));
  } else {
    find_best<COUNT, WARPS>(part, last - first, reinterpret_cast<float*>(&best));
  }
  __syncthreads();
  if (threadIdx.x < COUNT) best.columns[threadIdx.x] += first;
}

// Finds the best of several parts of a row.
template <int WIDTH, int KIND, int WARPS>
__device__ void join_parts(const Best<WIDTH, KIND>* parts, int count, Best<WIDTH, KIND>& best) {
  constexpr int COUNT = Best<WIDTH, KIND>::COUNT;
  find_best<COUNT, WARPS>([&](int at) { return parts[at / COUNT].values[at % COUNT]; },
                          count * COUNT, reinterpret_cast<float*>(&best));
  __syncthreads();
  if (threadIdx.x < COUNT) {
    const int at = int(best.columns[threadIdx.x]);
    best.columns[threadIdx.x] = parts[at / COUNT].columns[at % COUNT];
  }
  if (threadIdx.x == 0)
    best.total = sum_logarithms([&](int part) { return parts[part].total; }, count);
}

// Of the best candidates by logit the filters drop some; the others are put in order of their
// scores. Afterwards `best` has the WIDTH best, and the total with noise.
template <int WIDTH>
__device__ void rank_filtered(Best<WIDTH, 2>& best, const int* ids, const Rule& rule) {
  __shared__ float scores[CANDIDATES];
  const int own = threadIdx.x;
  float *columns = best.columns, *logits = best.values;
  const float candidates = sum_logarithms(Row<float>{logits, 1}, CANDIDATES), total = best.total;
  if (own < CANDIDATES) {
    float before = 0.0f;
    for (int i = 0; i < own; i++) before += expf(logits[i] - candidates);
    const float share = expf(logits[own] - candidates);
    const bool kept = own == 0 || ((rule.top_k == 0 || own < rule.top_k) &&
                                   (rule.top_p >= 1.0f || before < rule.top_p) &&
                                   share >= rule.min_p * expf(logits[0] - candidates));
    const unsigned id = unsigned(ids[int(columns[own])]);
    scores[own] = logits[own] + rule.temperature * gumbel_of(rule.bits_of(id)) -
                  (kept ? 0.0f : DROPPED);
  }
  __syncthreads();
  // What is not among the candidates keeps its share.
  const float rest = total + logf(fmaxf(1.0f - expf(candidates - total), 0.0f));
  const float ranked = sum_logarithms(Row<float>{scores, 1}, CANDIDATES), top = fmaxf(rest, ranked);
  int place = 0;
  for (int i = 0; own < CANDIDATES && i < CANDIDATES; i++)
    place += scores[i] > scores[own] || (scores[i] == scores[own] && i < own);
  const float column = own < CANDIDATES ? columns[own] : 0.0f;
  __syncthreads();
  if (own < CANDIDATES && place < WIDTH) {
    columns[place] = column;
    logits[place] = scores[own];
  }
  if (own == 0) best.total = top + logf(expf(rest - top) + expf(ranked - top));
}

// Writes the likeliest token, the ids of the WIDTH likeliest, and how sure each is. `best` is shared
// by the block, and has the best columns of a whole row.
template <int WIDTH, int KIND>
__device__ void name_tokens(Best<WIDTH, KIND>& best, const int* ids, const unsigned* words,
                            int* token, float* named, float* sure) {
  __syncthreads();
  if constexpr (KIND == 2) {
    rank_filtered<WIDTH>(best, ids, Rule(words));
    __syncthreads();
  }
  const int own = threadIdx.x;
  if (own >= WIDTH) return;
  const int id = ids[int(best.columns[own])];
  named[own] = float(id);
  sure[own] = expf(best.values[own] - best.total);
  if (own == 0) *token = id;
}
