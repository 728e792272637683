#include "reports.h"

#include <algorithm>

#include "engine.h"
#include "link.h"

namespace neuron::collectives {

namespace {
// Not a tag of algorithms, whose numbers are low, nor of users, who have the highest bit.
constexpr uint64_t kTag = 1ull << 62;

// A report that does not arrive is one to a rank that cannot be reached.
Task<> try_to_send(FabricLink& link, int to, Report report) {
  try {
    co_await link.send_from_anybody(to, kTag, reinterpret_cast<const std::byte*>(&report), sizeof report);
  } catch (const std::exception&) {
  }
}
}  // namespace

Reports::Reports(FabricLink& link, int ranks_of_group, std::vector<int> ranks)
    : link_(link), ranks_of_group_(ranks_of_group), ranks_(std::move(ranks)), listener_(listen()) {}

Task<> Reports::listen() {
  while (true) {
    Report report;
    try {
      co_await link_.receive_from_anybody(kTag, reinterpret_cast<std::byte*>(&report), sizeof report);
    } catch (const LengthMismatch&) {
      continue;
    }
    if (std::find(ranks_.begin(), ranks_.end(), report.rank) == ranks_.end()) continue;
    report.doing[sizeof report.doing - 1] = report.reason[sizeof report.reason - 1] = 0;
    for (int32_t& rank : report.waits_for)
      if (rank >= ranks_of_group_) rank = -1;
    if (report.asks) askers_.insert(report.rank);
    std::lock_guard lock(mutex_);
    heard_[report.rank] = {report, clock_ns()};
  }
}

std::set<int> Reports::step() {
  while (listener_.step()) {
  }
  for (auto it = senders_.begin(); it != senders_.end();) {
    it->second.step();
    it = it->second.finished() ? senders_.erase(it) : std::next(it);
  }
  return std::exchange(askers_, {});
}

void Reports::send_to(int rank, const Report& report) {
  const auto [it, added] = senders_.try_emplace(rank, try_to_send(link_, rank, report));
  if (added) it->second.step();
}

std::optional<Reports::Heard> Reports::heard(int rank) const {
  std::lock_guard lock(mutex_);
  const auto it = heard_.find(rank);
  return it == heard_.end() ? std::nullopt : std::optional(it->second);
}

}  // namespace neuron::collectives
