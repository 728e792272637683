#include "select.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace neuron::collectives {

namespace {

constexpr const char* kVariable = "TORCH_NEURON_COLLECTIVE_ALGORITHM";
constexpr std::string_view kNames[] = {"mesh", "ring", "doubling", "tree", "direct", "hierarchical"};
constexpr size_t kManyBytes = 64 << 10;  // from here bandwidth counts more than steps

// For each operation: across hosts for few bytes, for many bytes, for many on hosts with several ranks, and what else
// it has.
struct Row {
  Kind kind;
  Algorithm few, many, grouped;
};
constexpr Row kRows[] = {
    {Kind::all_reduce, Algorithm::doubling, Algorithm::ring, Algorithm::hierarchical},
    {Kind::reduce, Algorithm::tree, Algorithm::tree, Algorithm::tree},
    {Kind::broadcast, Algorithm::tree, Algorithm::tree, Algorithm::tree},
    {Kind::all_gather, Algorithm::ring, Algorithm::ring, Algorithm::ring},
    {Kind::reduce_scatter, Algorithm::ring, Algorithm::ring, Algorithm::ring},
    {Kind::all_to_all, Algorithm::direct, Algorithm::direct, Algorithm::direct},
    {Kind::gather, Algorithm::direct, Algorithm::direct, Algorithm::direct},
    {Kind::scatter, Algorithm::direct, Algorithm::direct, Algorithm::direct},
    {Kind::barrier, Algorithm::doubling, Algorithm::doubling, Algorithm::doubling},
};

const Row& row_of(Kind kind) {
  return *std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& r) { return r.kind == kind; });
}

std::optional<Algorithm> algorithm_named(std::string_view name) {
  auto it = std::find(std::begin(kNames), std::end(kNames), name);
  if (it == std::end(kNames)) return std::nullopt;
  return static_cast<Algorithm>(it - std::begin(kNames));
}

[[noreturn]] void refuse(std::string_view entry) {
  std::string known;
  for (auto n : kNames) known.append(" ").append(n);
  throw std::invalid_argument(
      std::string(kVariable) + ": '" + std::string(entry) +
      "' is not <operation>=<algorithm> with an algorithm that the operation has; algorithms are" + known);
}

using Overrides = std::array<std::optional<Algorithm>, 16>;

Overrides read_overrides() {
  Overrides out;
  const char* text = std::getenv(kVariable);
  std::string_view rest = text ? text : "";
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    const size_t equals = entry.find('=');
    const auto row = std::find_if(std::begin(kRows), std::end(kRows),
                                  [&](const Row& r) { return entry.substr(0, equals) == name_of(r.kind); });
    if (equals == std::string_view::npos || row == std::end(kRows)) refuse(entry);
    const auto algorithm = algorithm_named(entry.substr(equals + 1));
    if (!algorithm || (*algorithm != Algorithm::mesh && *algorithm != row->few && *algorithm != row->many &&
                       *algorithm != row->grouped))
      refuse(entry);
    out[static_cast<size_t>(row->kind)] = algorithm;
  }
  return out;
}

}  // namespace

const char* name_of(Algorithm a) { return kNames[static_cast<size_t>(a)].data(); }

bool steps_count(size_t bytes, int ranks) { return ranks == 2 || bytes < kManyBytes; }

Algorithm choose(Kind kind, size_t bytes, const Topology& t) {
  static const Overrides overrides = read_overrides();
  const bool shared = t.hosts == 1, grouped = t.even && t.ranks > t.hosts && t.hosts > 1;
  if (auto wanted = overrides[static_cast<size_t>(kind)])
    if ((*wanted != Algorithm::mesh || shared) && (*wanted != Algorithm::hierarchical || grouped)) return *wanted;
  if (shared) return Algorithm::mesh;
  const Row& row = row_of(kind);
  if (grouped) return row.grouped;
  return steps_count(bytes, t.ranks) ? row.few : row.many;
}

}  // namespace neuron::collectives
