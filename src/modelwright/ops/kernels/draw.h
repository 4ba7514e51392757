// Draws tokens at random: the sampler of `infer/sampler.py` for one row at a time, in place of a sort of the vocabulary
// and a dozen of PyTorch's operators per row, which take longer than the model's step where the model is small.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "team.h"
#include "vectors.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBins = 512;                  // by distance from the largest logit
constexpr int64_t kSumBlock = 256;          // tokens whose shares are summed in FP32
constexpr float kFarthest = 40.0f;          // distance after temperature from which all share a bin: shares below 1e-17

struct Draw {
  double divisor;              // of logits: the temperature, above 0
  double top_k, top_p, min_p;  // top_k 0, top_p 1 and min_p 0 keep all
  double uniform;              // in [0, 1)
};

// One row. shares [width]: memory for each token's share, over that of the likeliest; places [width].
class DrawnRow {
 public:
  DrawnRow(const float* x, int64_t width, const Draw& draw, float* shares, int32_t* places)
      : x(x), width(width), draw(draw), shares(shares), places(places) {}

  int64_t token() {
    largest = extreme([](Vector a, Vector b) { return larger(a, b); }, -kInfinity);
    if (!std::isfinite(largest)) return 0;  // nothing to draw from, which the row's log-sum-exp says
    inverse = static_cast<float>(1.0 / draw.divisor);
    each_vector(width, [&](int64_t at, int, auto size) {
      put(exponential((some(x + at, size) - largest) * inverse), shares + at, size);
    });
    if (draw.top_k > 0 || draw.top_p < 1 || draw.min_p > 0) {
      // Tokens that are left out by a logit of minus infinity are at no distance.
      const float smallest = extreme(
          [](Vector a, Vector b) { return (b > all(-kInfinity)) & (b < a) ? b : a; }, kInfinity);
      const float farthest = std::min((largest - smallest) * inverse, kFarthest);
      bins_per_distance = farthest > 0 ? (kBins - 1) / farthest : 0.0f;
      truncate();
    }
    return place_of(draw.uniform);
  }

 private:
  template <class Of>
  float extreme(Of of, float start) const {
    Vector found = all(start);
    int64_t at = 0;
    for (; at + kLanes <= width; at += kLanes) found = of(found, load(x + at));
    for (; at < width; ++at) found = of(found, all(x[at]));
    Vector one = found;
    for (int lane = 0; lane < kLanes; ++lane) one = of(one, all(found[lane]));
    return one[0];
  }

  int bin(int64_t at) const {
    return static_cast<int>(std::min((largest - x[at]) * inverse * bins_per_distance, kBins - 1.0f));
  }

  // Sets the shares of tokens to 0 that min-p, then top-k, then top-p leave out. Tokens are in the order of their logits,
  // equal ones in that of their ids; only those of the bin in which a limit falls have to be sorted.
  void truncate() {
    int64_t counts[kBins] = {};
    double masses[kBins] = {};
    for (int64_t at = 0; at < width; ++at) {
      if (!(shares[at] >= draw.min_p)) shares[at] = 0.0f;  // nor what is not a number
      if (shares[at] == 0.0f) continue;
      const int of = bin(at);
      counts[of] += 1;
      masses[of] += shares[at];
    }
    double mass = std::accumulate(masses, masses + kBins, 0.0);
    if (draw.top_k > 0) {
      int64_t before = 0;
      int last = 0;
      for (; last + 1 < kBins && before + counts[last] < draw.top_k; ++last) before += counts[last];
      mass = cut(last, masses, [&](int64_t rank, double) { return before + rank < draw.top_k; });
    }
    if (draw.top_p < 1) {
      // A token stays if the mass before it is below the target, so the one that crosses it is kept, too. A mass that
      // equals the target but for the rounding of shares is not below it.
      const double target = draw.top_p * mass * (1.0 - 1e-6);
      double before = 0.0;
      int last = 0;
      for (; last + 1 < kBins && before + masses[last] < target; ++last) before += masses[last];
      cut(last, masses, [&](int64_t rank, double within) { return before + within < target || before + rank == 0; });
    }
  }

  // Keeps the bins before `last`, and of its tokens those for which `stays(rank, mass before it)` within the bin. Updates
  // the bins' masses, and returns the whole.
  template <class Stays>
  double cut(int last, double* masses, Stays stays) {
    int64_t count = 0;
    for (int64_t at = 0; at < width; ++at) {
      if (shares[at] == 0.0f) continue;
      const int of = bin(at);
      if (of == last) places[count++] = static_cast<int32_t>(at);
      if (of > last) shares[at] = 0.0f;
    }
    std::sort(places, places + count, [&](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
    double within = 0.0;
    for (int64_t rank = 0; rank < count; ++rank) {
      float& share = shares[places[rank]];
      if (stays(rank, within))
        within += share;
      else
        share = 0.0f;
    }
    masses[last] = within;
    std::fill(masses + last + 1, masses + kBins, 0.0);
    return std::accumulate(masses, masses + kBins, 0.0);
  }

  // The place in the order of ids where the sum of shares first exceeds this part of the whole.
  int64_t place_of(double part) const {
    double mass = 0.0;
    for (int64_t start = 0; start < width; start += kSumBlock) mass += of_block(start);
    const double wanted = part * mass;
    double before = 0.0;
    for (int64_t start = 0; start < width; start += kSumBlock) {
      const double whole = of_block(start);
      double within = 0.0;
      for (int64_t at = start; before + whole > wanted && at < std::min(start + kSumBlock, width); ++at) {
        within += shares[at];
        if (shares[at] > 0.0f && before + within > wanted) return at;
      }
      before += whole;
    }
    // Rounding has made the sums smaller than the whole.
    int64_t last = width - 1;
    while (last > 0 && shares[last] == 0.0f) --last;
    return last;
  }

  double of_block(int64_t start) const {
    Vector sums[2] = {};
    each_vector(std::min(kSumBlock, width - start), [&](int64_t at, int which, auto size) {
      sums[which] += some(shares + start + at, size);
    });
    return sum(sums[0] + sums[1]);
  }

  const float* const x;
  const int64_t width;
  const Draw& draw;
  float* const shares;
  int32_t* const places;
  float largest = 0.0f, inverse = 1.0f, bins_per_distance = 0.0f;
};

// logits [any][width], of which `rows` [num_draws] are drawn from; scratch [threads][2 * width].
inline void draw_tokens(const float* logits, int64_t width, const int64_t* rows, const Draw* draws, int64_t num_draws,
                        float* scratch, int64_t* tokens, int threads) {
  Team::run(num_draws > 1 ? threads : 1, [&](const Member& member) {
    float* const shares = scratch + 2 * width * member.number;
    int32_t* const places = reinterpret_cast<int32_t*>(shares + width);
    member.each_as_it_comes(num_draws, [&](int64_t number) {
      tokens[number] = DrawnRow(logits + rows[number] * width, width, draws[number], shares, places).token();
    });
  });
}

}  // namespace
