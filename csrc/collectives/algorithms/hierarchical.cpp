#include "hierarchical.h"

#include "../reduce.h"
#include "../select.h"
#include "mesh.h"

namespace neuron::collectives::hierarchical {

Task<> all_reduce(Board& board, Party& across, uint64_t operation, const Call& call, int ranks) {
  const int n = board.size();
  const DataType dtype = call.signature.dtype;
  const size_t element = size_of(dtype), count = call.in[0].bytes / element;
  const bool average = call.signature.reduction == Reduction::avg;
  auto slices = [&](std::byte* base) {
    std::vector<Piece> out;
    for (int i = 0; i < n; i++) {
      const size_t begin = count * i / n, end = count * (i + 1) / n;
      out.push_back({base + begin * element, (end - begin) * element});
    }
    return out;
  };
  const std::vector<Piece> results = slices(call.out[0].data);
  const Piece mine = results[board.me()];
  const size_t most = (count + n - 1) / n * element;

  Call within = call;
  within.signature.kind = Kind::reduce_scatter;
  if (average) within.signature.reduction = Reduction::sum;
  within.in = slices(call.in[0].data);
  within.out = {mine};
  within.most = most;
  co_await mesh::run(board, operation, within);

  Call between = within;
  between.signature.kind = Kind::all_reduce;
  between.in = between.out = {mine};
  if (steps_count(mine.bytes, across.size()))
    co_await doubling::all_reduce(across, between);
  else
    co_await ring::all_reduce(across, between);
  if (average && mine.bytes) {
    const void* source = mine.data;
    reduce(mine.data, &source, 1, mine.bytes / element, dtype, Reduction::avg, ranks);
  }

  Call gather = call;
  gather.signature.kind = Kind::all_gather;
  gather.in = {mine};
  gather.out = results;
  gather.most = most;
  co_await mesh::run(board, operation, gather);
}

}  // namespace neuron::collectives::hierarchical
