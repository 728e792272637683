#include "library.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "fusion/stats.h"
#include "graph.h"
#include "runtime/generator.h"
#include "runtime/profiler.h"

namespace neuron {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

// Arguments that may be CPU tensors of any shape beside neuron tensors: indices may live on the host as on CUDA, the
// others are metadata that CUDA's kernels want there.
const std::set<std::pair<std::string, std::string>> kHostArguments = {
    {"aten::index", "indices"},
    {"aten::index_put", "indices"},
    {"aten::index_put_", "indices"},
    {"aten::_index_put_impl", "indices"},
    {"aten::_index_put_impl_", "indices"},
    {"aten::_unsafe_index", "indices"},
    {"aten::_unsafe_index_put", "indices"},
    {"aten::_pack_padded_sequence", "lengths"},
    {"aten::_foreach_addcdiv", "scalars"},
    {"aten::_foreach_addcdiv_", "scalars"},
    {"aten::_foreach_addcmul", "scalars"},
    {"aten::_foreach_addcmul_", "scalars"},
    {"aten::_foreach_copy_", "self"},
    {"aten::_foreach_copy_", "src"},
    {"aten::_nested_view_from_buffer", "nested_size"},
    {"aten::_nested_view_from_buffer", "nested_strides"},
    {"aten::_nested_view_from_buffer", "offsets"},
    {"aten::_nested_view_from_buffer_copy", "nested_size"},
    {"aten::_nested_view_from_buffer_copy", "nested_strides"},
    {"aten::_nested_view_from_buffer_copy", "offsets"},
    {"aten::_nested_from_padded", "cpu_nested_shape_example"},
    {"aten::set_", "source"},
    {"aten::_coalesced", "self"},
};

// Composites whose decomposition is wrong or slow on this backend: the CPU's own composite runs on bridged tensors as
// one call instead.
bool whole_composite(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::convolution",
      "aten::convolution_backward",
      "aten::_convolution_double_backward",
      // The composite decides by device and then asks for a backend kernel that only accelerators have.
      "aten::convolution_overrideable",
      "aten::convolution_backward_overrideable",
      // Its out= form names the device types that it knows.
      "aten::mode",
      // These call a kernel table that has no entry for our device.
      "aten::conj_physical_",
      "aten::kaiser_window",
  };
  return names.count(name) || name.rfind("aten::_foreach_", 0) == 0;
}

bool is_view(const c10::FunctionSchema& schema) {
  for (auto& r : schema.returns())
    if (r.alias_info() && !r.alias_info()->isWrite()) return true;
  return false;
}

std::string describe(at::ArrayRef<IValue> args) {
  std::ostringstream out;
  const char* comma = "";
  auto put = [&](const at::Tensor& t) {
    out << comma << t.scalar_type() << " " << t.sizes();
    comma = ", ";
  };
  for (auto& arg : args) {
    if (arg.isTensor() && arg.toTensor().defined()) put(arg.toTensor());
    if (arg.isTensorList())
      for (const at::Tensor& t : arg.toTensorVector()) put(t);
  }
  return out.str();
}

[[noreturn]] void mixed_devices(const c10::OperatorHandle& op, const CallPlan::Slot& slot, c10::Device a,
                                c10::Device b) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ", b,
              "! (when checking argument for argument ", op.schema().arguments()[slot.index].name(), " in method ",
              toString(op.operator_name()), ")");
}

template <class F>
void for_each_tensor(const CallPlan::Slot& slot, const IValue& value, F f) {
  if (slot.kind == CallPlan::Arg::tensor) {
    if (value.isTensor() && value.toTensor().defined()) f(value.toTensor());
  } else if (slot.kind == CallPlan::Arg::tensor_list) {
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList())
        if (t.defined()) f(t);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
        if (t && t->defined()) f(*t);
    }
  }
}

IValue to_host(Bridge& bridge, const CallPlan::Slot& slot, IValue&& value) {
  if (slot.kind == CallPlan::Arg::tensor)
    return value.isTensor() ? IValue(bridge.to_host(value.toTensor(), slot.written)) : std::move(value);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    list.reserve(value.toTensorList().size());
    for (const at::Tensor& t : value.toTensorList()) list.push_back(bridge.to_host(t, slot.written));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      list.push_back(t ? std::optional(bridge.to_host(*t, slot.written)) : std::nullopt);
    return list;
  }
  return std::move(value);
}

void to_device(Bridge& bridge, IValue& value) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = bridge.to_device(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorList()) list.push_back(bridge.to_device(t));
    value = std::move(list);
  }
}

}  // namespace

CallPlan::CallPlan(const c10::FunctionSchema& schema)
    : arguments(schema.arguments().size()), returns(schema.returns().size()) {
  for (size_t i = 0; i < arguments; i++) {
    const c10::Argument& arg = schema.arguments()[i];
    c10::TypePtr type = arg.real_type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    Slot slot{static_cast<uint16_t>(i), Arg::tensor, arg.alias_info() && arg.alias_info()->isWrite(),
              kHostArguments.count({schema.name(), arg.name()}) > 0};
    if (type->isSubtypeOf(*c10::TensorType::get())) {
      slots.push_back(slot);
    } else if (auto list = type->cast<c10::ListType>()) {
      c10::TypePtr element = list->getElementType();
      if (auto optional = element->cast<c10::OptionalType>()) element = optional->getElementType();
      if (element->isSubtypeOf(*c10::TensorType::get())) {
        slot.kind = Arg::tensor_list;
        slots.push_back(slot);
      }
    } else if (type->kind() == c10::TypeKind::GeneratorType) {
      slot.kind = Arg::generator;
      slots.push_back(slot);
      random = true;
    } else if (type->kind() == c10::TypeKind::DeviceObjType) {
      slot.kind = Arg::device;
      slots.push_back(slot);
    }
  }
}

namespace {

// What the caller says in a device argument.
std::optional<c10::Device> requested_device(const CallPlan& plan, at::ArrayRef<IValue> args) {
  for (auto& slot : plan.slots)
    if (slot.kind == CallPlan::Arg::device && !args[slot.index].isNone()) return args[slot.index].toDevice();
  return std::nullopt;
}

}  // namespace

c10::DeviceIndex common_device(const c10::OperatorHandle& op, const CallPlan& plan, at::ArrayRef<IValue> args) {
  std::optional<c10::Device> found, host;
  const CallPlan::Slot* host_slot = nullptr;
  for (auto& slot : plan.slots) {
    for_each_tensor(slot, args[slot.index], [&](const at::Tensor& t) {
      const c10::Device device = t.device();
      if (device.type() == kNeuron) {
        if (found && *found != device) mixed_devices(op, slot, *found, device);
        found = device;
      } else if (!slot.may_be_host && (t.dim() > 0 || slot.written)) {
        host = device;
        host_slot = &slot;
      }
    });
  }
  if (found && host) mixed_devices(op, *host_slot, *found, *host);
  if (!found) found = requested_device(plan, args);
  // Host tensors alone come here if the caller gave them a neuron generator.
  TORCH_CHECK(found || !host || !plan.random, "Expected a 'cpu' device type for generator but found 'neuron' (",
              toString(op.operator_name()), ")");
  return found && found->type() == kNeuron ? resolve_device(found->index()) : current_device();
}

at::Generator derived_host_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex index) {
  auto [seed, offset] = generator_or_default(generator, index).reserve(4);
  // splitmix64 over both: neighbouring offsets must give unrelated streams.
  uint64_t z = seed + (offset + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return at::make_generator<at::CPUGeneratorImpl>(z ^ (z >> 31));
}

LibraryKernel::LibraryKernel(const c10::OperatorHandle& op)
    : plan_(op.schema()), counter_(counter(toString(op.operator_name()))) {}

void LibraryKernel::operator()(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, plan_.arguments);
  const size_t first = stack->size() - plan_.arguments;
  const c10::DeviceIndex index = common_device(op, plan_, args);

  DtypeUse use;
  for (auto& slot : plan_.slots)
    for_each_tensor(slot, args[slot.index], [&](const at::Tensor& t) {
      if (t.device().type() == kNeuron) use.add(t.scalar_type());
    });
  if (account(counter_, use) == Support::fallback && settings().strict) refuse(counter_, use, describe(args));

  fusion::count(fusion::g_stats.library_calls);
  begin_library_call(index);
  Capture* capture = current_capture();
  int generator_slot = -1;
  std::optional<at::Generator> generator;
  // empty_like and its kind may be asked for a result on another device.
  const c10::Device target = requested_device(plan_, args).value_or(c10::Device(kNeuron, index));
  const bool here = target.type() == kNeuron;
  const c10::DeviceIndex result_index = here ? resolve_device(target.index()) : -1;
  Bridge bridge(result_index);
  for (auto& slot : plan_.slots) {
    IValue& value = (*stack)[first + slot.index];
    switch (slot.kind) {
      case CallPlan::Arg::device:
        if (!value.isNone() && here) value = c10::Device(c10::kCPU);
        break;
      case CallPlan::Arg::generator:
        if (C10_LIKELY(!capture)) {
          value = derived_host_generator(value.toOptional<at::Generator>(), index);
        } else {
          generator_slot = slot.index;
          generator = value.toOptional<at::Generator>();
        }
        break;
      default:
        if (C10_UNLIKELY(capture != nullptr))
          for_each_tensor(slot, value, [&](const at::Tensor& t) { capture->touch(t, slot.written); });
        value = to_host(bridge, slot, std::move(value));
    }
  }
  {
    KernelScope scope(result_index);
    DeviceActivity activity(counter_.name, index);
    if (C10_LIKELY(!capture))
      op.callBoxed(stack);
    else
      capture->call(op, stack, plan_.arguments, plan_.returns, generator_slot, generator, index);
  }
  bridge.finish();
  if (here)
    for (size_t i = stack->size() - plan_.returns; i < stack->size(); i++) to_device(bridge, (*stack)[i]);
}

namespace {

// Operators of other namespaces, and what has no kernel of its own: one LibraryKernel an operator, made on first use.
void library_fallback(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  static auto* kernels = new std::unordered_map<c10::OperatorName, std::unique_ptr<LibraryKernel>>;
  static std::mutex mutex;
  LibraryKernel* kernel;
  {
    std::lock_guard lock(mutex);
    auto& slot = (*kernels)[op.operator_name()];
    if (!slot) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          op.hasComputedKernelForDispatchKey(DispatchKey::CPU) ||
              op.hasComputedKernelForDispatchKey(DispatchKey::SparseCPU) ||
              op.hasComputedKernelForDispatchKey(DispatchKey::SparseCsrCPU) ||
              op.hasComputedKernelForDispatchKey(DispatchKey::QuantizedCPU) ||
              op.hasComputedKernelForDispatchKey(DispatchKey::NestedTensorCPU),
          "Could not run '", toString(op.operator_name()),
          "' on neuron: it has neither a neuron nor a CPU kernel. Register one with torch.library, e.g. "
          "torch.library.impl(name, 'neuron'), or as an NKI kernel with nki_op.");
      slot = std::make_unique<LibraryKernel>(op);
    }
    kernel = slot.get();
  }
  (*kernel)(op, keys, stack);
}

// Our backend keys and the CPU keys whose kernels serve them.
struct KeyPair {
  DispatchKey neuron, cpu;
};
constexpr KeyPair kKeyPairs[] = {
    {DispatchKey::PrivateUse1, DispatchKey::CPU},
    {DispatchKey::SparsePrivateUse1, DispatchKey::SparseCPU},
    {DispatchKey::SparseCsrPrivateUse1, DispatchKey::SparseCsrCPU},
    {DispatchKey::QuantizedPrivateUse1, DispatchKey::QuantizedCPU},
    {DispatchKey::NestedTensorPrivateUse1, DispatchKey::NestedTensorCPU},
};

constexpr DispatchKey kComposites[] = {DispatchKey::CompositeImplicitAutograd, DispatchKey::CompositeExplicitAutograd,
                                       DispatchKey::CompositeExplicitAutogradNonFunctional};

bool wants_library_kernel(const c10::OperatorHandle& op, DispatchKey cpu) {
  if (!op.hasSchema() || op.operator_name().name.rfind("aten::", 0) != 0) return false;
  // Views of dense tensors are metadata and written out in views.cpp; those of other layouts share storages by the
  // bridge.
  const bool dense = cpu == DispatchKey::CPU;
  if (dense && whole_composite(op.operator_name().name)) return true;
  return op.hasKernelForDispatchKey(cpu) && !(dense && is_view(op.schema()));
}

// Filled by register_library, before any thread asks.
std::unordered_set<c10::OperatorName>& library_operators() {
  static auto* names = new std::unordered_set<c10::OperatorName>(direct_operators().begin(), direct_operators().end());
  return *names;
}

}  // namespace

bool is_library_operator(const c10::OperatorName& name) { return library_operators().count(name) > 0; }

size_t register_library() {
  static auto* libraries = new std::deque<torch::Library>;
  size_t count = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto [neuron, cpu] : kKeyPairs) {
    auto& library = libraries->emplace_back(torch::Library::IMPL, "aten", neuron, __FILE__, __LINE__);
    for (auto& name : dispatcher.getAllOpNames()) {
      auto op = dispatcher.findOp(name);
      if (!op || !wants_library_kernel(*op, cpu) || op->hasKernelForDispatchKey(neuron)) continue;
      std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<LibraryKernel>(*op)));
      if (cpu == DispatchKey::CPU) library_operators().insert(name);
      count++;
    }
  }
  return count;
}

std::vector<std::pair<std::string, std::string>> shadowed_operators() {
  std::vector<std::pair<std::string, std::string>> out;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto [neuron, cpu] : kKeyPairs)
    for (auto& name : dispatcher.getAllOpNames()) {
      auto op = dispatcher.findOp(name);
      if (!op || !wants_library_kernel(*op, cpu)) continue;
      const bool composite = std::any_of(std::begin(kComposites), std::end(kComposites),
                                         [&](DispatchKey key) { return op->hasKernelForDispatchKey(key); });
      if (composite) out.emplace_back(toString(neuron), toString(name));
    }
  return out;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&library_fallback>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&library_fallback>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&library_fallback>());
}
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&library_fallback>());
}
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&library_fallback>());
}

}  // namespace neuron
