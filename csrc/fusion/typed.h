// Kernels of pointwise operators, made from a row and the operator's signature:
//   const Tensor&   an input; on the host and without dimensions: a number
//   Tensor&         first: written in place (and read, unless the row overwrites); last: `out=`
//   Scalar, double  numbers, in order
#pragma once

#include <ATen/native/TypeProperties.h>

#include "aten/direct.h"
#include "record.h"

namespace neuron::fusion {

// Collects the arguments of one call.
class Arguments {
 public:
  explicit Arguments(const Row& row) : row_(&row) {}

  void tensor(const Tensor& t) {
    const int position = arguments_++;
    if (C10_LIKELY(t.device().type() == kNeuron)) {
      inputs_.push_back(&t);
      if (!(row_->raw >> position & 1)) promote(t);
      return;
    }
    const auto value = host_number(t);
    good_ = good_ && value && (row_->overwrites || !(row_->raw >> position & 1));
    if (!good_) return;
    numbers_ |= static_cast<uint8_t>(1u << position);
    hosted_.push_back(&t);
    numbers_values_.push_back(*value);
    if (!(row_->raw >> position & 1)) promote(t);
  }
  void number(const c10::Scalar& s) {
    if (row_->promoting >> scalars_.size() & 1 && !(simple_ && weaker(s.type()))) {
      simple_ = false;
      any_ = true;
      state_ = at::native::update_result_type_state(s, state_);
    }
    scalars_.push_back(s);
  }

  // A limit that need not be there.
  void limit(const std::optional<c10::Scalar>& s) {
    if (s) return number(*s);
    unlimited_ |= 1u << scalars_.size();
    scalars_.emplace_back(0);
  }
  void flag(bool value) {
    if (value) row_ = row_->other;
  }
  void flag(c10::string_view approximate) {
    good_ = good_ && (approximate == "tanh" || approximate == "none");
    flag(approximate == "tanh");
  }

  // Records; false if the call is not fusible.
  bool record(OpCounter& counter, Tensor& out) {
    if (!good_ || (inputs_.empty() && !out.defined())) return false;
    c10::ScalarType type = simple_ ? first_ : any_ ? at::native::result_type(state_) : out.scalar_type();
    if (row_->to_float && c10::isIntegralType(type, true)) type = c10::typeMetaToScalarType(c10::get_default_dtype());
    const auto compute = dtype_of(type);
    if (!compute) return false;
    const uint8_t kind = !is_integer(*compute) ? kFloats : *compute == Dtype::boolean ? kBools : kInts;
    const Row* row = row_;
    if (row->for_number && scalars_.size() == 1 && !scalars_[0].isComplex())
      if (const Row* special = row->for_number(scalars_[0].to<double>())) {
        row = special;
        if (row->drops_number) scalars_.clear();
      }
    if (!(row->types & kind) || (row->divides && kind == kInts && !divisor_is_good())) return false;
    Call call{*row, counter, type, row_->to_bool ? c10::ScalarType::Bool : type, std::move(inputs_), {}, numbers_};
    call.hosted = std::move(hosted_);
    for (const c10::Scalar& s : numbers_values_)
      if (!push(call, s, *compute)) return false;
    for (size_t i = 0; i < scalars_.size(); i++)
      if (unlimited_ >> i & 1)
        call.scalars.push_back(kind != kFloats ? lane(i ? INT32_MAX : INT32_MIN) : lane(i ? INFINITY : -INFINITY));
      else if (!push(call, scalars_[i], *compute))
        return false;
    return record_pointwise(call, out);
  }

 private:
  static bool push(Call& call, const c10::Scalar& s, Dtype compute) {
    const auto value = lane_of(s, compute);
    if (value) call.scalars.push_back(*value);
    return value.has_value();
  }
  bool divisor_is_good() const {
    if (scalars_.size() == 1) return !scalars_[0].equal(0);
    return numbers_ == 2 && !numbers_values_[0].equal(0);
  }
  void promote(const Tensor& t) {
    if (!any_) {
      any_ = true;
      first_ = t.scalar_type();
      simple_ = t.dim() > 0;
      if (C10_LIKELY(simple_)) {
        state_.dimResult = first_;
        return;
      }
    } else if (simple_) {
      if (C10_LIKELY(t.dim() > 0 && t.scalar_type() == first_)) return;
      if (t.unsafeGetTensorImpl()->is_wrapped_number() && weaker(t.scalar_type())) return;
      simple_ = false;
    }
    state_ = at::native::update_result_type_state(t, state_);
  }
  // Whether a number of this type leaves the type of a tensor with dimensions alone.
  bool weaker(c10::ScalarType type) const {
    return c10::isFloatingType(first_) ? !c10::isComplexType(type)
                                       : c10::isIntegralType(first_, false) && c10::isIntegralType(type, true);
  }

  const Row* row_;
  c10::SmallVector<const Tensor*, 4> inputs_;
  c10::SmallVector<const Tensor*, 2> hosted_;  // on the host: numbers
  c10::SmallVector<c10::Scalar, 2> numbers_values_, scalars_;
  uint8_t numbers_ = 0;
  uint32_t unlimited_ = 0;
  int arguments_ = 0;
  bool good_ = true;
  bool any_ = false;     // an argument took part in promotion
  bool simple_ = false;  // the type is that of the first one
  c10::ScalarType first_ = c10::ScalarType::Undefined;
  at::native::ResultTypeState state_;
};

template <class Op, const Row& row, class Schema = typename Op::schema>
struct Typed;

template <class Op, const Row& row, class Ret, class... Args>
struct Typed<Op, row, Ret(Args...)> {
  static Ret call(Args... args) {
    static OpCounter& count = counter(direct::Direct<Op>::name());
    Arguments arguments(row);
    Tensor* out = nullptr;
    int position = 0;
    (visit<Args>(arguments, args, position++, out), ...);
    if constexpr (std::is_same_v<Ret, Tensor>) {
      Tensor result;
      if (C10_LIKELY(arguments.record(count, result))) return result;
    } else {
      if (C10_LIKELY(arguments.record(count, *out))) return *out;
    }
    return direct::Direct<Op>::call(std::forward<Args>(args)...);
  }

 private:
  template <class T, class V>
  static void visit(Arguments& arguments, V& value, int position, Tensor*& out) {
    using Plain = std::decay_t<T>;
    if constexpr (std::is_same_v<T, Tensor&>) {
      out = &value;
      if (position == 0 && !row.overwrites) arguments.tensor(value);
    } else if constexpr (std::is_same_v<Plain, Tensor>) {
      arguments.tensor(value);
    } else if constexpr (std::is_same_v<Plain, std::optional<c10::Scalar>>) {
      arguments.limit(value);
    } else if constexpr (std::is_same_v<Plain, bool> || std::is_same_v<Plain, c10::string_view>) {
      arguments.flag(value);
    } else {
      arguments.number(value);
    }
  }
};

}  // namespace neuron::fusion
