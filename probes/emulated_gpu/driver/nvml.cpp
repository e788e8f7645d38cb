// libnvidia-ml.so.1: the functions that pynvml, PyTorch and vLLM call. Names, numbers and layouts are NVML's.
#include <cstdio>
#include <cstring>
#include <string>
#include "core.h"

using namespace emulated;

#define API extern "C" int
namespace {
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
using Device = uintptr_t;  // the card's index and one; NVML knows no CUDA_VISIBLE_DEVICES
constexpr int64_t GIB = int64_t(1) << 30;
int index_of_device(Device device) { return int(device) - 1; }
int64_t board_bytes() { return (machine().card.total_bytes + GIB - 1) / GIB * GIB; }  // the driver keeps the rest
std::string uuid(int index) {
    char bytes[16], text[64] = "GPU-";
    uuid_of(index, bytes);
    for (int i = 0, at = 4; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10) text[at++] = '-';
        at += snprintf(text + at, 3, "%02x", static_cast<unsigned char>(bytes[i]));
    }
    return text;
}
}  // namespace

API nvmlInit_v2() { return SUCCESS; }
API nvmlInitWithFlags(unsigned) { return SUCCESS; }
API nvmlShutdown() { return SUCCESS; }
extern "C" const char* nvmlErrorString(int) { return "error of the emulated NVML"; }
API nvmlSystemGetDriverVersion(char* text, unsigned room) { return snprintf(text, room, "580.00"), SUCCESS; }
API nvmlSystemGetNVMLVersion(char* text, unsigned room) { return snprintf(text, room, "13.580.00"), SUCCESS; }
API nvmlSystemGetCudaDriverVersion(int* version) { return *version = 13000, SUCCESS; }
API nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, SUCCESS; }
API nvmlDeviceGetCount_v2(unsigned* count) { return *count = machine().cards, SUCCESS; }
API nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
    *device = index + 1;
    return int(index) < machine().cards ? SUCCESS : INVALID_ARGUMENT;
}
API nvmlDeviceGetHandleByPciBusId_v2(const char* text, Device* device) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2) return INVALID_ARGUMENT;
    return *device = bus - 0x10 + 1, SUCCESS;
}
API nvmlDeviceGetHandleByUUID(const char* text, Device* device) {
    for (int card = 0; card < machine().cards; card++)
        if (uuid(card) == text) return *device = card + 1, SUCCESS;
    return NOT_FOUND;
}
API nvmlDeviceGetUUID(Device device, char* text, unsigned room) {
    return snprintf(text, room, "%s", uuid(index_of_device(device)).c_str()), SUCCESS;
}
API nvmlDeviceGetIndex(Device device, unsigned* index) { return *index = index_of_device(device), SUCCESS; }
API nvmlDeviceGetMinorNumber(Device device, unsigned* index) { return *index = index_of_device(device), SUCCESS; }
API nvmlDeviceGetName(Device, char* text, unsigned room) { return snprintf(text, room, "%s", machine().card.name), SUCCESS; }
struct Memory { unsigned long long total, free, used; };
API nvmlDeviceGetMemoryInfo(Device device, Memory* memory) {
    unsigned long long total = board_bytes(), used = used_bytes(index_of_device(device)) + total - machine().card.total_bytes;
    return *memory = {total, total - used, used}, SUCCESS;
}
struct Memory2 { unsigned version; unsigned long long total, reserved, free, used; };
API nvmlDeviceGetMemoryInfo_v2(Device device, Memory2* memory) {
    memory->total = board_bytes();
    memory->reserved = memory->total - machine().card.total_bytes;
    memory->used = used_bytes(index_of_device(device));
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}
API nvmlDeviceGetCudaComputeCapability(Device, int* major, int* minor) {
    return *major = machine().card.major, *minor = machine().card.minor, SUCCESS;
}
struct Pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
API nvmlDeviceGetPciInfo_v3(Device device, Pci* pci) {
    unsigned bus = 0x10 + index_of_device(device);
    *pci = {{}, 0, bus, 0, 0, 0, {}};
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", bus);
    return snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", bus), SUCCESS;
}
struct Running1 { unsigned pid; unsigned long long used; };
struct Running { unsigned pid; unsigned long long used; unsigned instance, compute_instance; };
namespace {
template <class Record>
int running(Device device, unsigned* count, Record* found) {
    uint32_t pids[MAX_PROCESSES];
    int64_t bytes[MAX_PROCESSES];
    unsigned room = *count;
    *count = processes_on(index_of_device(device), MAX_PROCESSES, pids, bytes);
    if (room < *count) return INSUFFICIENT_SIZE;
    memset(static_cast<void*>(found), 0xff, *count * sizeof *found);  // no instances
    for (unsigned i = 0; i < *count; i++) {
        found[i].pid = pids[i];
        found[i].used = bytes[i];
    }
    return SUCCESS;
}
}  // namespace
API nvmlDeviceGetComputeRunningProcesses(Device device, unsigned* count, Running1* found) { return running(device, count, found); }
API nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned* count, Running* found) { return running(device, count, found); }
API nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* count, Running* found) { return running(device, count, found); }
API nvmlDeviceGetGraphicsRunningProcesses_v3(Device, unsigned* count, Running*) { return *count = 0, SUCCESS; }
API nvmlDeviceGetMigMode(Device, unsigned* now, unsigned* later) { return *now = *later = 0, SUCCESS; }
API nvmlDeviceGetMaxMigDeviceCount(Device, unsigned* count) { return *count = 0, SUCCESS; }
API nvmlDeviceGetP2PStatus(Device, Device, int, int* state) { return *state = 0, SUCCESS; }  // 0: works
API nvmlDeviceGetTopologyCommonAncestor(Device, Device, int* level) { return *level = 50, SUCCESS; }
API nvmlDeviceGetNvLinkState(Device, unsigned link, unsigned* active) {
    constexpr unsigned LINKS = 12;
    *active = machine().cards > 1;
    return link < LINKS ? SUCCESS : INVALID_ARGUMENT;
}
API nvmlDeviceGetNvLinkRemoteDeviceType(Device, unsigned, int* type) { return *type = 1, SUCCESS; }  // a switch
API nvmlDeviceGetNvLinkRemotePciInfo_v2(Device, unsigned, Pci* pci) { return *pci = {}, SUCCESS; }
API nvmlDeviceGetNvLinkVersion(Device, unsigned, unsigned* version) { return *version = 3, SUCCESS; }
API nvmlDeviceGetGpuFabricInfoV(Device, void*) { return SUCCESS; }  // as the caller left it: not supported
API nvmlDeviceGetArchitecture(Device, unsigned* number) { return *number = machine().card.major == 9 ? 9 : 7, SUCCESS; }
API nvmlDeviceGetCpuAffinity(Device, unsigned words, unsigned long* mask) {
    memset(mask, 0, words * sizeof *mask);
    return mask[0] = 1, SUCCESS;
}
