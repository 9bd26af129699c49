// One head of one row, normed and rotated by one warp; see rotate.py.

// `gain` [D] is the norm's, null if there is none; of the head's D numbers the first `rotated` are
// turned in pairs, by `speeds` [rotated / 2] a position.
template <typename T, int D>
__device__ void rotate_head(const T* from, const T* gain, float eps, const float* speeds,
                            int rotated, float position, T* to) {
  const int lane = threadIdx.x % 32, half = rotated / 2;
  float share = 1.0f;
  if (gain != nullptr) {
    float squares = 0.0f;
    for (int i = lane; i < D; i += 32) squares += float(from[i]) * float(from[i]);
    share = rsqrtf(summed(squares) / D + eps);
  }
  const auto read = [&](int i) {
    return gain == nullptr ? float(from[i]) : float(T(float(from[i]) * share * float(gain[i])));
  };
  for (int i = lane; i < half; i += 32) {
    float sine, cosine;
    sincosf(position * speeds[i], &sine, &cosine);
    const float first = read(i), second = read(i + half);
    to[i] = T(first * cosine - second * sine);
    to[i + half] = T(first * sine + second * cosine);
  }
  for (int i = rotated + lane; i < D; i += 32) to[i] = T(read(i));
}
