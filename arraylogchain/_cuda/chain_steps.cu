// The recursion of chains, forward or backward: a segment of a group's rows in one launch.
//
// The updated message of a step is logs a, minus the integer nearest to their maximum, which its
// scale includes. Of sums over paths the next predicted message is
//   log v + shifts,  v = u @ factors,  u = exp(a),
// where is_certified(v); a thread whose v is not certified recomputes its logarithm from the logs,
// with the entry's own maximum. So no weight is lost, and log space is the only form. Of best paths
// it is the maximum of a + logs, + shifts. The predicted message plus potentials is the updated one.
// A column's shift may be large where other columns are not reached: it is added last.
#include "chain.cuh"

// The boundary weights of the thread's state: logs near 0, and their scale.
template <class T, bool InWarp, int R>
__device__ __forceinline__ void start_rows(const Group<T, InWarp, R>& group, const Weights<T>& boundary,
                                      T* exchange, T (&a)[R], double& shift, double& exponent) {
    T top[R];
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        a[r] = boundary.is_log ? -infinity<T>() : T(0);
        if (group.has_state && group.exists[r]) {
            a[r] = boundary.at(group.origin_group[r], group.origin_row[r], group.state);
        }
        top[r] = a[r];
    }
    group.largest(top, exchange);
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        T integer;
        if (boundary.is_log) {
            integer = rounded(finite_or_zero(top[r]));
            a[r] -= integer;
        } else {
            integer = T(rint(finite_or_zero(log2(exact(top[r])))));
            // A weight that is subnormal at this scale is far from 0: its logarithm is direct.
            const double weight = exact(a[r]), scaled = ldexp(weight, -int(integer));
            a[r] = T(scaled >= 1e-300 ? log(scaled) : log(weight) - double(integer) * LN2);
        }
        if (group.state == r) (boundary.is_log ? shift : exponent) = integer;
    }
    group.sync();
}

// Writes the logs of the predicted message, without the returned part of the column's shift.
template <bool Sums, class T, bool InWarp, int R>
__device__ __forceinline__ T predict(const Group<T, InWarp, R>& group, const Shared<T, InWarp, R>& shared,
                                     const T* on_chip, long long matrix, int s, T (&predicted)[R]) {
    const Chain<T>& chain = group.chain;
    const long long entries = (long long)chain.states * chain.states;
    const T *logs = chain.logs + matrix * entries, *shift = chain.shifts + 2 * (matrix * chain.states + group.state);
    if (!Sums) {
        group.maximize(shared.logs, on_chip ? on_chip : logs, predicted);
        return shift[0];
    }
    group.multiply(shared.weights, on_chip ? on_chip : chain.factors + matrix * entries, predicted);
    unsigned uncertified = 0;  // a bit for each row
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        if (!is_certified(predicted[r], chain.threshold) && group.is_reached(r, s)) uncertified |= 1u << r;
        predicted[r] = logarithm(predicted[r]) + shift[1];
    }
    #pragma unroll 1
    for (; uncertified; uncertified &= uncertified - 1) {
        const int row = __ffs(uncertified) - 1;
        const T recomputed = log_sum_exp<T>(chain.states, [&](int k) {
            return shared.logs[k].at[row] + logs[k * chain.states + group.state];
        });
        #pragma unroll
        for (int r = 0; r < R; ++r) predicted[r] = r == row ? recomputed : predicted[r];
    }
    return shift[0];
}

// Sums over paths, or maxima. InWarp, R: see chain.cuh. OnChip: whether the one matrix of all steps,
// and of all rows of the block, is in shared memory.
//
// before: the carry; without it rows begin with `boundary`, the initial or final weights.
// predicted, updated: the messages of every step, the carry where a row has no such step. If
// `predicted` is stored, `updated` includes the carry, one step before step 0.
// after: the carry after the last step.
template <class T, bool Sums, bool InWarp, int R, bool OnChip>
__global__ void __launch_bounds__(threads_at_most(InWarp, R), 1)
chain_steps(Chain<T> chain, Weights<T> boundary, Messages<T> before, Messages<T> predicted,
            Messages<T> updated, Messages<T> after) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int K = chain.states;
    const Shared<T, InWarp, R> shared(memory, chain);
    const Group<T, InWarp, R> group(chain);
    const int j = group.state;
    if (OnChip) shared.copy_matrix((Sums ? chain.factors : chain.logs) + group.set * K * K, K * K);

    T a[R], next[R];
    double shift = 0, exponent = 0;  // of row r, in the thread of state r
    if (before.logs) {
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            a[r] = group.has_state ? before.logs[group.row[r] * K + j] : -infinity<T>();
            if (j == r) shift = before.shifts[group.row[r]], exponent = before.exponents[group.row[r]];
        }
    } else {
        start_rows(group, boundary, shared.exchange, a, shift, exponent);
    }
    if (predicted.logs) {
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            if (!group.exists[r]) continue;
            const long long into = group.row[r] - updated.step;
            if (group.has_state) updated.logs[into * K + j] = a[r];
            if (j == r) updated.shifts[into] = shift, updated.exponents[into] = exponent;
        }
    }
    #pragma unroll
    for (int r = 0; r < R; ++r) next[r] = group.potential(r, 0);
    for (int s = 0; s < chain.steps; ++s) {
        if (chain.restarts_scales && (s || before.logs)) shift = exponent = 0;
        const long long matrix = group.set * chain.matrices + chain.matrix + s * chain.matrix_step;
        const double* scale = chain.scales + 2 * matrix;
        if (group.has_state) {
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                shared.logs[j].at[r] = a[r];
                if (Sums) shared.weights[j].at[r] = exponential(a[r]);
            }
        }
        group.sync();
        T message[R], top[R], x[R], column = 0;
        bool is_reached = false;
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            x[r] = next[r];
            next[r] = group.potential(r, s + 1);  // ahead of its use
            if (!group.is_reached(r, s)) continue;
            is_reached = true;
            if (j == r) shift += scale[0], exponent += scale[1];
        }
        if (group.has_state && is_reached) {
            column = predict<Sums>(group, shared, OnChip ? shared.matrix : nullptr, matrix, s, message);
        }
        T columns[R];
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            const bool stays = !group.is_reached(r, s);
            if (!group.has_state || stays) message[r] = a[r];
            columns[r] = stays ? T(0) : column;
        }
        if (predicted.logs) {  // not brought near 0: only the matrix adds to its scale
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                if (!group.exists[r]) continue;
                const long long into = s * predicted.step + group.row[r];
                if (group.has_state) predicted.logs[into * K + j] = message[r] + columns[r];
                if (j == r) predicted.shifts[into] = shift, predicted.exponents[into] = exponent;
            }
        }
        #pragma unroll
        for (int r = 0; r < R; ++r) top[r] = message[r] + columns[r] + x[r];
        group.largest(top, shared.exchange);
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            if (!group.exists[r]) continue;
            top[r] = rounded(finite_or_zero(top[r]));
            a[r] = add_four(message[r], x[r], columns[r], -top[r]);
            const long long into = s * updated.step + group.row[r];
            if (group.has_state && updated.logs) updated.logs[into * K + j] = a[r];
            if (j == r) shift += top[r];
            if (j == r && updated.logs) updated.shifts[into] = shift, updated.exponents[into] = exponent;
        }
        if (InWarp) group.sync();
    }
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        if (!group.exists[r]) continue;
        if (group.has_state) after.logs[group.row[r] * K + j] = a[r];
        if (j == r) after.shifts[group.row[r]] = shift, after.exponents[group.row[r]] = exponent;
    }
}
