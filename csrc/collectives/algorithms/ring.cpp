// Ring: the data goes around in n pieces. In n-1 steps each rank receives a partial sum of one piece from its left,
// adds its own and passes it on; in n-1 more the finished pieces go around. Every link carries the least possible.
#include <algorithm>
#include <cstring>

#include "../reduce.h"
#include "link_algorithms.h"

namespace neuron::collectives::ring {

namespace {

// In steps: member i ends with the sum of piece i in place of its own.
Task<> reduce_around(Party& party, const std::vector<Piece>& pieces, DataType dtype, Reduction op) {
  const int n = party.size(), me = party.me;
  const int right = (me + 1) % n, left = (me + n - 1) % n;
  size_t most = 0;
  for (auto& p : pieces) most = std::max(most, p.bytes);
  std::byte* incoming = party.scratch.take(most);
  for (int step = 0; step < n - 1; step++) {
    const Piece& out = pieces[(me + 2 * n - 1 - step) % n];
    const Piece& in = pieces[(me + 2 * n - 2 - step) % n];
    co_await exchange(party, right, out.data, out.bytes, left, incoming, in.bytes, step);
    // The sum comes first, so that every rank adds in the order of the ring.
    const void* sources[] = {incoming, in.data};
    const bool last = step == n - 2;
    if (in.bytes) reduce(in.data, sources, 2, in.bytes / size_of(dtype), dtype, op, last ? n : 1);
  }
}

// Member i starts with piece i; all end with all.
Task<> gather_around(Party& party, const std::vector<Piece>& pieces, uint64_t first_step) {
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
  const Piece& in = call.in[0];
  const Piece& out = call.out[0];
  if (in.data != out.data && in.bytes) std::memcpy(out.data, in.data, in.bytes);
  const size_t element = size_of(call.signature.dtype), count = out.bytes / element;
  std::vector<Piece> pieces;
  for (int i = 0; i < n; i++) {
    const size_t begin = count * i / n, end = count * (i + 1) / n;
    pieces.push_back({out.data + begin * element, (end - begin) * element});
  }
  co_await reduce_around(party, pieces, call.signature.dtype, call.signature.reduction);
  co_await gather_around(party, pieces, n);
}

Task<> reduce_scatter(Party& party, const Call& call) {
  // The sums need room that is not the caller's input.
  size_t total = 0;
  for (auto& p : call.in) total += p.bytes;
  std::byte* room = party.scratch.take(total);
  std::vector<Piece> pieces;
  size_t at = 0;
  for (auto& p : call.in) {
    if (p.bytes) std::memcpy(room + at, p.data, p.bytes);
    pieces.push_back({room + at, p.bytes});
    at += p.bytes;
  }
  co_await reduce_around(party, pieces, call.signature.dtype, call.signature.reduction);
  if (pieces[party.me].bytes) std::memcpy(call.out[0].data, pieces[party.me].data, pieces[party.me].bytes);
}

Task<> all_gather(Party& party, const Call& call) {
  const Piece& own = call.out[party.me];
  if (own.data != call.in[0].data && own.bytes) std::memcpy(own.data, call.in[0].data, own.bytes);
  co_await gather_around(party, call.out, 0);
}

}  // namespace neuron::collectives::ring
