// Launches: one block after another, its threads in an order given by a seed.
#pragma once
#include <algorithm>
#include <climits>
#include <new>
#include <random>

#include "fibers.h"

namespace shim {

// One launch, as tests/cuda/cpu_device.py lays it out.
struct Launch {
    long long grid, block, shared_memory, shared_memory_of_device, seed, flush_to_zero;
};
inline const Launch* launch;

// Shared memory starts as NaN, so that reads before the first write show in the result.
struct SharedMemory {
    unsigned char* begin = nullptr;
    long long bytes = 0;

    SharedMemory() = default;
    // An allocation of exactly this size lets AddressSanitizer see accesses beyond it.
    explicit SharedMemory(long long bytes) : bytes(bytes) {
        begin = static_cast<unsigned char*>(::operator new(bytes, std::align_val_t(128)));
        fill_with_nan();
    }
    void fill_with_nan() const {
        if (bytes) std::memset(begin, 0xff, bytes);
    }
    void give_back() const { ::operator delete(begin, std::align_val_t(128)); }
};

inline SharedMemory dynamic_shared;
inline SharedMemory static_shared[64];  // each variable that a thread has reached
inline int static_shared_count;

inline std::string too_much_shared_memory() {
    long long fixed = 0;
    for (const SharedMemory& variable : static_shared) fixed += variable.bytes;
    if (fixed <= 48 << 10 && fixed + launch->shared_memory <= launch->shared_memory_of_device)
        return "";
    return std::to_string(fixed) + " bytes of static and " +
           std::to_string(launch->shared_memory) + " of dynamic shared memory";
}

// Memory for a variable of a block: called once for each of them.
template <class T>
inline T& shared_variable() {
    SharedMemory& memory = static_shared[static_shared_count++];
    memory = SharedMemory(sizeof(T));
    const std::string problem = too_much_shared_memory();
    if (!problem.empty()) fail(problem);
    return *reinterpret_cast<T*>(memory.begin);
}

// A kernel's __launch_bounds__; cpu_device.py puts the call at the beginning of its body.
inline void launch_bounds(long long threads, long long = 0) {
    if (block_size.x > threads)
        fail("blocks of " + std::to_string(block_size.x) + " threads, and __launch_bounds__(" +
             std::to_string(threads) + ")");
}

}  // namespace shim


namespace shim {

// The order of threads. Even seeds: a warp runs up to its barrier before another one starts. Odd
// seeds: all lanes of the block take turns. From seed 2 on, everything is shuffled.
struct Order {
    int group;
    std::vector<int> threads, groups;

    Order(int count, long long seed, std::mt19937_64& random) : group(seed % 2 ? count : kWarp) {
        for (int i = 0; i < count; ++i) threads.push_back(i);
        for (int g = 0; g * group < count; ++g) groups.push_back(g);
        if (seed == 1) std::reverse(threads.begin(), threads.end());
        if (seed < 2) return;
        std::shuffle(groups.begin(), groups.end(), random);
        for (int i = 0; i < count; i += group)
            std::shuffle(threads.begin() + i, threads.begin() + std::min(i + group, count), random);
    }
};

inline bool run_group(const Order& order, int group) {
    const int begin = group * order.group;
    const int end = std::min<int>(begin + order.group, order.threads.size());
    bool ran = false;
    for (bool again = true; again && !failed;) {
        again = false;
        for (int i = begin; i < end && !failed; ++i) {
            Fiber& fiber = fibers[order.threads[i]];
            if (fiber.state != State::kReady) continue;
            current = &fiber;
            switch_fibers(scheduler, fiber);
            ran = again = true;
        }
    }
    return ran;
}

inline void report_deadlock() {
    failed = true;
    failure = "deadlock:";
    for (const Fiber& fiber : fibers) {
        if (fiber.state == State::kDone) continue;
        failure += " thread " + std::to_string(fiber.index) + " waits in " + fiber.site.text();
        break;
    }
    failure += ", " + std::to_string(alive) + " threads have not returned, " +
               std::to_string(arrived) + " of them at the block's barrier";
}

inline void run_block(const Launch& launch, std::mt19937_64& random) {
    const int count = static_cast<int>(launch.block);
    const Order order(count, launch.seed, random);
    dynamic_shared.fill_with_nan();
    for (const SharedMemory& variable : static_shared) variable.fill_with_nan();
    alive = count;
    arrived = 0;
    for (int i = 0; i < count; ++i) start(fibers[i], i);
    while (alive && !failed) {
        bool ran = false;
        for (int group : order.groups) ran |= run_group(order, group);
        if (!ran && !failed) report_deadlock();
    }
    if (failed) failure += ", block " + std::to_string(block_position.x);
}

// Writes the reason why a device would reject a launch; returns whether there is one.
inline bool is_rejected(const Launch& launch) {
    failure.clear();
    if (launch.block < 1 || launch.block > 1024)
        failure = "blocks of " + std::to_string(launch.block) + " threads";
    if (launch.grid < 1 || launch.grid > INT_MAX)
        failure = "a grid of " + std::to_string(launch.grid) + " blocks";
    const std::string problem = too_much_shared_memory();
    if (!problem.empty()) failure = problem;
#if !defined(__x86_64__)
    if (launch.flush_to_zero) failure = "the shim can flush to zero on x86 alone";
#endif
    return !failure.empty();
}

inline int run(const Launch& launch, const std::function<void()>& body) {
    shim::launch = &launch;
    if (is_rejected(launch)) return 1;
#if defined(__SANITIZE_ADDRESS__)
    pthread_attr_t attributes;
    void* lowest;
    size_t size;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &lowest, &size);
    pthread_attr_destroy(&attributes);
    scheduler.stack = static_cast<char*>(lowest) + size - kStackBytes;
#endif
#if defined(__x86_64__)
    const unsigned mode = _mm_getcsr();
    if (launch.flush_to_zero) _mm_setcsr(mode | 0x8040);  // results and operands
#endif
    std::mt19937_64 random(launch.seed);
    failed = false;
    kernel = &body;
    block_size.x = static_cast<unsigned>(launch.block);
    fibers.resize(launch.block);
    dynamic_shared = SharedMemory(launch.shared_memory);
    for (long long block = 0; block < launch.grid && !failed; ++block) {
        // Nothing may depend on the order of blocks: odd seeds run them from the last.
        block_position.x = launch.seed % 2 ? launch.grid - 1 - block : block;
        run_block(launch, random);
    }
    dynamic_shared.give_back();
    // Each library has its own stacks; without unmapping, a process exceeds its limit of mappings.
    for (Fiber& fiber : fibers) {
#if defined(__SANITIZE_ADDRESS__)
        // The address range may be mapped again for other purposes.
        __asan_unpoison_memory_region(fiber.stack, kStackBytes);
#endif
        munmap(fiber.stack, kStackBytes);
    }
    fibers.clear();
#if defined(__x86_64__)
    _mm_setcsr(mode);
#endif
    return failed;
}

}  // namespace shim
