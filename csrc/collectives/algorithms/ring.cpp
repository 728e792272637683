// Ring: the data goes around in n pieces. In n-1 steps each rank receives a partial sum of one piece from its left,
// adds its own and passes it on; in n-1 more the finished pieces go around. Every link carries the least possible.
#include <algorithm>

#include "../reduce.h"
#include "link_algorithms.h"

namespace neuron::collectives::ring {

namespace {

using Pieces = std::vector<Piece>;

Pieces segments_of(const Pieces& pieces, size_t offset) {
  Pieces out;
  for (const Piece& p : pieces) out.push_back(segment_of(p, offset));
  return out;
}

size_t biggest(const Pieces& pieces) {
  size_t most = 0;
  for (const Piece& p : pieces) most = std::max(most, p.bytes);
  return most;
}

// In steps: member i ends with the sum of piece i in `result`.
Task<> reduce_around(Party& party, Pieces pieces, Piece result, Room room, const Signature& signature,
                     uint64_t first_step) {
  const int n = party.size(), me = party.me;
  const int right = (me + 1) % n, left = (me + n - 1) % n;
  for (int step = 0; step < n - 1; step++) {
    const Piece& out = pieces[(me + 2 * n - 1 - step) % n];
    const Piece& in = pieces[(me + 2 * n - 2 - step) % n];
    std::byte* incoming = room[step % 2];
    co_await exchange(party, right, step ? room[(step - 1) % 2] : out.data, out.bytes, left, incoming, in.bytes,
                      first_step + step);
    // The sum comes first, so that every rank adds in the order of the ring.
    const void* sources[] = {incoming, in.data};
    const bool last = step == n - 2;
    if (in.bytes)
      reduce(last ? result.data : incoming, sources, 2, in.bytes / size_of(signature.dtype), signature.dtype,
             signature.reduction, last ? n : 1);
  }
}

// Member i starts with piece i; all end with all.
Task<> gather_around(Party& party, Pieces pieces, uint64_t first_step) {
  const int n = party.size(), me = party.me;
  const int right = (me + 1) % n, left = (me + n - 1) % n;
  for (int step = 0; step < n - 1; step++) {
    const Piece& out = pieces[(me + n - step) % n];
    const Piece& in = pieces[(me + 2 * n - 1 - step) % n];
    co_await exchange(party, right, out.data, out.bytes, left, in.data, in.bytes, first_step + step);
  }
}

}  // namespace

Task<> all_reduce(Party& party, const Call& call) {
  const int n = party.size();
  if (n == 1) {
    copy(call.out[0], call.in[0]);
    co_return;
  }
  const size_t element = size_of(call.signature.dtype), count = call.out[0].bytes / element;
  auto pieces_of = [&](const Piece& whole) {
    Pieces pieces;
    for (int i = 0; i < n; i++) {
      const size_t begin = count * i / n, end = count * (i + 1) / n;
      pieces.push_back({whole.data + begin * element, (end - begin) * element});
    }
    return pieces;
  };
  const Pieces from = pieces_of(call.in[0]), to = pieces_of(call.out[0]);
  auto part = [&](size_t offset, uint64_t step, const Room& room) -> Task<> {
    const Pieces results = segments_of(to, offset);
    co_await reduce_around(party, segments_of(from, offset), results[party.me], room, call.signature, step);
    co_await gather_around(party, results, step + n);
  };
  co_await in_segments(party, biggest(to), 2 * n, part);
}

Task<> reduce_scatter(Party& party, const Call& call) {
  if (party.size() == 1) copy(call.out[0], call.in[0]);
  auto part = [&](size_t offset, uint64_t step, const Room& room) {
    return reduce_around(party, segments_of(call.in, offset), segment_of(call.out[0], offset), room, call.signature,
                         step);
  };
  co_await in_segments(party, biggest(call.in), party.size(), part);
}

Task<> all_gather(Party& party, const Call& call) {
  copy(call.out[party.me], call.in[0]);
  auto part = [&](size_t offset, uint64_t step, const Room&) {
    return gather_around(party, segments_of(call.out, offset), step);
  };
  co_await in_segments(party, biggest(call.out), party.size(), part);
}

}  // namespace neuron::collectives::ring
