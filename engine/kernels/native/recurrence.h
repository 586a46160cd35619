// Recurrences (ct_recurrence): sizes, what the spans of a step do with states, and memory for the rows of a head.
//
// A head of a stretch is walked through by one thread: from its state over rows of the log to the stretch, and on over
// the stretch's own rows. A row has the same bits whether it is walked over for the first time or again, because both
// read numbers that are rounded to the log's type.
#pragma once

#include <algorithm>

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

// Numbers of a row of the log that a head reads, and where they are among the outputs of the first product.
struct LogPiece {
  int32_t projected;
  int32_t logged;
  int32_t size;
};

// The sizes of a layer's recurrence, all zeros if it has none.
struct RecurrenceShape {
  int32_t heads, state;          // the numbers of a head's state
  int32_t channels, out, logged;  // of all heads: those that are filtered, y or z, and a row of the log
  int32_t row;                   // the filtered numbers that a head reads

  explicit RecurrenceShape(const ct_recurrence& how)
      : heads(how.value_heads),
        state(how.key_dim * how.value_dim),
        channels(2 * how.key_heads * how.key_dim + how.value_heads * how.value_dim),
        out(how.value_heads * how.value_dim),
        logged(channels + 2 * heads),
        row(2 * how.key_dim + how.value_dim) {}
  int32_t projected() const { return logged + out; }
};

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
  Buffer log;      // the rows as logged, with those that the first ones read: filtered numbers, then two gates
  Buffer rows;     // fp32, filtered
  Buffer y;        // fp32
  Buffer gates;    // fp32 [2][WALKED]
  Buffer columns;  // fp32: some columns of a state
  Buffer state;    // fp32: a state that is not saved

  explicit WalkRoom(const WalkSizes& sizes)
      : log(room<float>(size_t(sizes.tail + count(sizes)) * size_t(sizes.row + 2))),
        rows(room<float>(size_t(count(sizes)) * size_t(sizes.row))),
        y(room<float>(size_t(count(sizes)) * size_t(sizes.values))),
        gates(room<float>(2 * size_t(count(sizes)))),
        columns(room<float>(size_t(sizes.keys) * WALKED_COLUMNS)),
        state(room<float>(size_t(sizes.state))) {}

 private:
  static int32_t count(const WalkSizes& sizes) { return sizes.state > 0 ? WALKED : 0; }
};

}  // namespace chatterm
