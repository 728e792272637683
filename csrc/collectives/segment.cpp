#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace neuron::collectives {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kAlign = 64;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

size_t round_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

}  // namespace

void random_bytes(void* out, size_t n) {
  if (getrandom(out, n, 0) != static_cast<ssize_t>(n)) fail("The kernel gave no random bytes");
}

Segment::Segment(size_t bytes) : owner_(true) {
  fd_ = memfd_create("torchneuron", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) fail("Cannot create shared memory for collectives");
  if (fchmod(fd_, 0600) != 0 || ftruncate(fd_, static_cast<off_t>(bytes)) != 0 || fcntl(fd_, F_ADD_SEALS, kSeals) != 0)
    fail("Cannot set up " + std::to_string(bytes) + " bytes of shared memory for collectives");
  struct flock lock{};
  lock.l_type = F_WRLCK;
  if (fcntl(fd_, F_SETLK, &lock) != 0) fail("Cannot lock the shared memory for collectives");
  address_ = {getpid(), fd_, bytes, {}};
  random_bytes(address_.token.data(), address_.token.size());
  map();
  auto* h = new (base_) SegmentHeader;
  h->token = address_.token;
  const size_t start = round_up(sizeof(SegmentHeader));
  free_[start] = bytes - start;
}

Segment::Segment(const SegmentAddress& address) : address_(address), owner_(false) {
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const std::string who = "the shared memory of process " + std::to_string(address.pid) + " (" + path + ")";
  fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd_ < 0)
    fail("Cannot open " + who + "; ranks of one host must run as the same user in the same process namespace");
  try {
    struct stat st{};
    if (fstat(fd_, &st) != 0) fail("Cannot inspect " + who);
    if (st.st_uid != geteuid()) throw std::runtime_error("Refusing " + who + ": it belongs to another user");
    if ((fcntl(fd_, F_GET_SEALS) & kSeals) != kSeals || static_cast<uint64_t>(st.st_size) != address.bytes ||
        address.bytes < sizeof(SegmentHeader))
      throw std::runtime_error("Refusing " + who + ": it is not what the rank announced");
    map();
    if (header()->token != address.token) {
      munmap(base_, address_.bytes);
      throw std::runtime_error("Refusing " + who + ": it does not hold this job's token");
    }
  } catch (...) {
    close(fd_);
    throw;
  }
}

Segment::~Segment() {
  munmap(base_, address_.bytes);
  close(fd_);
}

void Segment::map() {
  base_ = mmap(nullptr, address_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (base_ == MAP_FAILED) fail("Cannot map " + std::to_string(address_.bytes) + " bytes of shared memory");
}

bool Segment::alive() const {
  if (owner_) return true;
  struct flock lock{};
  lock.l_type = F_WRLCK;
  return fcntl(fd_, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

void* Segment::checked(uint64_t offset, size_t bytes) {
  if (offset % kAlign || offset > address_.bytes || bytes > address_.bytes - offset)
    throw std::runtime_error("Process " + std::to_string(address_.pid) + " announced memory outside of its segment");
  return static_cast<char*>(base_) + offset;
}

std::optional<uint64_t> Segment::allocate(size_t bytes) {
  bytes = round_up(bytes ? bytes : 1);
  std::lock_guard lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    auto [offset, size] = *it;
    if (size < bytes) continue;
    free_.erase(it);
    if (size > bytes) free_[offset + bytes] = size - bytes;
    used_[offset] = bytes;
    return offset;
  }
  return std::nullopt;
}

void Segment::release(uint64_t offset) {
  std::lock_guard lock(mutex_);
  auto node = used_.extract(offset);
  uint64_t size = node.mapped();
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_[offset] = size;
}

size_t Segment::in_use() const {
  std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (auto& [offset, size] : used_) bytes += size;
  return bytes;
}

}  // namespace neuron::collectives
