#include "races.h"

#include <algorithm>
#include <map>

#include "program.h"

namespace neuron {
namespace {

using Use = SharedUses::Use;
using Runs = std::vector<std::pair<int64_t, int64_t>>;  // [begin, end) in bytes

// The bytes of a use, as sorted runs.
Runs runs_of(const Use& u) {
  Runs runs;
  std::vector<int64_t> at(u.dims.size(), 0);
  int64_t low = u.begin;  // of the element that all counters at 0 stand for
  for (const auto& [stride, size] : u.dims) low -= std::min<int64_t>(0, stride * (size - 1));
  const int64_t length = u.dims.back().second;
  while (true) {
    int64_t begin = low;
    for (size_t i = 0; i + 1 < u.dims.size(); ++i) begin += at[i] * u.dims[i].first;
    runs.emplace_back(begin, begin + length);
    size_t i = u.dims.size() - 1;
    while (i-- > 0) {
      if (++at[i] < u.dims[i].second) break;
      at[i] = 0;
    }
    if (i == SIZE_MAX) break;
  }
  std::sort(runs.begin(), runs.end());
  return runs;
}

// Are they blocks of the same rows, in columns of their own?
bool beside(const Use& x, const Use& y) {
  if (x.dims.size() != 2 || y.dims.size() != 2 || x.dims[0].first != y.dims[0].first || x.dims[0].first <= 0)
    return false;
  const int64_t pitch = x.dims[0].first;
  const auto columns = [&](const Use& u) { return std::pair(u.begin % pitch, u.begin % pitch + u.dims[1].second); };
  const auto [x0, x1] = columns(x);
  const auto [y0, y1] = columns(y);
  return x1 <= pitch && y1 <= pitch && (x1 <= y0 || y1 <= x0);
}

// The first byte that both touch, or -1.
int64_t meeting(const Use& x, const Use& y) {
  if (x.begin >= y.end || y.begin >= x.end || beside(x, y)) return -1;
  const Runs a = runs_of(x), b = runs_of(y);
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i].first < b[j].second && b[j].first < a[i].second) return std::max(a[i].first, b[j].first);
    a[i].second < b[j].second ? ++i : ++j;
  }
  return -1;
}

}  // namespace

void SharedUses::visit(const std::vector<Storage>& storages, const Instruction& in, bool in_loop) {
  if (!on_ || loops_) return;
  const InstructionSpec& sp = in.spec();
  if (sp.rendezvous) {
    if (in_loop) {  // which epochs the loop's turns make is known only when it runs
      loops_ = true;
      epochs_.assign(1, {});
    } else {
      epochs_.emplace_back();
    }
    return;
  }
  for (size_t i = 0; i < in.operands.size(); ++i) {
    if (!in.operands[i].is_tile()) continue;
    const Access& a = in.operands[i].access;
    if (storages[a.storage].memory != Memory::shared_hbm || a.is_dynamic()) continue;
    const Role role = sp.operands[i].role;
    const int64_t item = size_of(a.dtype);
    Use u{a.storage, in.source, in.opcode, role == Role::write || role == Role::read_write, 0, 0, {}};
    int64_t run = item;
    int last = a.ndim;
    while (last > 0 && (a.dims[last - 1].size == 1 || a.dims[last - 1].stride * item == run))
      run *= a.dims[--last].size;
    u.begin = a.offset * item;
    u.end = u.begin + run;
    for (int d = 0; d < last; ++d) {
      const int64_t stride = a.dims[d].stride * item, span = stride * (a.dims[d].size - 1);
      (span < 0 ? u.begin : u.end) += span;
      if (stride != 0) u.dims.emplace_back(stride, a.dims[d].size);
    }
    u.dims.emplace_back(0, run);
    epochs_.back().push_back(std::move(u));
  }
}

std::optional<Race> find_race(const SharedUses& a, const SharedUses& b,
                              const std::vector<std::pair<uint32_t, uint32_t>>& same) {
  const std::map<uint32_t, uint32_t> partner(same.begin(), same.end());
  for (size_t e = 0; e < std::min(a.epochs().size(), b.epochs().size()); ++e) {
    std::map<uint32_t, std::vector<const Use*>> others;
    for (const Use& y : b.epochs()[e]) others[y.storage].push_back(&y);
    for (const Use& x : a.epochs()[e]) {
      const auto p = partner.find(x.storage);
      if (p == partner.end()) continue;
      for (const Use* y : others[p->second])
        if (x.write || y->write)
          if (const int64_t byte = meeting(x, *y); byte >= 0) return Race{x, *y, byte};
    }
  }
  return std::nullopt;
}

}  // namespace neuron
