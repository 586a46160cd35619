// The interface of the library: plain C, so that Python reaches it through ctypes (engine/kernels/native/library.py mirrors every
// struct). Sizes are in numbers unless a name says bytes. Nothing here throws; what can fail says so in its result.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// Numbers of the types in GGUF files.
enum ct_type : int32_t {
  CT_F32 = 0,
  CT_F16 = 1,
  CT_Q4_0 = 2,
  CT_Q4_1 = 3,
  CT_Q8_0 = 8,
  CT_Q4_K = 12,
  CT_Q5_K = 13,
  CT_Q6_K = 14,
  CT_BF16 = 30,
  CT_MXFP4 = 39,
  CT_TYPES = 40,
};

// Those of a quantised KV cache, beside CT_F32, CT_BF16 and CT_F16.
enum ct_kv_type : int32_t { CT_KV_INT8 = 100, CT_KV_FP8 = 101 };

// How a matrix lies in memory: row after row in memory of the caller, or in a file that the caller has mapped, whose pages
// may be given back to the system at any time; or as ct_interleave writes it.
enum ct_storage : int32_t { CT_ROWS = 0, CT_MAPPED = 1, CT_INTERLEAVED = 2 };

// [rows, columns], a row at every row_bytes. Any address, read-only, nothing is read past the last row.
struct ct_matrix {
  const uint8_t* data;
  int64_t row_bytes;
  int32_t type;
  int32_t rows;
  int32_t columns;
  int32_t storage;
};

// Up to three matrices over the same input; their outputs lie side by side. bias is fp32 [all rows] or null.
struct ct_linear {
  ct_matrix parts[3];
  const float* bias;
  int32_t count;
  int32_t unused;
};

// Weight and bias are fp32. The weight is null where nothing is normed, the bias where there is none.
struct ct_norm {
  const float* weight;
  const float* bias;
  float eps;
  int32_t centred;  // LayerNorm, which takes the mean off first; else RMSNorm
};

// What is a layer's own in its attention.
struct ct_attention {
  ct_norm head_norm;    // weight [q heads + kv heads, head_dim], no bias
  const float* rotary;  // [positions, rotated]: cos of the half, sin of the half; null: heads are not rotated
  const float* sinks;   // [q heads]: a score each that has no value; null: there are none
  int32_t together;     // whether head_norm is of all q heads together and of all k heads together, not of each
  int32_t rotated;      // numbers of a head, its first ones
  int32_t interleaved;  // whether neighbours are rotated together, and not the two halves
  int32_t window;       // rows that a row sees, itself among them; 0: all before it
  float scale;          // of the scores
  float cap;            // scores become cap * tanh(score / cap); 0: they stay
};

enum ct_activation : int32_t { CT_SILU = 0, CT_GELU = 1, CT_GELU_TANH = 2, CT_RELU = 3 };

// down(activation(gate) * up), gate above up in one layer, or down(activation(up)) where it is not gated. down tells the
// inner size. Where it is gated, gate is made to be at most `limit` before, up to lie between that and its negative, and
// up_offset is added to up.
struct ct_feed {
  ct_linear gate_up;
  ct_linear down;
  int32_t activation;
  int32_t gated;
  float gain;   // other than 1: the activation is x * sigmoid(gain * x), whatever else it is
  float limit;  // 0: none
  float up_offset;
  int32_t unused;
};

// A mixture of experts. The router, of plain weights, has an output for each expert and, with shared_gate, one more: the
// logit of the share of the shared expert, which else is 1. selection_bias is fp32 [count] or null, shared may be null.
struct ct_experts {
  ct_linear router;
  const float* selection_bias;
  const ct_feed* experts;
  const ct_feed* shared;
  int32_t count;
  int32_t chosen;
  int32_t sigmoid;  // of each output by itself; else shares are the softmax of all
  int32_t renormalise;
  int32_t shared_gate;
  int32_t unused;
};

// x += residual_scale * post_norm(part(norm(x))) for both parts: attention, then the feed-forward, or where there are
// experts these; then `feed` is zeros.
struct ct_layer {
  ct_norm input_norm;
  ct_norm attention_post_norm;
  ct_norm mlp_norm;
  ct_norm mlp_post_norm;
  ct_attention attention;
  ct_linear qkv;
  ct_linear output;
  ct_feed feed;
  const ct_experts* experts;  // or null
  float residual_scale;
  int32_t unused;
};

struct ct_model {
  const ct_layer* layers;
  ct_norm final_norm;
  ct_matrix embedding;
  ct_matrix learned;  // [positions, hidden], added to the embedding; its data is null where there is none
  ct_linear head;
  int32_t layer_count;
  int32_t hidden;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t positions;
  float embedding_scale;
  float logit_cap;  // logits become cap * tanh(logit / cap); 0: they stay
};

// K and V: [layers, slots, kv_heads, head_dim] of `type` (CT_F32, CT_BF16 or CT_F16) each; a block is block_size slots.
// Quantised (ct_kv_type), a slot has the bytes of all heads, then fp32 [kv_heads], and begins at a multiple of 16 bytes.
struct ct_cache {
  void* k;
  void* v;
  int64_t slots;
  int32_t type;
  int32_t block_size;
};

struct ct_pool;
struct ct_decoder;
struct ct_multiplier;
struct ct_mixtures;

// The sources that the library was made from; a binding that knows another hash must not use it.
const char* ct_source_hash();

// Variants of the kernels, from the portable one to the widest: their number, their names, and whether this machine
// runs them. The last one that it runs is the best.
int32_t ct_variants();
const char* ct_variant_name(int32_t variant);
int32_t ct_variant_works(int32_t variant);

// A pool of `threads` threads, the caller of a step being one of them. Null when they cannot be started.
ct_pool* ct_pool_create(int32_t threads);
// Whether the caller computes by itself from now on; the results are the same to the bit. Between two calls.
void ct_pool_alone(ct_pool* pool, int32_t alone);
void ct_pool_destroy(ct_pool* pool);

// What the pointers of `model` and `cache` point at must outlive the decoder; the structs themselves are copied.
// Null, with the reason in `problem` (a static string), when the shapes do not fit together or memory is short.
ct_decoder* ct_decoder_create(const ct_model* model, const ct_cache* cache, ct_pool* pool, int32_t variant,
                              const char** problem);
void ct_decoder_destroy(ct_decoder* decoder);

// `count` spans of a batch: writes K and V of their rows, and fp32 [wanted rows, vocabulary] to `logits`. Null, or what
// was wrong with the spans (a static string). One call at a time for a pool.
// A span is `tokens` tokens of one sequence in its rows from `row` on, with a position each, and of how many of its last
// rows the logits are wanted: the numbers blocks, row, tokens, wanted, then table[blocks], token[tokens],
// position[tokens], and then comes the next span. Row r of the sequence lies in slot table[r / block_size] * block_size +
// r % block_size.
// What products with quantised weights read is rounded to int8 by 32 numbers. A row's K, V and logits are the same to
// the bit however a sequence is split into spans, and whatever is beside it.
const char* ct_decoder_run(ct_decoder* decoder, const int32_t* spans, int32_t count, float* logits);

// Copies about `bytes` more of the weights that lie in mapped files, with their rows interleaved: they are read faster so,
// and their results are the same to the bit. A matrix is read from its copy as soon as that is complete; the pages of its
// file are given back then. Returns how many bytes are left to copy, 0 where the variant has no kernels for them, -1 when
// memory is short: what is left stays mapped. Between two steps.
int64_t ct_decoder_interleave(ct_decoder* decoder, int64_t bytes);

// Products by themselves, `rows` at a time, of layers of up to `columns` columns. Null when memory is short.
ct_multiplier* ct_multiplier_create(ct_pool* pool, int32_t variant, int32_t columns, int32_t rows);
void ct_multiplier_destroy(ct_multiplier* multiplier);
// x fp32 [count, columns] -> out fp32 [count, rows of the layer]: the bits of a row are the same whatever is beside it.
// What a quantised weight is multiplied with is rounded to int8 by 32 numbers. False for what cannot be multiplied; one
// call at a time for a pool.
int32_t ct_multiplier_run(ct_multiplier* multiplier, const ct_linear* linear, int32_t count, const float* x, float* out);

// Mixtures of experts by themselves, in layers whose other parts are computed elsewhere: routers, biases of their choice and
// shared experts are not looked at. What the pointers of `layers` point at must outlive them. Null, with the reason in
// `problem` (a static string), when the shapes do not fit together or memory is short. One call at a time for a pool.
ct_mixtures* ct_mixtures_create(const ct_experts* layers, int32_t count, int32_t hidden, ct_pool* pool, int32_t variant,
                                const char** problem);
void ct_mixtures_destroy(ct_mixtures* mixtures);
// x [rows, hidden] of `type` (CT_F32, CT_BF16 or CT_F16), the experts ids [rows, chosen] that each row takes, and their
// shares [rows, chosen] -> out fp32 [rows, hidden]: the sum of shares times what the experts give.
struct ct_mixture_job {
  ct_mixtures* mixtures;
  const uint8_t* x;
  const int32_t* ids;
  const float* shares;
  float* out;
  int32_t layer;
  int32_t rows;
  int32_t type;
  int32_t unused;
};
// A row whose first id is -1 gets zeros. The bits of a row are the same whatever is beside it. A row with an id that no
// expert has gets no numbers, and so do all when memory is short. Any thread may call it, that of a GPU's queue, too.
void ct_mixtures_run(const ct_mixture_job* job);

// How a token is drawn. What the mask forbids has no chance. The logits above 0 of what was seen are divided by `repetition`, those below multiplied; then those
// of what was generated lose `presence`, and `frequency` for each time. Temperature 0 takes the first of the likeliest;
// top_k 0, top_p 1 and min_p 0 leave everything. chance lies in [0, 1).
struct ct_sampling {
  double chance;
  float* room;               // [2 * count] of scratch
  const uint8_t* seen;       // [count]: 1 for a token of the prompt or the answer, else 0; null: no repetition penalty
  const int32_t* generated;  // [count]: how often a token is in the answer; null: neither of the other penalties
  const uint32_t* mask;      // [(count + 31) / 32]: a token may be drawn where its bit is set; null: all may
  float repetition;
  float presence;
  float frequency;
  float temperature;
  float top_p;
  float min_p;
  int32_t top_k;
  int32_t count;
};
enum ct_no_token : int32_t { CT_NO_NUMBERS = -1, CT_IMPOSSIBLE = -2 };
// The token that a chance falls on, of fp32 logits [count]. CT_NO_NUMBERS where the largest logit is not finite or one is
// no number, CT_IMPOSSIBLE when memory is short or this machine does not run the variant.
int32_t ct_sample(int32_t variant, const float* logits, const ct_sampling* how);

// For tests and benchmarks. x fp32 [count, columns] -> out fp32 [count, rows], as a batch of so many rows computes it;
// false for what cannot be multiplied.
int32_t ct_products(ct_pool* pool, int32_t variant, const ct_matrix* matrix, int32_t count, const float* x, float* out);
// A quantised matrix with its rows interleaved, to as many bytes; false where that cannot be: their number must be a
// multiple of 16.
int32_t ct_interleave(const ct_matrix* matrix, uint8_t* out);
// The numbers of one row, fp32 [columns].
int32_t ct_dequantize_row(const ct_matrix* matrix, int32_t row, float* out);

}  // extern "C"
#pragma GCC visibility pop
