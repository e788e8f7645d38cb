// Memory of the emulated cards: every byte is counted in the machine's file, and none exists until it is touched.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include "core.h"

namespace emulated {
namespace {

constexpr const char* MACHINE_FILE = "PLAN_EMULATED_MACHINE";  // environment variable

Machine* open_machine() {
    const char* path = getenv(MACHINE_FILE);
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void* found = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(Machine), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (found == MAP_FAILED || static_cast<Machine*>(found)->version != MACHINE_VERSION) {
        fprintf(stderr, "emulated GPU: %s=%s is no machine of this driver\n", MACHINE_FILE, path ? path : "");
        _exit(1);
    }
    return static_cast<Machine*>(found);
}

Machine& shared() {
    static Machine* opened = open_machine();
    return *opened;
}

// -- the processes of the machine -------------------------------------------------------------------------------------

bool has_ended(int pid) {  // a zombie holds no memory of a GPU
    if (kill(pid, 0) != 0) return true;
    char path[64], text[512] = {};
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE* file = fopen(path, "r");
    if (!file) return true;
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    const char* name_end = size ? strrchr(text, ')') : nullptr;
    return name_end && (name_end[2] == 'Z' || name_end[2] == 'X');
}

pid_t own_pid() {  // getpid asks the kernel each time, and every launch asks here
    static std::atomic<pid_t> pid{0};
    static const int registered = pthread_atfork(nullptr, nullptr, [] { pid = 0; });
    if (!pid) pid = getpid();
    return pid;
}

class Locked {  // the lock of a process that was killed is taken over
  public:
    Locked() {
        int nobody = 0, me = own_pid(), tries = 0;
        while (!shared().lock.compare_exchange_weak(nobody, me)) {
            if (nobody && ++tries % 1000 == 0 && has_ended(nobody) && shared().lock.compare_exchange_strong(nobody, me))
                return;
            nobody = 0;
            usleep(20);
        }
    }
    ~Locked() { shared().lock = 0; }
};

void forget(Process& process) {
    for (int card = 0; card < MAX_CARDS; card++) process.held[card] = 0;
    process.pinned = 0;
}

void forget_ended() {
    for (Process& process : shared().processes)
        if (process.pid && process.pid != own_pid() && has_ended(process.pid)) {
            forget(process);
            process.pid = -process.pid;  // its peaks are read later
        }
}

Process* enter() {
    for (int free_pid : {0, -1})  // slots never used first, then those of ended processes
        for (Process& process : shared().processes)
            if (free_pid == 0 ? process.pid == 0 : process.pid < 0) {
                forget(process);
                for (auto& peak : process.peak) peak = 0;
                process.kernels = 0;
                process.pid = own_pid();
                return &process;
            }
    fprintf(stderr, "emulated GPU: more than %d processes\n", MAX_PROCESSES);
    _exit(1);
}

struct Contexts {
    int pid = 0;
    Process* process = nullptr;
    bool open[MAX_CARDS] = {};
};

Contexts& mine() {  // a forked child holds nothing
    static Contexts contexts;
    if (contexts.pid != own_pid()) {
        contexts = {};
        contexts.pid = own_pid();
        contexts.process = enter();
    }
    return contexts;
}

struct AtExit {
    ~AtExit() {
        if (!getenv(MACHINE_FILE) || mine().pid != own_pid()) return;
        Locked locked;
        forget(*mine().process);
    }
};

int64_t used(int card) {
    int64_t sum = shared().elsewhere[card];
    for (Process& process : shared().processes)
        if (process.pid > 0) sum += process.held[card];
    return sum;
}

bool take(int card, int64_t bytes) {
    if (used(card) + bytes > shared().card.total_bytes) {
        forget_ended();
        if (used(card) + bytes > shared().card.total_bytes) return false;
    }
    Process& process = *mine().process;
    process.held[card] += bytes;
    process.peak[card] = std::max<int64_t>(process.peak[card], process.held[card]);
    return true;
}

std::mutex ranges_lock;
std::map<uintptr_t, Range>& ranges() {
    static auto* all = new std::map<uintptr_t, Range>;
    return *all;
}

// CUDA_VISIBLE_DEVICES: the machine's index of each card that this process sees, up to the first that is none.
struct Visible {
    int count = 0, index[MAX_CARDS];
    Visible() {
        const char* text = getenv("CUDA_VISIBLE_DEVICES");
        while (!text && count < shared().cards) index[count] = count, count++;
        while (text && *text && count < MAX_CARDS) {
            char* end;
            long number = strtol(text, &end, 10);
            if (end == text || number < 0 || number >= shared().cards) break;
            index[count++] = int(number);
            text = *end == ',' ? end + 1 : end;
        }
    }
};
const Visible& visible() {
    static Visible cards;
    return cards;
}

size_t in_granules(size_t bytes) { return (bytes + GRANULE - 1) / GRANULE * GRANULE; }
thread_local int thread_card = 0;

}  // namespace

const Machine& machine() { return shared(); }
int visible_cards() { return visible().count; }
int index_of(int card) { return visible().index[card]; }
int card_of_thread() { return thread_card; }
bool set_card_of_thread(int card) {
    if (card < 0 || card >= visible_cards()) return false;
    thread_card = card;
    return true;
}
bool has_context(int card) { return mine().open[card]; }
void open_context(int card) {
    if (mine().open[card]) return;
    static AtExit at_exit;
    Locked locked;
    mine().open[card] = true;
    take(index_of(card), shared().card.context_bytes);
}
void count_kernel() { mine().process->kernels++; }

bool charge(int card, size_t bytes) {
    open_context(card);
    Locked locked;
    return take(index_of(card), bytes);
}
void release(int card, size_t bytes) {
    Locked locked;
    mine().process->held[index_of(card)] -= bytes;
}
int64_t used_bytes(int index) {
    Locked locked;
    forget_ended();
    return used(index);
}
int processes_on(int index, int room, uint32_t* pids, int64_t* bytes) {
    Locked locked;
    forget_ended();
    int found = 0;
    for (Process& process : shared().processes)
        if (process.pid > 0 && process.held[index] > 0 && found < room) {
            pids[found] = process.pid;
            bytes[found++] = process.held[index];
        }
    return found;
}

// -- address space ----------------------------------------------------------------------------------------------------

void* map_pages(size_t bytes) {
    size_t size = in_granules(bytes ? bytes : 1);
    void* raw = mmap(nullptr, size + GRANULE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    char* first = static_cast<char*>(raw);
    char* base = reinterpret_cast<char*>(in_granules(reinterpret_cast<uintptr_t>(first)));
    if (base > first) munmap(first, base - first);
    if (size_t rest = first + size + GRANULE - (base + size)) munmap(base + size, rest);
    madvise(base, size, MADV_NOHUGEPAGE);  // a number that is written costs 4 KiB, not 2 MiB
    return base;
}
void unmap_pages(void* address, size_t bytes) { munmap(address, in_granules(bytes)); }
void drop_pages(void* address, size_t bytes) { madvise(address, bytes, MADV_DONTNEED); }

void add_range(Range range) {
    std::lock_guard<std::mutex> guard(ranges_lock);
    ranges()[reinterpret_cast<uintptr_t>(range.base)] = range;
}
bool drop_range(void* address, Range* dropped) {
    std::lock_guard<std::mutex> guard(ranges_lock);
    auto found = ranges().find(reinterpret_cast<uintptr_t>(address));
    if (found == ranges().end()) return false;
    *dropped = found->second;
    ranges().erase(found);
    return true;
}
bool find_range(const void* address, Range* found) {
    std::lock_guard<std::mutex> guard(ranges_lock);
    auto next = ranges().upper_bound(reinterpret_cast<uintptr_t>(address));
    if (next == ranges().begin()) return false;
    Range range = std::prev(next)->second;
    if (static_cast<const char*>(address) >= range.base + range.bytes) return false;
    *found = range;
    return true;
}

void* allocate(int card, size_t bytes) {
    size_t size = in_granules(bytes ? bytes : 1);
    if (!charge(card, size)) return nullptr;
    char* base = static_cast<char*>(map_pages(size));
    if (!base) {
        release(card, size);
        return nullptr;
    }
    add_range({base, size, card, DEVICE});
    return base;
}
void* map_host(size_t bytes) {
    char* base = static_cast<char*>(map_pages(bytes));
    if (!base) return nullptr;
    add_range({base, bytes, card_of_thread(), HOST});
    mine().process->pinned += bytes;
    return base;
}
bool deallocate(void* address) {
    Range range;
    if (!drop_range(address, &range)) return false;
    unmap_pages(range.base, range.bytes);
    if (range.kind == DEVICE) release(range.card, range.bytes);
    if (range.kind == HOST) mine().process->pinned -= range.bytes;
    return true;
}

// What a program reads of a large copy is what the memory held before, zeros at first.
void copy(void* to, const void* from, size_t bytes) {
    if (to && from && bytes <= COPIED_BYTES) memmove(to, from, bytes);
}
void fill(void* to, int value, size_t bytes) {
    if (to && bytes <= COPIED_BYTES) memset(to, value, bytes);
}
}  // namespace emulated
