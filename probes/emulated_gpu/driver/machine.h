// The emulated machine: its cards, and the memory that each process holds on them.
//
// It is a file that every process of the machine maps; probes/emulated_gpu/machine.py writes it. Keep both in step.
#pragma once
#include <atomic>
#include <cstdint>

constexpr int MAX_CARDS = 16, MAX_PROCESSES = 256;
constexpr int64_t MACHINE_VERSION = 1;

struct Card {  // all cards of a machine are alike
    char name[96];
    int64_t total_bytes;         // as cudaMemGetInfo reports it
    int64_t context_bytes;       // of one process: the CUDA context with its kernels
    int64_t communicator_bytes;  // of one NCCL communicator with peers
    int64_t l2_bytes, shared_bytes;  // shared: memory of a multiprocessor
    double flops, bytes_per_second, link_bytes_per_second, host_bytes_per_second;
    int32_t major, minor, multiprocessors, threads;  // threads: of a multiprocessor
};

struct Process {
    std::atomic<int32_t> pid;  // 0: free
    std::atomic<int32_t> unused;
    std::atomic<int64_t> held[MAX_CARDS], peak[MAX_CARDS], pinned;  // bytes; pinned: of host memory
    std::atomic<int64_t> kernels;  // launches
};

struct Machine {
    int64_t version;
    int32_t cards;
    int32_t mirrored;  // 1: the other ranks of a communicator do not exist, and hold what this one holds
    double pace;       // durations on the cards are multiplied by it; 0: everything is done at once
    Card card;
    std::atomic<int64_t> elsewhere[MAX_CARDS];  // bytes held by nobody of this machine
    std::atomic<int32_t> lock;                  // pid of the process that changes the figures
    int32_t unused;
    Process processes[MAX_PROCESSES];
};
