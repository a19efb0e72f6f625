// State and pair marginals of a segment, or gradients, from the messages of both directions.
//
// A term is a step of a row. With alpha, the forward message after the step, beta, the backward
// message predicted for it, and beta_x, the backward message after the next step, all of them logs near 0,
//   marginal_k = exp(alpha_k + beta_k) / Z, Z the sum over k;   pair_kj = u_k P_kj v_j,
//   u = exp(alpha), v = exp(beta_x) / Z,
// where P is the matrix without its scale, which the scale of beta includes. A matrix multiply of u
// and v sums pairs over terms. It is certified where Z is not small: u and v are at most about 1, or
// 1 / Z, so that underflow costs less than tiny / Z of a marginal. Other terms are flagged and have
// u = v = 0; `pair_marginals` adds them from logs. Marginals are relative to the likeliest state.
#include "chain.cuh"

// The terms of a segment, with pairs of the first `pairs` steps. A set of terms has one matrix.
struct Segment : Rows {
    int pairs, threads_per_term, has_one_matrix, blocks;  // blocks: of a set
};

// Logs of certified sums Z, and of cotangents, to base two.
template <class T> struct Limits;
template <> struct Limits<float> { static constexpr double lowest = -55, highest = 80, cotangent = 20; };
template <> struct Limits<double> { static constexpr double lowest = -116, highest = 900, cotangent = 64; };

template <class T> __device__ __forceinline__ T sum_over(T x, int width) {
    for (int by = width / 2; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

// g exp(high + low) 2^exponent, limited to 2^exponent times the largest finite T: either factor alone
// may be out of range. Zero where g is 0. `high` may be large, and is exact.
template <class T> __device__ double scaled_exp(double g, double high, double low, int exponent) {
    if (g == 0) return 0;
    int g_exponent;
    const double mantissa = frexp(g, &g_exponent);
    const double power = rint(max(-4000.0, min(4000.0, (high + low) / LN2)));
    const double y = mantissa * exp((high - power * LN2_HIGH) + (low - power * LN2_LOW));
    const double limit = ldexp(largest_finite<T>, exponent), z = ldexp(y, g_exponent + int(power) + exponent);
    return z > limit ? limit : z < -limit ? -limit : z;
}

// The cotangent of a row: none where log Z is infinite; a NaN stays.
template <class T> __device__ __forceinline__ double cotangent_of(const double* g, double log_sum, long long place) {
    return is_finite(log_sum) ? (g ? clipped<T>(g[place]) : 1.0) : is_nan(log_sum) ? log_sum : 0.0;
}

// alpha, beta [steps, groups, rows, states], beta_x [steps + 1, ...]; g [groups, rows] in the
// caller's order, or null: 1; log_sums [groups, rows, 2]: see log_partition.cu. out: marginals times
// g, or null. u, v [sets, terms, states], or null; is_flagged, scales [sets, terms(, 2)]; has_flags
// [sets, blocks]. Sets are groups or, if there are several matrices, [steps, groups]; their terms are
// [steps, rows], or rows. Of u, v, is_flagged and scales there are as many steps as pairs. Grid:
// `blocks` for each set.
template <class Out>
__global__ void __launch_bounds__(256, 3)
marginals(Segment n, Strides strides, const Compute<Out>* alpha, const Compute<Out>* beta, const Compute<Out>* beta_x,
          const double* g, const double* log_sums, Out* out, Compute<Out>* u, Compute<Out>* v,
          unsigned char* is_flagged, double* scales, unsigned char* has_flags) {
    using T = Compute<Out>;
    __shared__ int has_flag;
    if (threadIdx.x == 0) has_flag = 0;
    __syncthreads();
    const int K = n.states, width = n.threads_per_term, lane = threadIdx.x % width;
    const long long set = blockIdx.x / n.blocks, terms = n.has_one_matrix ? (long long)n.steps * n.rows : n.rows;
    const long long term = (blockIdx.x % n.blocks) * (long long)(256 / width) + threadIdx.x / width;
    const bool exists = term < terms;
    const int q = set % n.groups, r = exists ? term % n.rows : 0;
    const int t = !n.has_one_matrix ? set / n.groups : exists ? term / n.rows : 0;
    const long long row = (long long)q * n.rows + r, stride = (long long)n.groups * n.rows * K;
    alpha += t * stride + row * K, beta += t * stride + row * K, beta_x += (t + 1) * stride + row * K;

    T top = -infinity<T>(), top_alpha = 0, top_beta = 0;
    #pragma unroll 4
    for (int k = lane; k < K; k += width) {
        const T x = alpha[k], y = beta[k], sum = x + y;
        const bool is_larger = sum > top || is_nan(sum);
        top = is_larger ? sum : top, top_alpha = is_larger ? x : top_alpha, top_beta = is_larger ? y : top_beta;
    }
    for (int by = width / 2; by > 0; by /= 2) {
        const T other = __shfl_xor_sync(~0u, top, by);
        const T x = __shfl_xor_sync(~0u, top_alpha, by), y = __shfl_xor_sync(~0u, top_beta, by);
        // All threads choose the same one: of equal sums that with the larger x.
        const bool is_larger = other > top || (other == top && x > top_alpha) || is_nan(other);
        top = is_larger ? other : top, top_alpha = is_larger ? x : top_alpha, top_beta = is_larger ? y : top_beta;
    }
    const T alpha_shift = rounded(finite_or_zero(top_alpha)), beta_shift = rounded(finite_or_zero(top_beta));
    top = finite_or_zero((top_alpha - alpha_shift) + (top_beta - beta_shift));
    T total = 0;
    #pragma unroll 4
    for (int k = lane; k < K; k += width) total += exponential((alpha[k] - alpha_shift) + (beta[k] - beta_shift) - top);
    total = sum_over(total, width);

    const Origin origin(n.order, n.rows, row);
    const T weight = T(cotangent_of<T>(g, log_sums[2 * row + 1], origin.group * n.rows + origin.row));
    const int time = n.time + t, length = n.length(row);
    const bool has_no_state = time >= length || weight == 0, has_no_pair = time + 1 >= length || weight == 0;
    const T factor = weight / total;
    const double log_total = double(top) + log(double(total));
    const double bits = (double(alpha_shift) + double(beta_shift) + log_total) / LN2, size = log(fabs(double(weight))) / LN2;
    const bool certified = bits >= Limits<T>::lowest && bits <= Limits<T>::highest && fabs(size) <= Limits<T>::cotangent;
    const bool has_pairs = u && exists && t < n.pairs;
    const T scaled = factor * exponential(-(alpha_shift + beta_shift)) * exponential(-top);
    const long long at = n.has_one_matrix ? ((long long)q * n.pairs + t) * n.rows + r : t * (long long)n.groups * n.rows + row;
    if (out) out += origin.group * strides.group + origin.row * strides.row + t * strides.step;
    #pragma unroll 2
    for (int k = lane; k < K; k += width) {
        const T x = alpha[k];
        if (out && exists) {
            const T marginal = exponential((x - alpha_shift) + (beta[k] - beta_shift) - top) * factor;
            store(out + k * strides.state, has_no_state ? T(0) : clipped<Out>(marginal));
        }
        if (!has_pairs) continue;
        u[at * K + k] = has_no_pair || !certified ? T(0) : exponential(x);
        v[at * K + k] = has_no_pair || !certified ? T(0) : exponential(beta_x[k]) * scaled;
    }
    if (has_pairs && lane == 0) {
        is_flagged[at] = !has_no_pair && !certified;
        scales[2 * at] = double(alpha_shift) + double(beta_shift);
        scales[2 * at + 1] = log_total + 0.0 * double(weight);  // NaN stays
        if (!has_no_pair && !certified) has_flag = 1;
    }
    __syncthreads();
    if (u && threadIdx.x == 0) has_flags[blockIdx.x] = has_flag;
}

// Transition matrices of the caller, weights or logs, and the gradients with respect to them or, if
// by_logs, to their logarithms (expected counts). Strides are in entries.
template <class T, class In> struct PairMarginals {
    const In* input;
    const double* scales;  // of the prepared matrices
    T* out;                // [group, matrix, from, to]
    long long group, matrix, from, to, out_group, out_matrix;
    int is_log, by_logs;
};

// sums [count, groups, states, states]: u and v of `marginals`, multiplied. Grid: blocks of `entries`
// entries of each matrix, with 256 / entries threads for each entry.
template <class T, class In>
__global__ void __launch_bounds__(256, 4)
pair_marginals(Segment n, PairMarginals<T, In> matrices, const T* sums, int entries, const T* alpha, const T* beta_x,
               const double* g, const unsigned char* is_flagged, const double* scales, const unsigned char* has_flags) {
    __shared__ double partial_sums[256];
    __shared__ int has_flag;
    const int K = n.states, blocks = (K * K + entries - 1) / entries;
    const long long number = blockIdx.x / blocks, q = number % n.groups;
    const long long m = number / n.groups, count = n.has_one_matrix ? 1 : n.pairs;
    const int slices = 256 / entries, slice = threadIdx.x / entries;
    const int entry = blockIdx.x % blocks * entries + threadIdx.x % entries;
    const bool exists = entry < K * K;
    const int k = exists ? entry / K : 0, j = exists ? entry % K : 0;
    const long long group = n.rows == 1 && n.order ? n.order[q] : q;
    const T x = load(matrices.input + group * matrices.group + m * matrices.matrix + k * matrices.from + j * matrices.to);
    const double scale = matrices.scales[2 * (q * count + m) + !matrices.is_log];
    const T sum = sums[number * K * K + (exists ? entry : 0)];

    const long long set = n.has_one_matrix ? q : m * n.groups + q;
    const long long terms = (n.has_one_matrix ? n.pairs : 1LL) * n.rows;
    if (threadIdx.x == 0) has_flag = 0;
    __syncthreads();
    bool is_any = false;
    for (int i = threadIdx.x; i < n.blocks; i += 256) is_any |= has_flags[set * n.blocks + i] != 0;
    if (is_any) has_flag = 1;
    __syncthreads();
    constexpr int SCALE_EXPONENT = -64;  // the sum of flagged terms is scaled, so that it does not overflow
    double flagged = 0;
    if (has_flag) {
        // The log of the matrix without its scale, or of that scale alone; powers of two cancel first.
        const double weight = matrices.by_logs ? exact(x) : matrices.is_log ? 0.0 : 1.0;
        const double power = matrices.is_log ? 0.0 : finite_or_zero(rint(log2(weight)));
        const double high_x = matrices.is_log ? weight - scale : (power - scale) * LN2_HIGH;
        const double low_x = matrices.is_log ? 0.0 : log(ldexp(weight, -int(power))) + (power - scale) * LN2_LOW;
        for (long long term = slice; term < terms; term += slices) {
            const long long at = set * terms + term;
            if (!is_flagged[at]) continue;
            const int t = n.has_one_matrix ? term / n.rows : m, r = term % n.rows;
            const long long row = q * n.rows + r, stride = (long long)n.groups * n.rows * K;
            // Large numbers cancel first. The derivative with respect to a weight has no log of it.
            const double high = double(alpha[t * stride + row * K + k]) + double(beta_x[(t + 1) * stride + row * K + j]);
            const double cotangent = g ? clipped<T>(g[n.order ? n.order[row] : row]) : 1.0;
            flagged += scaled_exp<T>(cotangent, (high - scales[2 * at]) + high_x, low_x - scales[2 * at + 1], SCALE_EXPONENT);
        }
        partial_sums[threadIdx.x] = flagged;
        __syncthreads();
        if (slice == 0) {
            for (int s = 1; s < slices; ++s) flagged += partial_sums[threadIdx.x + s * entries];
        }
    }
    if (slice || !exists) return;
    double result = sum;
    if (!matrices.by_logs) {
        result = matrices.is_log ? result * exp(-scale) : ldexp(result, -int(scale));
    } else if (sum != 0) {  // a weight that no path takes may be infinite, or NaN
        result *= matrices.is_log ? double(exponential(T(double(x) - scale))) : ldexp(exact(x), -int(scale));
    }
    if (has_flag && flagged != 0) result = ldexp(ldexp(result, SCALE_EXPONENT) + flagged, -SCALE_EXPONENT);
    matrices.out[group * matrices.out_group + m * matrices.out_matrix + entry] = T(clipped<T>(result));
}

// Gradients with respect to the initial or final weights of rows, or to their logarithms: from the
// message that meets them, its log sums with them, and log Z without its scale, [groups, rows, 2].
// out: strides of groups and rows; of the sums over all rows if is_sum. Grid: blocks of 32 states, of
// all rows if is_sum, else of 8 rows each.
template <class T>
__global__ void __launch_bounds__(256, 3)
boundary_gradients(Weights<T> boundary, const T* message, const double* log_sums, const double* log_z,
                   const double* g, Rows n, T* out, Strides strides, int is_sum) {
    __shared__ double partial_sums[256];
    const long long num_rows = (long long)n.groups * n.rows;
    const int states = n.states, blocks = (states + 31) / 32, k = blockIdx.x % blocks * 32 + threadIdx.x % 32, slice = threadIdx.x / 32;
    const long long first = is_sum ? slice : blockIdx.x / blocks * 8 + slice, stop = is_sum ? num_rows : min(first + 1, num_rows);
    const int exponent = is_sum ? -64 : 0;
    double sum = 0;
    for (long long row = first; row < stop && k < states; row += 8) {
        const Origin origin(n.order, n.rows, row);
        const long long place = origin.group * n.rows + origin.row;
        double integer = 0, low = -log_sums[2 * row + 1];  // integers cancel first
        if (boundary.is_log) {
            const double x = boundary.at(origin.group, origin.row, k);
            integer = is_finite(x) ? rint(x) : x;
            low += is_finite(x) ? x - integer : 0;
        }
        const double high = double(message[row * states + k]) + (integer - log_sums[2 * row]);
        const double weight = cotangent_of<T>(g, log_z[2 * row + 1], place);
        const double x = scaled_exp<T>(log_sums[2 * row + 1] == -infinity<double>() ? 0 : weight, high, low, exponent);
        if (is_sum) sum += x;
        else out[origin.group * strides.group + origin.row * strides.row + k] = T(clipped<T>(x));
    }
    if (!is_sum) return;
    partial_sums[threadIdx.x] = sum;
    __syncthreads();
    if (slice || k >= states) return;
    for (int s = 1; s < 8; ++s) sum += partial_sums[threadIdx.x + s * 32];
    out[k] = T(clipped<T>(ldexp(sum, -exponent)));
}
