// Recursive doubling: in step k each rank exchanges what it has with the rank 2^k away, so log2(n) steps suffice. Ranks
// beyond the biggest power of two hand their data to a partner first and get the result from it. The barrier is the
// dissemination form of the same idea, which takes any number of ranks.
#include <bit>
#include <cstring>

#include "../reduce.h"
#include "link_algorithms.h"

namespace neuron::collectives::doubling {

Task<> all_reduce(Party& party, const Call& call) {
  const int n = party.size(), me = party.me, core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const Piece& in = call.in[0];
  const Piece& out = call.out[0];
  if (in.data != out.data && in.bytes) std::memcpy(out.data, in.data, in.bytes);
  const DataType dtype = call.signature.dtype;
  const Reduction op = call.signature.reduction;
  const size_t count = out.bytes / size_of(dtype);
  constexpr uint64_t kFold = 100, kUnfold = 101;
  if (me >= core) {
    co_await party.send(me - core, kFold, out.data, out.bytes);
    (void)co_await party.receive(me - core, kUnfold, out.data, out.bytes);
    co_return;
  }
  std::byte* theirs = party.scratch.take(out.bytes);
  const void* sources[2];
  if (me + core < n) {
    (void)co_await party.receive(me + core, kFold, theirs, out.bytes);
    sources[0] = out.data, sources[1] = theirs;
    reduce(out.data, sources, 2, count, dtype, op, 1);
  }
  for (int distance = 1, step = 0; distance < core; distance *= 2, step++) {
    const int peer = me ^ distance;
    co_await exchange(party, peer, out.data, out.bytes, peer, theirs, out.bytes, step);
    // The lower rank's data comes first on both sides, so that all ranks get the same bits.
    sources[me > peer] = out.data, sources[me < peer] = theirs;
    reduce(out.data, sources, 2, count, dtype, op, 1);
  }
  if (op == Reduction::avg) {
    sources[0] = out.data;
    reduce(out.data, sources, 1, count, dtype, op, n);
  }
  if (me + core < n) co_await party.send(me + core, kUnfold, out.data, out.bytes);
}

Task<> barrier(Party& party) {
  const int n = party.size(), me = party.me;
  for (int distance = 1, step = 0; distance < n; distance *= 2, step++)
    co_await exchange(party, (me + distance) % n, nullptr, 0, (me + n - distance) % n, nullptr, 0, step);
}

}  // namespace neuron::collectives::doubling
