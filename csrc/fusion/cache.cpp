// Rule: signature. A plan serves every graph with an equal signature and equal liveness: operators, types, which
// operands are one, which of them may overlap, which element counts agree. Sizes, strides, addresses and Python numbers
// come with the run.
//
// Reason: loops change numbers (learning rates, step counts) and batches change shapes; neither may cost a new program.
// Whatever the fuser's decisions depend on must be in the signature, or a cached plan would be wrong for a later graph.
#include "cache.h"

#include <mutex>
#include <unordered_map>

#include "stats.h"

namespace neuron::fusion {

namespace {

constexpr size_t kMaxPlans = 4096;

struct Entry {
  std::vector<uint32_t> signature;
  std::vector<uint8_t> live;
  std::shared_ptr<const Plan> plan;
};

uint64_t hash(const Graph& graph, const std::vector<uint8_t>& live) {
  uint64_t h = graph.signature.size();
  auto mix = [&](uint64_t v) {
    h = (h ^ v) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
  };
  for (uint32_t word : graph.signature) mix(word);
  for (uint8_t bit : live) mix(bit);
  return h;
}

}  // namespace

std::shared_ptr<const Plan> find_or_fuse(const Graph& graph, const std::vector<uint8_t>& live) {
  static auto* plans = new std::unordered_multimap<uint64_t, Entry>;
  static std::mutex mutex;
  const uint64_t key = hash(graph, live);
  std::lock_guard lock(mutex);
  auto [first, last] = plans->equal_range(key);
  for (auto it = first; it != last; ++it)
    if (it->second.signature == graph.signature && it->second.live == live) return it->second.plan;
  if (plans->size() >= kMaxPlans) plans->clear();
  auto plan = std::make_shared<const Plan>(fuse(graph, live));
  count(g_stats.programs_built, plan->launches.size());
  plans->emplace(key, Entry{graph.signature, live, plan});
  return plan;
}

}  // namespace neuron::fusion
