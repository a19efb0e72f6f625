// Weights h / S of the posterior of a log product, for cotangents h and sums S of factors that
// logmatmulexp.cu has left. With those factors, A and B, sum_j (h_ij / S_ij) A_ik B_kj is the
// gradient for a_ik.
//
// Where the sums are not proved, or where the quotient would overflow, the weight is 0, and
// exact_posterior.cu comes right after.
#include "certificate.cuh"
#include "panel.cuh"

// partial, parts, all_terms, shifts, flags, tile sides: as in settle.cu; also where weights go, in
// the place of the first part. A thread an entry, those of the padding included.
// open [batches, rows, pitch]: h where the weight is left open, else 0.
// product, h: results of the product, and cotangents. spoils: whether a NaN makes weights NaN; else
// it has no posterior, as infinities have none.
template <class In>
__global__ void __launch_bounds__(256, 1)
posterior_weights(ComputeOf<In>* partial, int parts, long long all_terms, Panel panel,
                  const ComputeOf<In>* row_shifts, const ComputeOf<In>* column_shifts,
                  const In* product, ProductView product_view, const In* h, ProductView h_view,
                  int spoils, ComputeOf<In>* open, unsigned char* flags, int tile_rows,
                  int tile_columns) {
    using T = ComputeOf<In>;
    const EntryPlace place(panel, blockIdx.x * 256ll + threadIdx.x);
    if (place.batch >= panel.batches) return;
    T value = 0, left_open = 0;  // in the padding, and where the product is infinite
    if (place.column < panel.columns) {
        const long long of_columns = (long long)place.batch * panel.columns;
        const bool nan = is_nan(row_shifts[place.line]) ||
                         is_nan(column_shifts[of_columns + place.column]);
        const T cotangent = load(h + place.offset_in(h_view, panel));
        if (nan && spoils) {
            value = Number<T>::nan();
        } else if (is_finite(load(product + place.offset_in(product_view, panel)))) {
            const T sum = sum_of_parts(partial, parts, panel, place.index);
            const T quotient = cotangent / sum;
            // Times factors, up to 2, and summed over 2^25 of them, weights must stay finite.
            const T limit = T(1) / (Number<T>::tiny * T(1 << 30));
            // A NaN among the cotangents stays.
            const bool proved =
                sum >= line_of_certificate<T>(all_terms) && !(fabs(quotient) > limit);
            value = proved ? quotient : T(0);
            left_open = proved ? T(0) : cotangent;
        }
    }
    partial[place.index] = value;
    open[place.index] = left_open;
    if (left_open != T(0)) flags[place.tile(panel, tile_rows, tile_columns)] = 1;
}
