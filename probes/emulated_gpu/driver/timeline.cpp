// Time on the emulated cards: the host runs ahead of the streams, and events complete when their stream has come to them.
//
// No kernel runs. Each takes as long as its products or its bytes take at the card's rates, times the machine's pace,
// and starting it costs the host a fixed time. So when a block of memory becomes free again, it does so in the order
// and roughly at the moment of a real card, and two runs of one program are equal.
#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include "core.h"

namespace emulated {
namespace {

// Assumed, not measured; used only where the pace is above 0. FlashAttention's flops: arXiv 2307.08691, section 4.1.
constexpr double LAUNCH_SECONDS = 10e-6;    // host time between two launches of an eager PyTorch program
constexpr double SHORTEST_SECONDS = 2e-6;   // of a kernel
constexpr size_t QUEUE = 1024;              // launches that may wait in a stream before the next one blocks the host
constexpr double FLOPS_SHARE = 0.6, BYTES_SHARE = 0.8;  // reached of a card's rates
constexpr double THREAD_BYTES = 40;         // read and written by one thread of an elementwise kernel
constexpr double FLASH_BLOCK = 128;         // queries of one block of FlashAttention, and features of a head
constexpr double FLASH_FORWARD_FLOPS = 4, FLASH_BACKWARD_FLOPS = 10;  // for each pair of a query and a key, and feature

std::mutex lock;
double host_now = 0;
unsigned long long captures = 0;

}  // namespace

struct Stream {
    int card;
    unsigned flags;
    int priority;
    double ends = 0;            // when the last piece of work is done
    std::deque<double> queue;   // ends of the last pieces
    unsigned long long capture = 0;
};
struct Event {
    double at = 0;
};

namespace {
Stream* default_streams[MAX_CARDS];
std::set<Stream*>& streams() {
    static auto* all = new std::set<Stream*>;
    return *all;
}
void wait_until(double time) { host_now = std::max(host_now, time); }
void add(Stream* stream, double seconds) {
    host_now += LAUNCH_SECONDS;
    double pace = machine().pace;
    if (pace <= 0 || stream->capture) return;
    stream->ends = std::max(stream->ends, host_now) + seconds * pace;
    stream->queue.push_back(stream->ends);
    if (stream->queue.size() > QUEUE) {
        wait_until(stream->queue.front());
        stream->queue.pop_front();
    }
}
double moving(double bytes) { return SHORTEST_SECONDS + bytes / (machine().card.bytes_per_second * BYTES_SHARE); }
double computing(double flops) { return SHORTEST_SECONDS + flops / (machine().card.flops * FLOPS_SHARE); }
}  // namespace

Stream* new_stream(int card, unsigned flags, int priority) {
    std::lock_guard<std::mutex> guard(lock);
    return *streams().insert(new Stream{card, flags, priority}).first;
}
Stream* stream_of(void* handle) {
    if (reinterpret_cast<uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
    int card = card_of_thread();
    std::lock_guard<std::mutex> guard(lock);
    if (!default_streams[card]) streams().insert(default_streams[card] = new Stream{card, 0, 0});
    return default_streams[card];
}

void enqueue(void* handle, double seconds) {
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> guard(lock);
    add(stream, seconds);
}
void enqueue_kernel(void* handle, const char* name, double blocks_x, double blocks, double threads) {
    count_kernel();
    double tokens = blocks_x * FLASH_BLOCK, pairs = tokens * tokens / 2 * FLASH_BLOCK * (blocks / blocks_x);
    double seconds = moving(blocks * threads * THREAD_BYTES);
    if (name && strstr(name, "flash_fwd")) seconds = computing(FLASH_FORWARD_FLOPS * pairs);
    if (name && strstr(name, "flash_bwd")) seconds = computing(FLASH_BACKWARD_FLOPS * pairs);
    enqueue(handle, seconds);
}
void enqueue_product(void* handle, double m, double n, double k, double batch, int width) {
    count_kernel();
    double float32 = width == 4 ? 4 : 1;  // a quarter of the 16-bit rate, roughly, without TF32
    enqueue(handle, std::max(computing(2 * m * n * k * batch * float32), moving((m * k + k * n + m * n) * batch * width)));
}
void enqueue_copy(void* handle, size_t bytes, bool over_the_bus) {
    enqueue(handle, over_the_bus ? SHORTEST_SECONDS + bytes / machine().card.host_bytes_per_second : moving(2.0 * bytes));
}
void wait_for_stream(void* handle) {
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> guard(lock);
    wait_until(stream->ends);
}
void wait_for_card(int card) {
    std::lock_guard<std::mutex> guard(lock);
    for (Stream* stream : streams())
        if (stream->card == card) wait_until(stream->ends);
}
bool stream_is_done(void* handle) {
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> guard(lock);
    return stream->ends <= host_now;
}

Event* new_event() { return new Event; }
void delete_event(Event* event) { delete event; }
void record(Event* event, void* handle) {
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> guard(lock);
    event->at = std::max(stream->ends, host_now);
    if (machine().pace <= 0) event->at = host_now;
}
bool event_is_done(Event* event) {
    std::lock_guard<std::mutex> guard(lock);
    return event->at <= host_now;
}
void wait_for_event(Event* event) {
    std::lock_guard<std::mutex> guard(lock);
    wait_until(event->at);
}
void stream_waits(void* handle, Event* event) {
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> guard(lock);
    if (machine().pace > 0) stream->ends = std::max(stream->ends, event->at);
}
double seconds_between(Event* first, Event* second) {
    std::lock_guard<std::mutex> guard(lock);
    return second->at - first->at;
}

// A graph that is captured runs nothing: its work takes time when it is launched.
void begin_capture(void* handle) {
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> guard(lock);
    stream->capture = ++captures;
}
void end_capture(void* handle) {
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> guard(lock);
    stream->capture = 0;
}
unsigned long long capture_of(void* handle) {
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> guard(lock);
    return stream->capture;
}
int priority_of(void* handle) { return stream_of(handle)->priority; }
unsigned flags_of(void* handle) { return stream_of(handle)->flags; }
int card_of(void* handle) { return stream_of(handle)->card; }
}  // namespace emulated
