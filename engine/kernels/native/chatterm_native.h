// The interface of the library: plain C, so that Python reaches it through ctypes (engine/kernels/native/library.py
// mirrors every struct). Sizes are in numbers unless a name says bytes. Nothing here throws; failures show in the
// results.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// The type numbers of GGUF files.
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

// Types of a quantised KV cache, besides CT_F32, CT_BF16 and CT_F16.
enum ct_kv_type : int32_t { CT_KV_INT8 = 100, CT_KV_FP8 = 101 };

// How a matrix lies in memory: row after row in the caller's memory; in a file that the caller has mapped, whose pages
// may be given back to the system at any time; or as ct_interleave writes it.
enum ct_storage : int32_t { CT_ROWS = 0, CT_MAPPED = 1, CT_INTERLEAVED = 2 };

// [rows, columns], with row_bytes from row to row. It may have any address, is never written, and nothing past the last
// row is read.
struct ct_matrix {
  const uint8_t* data;
  int64_t row_bytes;
  int32_t type;
  int32_t rows;
  int32_t columns;
  int32_t storage;
};

enum ct_most : int32_t { CT_MOST_PARTS = 5 };

// Up to CT_MOST_PARTS matrices with the same input; their outputs lie side by side. bias is fp32 [all rows] or null.
struct ct_linear {
  ct_matrix parts[CT_MOST_PARTS];
  const float* bias;
  int32_t count;
  int32_t unused;
};

// Weight and bias are fp32. A null weight means no norm, a null bias no bias.
struct ct_norm {
  const float* weight;
  const float* bias;
  float eps;
  int32_t centred;  // LayerNorm, which subtracts the mean first; else RMSNorm
};

// The attention settings of one layer.
struct ct_attention {
  ct_norm head_norm;    // weight [q heads + own kv heads, head_dim], no bias
  ct_norm v_norm;       // of every v head: weight [head_dim], no bias
  const float* rotary;  // [positions, rotated]: half of it cos, half sin; null: heads are not rotated
  const float* sinks;   // [q heads]: a score per head that has no value; null: there are none
  int32_t together;     // whether one head_norm covers all q heads and another all k heads, instead of one per head
  int32_t later;        // whether heads are normed after the rotation; never with `together`
  int32_t rotated;      // how many of a head's numbers are rotated, its first ones
  int32_t interleaved;  // whether neighbours are rotated together, instead of the two halves
  int32_t window;       // rows that a row sees, including itself; 0: all preceding rows
  float scale;          // multiplies the scores
  float cap;            // scores become cap * tanh(score / cap); 0: unchanged
  float beta;           // queries are multiplied by 1 + beta * log(1 + position / original), rounding down; 0: unchanged
  int32_t original;
  int32_t q_heads;
  int32_t kv_heads;   // those that are attended to; own ones, unless `shares_kv`
  int32_t head_dim;
  int32_t shares_kv;  // whether `kept` are the rows of an earlier layer, and the first product has q alone
  int32_t v_is_k;     // whether v is k before its norm and rotation, and the first product has q and k alone
  int32_t gate;       // numbers for each q head at the end of the first product, 1 or head_dim, whose sigmoids multiply
                      // what the head has attended to; 0: none
  int32_t unused;
};

// out(c * conv(b * x)) for the projections b, c and x, of `size` channels each, side by side: each channel is the sum of
// the last `width` rows of b * x times its filter, the oldest row first; rows before the first of a sequence are zeros.
struct ct_convolution {
  const float* filters;  // [width, size]
  const float* bias;     // [size] or null
  int32_t width;         // 0: the layer has no convolution
  int32_t size;          // a multiple of 8
  int32_t type;          // of the rows that are kept: CT_F32, CT_BF16 or CT_F16
  int32_t unused;
};

enum ct_recurrence_kind : int32_t { CT_DELTA_NET = 0, CT_MAMBA2 = 1 };

// A recurrence. Of each row, the first product has all that the heads read, side by side. All but z is rounded to a row of
// the log, which is kept; q, k and v of the last `width` rows of the log go through a filter for each channel and SiLU.
// Each value head has a state S, zeros before the first row of a sequence.
//
// A gated delta net (Yang, Kautz and Hatamizadeh 2024) has q, k, v, z, b and a. q and k are divided by their lengths, q
// also by the root of key_dim. With beta = sigmoid(b), t = exp(decay * softplus(a + dt_bias)) and S [key_dim, value_dim]:
//
//   S = t * S + outer(k, beta * (v - k @ (t * S)))
//   y = q @ S
//
// The last product multiplies norm(y) * silu(z), with a norm of each head.
//
// Mamba-2 (Dao and Gu 2024) has z, v, k, q and dt, which are z, x, B, C and dt there, and its groups are key heads. With
// t = softplus(dt + dt_bias) within its limits and S [value_dim, key_dim]:
//
//   S = exp(t * decay) * S + t * outer(v, k)
//   y = S @ q + skip * v
//
// The last product multiplies norm(y * silu(z)) or norm(y) * silu(z), with a norm of the heads of each group.
struct ct_recurrence {
  float* states;         // [slots of ct_cache, value heads, the numbers of a head's state]
  const float* filters;  // [width, channels of q, k and v as they lie in the log], the oldest row first
  const float* bias;     // [channels], added by the filters, or null
  const float* decay;    // [value heads]
  const float* dt_bias;  // [value heads]
  const float* skip;     // [value heads]
  const float* factors;  // multiply the outputs of the first product, if they are not null
  ct_norm norm;          // weight [value_dim], for Mamba-2 [value heads * value_dim] or null
  int32_t kind;          // ct_recurrence_kind
  int32_t width;         // 0: the layer has no recurrence
  int32_t key_heads;
  int32_t value_heads;
  int32_t key_dim;  // a multiple of 8, as is value_dim
  int32_t value_dim;
  int32_t alternating;  // whether value head i reads key head i modulo their number; else neighbours read the same one
  int32_t norms_first;  // whether y is normed before it is multiplied by silu(z)
  int32_t type;         // of the log: CT_F32, CT_BF16 or CT_F16
  float least;          // limits of t
  float most;
  int32_t unused;
};

// Latent attention (DeepSeek-V2, 2024) without expanding the latents: a head's query is k_b(its first numbers), kv_rank
// numbers, followed by its last ones, rotated; all heads attend to the rows that are kept, norm(latent) and the rotated
// key, and what a head gets of their first kv_rank numbers is multiplied by v_b. The layer's first product has the
// queries, or what q_b(q_norm()) makes them of, and kv_rank + rope numbers for the row. Its attention has one KV head of
// that size, which is rotated from number kv_rank on.
struct ct_latent {
  ct_norm q_norm;  // q_b and the norm before it are zeros if the first product has the queries
  ct_norm kv_norm;
  ct_linear q_b;    // -> q heads * (nope + rope)
  ct_linear k_b;    // [q heads * kv_rank, nope]
  ct_linear v_b;    // [q heads * values, kv_rank]
  int32_t kv_rank;  // 0: the layer has no latents
  int32_t nope;     // how many numbers of a query come first and are not rotated
  int32_t rope;
  int32_t values;  // of each head
};

// What a layer keeps of each token: K and V [slots, kv_heads, head_dim] of the cache's type; or in place of k a row of
// latent attention, the input of a convolution or a row of a recurrence's log, [slots, size], and no v. `table` is the number of the block table that
// says which slots.
struct ct_kept {
  void* k;
  void* v;
  int64_t slots;
  int32_t table;
  int32_t unused;
};

enum ct_activation : int32_t { CT_SILU = 0, CT_GELU = 1, CT_GELU_TANH = 2, CT_RELU = 3, CT_XIELU = 4, CT_RELU2 = 5 };

// down(activation(gate) * up), with gate above up in one layer, or down(activation(up)) if not gated. The columns of
// down are the inner size. If gated, gate is first capped at `limit`, up is clamped to +-limit, and up_offset is added
// to up.
struct ct_feed {
  ct_linear gate_up;
  ct_linear down;
  int32_t activation;
  int32_t gated;
  float gain;   // if not 1, the activation is x * sigmoid(gain * x), whatever `activation` says
  float limit;  // 0: no limit
  float up_offset;
  float alpha_p;  // xIELU: x / 2 + alpha_p * x^2 above 0, and x / 2 + alpha_n * (exp(x) - 1 - x) below
  float alpha_n;
  int32_t unused;
};

// A mixture of experts. The router, of plain weights, has an output for each expert and, with shared_gate, one more:
// the logit of the shared expert's share, which otherwise is 1; the others are multiplied by router_scale. Experts are
// chosen from the best `chosen_groups` of `groups` groups of neighbours; a group is as good as its best `group_best`
// experts together. selection_bias and expert_scales are fp32 [count] or null; shared may be null.
struct ct_experts {
  ct_linear router;
  ct_norm router_norm;  // of the router's input
  ct_norm norm;         // of the input of the chosen experts
  ct_norm post_norm;    // of their sum
  ct_norm shared_norm;  // of the input of the shared expert
  ct_norm shared_post_norm;
  const float* selection_bias;
  const float* expert_scales;  // multiply the shares in the end
  const ct_feed* experts;
  const ct_feed* shared;
  int32_t count;
  int32_t chosen;
  int32_t sigmoid;  // each share is the sigmoid of its output; else the shares are the softmax of all
  int32_t renormalise;
  int32_t shared_gate;
  int32_t groups;
  int32_t chosen_groups;
  int32_t group_best;
  float router_scale;
  float scale;  // multiplies the shares, after `renormalise`
};

// What a layer adds to its result x: post_norm(feed(x)), where `feed` is gated and its up is the layer's own input, not a
// product of x; its gate_up is the gate alone. Zeros if the model has no such inputs.
struct ct_layer_input {
  ct_feed feed;
  ct_norm post_norm;
};

// x += residual_scale * post_norm(part(norm(x))) for both parts: attention, a convolution or a recurrence, then the
// feed-forward or, if there are any, the experts; `feed` is zeros then. `qkv` is the first product of the first part,
// `output` its last one. If they are parallel, both read x as the layer got it. Then comes the layer's own input, and
// x *= scalar.
//
// One of the parts may be missing: its products are zeros then. Of a layer `beside` the one before, whose only part is
// the first one, x is what that one got; the results of both are added to it in order.
struct ct_layer {
  ct_norm input_norm;
  ct_norm attention_post_norm;
  ct_norm mlp_norm;
  ct_norm mlp_post_norm;
  ct_attention attention;      // zeros if there is a convolution or a recurrence
  ct_latent latent;            // zeros if there is none
  ct_convolution convolution;  // zeros if there is none
  ct_recurrence recurrence;    // zeros if there is none
  ct_kept kept;
  ct_linear qkv;
  ct_linear output;
  ct_feed feed;
  const ct_experts* experts;  // or null
  ct_layer_input input;
  float residual_scale;
  float scalar;
  int32_t parallel;
  int32_t beside;
};

// The inputs of all layers, `size` numbers each: norm(projection(x)) + scale * embedding(token), where x is that of the
// first layer and the norm covers the numbers of one layer. Zeros if there are none.
struct ct_inputs {
  ct_matrix embedding;   // [vocabulary, layers * size]
  ct_linear projection;  // hidden -> layers * size
  ct_norm norm;
  float scale;
  int32_t size;
};

struct ct_model {
  const ct_layer* layers;
  ct_norm final_norm;
  ct_matrix embedding;
  ct_matrix learned;  // [positions, hidden], added to the embedding; its data is null if there is none
  ct_linear head;
  ct_inputs inputs;
  int32_t layer_count;
  int32_t hidden;
  int32_t positions;
  float embedding_scale;
  float logit_cap;  // logits become cap * tanh(logit / cap); 0: unchanged
  int32_t unused;
};

// K and V are of `type` (CT_F32, CT_BF16 or CT_F16); a block is block_size slots, and a sequence has `tables` block
// tables. All recurrences together have so many slots for `states`. If quantised (ct_kv_type), a slot holds the bytes of all heads, then fp32 [kv_heads], and begins at a multiple
// of 16 bytes; latents are never quantised.
struct ct_cache {
  int32_t type;
  int32_t block_size;
  int32_t tables;
  int32_t states;
};

struct ct_pool;
struct ct_decoder;
struct ct_multiplier;
struct ct_mixtures;

// The hash of the sources that the library was built from; a binding that expects another hash must not use it.
const char* ct_source_hash();

// Variants of the kernels, from the portable one to the widest: their number, their names, and whether this machine
// runs them. The last one that it runs is the best.
int32_t ct_variants();
const char* ct_variant_name(int32_t variant);
int32_t ct_variant_works(int32_t variant);

// Creates a pool of `threads` threads, including the caller of a step. Null if they cannot be started.
ct_pool* ct_pool_create(int32_t threads);
// Sets how many of the threads compute from now on, the caller included; the results are the same to the bit. Call it
// between two steps.
void ct_pool_working(ct_pool* pool, int32_t threads);
void ct_pool_destroy(ct_pool* pool);

// The memory behind the pointers of `model` and `cache` must outlive the decoder; the structs themselves are copied.
// Returns null, with the reason in `problem` (a static string), if the shapes do not fit together or memory is short.
ct_decoder* ct_decoder_create(const ct_model* model, const ct_cache* cache, ct_pool* pool, int32_t variant,
                              const char** problem);
void ct_decoder_destroy(ct_decoder* decoder);

// Computes `count` spans of a batch: writes K and V of their rows, and fp32 [wanted rows, vocabulary] to `logits`.
// Returns null, or what is wrong with the spans (a static string). One call at a time per pool.
//
// A span is `tokens` tokens of one sequence, each with a position, in its rows from `row` on; the logits of the last
// `wanted` rows are returned. It is given as the numbers blocks, row, tokens, wanted, source, since, saves, then
// table[tables][blocks], token[tokens], position[tokens], saved[saves], slot[saves]; the next span follows. Row r of the
// sequence lies in slot table[t][r / block_size] * block_size + r % block_size of the layers whose table is t. What no
// row of the span sees is not read there.
//
// Recurrences go on from the states in slot `source` (-1: zeros), which have seen `since` rows. The log has the rows from
// there to `row`, and those before that they read. After saved[i] rows, from `row` to the end of the span and ascending,
// their states are written to slot[i]. Without recurrences there are no saves, otherwise at least one.
//
// Inputs of products with quantised weights are rounded to int8 in groups of 32 numbers. A row's K, V and logits are
// the same to the bit however a sequence is split into spans, and whatever other rows are computed.
const char* ct_decoder_run(ct_decoder* decoder, const int32_t* spans, int32_t count, float* logits);

// Copies about `bytes` more of the weights in mapped files, with their rows interleaved: this layout is read faster and
// gives the same results to the bit. A matrix is read from its copy as soon as that is complete; the pages of its file
// are then given back. Returns how many bytes are left to copy, 0 if the variant has no kernels for them, -1 if memory
// is short: the rest stays mapped. Call it between two steps.
int64_t ct_decoder_interleave(ct_decoder* decoder, int64_t bytes);

// Products by themselves, `rows` rows at a time, of layers of up to `columns` columns. Null if memory is short.
ct_multiplier* ct_multiplier_create(ct_pool* pool, int32_t variant, int32_t columns, int32_t rows);
void ct_multiplier_destroy(ct_multiplier* multiplier);
// x fp32 [count, columns] -> out fp32 [count, rows of the layer]. The bits of a row do not depend on the other rows.
// Inputs of quantised weights are rounded to int8 in groups of 32 numbers. Returns false for a layer without kernels.
// One call at a time per pool.
int32_t ct_multiplier_run(ct_multiplier* multiplier, const ct_linear* linear, int32_t count, const float* x, float* out);

// Mixtures of experts by themselves, for layers whose other parts are computed elsewhere: routers, selection biases and
// shared experts are ignored. The memory behind the pointers of `layers` must outlive the result. Returns null, with
// the reason in `problem` (a static string), if the shapes do not fit together or memory is short. One call at a time
// per pool.
ct_mixtures* ct_mixtures_create(const ct_experts* layers, int32_t count, int32_t hidden, ct_pool* pool, int32_t variant,
                                const char** problem);
void ct_mixtures_destroy(ct_mixtures* mixtures);
// x [rows, hidden] of `type` (CT_F32, CT_BF16 or CT_F16), ids [rows, chosen] of the experts that each row uses, and
// their shares [rows, chosen] -> out fp32 [rows, hidden]: the sum of the experts' outputs times their shares.
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
// A row whose first id is -1 yields zeros. The bits of a row do not depend on the other rows. A row with an invalid id
// yields NaN, and so do all rows if memory is short. It may be called from any thread, including that of a GPU's queue.
void ct_mixtures_run(const ct_mixture_job* job);

// How a token is drawn. Tokens that the mask forbids have no chance. Positive logits of seen tokens are divided by
// `repetition`, others multiplied. Logits of generated tokens then lose `presence`, and `frequency` for each
// occurrence. Temperature 0 takes the first of the likeliest tokens. top_k 0, top_p 1 and min_p 0 exclude nothing.
// chance lies in [0, 1).
struct ct_sampling {
  double chance;
  float* room;               // [2 * count] of scratch
  const uint8_t* seen;       // [count]: 1 for a token of the prompt or the answer, else 0; null: no repetition penalty
  const int32_t* generated;  // [count]: how often a token is in the answer; null: neither of the other penalties
  const uint32_t* mask;      // [(count + 31) / 32]: tokens whose bits are set may be drawn; null: all may
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
// Returns the token that the chance falls on, for fp32 logits [count]. CT_NO_NUMBERS if the largest logit is not finite
// or any is NaN, CT_IMPOSSIBLE if memory is short or this machine does not run the variant.
int32_t ct_sample(int32_t variant, const float* logits, const ct_sampling* how);

// Whether this machine has what ct_crc32 needs.
int32_t ct_crc32_works();
// Returns the CRC-32 of `count` bytes, as zlib computes it.
uint32_t ct_crc32(const uint8_t* data, int64_t count);

// For tests and benchmarks: x fp32 [count, columns] -> out fp32 [count, rows], as a batch of that many rows computes
// it. Returns false for a matrix without kernels.
int32_t ct_products(ct_pool* pool, int32_t variant, const ct_matrix* matrix, int32_t count, const float* x, float* out);
// Writes a quantised matrix with its rows interleaved, in the same number of bytes. Returns false if that is
// impossible: the number of rows must be a multiple of 16.
int32_t ct_interleave(const ct_matrix* matrix, uint8_t* out);
// Expands one row to fp32 [columns].
int32_t ct_dequantize_row(const ct_matrix* matrix, int32_t row, float* out);

}  // extern "C"
#pragma GCC visibility pop
