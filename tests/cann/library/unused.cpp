// What torch-npu has to find when it is loaded or begins, and what does nothing here.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>

#define UNUSED(name) \
  long name() { return 0; }

extern "C" {

UNUSED(MsprofGetHashId)
UNUSED(MsprofRegisterCallback)
UNUSED(MsprofReportAdditionalInfo)
UNUSED(MsprofReportApi)
UNUSED(MsprofReportCompactInfo)
UNUSED(MsprofSysCycleTime)
UNUSED(aclAppLog)
UNUSED(aclCreateDataBuffer)
UNUSED(aclCreateTensorDesc)
UNUSED(aclDestroyDataBuffer)
UNUSED(aclDestroyTensorDesc)
UNUSED(aclGetTensorDescDimV2)
UNUSED(aclGetTensorDescFormat)
UNUSED(aclGetTensorDescNumDims)
UNUSED(aclGetTensorDescType)
UNUSED(aclSetTensorDescName)
UNUSED(aclSetTensorFormat)
UNUSED(aclSetTensorPlaceMent)
UNUSED(aclSetTensorShape)
UNUSED(aclmdlFinalizeDump)
UNUSED(aclmdlInitDump)
UNUSED(aclmdlSetDump)
UNUSED(aclopCreateAttr)
UNUSED(aclopDestroyAttr)
UNUSED(aclopSetAttrBool)
UNUSED(aclopSetAttrDataType)
UNUSED(aclopSetAttrFloat)
UNUSED(aclopSetAttrInt)
UNUSED(aclopSetAttrListBool)
UNUSED(aclopSetAttrListFloat)
UNUSED(aclopSetAttrListInt)
UNUSED(aclopSetAttrListListInt)
UNUSED(aclopSetAttrString)
UNUSED(aclSetCompileopt)
UNUSED(aclrtBinaryGetFunction)
UNUSED(aclrtBinaryLoadFromData)
UNUSED(aclrtCtxSetSysParamOpt)
UNUSED(aclrtDeviceEnablePeerAccess)
UNUSED(aclrtFreePhysical)
UNUSED(aclrtGetFunctionAddr)
UNUSED(aclrtMallocPhysical)
UNUSED(aclrtMapMem)
UNUSED(aclrtMemExportToShareableHandle)
UNUSED(aclrtMemImportFromShareableHandle)
UNUSED(aclrtMemSetPidToShareableHandle)
UNUSED(aclrtReleaseMemAddress)
UNUSED(aclrtReserveMemAddress)
UNUSED(aclrtSetDeviceSatMode)
UNUSED(aclrtSetOpExecuteTimeOut)
UNUSED(aclrtSetOpWaitTimeout)
UNUSED(aclrtSetStreamFailureMode)
UNUSED(aclrtSetStreamOverflowSwitch)
UNUSED(aclrtSetSysParamOpt)
UNUSED(aclrtUnmapMem)
UNUSED(rtDevBinaryRegister)
UNUSED(rtFunctionRegister)
UNUSED(rtGetC2cCtrlAddr)
UNUSED(rtKernelLaunch)

int aclGetDeviceCapability(uint32_t, int, int64_t *value) { return *value = 24, 0; }
int aclrtGetDeviceInfo(uint32_t, int, int64_t *value) { return *value = 24, 0; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) { return *can = 1, 0; }
int aclrtDeviceGetBareTgid(int32_t *pid) { return *pid = 1, 0; }
int aclGetCannAttributeList(const void **, size_t *count) { return *count = 0, 0; }
int aclrtGetSysParamOpt(int, int64_t *value) { return *value = 0, 0; }
int aclrtCtxGetSysParamOpt(int, int64_t *value) { return *value = 0, 0; }
int aclrtGetStreamOverflowSwitch(void *, uint32_t *value) { return *value = 0, 0; }

// Operators of the older kind, which would have to be compiled: there are none.
int aclopCompileAndExecute(const char *name, int, const void *const *, const void *const *, int, const void *const *,
                           void *const *, const void *, int, int, const char *, void *) {
  std::fprintf(stderr, "the fake CANN has no operator %s\n", name);
  return 500003;
}

int aclrtProcessReport(int32_t) {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return 0;
}

}  // extern "C"
