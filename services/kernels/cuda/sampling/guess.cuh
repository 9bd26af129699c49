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

// The largest, and the logarithm of the sum of all exponentials.
__device__ inline float sum_logarithms(const float* values, int count) {
  float top = values[0], sum = 0.0f;
  for (int i = 1; i < count; i++) top = fmaxf(top, values[i]);
  for (int i = 0; i < count; i++) sum += expf(values[i] - top);
  return top + logf(sum);
}

// The best candidates by logit, of which the filters drop some, put in order of their scores.
// `best`: what `find_best` wrote of them; afterwards the WIDTH best, and the total with noise.
template <int WIDTH>
__device__ void rank_filtered(float* best, const int* ids, const Rule& rule) {
  __shared__ float scores[CANDIDATES];
  const int own = threadIdx.x;
  float *columns = best, *logits = best + CANDIDATES;
  const float candidates = sum_logarithms(logits, CANDIDATES), total = best[2 * CANDIDATES];
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
  const float ranked = sum_logarithms(scores, CANDIDATES), top = fmaxf(rest, ranked);
  int place = 0;
  for (int i = 0; own < CANDIDATES && i < CANDIDATES; i++)
    place += scores[i] > scores[own] || (scores[i] == scores[own] && i < own);
  const float column = own < CANDIDATES ? columns[own] : 0.0f;
  __syncthreads();
  if (own < CANDIDATES && place < WIDTH) {
    best[place] = column;
    best[WIDTH + place] = scores[own];
  }
  if (own == 0) best[2 * WIDTH] = top + logf(expf(rest - top) + expf(ranked - top));
}

// Writes the likeliest token, the ids of the WIDTH likeliest, and how sure each is.
template <int WIDTH, int KIND, int WARPS, typename Values>
__device__ void guess_tokens(const Values& values, int head, const int* ids, const unsigned* words,
                             int* token, float* named, float* sure) {
  constexpr bool FILTERED = KIND == 2;
  __shared__ float best[2 * (FILTERED ? CANDIDATES : WIDTH) + 1];
  const Rule rule(words);
  if constexpr (KIND == 1)
    find_best<WIDTH, WARPS>(Perturbed<Values>{values, ids, rule}, head, best);
  else
    find_best<(FILTERED ? CANDIDATES : WIDTH), WARPS>(values, head, best);
  __syncthreads();
  if constexpr (FILTERED) {
    rank_filtered<WIDTH>(best, ids, rule);
    __syncthreads();
  }
  const int own = threadIdx.x;
  if (own >= WIDTH) return;
  const int id = ids[int(best[own])];
  named[own] = float(id);
  sure[own] = expf(best[WIDTH + own] - best[2 * WIDTH]);
  if (own == 0) *token = id;
}
