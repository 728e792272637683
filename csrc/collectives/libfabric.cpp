// Fabric over libfabric 1.x, which is loaded when the first group spans hosts.
#include "fabric.h"

#if __has_include(<rdma/fabric.h>)

#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace neuron::collectives {

namespace {

constexpr const char* kInstall = "Install the Debian package libfabric1 (on AWS: the EFA installer)";

struct Library {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
};

const Library& library() {
  static const Library lib = [] {
    void* handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle)
      throw std::runtime_error(std::string("Ranks on several hosts need libfabric, which cannot be loaded (") +
                               dlerror() + "). " + kInstall + " on every host");
    auto symbol = [&](auto& out, const char* name) {
      out = reinterpret_cast<std::remove_reference_t<decltype(out)>>(dlsym(handle, name));
      if (!out) throw std::runtime_error(std::string("libfabric.so.1 has no ") + name + ". " + kInstall);
    };
    Library l{};
    symbol(l.getinfo, "fi_getinfo");
    symbol(l.freeinfo, "fi_freeinfo");
    symbol(l.dupinfo, "fi_dupinfo");
    symbol(l.fabric, "fi_fabric");
    symbol(l.strerror, "fi_strerror");
    return l;
  }();
  return lib;
}

void check(int code, const char* what) {
  if (code < 0) throw std::runtime_error(std::string("libfabric: ") + what + ": " + library().strerror(-code));
}

// What libfabric knows a transfer by; it must outlive the transfer, also if the coroutine that waits does not.
struct Transfer {
  fi_context context{};
  bool done = false, abandoned = false;
  int error = 0;
  size_t bytes = 0;
};

struct FreeInfo {
  void operator()(fi_info* info) const { library().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

template <class T>
struct CloseObject {
  void operator()(T* object) const { fi_close(&object->fid); }
};
template <class T>
using Object = std::unique_ptr<T, CloseObject<T>>;

static_assert(Fabric::kAnyPeer == FI_ADDR_UNSPEC);

class Libfabric final : public Fabric {
 public:
  explicit Libfabric(const std::string& interface_address);
  std::string address() const override;
  std::string provider() const override { return info_->fabric_attr->prov_name; }
  uint64_t connect(const std::string& address) override;
  bool poll() override;
  Task<> send(uint64_t peer, uint64_t tag, const std::byte* data, size_t bytes, int rank) override;
  Task<> receive(uint64_t peer, uint64_t tag, std::byte* data, size_t bytes, int rank) override;
  Task<bool> probe(uint64_t peer, uint64_t tag) override;

 private:
  // The coroutine's hold on a transfer.
  struct Hold {
    Libfabric& fabric;
    Transfer* transfer = new Transfer;
    ~Hold() {
      if (transfer->done) {
        delete transfer;
        return;
      }
      transfer->abandoned = true;
      fi_cancel(&fabric.endpoint_->fid, &transfer->context);
    }
  };
  // Buffers that the network card reads and writes must be registered with some providers.
  Object<fid_mr> registered(const void* data, size_t bytes, uint64_t access, void*& descriptor);
  Task<> finish(Transfer& transfer, const char* what, int rank);

  Info info_;
  Object<fid_fabric> fabric_;
  Object<fid_domain> domain_;
  Object<fid_av> addresses_;
  Object<fid_cq> completions_;
  Object<fid_ep> endpoint_;
  uint64_t next_key_ = 0;
};

template <class T, class Open>
Object<T> make(Open open, const char* what) {
  T* object = nullptr;
  check(open(&object), what);
  return Object<T>(object);
}

Libfabric::Libfabric(const std::string& interface_address) {
  Info hints(library().dupinfo(nullptr));
  hints->caps = FI_TAGGED | FI_DIRECTED_RECV;
  hints->mode = FI_CONTEXT;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->control_progress = hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAS;
  // FI_PROVIDER limits what the library offers; without it the order is ours.
  const char* order[] = {"efa", "tcp;ofi_rxm", "tcp"};
  fi_info* found = nullptr;
  int code = -FI_ENODATA;
  for (const char* name : order) {
    free(hints->fabric_attr->prov_name);
    hints->fabric_attr->prov_name = strdup(name);
    const bool has_address = !interface_address.empty() && std::strcmp(name, "efa") != 0;
    code = library().getinfo(FI_VERSION(1, 15), has_address ? interface_address.c_str() : nullptr, nullptr,
                             has_address ? FI_SOURCE : 0, hints.get(), &found);
    if (code == 0) break;
  }
  check(code, "no provider for messages between hosts (FI_PROVIDER may exclude tcp and efa)");
  info_.reset(found);
  fabric_ = make<fid_fabric>([&](fid_fabric** f) { return library().fabric(info_->fabric_attr, f, nullptr); },
                             "opening the fabric");
  domain_ = make<fid_domain>([&](fid_domain** d) { return fi_domain(fabric_.get(), info_.get(), d, nullptr); },
                             "opening the domain");
  fi_av_attr av{};
  av.type = FI_AV_TABLE;
  addresses_ =
      make<fid_av>([&](fid_av** a) { return fi_av_open(domain_.get(), &av, a, nullptr); }, "making the address table");
  fi_cq_attr cq{};
  cq.format = FI_CQ_FORMAT_TAGGED;
  completions_ = make<fid_cq>([&](fid_cq** c) { return fi_cq_open(domain_.get(), &cq, c, nullptr); },
                              "making the completion queue");
  endpoint_ = make<fid_ep>([&](fid_ep** e) { return fi_endpoint(domain_.get(), info_.get(), e, nullptr); },
                           "making the endpoint");
  check(fi_ep_bind(endpoint_.get(), &addresses_->fid, 0), "binding the address table");
  check(fi_ep_bind(endpoint_.get(), &completions_->fid, FI_TRANSMIT | FI_RECV), "binding the completion queue");
  check(fi_enable(endpoint_.get()), "enabling the endpoint");
}

std::string Libfabric::address() const {
  char name[256];
  size_t bytes = sizeof name;
  check(fi_getname(&endpoint_->fid, name, &bytes), "reading the address");
  return {name, bytes};
}

uint64_t Libfabric::connect(const std::string& address) {
  if (address.size() > 256) throw std::runtime_error("A rank announced a network address that is too long");
  char padded[256] = {};
  std::memcpy(padded, address.data(), address.size());
  fi_addr_t out = FI_ADDR_UNSPEC;
  if (fi_av_insert(addresses_.get(), padded, 1, &out, 0, nullptr) != 1)
    throw std::runtime_error("libfabric cannot use the network address that a rank announced");
  return out;
}

bool Libfabric::poll() {
  fi_cq_tagged_entry entries[16];
  bool moved = false;
  auto finish = [&](void* context, int error, size_t bytes) {
    auto* transfer = static_cast<Transfer*>(context);
    moved = true;
    if (transfer->abandoned) {
      delete transfer;
      return;
    }
    transfer->error = error;
    transfer->bytes = bytes;
    transfer->done = true;
  };
  while (true) {
    const ssize_t n = fi_cq_read(completions_.get(), entries, 16);
    if (n > 0) {
      for (ssize_t i = 0; i < n; i++) finish(entries[i].op_context, 0, entries[i].len);
      continue;
    }
    if (n != -FI_EAVAIL) return moved;
    fi_cq_err_entry error{};
    if (fi_cq_readerr(completions_.get(), &error, 0) != 1) return moved;
    if (error.op_context) finish(error.op_context, error.err, error.len + error.olen);
  }
}

Object<fid_mr> Libfabric::registered(const void* data, size_t bytes, uint64_t access, void*& descriptor) {
  if (!(info_->domain_attr->mr_mode & FI_MR_LOCAL) || !bytes) return nullptr;
  auto mr = make<fid_mr>(
      [&](fid_mr** m) { return fi_mr_reg(domain_.get(), data, bytes, access, 0, next_key_++, 0, m, nullptr); },
      "registering memory");
  descriptor = fi_mr_desc(mr.get());
  return mr;
}

Task<> Libfabric::finish(Transfer& transfer, const char* what, int rank) {
  co_await until([&] { return transfer.done; });
  if (transfer.error && transfer.error != FI_ETRUNC)
    throw std::runtime_error(std::string(what) + " rank " + std::to_string(rank) + ": " +
                             library().strerror(transfer.error) + " (the connection is lost or the rank has left)");
}

Task<> Libfabric::send(uint64_t peer, uint64_t tag, const std::byte* data, size_t bytes, int rank) {
  Hold hold{*this};
  void* descriptor = nullptr;
  auto mr = registered(data, bytes, FI_SEND, descriptor);
  ssize_t code = 0;
  co_await until([&] {
    code = fi_tsend(endpoint_.get(), data, bytes, descriptor, peer, tag, &hold.transfer->context);
    return code != -FI_EAGAIN;
  });
  if (code < 0) hold.transfer->done = true;
  check(static_cast<int>(code), "sending");
  co_await finish(*hold.transfer, "sending to", rank);
}

Task<> Libfabric::receive(uint64_t peer, uint64_t tag, std::byte* data, size_t bytes, int rank) {
  Hold hold{*this};
  void* descriptor = nullptr;
  auto mr = registered(data, bytes, FI_RECV, descriptor);
  ssize_t code = 0;
  co_await until([&] {
    code = fi_trecv(endpoint_.get(), data, bytes, descriptor, peer, tag, 0, &hold.transfer->context);
    return code != -FI_EAGAIN;
  });
  if (code < 0) hold.transfer->done = true;
  check(static_cast<int>(code), "receiving");
  co_await finish(*hold.transfer, "receiving from", rank);
  if (hold.transfer->bytes != bytes || hold.transfer->error == FI_ETRUNC)
    throw LengthMismatch{rank, hold.transfer->bytes, bytes};
}

Task<bool> Libfabric::probe(uint64_t peer, uint64_t tag) {
  Hold hold{*this};
  fi_msg_tagged message{};
  message.addr = peer;
  message.tag = tag;
  message.context = &hold.transfer->context;
  ssize_t code = 0;
  co_await until([&] {
    code = fi_trecvmsg(endpoint_.get(), &message, FI_PEEK);
    return code != -FI_EAGAIN;
  });
  if (code < 0) hold.transfer->done = true;
  check(static_cast<int>(code), "looking for a message");
  co_await until([&] { return hold.transfer->done; });
  co_return hold.transfer->error == 0;
}

}  // namespace

std::unique_ptr<Fabric> Fabric::open(const std::string& interface_address) {
  return std::make_unique<Libfabric>(interface_address);
}

}  // namespace neuron::collectives

#else

#include <stdexcept>

namespace neuron::collectives {

std::unique_ptr<Fabric> Fabric::open(const std::string&) {
  throw std::runtime_error(
      "Ranks on several hosts need libfabric, and torchneuron was built without its headers: install the Debian "
      "package "
      "libfabric-dev and build again");
}

}  // namespace neuron::collectives

#endif
