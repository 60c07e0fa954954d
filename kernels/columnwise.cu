// The columnwise copy: math.md, equations (Q1) to (Q5) of the transposed matrix, from x and the
// statistics that forward stored. A block processes tiles of 128 rows and 64 columns one after the
// other. A thread has PACK columns of a few rows of a tile.
//
// Codes are collected in shared memory as words of four rows. Each column is rotated so that
// neither adjacent threads nor threads of the next rows conflict in a bank.

constexpr int TILE_ROWS = 128, TILE_COLS = 64, WORDS = TILE_ROWS / 4, STRIP = 16;
constexpr int THREADS_ACROSS = TILE_COLS / PACK, ROWS_OF_THREAD = TILE_ROWS * THREADS_ACROSS / THREADS;
static_assert(ROWS_OF_THREAD % 4 == 0, "a thread has whole words of a column");

// Rows that a warp reduces to magnitudes, and scales of a column of a tile.
constexpr int ROWS_OF_WARP = TILE_ROWS / WARPS, SETS = TILE_ROWS / SET;
static_assert(SET % ROWS_OF_WARP == 0 && SETS * TILE_COLS <= THREADS, "a thread finds one scale at most");

// The place of a word of a tile's column.
__device__ inline int place(int col, int word) { return col * WORDS + (word ^ (col / 8 * 4)); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) columnwise(const __grid_constant__ Params p) {
    __shared__ float magnitudes[WARPS][TILE_COLS];
    __shared__ __align__(16) float reciprocals[SETS][TILE_COLS];
    __shared__ __align__(16) unsigned tile[TILE_COLS * WORDS];
    const unsigned long long across = (p.cols + TILE_COLS - 1) / TILE_COLS;
    const unsigned long long tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS * across;
    const bool is_wide = ((unsigned long long)p.codes_columnwise.data | p.codes_columnwise.row_stride) % STRIP == 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int pack = threadIdx.x % THREADS_ACROSS * PACK, first_row = threadIdx.x / THREADS_ACROSS * ROWS_OF_THREAD;
    wait_for_earlier_kernels();

    for (unsigned long long number = blockIdx.x; number < tiles; number += gridDim.x) {
        const unsigned long long row0 = number / across * TILE_ROWS, col0 = number % across * TILE_COLS;
        const int rows = int(min(p.rows - row0, (unsigned long long)TILE_ROWS));
        const int cols = int(min(p.cols - col0, (unsigned long long)TILE_COLS)), left = cols - pack;
        // Issue all loads before the first value is used.
        const auto at = [&](int r) { return At{p, row0 + first_row + r, col0 + pack, left}; };
        Pack<T> x[ROWS_OF_THREAD] = {};
        Before::Addend addends[ROWS_OF_THREAD] = {};
        After::Waiting waiting[ROWS_OF_THREAD] = {};
        float means[ROWS_OF_THREAD] = {}, rstds[ROWS_OF_THREAD] = {};
        #pragma unroll
        for (int r = 0; r < ROWS_OF_THREAD; ++r) {
            if (first_row + r >= rows) continue;
            x[r] = X::load<Hint::EvictFirst>(at(r), 0);
            addends[r] = Before::load_addend<Hint::EvictFirst>(at(r), 0);
            waiting[r] = After::load<Hint::EvictFirst>(at(r), 0);
            if constexpr (IS_LAYER) means[r] = p.mean[statistic(at(r).row)];
            rstds[r] = p.rstd[statistic(at(r).row)];
        }
        float weight[PACK], bias[PACK], values[ROWS_OF_THREAD][PACK];
        unpack_weight<Norm::SCALES>(load_parameter<Norm::SCALES>(Norm::weight(p) + col0 + pack, 0, left), p.weight_offset, weight);
        unpack(load_parameter<HAS_BIAS>(Norm::bias(p) + col0 + pack, 0, left), bias);
        float largest[PACK] = {};
        #pragma unroll
        for (int r = 0; r < ROWS_OF_THREAD; ++r) {
            unpack(Before::add(x[r], addends[r]), values[r]);
            quantized_values<false>(p, 0, 0, 0, left, values[r], means[r], rstds[r], weight, bias, waiting[r]);
            #pragma unroll
            for (int i = 0; i < PACK; ++i) {
                // In a missing row the bias would count.
                if (first_row + r >= rows) values[r][i] = 0.0f;
                largest[i] = larger(largest[i], fabsf(values[r][i]));
            }
        }
        #pragma unroll
        for (int i = 0; i < PACK; ++i) {
            #pragma unroll
            for (int distance = THREADS_ACROSS; distance < 32; distance *= 2)
                largest[i] = larger(largest[i], __shfl_xor_sync(~0u, largest[i], distance));
        }
        if (lane < THREADS_ACROSS) {
            #pragma unroll
            for (int i = 0; i < PACK; ++i) magnitudes[warp][pack + i] = largest[i];
        }
        __syncthreads();
        const int col = threadIdx.x / SETS, set = threadIdx.x % SETS;
        if (col < TILE_COLS) {
            float amax = 0.0f;
            #pragma unroll
            for (int w = 0; w < SET / ROWS_OF_WARP; ++w) amax = larger(amax, magnitudes[set * (SET / ROWS_OF_WARP) + w][col]);
            const Scale scale = scale_of(p, amax);
            reciprocals[set][col] = scale.reciprocal;
            if (col < cols && set * SET < rows)
                store_scale_at(p.scales_columnwise, p.scales_columnwise_stride, group_column(p) + col0 + col, row0 / SET + set, scale);
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < PACK; ++i) {
            const float reciprocal = reciprocals[first_row / SET][pack + i];
            #pragma unroll
            for (int r = 0; r < ROWS_OF_THREAD; r += 4) {
                const unsigned low = join_codes(values[r][i] * reciprocal, values[r + 1][i] * reciprocal);
                const unsigned high = join_codes(values[r + 2][i] * reciprocal, values[r + 3][i] * reciprocal);
                tile[place(pack + i, (first_row + r) / 4)] = low | high << 16;
            }
        }
        __syncthreads();
        // Eight threads store a column of the tile.
        const int strip = threadIdx.x % (TILE_ROWS / STRIP) * STRIP;
        #pragma unroll
        for (int c = threadIdx.x / (TILE_ROWS / STRIP); c < TILE_COLS; c += THREADS / (TILE_ROWS / STRIP)) {
            if (c >= cols) break;
            const uint4 strips = *reinterpret_cast<const uint4*>(&tile[place(c, strip / 4)]);
            const unsigned words[4] = {strips.x, strips.y, strips.z, strips.w};
            Code* to = p.codes_columnwise.data + (group_column(p) + col0 + c) * p.codes_columnwise.row_stride + row0 + strip;
            if (is_wide && strip + STRIP <= rows) {
                store<16>(to, words);
            } else {
                #pragma unroll
                for (int i = 0; i < STRIP; ++i)
                    if (strip + i < rows) store_byte(to + i, words[i / 4] >> (8 * (i % 4)));
            }
        }
        __syncthreads();
    }
}
