// THE table of ATen operators: what kind each is here, and how Trainium runs it.
//
// Rows are in op_table.inc, one for each operator family: `add` stands for add.Tensor, add.Scalar, add_, add.out and
// so on. An operator without a row is a library operator that Trainium cannot run: a fallback.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

namespace neuron {

enum class OpKind : uint8_t {
  fusible,  // pointwise, casts, row reductions, optimizers: can become a NeuronCore program
  library,  // PyTorch's CPU kernel on the device's memory
  view,     // metadata only
};

// How Trainium would run an operator in a data type.
enum class Support : uint8_t {
  native,    // on the engines
  narrowed,  // 64-bit integers that Trainium keeps in 32 bits: reported, never refused
  fallback,  // on the host and back: listed, refused in strict mode
};

struct OpRow {
  std::string_view name;
  OpKind kind;
};

// The row of an operator's family, or null. `name` is qualified, e.g. "aten::add_".
const OpRow* find_row(std::string_view name);
std::vector<OpRow> all_rows();

// What was run since the last clear, by operator.
struct OpCounter {
  explicit OpCounter(std::string n) : name(std::move(n)), row(find_row(name)) {}
  const std::string name;  // with overload, e.g. "aten::add.Tensor"
  const OpRow* const row;
  std::atomic<uint64_t> executed{0}, narrowed{0}, fallback{0};
};

// The counter of an operator; made on first use, never destroyed.
OpCounter& counter(const std::string& name);
std::vector<const OpCounter*> all_counters();
void clear_counters();

// The data types that decide about support, gathered over an operator's neuron arguments.
struct DtypeUse {
  bool wide_int = false;                                 // int64 and unsigned 64-bit
  bool unsupported = false;                              // float64 and complex: no engine has them
  c10::ScalarType example = c10::ScalarType::Undefined;  // the unsupported one
  void add(c10::ScalarType t);
};

// Called for each call that is a fallback, in the calling thread; null for none. For `torchneuron check`.
using FallbackHook = void (*)(const OpCounter&);
void set_fallback_hook(FallbackHook hook);

// Counts a call; throws NotImplementedError for a fallback in strict mode. `describe` words the arguments.
Support account(OpCounter& c, const DtypeUse& use);
[[noreturn]] void refuse(const OpCounter& c, const DtypeUse& use, const std::string& arguments);

}  // namespace neuron
