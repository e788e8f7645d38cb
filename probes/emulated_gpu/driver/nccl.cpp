// libnccl.so.2: communicators of processes on this machine, or of one process whose peers do not exist.
//
// Small data moves between the processes, through a file beside the machine's; large data stays where it is. Peers that
// do not exist hold what this process holds, so that a sum is a multiple. Names and numbers are those of NCCL 2.29.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#include "core.h"

using namespace emulated;

#define API extern "C" int
namespace {
enum { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1 };
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_A, FLOAT8_B };
enum Operation { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };
constexpr double SECONDS = 15e-6;  // of a collective of nothing; assumed
constexpr long TRIES = 120L * 1000 * 1000 / 50;  // two minutes, one every 50 microseconds

struct Box {  // of one rank: what it sent in its latest collective, and which one it has read
    std::atomic<uint64_t> written, read;
    char data[OBJECT_BYTES];
};
}  // namespace
struct Id {  // ncclUniqueId
    char bytes[128];
};
struct Communicator {
    int ranks, rank, card;
    std::string name;
    Box* boxes;  // nullptr: the other ranks do not exist
    bool connected = false;  // NCCL takes its memory with the first collective
    uint64_t collectives = 0;
    int splits = 0;
};
namespace {
size_t width(int type) {
    switch (type) {
        case FLOAT16: case BFLOAT16: return 2;
        case INT32: case UINT32: case FLOAT32: return 4;
        case INT64: case UINT64: case FLOAT64: return 8;
        default: return 1;
    }
}

Communicator* open_communicator(int ranks, int rank, const std::string& name) {
    auto* made = new Communicator{ranks, rank, card_of_thread(), name, nullptr};
    if (ranks < 2) return made;
    if (machine().mirrored) return made;
    std::string path = std::string(getenv("PLAN_EMULATED_MACHINE")) + "." + name;
    int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    size_t size = sizeof(Box) * ranks;
    if (file >= 0 && ftruncate(file, size) == 0) {
        void* boxes = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (boxes != MAP_FAILED) made->boxes = static_cast<Box*>(boxes);
    }
    if (file >= 0) close(file);
    return made;
}
std::string name_of(const Id& id) {
    char text[33];
    for (int i = 0; i < 16; i++) snprintf(text + 2 * i, 3, "%02x", static_cast<unsigned char>(id.bytes[i]));
    return text;
}

bool reaches(std::atomic<uint64_t>& counter, uint64_t value) {
    for (long tries = 0; counter.load() < value; tries++) {
        if (tries > TRIES) return fprintf(stderr, "emulated NCCL: a rank did not come to a collective\n"), false;
        usleep(50);
    }
    return true;
}

// The bytes of every rank, in their order; none if there are no other processes, or if the data is large.
std::vector<std::string> exchange(Communicator* group, const void* mine, size_t bytes, size_t most = COPIED_BYTES) {
    std::vector<std::string> all;
    if (!group->boxes || bytes > most) return all;
    uint64_t number = ++group->collectives;
    for (int rank = 0; rank < group->ranks; rank++)
        if (!reaches(group->boxes[rank].read, number - 1)) return all;
    Box& own = group->boxes[group->rank];
    if (bytes) memcpy(own.data, mine, bytes);
    own.written = number;
    for (int rank = 0; rank < group->ranks; rank++) {
        if (!reaches(group->boxes[rank].written, number)) return {};
        all.emplace_back(group->boxes[rank].data, bytes);
    }
    own.read = number;
    return all;
}

template <class T>
void fold(T* to, const T* from, size_t count, int operation) {
    for (size_t i = 0; i < count; i++) {
        T a = to[i], b = from[i];
        to[i] = operation == MAXIMUM ? (a > b ? a : b) : operation == MINIMUM ? (a < b ? a : b) : operation == PRODUCT ? T(a * b) : T(a + b);
    }
}
void fold(void* to, const void* from, size_t count, int type, int operation) {
    switch (type) {
        case INT8: case UINT8: return fold(static_cast<int8_t*>(to), static_cast<const int8_t*>(from), count, operation);
        case INT32: case UINT32: return fold(static_cast<int32_t*>(to), static_cast<const int32_t*>(from), count, operation);
        case INT64: case UINT64: return fold(static_cast<int64_t*>(to), static_cast<const int64_t*>(from), count, operation);
        case FLOAT32: return fold(static_cast<float*>(to), static_cast<const float*>(from), count, operation);
        case FLOAT64: return fold(static_cast<double*>(to), static_cast<const double*>(from), count, operation);
        default: return;  // 16 and 8 bit numbers are activations and gradients: nothing reads them
    }
}

// Reduce `count` elements from element `first` on of every rank's data into `to`. Peers that do not exist hold the same.
void reduce(Communicator* group, const void* from, void* to, size_t first, size_t count, size_t sent, int type, int operation) {
    size_t bytes = count * width(type), offset = first * width(type);
    auto all = exchange(group, from, sent * width(type));
    if (!to || bytes > COPIED_BYTES || (all.empty() && group->boxes)) return;
    const char* mine = static_cast<const char*>(from) + offset;
    memmove(to, all.empty() ? mine : all[0].data() + offset, bytes);
    if (all.empty() && operation != SUM) return;
    std::string same(all.empty() ? static_cast<const char*>(to) : "", all.empty() ? bytes : 0);
    for (int rank = 1; rank < group->ranks; rank++)
        fold(to, all.empty() ? same.data() : all[rank].data() + offset, count, type, operation);
}
// Enqueue a collective; false: there is no memory for the communicator's buffers.
bool begin(void* stream, double bytes, Communicator* group) {
    if (group->ranks < 2) return true;
    if (!group->connected && !charge(group->card, machine().card.communicator_bytes)) return false;
    group->connected = true;
    return enqueue(stream, SECONDS + bytes / machine().card.link_bytes_per_second), true;
}
}  // namespace

// -- communicators ----------------------------------------------------------------------------------------------------

API ncclGetVersion(int* version) { return *version = 22907, SUCCESS; }
API ncclGetUniqueId(Id* id) {
    memset(id, 7, sizeof *id);
    int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (read(file, id, 16) != 16) id->bytes[0] = char(getpid());
    return close(file), SUCCESS;
}
API ncclCommInitRank(Communicator** group, int ranks, Id id, int rank) {
    return *group = open_communicator(ranks, rank, name_of(id)), SUCCESS;
}
API ncclCommInitRankConfig(Communicator** group, int ranks, Id id, int rank, void*) {
    return ncclCommInitRank(group, ranks, id, rank);
}
API ncclCommInitRankScalable(Communicator** group, int ranks, int rank, int, Id* id, void*) {
    return ncclCommInitRank(group, ranks, *id, rank);
}
API ncclCommInitAll(Communicator** groups, int ranks, const int*) {
    for (int rank = 0; rank < ranks; rank++) groups[rank] = open_communicator(1, rank, "");
    return SUCCESS;
}
API ncclCommSplit(Communicator* parent, int color, int key, Communicator** group, void*) {
    int mine[2] = {color, key};
    auto all = exchange(parent, mine, sizeof mine);
    parent->splits++;
    if (color < 0) return *group = nullptr, SUCCESS;
    if (all.empty()) return *group = open_communicator(parent->ranks, parent->rank, parent->name), SUCCESS;
    int ranks = 0, before = 0;
    for (int other = 0; other < parent->ranks; other++) {
        const int* its = reinterpret_cast<const int*>(all[other].data());
        if (its[0] != color) continue;
        ranks++;
        before += its[1] < key || (its[1] == key && other < parent->rank);
    }
    std::string name = parent->name + "." + std::to_string(parent->splits) + "." + std::to_string(color);
    return *group = open_communicator(ranks, before, name), SUCCESS;
}
API ncclCommCount(const Communicator* group, int* count) { return *count = group->ranks, SUCCESS; }
API ncclCommUserRank(const Communicator* group, int* rank) { return *rank = group->rank, SUCCESS; }
API ncclCommCuDevice(const Communicator* group, int* card) { return *card = group->card, SUCCESS; }
API ncclCommGetAsyncError(Communicator*, int* error) { return *error = SUCCESS, SUCCESS; }
API ncclCommFinalize(Communicator*) { return SUCCESS; }
API ncclCommDestroy(Communicator* group) {
    if (group && group->connected) release(group->card, machine().card.communicator_bytes);
    return SUCCESS;
}
API ncclCommAbort(Communicator* group) { return ncclCommDestroy(group); }
API ncclCommRegister(const Communicator*, void*, size_t, void** handle) { return *handle = nullptr, SUCCESS; }
API ncclMemAlloc(void** address, size_t bytes) {
    *address = allocate(card_of_thread(), bytes);
    return *address ? SUCCESS : UNHANDLED_CUDA_ERROR;
}
API ncclMemFree(void* address) { return deallocate(address), SUCCESS; }
extern "C" const char* ncclGetErrorString(int) { return "emulated NCCL"; }
extern "C" const char* ncclGetLastError(Communicator*) { return ""; }

// -- collectives ------------------------------------------------------------------------------------------------------

API ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Communicator* group, void* stream) {
    if (!begin(stream, 2.0 * count * width(type), group)) return UNHANDLED_CUDA_ERROR;
    return reduce(group, from, to, 0, count, count, type, operation), SUCCESS;
}
API ncclReduce(const void* from, void* to, size_t count, int type, int operation, int, Communicator* group, void* stream) {
    if (!begin(stream, double(count) * width(type), group)) return UNHANDLED_CUDA_ERROR;
    return reduce(group, from, to, 0, count, count, type, operation), SUCCESS;
}
API ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation, Communicator* group, void* stream) {
    if (!begin(stream, double(count) * width(type) * group->ranks, group)) return UNHANDLED_CUDA_ERROR;
    return reduce(group, from, to, group->rank * count, count, count * group->ranks, type, operation), SUCCESS;
}
API ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* group, void* stream) {
    size_t bytes = count * width(type);
    if (!begin(stream, double(bytes), group)) return UNHANDLED_CUDA_ERROR;
    auto all = exchange(group, from ? from : to, bytes);
    if (!all.empty()) return memcpy(to, all[root].data(), bytes), SUCCESS;
    return copy(to, from, bytes), SUCCESS;
}
API ncclBcast(void* data, size_t count, int type, int root, Communicator* group, void* stream) {
    return ncclBroadcast(data, data, count, type, root, group, stream);
}
API ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* group, void* stream) {
    size_t bytes = count * width(type);
    if (!begin(stream, double(bytes) * group->ranks, group)) return UNHANDLED_CUDA_ERROR;
    bool objects = type == UINT8 && bytes <= OBJECT_BYTES && bytes * group->ranks <= OBJECTS_BYTES;
    auto all = exchange(group, from, bytes, objects ? OBJECT_BYTES : COPIED_BYTES);
    for (int rank = 0; rank < group->ranks && (objects || bytes * group->ranks <= COPIED_BYTES); rank++)
        memmove(static_cast<char*>(to) + rank * bytes, all.empty() ? from : all[rank].data(), bytes);
    return SUCCESS;
}
API ncclAlltoAll(const void* from, void* to, size_t count, int type, Communicator* group, void* stream) {
    size_t bytes = count * width(type);
    if (!begin(stream, double(bytes) * group->ranks, group)) return UNHANDLED_CUDA_ERROR;
    auto all = exchange(group, from, bytes * group->ranks);
    for (int rank = 0; rank < group->ranks && bytes * group->ranks <= COPIED_BYTES; rank++) {
        const char* sent = all.empty() ? static_cast<const char*>(from) : all[rank].data();
        memmove(static_cast<char*>(to) + rank * bytes, sent + group->rank * bytes, bytes);
    }
    return SUCCESS;
}
API ncclSend(const void*, size_t count, int type, int, Communicator* group, void* stream) {
    return begin(stream, double(count) * width(type), group) ? SUCCESS : UNHANDLED_CUDA_ERROR;
}
API ncclRecv(void*, size_t count, int type, int, Communicator* group, void* stream) {
    return begin(stream, double(count) * width(type), group) ? SUCCESS : UNHANDLED_CUDA_ERROR;
}
API ncclRedOpCreatePreMulSum(int* operation, void*, int, int, Communicator*) { return *operation = AVERAGE, SUCCESS; }
