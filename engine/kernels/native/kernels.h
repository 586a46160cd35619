// The functions of a kernel variant, and the inputs of a product. Every variant is compiled from kernels_impl.h.
#pragma once

#include "chatterm_native.h"

namespace chatterm {

constexpr int32_t TILE = 8;  // rows of activations that lie side by side

// Rows of activations as products read them: unchanged for plain weights, or rounded to bf16 for those in bf16 if the
// variant has instructions for that; for quantised weights rounded to int8 with one scale per 32 columns, x = scale *
// q. Up to TILE rows lie `wide` side by side, more rows in tiles of TILE.
struct Inputs {
  const float* x;    // [rows][columns]
  uint16_t* halves;  // [rows][columns] in bf16
  uint32_t* q;     // [tiles][columns / 4][wide], four q of -127..127 each
  float* scale;    // [tiles][columns / 32][wide]
  float* low;      // [tiles][columns / 32][wide]: scale * sum of the q of 32 columns
  float* low_16;   // [tiles][columns / 16][wide]: of 16 columns
  int32_t rows;
  int32_t columns;
  int32_t wide;  // 1, 2, 4 or TILE
};

// How many of `rows` rows of inputs lie side by side.
constexpr int32_t wide_of(int32_t rows) { return rows < 3 ? rows : rows < 5 ? 4 : TILE; }

// Weights in bf16 have both FORM_FLOAT and FORM_HALVES.
enum Form : int32_t { FORM_FLOAT = 1, FORM_INT8 = 2, FORM_HALVES = 4 };

// Rows of a matrix to multiply, and the first byte that the thread reads after them. Memory is prefetched AHEAD bytes
// before it is read, across the end of the rows, because hardware does not foresee where a thread reads next.
struct Rows {
  const uint8_t* data;
  size_t row_bytes;
  int32_t count;
  int32_t columns;
  const uint8_t* next;
};

constexpr size_t AHEAD = 16384;

// out[r * stride + i] = row r of the inputs times row i, in one order of sums whatever other rows there are. Quantised
// rows take at most TILE rows of inputs.
using Product = void (*)(const Rows& rows, const Inputs& x, float* out, int32_t stride);

constexpr int32_t PANEL = 16;  // rows of a weight that are multiplied side by side

// Up to 16 rows of a weight, unpacked. A group is 32 columns, in Q6_K 16.
struct Panel {
  uint32_t* digits;  // [columns / 4][PANEL], four digits each
  float* scale;      // [groups][PANEL]
  float* low;        // [groups][PANEL]
  int32_t type;
  int32_t columns;
};

// Rows first..end - 1 of a sequence in the KV cache of a layer, from some KV head on.
struct CachedRows {
  const uint8_t* k;
  const uint8_t* v;
  const int32_t* table;
  int64_t stride;  // bytes from slot to slot
  int64_t scales;  // for quantised rows: bytes from the first number of the first head to its scale
  int32_t type;
  int32_t block_size;
  int32_t first;
  int32_t end;
  int32_t hidden;  // rows from `first` on that lie before the window: they are neither read nor seen
};

// Some adjacent KV heads, with `groups` query heads each.
struct Attend : CachedRows {
  const float* q;  // [heads, groups, dim], scaled
  int32_t heads;
  int32_t groups;
  int32_t dim;
  float cap;       // of scores; 0: none
  float* scores;  // [heads, groups, ATTEND_ROWS] of scratch
  float* out;     // [heads, groups, padded(dim)], not divided by the sum
  float* most;    // [heads, groups]: the largest score
  float* sum;     // [heads, groups]: sum of exp(score - most)
};

constexpr int32_t ATTEND_ROWS = 64;  // rows that are scored before their values are added up
// A query's sums are kept separately for this many rows, wherever a prompt was split and however many threads there
// are.
constexpr int32_t PART_ROWS = 128;
// All heads of this many rows are read before the next rows: they are adjacent, and memory is read fastest in order.
constexpr int32_t TOGETHER_ROWS = 8;

// One KV head: the queries of the newest rows, of which `newest` is the last. Each query sees rows up to its own; with
// a window, only the last of them.
struct AttendChunk : CachedRows {
  const float* q;  // [queries, dim], scaled; `heads` of them per row
  int32_t queries;
  int32_t heads;
  int32_t dim;
  int32_t v_dim;   // of V
  int32_t newest;
  int32_t window;  // 0: none
  float cap;
  float* keys;    // scratch: [ATTEND_ROWS, dim]
  float* values;  // scratch: [ATTEND_ROWS, padded(v_dim)]
  float* scores;  // scratch: [queries, ATTEND_ROWS]
  float* out;     // [queries, padded(v_dim)], not divided by the sum
  float* most;    // [queries]: the largest score
  float* sum;     // [queries]: sum of exp(score - most)
};

// Rows that go through a filter for each channel, and SiLU.
struct Filtering {
  const uint8_t* rows;   // of `type`, the oldest first: width - 1 rows, then `count` whose outputs are wanted
  int64_t row_bytes;
  const float* filters;  // [width][channels of the layer]
  const float* bias;     // of these rows' channels, or null
  int64_t channels;
  float* out;            // [count][stride]
  int64_t stride;
  int32_t type;
  int32_t width;
  int32_t count;
  int32_t numbers;       // channels of these rows, a multiple of 8
};

// Rows that a value head of a recurrence walks over.
struct HeadWalk {
  float* rows;         // [count][2 * key_dim + value_dim]: q, k and v; those of delta nets become unit vectors here
  const float* decay;  // [count]: what the state is multiplied by
  const float* share;  // [count]: beta, or t
  const float* from;   // the state before them
  float* to;           // the state after them; may be `from`
  float* y;            // [count][value_dim]
  float* part;         // scratch [key_dim][WALKED_TOGETHER]
  const float* next;   // the state that is read after this one, to be prefetched; or null
  float skip;
  int32_t count;
  int32_t key_dim;
  int32_t value_dim;
};

constexpr int32_t WALKED_TOGETHER = 32;  // the most numbers of v whose part of the state is walked together

// The length of a row of `numbers` numbers in whole vectors.
constexpr int32_t padded(int32_t numbers) { return (numbers + 15) / 16 * 16; }

// Logits whose weights are summed together before one of them is drawn.
constexpr int32_t PIECE_OF_LOGITS = 512;

struct Kernels {
  const char* name;
  bool interleaves;  // whether it has kernels for interleaved rows
  Product (*product_of)(int32_t type, bool interleaved);  // for a type that has kernels
  // Whether so many rows of inputs, more than TILE, are multiplied TILE at a time with the rows of a weight as stored,
  // because that was faster than unpacking them.
  bool (*by_tiles)(int32_t type, int32_t rows);
  // Rounds x [count] to columns first..first + count of row r (multiples of 32 for int8), in those of `forms` that this
  // variant reads.
  void (*round)(const float* x, int32_t forms, int32_t r, int32_t first, int32_t count, const Inputs& out);
  // Unpacks rows first..first + count of a quantised weight. Null, as is the next, if all is multiplied by tiles.
  void (*unpack)(const ct_matrix& matrix, int32_t first, int32_t count, Panel& out);
  // out[r * stride + i] = row r of more than TILE inputs times row i of the panel, for all PANEL rows, with r rounded
  // up to TILE.
  void (*multiply_panel)(const Panel& panel, const Inputs& x, float* out, int32_t stride);
  // `out` may be x.
  void (*norm)(const float* x, const ct_norm& norm, int32_t n, float* out);
  // Rotates the first `rotated` numbers of a head.
  void (*rotate)(float* head, const float* cos_sin, int32_t rotated, bool interleaved);
  // The operation between gate_up and down; `up` is null if `feed` is not gated. `out` may be one of them.
  void (*gate)(const ct_feed& feed, const float* gate, const float* up, int32_t n, float* out);
  // out[h][i] = x[h][i] * sigmoid(gates[h][i]), or of gates[h] if a gate is one number; `out` may be x.
  void (*open)(const float* gates, int32_t gate, int32_t dim, int32_t heads, const float* x, float* out);
  // x = most * tanh(x / most)
  void (*cap)(float* x, int32_t n, float most);
  void (*attend)(const Attend& given);
  // Prefetches the first of `later`, which the thread is likely to attend to next; it may be null.
  void (*attend_chunk)(const AttendChunk& given, const CachedRows* later);
  // Combines parts of the context with their `most` and `sum`, part i of head h at [i * stride + h] -> out [heads,
  // dim]; sinks [heads] or null.
  void (*combine)(const float* parts, const float* most, const float* sum, const float* sinks, int32_t count,
                  int32_t stride, int32_t heads, int32_t dim, float* out);
  // out += filter * row, for n numbers of `type` in the row, a multiple of 8.
  void (*add_filtered)(const uint8_t* row, int32_t type, const float* filter, int32_t n, float* out);
  void (*filter)(const Filtering& given);
  void (*walk_delta)(const HeadWalk& given);
  void (*walk_mamba)(const HeadWalk& given);
  // Writes heads [heads, dim] to `out`, and their scales if the type has them.
  void (*store)(const float* x, int32_t heads, int32_t dim, int32_t type, uint8_t* out, uint8_t* scales);
  // The largest of n numbers; NaN if one of them is NaN.
  float (*largest)(const float* x, int32_t n);
  // out = exp((x - most) / temperature), 0 if that is below e^-87; for every PIECE_OF_LOGITS also their sum and the
  // largest.
  void (*soften)(const float* x, int32_t n, float most, float temperature, float* out, double* sums, float* peaks);
};

// The forms of the inputs that a type is multiplied with; 0 for a type without kernels.
int32_t form_of(int32_t type);
void dequantize_row(int32_t type, const uint8_t* row, int32_t columns, float* out);
// Whether rows, columns and row_bytes of a matrix are consistent.
bool is_sound(const ct_matrix& matrix);

// Returns the kernels of a variant; null if this machine does not run it.
const Kernels* kernels_of(int32_t variant);

extern const Kernels portable_kernels;
#ifdef CT_HAVE_AVX2
extern const Kernels avx2_kernels;
#endif
#ifdef CT_HAVE_AVXVNNI
extern const Kernels avxvnni_kernels;
#endif
#ifdef CT_HAVE_AVX512
extern const Kernels avx512_kernels;
#endif
#ifdef CT_HAVE_AVX512BF16
extern const Kernels avx512bf16_kernels;
#endif
#ifdef CT_HAVE_DOTPROD
extern const Kernels dotprod_kernels;
#endif
#ifdef CT_HAVE_I8MM
extern const Kernels i8mm_kernels;
#endif

}  // namespace chatterm
