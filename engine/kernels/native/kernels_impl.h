// One variant of the kernels. It is compiled once per instruction set; CT_KERNELS names the table to fill.
//
// Everything is in an unnamed namespace, and no template of the standard library is used: of a shared function, the
// linker would take one copy for all variants, possibly one that this machine cannot run.
#include "kernels.h"
#include "kv_rows.h"
#include "vectors.h"

namespace chatterm {
namespace {

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define CT_LANES  // products with quantised rows side by side
#endif

// Unrolls small fixed loops over values that should stay in registers.
#define CT_UNROLL _Pragma("GCC unroll 8")

// Where word k, four columns, of row r is among `wide` rows side by side. Instructions that multiply matrices take two
// words of two rows each.
constexpr int64_t word_of(int64_t k, int64_t r, int64_t wide) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  if (wide > 1) return k / 2 * 2 * wide + r / 2 * 4 + r % 2 * 2 + k % 2;
#endif
  return k * wide + r;
}

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits

#ifdef __AVX512VL__
constexpr int AT_ONCE_PLAIN = 4;  // rows of inputs whose sums stay in registers
constexpr int BESIDE = 1;         // rows of a weight that are multiplied with them side by side
#else
constexpr int AT_ONCE_PLAIN = 3;
constexpr int BESIDE = 4;
#endif

// Calls part with the number of rows of inputs that lie side by side, as a constant.
template <typename Part>
inline void by_width(int32_t wide, const Part& part) {
  switch (wide) {
    case 1:
      return part(Constant<1>{});
    case 2:
      return part(Constant<2>{});
    case 4:
      return part(Constant<4>{});
    default:
      return part(Constant<TILE>{});
  }
}

// out[r * stride] = N rows of x times a row of a weight, which is prefetched `ahead` bytes before it is read.
template <typename Type, int N>
inline void multiply_plain_row(const uint8_t* row, const float* x, int32_t columns, uintptr_t ahead, float* out,
                               int32_t stride) {
  const int32_t even = columns / 32 * 32;
  Floats sums[N][4] = {};
  for (int32_t i = 0; i < even; i += 32) {
    const uint8_t* from = row + i * Type::BYTES;
    for (int j = 0; j < 32 * Type::BYTES; j += 64) __builtin_prefetch((const char*)(uintptr_t(from + j) + ahead));
    CT_UNROLL
    for (int j = 0; j < 4; ++j) {
      const Floats weight = Type::eight(from + 8 * j * Type::BYTES);
      CT_UNROLL
      for (int n = 0; n < N; ++n) sums[n][j] += weight * load(x + n * int64_t(columns) + i + 8 * j);
    }
  }
  CT_UNROLL
  for (int n = 0; n < N; ++n) {
    float rest = 0.0f;
    for (int32_t i = even; i < columns; ++i) rest += Type::one(row + i * Type::BYTES) * x[n * int64_t(columns) + i];
    out[n * stride] = sum_of((sums[n][0] + sums[n][1]) + (sums[n][2] + sums[n][3])) + rest;
  }
}

// The same for BESIDE rows of a weight, with the same order of sums: only one of the four sums of each product is in a
// register at a time, so that each number that was loaded is used several times.
template <typename Type, int N>
inline void multiply_plain_rows(const uint8_t* row, size_t row_bytes, const float* x, int32_t columns, uintptr_t ahead,
                                float* out, int32_t stride) {
  const int32_t even = columns / 32 * 32;
  Floats all[4][BESIDE][N];
  for (int32_t j = 0; j < 4; ++j) {
    Floats sums[BESIDE][N] = {};
    for (int32_t i = 8 * j; i < even; i += 32) {
      Floats given[N];
      CT_UNROLL
      for (int n = 0; n < N; ++n) given[n] = load(x + n * int64_t(columns) + i);
      CT_UNROLL
      for (int m = 0; m < BESIDE; ++m) {
        const uint8_t* from = row + m * row_bytes + i * Type::BYTES;
        if (8 * Type::BYTES * j % 64 == 0) __builtin_prefetch((const char*)(uintptr_t(from) + ahead));
        const Floats weight = Type::eight(from);
        CT_UNROLL
        for (int n = 0; n < N; ++n) sums[m][n] += weight * given[n];
      }
    }
    std::memcpy(all[j], sums, sizeof sums);
  }
  for (int m = 0; m < BESIDE; ++m) {
    const uint8_t* from = row + m * row_bytes;
    for (int n = 0; n < N; ++n) {
      float rest = 0.0f;
      for (int32_t i = even; i < columns; ++i) rest += Type::one(from + i * Type::BYTES) * x[n * int64_t(columns) + i];
      out[n * stride + m] = sum_of((all[0][m][n] + all[1][m][n]) + (all[2][m][n] + all[3][m][n])) + rest;
    }
  }
}

// Reads each row of a weight from memory once: it stays in the cache until it has been multiplied with all inputs.
template <typename Type>
void multiply_plain(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  const uint8_t* end = rows.data + size_t(rows.count) * rows.row_bytes;
  for (int32_t i = 0, some; i < rows.count; i += some) {
    some = BESIDE > 1 && Type::BYTES < 4 && x.rows > 2 && i + BESIDE <= rows.count ? BESIDE : 1;
    const uint8_t* row = rows.data + size_t(i) * rows.row_bytes;
    const uintptr_t ahead = AHEAD + (AHEAD < size_t(end - row) ? 0 : uintptr_t(rows.next) - uintptr_t(end));
    int32_t r = 0;
    auto multiply = [&](auto count) {
      const float* given = x.x + r * int64_t(rows.columns);
      float* to = out + r * int64_t(stride) + i;
      if (some == 1) {
        multiply_plain_row<Type, count.value>(row, given, rows.columns, ahead, to, stride);
      } else {
        multiply_plain_rows<Type, count.value>(row, rows.row_bytes, given, rows.columns, ahead, to, stride);
      }
      r += count.value;
    };
    while (r + AT_ONCE_PLAIN <= x.rows && x.rows - r != AT_ONCE_PLAIN + 1) multiply(Constant<AT_ONCE_PLAIN>{});
    while (r + 2 <= x.rows) multiply(Constant<2>{});
    if (r < x.rows) multiply(Constant<1>{});
  }
}

}  // namespace
}  // namespace chatterm

#ifdef CT_LANES
#include "products_lanes.h"
#else
#include "products_portable.h"
#endif

namespace chatterm {
namespace {

// Writes q = round(x * inverse) of 8 numbers to `out`. `peak` has already made the scale NaN if one of them is NaN.
inline void round_eight(const float* x, Floats inverse, int8_t* out) {
  narrow_bytes(out, (Ints)(load(x) * inverse + MAGIC));
}

// The largest magnitude of n numbers, n a multiple of 32; NaN if one of them is not finite.
inline float peak(const float* x, int32_t n) {
  Floats most{}, poison{};
  for (int32_t i = 0; i < n; i += 8) {
    const Floats v = load(x + i);
    most = larger(magnitude(v), most);
    poison += v * 0.0f;
  }
  return largest_of(most) + sum_of(poison);
}

// Rounds 32 numbers to int8 in `q`. Returns their scale, and the sums of the first and of the last 16 q.
inline float quantize_block(const float* x, int8_t* q, int32_t& left, int32_t& right) {
  const float most = peak(x, 32);
  const Floats inverse = splat(most > 0.0f ? 127.0f / most : 0.0f);
  for (int i = 0; i < 32; i += 8) round_eight(x + i, inverse, q + i);
  int32_t fours[8];
  add_fours(q, fours);
  left = fours[0] + fours[1] + fours[2] + fours[3];
  right = fours[4] + fours[5] + fours[6] + fours[7];
  return most / 127.0f;
}

template <int WIDE>
void quantize_as(const float* x, int32_t r, int32_t first, int32_t count, const Inputs& out) {
  const int64_t tile = r / WIDE, place = r % WIDE, n = out.columns;
  uint32_t* q = out.q + tile * (n / 4) * WIDE;
  float* scale = out.scale + tile * (n / 32) * WIDE + place;
  float* low = out.low + tile * (n / 32) * WIDE + place;
  float* low_16 = out.low_16 + tile * (n / 16) * WIDE + place;
  for (int32_t b = first / 32; b < (first + count) / 32; ++b, x += 32) {
    int8_t numbers[32];
    int32_t left, right;
    const float step = quantize_block(x, numbers, left, right);
    for (int i = 0; i < 8; ++i) q[word_of(8 * b + i, place, WIDE)] = load_u32(numbers + 4 * i);
    scale[b * WIDE] = step;
    low[b * WIDE] = step * float(left + right);
    low_16[2 * b * WIDE] = step * float(left);
    low_16[(2 * b + 1) * WIDE] = step * float(right);
  }
}

void quantize(const float* x, int32_t r, int32_t first, int32_t count, const Inputs& out) {
  by_width(out.wide, [&](auto wide) { quantize_as<wide.value>(x, r, first, count, out); });
}

}  // namespace
}  // namespace chatterm

#ifdef __AVX512BF16__
#include "halves_avx512.h"
#endif

namespace chatterm {
namespace {

void round(const float* x, int32_t forms, int32_t r, int32_t first, int32_t count, const Inputs& out) {
  if (forms & FORM_INT8) quantize(x, r, first, count, out);
#ifdef __AVX512BF16__
  if (forms & FORM_HALVES) to_halves(x, count, out.halves + int64_t(r) * out.columns + first);
#endif
}

}  // namespace
}  // namespace chatterm

#include "activations.h"
#ifdef CT_LANES
#include "panels.h"
#endif
#include "weigh.h"

namespace chatterm {
namespace {

// out = x minus its mean
void centre(const float* x, int32_t n, float* out) {
  Floats sums{};
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) sums += load(x + i);
  float sum = sum_of(sums);
  for (; i < n; ++i) sum += x[i];
  const float mean = sum / float(n);
  for (i = 0; i < n; ++i) out[i] = x[i] - mean;
}

void norm(const float* x, const ct_norm& how, int32_t n, float* out) {
  if (how.centred) {
    centre(x, n, out);
    x = out;
  }
  const float* weight = how.weight;
  Floats squares{};
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) squares += load(x + i) * load(x + i);
  float sum = sum_of(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(sum / float(n) + how.eps);
  for (i = 0; i + 8 <= n; i += 8) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
  for (i = 0; how.bias != nullptr && i < n; ++i) out[i] += how.bias[i];
}

void rotate(float* head, const float* cos_sin, int32_t rotated, bool interleaved) {
  const int32_t half = rotated / 2;
  for (int32_t i = 0; interleaved && i < half; ++i) {
    const float low = head[2 * i], high = head[2 * i + 1], c = cos_sin[i], s = cos_sin[i + half];
    head[2 * i] = low * c - high * s;
    head[2 * i + 1] = high * c + low * s;
  }
  if (interleaved) return;
  for (int32_t i = 0; i < half; ++i) {
    const float low = head[i], high = head[i + half], c = cos_sin[i], s = cos_sin[i + half];
    head[i] = low * c - high * s;
    head[i + half] = high * c + low * s;
  }
}

// scores[g][r] of G query heads and ROWS rows
template <typename Type, int G, int ROWS>
inline void score(const float* q, int32_t dim, const uint8_t* const* rows, float* scores) {
  Floats sums[G][ROWS] = {};
  for (int32_t d = 0; d < dim; d += 8) {
    Floats query[G];
    CT_UNROLL
    for (int g = 0; g < G; ++g) query[g] = load(q + g * dim + d);
    CT_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Floats key = Type::eight(rows[r] + d * Type::BYTES);
      CT_UNROLL
      for (int g = 0; g < G; ++g) sums[g][r] += query[g] * key;
    }
  }
  CT_UNROLL
  for (int g = 0; g < G; ++g) {
    if (ROWS == 4) {
      sum_four(sums[g][0], sums[g][1 % ROWS], sums[g][2 % ROWS], sums[g][3 % ROWS], scores + g * ATTEND_ROWS);
    } else {
      CT_UNROLL
      for (int r = 0; r < ROWS; ++r) scores[g * ATTEND_ROWS + r] = sum_of(sums[g][r]);
    }
  }
}

// out[g][d..] += weights[g][r] * rows[r][d..] for G heads and 8 * WIDE numbers
template <typename Type, int G, int WIDE>
inline void mix(const float* weights, const uint8_t* const* rows, int32_t count, int32_t row, int32_t d, float* out) {
  Floats sums[G][WIDE];
  CT_UNROLL
  for (int g = 0; g < G; ++g) {
    CT_UNROLL
    for (int w = 0; w < WIDE; ++w) sums[g][w] = load(out + g * row + d + 8 * w);
  }
  for (int32_t r = 0; r < count; ++r) {
    Floats value[WIDE];
    CT_UNROLL
    for (int w = 0; w < WIDE; ++w) value[w] = Type::eight(rows[r] + (d + 8 * w) * Type::BYTES);
    CT_UNROLL
    for (int g = 0; g < G; ++g) {
      const float weight = weights[g * ATTEND_ROWS + r];
      CT_UNROLL
      for (int w = 0; w < WIDE; ++w) sums[g][w] += value[w] * weight;
    }
  }
  CT_UNROLL
  for (int g = 0; g < G; ++g) {
    CT_UNROLL
    for (int w = 0; w < WIDE; ++w) store(out + g * row + d + 8 * w, sums[g][w]);
  }
}

// Some rows of a KV head, and the rows to prefetch meanwhile: a few lines at a time, and only into the second-level
// cache, because the first level can have few misses in flight and waits when there are more.
struct Some {
  const uint8_t* rows[TOGETHER_ROWS];
  const uint8_t* later[TOGETHER_ROWS];
  int32_t count;

  void ask(int32_t row, int32_t byte) const { __builtin_prefetch(later[row] + byte, 0, 2); }
};

// Scores some rows for query heads of a KV head, as many rows at once as fit into the registers.
template <typename Type, int G>
inline void score_some(const float* q, int32_t dim, const Some& some, float* scores) {
  constexpr int ROWS = G <= 3 ? 4 : 2;
  int32_t r = 0;
  auto ask = [&](int32_t rows) {
    for (int32_t i = r; i < r + rows; ++i) {
      for (int32_t byte = 0; byte < dim * Type::BYTES; byte += 64) some.ask(i, byte);
    }
  };
  for (; r + ROWS <= some.count; r += ROWS) {
    ask(ROWS);
    score<Type, G, ROWS>(q, dim, some.rows + r, scores + r);
  }
  for (; r < some.count; ++r) {
    ask(1);
    score<Type, G, 1>(q, dim, some.rows + r, scores + r);
  }
}

template <typename Type, int G>
inline void mix_some(const float* weights, const Some& some, int32_t dim, float* out) {
  constexpr int WIDE = G <= 2 ? 4 : 2;
  const int32_t row = padded(dim), count = some.count;
  const uint8_t* const* rows = some.rows;
  int32_t d = 0;
  for (; d + 8 * WIDE <= dim; d += 8 * WIDE) {
    for (int32_t byte = (d * Type::BYTES + 63) / 64 * 64; byte < (d + 8 * WIDE) * Type::BYTES; byte += 64) {
      for (int32_t i = 0; i < count; ++i) some.ask(i, byte);
    }
    mix<Type, G, WIDE>(weights, rows, count, row, d, out);
  }
  for (; d < dim; d += 8) mix<Type, G, 1>(weights, rows, count, row, d, out);
}

// Calls part(G, first) for the query heads of a KV head, up to four at a time: G is their number as a constant.
template <typename Part>
inline void by_groups(int32_t groups, const Part& part) {
  int32_t group = 0;
  for (; group + 4 <= groups; group += 4) part(Constant<4>{}, group);
  switch (groups - group) {
    case 3:
      return part(Constant<3>{}, group);
    case 2:
      return part(Constant<2>{}, group);
    case 1:
      return part(Constant<1>{}, group);
    default:
      return;
  }
}

// Finds the memory of the rows from `row` on, at most ATTEND_ROWS; returns their number. A hidden row is replaced by
// the first visible one; it gets no weight.
inline int32_t locate(const CachedRows& a, int32_t row, const uint8_t** k, const uint8_t** v) {
  const int32_t count = a.end - row < ATTEND_ROWS ? a.end - row : ATTEND_ROWS;
  int32_t block = row / a.block_size, within = row % a.block_size;
  for (int32_t i = 0; i < count; ++i) {
    const int64_t offset = (int64_t(a.table[block]) * a.block_size + within) * a.stride;
    k[i] = a.k + offset;
    v[i] = a.v + offset;
    if (++within == a.block_size) ++block, within = 0;
  }
  for (int32_t i = 0; row == a.first && i < a.hidden; ++i) k[i] = k[a.hidden], v[i] = v[a.hidden];
  return count;
}

constexpr int32_t AHEAD_BYTES = 8192;  // how far ahead rows are prefetched; 3, 5, 16 and 32 KB were slower on a Zen 4

template <typename Type>
void attend_rows(const Attend& a) {
  const int32_t bytes = a.dim * Type::BYTES, queries = a.heads * a.groups, wide = padded(a.dim);
  for (int32_t g = 0; g < queries; ++g) {
    a.most[g] = -3.0e38f;
    a.sum[g] = 0.0f;
  }
  for (int32_t i = 0; i < queries * wide; ++i) a.out[i] = 0.0f;
  const uint8_t *k[2][ATTEND_ROWS], *v[ATTEND_ROWS];
  Some some;
  const int32_t far = AHEAD_BYTES / (a.heads * bytes) / TOGETHER_ROWS * TOGETHER_ROWS;
  const int32_t ahead = far < TOGETHER_ROWS ? TOGETHER_ROWS : far < ATTEND_ROWS ? far : ATTEND_ROWS;
  int32_t count = locate(a, a.first, k[0], v), tile = 0;
  for (int32_t i = 0; i < count && i < ahead; ++i) {
    for (int32_t at = 0; at < a.heads * bytes; at += 64) __builtin_prefetch(k[0][i] + at);
  }
  // Calls part(head, row) for TOGETHER_ROWS at a time, which are `some` then.
  auto in_order = [&](const uint8_t* const* rows, const uint8_t* const* later, int32_t laters, auto part) {
    for (int32_t r = 0; r < count; r += TOGETHER_ROWS) {
      some.count = count - r < TOGETHER_ROWS ? count - r : TOGETHER_ROWS;
      for (int32_t i = 0; i < some.count; ++i) {
        const int32_t after = r + ahead + i;
        some.rows[i] = rows[r + i];
        some.later[i] = after < count ? rows[after] : after - count < laters ? later[after - count] : rows[r + i];
      }
      for (int32_t head = 0; head < a.heads; ++head) {
        part(head, r);
        for (int32_t i = 0; i < some.count; ++i) some.rows[i] += bytes, some.later[i] += bytes;
      }
    }
  };
  for (int32_t row = a.first; row < a.end; row += ATTEND_ROWS, tile ^= 1) {
    in_order(k[tile], v, count, [&](int32_t head, int32_t r) {
      const float* q = a.q + head * a.groups * a.dim;
      float* scores = a.scores + head * a.groups * ATTEND_ROWS + r;
      by_groups(a.groups, [&](auto heads, int32_t group) {
        score_some<Type, heads.value>(q + group * a.dim, a.dim, some, scores + group * ATTEND_ROWS);
      });
    });
    for (int32_t head = 0; Type::SCALED && head < a.heads; ++head) {
      scale_rows(a.scores + head * a.groups * ATTEND_ROWS, a.groups, count, k[tile], a.scales + 4 * head);
    }
    for (int32_t g = 0; g < queries; ++g) {
      if (a.cap > 0.0f) cap(a.scores + g * ATTEND_ROWS, ATTEND_ROWS, a.cap);
      const float kept =
          weigh(a.scores + g * ATTEND_ROWS, row == a.first ? a.hidden : 0, count, a.most[g], a.sum[g]);
      if (kept != 1.0f) {
        for (int32_t d = 0; d < a.dim; ++d) a.out[g * wide + d] *= kept;
      }
    }
    for (int32_t head = 0; Type::SCALED && head < a.heads; ++head) {
      scale_rows(a.scores + head * a.groups * ATTEND_ROWS, a.groups, count, v, a.scales + 4 * head);
    }
    const uint8_t* values[ATTEND_ROWS];
    for (int32_t i = 0; i < count; ++i) values[i] = v[i];
    const int32_t after = a.end - row > ATTEND_ROWS ? locate(a, row + ATTEND_ROWS, k[tile ^ 1], v) : 0;
    in_order(values, k[tile ^ 1], after, [&](int32_t head, int32_t r) {
      const float* weights = a.scores + head * a.groups * ATTEND_ROWS + r;
      float* out = a.out + head * a.groups * wide;
      by_groups(a.groups, [&](auto heads, int32_t group) {
        mix_some<Type, heads.value>(weights + group * ATTEND_ROWS, some, a.dim, out + group * wide);
      });
    });
    count = after;
  }
}

// Calls part with the type of the numbers in the KV cache.
template <typename Part>
inline void by_type(int32_t type, const Part& part) {
  if (type == CT_F32) return part(F32{});
  if (type == CT_BF16) return part(BF16{});
  if (type == CT_KV_INT8) return part(Int8{});
  if (type == CT_KV_FP8) return part(Fp8{});
  part(F16{});
}

void attend(const Attend& given) {
  by_type(given.type, [&](auto type) { attend_rows<decltype(type)>(given); });
}

}  // namespace
}  // namespace chatterm

#include "attend_chunk.h"
#include "delta_net.h"
#include "filter.h"
#include "mamba2.h"
#include "sampling.h"

namespace chatterm {
namespace {

void combine(const float* parts, const float* most, const float* sum, const float* sinks, int32_t count,
             int32_t stride, int32_t heads, int32_t dim, float* out) {
  const int32_t row = padded(dim);
  for (int32_t h = 0; h < heads; ++h) {
    float top = most[h];
    for (int32_t i = 1; i < count; ++i) top = most[i * stride + h] > top ? most[i * stride + h] : top;
    if (sinks != nullptr && sinks[h] > top) top = sinks[h];
    float total = sinks == nullptr ? 0.0f : exponential(splat(sinks[h] - top))[0];
    for (int32_t i = 0; i < count; ++i) {
      const float weight = exponential(splat(most[i * stride + h] - top))[0];
      total += weight * sum[i * stride + h];
      const float* part = parts + (int64_t(i) * stride + h) * row;
      for (int32_t d = 0; d < dim; ++d) {
        out[h * dim + d] = (i ? out[h * dim + d] : 0.0f) + weight * part[d];
      }
    }
    const float factor = 1.0f / total;
    for (int32_t d = 0; d < dim; ++d) out[h * dim + d] *= factor;
  }
}

void add_filtered(const uint8_t* row, int32_t type, const float* filter, int32_t n, float* out) {
  by_type(type, [&](auto as) {
    for (int32_t i = 0; i < n; i += 8) {
      store(out + i, load(out + i) + load(filter + i) * decltype(as)::eight(row + i * as.BYTES));
    }
  });
}

void store_row(const float* x, int32_t heads, int32_t dim, int32_t type, uint8_t* out, uint8_t* scales) {
  by_type(type, [&](auto as) {
    if constexpr (as.SCALED) {
      store_bytes<decltype(as)>(x, heads, dim, out, scales);
    } else {
      int32_t i = 0;
      for (; i + 8 <= heads * dim; i += 8) as.put_eight(out + i * as.BYTES, load(x + i));
      for (; i < heads * dim; ++i) as.put(out + i * as.BYTES, x[i]);
    }
  });
}

#ifdef CT_LANES
constexpr bool INTERLEAVES = true;
#else
constexpr bool INTERLEAVES = false;
#endif

Product product_of(int32_t type, bool interleaved) {
#ifdef CT_LANES
  if (interleaved) return by_small_blocks(type, [](auto blocks) -> Product { return multiply_interleaved<blocks.value>; });
#else
  (void)interleaved;
#endif
  switch (type) {
    case CT_F32:
      return multiply_plain<F32>;
    case CT_F16:
      return multiply_plain<F16>;
    case CT_BF16:
#ifdef __AVX512BF16__
      return multiply_bf16;
#else
      return multiply_plain<BF16>;
#endif
    default:
      return by_blocks(type, [](auto blocks) -> Product { return multiply_rows<blocks.value>; });
  }
}

#ifndef CT_LANES
constexpr void (*unpack)(const ct_matrix&, int32_t, int32_t, Panel&) = nullptr;
constexpr void (*multiply_panel)(const Panel&, const Inputs&, float*, int32_t) = nullptr;
#endif

bool by_tiles(int32_t type, int32_t rows) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return rows <= 2 * TILE && (type == CT_Q4_K || type == CT_Q5_K);
#elif defined(CT_LANES)
  return rows <= 4 * TILE && (type == CT_Q4_K || type == CT_Q5_K);
#else
  (void)type, (void)rows;
  return true;
#endif
}

}  // namespace

#define CT_TEXT_(x) #x
#define CT_TEXT(x) CT_TEXT_(x)
extern const Kernels CT_KERNELS = {
    CT_TEXT(CT_NAME), INTERLEAVES, product_of, by_tiles, round,     unpack,  multiply_panel, norm,    rotate,
    gate,             open,        cap,         attend,     attend_chunk, combine, add_filtered,   filter,  walk_delta,
    walk_mamba,       store_row,   largest,     soften,
};

}  // namespace chatterm
