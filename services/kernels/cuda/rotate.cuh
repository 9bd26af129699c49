// One head of one row, normed and rotated by one warp; see rotate.py.

struct Rotation {
  float cosine, sine;
};

// That of each pair of numbers at a position, by the radians of a position.
struct Angles {
  const float* speeds;
  float position;

  __device__ Rotation operator()(int pair) const {
    Rotation found;
    sincosf(position * speeds[pair], &found.sine, &found.cosine);
    return found;
  }
};

// `gain` [D] is the norm's, null if there is none; of the head's D numbers the first `rotated` are
// turned in pairs, each by `rotation(pair)`.
template <typename T, int D, typename Rotations>
__device__ void rotate_head(const T* from, const T* gain, float eps, int rotated,
                            const Rotations& rotation, T* to) {
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
    const Rotation by = rotation(i);
    const float first = read(i), second = read(i + half);
    to[i] = T(first * by.cosine - second * by.sine);
    to[i + half] = T(first * by.sine + second * by.cosine);
  }
  for (int i = rotated + lane; i < D; i += 32) to[i] = T(read(i));
}
