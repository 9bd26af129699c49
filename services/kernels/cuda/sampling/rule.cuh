// What the token after a row is chosen by; see rule.py, and protocol/decoding/gumbel.py for noise.

constexpr int RULE_WORDS = 6;

struct Rule {
  unsigned low, high;
  float temperature;
  int top_k;
  float top_p, min_p;

  __device__ explicit Rule(const unsigned* words)
      : low(words[0]),
        high(words[1]),
        temperature(__uint_as_float(words[2])),
        top_k(int(words[3])),
        top_p(__uint_as_float(words[4])),
        min_p(__uint_as_float(words[5])) {}

  __device__ bool has_filter() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }

  // 32 uniform bits of a token.
  __device__ unsigned bits_of(unsigned id) const { return mixed(mixed(id ^ low) + high); }

  __device__ static unsigned mixed(unsigned x) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ x >> 16;
  }
};

__device__ inline float gumbel_of(unsigned bits) {
  const float uniform = (float(bits) + 0.5f) * 0x1p-32f;
  return -logf(-log1pf(-fminf(uniform, 1.0f - 0x1p-24f)));
}

// Not less than that, in a few instructions: -log1p(-u) is at least u.
__device__ inline float most_gumbel_of(unsigned bits) {
  return 0.6931473f * float(__clz(int(bits)) + 1);
}
