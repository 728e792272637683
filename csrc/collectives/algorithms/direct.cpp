// Direct exchange: all messages are under way at once, each rank starting with its neighbour, so that no rank is
// everybody's first target.
#include <cstring>

#include "link_algorithms.h"

namespace neuron::collectives {

namespace {
Task<> take(Party& party, int from, uint64_t step, std::byte* data, size_t bytes) {
  (void)co_await party.receive(from, step, data, bytes);
}
}  // namespace

Task<> exchange(Party& party, int to, const std::byte* out, size_t out_bytes, int from, std::byte* in, size_t in_bytes,
                uint64_t step) {
  std::vector<Task<>> tasks;
  tasks.push_back(party.send(to, step, out, out_bytes));
  tasks.push_back(take(party, from, step, in, in_bytes));
  co_await all(std::move(tasks));
}

namespace direct {

Task<> exchange_all(Party& party, const Call& call) {
  const int n = party.size(), me = party.me;
  // gather's only input goes to the root; all_to_all and the root of scatter have an input for each rank.
  auto input = [&](int to) -> Piece {
    if (call.signature.kind == Kind::gather) return to == call.signature.root ? call.in[0] : Piece{};
    return call.in.empty() ? Piece{} : call.in[to];
  };
  std::vector<Task<>> tasks;
  for (int i = 1; i < n; i++) {
    const int to = (me + i) % n, from = (me + n - i) % n;
    const bool sends = call.signature.kind == Kind::gather ? to == call.signature.root : !call.in.empty();
    const bool receives = call.signature.kind == Kind::scatter  ? from == call.signature.root
                          : call.signature.kind == Kind::gather ? me == call.signature.root
                                                                : true;
    if (sends) tasks.push_back(party.send(to, 0, input(to).data, input(to).bytes));
    if (receives) tasks.push_back(take(party, from, 0, call.out[from].data, call.out[from].bytes));
  }
  const Piece own = call.out.empty() ? Piece{} : call.out[me];
  if (own.data && own.bytes && own.data != input(me).data) std::memcpy(own.data, input(me).data, own.bytes);
  co_await all(std::move(tasks));
}

}  // namespace direct

}  // namespace neuron::collectives
