// The threads of a block as fibers of one thread of the operating system.
//
// A fiber runs until it reaches a barrier of its block or a collective of its warp; the scheduler,
// in blocks.h, then picks another.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <ucontext.h>

// Other processors use the fibers of the C library, and so does x86 on request.
#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)
#define SHIM_OWN_SWITCH 1
#endif

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace shim {

constexpr size_t kStackBytes = 256 << 10;
constexpr int kWarp = 32;

// The place where a kernel waits: the called function and the calling line.
struct Site {
    const char* what = "";
    const char* file = "";
    int line = 0;
    bool operator!=(const Site& other) const {
        return line != other.line || std::strcmp(what, other.what) || std::strcmp(file, other.file);
    }
    std::string text() const {
        return std::string(what) + " at " + file + ":" + std::to_string(line);
    }
};
// The last parameters of a function that waits: the file and the line that call it.
#define SHIM_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

enum class State { kReady, kAtBlockBarrier, kAtWarpCollective, kDone };

struct Fiber {
#if defined(SHIM_OWN_SWITCH)
    void* stack_pointer;
#else
    ucontext_t context;
#endif
    char* stack;
    void* asan_stack;
    dim3 position;
    int index, lane;
    State state;
    Site site;
    // Argument and result of a collective of the warp.
    uint64_t value, result;
    unsigned mask;
    int argument;
};

inline Fiber* current;
inline Fiber scheduler;
inline std::vector<Fiber> fibers;
inline const std::function<void()>* kernel;
inline dim3 block_position{0, 0, 0}, block_size;
inline bool failed;
inline std::string failure;

// The block's barrier: the numbers of running threads and of threads that wait at it.
inline int alive, arrived;
inline Site barrier_site;

#if defined(SHIM_OWN_SWITCH)
// Saves the registers that a call keeps and nothing else: a signal mask costs a system call.
extern "C" void shim_switch(void** save, void* to);
__asm__(R"(
.text
.globl shim_switch
.hidden shim_switch
.type shim_switch,@function
shim_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#endif

inline void switch_fibers(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
    void** keep = from.state == State::kDone ? nullptr : &from.asan_stack;
    __sanitizer_start_switch_fiber(keep, to.stack, kStackBytes);
#endif
#if defined(SHIM_OWN_SWITCH)
    shim_switch(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.asan_stack, nullptr, nullptr);
#endif
}

// Reports an error of the running thread. Fibers cannot be unwound: they are left where they are.
[[noreturn]] inline void fail(const std::string& message) {
    if (!failed) {
        failure = message + ", thread " + std::to_string(current->index);
        failed = true;
    }
    current->state = State::kDone;
    switch_fibers(*current, scheduler);
    std::abort();
}

inline void wait(State state) {
    current->state = state;
    switch_fibers(*current, scheduler);
}

inline void release_barrier() {
    for (Fiber& fiber : fibers)
        if (fiber.state == State::kAtBlockBarrier) fiber.state = State::kReady;
    arrived = 0;
}

// Waits for the block.
inline void block_barrier(const Site& site) {
    if (arrived == 0)
        barrier_site = site;
    else if (barrier_site != site)
        fail(site.text() + ", while others of the block wait at " + barrier_site.text());
    current->site = site;
    if (++arrived == alive)
        release_barrier();
    else
        wait(State::kAtBlockBarrier);
}

inline void run_thread() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    (*kernel)();
    current->state = State::kDone;
    // A barrier does not wait for threads that have returned.
    if (--alive > 0 && arrived == alive) release_barrier();
    switch_fibers(*current, scheduler);
    std::abort();
}

inline char* new_stack() {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(stack, 4096, PROT_NONE);  // it grows downwards: a thread that needs more crashes here
    return static_cast<char*>(stack);
}

inline void start(Fiber& fiber, int index) {
    if (!fiber.stack) fiber.stack = new_stack();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, kStackBytes);
#endif
#if defined(SHIM_OWN_SWITCH)
    // At equal offsets, the frames of all fibers would share a few cache lines.
    char* top = fiber.stack + kStackBytes - 64 - index * 320 % 8192;
    void** frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(63));
    *--frame = nullptr;
    *--frame = reinterpret_cast<void*>(run_thread);
    frame -= 6;
    std::memset(frame, 0, 6 * sizeof *frame);
    fiber.stack_pointer = frame;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
#endif
    fiber.state = State::kReady;
    fiber.index = index;
    fiber.lane = index % kWarp;
    fiber.position = dim3{static_cast<unsigned>(index), 0, 0};
    fiber.site = Site{"start"};
}

}  // namespace shim
