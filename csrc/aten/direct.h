// The library path of the most frequent operators without boxing: the same steps as LibraryKernel on typed arguments.
//
// For small tensors a call is dominated by its overhead. Whatever is out of the ordinary (layouts other than strided,
// tensors on several devices, graph capture) goes on to the boxed kernel, which also words the errors.
#pragma once

#include <ATen/Operators.h>
#include <torch/library.h>

#include <tuple>
#include <type_traits>

#include "fusion/stats.h"
#include "graph.h"
#include "library.h"
#include "runtime/profiler.h"

namespace neuron::direct {

using at::Tensor;

template <class T>
constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, Tensor>;
template <class T>
constexpr bool is_optional_tensor = std::is_same_v<std::decay_t<T>, std::optional<Tensor>>;
template <class T>
constexpr bool is_written = std::is_same_v<T, Tensor&>;

// What a look at the arguments tells.
struct Survey {
  c10::DeviceIndex index = -1;
  bool ordinary = true;
  DtypeUse use;

  void tensor(const Tensor& t, bool written) {
    if (!t.defined()) return;
    const c10::Device device = t.device();
    if (C10_LIKELY(device.type() == kNeuron)) {
      ordinary &= (index == -1 || index == device.index()) && t.layout() == c10::kStrided && !t.is_quantized() &&
                  !t.is_nested() && has_twin(*t.storage().unsafeGetStorageImpl());
      index = device.index();
      use.add(t.scalar_type());
    } else {
      ordinary &= t.dim() == 0 && !written;
    }
  }
  template <class T>
  void argument(const T& value, bool written) {
    if constexpr (is_tensor<T>) tensor(value, written);
    if constexpr (is_optional_tensor<T>)
      if (value) tensor(*value, false);
  }
};

inline Tensor lower(const Tensor& t) { return is_neuron(t) ? host_alias(t) : t; }
inline std::optional<Tensor> lower(const std::optional<Tensor>& t) {
  return t ? std::optional(lower(*t)) : std::nullopt;
}
template <class T>
const T& lower(const T& value) {
  return value;
}

template <class T>
T raise(T&& host, c10::DeviceIndex index) {
  if constexpr (is_tensor<T>)
    return adopt_host_tensor(host, index);
  else
    return std::apply([&](auto&&... parts) { return T(raise(std::move(parts), index)...); }, std::move(host));
}

template <class Op, class Schema = typename Op::schema>
struct Direct;

template <class Op, class Ret, class... Args>
struct Direct<Op, Ret(Args...)> {
  static std::string name() {
    return *Op::overload_name ? std::string(Op::name) + "." + Op::overload_name : std::string(Op::name);
  }

  static Ret call(Args... args) {
    static OpCounter& count = counter(name());
    Survey survey;
    (survey.argument(args, is_written<Args>), ...);
    if (C10_UNLIKELY(!survey.ordinary || survey.index < 0 || current_capture())) return boxed(args...);
    if (account(count, survey.use) == Support::fallback && C10_UNLIKELY(settings().strict)) return boxed(args...);
    fusion::count(fusion::g_stats.library_calls);
    begin_library_call(survey.index);
    std::tuple<decltype(lower(std::declval<std::decay_t<Args>&>()))...> host{lower(args)...};
    auto run = [&]() -> decltype(auto) {
      KernelScope scope(survey.index);
      DeviceActivity activity(count.name, survey.index);
      return std::apply([](auto&... a) -> Ret { return Op::redispatch(kCpu, a...); }, host);
    };
    if constexpr (std::is_same_v<Ret, Tensor&>) {
      run();
      return carry_back<0>(host, args...);
    } else {
      return raise(run(), survey.index);
    }
  }

  // The general path.
  static Ret boxed(Args... args) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    static auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<LibraryKernel>(op));
    return kernel.template call<Ret, Args...>(op, kCpu, std::forward<Args>(args)...);
  }

 private:
  static constexpr c10::DispatchKeySet kCpu{c10::DispatchKey::CPU};

  // The written argument, after changes of its sizes and storage were carried back.
  template <size_t I, class Host, class First, class... Rest>
  static Tensor& carry_back(Host& host, First& first, Rest&... rest) {
    if constexpr (is_written<std::tuple_element_t<I, std::tuple<Args...>>>) {
      carry_back_strided(first, std::get<I>(host));
      return first;
    } else {
      return carry_back<I + 1>(host, rest...);
    }
  }
};

}  // namespace neuron::direct
