// libcuda.so.1: the functions of the CUDA driver API that programs use, over the core.
//
// Names, numbers and layouts are those of the CUDA 13 driver API reference. A function that a program looks up and that
// is not here exists, and answers that it is not supported.
#include <dlfcn.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include "core.h"

using namespace emulated;

#define API extern "C" int
namespace {
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801 };
constexpr int VERSION = 13000;
using Address = unsigned long long;

void* context(int card) { return reinterpret_cast<void*>(uintptr_t(0x1000 + card)); }
void* named(const char* name) {  // a handle of a module or a kernel; kernels know their name
    char* handle = static_cast<char*>(calloc(1, 256));
    snprintf(handle, 256, "%s", name ? name : "");
    return handle;
}
int status(bool fine, int otherwise) { return fine ? SUCCESS : otherwise; }
}  // namespace

// -- cards ------------------------------------------------------------------------------------------------------------

namespace emulated {
int attribute(int number, int index) {  // CUdevice_attribute; 0: the card has not that feature
    const Card& card = machine().card;
    static const std::map<int, int> fixed = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536}, {10, 32},
        {11, 2147483647}, {12, 65536}, {13, 1410000}, {14, 512}, {15, 1}, {19, 1}, {31, 1}, {32, 1}, {36, 1215000}, {37, 5120},
        {40, 3}, {41, 1}, {78, 1}, {79, 1}, {80, 1}, {82, 65536}, {83, 1}, {90, 1}, {95, 1}, {99, 1}, {102, 1}, {103, 1},
        {106, 32}, {111, 1024}, {115, 1}, {121, 1}};
    switch (number) {
        case 16: return card.multiprocessors;
        case 33: return 0x10 + index_of(index);  // the bus
        case 38: return int(card.l2_bytes);
        case 39: return card.threads;
        case 75: return card.major;
        case 76: return card.minor;
        case 81: return int(card.shared_bytes);
        case 97: return int(card.shared_bytes) - 1024;  // a block's most
        case 120: return card.major >= 9;               // clusters
    }
    auto found = fixed.find(number);
    return found == fixed.end() ? 0 : found->second;
}
void uuid_of(int index, char* bytes) {
    for (int i = 0; i < 16; i++) bytes[i] = char(0xe0 + i * 7 + index);
}
}  // namespace emulated

API cuInit(unsigned) { return SUCCESS; }
API cuDriverGetVersion(int* version) { return *version = VERSION, SUCCESS; }
API cuDeviceGetCount(int* count) { return *count = visible_cards(), SUCCESS; }
API cuDeviceGet(int* device, int index) {
    *device = index;
    return status(index >= 0 && index < visible_cards(), INVALID_DEVICE);
}
API cuDeviceGetName(char* name, int room, int) { return snprintf(name, room, "%s", machine().card.name), SUCCESS; }
API cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = machine().card.total_bytes, SUCCESS; }
API cuDeviceGetUuid_v2(char* bytes, int card) { return uuid_of(index_of(card), bytes), SUCCESS; }
API cuDeviceGetUuid(char* bytes, int card) { return uuid_of(index_of(card), bytes), SUCCESS; }
API cuDeviceGetPCIBusId(char* text, int room, int card) {
    return snprintf(text, room, "0000:%02X:00.0", 0x10 + index_of(card)), SUCCESS;
}
API cuDeviceComputeCapability(int* major, int* minor, int) {
    *major = machine().card.major;
    *minor = machine().card.minor;
    return SUCCESS;
}
API cuDeviceGetAttribute(int* value, int number, int card) { return *value = attribute(number, card), SUCCESS; }

// -- contexts ---------------------------------------------------------------------------------------------------------

API cuDevicePrimaryCtxRetain(void** handle, int card) { return open_context(card), *handle = context(card), SUCCESS; }
API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API cuDevicePrimaryCtxGetState(int card, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    *active = has_context(card);
    return SUCCESS;
}
API cuCtxGetCurrent(void** handle) {
    *handle = has_context(card_of_thread()) ? context(card_of_thread()) : nullptr;
    return SUCCESS;
}
API cuCtxSetCurrent(void* handle) {
    if (handle) {
        set_card_of_thread(int(reinterpret_cast<uintptr_t>(handle) - 0x1000));
        open_context(card_of_thread());
    }
    return SUCCESS;
}
API cuCtxPushCurrent_v2(void* handle) { return cuCtxSetCurrent(handle); }
API cuCtxPopCurrent_v2(void** handle) { return handle ? cuCtxGetCurrent(handle) : SUCCESS; }
API cuCtxGetDevice(int* card) { return *card = card_of_thread(), SUCCESS; }
API cuCtxSynchronize() { return wait_for_card(card_of_thread()), SUCCESS; }
API cuCtxGetApiVersion(void*, unsigned* version) { return *version = VERSION, SUCCESS; }

// -- memory -----------------------------------------------------------------------------------------------------------

API cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    open_context(card_of_thread());
    *total_bytes = machine().card.total_bytes;
    *free_bytes = std::max<int64_t>(*total_bytes - used_bytes(index_of(card_of_thread())), 0);
    return SUCCESS;
}
API cuMemAlloc_v2(Address* address, size_t bytes) {
    *address = reinterpret_cast<Address>(allocate(card_of_thread(), bytes));
    return status(*address, OUT_OF_MEMORY);
}
API cuMemFree_v2(Address address) {
    wait_for_card(card_of_thread());
    return status(!address || deallocate(reinterpret_cast<void*>(address)), INVALID_VALUE);
}
API cuMemAllocHost_v2(void** address, size_t bytes) { return status(*address = map_host(bytes), OUT_OF_MEMORY); }
API cuMemHostAlloc(void** address, size_t bytes, unsigned) { return cuMemAllocHost_v2(address, bytes); }
API cuMemFreeHost(void* address) { return status(deallocate(address), INVALID_VALUE); }
API cuMemGetAddressRange_v2(Address* base, size_t* bytes, Address address) {
    Range range;
    if (!find_range(reinterpret_cast<void*>(address), &range)) return INVALID_VALUE;
    if (base) *base = reinterpret_cast<Address>(range.base);
    if (bytes) *bytes = range.bytes;
    return SUCCESS;
}
API cuPointerGetAttribute(void* value, int number, Address address) {  // CUpointer_attribute
    Range range;
    if (!find_range(reinterpret_cast<void*>(address), &range)) return INVALID_VALUE;
    switch (number) {
        case 1: *static_cast<void**>(value) = context(range.card); break;
        case 2: *static_cast<unsigned*>(value) = range.kind == HOST ? 1 : 2; break;
        case 3: case 4: *static_cast<Address*>(value) = address; break;
        case 9: *static_cast<int*>(value) = range.card; break;
        case 11: *static_cast<Address*>(value) = reinterpret_cast<Address>(range.base); break;
        case 12: *static_cast<size_t*>(value) = range.bytes; break;
        default: *static_cast<int*>(value) = 0;
    }
    return SUCCESS;
}
API cuMemsetD8_v2(Address to, unsigned char value, size_t n) { return fill(reinterpret_cast<void*>(to), value, n), SUCCESS; }
API cuMemsetD8Async(Address to, unsigned char value, size_t n, void* stream) {
    fill(reinterpret_cast<void*>(to), value, n);
    return enqueue_copy(stream, n, false), SUCCESS;
}
API cuMemsetD32Async(Address to, unsigned value, size_t n, void* stream) {
    for (size_t i = 0; n * 4 <= COPIED_BYTES && i < n; i++) reinterpret_cast<unsigned*>(to)[i] = value;
    return enqueue_copy(stream, n * 4, false), SUCCESS;
}
namespace {
int copied(void* to, const void* from, size_t bytes, void* stream, bool bus) {
    copy(to, from, bytes);
    return enqueue_copy(stream, bytes, bus), SUCCESS;
}
void* at(Address address) { return reinterpret_cast<void*>(address); }
}  // namespace
API cuMemcpyHtoD_v2(Address to, const void* from, size_t n) { return copied(at(to), from, n, nullptr, true); }
API cuMemcpyDtoH_v2(void* to, Address from, size_t n) {
    wait_for_card(card_of_thread());
    return copied(to, at(from), n, nullptr, true);
}
API cuMemcpyDtoD_v2(Address to, Address from, size_t n) { return copied(at(to), at(from), n, nullptr, false); }
API cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t n, void* s) { return copied(at(to), from, n, s, true); }
API cuMemcpyDtoHAsync_v2(void* to, Address from, size_t n, void* s) { return copied(to, at(from), n, s, true); }
API cuMemcpyDtoDAsync_v2(Address to, Address from, size_t n, void* s) { return copied(at(to), at(from), n, s, false); }

// -- virtual memory: physical memory is charged when it is created, wherever it is mapped ---------------------------

namespace {
struct Location { int type, id; };  // type 1: a card
struct AllocationProperties { int type, handle_types; Location location; void* windows; unsigned char flags[8]; };
struct Physical { int card; size_t bytes; int references; };
std::mutex mappings_lock;
std::map<Address, std::pair<size_t, Physical*>> mappings;
void drop(Physical* memory) {
    if (--memory->references) return;
    if (memory->card >= 0) release(memory->card, memory->bytes);
    delete memory;
}
}  // namespace
API cuMemGetAllocationGranularity(size_t* bytes, const AllocationProperties*, int) { return *bytes = GRANULE, SUCCESS; }
API cuMulticastGetGranularity(size_t* bytes, const void*, int) { return *bytes = GRANULE, SUCCESS; }
API cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, unsigned long long) {
    char* base = static_cast<char*>(map_pages(bytes));
    if (!base) return OUT_OF_MEMORY;
    add_range({base, bytes, card_of_thread(), ADDRESSES});
    return *address = reinterpret_cast<Address>(base), SUCCESS;
}
API cuMemAddressFree(Address address, size_t) { return status(deallocate(at(address)), INVALID_VALUE); }
API cuMemCreate(Physical** handle, size_t bytes, const AllocationProperties* properties, unsigned long long) {
    int card = properties->location.type == 1 ? properties->location.id : -1;
    if (card >= 0 && !charge(card, bytes)) return OUT_OF_MEMORY;
    return *handle = new Physical{card, bytes, 1}, SUCCESS;
}
API cuMemRelease(Physical* handle) {
    std::lock_guard<std::mutex> guard(mappings_lock);
    return drop(handle), SUCCESS;
}
API cuMemRetainAllocationHandle(Physical** handle, void* address) {
    std::lock_guard<std::mutex> guard(mappings_lock);
    auto next = mappings.upper_bound(reinterpret_cast<Address>(address));
    if (next == mappings.begin()) return INVALID_VALUE;
    *handle = std::prev(next)->second.second;
    return (*handle)->references++, SUCCESS;
}
API cuMemMap(Address address, size_t bytes, size_t, Physical* handle, unsigned long long) {
    std::lock_guard<std::mutex> guard(mappings_lock);
    handle->references++;
    mappings[address] = {bytes, handle};
    return SUCCESS;
}
API cuMemUnmap(Address address, size_t bytes) {
    std::lock_guard<std::mutex> guard(mappings_lock);
    for (auto each = mappings.lower_bound(address); each != mappings.end() && each->first < address + bytes;) {
        drop(each->second.second);
        each = mappings.erase(each);
    }
    return drop_pages(at(address), bytes), SUCCESS;
}
API cuMemSetAccess(Address, size_t, const void*, size_t) { return SUCCESS; }
API cuMemGetAccess(unsigned long long* flags, const Location*, Address) { return *flags = 3, SUCCESS; }  // read and write
API cuMemGetAllocationPropertiesFromHandle(AllocationProperties* properties, Physical* handle) {
    *properties = {1, 0, {1, handle->card}, nullptr, {}};
    return SUCCESS;
}
API cuMemExportToShareableHandle(void*, Physical*, int, unsigned long long) { return NOT_SUPPORTED; }
API cuMemImportFromShareableHandle(Physical**, void*, int) { return NOT_SUPPORTED; }

// -- streams and events -----------------------------------------------------------------------------------------------

API cuStreamCreate(Stream** stream, unsigned flags) { return *stream = new_stream(card_of_thread(), flags, 0), SUCCESS; }
API cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
    return *stream = new_stream(card_of_thread(), flags, priority), SUCCESS;
}
API cuStreamDestroy_v2(void*) { return SUCCESS; }
API cuStreamSynchronize(void* stream) { return wait_for_stream(stream), SUCCESS; }
API cuStreamQuery(void* stream) { return status(stream_is_done(stream), NOT_READY); }
API cuStreamWaitEvent(void* stream, Event* event, unsigned) { return stream_waits(stream, event), SUCCESS; }
API cuStreamIsCapturing(void* stream, int* state) { return *state = capture_of(stream) != 0, SUCCESS; }
API cuStreamGetCtx(void* stream, void** handle) { return *handle = context(card_of(stream)), SUCCESS; }
API cuEventCreate(Event** event, unsigned) { return *event = new_event(), SUCCESS; }
API cuEventDestroy_v2(Event* event) { return delete_event(event), SUCCESS; }
API cuEventRecord(Event* event, void* stream) { return record(event, stream), SUCCESS; }
API cuEventQuery(Event* event) { return status(event_is_done(event), NOT_READY); }
API cuEventSynchronize(Event* event) { return wait_for_event(event), SUCCESS; }
API cuEventElapsedTime(float* ms, Event* first, Event* second) {
    return *ms = float(seconds_between(first, second) * 1e3), SUCCESS;
}

// -- kernels: they are counted and take time, and nothing runs ---------------------------------------------------------

API cuModuleLoad(void** module, const char*) { return *module = named(""), SUCCESS; }
API cuModuleLoadData(void** module, const void*) { return *module = named(""), SUCCESS; }
API cuModuleLoadDataEx(void** module, const void*, unsigned, int*, void**) { return *module = named(""), SUCCESS; }
API cuModuleLoadFatBinary(void** module, const void*) { return *module = named(""), SUCCESS; }
API cuModuleUnload(void*) { return SUCCESS; }
API cuModuleGetFunction(void** kernel, void*, const char* name) { return *kernel = named(name), SUCCESS; }
API cuModuleGetGlobal_v2(Address* address, size_t* bytes, void*, const char*) {
    static char space[4096];
    if (address) *address = reinterpret_cast<Address>(space);
    if (bytes) *bytes = sizeof space;
    return SUCCESS;
}
API cuLibraryLoadData(void** library, const void*, int*, void**, unsigned, int*, void**, unsigned) {
    return *library = named(""), SUCCESS;
}
API cuLibraryGetKernel(void** kernel, void*, const char* name) { return *kernel = named(name), SUCCESS; }
API cuLibraryGetModule(void** module, void*) { return *module = named(""), SUCCESS; }
API cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, SUCCESS; }
API cuFuncGetAttribute(int* value, int number, void*) {  // CUfunction_attribute
    *value = number == 0 ? 1024 : number == 4 ? 32 : number == 5 || number == 6 ? machine().card.major * 10 : 0;
    return SUCCESS;
}
API cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
API cuFuncSetCacheConfig(void*, int) { return SUCCESS; }
API cuLaunchKernel(const char* name, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned,
                   void* stream, void**, void**) {
    return enqueue_kernel(stream, name, x, double(x) * y * z, double(a) * b * c), SUCCESS;
}
API cuLaunchCooperativeKernel(const char* name, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                              unsigned, void* stream, void**) {
    return enqueue_kernel(stream, name, x, double(x) * y * z, double(a) * b * c), SUCCESS;
}
struct LaunchConfig { unsigned x, y, z, a, b, c, shared_bytes; void* stream; void* attributes; unsigned count; };
API cuLaunchKernelEx(const LaunchConfig* launch, const char* name, void**, void**) {
    double blocks = double(launch->x) * launch->y * launch->z, threads = double(launch->a) * launch->b * launch->c;
    return enqueue_kernel(launch->stream, name, launch->x, blocks, threads), SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int block, size_t) {
    return *count = std::max(1, std::min(32, machine().card.threads / std::max(1, block))), SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, void* kernel, int block, size_t bytes, unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, block, bytes);
}
API cuOccupancyMaxActiveClusters(int* count, void*, const LaunchConfig*) { return *count = 16, SUCCESS; }
API cuTensorMapEncodeTiled(void*, ...) { return SUCCESS; }

// -- errors and look-ups ----------------------------------------------------------------------------------------------

API cuGetErrorString(int error, const char** text) {
    *text = error == SUCCESS ? "no error" : error == OUT_OF_MEMORY ? "out of memory" : "error of the emulated driver";
    return SUCCESS;
}
API cuGetErrorName(int error, const char** text) {
    *text = error == SUCCESS ? "CUDA_SUCCESS" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return SUCCESS;
}
namespace {
void* own_function(const std::string& name) {
    static void* self = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&cuInit), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    return dlsym(self, name.c_str());
}
}  // namespace
API not_supported() { return NOT_SUPPORTED; }
namespace emulated {
void* driver_function(const char* name) {
    if (!strcmp(name, "cuGetProcAddress")) return own_function("cuGetProcAddress_v2");
    for (const char* version : {"_v2", ""})
        if (void* found = own_function(std::string(name) + version)) return found;
    return reinterpret_cast<void*>(&not_supported);
}
}  // namespace emulated
API cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* result) {
    *function = driver_function(name);
    if (result) *result = 0;  // CU_GET_PROC_ADDRESS_SUCCESS
    return SUCCESS;
}
API cuGetProcAddress(const char* name, void** function, int, uint64_t) {
    *function = strcmp(name, "cuGetProcAddress") ? driver_function(name) : reinterpret_cast<void*>(&cuGetProcAddress);
    return SUCCESS;
}
API cuGetExportTable(const void**, const void*) { return NOT_FOUND; }
