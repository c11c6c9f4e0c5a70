// Device memory, which is host memory that is counted, and its errors.
#include "device.h"

#include <cstring>
#include <map>
#include <vector>

namespace {

constexpr size_t ALIGNMENT = 512;
std::mutex guard;
std::map<char *, size_t> blocks;
size_t used = 0;
std::vector<aclrtMemUceInfo> errors;

size_t total() { return static_cast<size_t>(fake::setting("FAKE_CANN_MEMORY_GB", 64) * (1ul << 30)); }
size_t rounded(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

}  // namespace

namespace fake {

bool take_bytes(size_t bytes) {
  std::lock_guard<std::mutex> held(guard);
  if (used + bytes > total()) return false;
  used += bytes;
  return true;
}

void give_bytes(size_t bytes) {
  std::lock_guard<std::mutex> held(guard);
  used -= bytes;
}

}  // namespace fake

extern "C" {

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy) {
  size_t bytes = rounded(size ? size : 1);
  if (!fake::take_bytes(bytes)) {
    return fake::fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "EL0004: Failed to allocate memory.");
  }
  *pointer = std::aligned_alloc(ALIGNMENT, bytes);
  std::lock_guard<std::mutex> held(guard);
  blocks[static_cast<char *>(*pointer)] = bytes;
  return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, size, policy);
}

aclError aclrtFree(void *pointer) {
  size_t bytes;
  {
    std::lock_guard<std::mutex> held(guard);
    auto found = blocks.find(static_cast<char *>(pointer));
    if (found == blocks.end()) return ACL_ERROR_RT_PARAM_INVALID;
    bytes = found->second;
    blocks.erase(found);
  }
  fake::give_bytes(bytes);
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free, size_t *all) {
  std::lock_guard<std::mutex> held(guard);
  *all = total();
  *free = *all - used;
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **pointer, size_t size) {
  *pointer = std::aligned_alloc(ALIGNMENT, rounded(size ? size : 1));
  return *pointer ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *) {
  return aclrtMallocHost(pointer, size);
}

aclError aclrtFreeHost(void *pointer) {
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind) {
  std::memcpy(to, from, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind, aclrtStream stream) {
  return fake::enqueue(stream, [=](uint64_t) {
    std::memcpy(to, from, bytes);
    return ACL_SUCCESS;
  });
}

aclError aclrtMemset(void *to, size_t, int32_t value, size_t bytes) {
  std::memset(to, value, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *to, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  return fake::enqueue(stream, [=](uint64_t) {
    std::memset(to, value, bytes);
    return ACL_SUCCESS;
  });
}

// Damage memory, and have it found by aclrtGetMemUceInfo.
void fake_cann_damage(void *address, size_t bytes) {
  std::lock_guard<std::mutex> held(guard);
  aclrtMemUceInfo info{};
  info.addr = address;
  info.len = bytes;
  errors.push_back(info);
  auto above = blocks.upper_bound(static_cast<char *>(address));
  if (above == blocks.begin()) return;
  auto block = std::prev(above);
  if (static_cast<char *>(address) + bytes <= block->first + block->second) std::memset(address, 0xff, bytes);
}

aclError aclrtGetMemUceInfo(int32_t, aclrtMemUceInfo *infos, size_t room, size_t *found) {
  std::lock_guard<std::mutex> held(guard);
  *found = std::min(room, errors.size());
  for (size_t index = 0; index < *found; index++) infos[index] = errors[index];
  return ACL_SUCCESS;
}

aclError aclrtMemUceRepair(int32_t, aclrtMemUceInfo *, size_t) {
  std::lock_guard<std::mutex> held(guard);
  errors.clear();
  return ACL_SUCCESS;
}

// How many bytes of the device are in use.
size_t fake_cann_used_bytes() {
  std::lock_guard<std::mutex> held(guard);
  return used;
}

}  // extern "C"
