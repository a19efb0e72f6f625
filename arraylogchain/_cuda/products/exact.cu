// The entries of a product that logmatmulexp.cu could not prove, each with its own maximum.
#include "exact.cuh"

// flags, tile_rows, tile_columns: as logmatmulexp.cu has left them. Blocks without a flag leave.
template <class In>
__global__ void __launch_bounds__(256, 1)
exact(const In* left, View left_view, const In* right, View right_view, long long terms,
      Panel panel, const ComputeOf<In>* row_shifts, const ComputeOf<In>* column_shifts, In* out,
      ProductView view, const unsigned char* flags, int tile_rows, int tile_columns) {
    using T = ComputeOf<In>;
    using Sums = ExactSums<In, false>;
    constexpr int SIDE = Sums::SIDE;
    __shared__ typename Sums::Shared shared;
    __shared__ long long row_offsets[SIDE], column_offsets[SIDE];

    const TilePlace place(panel, SIDE, SIDE, blockIdx.x);
    const int row0 = place.tile_row * SIDE, column0 = place.tile_column * SIDE;
    const int rows = min(panel.rows - row0, SIDE), columns = min(panel.columns - column0, SIDE);
    if (!is_flagged(flags, panel, place.batch, tile_rows, tile_columns, row0, rows, column0,
                    columns)) {
        return;
    }
    for (int i = threadIdx.x; i < SIDE; i += Sums::THREADS) {
        if (i < rows) row_offsets[i] = offset_of<0>(view.rows, panel.first_row + row0 + i);
        if (i < columns) {
            column_offsets[i] = offset_of<0>(view.columns, panel.first_column + column0 + i);
        }
    }
    out += offset_of<0>(view.batch, panel.first_batch + place.batch);
    // What is NaN was not proved, unless an operand is NaN there.
    const auto is_needed = [&](int row, int column) {
        return is_nan(load(out + row_offsets[row] + column_offsets[column])) &&
               !is_nan(shared.row_shifts[row]) && !is_nan(shared.column_shifts[column]);
    };
    const auto done = [&](int row, int column, const LogSum<T>& sum) {
        store(out + row_offsets[row] + column_offsets[column], sum.value());
    };
    Sums().run(shared, left, left_view, right, right_view, terms, panel, place, row_shifts,
               column_shifts, is_needed, done);
}
