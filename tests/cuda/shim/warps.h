// Barriers and the collectives of a warp.
#pragma once
#include <algorithm>

#include "fibers.h"

namespace shim {

// Every lane that the mask names brings a value; the last one to come works out all results.
template <class Resolve>
inline uint64_t collective(const Site& site, unsigned mask, uint64_t value, int argument,
                           Resolve resolve) {
    Fiber& self = *current;
    Fiber* warp = &fibers[self.index - self.lane];
    const int lanes = std::min<int>(kWarp, fibers.size() - (self.index - self.lane));
    if (lanes < kWarp) mask &= (1u << lanes) - 1;
    if (!(mask >> self.lane & 1)) fail(site.text() + ": the mask does not name the calling lane");
    self.value = value;
    self.argument = argument;
    self.mask = mask;
    self.site = site;
    // The next lane first: it is the likeliest to be missing.
    for (int step = 1; step < kWarp; ++step) {
        const int lane = (self.lane + step) % kWarp;
        if (lane >= lanes || !(mask >> lane & 1)) continue;
        const Fiber& other = warp[lane];
        if (other.state == State::kDone) fail(site.text() + ": a lane of the mask has returned");
        if (other.state != State::kAtWarpCollective || other.mask != mask) {
            wait(State::kAtWarpCollective);
            return self.result;
        }
        if (other.site != site)
            fail(site.text() + ", while others of the warp wait in " + other.site.text());
    }
    resolve(warp, mask, lanes);
    for (int lane = 0; lane < lanes; ++lane)
        if ((mask >> lane & 1) && lane != self.lane) warp[lane].state = State::kReady;
    return self.result;
}

template <class T>
inline uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8, "collectives carry up to 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) <= sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// source(lane, argument) names the lane whose value is handed out.
template <class T, class Source>
inline T shuffle(const Site& site, unsigned mask, T value, int argument, Source source) {
    const auto resolve = [&](Fiber* warp, unsigned named, int lanes) {
        for (int lane = 0; lane < lanes; ++lane) {
            if (!(named >> lane & 1)) continue;
            const int from = source(lane, warp[lane].argument);
            // A lane that is not there hands out anything at all on a device: NaN shows it.
            const bool there = from >= 0 && from < lanes && (named >> from & 1);
            warp[lane].result = there ? warp[from].value : ~uint64_t(0);
        }
    };
    return bit_cast<T>(collective(site, mask, to_bits(value), argument, resolve));
}

}  // namespace shim

inline void __syncthreads(SHIM_CALLER) { shim::block_barrier({"__syncthreads", file, line}); }
inline void __syncwarp(unsigned mask = ~0u, SHIM_CALLER) {
    shim::collective({"__syncwarp", file, line}, mask, 0, 0, [](shim::Fiber*, unsigned, int) {});
}

// A warp is cut into sections of `width` lanes, a power of two; no lane reads from a later one.
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32, SHIM_CALLER) {
    const auto source = [width](int lane, int by) {
        return ((lane ^ by) & -width) <= (lane & -width) ? lane ^ by : lane;
    };
    return shim::shuffle({"__shfl_xor_sync", file, line}, mask, value, by, source);
}
