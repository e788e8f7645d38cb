// The core of the emulated driver, in libcuda.so.1: memory that is counted, and streams whose work takes time.
#pragma once
#include <cstddef>
#include <cstdint>
#include "machine.h"

namespace emulated {

// A card is numbered as the process sees it, with CUDA_VISIBLE_DEVICES; its index is the machine's.
const Machine& machine();
int visible_cards();
int index_of(int card);
int card_of_thread();
bool set_card_of_thread(int card);  // false: there is no such card
void open_context(int card);        // charges the CUDA context, once
bool has_context(int card);

// -- memory: address space that costs nothing until it is touched, and is counted ------------------------------------

constexpr size_t GRANULE = 2 << 20;      // of cudaMalloc and of the virtual memory API
constexpr size_t COPIED_BYTES = 1 << 20;  // larger copies are not made
// Pickled objects, which torch.distributed sends as numbers of 8 bits: of one rank (a batch's images), and of all ranks.
constexpr size_t OBJECT_BYTES = 64 << 20, OBJECTS_BYTES = 1 << 30;

enum Kind : int { DEVICE, HOST, ADDRESSES };  // ADDRESSES: reserved, what is mapped there is charged apart
struct Range {
    char* base;
    size_t bytes;
    int card;
    Kind kind;
};

void count_kernel();
bool charge(int card, size_t bytes);  // false: out of memory
void release(int card, size_t bytes);
void* allocate(int card, size_t bytes);  // nullptr: out of memory
bool deallocate(void* address);          // false: not ours
void* map_host(size_t bytes);            // pinned host memory
void* map_pages(size_t bytes);
void unmap_pages(void* address, size_t bytes);
void drop_pages(void* address, size_t bytes);
void add_range(Range range);
bool drop_range(void* address, Range* dropped);
bool find_range(const void* address, Range* found);
int64_t used_bytes(int index);  // of all processes and of others
int processes_on(int index, int room, uint32_t* pids, int64_t* bytes);
void copy(void* to, const void* from, size_t bytes);
void fill(void* to, int value, size_t bytes);

// -- time -------------------------------------------------------------------------------------------------------------

struct Stream;
struct Event;
Stream* new_stream(int card, unsigned flags, int priority);
Stream* stream_of(void* handle);  // CUDA's handles 0, 1 and 2 are the default stream of the thread's card
void enqueue(void* stream, double seconds);
void enqueue_kernel(void* stream, const char* name, double blocks_x, double blocks, double threads);
void enqueue_product(void* stream, double m, double n, double k, double batch, int width);
void enqueue_copy(void* stream, size_t bytes, bool over_the_bus);
void wait_for_stream(void* stream);
void wait_for_card(int card);
bool stream_is_done(void* stream);
Event* new_event();
void delete_event(Event* event);
void record(Event* event, void* stream);
bool event_is_done(Event* event);
void wait_for_event(Event* event);
void stream_waits(void* stream, Event* event);
double seconds_between(Event* first, Event* second);
void begin_capture(void* stream);
void end_capture(void* stream);
unsigned long long capture_of(void* stream);  // 0: it captures nothing
int priority_of(void* stream);
unsigned flags_of(void* stream);
int card_of(void* stream);

void* driver_function(const char* name);
int attribute(int number, int card);
void uuid_of(int index, char* bytes);
}  // namespace emulated
