#include "op_table.h"

#include <c10/core/ScalarType.h>

#include <deque>
#include <mutex>
#include <unordered_map>

namespace neuron {

namespace {

constexpr OpRow kRows[] = {
#define FUSIBLE(name) {#name, OpKind::fusible}
#define LIBRARY(name) {#name, OpKind::library}
#define VIEW(name) {#name, OpKind::view}
#include "op_table.inc"
#undef FUSIBLE
#undef LIBRARY
#undef VIEW
};

// aten::add_.Tensor -> add
std::string_view family(std::string_view name) {
  if (size_t colon = name.find("::"); colon != name.npos) {
    if (name.substr(0, colon) != "aten") return {};
    name.remove_prefix(colon + 2);
  }
  if (size_t dot = name.find('.'); dot != name.npos) name = name.substr(0, dot);
  if (name.size() > 1 && name.back() == '_' && name[name.size() - 2] != '_') name.remove_suffix(1);
  return name;
}

std::mutex g_mutex;
std::atomic<FallbackHook> g_fallback_hook{nullptr};
std::unordered_map<std::string, OpCounter*>& counters() {
  static auto* map = new std::unordered_map<std::string, OpCounter*>;
  return *map;
}

}  // namespace

const OpRow* find_row(std::string_view name) {
  static auto* index = [] {
    auto* map = new std::unordered_map<std::string_view, const OpRow*>;
    for (auto& row : kRows) map->emplace(row.name, &row);
    return map;
  }();
  auto it = index->find(family(name));
  return it == index->end() ? nullptr : it->second;
}

std::vector<OpRow> all_rows() { return {std::begin(kRows), std::end(kRows)}; }

OpCounter& counter(const std::string& name) {
  std::lock_guard lock(g_mutex);
  OpCounter*& slot = counters()[name];
  if (!slot) slot = new OpCounter(name);
  return *slot;
}

std::vector<const OpCounter*> all_counters() {
  std::lock_guard lock(g_mutex);
  std::vector<const OpCounter*> out;
  for (auto& [name, c] : counters()) out.push_back(c);
  return out;
}

void clear_counters() {
  std::lock_guard lock(g_mutex);
  for (auto& [name, c] : counters()) c->executed = c->narrowed = c->fallback = 0;
}

void DtypeUse::add(c10::ScalarType t) {
  switch (t) {
    case c10::ScalarType::Long:
    case c10::ScalarType::UInt64:
      wide_int = true;
      break;
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexHalf:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
      unsupported = true;
      example = t;
      break;
    default:
      break;
  }
}

void set_fallback_hook(FallbackHook hook) { g_fallback_hook.store(hook, std::memory_order_release); }

Support account(OpCounter& c, const DtypeUse& use) {
  c.executed.fetch_add(1, std::memory_order_relaxed);
  if (C10_UNLIKELY(!c.row || use.unsupported)) {
    c.fallback.fetch_add(1, std::memory_order_relaxed);
    if (FallbackHook hook = g_fallback_hook.load(std::memory_order_acquire)) hook(c);
    return Support::fallback;
  }
  if (use.wide_int) {
    c.narrowed.fetch_add(1, std::memory_order_relaxed);
    return Support::narrowed;
  }
  return Support::native;
}

void refuse(const OpCounter& c, const DtypeUse& use, const std::string& arguments) {
  std::string why = c.row ? std::string("Trainium has no ") + c10::toString(use.example) + " arithmetic"
                          : "no engine of Trainium runs it";
  std::string way = c.row ? "Convert to float32 or bfloat16"
                          : "Write it with operators that Trainium has (docs/operators.md), or as an NKI kernel";
  TORCH_CHECK_NOT_IMPLEMENTED(false, c.name, "(", arguments, ") would fall back to the host: ", why,
                              ". TORCH_NEURON_STRICT=1 refuses fallbacks. ", way,
                              ", move the tensors to the CPU for this step, or unset TORCH_NEURON_STRICT.");
}

}  // namespace neuron
