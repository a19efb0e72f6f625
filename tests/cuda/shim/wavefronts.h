// What shared memory is busy with: wavefronts, of which a multiprocessor serves one per cycle.
//
// A kernel that is compiled with -fsanitize=thread calls a function below before each access to
// memory. What the lanes of a warp access from the same place in the code, as often as each has
// been there since the last barrier of the block, counts as one instruction.
#pragma once
#include <array>
#include <map>
#include <set>

#include <dlfcn.h>

#include "fibers.h"

namespace shim {

// Conflicts are wavefronts beyond those of an instruction whose lanes meet in no bank.
struct Wavefronts {
    long long instructions, wavefronts, conflicts;
};
struct Instruction {
    const void* site;
    int warp, barriers, count, part;
    auto key() const { return std::tie(site, warp, barriers, count, part); }
    bool operator<(const Instruction& other) const { return key() < other.key(); }
};
struct Access {
    bool is_store;
    int bytes;
    unsigned mask = 0;
    std::array<long long, kWarp> address;
};

inline std::map<Instruction, Access> accesses;
inline std::map<std::pair<const void*, bool>, Wavefronts> wavefronts;
inline bool is_counting;  // what counts is compiled in the same way

inline long long words_in_fullest_bank(const Access& access, int first, int lanes) {
    std::map<long long, std::set<long long>> banks;
    for (int lane = first; lane < first + lanes; ++lane) {
        if (!(access.mask >> lane & 1)) continue;
        const long long begin = access.address[lane] / 4;
        const long long end = (access.address[lane] + access.bytes - 1) / 4;
        for (long long word = begin; word <= end; ++word) banks[word % 32].insert(word);
    }
    size_t most = 0;
    for (const auto& bank : banks) most = std::max(most, bank.second.size());
    return most;
}

// Whether every lane reads what its neighbour, 1 or 2 lanes on, reads. A wavefront then serves
// twice as many lanes: https://forums.developer.nvidia.com/t/77228 (for 7.0 and 7.5; nothing says
// that it changed).
inline bool has_equal_pairs(const Access& access, int distance) {
    for (int lane = 0; lane < kWarp; ++lane) {
        const int other = lane ^ distance;
        if ((access.mask >> lane & 1) && (access.mask >> other & 1) &&
            access.address[lane] != access.address[other])
            return false;
    }
    return true;
}

// All lanes at once up to 4 bytes each, half of them for 8, a fourth for 16.
inline void count(const void* site, const Access& access) {
    int lanes = kWarp / std::max(access.bytes / 4, 1);
    const bool pairs = has_equal_pairs(access, 1) || has_equal_pairs(access, 2);
    if (!access.is_store && pairs && lanes < kWarp) lanes *= 2;
    Wavefronts& sum = wavefronts[{site, access.is_store}];
    sum.instructions += 1;
    for (int first = 0; first < kWarp; first += lanes) {
        const long long words = words_in_fullest_bank(access, first, lanes);
        sum.wavefronts += words;
        sum.conflicts += std::max(words - 1, 0ll);
    }
}

inline void end_counted_block() {
    is_counting = true;
    for (const auto& each : accesses) count(each.first.site, each.second);
    accesses.clear();
    for (Fiber& fiber : fibers) fiber.visits.clear();
    current = nullptr;
    is_counting = false;
}

inline void add(const void* site, const void* at, long long bytes, bool is_store) {
    Fiber& fiber = *current;
    const int count = fiber.visits[{site, fiber.barriers}]++;
    for (int part = 0; part * 16 < bytes; ++part) {
        const int size = static_cast<int>(std::min(bytes - part * 16, 16ll));
        const Instruction key{site, fiber.index / kWarp, fiber.barriers, count, part};
        Access& access = accesses.try_emplace(key, Access{is_store, size}).first->second;
        access.mask |= 1u << fiber.lane;
        access.address[fiber.lane] = reinterpret_cast<intptr_t>(at) + part * 16;
    }
}

// These are compiled without calls of themselves: they are called at every access of a kernel.
#define SHIM_UNCOUNTED __attribute__((no_sanitize("thread")))

SHIM_UNCOUNTED inline bool is_in(const SharedMemory& memory, const void* at) {
    return at >= memory.begin && at < memory.begin + memory.bytes;
}

SHIM_UNCOUNTED inline void note(const void* site, void* at, long long bytes, bool is_store) {
    if (is_counting || !current) return;
    is_counting = true;
    bool is_shared = is_in(dynamic_shared, at);
    for (int i = 0; i < static_shared_count; ++i)
        is_shared = is_shared || is_in(static_shared[i], at);
    if (is_shared) add(site, at, bytes, is_store);
    is_counting = false;
}

}  // namespace shim

extern "C" {
#define SHIM_NOTE(name, bytes, is_store) \
    SHIM_UNCOUNTED void name(void* at) {                                 \
        shim::note(__builtin_return_address(0), at, bytes, is_store);    \
    }
#define SHIM_NOTE_SIZE(bytes)                                  \
    SHIM_NOTE(__tsan_read##bytes, bytes, false)                \
    SHIM_NOTE(__tsan_write##bytes, bytes, true)                \
    SHIM_NOTE(__tsan_unaligned_read##bytes, bytes, false)      \
    SHIM_NOTE(__tsan_unaligned_write##bytes, bytes, true)
SHIM_NOTE_SIZE(1)
SHIM_NOTE_SIZE(2)
SHIM_NOTE_SIZE(4)
SHIM_NOTE_SIZE(8)
SHIM_NOTE_SIZE(16)
#undef SHIM_NOTE_SIZE
#undef SHIM_NOTE
SHIM_UNCOUNTED void __tsan_read_range(void* at, long bytes) {
    shim::note(__builtin_return_address(0), at, bytes, false);
}
SHIM_UNCOUNTED void __tsan_write_range(void* at, long bytes) {
    shim::note(__builtin_return_address(0), at, bytes, true);
}
void __tsan_vptr_update(void*, void*) {}
void __tsan_init() {}

// Fills a table of addresses in the library, stores or not, and counts; returns its rows.
__attribute__((visibility("default"))) int shim_wavefronts(long long* table) {
    Dl_info library;
    dladdr(reinterpret_cast<const void*>(&shim_wavefronts), &library);
    for (const auto& each : shim::wavefronts) {
        const auto* site = static_cast<const char*>(each.first.first);
        // A call returns to what may already be another line.
        *table++ = site - static_cast<const char*>(library.dli_fbase) - 1;
        *table++ = each.first.second;
        *table++ = each.second.instructions;
        *table++ = each.second.wavefronts;
        *table++ = each.second.conflicts;
    }
    const int rows = static_cast<int>(shim::wavefronts.size());
    shim::wavefronts.clear();
    return rows;
}
}
