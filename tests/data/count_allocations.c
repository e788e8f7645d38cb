/* Counts the bytes of blocks from posix_memalign, which PyTorch's CPU allocator calls; for LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>

#define SLOTS (1 << 20)
static struct { void *block; size_t size; } table[SLOTS];
static long held, peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static size_t slot_of(void *block) { return ((size_t)block >> 6) * 2654435761u % SLOTS; }

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    if (!block) return ENOMEM;
    *result = block;
    pthread_mutex_lock(&lock);
    size_t i = slot_of(block);
    while (table[i].block && table[i].block != (void *)1) i = (i + 1) % SLOTS;
    table[i].block = block; table[i].size = size;
    held += size;
    if (held > peak) peak = held;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *block) {
    if (block) {
        pthread_mutex_lock(&lock);
        for (size_t i = slot_of(block); table[i].block; i = (i + 1) % SLOTS)
            if (table[i].block == block) { held -= table[i].size; table[i].block = (void *)1; break; }
        pthread_mutex_unlock(&lock);
    }
    __libc_free(block);
}

long held_bytes(void) { return held; }
long peak_bytes(void) { return peak; }
void reset_peak(void) { peak = held; }
