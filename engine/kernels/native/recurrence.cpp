// Recurrences, in place of attention: see recurrence.h.
#include <cstring>

#include "group.h"

namespace chatterm {

float* Group::state_at(int32_t layer, int32_t slot, int32_t head) const {
  const ct_recurrence& how = layer_at(layer).recurrence;
  const RecurrenceShape shape(how);
  return slot < 0 ? space.zeros.as<float>() : how.states + (int64_t(slot) * shape.heads + head) * shape.state;
}

void Group::write_log(int32_t layer, int32_t r) const {
  const ct_recurrence& how = layer_at(layer).recurrence;
  const RecurrenceShape shape(how);
  const int32_t bytes = number_bytes(how.type), gates = shape.logged - shape.channels;
  uint8_t* row = static_cast<uint8_t*>(layer_at(layer).kept.k) + slot_at(layer, r) * shape.logged * bytes;
  const float* from = heads(layer, r);
  decoder.kernels.store(from, 1, shape.channels, how.type, row, nullptr);
  decoder.kernels.store(from + shape.channels + shape.out, 1, gates, how.type, row + shape.channels * bytes, nullptr);
}

void Group::read_log(int32_t layer, const Stretch& stretch, int32_t first, int32_t end, const LogPiece* pieces,
                     int32_t count, uint8_t* out) const {
  const ct_layer& own = layer_at(layer);
  const RecurrenceShape shape(own.recurrence);
  const int32_t type = own.recurrence.type, bytes = number_bytes(type);
  for (int32_t row = first; row < end; ++row) {
    const float* fresh = row < stretch.row ? nullptr : heads(layer, stretch.first + row - stretch.row);
    const uint8_t* kept = nullptr;
    if (row >= 0 && row < stretch.row) {
      kept = static_cast<const uint8_t*>(own.kept.k) + decoder.slot_at(own, stretch.tables, row) * shape.logged * bytes;
    }
    for (int32_t i = 0; i < count; out += pieces[i++].size * bytes) {
      const LogPiece& piece = pieces[i];
      if (fresh != nullptr) {
        decoder.kernels.store(fresh + piece.projected, 1, piece.size, type, out, nullptr);
      } else if (kept != nullptr) {
        std::memcpy(out, kept + piece.logged * bytes, size_t(piece.size) * size_t(bytes));
      } else {
        std::memset(out, 0, size_t(piece.size) * size_t(bytes));
      }
    }
  }
}

void Group::walk_head(int32_t layer, const Stretch& stretch, const StateMoves& moves, int32_t head, const float* next,
                      Bench& bench) const {
  const size_t bytes = size_t(RecurrenceShape(layer_at(layer).recurrence).state) * sizeof(float);
  const float* from = state_at(layer, moves.source, head);
  int32_t save = 0;
  auto save_at = [&](int32_t row) {
    for (; save < moves.saves && moves.saved[save] <= row; ++save) {
      float* to = state_at(layer, moves.slots[save], head);
      if (to != from) std::memcpy(to, from, bytes);
    }
  };
  DeltaWalk walk{};
  for (int32_t row = moves.since, stop = stretch.row + stretch.count; row < stop;) {
    if (row >= stretch.row) save_at(row);  // before the state is overwritten
    int32_t end = std::min(row + WALKED, stop);
    if (save < moves.saves) end = std::min(end, moves.saved[save]);
    walk.from = from;
    walk.to = row < moves.last ? state_at(layer, moves.target, head) : bench.walk.state.as<float>();
    walk.next = end == stop ? next : nullptr;
    walk_delta(layer, stretch, head, row, end, walk, bench);
    from = walk.to;
    row = end;
  }
  save_at(stretch.row + stretch.count);
}

Inputs Group::recur(int32_t layer, int32_t forms, Bench& bench) {
  const RecurrenceShape shape(layer_at(layer).recurrence);
  const int32_t walks = int32_t(space.stretches.size()) * shape.heads;
  claim(walks + count, [&](int32_t n) {
    if (n >= walks) return write_log(layer, n - walks);
    const int32_t later = n + decoder.pool.working();  // if all threads are as fast
    const float* next = nullptr;
    if (later < walks) next = state_at(layer, space.moves[size_t(later / shape.heads)].source, later % shape.heads);
    const size_t some = size_t(n / shape.heads);
    walk_head(layer, space.stretches[some], space.moves[some], n % shape.heads, next, bench);
  });
  decoder.pool.barrier();
  auto from = [&](int32_t r) { return mixed(layer, r); };
  return inputs(count, shape.out, forms, mixed(layer, 0), bench, from, [&](int32_t r, float*) { return from(r); });
}

}  // namespace chatterm
