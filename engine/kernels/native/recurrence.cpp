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
  const int32_t bytes = number_bytes(how.type);
  uint8_t* row = static_cast<uint8_t*>(layer_at(layer).kept.k) + slot_at(layer, r) * shape.logged * bytes;
  const float* from = heads(layer, r);
  decoder.kernels.store(from, 1, shape.z, how.type, row, nullptr);
  decoder.kernels.store(from + shape.z + shape.out, 1, shape.logged - shape.z, how.type, row + shape.z * bytes, nullptr);
}

void Group::read_log(int32_t layer, const Stretch& stretch, int32_t first, int32_t end, const HeadPieces& head,
                     uint8_t* out) const {
  const ct_layer& own = layer_at(layer);
  const RecurrenceShape shape(own.recurrence);
  const int32_t type = own.recurrence.type, bytes = number_bytes(type);
  for (int32_t row = first; row < end; ++row) {
    const float* fresh = row < stretch.row ? nullptr : heads(layer, stretch.first + row - stretch.row);
    const uint8_t* kept = nullptr;
    if (row >= 0 && row < stretch.row) {
      kept = static_cast<const uint8_t*>(own.kept.k) + decoder.slot_at(own, stretch.tables, row) * shape.logged * bytes;
    }
    for (int32_t i = 0; i < head.count; out += head.pieces[i++].size * bytes) {
      const LogPiece& piece = head.pieces[i];
      if (fresh != nullptr) {
        decoder.kernels.store(fresh + shape.from_log(piece.first), 1, piece.size, type, out, nullptr);
      } else if (kept != nullptr) {
        std::memcpy(out, kept + piece.first * bytes, size_t(piece.size) * size_t(bytes));
      } else {
        std::memset(out, 0, size_t(piece.size) * size_t(bytes));
      }
    }
  }
}

void Group::walk_rows(int32_t layer, const Stretch& stretch, int32_t head, int32_t first, int32_t end, HeadWalk& walk,
                      const WalkRoom& room) const {
  const ct_recurrence& how = layer_at(layer).recurrence;
  const RecurrenceShape shape(how);
  const HeadPieces own(how, head);
  const int32_t tail = how.width - 1, bytes = number_bytes(how.type), count = end - first;
  const bool is_mamba = how.kind == CT_MAMBA2;
  uint8_t* log = room.log.as<uint8_t>();
  const int64_t row_bytes = int64_t(shape.row + shape.gates) * bytes;
  read_log(layer, stretch, first - tail, end, own, log);
  float *rows = room.rows.as<float>(), *decay = room.gates.as<float>(), *share = decay + WALKED;
  const LogPiece* piece = own.pieces;
  for (int32_t at = 0; at < shape.row; at += piece++->size) {
    const float* bias = how.bias == nullptr ? nullptr : how.bias + piece->first;
    decoder.kernels.filter({log + at * bytes, row_bytes, how.filters + piece->first, bias, shape.channels, rows + at,
                            shape.row, how.type, how.width, count, piece->size});
  }
  for (int32_t i = 0; i < count; ++i) {
    float given[MOST_GATES];
    dequantize_row(how.type, log + (tail + i) * row_bytes + shape.row * bytes, shape.gates, given);
    const RowGates gates = is_mamba ? gates_of_mamba(how, head, given) : gates_of_delta_net(how, head, given);
    decay[i] = gates.decay;
    share[i] = gates.share;
  }
  walk.rows = rows;
  walk.decay = decay;
  walk.share = share;
  walk.y = room.y.as<float>();
  walk.part = room.part.as<float>();
  walk.skip = is_mamba ? how.skip[head] : 0.0f;
  walk.count = count;
  walk.key_dim = how.key_dim;
  walk.value_dim = how.value_dim;
  if (is_mamba) return decoder.kernels.walk_mamba(walk);
  decoder.kernels.walk_delta(walk);
}

void Group::walk_head(int32_t layer, const Stretch& stretch, const StateMoves& moves, int32_t head, const float* next,
                      Bench& bench) const {
  const ct_recurrence& how = layer_at(layer).recurrence;
  const size_t bytes = size_t(RecurrenceShape(how).state) * sizeof(float);
  const float* from = state_at(layer, moves.source, head);
  int32_t save = 0;
  auto save_at = [&](int32_t row) {
    for (; save < moves.saves && moves.saved[save] <= row; ++save) {
      float* to = state_at(layer, moves.slots[save], head);
      if (to != from) std::memcpy(to, from, bytes);
    }
  };
  HeadWalk walk{};
  for (int32_t row = moves.since, stop = stretch.row + stretch.count; row < stop;) {
    if (row >= stretch.row) save_at(row);  // before the state is overwritten
    int32_t end = std::min(row + WALKED, stop);
    if (save < moves.saves) end = std::min(end, moves.saved[save]);
    walk.from = from;
    walk.to = row < moves.last ? state_at(layer, moves.target, head) : bench.walk.state.as<float>();
    walk.next = end == stop ? next : nullptr;
    walk_rows(layer, stretch, head, row, end, walk, bench.walk);
    for (int32_t own = std::max(row, stretch.row); own < end; ++own) {
      const int32_t r = stretch.first + own - stretch.row;
      const float* y = walk.y + (own - row) * how.value_dim;
      if (how.kind == CT_DELTA_NET) {
        finish_head(layer, head, r, y);
      } else {
        std::memcpy(mixed(layer, r) + head * how.value_dim, y, size_t(how.value_dim) * sizeof(float));
      }
    }
    from = walk.to;
    row = end;
  }
  save_at(stretch.row + stretch.count);
}

Inputs Group::recur(int32_t layer, int32_t forms, Bench& bench) {
  const ct_recurrence& how = layer_at(layer).recurrence;
  const RecurrenceShape shape(how);
  auto projected = [&](int32_t r) { return heads(layer, r); };
  if (how.factors != nullptr) {
    claim_rows(count, shape.projected(), projected, [&](int32_t r) {
      for (int32_t i = 0; i < shape.projected(); ++i) projected(r)[i] *= how.factors[i];
    });
    decoder.pool.barrier();
  }
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
  return inputs(count, shape.out, forms, mixed(layer, 0), bench, from, [&](int32_t r, float* spare) {
    if (how.kind == CT_DELTA_NET) return from(r);
    gate_heads(layer, r, spare);
    return spare;
  });
}

}  // namespace chatterm
