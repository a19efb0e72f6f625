// What posterior_weights.cu has left open: for each such entry, about its largest term, less the
// shifts of row and column, and h over the sum relative to that.
#include "exact.cuh"

// open: h on the way in, h / sum on the way out. tops: the terms that the sums are relative to.
template <class In>
__global__ void __launch_bounds__(256, 1)
exact_posterior(const In* left, View left_view, const In* right, View right_view, long long terms,
                Panel panel, const ComputeOf<In>* row_shifts, const ComputeOf<In>* column_shifts,
                ComputeOf<In>* open, ComputeOf<In>* tops, long long pitch,
                const unsigned char* flags, int tile_rows, int tile_columns) {
    using T = ComputeOf<In>;
    using Sums = ExactSums<In, true>;
    constexpr int SIDE = Sums::SIDE;
    __shared__ typename Sums::Shared shared;

    const TilePlace place(panel, SIDE, SIDE, blockIdx.x);
    const int row0 = place.tile_row * SIDE, column0 = place.tile_column * SIDE;
    const int rows = min(panel.rows - row0, SIDE), columns = min(panel.columns - column0, SIDE);
    // Tiles with flags have sides that are multiples of SIDE: `open` is written here.
    if (!is_flagged(flags, panel, place.batch, tile_rows, tile_columns, row0, rows, column0,
                    columns)) {
        return;
    }
    const long long first = ((long long)place.batch * panel.rows + row0) * pitch + column0;
    open += first;
    tops += first;
    const auto is_needed = [&](int row, int column) {
        return open[row * pitch + column] != T(0);
    };
    const auto done = [&](int row, int column, const LogSum<T>& sum) {
        open[row * pitch + column] /= sum.sum;
        tops[row * pitch + column] = sum.top;
    };
    Sums().run(shared, left, left_view, right, right_view, terms, panel, place, row_shifts,
               column_shifts, is_needed, done);
}
