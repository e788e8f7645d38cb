// libcudart: the functions of the CUDA runtime API that PyTorch and its companions call, over the core.
//
// Names, numbers and layouts are those of the CUDA 13 runtime API reference.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include "core.h"

using namespace emulated;

#define API extern "C" int
namespace {
enum { SUCCESS = 0, INVALID_VALUE = 1, NO_MEMORY = 2, INVALID_CONFIGURATION = 9, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_FUNCTION = 98, NOT_READY = 600, NOT_SUPPORTED = 801 };
constexpr int VERSION = 13000;
enum CopyKind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };

thread_local int last_error = SUCCESS;
int result(int error) { return error ? last_error = error : SUCCESS; }  // kept until cudaGetLastError
int result_of(bool fine, int otherwise) { return result(fine ? SUCCESS : otherwise); }

struct Dim3 { unsigned x, y, z; };
struct FatHeader;
struct Kernel {
    const char* name = nullptr;
    const FatHeader* file = nullptr;  // with its program for several architectures
};
std::mutex names_lock;
std::unordered_map<const void*, Kernel>& kernels() {
    static auto* known = new std::unordered_map<const void*, Kernel>;
    return *known;
}
Kernel kernel_of(const void* function) {
    std::lock_guard<std::mutex> guard(names_lock);
    auto found = kernels().find(function);
    return found == kernels().end() ? Kernel{} : found->second;
}
int launch(const void* kernel, Dim3 grid, Dim3 block, void* stream) {
    open_context(card_of_thread());
    double blocks = double(grid.x) * grid.y * grid.z, threads = double(block.x) * block.y * block.z;
    if (!blocks || !threads) return result(INVALID_CONFIGURATION);
    return enqueue_kernel(stream, kernel_of(kernel).name, grid.x, blocks, threads), SUCCESS;
}
void* blank() { return calloc(1, 64); }  // a handle that nobody looks into
}  // namespace

// -- kernels ----------------------------------------------------------------------------------------------------------

namespace {
// A program for several architectures: a header, and an entry for each. NVIDIA publishes no layout; this one is what the
// files of PyTorch and bitsandbytes hold.
struct FatHeader { uint32_t magic; uint16_t version, header_bytes; uint64_t bytes; };
struct FatWrapper { int magic, version; const FatHeader* file; };
struct FatEntry { uint16_t kind, version; uint32_t header_bytes; uint64_t bytes; uint32_t rest[2]; uint16_t minor, major; uint32_t architecture; };
constexpr uint32_t FAT_MAGIC = 0xba55ed50;
enum { PTX = 1, BINARY = 2 };

// The architecture (86: compute capability 8.6) whose kernels a card runs: of binaries the newest of its generation that
// is not newer than the card; else of PTX the newest. Source: CUDA C++ Programming Guide, "Binary Compatibility" and
// "PTX Compatibility". A card that the program does not support gets the oldest, as if compiled for it.
int architecture_in(const FatHeader* file) {
    int card = machine().card.major * 10 + machine().card.minor, binary = 0, ptx = 0, oldest = 0;
    if (!file || file->magic != FAT_MAGIC) return card;
    const char* at = reinterpret_cast<const char*>(file) + file->header_bytes;
    for (const char* end = at + file->bytes; at < end;) {
        const auto* entry = reinterpret_cast<const FatEntry*>(at);
        int each = int(entry->architecture);
        if (entry->kind == BINARY && each / 10 == card / 10 && each <= card) binary = std::max(binary, each);
        if (entry->kind == PTX && each <= card) ptx = std::max(ptx, each);
        if (!oldest || each < oldest) oldest = each;
        at += entry->header_bytes + entry->bytes;
    }
    return binary ? binary : ptx ? ptx : oldest ? oldest : card;
}
}  // namespace
extern "C" void** __cudaRegisterFatBinary(FatWrapper* wrapper) {
    void** handle = static_cast<void**>(blank());
    return *handle = const_cast<FatHeader*>(wrapper->file), handle;
}
extern "C" void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" void __cudaUnregisterFatBinary(void**) {}
extern "C" char __cudaInitModule(void**) { return 1; }
extern "C" void __cudaRegisterFunction(void** handle, const char* kernel, char*, const char* name, int, void*, void*, void*, void*, int*) {
    std::lock_guard<std::mutex> guard(names_lock);
    kernels()[kernel] = {name, static_cast<const FatHeader*>(*handle)};
}
extern "C" void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
extern "C" void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}

namespace {
struct Configuration { Dim3 grid, block; size_t shared_bytes; void* stream; };
thread_local Configuration pushed[16];
thread_local unsigned depth = 0;
}  // namespace
extern "C" unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t bytes, void* stream) {
    return pushed[depth++ % 16] = {grid, block, bytes, stream}, 0;
}
API __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* bytes, void** stream) {
    Configuration& last = pushed[--depth % 16];
    return *grid = last.grid, *block = last.block, *bytes = last.shared_bytes, *stream = last.stream, SUCCESS;
}
API __cudaGetKernel(const void** kernel, const void* function) { return *kernel = function, SUCCESS; }
API __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
    return launch(kernel, grid, block, stream);
}
API __cudaLaunchKernel_ptsz(const void* kernel, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
    return launch(kernel, grid, block, stream);
}
API cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
    return launch(kernel, grid, block, stream);
}
API cudaLaunchCooperativeKernel(const void* kernel, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
    return launch(kernel, grid, block, stream);
}
struct LaunchConfig { Dim3 grid, block; size_t shared_bytes; void* stream; void* attributes; unsigned count; };
API cudaLaunchKernelExC(const LaunchConfig* each, const void* kernel, void**) {
    return launch(kernel, each->grid, each->block, each->stream);
}
API cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    wait_for_stream(stream);
    return function(data), SUCCESS;
}
API cudaStreamAddCallback(void* stream, void (*function)(void*, int, void*), void* data, unsigned) {
    wait_for_stream(stream);
    return function(stream, SUCCESS, data), SUCCESS;
}
struct FunctionAttributes { size_t shared, constant, local; int threads, registers, ptx, binary, cache, dynamic_shared, rest[24]; };
static_assert(sizeof(FunctionAttributes) == 144, "cudaFuncAttributes of CUDA 13");
API cudaFuncGetAttributes(FunctionAttributes* found, const void* kernel) {
    memset(static_cast<void*>(found), 0, 72);  // up to `clusterSchedulingPolicyPreference`, which CUDA 11 has not
    found->threads = 1024;
    found->registers = 32;
    // CUB looks for its kernels' parameters by it (cub 3, util_device.cuh, `PtxVersion`)
    found->ptx = found->binary = architecture_in(kernel_of(kernel).file);
    found->dynamic_shared = 49152;
    return SUCCESS;
}
API cudaFuncSetAttribute(const void*, int, int) { return SUCCESS; }
API cudaFuncSetCacheConfig(const void*, int) { return SUCCESS; }
API cudaFuncGetName(const char** name, const void* kernel) {
    const char* known = kernel_of(kernel).name;
    return *name = known ? known : "?", SUCCESS;
}
API cudaGetFuncBySymbol(const void** function, const void* symbol) { return *function = symbol, SUCCESS; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int block, size_t) {
    return *count = std::max(1, std::min(32, machine().card.threads / std::max(block, 1))), SUCCESS;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void* kernel, int block, size_t n, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, block, n);
}
API cudaOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, const void*, int, int) { return *bytes = 49152, SUCCESS; }
API cudaOccupancyMaxActiveClusters(int* count, const void*, const LaunchConfig*) { return *count = 16, SUCCESS; }
API cudaLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) {
    return *library = blank(), SUCCESS;
}
API cudaLibraryGetKernel(const void** kernel, void*, const char* name) { return *kernel = strdup(name), SUCCESS; }

// -- cards ------------------------------------------------------------------------------------------------------------

API cudaGetDeviceCount(int* count) { return *count = visible_cards(), result_of(*count, NO_DEVICE); }
API cudaGetDevice(int* card) { return *card = card_of_thread(), SUCCESS; }
API cudaSetDevice(int card) {
    if (!set_card_of_thread(card)) return result(INVALID_DEVICE);
    return open_context(card), SUCCESS;
}
API cudaInitDevice(int card, unsigned, unsigned) { return open_context(card), SUCCESS; }
API cudaDeviceReset() { return SUCCESS; }
API cudaDeviceSynchronize() {
    open_context(card_of_thread());
    return wait_for_card(card_of_thread()), SUCCESS;
}
API cudaDeviceGetAttribute(int* value, int number, int card) { return *value = attribute(number, card), SUCCESS; }
API cudaDeviceGetPCIBusId(char* text, int room, int card) {
    return snprintf(text, room, "0000:%02X:00.0", 0x10 + index_of(card)), SUCCESS;
}
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, SUCCESS; }
API cudaDeviceCanAccessPeer(int* can, int one, int other) { return *can = one != other, SUCCESS; }
API cudaDeviceEnablePeerAccess(int, unsigned) { return SUCCESS; }
API cudaDeviceGetLimit(size_t* value, int limit) { return *value = limit == 0 ? 1024 : 8 << 20, SUCCESS; }  // 0: stack
API cudaDriverGetVersion(int* version) { return *version = VERSION, SUCCESS; }
API cudaRuntimeGetVersion(int* version) { return *version = VERSION, SUCCESS; }

struct Properties {  // cudaDeviceProp of CUDA 13
    char name[256], uuid[16], luid[8];
    unsigned luid_nodes;
    size_t total_bytes, block_shared_bytes;
    int block_registers, warp;
    size_t pitch;
    int block_threads, block_dim[3], grid_dim[3];
    size_t constant_bytes;
    int major, minor;
    size_t texture_alignment, texture_pitch;
    int multiprocessors, integrated, maps_host_memory, textures[39];
    size_t surface_alignment;
    int concurrent_kernels, ecc, bus, device, domain, tcc, engines, unified_addressing, bus_width, l2_bytes, l2_persisting_bytes, threads,
        stream_priorities, l1_global, l1_local;
    size_t shared_bytes;
    int registers, managed, multi_gpu, multi_gpu_group, native_atomics, pageable, concurrent_managed, preemption, host_pointer, cooperative;
    size_t block_shared_bytes_most;
    int page_tables, direct_managed, blocks, policy_window;
    size_t reserved_shared_bytes;
    int host_register, sparse_arrays, read_only_register, semaphores, memory_pools, rdma;
    unsigned rdma_flush;
    int rdma_order;
    unsigned pool_handles;
    int deferred_arrays, ipc_events, clusters, function_pointers, rest[7], reserved[56];
};
static_assert(sizeof(Properties) == 1008, "cudaDeviceProp of CUDA 13");
API cudaGetDeviceProperties(Properties* p, int index) {
    if (index < 0 || index >= visible_cards()) return result(INVALID_DEVICE);
    const Card& card = machine().card;
    memset(static_cast<void*>(p), 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", card.name);
    uuid_of(index_of(index), p->uuid);
    p->total_bytes = card.total_bytes;
    p->block_shared_bytes = 49152;
    p->block_registers = p->registers = 65536;
    p->warp = 32;
    p->pitch = 2147483647;
    p->block_threads = p->block_dim[0] = p->block_dim[1] = 1024;
    p->block_dim[2] = 64;
    p->grid_dim[0] = 2147483647;
    p->grid_dim[1] = p->grid_dim[2] = 65535;
    p->constant_bytes = 65536;
    p->major = card.major;
    p->minor = card.minor;
    p->texture_alignment = 512;
    p->texture_pitch = 32;
    p->multiprocessors = card.multiprocessors;
    p->maps_host_memory = p->concurrent_kernels = p->unified_addressing = p->stream_priorities = p->l1_global = p->l1_local = 1;
    p->managed = p->concurrent_managed = p->preemption = p->cooperative = p->host_register = p->memory_pools = p->ipc_events = 1;
    p->bus = 0x10 + index_of(index);
    p->engines = 3;
    p->bus_width = 5120;
    p->l2_bytes = int(card.l2_bytes);
    p->l2_persisting_bytes = int(card.l2_bytes / 4 * 3);
    p->threads = card.threads;
    p->shared_bytes = card.shared_bytes;
    p->block_shared_bytes_most = card.shared_bytes - 1024;
    p->blocks = 32;
    p->reserved_shared_bytes = 1024;
    p->clusters = card.major >= 9;
    return SUCCESS;
}

// -- errors -----------------------------------------------------------------------------------------------------------

API cudaGetLastError() {
    int error = last_error;
    return last_error = SUCCESS, error;
}
API cudaPeekAtLastError() { return last_error; }
extern "C" const char* cudaGetErrorString(int error) {
    return error == NO_MEMORY ? "out of memory" : error == SUCCESS ? "no error" : error == NOT_READY ? "device not ready"
        : error == INVALID_DEVICE ? "invalid device ordinal" : error == INVALID_FUNCTION ? "invalid device function"
        : "error of the emulated runtime";
}
extern "C" const char* cudaGetErrorName(int error) {
    return error == NO_MEMORY ? "cudaErrorMemoryAllocation" : error == SUCCESS ? "cudaSuccess" : "cudaErrorUnknown";
}

// -- memory -----------------------------------------------------------------------------------------------------------

API cudaMalloc(void** address, size_t bytes) {
    *address = nullptr;
    return bytes ? result_of(*address = allocate(card_of_thread(), bytes), NO_MEMORY) : SUCCESS;
}
API cudaFree(void* address) {
    open_context(card_of_thread());
    if (!address) return SUCCESS;
    wait_for_card(card_of_thread());
    return result_of(deallocate(address), INVALID_VALUE);
}
API cudaMallocManaged(void** address, size_t bytes, unsigned) { return result_of(*address = map_host(bytes), NO_MEMORY); }
API cudaMallocAsync(void** address, size_t bytes, void*) {
    return result_of(*address = allocate(card_of_thread(), bytes), NO_MEMORY);
}
API cudaMallocFromPoolAsync(void** address, size_t bytes, void*, void* stream) { return cudaMallocAsync(address, bytes, stream); }
API cudaFreeAsync(void* address, void*) { return result_of(deallocate(address), INVALID_VALUE); }
API cudaDeviceGetDefaultMemPool(void** pool, int card) {
    return *pool = reinterpret_cast<void*>(uintptr_t(0x2000 + card)), SUCCESS;
}
API cudaDeviceGetMemPool(void** pool, int card) { return cudaDeviceGetDefaultMemPool(pool, card); }
API cudaMemPoolGetAttribute(void*, int number, void* value) {
    memset(value, 0, number >= 4 ? 8 : 4);  // from cudaMemPoolAttrReleaseThreshold on: 64 bits
    return SUCCESS;
}
API cudaMemPoolSetAttribute(void*, int, void*) { return SUCCESS; }
API cudaMemPoolSetAccess(void*, const void*, size_t) { return SUCCESS; }
API cudaMemPoolTrimTo(void*, size_t) { return SUCCESS; }
API cudaMemPoolCreate(void** pool, const void*) { return *pool = blank(), SUCCESS; }
API cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    open_context(card_of_thread());
    *total_bytes = machine().card.total_bytes;
    *free_bytes = std::max<int64_t>(*total_bytes - used_bytes(index_of(card_of_thread())), 0);
    return SUCCESS;
}
API cudaHostAlloc(void** address, size_t bytes, unsigned) { return result_of(*address = map_host(bytes), NO_MEMORY); }
API cudaMallocHost(void** address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
API cudaFreeHost(void* address) { return result_of(!address || deallocate(address), INVALID_VALUE); }
API cudaHostRegister(void* address, size_t bytes, unsigned) {
    return add_range({static_cast<char*>(address), bytes, card_of_thread(), HOST}), SUCCESS;
}
API cudaHostUnregister(void* address) {
    Range dropped;
    return drop_range(address, &dropped), SUCCESS;
}
API cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, SUCCESS; }
API cudaHostGetFlags(unsigned* flags, void*) { return *flags = 0, SUCCESS; }
struct PointerAttributes { int type, card; void *device, *host; long reserved[8]; };
API cudaPointerGetAttributes(PointerAttributes* found, const void* address) {
    void* pointer = const_cast<void*>(address);
    Range range;
    memset(static_cast<void*>(found), 0, 24);  // CUDA 12 has not the reserved words
    if (!find_range(address, &range)) return found->type = 0, found->card = -2, found->host = pointer, SUCCESS;
    found->type = range.kind == HOST ? 1 : 2;
    found->card = range.card;
    found->device = pointer;
    found->host = range.kind == HOST ? pointer : nullptr;
    return SUCCESS;
}

API cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
    enqueue_copy(stream, bytes, kind != DEVICE_TO_DEVICE);
    copy(to, from, bytes);
    Range pinned;
    if (kind == DEVICE_TO_HOST && !find_range(to, &pinned)) wait_for_stream(stream);  // pageable memory
    return SUCCESS;
}
API cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
    cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return wait_for_stream(nullptr), SUCCESS;
}
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void* stream) {
    return cudaMemcpyAsync(to, from, bytes, DEVICE_TO_DEVICE, stream);
}
API cudaMemcpyPeer(void* to, int, const void* from, int, size_t bytes) { return cudaMemcpy(to, from, bytes, DEVICE_TO_DEVICE); }
API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int kind, void* stream) {
    enqueue_copy(stream, width * height, kind != DEVICE_TO_DEVICE);
    for (size_t row = 0; width * height <= COPIED_BYTES && row < height; row++)
        memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return SUCCESS;
}
API cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) { return SUCCESS; }
API cudaMemcpyToSymbolAsync(const void*, const void*, size_t, size_t, int, void*) { return SUCCESS; }
API cudaMemcpyFromSymbol(void* to, const void*, size_t bytes, size_t, int) { return memset(to, 0, bytes), SUCCESS; }
API cudaMemset(void* to, int value, size_t bytes) { return fill(to, value, bytes), SUCCESS; }
API cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) {
    fill(to, value, bytes);
    return enqueue_copy(stream, bytes, false), SUCCESS;
}
API cudaMemset2DAsync(void*, size_t, int, size_t width, size_t height, void* stream) {
    return enqueue_copy(stream, width * height, false), SUCCESS;
}
API cudaGetSymbolAddress(void** address, const void* symbol) {
    static auto* spaces = new std::unordered_map<const void*, void*>;
    std::lock_guard<std::mutex> guard(names_lock);
    void*& space = (*spaces)[symbol];
    if (!space) space = map_pages(GRANULE);
    return *address = space, SUCCESS;
}
API cudaGetSymbolSize(size_t* bytes, const void*) { return *bytes = 4096, SUCCESS; }

// Memory of another process: its size travels in the handle, its bytes do not.
struct IpcHandle { size_t bytes; char rest[56]; };
API cudaIpcGetMemHandle(IpcHandle* handle, void* address) {
    Range range;
    if (!find_range(address, &range)) return result(INVALID_VALUE);
    return *handle = {range.bytes, {}}, SUCCESS;
}
API cudaIpcOpenMemHandle(void** address, IpcHandle handle, unsigned) {
    char* base = static_cast<char*>(map_pages(handle.bytes));
    add_range({base, handle.bytes, card_of_thread(), ADDRESSES});
    return *address = base, SUCCESS;
}
API cudaIpcCloseMemHandle(void* address) { return deallocate(address), SUCCESS; }
API cudaIpcGetEventHandle(IpcHandle* handle, void*) { return *handle = {}, SUCCESS; }
API cudaIpcOpenEventHandle(Event** event, IpcHandle) { return *event = new_event(), SUCCESS; }

// -- streams and events -----------------------------------------------------------------------------------------------

API cudaStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
    open_context(card_of_thread());
    return *stream = new_stream(card_of_thread(), flags, priority), SUCCESS;
}
API cudaStreamCreateWithFlags(Stream** stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaStreamCreate(Stream** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamDestroy(void*) { return SUCCESS; }
API cudaStreamGetPriority(void* stream, int* priority) { return *priority = priority_of(stream), SUCCESS; }
API cudaStreamGetFlags(void* stream, unsigned* flags) { return *flags = flags_of(stream), SUCCESS; }
API cudaStreamGetDevice(void* stream, int* card) { return *card = card_of(stream), SUCCESS; }
API cudaStreamGetId(void* stream, unsigned long long* id) { return *id = reinterpret_cast<uintptr_t>(stream), SUCCESS; }
API cudaStreamQuery(void* stream) { return stream_is_done(stream) ? SUCCESS : NOT_READY; }
API cudaStreamSynchronize(void* stream) { return wait_for_stream(stream), SUCCESS; }
API cudaStreamWaitEvent(void* stream, Event* event, unsigned) { return stream_waits(stream, event), SUCCESS; }
API cudaEventCreateWithFlags(Event** event, unsigned) { return *event = new_event(), SUCCESS; }
API cudaEventCreate(Event** event) { return *event = new_event(), SUCCESS; }
API cudaEventDestroy(Event* event) { return delete_event(event), SUCCESS; }
API cudaEventRecord(Event* event, void* stream) { return record(event, stream), SUCCESS; }
API cudaEventRecordWithFlags(Event* event, void* stream, unsigned) { return record(event, stream), SUCCESS; }
API cudaEventQuery(Event* event) { return event_is_done(event) ? SUCCESS : NOT_READY; }
API cudaEventSynchronize(Event* event) { return wait_for_event(event), SUCCESS; }
API cudaEventElapsedTime(float* ms, Event* first, Event* second) {
    return *ms = float(seconds_between(first, second) * 1e3), SUCCESS;
}

// -- graphs: their memory is the program's, their nodes are not kept ----------------------------------------------------

constexpr double GRAPH_SECONDS = 1e-3;  // of a graph, whatever is in it; assumed
API cudaStreamIsCapturing(void* stream, int* state) { return *state = capture_of(stream) != 0, SUCCESS; }
API cudaStreamGetCaptureInfo(void* stream, int* state, unsigned long long* id, void** graph, void** nodes, void** edges, size_t* count) {
    unsigned long long capture = capture_of(stream);
    *state = capture != 0;
    if (id) *id = capture;
    if (graph) *graph = reinterpret_cast<void*>(uintptr_t(0x3000));
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return SUCCESS;
}
API cudaStreamBeginCapture(void* stream, int) { return begin_capture(stream), SUCCESS; }
API cudaStreamBeginCaptureToGraph(void* stream, void*, const void*, const void*, size_t, int) { return begin_capture(stream), SUCCESS; }
API cudaStreamEndCapture(void* stream, void** graph) { return end_capture(stream), *graph = blank(), SUCCESS; }
API cudaGraphInstantiate(void** ready, void*, unsigned long long) { return *ready = blank(), SUCCESS; }
API cudaGraphInstantiateWithFlags(void** ready, void*, unsigned long long) { return *ready = blank(), SUCCESS; }
API cudaGraphLaunch(void*, void* stream) { return enqueue(stream, GRAPH_SECONDS), SUCCESS; }
API cudaGraphGetNodes(void*, void*, size_t* count) { return *count = 1, SUCCESS; }
API cudaGraphDestroy(void*) { return SUCCESS; }
API cudaGraphExecDestroy(void*) { return SUCCESS; }
API cudaThreadExchangeStreamCaptureMode(int*) { return SUCCESS; }

// -- the driver's functions -------------------------------------------------------------------------------------------

API cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int* found) {
    *function = driver_function(name);
    if (found) *found = 0;  // cudaDriverEntryPointSuccess
    return SUCCESS;
}
API cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long flags, int* found) {
    return cudaGetDriverEntryPoint(name, function, flags, found);
}
API cudaGetExportTable(const void** table, const void*) { return *table = nullptr, NOT_SUPPORTED; }
