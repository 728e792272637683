// Recording of operators on lists of tensors.
#pragma once

#include "typed.h"

namespace neuron::fusion {

// A call on lists, member by member.
class ListCall {
 public:
  explicit ListCall(const Row& row) : row_(&row) {}
  // Read ones may be CPU tensors without dimensions: numbers.
  void list(at::TensorList tensors, bool written, bool read = true);
  void tensor(const Tensor& t) { lists_.push_back({{}, &t}); }
  // A tensor of one element for each member, in float32: to be read raw.
  void steps(at::TensorList tensors) { lists_.push_back({tensors, nullptr, true}); }
  void number(const c10::Scalar& s) { numbers_.push_back({s}); }
  void numbers(at::ArrayRef<c10::Scalar> s) { numbers_.emplace_back(s.begin(), s.end()); }

  // Records. `results`: the new tensors, if nothing is written in place.
  bool record(OpCounter& counter, std::vector<Tensor>* results);

 private:
  struct List {
    at::TensorList members;
    const Tensor* one = nullptr;  // instead: a tensor without dimensions, for all members
    bool steps = false;
  };
  const Row* row_;
  c10::SmallVector<List, 4> lists_;
  c10::SmallVector<at::TensorList, 4> written_;
  c10::SmallVector<std::vector<c10::Scalar>, 2> numbers_;
  c10::SmallVector<std::vector<c10::Scalar>, 2> host_;  // of tensor arguments that are numbers on the host
  c10::SmallVector<at::TensorList, 2> hosted_;          // those arguments
  uint8_t host_arguments_ = 0;                          // which they are: bit i for argument i
};

template <class Op, const Row& row, class Schema = typename Op::schema>
struct ForEach;

template <class Op, const Row& row, class Ret, class... Args>
struct ForEach<Op, row, Ret(Args...)> {
  static Ret call(Args... args) {
    static OpCounter& count = counter(direct::Direct<Op>::name());
    ListCall list(row);
    int position = 0;
    (visit<Args>(list, args, position++), ...);
    if constexpr (std::is_void_v<Ret>) {
      if (list.record(count, nullptr)) return;
    } else {
      std::vector<Tensor> results;
      if (list.record(count, &results)) return results;
    }
    return direct::Direct<Op>::boxed(std::forward<Args>(args)...);
  }

 private:
  template <class T, class V>
  static void visit(ListCall& list, const V& value, int position) {
    using Plain = std::decay_t<T>;
    if constexpr (std::is_same_v<Plain, at::TensorList>)
      list.list(value, position == 0 && std::is_void_v<Ret>);
    else if constexpr (std::is_same_v<Plain, Tensor>)
      list.tensor(value);
    else if constexpr (std::is_same_v<Plain, c10::Scalar>)
      list.number(value);
    else if constexpr (std::is_same_v<Plain, bool>)
      return;  // non_blocking
    else
      list.numbers(value);
  }
};

}  // namespace neuron::fusion
