// Recurrences (ct_recurrence): sizes, what the spans of a step do with states, and memory for the rows of a head.
//
// A head of a stretch is walked through by one thread: from its state over rows of the log to the stretch, and on over
// the stretch's own rows. A row has the same bits whether it is walked over for the first time or again, because both
// read numbers that are rounded to the log's type.
#pragma once

#include <algorithm>
#include <cmath>

#include "scratch.h"

namespace chatterm {

constexpr int32_t WALKED = 32;  // rows that are filtered before they are walked over

// What some rows of a sequence do with states, as told to `ct_decoder_run`. States on the way to the last save are in the
// slot of that; those after it are lost.
struct StateMoves {
  int32_t source;
  int32_t since;
  int32_t target;  // the slot of the last save
  int32_t last;    // its row
  int32_t saves;
  const int32_t* saved;
  const int32_t* slots;
};

// Numbers of a row of the log that a head reads.
struct LogPiece {
  int32_t first;
  int32_t size;
};

// The sizes of a layer's recurrence, all zeros if it has none.
struct RecurrenceShape {
  int32_t heads, state;          // the numbers of a head's state
  int32_t keys, channels, out;   // of all heads: k, all that is filtered, and y or z
  int32_t gates, logged;         // of a head, and the numbers in a row of the log
  int32_t z;                     // where z lies among the outputs of the first product; the log has all others
  int32_t row;                   // the filtered numbers that a head reads

  explicit RecurrenceShape(const ct_recurrence& how)
      : heads(how.value_heads),
        state(how.key_dim * how.value_dim),
        keys(how.key_heads * how.key_dim),
        channels(2 * keys + how.value_heads * how.value_dim),
        out(how.value_heads * how.value_dim),
        gates(how.kind == CT_MAMBA2 ? 1 : 2),
        logged(channels + gates * heads),
        z(how.kind == CT_MAMBA2 ? 0 : channels),
        row(2 * how.key_dim + how.value_dim) {}
  int32_t projected() const { return logged + out; }
  // Where the first product has number `at` of the log.
  int32_t from_log(int32_t at) const { return at < z ? at : at + out; }
};

constexpr int32_t MOST_GATES = 2;

// What a head reads of a row of the log: q, k and v, then its gates.
struct HeadPieces {
  LogPiece pieces[3 + MOST_GATES];
  int32_t count;

  HeadPieces(const ct_recurrence& how, int32_t head) : count(0) {
    const RecurrenceShape shape(how);
    const int32_t key_head = how.alternating ? head % how.key_heads : head / (how.value_heads / how.key_heads);
    const int32_t key = key_head * how.key_dim, value = head * how.value_dim;
    const bool values_first = how.kind == CT_MAMBA2;
    pieces[count++] = {values_first ? shape.out + shape.keys + key : key, how.key_dim};
    pieces[count++] = {values_first ? shape.out + key : shape.keys + key, how.key_dim};
    pieces[count++] = {values_first ? value : 2 * shape.keys + value, how.value_dim};
    for (int32_t i = 0; i < shape.gates; ++i) pieces[count++] = {shape.channels + i * shape.heads + head, 1};
  }
};

// What a row does with the state of a head: see HeadWalk.
struct RowGates {
  float decay;
  float share;
};

// Make them of the gates of a head in the log.
RowGates gates_of_delta_net(const ct_recurrence& how, int32_t head, const float* logged);
RowGates gates_of_mamba(const ct_recurrence& how, int32_t head, const float* logged);

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The sizes that memory for walking depends on: the largest of all layers.
struct WalkSizes {
  int32_t row = 0, tail = 0, keys = 0, values = 0, state = 0;

  void grow(const ct_recurrence& how) {
    const RecurrenceShape shape(how);
    row = std::max(row, shape.row);
    tail = std::max(tail, how.width - 1);
    keys = std::max(keys, how.key_dim);
    values = std::max(values, how.value_dim);
    state = std::max(state, shape.state);
  }
};

// Memory of one thread for up to WALKED rows of a head.
struct WalkRoom {
  Buffer log;    // the rows as logged, with those that the first ones read: numbers to be filtered, then gates
  Buffer rows;   // fp32, filtered
  Buffer y;      // fp32
  Buffer gates;  // fp32 [2][WALKED]
  Buffer part;   // fp32: a part of a state
  Buffer state;  // fp32: a state that is not saved

  explicit WalkRoom(const WalkSizes& sizes)
      : log(room<float>(size_t(sizes.tail + count(sizes)) * size_t(sizes.row + MOST_GATES))),
        rows(room<float>(size_t(count(sizes)) * size_t(sizes.row))),
        y(room<float>(size_t(count(sizes)) * size_t(sizes.values))),
        gates(room<float>(2 * size_t(count(sizes)))),
        part(room<float>(size_t(sizes.keys) * WALKED_TOGETHER)),
        state(room<float>(size_t(sizes.state))) {}

 private:
  static int32_t count(const WalkSizes& sizes) { return sizes.state > 0 ? WALKED : 0; }
};

}  // namespace chatterm
