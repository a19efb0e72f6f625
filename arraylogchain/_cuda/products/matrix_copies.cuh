// Copies of small matrices between memory and a tile in shared memory, by a warp.
#pragma once
#include "view.cuh"
#include "warp_product.cuh"

// Offsets of the lines of a matrix, or of its entries along them: in equal steps, or along axes.
struct Steps {
    long long step;
    __device__ __forceinline__ bool is_even() const { return true; }
    __device__ __forceinline__ long long inner() const { return step; }
    __device__ __forceinline__ long long at(int i) const { return i * step; }
};
struct Along {
    const Axes& axes;
    __device__ __forceinline__ bool is_even() const { return axes.count <= 1; }
    __device__ __forceinline__ long long inner() const {
        return axes.stride[0][axes.count > 1 ? axes.count - 1 : 0];
    }
    __device__ __forceinline__ long long at(int i) const { return offset_of<0>(axes, i); }
};

// Copies between a tile and memory: N neighbours in memory lie `step` apart in the tile.
template <class T, class In> struct Fetch {
    using Tile = T;
    T* tile;
    T missing;  // what is put where there is no entry
    template <int N>
    __device__ __forceinline__ void copy(int place, int step, const In* x, bool inside) const {
        Neighbours<In, N> entries = {};
        if (inside) entries = *reinterpret_cast<const Neighbours<In, N>*>(x);
        Neighbours<T, N> values;
        #pragma unroll
        for (int n = 0; n < N; ++n) values.at[n] = inside ? load(entries.at + n) : missing;
        if (step == 1) {
            *reinterpret_cast<Neighbours<T, N>*>(tile + place) = values;
        } else {
            #pragma unroll
            for (int n = 0; n < N; ++n) tile[place + n * step] = values.at[n];
        }
    }
};
template <class T, class In> struct Write {
    using Tile = T;
    const T* tile;
    template <int N>
    __device__ __forceinline__ void copy(int place, int step, In* x, bool inside) const {
        if (!inside) return;
        Neighbours<T, N> values;
        if (step == 1) {
            values = *reinterpret_cast<const Neighbours<T, N>*>(tile + place);
        } else {
            #pragma unroll
            for (int n = 0; n < N; ++n) values.at[n] = tile[place + n * step];
        }
        Neighbours<In, N> entries;
        #pragma unroll
        for (int n = 0; n < N; ++n) store(entries.at + n, values.at[n]);
        write_at_once(x, entries);
    }
};

// Copies outer lines of inner entries, N at once, which lie in equal steps.
template <int N, int P, class Element, class Copy>
__device__ __forceinline__ void copy_even(const Copy& copy, Element* x, long long inner_step,
                                          long long outer_step, int inner, int outer,
                                          int inner_place, int outer_place) {
    constexpr int LANES = P / N, LINES = 32 / LANES, EACH = P / LINES + (P % LINES > 0);
    const int own_inner = threadIdx.x % LANES * N, own_outer = threadIdx.x % 32 / LANES;
    const int left = own_inner < inner ? outer - own_outer : 0;
    x += own_inner * inner_step + own_outer * outer_step;
    int place = own_inner * inner_place + own_outer * outer_place;
    if (LINES > P && own_outer >= P) return;
    #pragma unroll (EACH < 8 ? EACH : 8)
    for (int i = 0; i < EACH; ++i) {
        copy.template copy<N>(place, inner_place, x, i * LINES < left);
        place += LINES * outer_place;
        x += LINES * outer_step;
    }
}

// Copies a matrix of rows x columns, to or from a tile as WarpProduct wants it. turned: whether rows
// are neighbours in memory.
template <int P, class Element, class Down, class Across, class Copy>
__device__ __forceinline__ void copy_matrix(const Copy& copy, Element* x, const Down& down,
                                            const Across& across, int rows, int columns,
                                            bool turned) {
    using Product = WarpProduct<typename Copy::Tile, P>;
    constexpr int VECTOR = Product::VECTOR, PITCH = Product::PITCH;
    if (down.is_even() && across.is_even()) {
        const long long inner_step = turned ? down.inner() : across.inner();
        const long long outer_step = turned ? across.inner() : down.inner();
        const int inner = turned ? rows : columns, outer = turned ? columns : rows;
        const int inner_place = turned ? PITCH : 1, outer_place = turned ? 1 : PITCH;
        constexpr int BYTES = VECTOR * sizeof(Element);
        const bool aligned =
            (((unsigned long long)x | (unsigned long long)outer_step * sizeof(Element)) % BYTES |
             unsigned(inner) % VECTOR) == 0;
        if (aligned && inner_step == 1) {
            // With places that are known, a vector is also written at once.
            if (turned) {
                copy_even<VECTOR, P>(copy, x, 1, outer_step, inner, outer, PITCH, 1);
            } else {
                copy_even<VECTOR, P>(copy, x, 1, outer_step, inner, outer, 1, PITCH);
            }
        } else {
            copy_even<1, P>(copy, x, inner_step, outer_step, inner, outer, inner_place,
                            outer_place);
        }
        return;
    }
    #pragma unroll 1
    for (int e = threadIdx.x % 32; e < P * P; e += 32) {
        const int row = turned ? e % P : e / P, column = turned ? e / P : e % P;
        copy.template copy<1>(row * PITCH + column, 1, x + down.at(row) + across.at(column),
                              row < rows && column < columns);
    }
}
