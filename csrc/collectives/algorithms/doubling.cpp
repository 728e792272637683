// Recursive doubling: in step k each rank exchanges what it has with the rank 2^k away, so log2(n) steps suffice. Ranks
// beyond the biggest power of two hand their data to a partner first and get the result from it. The barrier is the
// dissemination form of the same idea, which takes any number of ranks.
#include <bit>

#include "../reduce.h"
#include "link_algorithms.h"

namespace neuron::collectives::doubling {

namespace {

constexpr int kFold = 64, kUnfold = 65, kSteps = 66;  // after those of the doubling

Task<> sum(Party& party, Piece in, Piece out, std::byte* theirs, const Signature& signature, uint64_t first_step) {
  const int n = party.size(), me = party.me, core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const size_t count = out.bytes / size_of(signature.dtype);
  if (me >= core) {
    co_await party.send(me - core, first_step + kFold, in.data, in.bytes);
    (void)co_await party.receive(me - core, first_step + kUnfold, out.data, out.bytes);
    co_return;
  }
  const std::byte* mine = in.data;
  auto add = [&](bool mine_first, int average_over) {
    const void* sources[] = {mine_first ? mine : theirs, mine_first ? theirs : mine};
    reduce(out.data, sources, 2, count, signature.dtype, signature.reduction, average_over);
    mine = out.data;
  };
  if (me + core < n) {
    (void)co_await party.receive(me + core, first_step + kFold, theirs, out.bytes);
    add(true, 1);
  }
  for (int distance = 1, step = 0; distance < core; distance *= 2, step++) {
    const int peer = me ^ distance;
    co_await exchange(party, peer, mine, out.bytes, peer, theirs, out.bytes, first_step + step);
    // The lower rank's data comes first on both sides, so that all ranks get the same bits.
    add(me < peer, 2 * distance == core ? n : 1);
  }
  if (me + core < n) co_await party.send(me + core, first_step + kUnfold, out.data, out.bytes);
}

}  // namespace

Task<> all_reduce(Party& party, const Call& call) {
  const Piece &in = call.in[0], &out = call.out[0];
  if (party.size() == 1) copy(out, in);
  auto part = [&](size_t offset, uint64_t step, const Room& room) {
    return sum(party, segment_of(in, offset), segment_of(out, offset), room[0], call.signature, step);
  };
  if (party.size() > 1) co_await in_segments(party, out.bytes, kSteps, part);
}

Task<> barrier(Party& party) {
  const int n = party.size(), me = party.me;
  for (int distance = 1, step = 0; distance < n; distance *= 2, step++)
    co_await exchange(party, (me + distance) % n, nullptr, 0, (me + n - distance) % n, nullptr, 0, step);
}

}  // namespace neuron::collectives::doubling
