#include <ATen/ScalarOps.h>

#include <unordered_set>

#include "fusion/stats.h"
#include "runtime/profiler.h"
#include "step.h"

namespace neuron {

using c10::DispatchKey;
using c10::IValue;

namespace {

IValue make_list(const Operand& operand, Frame& frame, bool host) {
  auto fill = [&](auto list, auto convert) {
    list.reserve(operand.items.size());
    for (auto& item : operand.items) list.push_back(convert(item.get(frame, host)));
    return IValue(std::move(list));
  };
  switch (operand.element) {
    case Operand::Element::tensor:
      return fill(c10::List<at::Tensor>(), [](IValue v) { return std::move(v).toTensor(); });
    case Operand::Element::optional_tensor:
      return fill(c10::List<std::optional<at::Tensor>>(), [](IValue v) {
        return v.isNone() ? std::optional<at::Tensor>() : std::optional(std::move(v).toTensor());
      });
    case Operand::Element::integer:
      return fill(c10::List<int64_t>(), [](const IValue& v) { return v.toInt(); });
    case Operand::Element::floating:
      return fill(c10::List<double>(), [](const IValue& v) { return v.toScalar().toDouble(); });
    case Operand::Element::boolean:
      return fill(c10::List<bool>(), [](const IValue& v) { return v.toBool(); });
    case Operand::Element::scalar:
      break;
  }
  return fill(c10::impl::GenericList(c10::NumberType::get()), [](IValue v) { return v; });
}

// A number where a tensor is expected weighs less in type promotion than a tensor.
at::Tensor wrapped_number(const IValue& number) {
  at::Tensor t = c10::scalar_to_tensor(number.toScalar());
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

}  // namespace

IValue Operand::get(Frame& frame, bool host) const {
  switch (kind) {
    case Kind::constant:
      return constant;
    case Kind::slot:
      return host ? frame.host(slot) : frame.device(slot);
    case Kind::last_use:
      return host ? frame.take_host(slot) : frame.take_device(slot);
    case Kind::list:
      break;
  }
  return make_list(*this, frame, host);
}

OperatorStep::OperatorStep(const c10::OperatorHandle& op, std::vector<Operand> arguments, std::vector<uint32_t> outs,
                           Site site)
    : op_(op),
      plan_(op.schema()),
      arguments_(std::move(arguments)),
      outs_(std::move(outs)),
      site_(site),
      counter_(is_library_operator(op.operator_name()) ? &counter(toString(op.operator_name())) : nullptr) {}

void OperatorStep::run(Frame& frame) const {
  // In strict mode a fallback is refused by the kernel that eager has.
  const bool refused = counter_ && (!counter_->row || site_.dtypes.unsupported) && settings().strict;
  const bool host = site_.bridged && frame.bridged && !refused;
  torch::jit::Stack& stack = frame.stack;
  for (auto& argument : arguments_) stack.push_back(argument.get(frame, host));
  for (auto& slot : plan_.slots) {
    IValue& value = stack[slot.index];
    if (slot.kind == CallPlan::Arg::tensor && C10_UNLIKELY(value.isScalar())) value = wrapped_number(value);
  }
  if (host)
    run_bridged(frame);
  else
    op_.callBoxed(&stack);

  size_t count = 0;
  auto store = [&](IValue&& value) {
    TORCH_CHECK(count < outs_.size(), toString(op_.operator_name()), " returned more than the ", outs_.size(),
                " results that the compiled graph expects.");
    if (host)
      frame.set_host(outs_[count++], std::move(value), site_.index);
    else
      frame.set(outs_[count++], std::move(value));
  };
  for (IValue& value : stack) {
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) store(t);
    else
      store(std::move(value));
  }
  TORCH_CHECK(count == outs_.size(), toString(op_.operator_name()), " returned ", count,
              " results, the compiled graph ", "expects ", outs_.size(), ".");
}

void OperatorStep::run_bridged(Frame& frame) const {
  if (counter_) {
    account(*counter_, site_.dtypes);
    fusion::count(fusion::g_stats.library_calls);
  }
  if (site_.index >= 0) {
    begin_library_call(site_.index);
    for (auto& slot : plan_.slots) {
      IValue& value = frame.stack[slot.index];
      if (slot.kind == CallPlan::Arg::device && !value.isNone()) value = c10::Device(c10::kCPU);
    }
  }
  static const std::string uncounted = "view or composite";
  HostAllocationScope allocations(site_.index);
  DeviceActivity activity(counter_ ? counter_->name : uncounted, site_.index);
  op_.callBoxed(&frame.stack);
}

namespace {

// Kernels of the device's own that do what the CPU's do.
bool is_twin(const std::string& name) {
  static const std::unordered_set<std::string> names = {"aten::empty.memory_format",
                                                        "aten::empty_strided",
                                                        "aten::as_strided",
                                                        "aten::view",
                                                        "aten::_reshape_alias",
                                                        "aten::unfold",
                                                        "aten::view_as_real",
                                                        "aten::view_as_complex",
                                                        "aten::copy_",
                                                        "aten::_unsafe_view",
                                                        "aten::_local_scalar_dense"};
  return names.count(name) > 0;
}

// Composites that move data and compute nothing: on CPU they are made of the same moves.
bool moves_data(const std::string& name) {
  static const std::unordered_set<std::string> names = {"aten::clone",
                                                        "aten::copy",
                                                        "aten::_to_copy",
                                                        "aten::zeros",
                                                        "aten::ones",
                                                        "aten::full",
                                                        "aten::zeros_like",
                                                        "aten::ones_like",
                                                        "aten::full_like",
                                                        "aten::empty_like",
                                                        "aten::new_empty",
                                                        "aten::new_zeros",
                                                        "aten::new_ones",
                                                        "aten::new_full",
                                                        "aten::new_empty_strided",
                                                        "aten::scalar_tensor",
                                                        "aten::select_backward",
                                                        "aten::slice_backward",
                                                        "aten::diagonal_backward",
                                                        "aten::slice_scatter",
                                                        "aten::select_scatter",
                                                        "aten::repeat",
                                                        "aten::as_strided_scatter",
                                                        "aten::diagonal_scatter",
                                                        "aten::constant_pad_nd",
                                                        "aten::embedding",
                                                        "aten::lift_fresh_copy"};
  return names.count(name) > 0;
}

bool is_view(const c10::OperatorHandle& op) {
  if (op.operator_name().name == "aten::_unsafe_view") return true;
  bool view = false;
  for (auto& r : op.schema().returns()) {
    if (!r.alias_info()) continue;
    if (r.alias_info()->isWrite()) return false;
    view = true;
  }
  return view;
}

}  // namespace

bool runs_bridged(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  if (name.name.rfind("aten::", 0) != 0 || op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  if (is_library_operator(name) || is_twin(toString(name)) || moves_data(name.name)) return true;
  return is_view(op) && !op.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
}

Fusion fusion_of(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  if (name.name.rfind("aten::", 0) != 0 || op.hasTag(at::Tag::nondeterministic_seeded) || is_library_operator(name))
    return Fusion::none;
  if (is_view(op)) return Fusion::view;
  static const std::unordered_set<std::string> moves = {
      "aten::cat",           "aten::clone",     "aten::copy",      "aten::_to_copy", "aten::copy_",
      "aten::zeros_like",    "aten::ones_like", "aten::full_like", "aten::zeros",    "aten::ones",
      "aten::full",          "aten::new_zeros", "aten::new_ones",  "aten::new_full", "aten::select_backward",
      "aten::slice_backward"};
  // Composites of one fusible operator.
  static const std::unordered_set<std::string> with_numbers = {"aten::add.Scalar",  "aten::sub.Scalar",
                                                               "aten::rsub.Scalar", "aten::mul.Scalar",
                                                               "aten::div.Scalar",  "aten::div.Scalar_mode"};
  if (moves.count(name.name) || with_numbers.count(toString(name))) return Fusion::program;
  const OpRow* row = find_row(name.name);
  const bool own = op.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
  return own && row && row->kind == OpKind::fusible ? Fusion::program : Fusion::none;
}

}  // namespace neuron
