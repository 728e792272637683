#include "loop.h"

#include "../simd/lanes.h"
#include "../tile_program.h"

namespace neuron {

bool has_loops() {
  // A system may forbid memory that holds code.
  static const bool has = [] {
    constexpr uint8_t kReturn[] = {0xc3};
    return lane_kernels().call[static_cast<int>(LaneOp::exp)] && Code(kReturn);
  }();
  return has;
}

Loop::Function Loop::function(const TileProgram& program, const Layout& layout) const {
  auto find = [&]() -> Function {
    for (const Variant* v = variants_->first.load(std::memory_order_acquire); v; v = v->next)
      if (v->layout == layout) return v->function;
    return nullptr;
  };
  if (Function f = find()) return f;
  std::lock_guard lock(variants_->mutex);
  if (Function f = find()) return f;
  const LoopCode made = emit(program, *this, layout);
  Code code(made.bytes);
  if (!code) throw std::bad_alloc();
  const auto function = reinterpret_cast<Function>(reinterpret_cast<uintptr_t>(code.data() + made.entry));
  auto* variant = new Variant{layout, std::move(code), function, variants_->first.load(std::memory_order_relaxed)};
  variants_->first.store(variant, std::memory_order_release);
  return function;
}

Loop::Variants::~Variants() {
  for (Variant* v = first; v;) delete std::exchange(v, v->next);
}

}  // namespace neuron
