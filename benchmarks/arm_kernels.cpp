// Multiplies a weight several times, for arm_kernels.py: VARIANT TYPE BLOCK BYTES ROWS COLUMNS COUNT REPEATS. Blocks of
// BLOCK numbers have BYTES bytes; COUNT rows of inputs are multiplied. A ninth argument interleaves the rows.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "chatterm_native.h"

int main(int given, char** words) {
  if (given < 9) return 1;
  int32_t variant = -1, numbers[7];
  for (int32_t i = 0; i < ct_variants(); ++i) variant = std::strcmp(words[1], ct_variant_name(i)) == 0 ? i : variant;
  for (int i = 0; i < 7; ++i) numbers[i] = std::atoi(words[i + 2]);
  const auto [type, block, bytes, rows, columns, count, repeats] = numbers;
  const int64_t row_bytes = int64_t(columns) / block * bytes;
  std::vector<uint8_t> data(size_t(rows * row_bytes), 1), copy(data.size());
  std::vector<float> x(size_t(count) * size_t(columns), 1.0f), out(size_t(count) * size_t(rows));
  ct_matrix matrix{data.data(), row_bytes, type, rows, columns, CT_ROWS};
  if (given > 9) {
    if (!ct_interleave(&matrix, copy.data())) return 2;
    matrix.data = copy.data();
    matrix.storage = CT_INTERLEAVED;
  }
  ct_pool* pool = ct_pool_create(1);
  for (int i = 0; i < repeats; ++i) {
    if (!ct_products(pool, variant, &matrix, count, x.data(), out.data())) return 3;
  }
  ct_pool_destroy(pool);
}
