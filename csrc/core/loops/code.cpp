#include "code.h"

#include <sys/mman.h>

#include <cstring>

namespace neuron {

Code::Code(std::span<const uint8_t> bytes) : size_(bytes.size()) {
  void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return;
  std::memcpy(p, bytes.data(), size_);
  if (mprotect(p, size_, PROT_READ | PROT_EXEC) == 0)
    p_ = static_cast<uint8_t*>(p);
  else
    munmap(p, size_);
}

Code::~Code() {
  if (p_) munmap(p_, size_);
}

}  // namespace neuron
