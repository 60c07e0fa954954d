// Forward for rows that do not fit on chip: math.md, equations (1) to (6), (13) and (14).
//
// When: all longer rows.
// Who: a block, or a cluster of blocks, has one row at a time, and visits it pack by pack.
// Where: nothing stays. A row is read from memory once for each sum and once more for y.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward_streaming(const __grid_constant__ Params p) {
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    const Visit start = {(unsigned long long)(cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK, p.cols};
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = blockIdx.x / CLUSTER; row < p.rows; row += gridDim.x / CLUSTER) {
        // Normalizes what `load` reads of each visit.
        const auto run = [&](auto norm, const auto& load, const auto& write) {
            float mean[1] = {0.0f}, rstd[1];
            find_statistics(p, sums, load, start, mean, rstd);
            for (Visit at = start; at.is_inside(); at.advance()) write(at, load(at), mean[0], rstd[0]);
            store_statistics<decltype(norm)>(p, row, mean[0], rstd[0]);
        };
        const auto load = [&](const Visit& visit) { return load_h(p, row, visit); };
        const auto write = [&](const Visit& visit, const Pack<H>& h, float mean, float rstd) { write_pack(p, row, visit, h, mean, rstd); };
        run(Norm{}, load, write);
        After::then(After{}, [&](auto next, auto after) {
            const auto at = [&](const Visit& visit) { return At{p, row, visit.col, visit.left()}; };
            const auto load_sum = [&](const Visit& visit) { return after.load_sum(at(visit)); };
            const auto write_next = [&](const Visit& visit, const auto& sum, float mean, float rstd) {
                normalize_pack<decltype(next)>(p, visit, sum, mean, rstd, [&](const float (&y)[PACK]) { Store::put(at(visit), 0, y, {}); });
            };
            run(next, load_sum, write_next);
        });
    }
}
