#include "flight.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace neuron::collectives {

namespace {
std::string seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(std::max<int64_t>(ns, 0)) / 1e9);
  return text;
}
}  // namespace

uint64_t flight_begin(FlightMemory& record, uint64_t number, const Signature& signature, int64_t now) {
  const uint64_t place = record.count.load(std::memory_order_relaxed);
  auto& entry = record.entries[place % FlightMemory::kEntries];
  entry.number = number;
  entry.signature = signature;
  entry.started_ns = now;
  entry.ended_ns.store(0, std::memory_order_relaxed);
  for (auto& rank : entry.waits_for) rank.store(-1, std::memory_order_relaxed);
  record.count.store(place + 1, std::memory_order_release);
  return place;
}

void flight_end(FlightMemory& record, uint64_t place, int64_t now) {
  if (record.count.load(std::memory_order_relaxed) - place <= FlightMemory::kEntries)
    record.entries[place % FlightMemory::kEntries].ended_ns.store(now, std::memory_order_release);
}

void flight_wait(FlightMemory& record, uint64_t place, const std::vector<int>& ranks, int64_t now) {
  record.noted_ns.store(now, std::memory_order_release);
  if (record.count.load(std::memory_order_relaxed) - place > FlightMemory::kEntries) return;
  auto& awaited = record.entries[place % FlightMemory::kEntries].waits_for;
  for (size_t i = 0; i < kMostAwaited; i++)
    awaited[i].store(i < ranks.size() ? ranks[i] : -1, std::memory_order_relaxed);
}

std::vector<int> flight_awaited(const FlightMemory& record, int64_t now) {
  std::vector<int> out;
  if (now - record.noted_ns.load(std::memory_order_acquire) > kLatelyNs) return out;
  const uint64_t count = record.count.load(std::memory_order_acquire);
  for (uint64_t i = count - std::min(count, FlightMemory::kEntries); i < count; i++) {
    const auto& e = record.entries[i % FlightMemory::kEntries];
    if (e.ended_ns.load(std::memory_order_acquire)) continue;
    for (auto& awaited : e.waits_for)
      if (const int rank = awaited.load(std::memory_order_relaxed);
          rank >= 0 && std::find(out.begin(), out.end(), rank) == out.end())
        out.push_back(rank);
  }
  return out;
}

std::string describe(const Signature& s, uint64_t number) {
  std::string out = std::string(name_of(s.kind)) + " #" + std::to_string(number);
  if (s.kind == Kind::barrier) return out;
  out += " (" + std::to_string(s.count) + " x " + name_of(s.dtype);
  if (s.kind == Kind::all_reduce || s.kind == Kind::reduce || s.kind == Kind::reduce_scatter)
    out += std::string(", ") + name_of(s.reduction);
  if (s.root >= 0) {
    const char* role = s.kind == Kind::send ? ", to rank " : s.kind == Kind::recv ? ", from rank " : ", root ";
    out += role + std::to_string(s.root);
  }
  return out + ")";
}

std::string flight_summary(const FlightMemory& record, int64_t now) {
  const uint64_t count = record.count.load(std::memory_order_acquire);
  if (count == 0) return "no operation yet";
  std::string running;
  int64_t last_end = 0;
  const FlightMemory::Entry* last = nullptr;
  for (uint64_t i = count - std::min(count, FlightMemory::kEntries); i < count; i++) {
    const auto& e = record.entries[i % FlightMemory::kEntries];
    const int64_t ended = e.ended_ns.load(std::memory_order_acquire);
    if (ended == 0) {
      running +=
          (running.empty() ? "in " : ", ") + describe(e.signature, e.number) + " for " + seconds(now - e.started_ns);
    } else if (ended >= last_end) {
      last_end = ended;
      last = &e;
    }
  }
  if (!running.empty()) {
    const char* before = ", waiting for rank ";
    for (int rank : flight_awaited(record, now)) running += std::exchange(before, ", ") + std::to_string(rank);
    return running;
  }
  return "in none; " + describe(last->signature, last->number) + " ended " + seconds(now - last_end) + " ago";
}

}  // namespace neuron::collectives
