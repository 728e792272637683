// Binomial tree around the root: whoever has the data passes it to the rank half as far away as in the level before.
#include <bit>
#include <cstring>

#include "../reduce.h"
#include "link_algorithms.h"

namespace neuron::collectives::tree {

Task<> broadcast(Party& party, const Call& call) {
  const int n = party.size(), root = call.signature.root;
  const int place = (party.me - root + n) % n;
  const Piece& data = place == 0 ? call.in[0] : call.out[root];
  auto rank = [&](int p) { return (p + root) % n; };
  int span = static_cast<int>(std::bit_ceil(static_cast<unsigned>(n)));
  if (place != 0) {
    span = place & -place;  // the lowest set bit: distance to the parent
    (void)co_await party.receive(rank(place - span), 0, data.data, data.bytes);
  }
  for (int distance = span / 2; distance > 0; distance /= 2)
    if (place + distance < n) co_await party.send(rank(place + distance), 0, data.data, data.bytes);
}

Task<> reduce(Party& party, const Call& call) {
  const int n = party.size(), root = call.signature.root;
  const int place = (party.me - root + n) % n;
  const Piece& in = call.in[0];
  const DataType dtype = call.signature.dtype;
  std::byte *sum = party.scratch.take(in.bytes), *theirs = party.scratch.take(in.bytes);
  if (in.bytes) std::memcpy(sum, in.data, in.bytes);
  auto rank = [&](int p) { return (p + root) % n; };
  for (int distance = 1; distance < n; distance *= 2) {
    if (place & distance) {
      co_await party.send(rank(place - distance), 0, sum, in.bytes);
      co_return;
    }
    if (place + distance >= n) continue;
    (void)co_await party.receive(rank(place + distance), 0, theirs, in.bytes);
    const void* sources[] = {sum, theirs};
    collectives::reduce(sum, sources, 2, in.bytes / size_of(dtype), dtype, call.signature.reduction, 1);
  }
  const void* source = sum;
  if (in.bytes)
    collectives::reduce(call.out[0].data, &source, 1, in.bytes / size_of(dtype), dtype, call.signature.reduction, n);
}

}  // namespace neuron::collectives::tree
