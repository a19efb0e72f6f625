// Adds to gradients what hangs on entries that posterior_weights.cu has left open, from what
// exact_posterior.cu has made of them: (h / sum)_ij exp(a_ik + b_kj - top_ij).
#include "exact.cuh"

constexpr int SIDE = 32, THREADS = 256, LINES = SIDE / (THREADS / 32);

// own, other: the operand that the gradient is for, and the other one. OfLeft: own has the rows.
// open, tops [batches, rows, pitch].
//
// A block adds up SIDE lines by SIDE terms; a lane has a term, a warp LINES lines. An entry without
// a part in this costs one comparison.
template <class In, bool OfLeft>
__global__ void __launch_bounds__(THREADS, 1)
exact_posterior_sums(const In* own, View own_view, const ComputeOf<In>* own_shifts,
                     const In* other, View other_view, const ComputeOf<In>* other_shifts,
                     long long terms, Panel panel, const ComputeOf<In>* open,
                     const ComputeOf<In>* tops, long long pitch, const unsigned char* flags,
                     int tile_rows, int tile_columns, ComputeOf<In>* out, View out_view) {
    using T = ComputeOf<In>;
    __shared__ T entries[SIDE][SIDE + 1];  // of the other operand, less their shifts: [line, term]
    __shared__ T open_tile[SIDE][SIDE + 1], top_tile[SIDE][SIDE + 1];  // [own line, other line]

    const int own_lines = OfLeft ? panel.rows : panel.columns;
    const int other_lines = OfLeft ? panel.columns : panel.rows;
    const unsigned line_blocks = unsigned(own_lines + SIDE - 1) / SIDE;
    const unsigned term_blocks = unsigned((terms + SIDE - 1) / SIDE);
    const unsigned rest = blockIdx.x / term_blocks;
    const int batch = int(rest / line_blocks);
    const int line0 = int(rest % line_blocks) * SIDE;
    const long long term0 = (long long)(blockIdx.x % term_blocks) * SIDE;
    const int lines = min(own_lines - line0, SIDE);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long term = term0 + lane;
    const long long own_first = OfLeft ? panel.first_row : panel.first_column;
    const long long other_first = OfLeft ? panel.first_column : panel.first_row;
    own += offset_of<0>(own_view.batch, panel.first_batch + batch);
    other += offset_of<0>(other_view.batch, panel.first_batch + batch);
    own_shifts += (long long)batch * own_lines;
    other_shifts += (long long)batch * other_lines;
    open += (long long)batch * panel.rows * pitch;
    tops += (long long)batch * panel.rows * pitch;

    T entry[LINES], sums[LINES] = {};
    #pragma unroll
    for (int i = 0; i < LINES; ++i) {
        const int line = line0 + warp * LINES + i;
        entry[i] = -Number<T>::infinity();
        if (line < own_lines && term < terms) {
            entry[i] = load(own + offset_of<0>(own_view.lines, own_first + line) +
                            term * own_view.step) -
                       own_shifts[line];
        }
    }
    bool found = false;
    for (int other0 = 0; other0 < other_lines; other0 += SIDE) {
        const int others = min(other_lines - other0, SIDE);
        const bool flagged =
            OfLeft ? is_flagged(flags, panel, batch, tile_rows, tile_columns, line0, lines, other0,
                                others)
                   : is_flagged(flags, panel, batch, tile_rows, tile_columns, other0, others,
                                line0, lines);
        if (!flagged) continue;
        found = true;
        __syncthreads();
        for (int e = threadIdx.x; e < SIDE * SIDE; e += THREADS) {
            const int outer = e / SIDE, inner = e % SIDE;
            // Neighbours in memory are columns of the panel.
            const int l = OfLeft ? outer : inner, m = OfLeft ? inner : outer;
            T value = 0, top = 0;
            if (l < lines && m < others) {
                const long long at = OfLeft ? (line0 + l) * pitch + other0 + m
                                            : (other0 + m) * pitch + line0 + l;
                value = open[at];
                top = tops[at];
            }
            open_tile[l][m] = value;
            top_tile[l][m] = top;
            const int line = other_view.terms_adjoin ? outer : inner;
            const int t = other_view.terms_adjoin ? inner : outer;
            T y = -Number<T>::infinity();
            if (line < others && term0 + t < terms) {
                y = load(other + offset_of<0>(other_view.lines, other_first + other0 + line) +
                         (term0 + t) * other_view.step) -
                    other_shifts[other0 + line];
            }
            entries[line][t] = y;
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < LINES; ++i) {
            const int l = warp * LINES + i;
            T sum = 0;  // apart: equal terms added to one sum are always rounded to the same side
            #pragma unroll 2
            for (int m = 0; m < others; ++m) {
                const T weight = open_tile[l][m];
                if (weight == T(0)) continue;
                const T p = exponential(entry[i] + entries[m][lane] - top_tile[l][m]);
                // Nothing weighs nothing, even times infinity.
                sum += p > T(0) ? weight * p : T(0);
            }
            sums[i] += sum;
        }
    }
    if (!found || term >= terms) return;
    out += offset_of<0>(out_view.batch, panel.first_batch + batch);
    #pragma unroll
    for (int i = 0; i < LINES; ++i) {
        const int line = line0 + warp * LINES + i;
        if (line < own_lines) {
            out[offset_of<0>(out_view.lines, own_first + line) + term * out_view.step] += sums[i];
        }
    }
}
