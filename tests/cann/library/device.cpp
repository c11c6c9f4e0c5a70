// Devices, contexts, the abort of a device, and what CANN says about its last error.
#include "device.h"

#include <cstdarg>
#include <cstdio>
#include <unistd.h>

#include <atomic>
#include <map>

namespace {

constexpr int NONE = -1;
thread_local int current = NONE;
thread_local std::string recent;
thread_local std::string handed_out;
std::atomic<bool> any_taken{false};
std::atomic<bool> initialized{false};

const std::map<aclError, std::string> TEXTS = {
    {ACL_ERROR_RT_DEVICE_TASK_ABORT, "reason=[device task abort]"},
    {ACL_ERROR_RT_DEVICE_MEM_ERROR, "reason=[device mem error]"},
    {ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR, "reason=[hbm Multi-bit ECC error]"},
    {ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR, "reason=[suspect device mem error]"},
    {ACL_ERROR_RT_LINK_ERROR, "reason=[link error]"},
    {ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "reason=[suspect remote error]"},
    {ACL_ERROR_RT_COMM_OP_RETRY_FAIL, "reason=[hccl op retry failed]"},
    {ACL_ERROR_RT_LOST_HEARTBEAT, "reason=[the model stream execute failed]"},
    {ACL_ERROR_RT_AICORE_EXCEPTION, "reason=[aicore exception]"},
};

}  // namespace

namespace fake {

void log(const char *format, ...) {
  static const bool wanted = std::getenv("FAKE_CANN_LOG") != nullptr;
  if (!wanted) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "[cann %d] %.3f %s\n", getpid(), now_s(), text);
}

aclError fail(aclError code, const std::string &text) {
  recent = text;
  return code;
}

aclError fail(aclError code) {
  auto found = TEXTS.find(code);
  if (found != TEXTS.end()) {
    std::string text = "EZ9999: Inner Error!\nEZ9999: rtStreamSynchronize execute failed, " + found->second;
    if (code == ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR) {
      auto now = std::chrono::steady_clock::now().time_since_epoch();
      auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
      text += "\nHBM MULTI BIT ECC, device_id=0, time us=" + std::to_string(us) + ".";
    }
    return fail(code, text);
  }
  return code;
}

}  // namespace fake

extern "C" {

aclError aclInit(const char *) { return initialized.exchange(true) ? ACL_ERROR_REPEAT_INITIALIZE : ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char *aclrtGetSocName() { return "Ascend910B2"; }

aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = static_cast<uint32_t>(fake::setting("FAKE_CANN_DEVICES", 8));
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  current = device;
  any_taken = true;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
  if (current == NONE) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = current;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

// A context is the number of its device, from one on.
aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (current == NONE) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = reinterpret_cast<aclrtContext>(static_cast<intptr_t>(current) + 1);
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  current = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *, int32_t *active) {
  *active = any_taken;
  return ACL_SUCCESS;
}

aclError aclrtDeviceTaskAbort(int32_t device, uint32_t) {
  if (fake::device_lost()) return fake::fail(ACL_ERROR_RT_LOST_HEARTBEAT);
  double began_s = fake::now_s();
  fake::abort_streams();
  fake::log("device %d aborted in %.3f s", device, fake::now_s() - began_s);
  return ACL_SUCCESS;
}

// What the thread's last error was about. Asked for once: CANN forgets it then.
const char *aclGetRecentErrMsg() {
  handed_out = recent;
  recent.clear();
  return handed_out.c_str();
}

aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

}  // extern "C"
