// How communicators come and go. As HCCL's own: the root of a group tells its address before it knows whether it can take
// part; a link-up ends by itself, after HCCL_CONNECT_TIMEOUT, and no abort ends it; an abort suspends all of them, in a
// walk through their list without its lock. Here each abort that meets a thread inside HCCL ends the process.
#include "communicator.h"

#include "device.h"

#include <hccl/hccl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

namespace {

constexpr double MEGABYTE = 1 << 20;
std::mutex guard;
std::map<int, int> listeners;  // sockets of roots, by port
std::map<void *, fake::Shared> all;

std::atomic<int> inside{0};  // threads that build, resume or destroy a communicator

class Inside {
 public:
  Inside() { inside++; }
  ~Inside() { inside--; }
};

void refuse_abort() {
  if (inside == 0) return;
  std::fprintf(stderr, "[cann %d] the device was aborted while a thread was inside HCCL\n", getpid());
  raise(SIGSEGV);
}

const bool heard = (fake::on_abort(refuse_abort), true);

// Whether the process that had this device before has not let go of it yet: for a while after it was killed.
bool busy() { return fake::now_s() < fake::setting("FAKE_CANN_BUSY_UNTIL_S", 0); }

}  // namespace

namespace fake {

Communicator::~Communicator() { give_bytes(bytes); }

Shared communicator_of(void *handle) {
  std::lock_guard<std::mutex> held(guard);
  auto found = all.find(handle);
  return found == all.end() ? nullptr : found->second;
}

}  // namespace fake

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
  int port;
  int listener = fake::listen_anywhere(&port);
  std::lock_guard<std::mutex> held(guard);
  listeners[port] = listener;
  std::memcpy(info, &port, sizeof port);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo *info, uint32_t rank, const HcclCommConfig *config,
                                      HcclComm *handle) {
  Inside here;
  double limit_s = fake::now_s() + fake::setting("HCCL_CONNECT_TIMEOUT", 120);
  auto made = std::make_shared<fake::Communicator>(size, rank);
  made->aborts = fake::abort_count();
  if (config != nullptr) made->name = config->hcclCommName;
  int port, listener = -1;
  std::memcpy(&port, info, sizeof port);
  {
    std::lock_guard<std::mutex> held(guard);
    auto found = listeners.find(port);
    if (found != listeners.end()) listener = found->second;
  }
  if (size > 1) {
    if (busy()) {
      fake::fail(0, "EJ0001: Failed to initialize the HCCP process. Reason: Maybe the last training process is running.");
      return HCCL_E_UNAVAIL;
    }
    double megabytes = fake::setting("HCCL_BUFFSIZE", 200);
    if (config != nullptr && config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) megabytes = config->hcclBufferSize;
    uint64_t bytes = static_cast<uint64_t>(2 * MEGABYTE * megabytes);
    if (!fake::take_bytes(bytes)) {
      fake::fail(0, "EI0011: Failed to allocate memory for the communicator.");
      return HCCL_E_OOM;
    }
    made->bytes = bytes;
    bool up = !fake::next_link_up_fails() && made->links.meet(rank, listener, port, limit_s);
    fake::log("communicator %s of %u, rank %u: %s", made->name.c_str(), size, rank, up ? "up" : "not up");
    if (!up) {
      fake::fail(0, "EI0006: Getting socket times out.");
      return HCCL_E_TIMEOUT;
    }
  }
  std::lock_guard<std::mutex> held(guard);
  if (rank == 0 && listener >= 0) {
    close(listener);
    listeners.erase(port);
  }
  *handle = made.get();
  all[*handle] = made;
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *info, uint32_t rank, HcclComm *handle) {
  return HcclCommInitRootInfoConfig(size, info, rank, nullptr, handle);
}

HcclResult HcclCommDestroy(HcclComm handle) {
  Inside here;
  std::lock_guard<std::mutex> held(guard);
  fake::log("communicator destroyed");
  fake::mend_link();
  all.erase(handle);  // its links close when the work that uses them is over
  return HCCL_SUCCESS;
}

HcclResult HcclCommSuspend(HcclComm) { return HCCL_SUCCESS; }

// Use a communicator again after an abort. All notifies of the device are cleared, not only those of this communicator.
HcclResult HcclCommResume(HcclComm handle) {
  Inside here;
  std::lock_guard<std::mutex> held(guard);
  auto found = all.find(handle);
  if (found == all.end()) return HCCL_E_PARA;
  found->second->aborts = fake::abort_count();
  found->second->links.resume();
  for (auto &each : all) each.second->links.clear();
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) { return *error = HCCL_SUCCESS; }
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_SUPPORT_INIT_BY_ENV; }
const char *HcclGetErrorString(HcclResult) { return "unknown"; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclCommInitAll(uint32_t, int32_t *, HcclComm *) { return HCCL_E_NOT_SUPPORT; }

HcclResult HcclGetCommName(HcclComm handle, char *name) {
  auto found = fake::communicator_of(handle);
  if (!found) return HCCL_E_PARA;
  std::strncpy(name, found->name.c_str(), COMM_NAME_MAX_LENGTH - 1);
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm handle, uint32_t *size) {
  auto found = fake::communicator_of(handle);
  if (!found) return HCCL_E_PARA;
  *size = found->size;
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm handle, uint32_t *rank) {
  auto found = fake::communicator_of(handle);
  if (!found) return HCCL_E_PARA;
  *rank = found->rank;
  return HCCL_SUCCESS;
}

}  // extern "C"
