// A mixture of experts: which experts the rows of a step use, and where the numbers of these rows lie.
//
// The work of an expert is a visit: the rows that chose it, side by side. All rows visit the shared expert, which comes
// last. The outputs of visits are added to a row in the order of the experts, whatever other rows there are.
//
//   route    norm, router, choice           x -> choices
//   gather   norm, rounding, rows by visit  normed -> gathered
//   gate_up  products, activation, rounding gathered -> gated
//   down     products, weighted sum         gated -> x
//
// A barrier follows each part. A single row is not gathered, and every thread chooses its experts for itself. If a norm
// follows, the sums go to `added` and are normed there. If the shared expert or the others have such a norm of their own,
// the results of the shared one are kept apart until then.
#pragma once

#include <utility>
#include <vector>

#include "scratch.h"

namespace chatterm {

// The sizes that memory depends on: the largest among the layers with experts.
struct MixtureSizes {
  int32_t experts = 0;  // including the shared one
  int32_t taken = 0;    // experts per row
  int32_t outputs = 0;  // of the router
  int32_t inner = 0;    // numbers between gate_up and down

  explicit MixtureSizes(const ct_model& model);
  // Places for rows in visits, if `rows` rows are computed together.
  int32_t places(int32_t rows) const;
};

struct Choice {
  int32_t expert;
  float share;
};

struct Visit {
  const ct_feed* expert;
  int32_t size;   // inner numbers per row
  int32_t rows;
  int32_t place;  // of its first row
  size_t inner;   // where its inner numbers begin
  int32_t first;  // its first inner output, numbered through all visits
};

// Adjacent rows of a visit.
struct Gathering {
  int32_t visit;
  int32_t first;
  int32_t count;
};

// The visits of a layer; each thread works them out for itself.
struct Visits {
  std::vector<Choice> own;  // of a single row
  std::vector<Visit> all;
  std::vector<Gathering> gatherings;
  std::vector<int32_t> row;  // [places]
  std::vector<float> share;  // [places]
  std::vector<int32_t> counts;
  std::vector<float> scores, ranks, best;
  std::vector<std::pair<float, int32_t>> groups;  // how good each is

  Visits(const MixtureSizes& sizes, int32_t rows);
  // Chooses the experts of a row from the outputs of the router.
  void choose(const ct_experts& layer, const float* outputs, Choice* out);
  // Takes the experts outside of the best groups out of the ranks.
  void leave_groups(const ct_experts& layer);
  // Arranges all visits of `rows` rows from the choices of each.
  void arrange(const ct_experts& layer, const Choice* taken, int32_t rows);
  int32_t outputs() const { return all.back().first + all.back().size; }
};

// Memory for the mixtures of a step of up to `rows` rows.
struct MixtureRoom {
  InputsRoom gathered, gated;
  Buffer plain, inner;  // fp32 [places][...], for plain weights
  Buffer outputs;       // fp32 [rows][outputs of the router]
  std::vector<Choice> taken;

  MixtureRoom(const MixtureSizes& sizes, int32_t hidden, int32_t rows, bool has_plain);
};

// Whether the results of the chosen experts, or of the shared one, are normed before they are added up.
inline bool has_norms_after(const ct_experts& layer) {
  return layer.post_norm.weight != nullptr || layer.shared_post_norm.weight != nullptr;
}

inline int32_t taken_by_a_row(const ct_experts& layer) { return layer.chosen + (layer.shared != nullptr); }

// The forms of the activations that the layer's experts read.
int32_t forms_of(const ct_experts& layer);

}  // namespace chatterm
